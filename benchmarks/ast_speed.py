"""How much faster conversations are played and learned from than in the plain way.

    python benchmarks/ast_speed.py --scenario pocket_chat --turn-tokens 16 --rounds 5
    python benchmarks/ast_speed.py --precision fp32 bf16 --plain-episodes 1 --memory

The plain way (`plain_ast.py`) and ours do the same work in turns: the same opening prompts, chat
formats, tree and turns of one length. Before anything is timed, loss and gradients of both are
compared on the same pairs. Prints Markdown with the ratios.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import torch
import transformers
import trl_online_dpo
from measuring import (
    Spent,
    forget_peak_memory,
    held_memory_bytes,
    in_turns,
    markdown_table,
    options_of,
    ratio,
    tell,
    wait_for_gpu,
)
from our_ast import (
    DTYPES,
    LARGEST_DEVIATION,
    OurAst,
    Setting,
    as_pairs,
    pairs_of_few_trees,
    update_deviation,
)
from plain_ast import PlainAst

from nip_astra.tracking.environment import describe_environment
from nip_astra.utils.processor import peak_memory_bytes

PLAIN = "plain"
PARTS = ("rollout", "update", "iteration")
Figures = dict[str, Any]
Runs = Mapping[str, Sequence[Mapping[str, Spent]]]
"""What each way took in each round, by part."""


class Contest:
    """Both ways, built for one setting; ours with an attacker in each precision.

    Attributes
    ----------
    plain_episodes : int
        Episodes that the plain way plays; the time of all follows from these, since it plays one
        after the other.
    more : str
        Further parameters of both, `name=value`.
    """

    def __init__(
        self,
        setting: Setting,
        precision: Sequence[str],
        plain_episodes: int | None = None,
        *more: str,
    ) -> None:
        resolved = setting.resolve("fp32", *more)
        self.setting, self.prompts = setting, setting.openings(resolved)
        self.plain_episodes = plain_episodes or setting.episodes
        self.plain = PlainAst(resolved, setting.device)
        self.ours = {
            name: OurAst(setting.resolve(name, *more), self.prompts, setting.device)
            for name in precision
        }

    def run(self, parts: Sequence[str], num_rounds: int) -> Figures:
        """Measure the parts: `rollout`, `update` on the same pairs, `iteration` of both."""
        deviation = {name: self._deviation(ours) for name, ours in self.ours.items()}
        found: list[Runs] = []
        if "update" in parts:
            found.append(self._updates(num_rounds))
        if "rollout" in parts or "iteration" in parts:
            found.append(self._iterations(num_rounds, learns="iteration" in parts))
        rows = [row for runs in found for row in rows_of(runs)]
        return {"deviation": deviation, "runs": found, "ratios": rows}

    def _deviation(self, ours: OurAst) -> Figures:
        """Compare loss and gradients; ours in less than float32 may differ, and says how far."""
        # The reference's log-probabilities are to come from the same way as the policy's.
        samples = pairs_of_few_trees(ours.play(0).samples, self.setting.pairs)
        deviation = update_deviation(ours, self.plain, samples)
        is_far = any(a > b for a, b in zip(deviation, LARGEST_DEVIATION, strict=True))
        if ours is self.ours.get("fp32") and is_far:
            raise SystemExit(
                f"the two ways should have the same loss and gradients in float32, but on "
                f"{len(samples)} pairs they differ by {deviation}, more than {LARGEST_DEVIATION}. "
                "One of them is wrong: nothing was timed."
            )
        return deviation._asdict()

    def _updates(self, num_rounds: int) -> Runs:
        first = next(iter(self.ours.values()))
        samples = pairs_of_few_trees(first.play(0).samples, self.setting.pairs)
        pairs, batch = as_pairs(samples), first.trainer.collate_fn(samples)

        def plainly() -> dict[str, Spent]:
            # The reference reads as much as the policy.
            return {"update": self._plain_spent(lambda: self.plain.learn(pairs))}

        ways: dict[str, Callable[[], dict[str, Spent]]] = {PLAIN: plainly}
        for name, ours in self.ours.items():
            ways[name] = lambda ours=ours: {"update": ours.step_through([batch])}
        # The first step makes room for the optimizer's moments, and is not timed.
        self.plain.step(pairs[0])
        for ours in self.ours.values():
            ours.step_through([batch])
        return in_turns(ways, num_rounds)

    def _iterations(self, num_rounds: int, *, learns: bool) -> Runs:
        """Rollouts, and updates on what they gave."""
        setting, prompts = self.setting, self.prompts[: self.plain_episodes]
        # Not the iteration of the warm-up: the scorer knows its texts.
        numbers = itertools.count(1)

        def plainly() -> dict[str, Spent]:
            trees: list[Any] = []
            play = partial(self.plain.play, prompts, width=setting.width, depth=setting.depth)
            spent = {"rollout": self._plain_spent(lambda: trees.extend(play()))}
            if learns:
                update = self._plain_spent(lambda: self.plain.learn(self.plain.pairs(trees)))
                spent["iteration"] = Spent(spent["rollout"].seconds + update.seconds)
            share = len(self.prompts) / len(prompts)
            return {part: one.scaled(share) for part, one in spent.items()}

        ways: dict[str, Callable[[], dict[str, Spent]]] = {PLAIN: plainly}
        for name, ours in self.ours.items():
            ways[name] = lambda ours=ours: ours.iterate(next(numbers), learns=learns)
        # The first of anything is slow, and is not timed.
        self.plain.play(prompts[:1], width=setting.width, depth=1)
        for ours in self.ours.values():
            ours.iterate(0, learns=learns)
        return in_turns(ways, num_rounds)

    def _plain_spent(self, function: Callable[[], object]) -> Spent:
        plain = self.plain
        models = (plain.attacker, plain.target, plain.reference)
        before, started = sum(model.num_forwarded for model in models), time.perf_counter()
        function()
        wait_for_gpu()
        seconds = time.perf_counter() - started
        return Spent(seconds, sum(model.num_forwarded for model in models) - before)


def rows_of(runs: Runs) -> list[Figures]:
    """A row for each part and precision: medians, and the median of the rounds' ratios."""
    rows = []
    for part, (precision, own) in itertools.product(runs[PLAIN][0], runs.items()):
        if precision == PLAIN:
            continue
        plain, ours = ([run[part] for run in of] for of in (runs[PLAIN], own))
        seconds = [[one.seconds for one in way] for way in (plain, ours)]
        slow, fast = map(statistics.median, seconds)
        row = {"part": part, "ours in": precision, "plain, s": slow, "ours, s": fast}
        row["ratio"] = ratio(*seconds)
        if unique := ours[-1].unique:
            # In an update of the plain way the reference reads what the policy reads.
            least = unique * (2 if part == "update" else 1)
            row["plain forwarded per unique"] = plain[-1].forwarded / least
            row["ours forwarded per unique"] = ours[-1].forwarded / unique
        rows.append(row)
    return rows


def _table(rows: Sequence[Figures]) -> str:
    header = list(dict.fromkeys(name for row in rows for name in row))
    return markdown_table(header, [[row.get(name) for name in header] for row in rows])


def memory_of(setting: Setting, way: str) -> Figures:
    """What one iteration takes at most in this process, by part; bytes.

    Only a process of its own says something: what was held before counts too.
    """
    resolved = setting.resolve("fp32" if way == PLAIN else way)
    prompts = setting.openings(resolved)
    if way == PLAIN:
        plain = PlainAst(resolved)
        play = partial(plain.play, prompts, width=setting.width, depth=setting.depth)
        learn: Callable[[Any], object] = lambda trees: plain.learn(plain.pairs(trees))  # noqa: E731
    else:
        ours = OurAst(resolved, prompts)
        play, learn = partial(ours.play, 0), lambda played: ours.learn(played.samples)
    loaded = held_memory_bytes()
    forget_peak_memory()
    played = play()
    playing_peak = peak_memory_bytes()
    learn(played)
    return {
        "way": way,
        "after_loading": loaded,
        "peak_of_rollout": playing_peak,
        "peak_of_iteration": peak_memory_bytes(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = options_of(
        __doc__,
        **{one.name: one.default for one in fields(Setting)},
        precision={"nargs": "+", "default": ["fp32"], "choices": list(DTYPES), "help": "of ours"},
        parts={"nargs": "*", "default": list(PARTS), "choices": PARTS},
        rounds={"type": int, "default": 3, "help": "timed runs of each way"},
        plain_episodes={"type": int, "help": "play fewer in the plain way, and scale its time"},
        memory={"action": "store_true", "help": "peak memory of both ways too"},
        trl={"action": "store_true", "help": "TRL's OnlineDPO beside ours"},
    ).parse_args(arguments)
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    setting = Setting(**{one.name: getattr(options, one.name) for one in fields(Setting)})
    torch.manual_seed(setting.seed)
    if setting.scenario == "pocket_chat":
        # Both ways the same threads; waking a second one costs more than a tiny model does.
        torch.set_num_threads(1)
    report: Figures = {"setting": asdict(setting), "environment": describe_environment()}
    shown = []
    if options.memory:
        # Each way in a process of its own, forked before anything is loaded.
        report["memory"] = []
        for way in (PLAIN, *options.precision):
            with multiprocessing.get_context("fork").Pool(1) as pool:
                report["memory"].append(pool.apply(memory_of, (setting, way)))
        shown += ["Memory of an iteration, bytes:", _table(report["memory"])]
    if options.parts:
        contest = Contest(setting, options.precision, options.plain_episodes)
        report |= contest.run(options.parts, options.rounds)
        shown.append(_table(report["ratios"]))
    if options.trl:
        rows = [trl_online_dpo.measure(setting, one, options.rounds) for one in options.precision]
        report["trl"] = rows
        shown += ["A step of TRL's OnlineDPO:", _table([row["shown"] for row in rows])]
    tell(report, options.out, shown="\n\n".join(shown))


if __name__ == "__main__":
    main()

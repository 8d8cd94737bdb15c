"""Speed of AST rollouts and updates compared with a baseline.

    python benchmarks/ast_speed.py --scenario pocket_chat --turn-tokens 16 --rounds 5
    python benchmarks/ast_speed.py --precision fp32 bf16 --plain-episodes 1 --memory

The baseline (`plain_ast.py`) and our implementation do the same work in interleaved rounds: the
same opening prompts, chat formats, tree shape and turn length. Before timing, their losses and
gradients are compared on the same pairs. Prints the ratios as Markdown.
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
    Cost,
    build_parser,
    interleaved,
    markdown_table,
    ratio,
    report_figures,
    reset_peak_memory,
    resident_memory_bytes,
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
Runs = Mapping[str, Sequence[Mapping[str, Cost]]]
"""Cost of each implementation in each round, by part."""


class Comparison:
    """Baseline and our implementation for one setting; ours with an attacker in each precision.

    Parameters
    ----------
    plain_episodes : int, optional
        Episodes of the baseline, which plays them sequentially; its time is scaled to all episodes.
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
        """Measure the parts: `rollout`, `update` on the same pairs, and `iteration` (both)."""
        deviation = {name: self._deviation(ours) for name, ours in self.ours.items()}
        runs: list[Runs] = []
        if "update" in parts:
            runs.append(self._updates(num_rounds))
        if "rollout" in parts or "iteration" in parts:
            runs.append(self._iterations(num_rounds, learns="iteration" in parts))
        rows = [row for measured in runs for row in ratio_rows(measured)]
        return {"deviation": deviation, "runs": runs, "ratios": rows}

    def _deviation(self, ours: OurAst) -> Figures:
        """Compare loss and gradients; below float32 the deviation is only reported."""
        # The reference's log-probabilities must come from the same implementation as the policy's.
        samples = pairs_of_few_trees(ours.play(0).samples, self.setting.pairs)
        deviation = update_deviation(ours, self.plain, samples)
        is_far = any(a > b for a, b in zip(deviation, LARGEST_DEVIATION, strict=True))
        if ours is self.ours.get("fp32") and is_far:
            raise SystemExit(
                f"baseline and ours differ on {len(samples)} pairs in float32 by {deviation}, more "
                f"than {LARGEST_DEVIATION}: one of them is wrong, nothing was timed"
            )
        return deviation._asdict()

    def _updates(self, num_rounds: int) -> Runs:
        first = next(iter(self.ours.values()))
        samples = pairs_of_few_trees(first.play(0).samples, self.setting.pairs)
        pairs, batch = as_pairs(samples), first.trainer.collate_fn(samples)

        def run_baseline() -> dict[str, Cost]:
            # Includes the reference, which reads as much as the policy.
            return {"update": self._plain_cost(lambda: self.plain.learn(pairs))}

        def run_ours(ours: OurAst) -> dict[str, Cost]:
            return {"update": ours.step_through([batch])}

        variants: dict[str, Callable[[], dict[str, Cost]]] = {PLAIN: run_baseline}
        for name, ours in self.ours.items():
            variants[name] = partial(run_ours, ours)
        # Untimed warm-up: the first step allocates the optimizer's moments.
        self.plain.step(pairs[0])
        for ours in self.ours.values():
            ours.step_through([batch])
        return interleaved(variants, num_rounds)

    def _iterations(self, num_rounds: int, *, learns: bool) -> Runs:
        """Rollouts, and updates on their samples."""
        setting, prompts = self.setting, self.prompts[: self.plain_episodes]
        # Iteration 0 is the warm-up, whose texts the scorer has cached.
        numbers = itertools.count(1)

        def run_baseline() -> dict[str, Cost]:
            trees: list[Any] = []
            play = partial(self.plain.play, prompts, width=setting.width, depth=setting.depth)
            cost = {"rollout": self._plain_cost(lambda: trees.extend(play()))}
            if learns:
                update = self._plain_cost(lambda: self.plain.learn(self.plain.pairs(trees)))
                cost["iteration"] = Cost(cost["rollout"].seconds + update.seconds)
            factor = len(self.prompts) / len(prompts)
            return {part: value.scaled(factor) for part, value in cost.items()}

        def run_ours(ours: OurAst) -> dict[str, Cost]:
            return ours.iterate(next(numbers), learns=learns)

        variants: dict[str, Callable[[], dict[str, Cost]]] = {PLAIN: run_baseline}
        for name, ours in self.ours.items():
            variants[name] = partial(run_ours, ours)
        # Untimed warm-up.
        self.plain.play(prompts[:1], width=setting.width, depth=1)
        for ours in self.ours.values():
            ours.iterate(0, learns=learns)
        return interleaved(variants, num_rounds)

    def _plain_cost(self, function: Callable[[], object]) -> Cost:
        plain = self.plain
        models = (plain.attacker, plain.target, plain.reference)
        before, started = sum(model.num_forwarded for model in models), time.perf_counter()
        function()
        wait_for_gpu()
        seconds = time.perf_counter() - started
        return Cost(seconds, sum(model.num_forwarded for model in models) - before)


def ratio_rows(runs: Runs) -> list[Figures]:
    """A row per part and precision: medians, and the median ratio over rounds."""
    rows = []
    for part, (precision, own) in itertools.product(runs[PLAIN][0], runs.items()):
        if precision == PLAIN:
            continue
        plain, ours = ([run[part] for run in rounds] for rounds in (runs[PLAIN], own))
        seconds = [[cost.seconds for cost in costs] for costs in (plain, ours)]
        slow, fast = map(statistics.median, seconds)
        row = {"part": part, "ours in": precision, "plain, s": slow, "ours, s": fast}
        row["ratio"] = ratio(*seconds)
        if unique := ours[-1].unique:
            # In an update of the baseline, the reference also reads all tokens of the policy.
            required = unique * (2 if part == "update" else 1)
            row["plain forwarded per unique"] = plain[-1].forwarded / required
            row["ours forwarded per unique"] = ours[-1].forwarded / unique
        rows.append(row)
    return rows


def _table(rows: Sequence[Figures]) -> str:
    header = list(dict.fromkeys(name for row in rows for name in row))
    return markdown_table(header, [[row.get(name) for name in header] for row in rows])


def measure_memory(setting: Setting, variant: str) -> Figures:
    """Peak memory of one iteration in this process, by part; bytes.

    Needs a fresh process, since memory held before counts too.
    """
    resolved = setting.resolve("fp32" if variant == PLAIN else variant)
    prompts = setting.openings(resolved)
    play: Callable[[], Any]
    learn: Callable[[Any], object]
    if variant == PLAIN:
        plain = PlainAst(resolved)
        play = partial(plain.play, prompts, width=setting.width, depth=setting.depth)
        learn = lambda trees: plain.learn(plain.pairs(trees))  # noqa: E731
    else:
        ours = OurAst(resolved, prompts)
        play, learn = partial(ours.play, 0), lambda rollout: ours.learn(rollout.samples)
    loaded = resident_memory_bytes()
    reset_peak_memory()
    rollout = play()
    rollout_peak = peak_memory_bytes()
    learn(rollout)
    return {
        "way": variant,
        "after_loading": loaded,
        "peak_of_rollout": rollout_peak,
        "peak_of_iteration": peak_memory_bytes(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the figures."""
    options = build_parser(
        __doc__,
        **{field.name: field.default for field in fields(Setting)},
        precision={
            "nargs": "+",
            "default": ["fp32"],
            "choices": list(DTYPES),
            "help": "precision of our attacker",
        },
        parts={"nargs": "*", "default": list(PARTS), "choices": PARTS},
        rounds={"type": int, "default": 3, "help": "timed runs of each implementation"},
        plain_episodes={"type": int, "help": "play fewer in the baseline and scale its time"},
        memory={"action": "store_true", "help": "also measure peak memory"},
        trl={"action": "store_true", "help": "also time TRL's OnlineDPO"},
    ).parse_args(arguments)
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    setting = Setting(**{field.name: getattr(options, field.name) for field in fields(Setting)})
    torch.manual_seed(setting.seed)
    if setting.scenario == "pocket_chat":
        # One thread for both: waking a second thread costs more than a tiny model's work.
        torch.set_num_threads(1)
    report: Figures = {"setting": asdict(setting), "environment": describe_environment()}
    shown = []
    if options.memory:
        # A fresh process each, forked before anything is loaded.
        report["memory"] = []
        for variant in (PLAIN, *options.precision):
            with multiprocessing.get_context("fork").Pool(1) as pool:
                report["memory"].append(pool.apply(measure_memory, (setting, variant)))
        shown += ["Memory of an iteration, bytes:", _table(report["memory"])]
    if options.parts:
        contest = Comparison(setting, options.precision, options.plain_episodes)
        report |= contest.run(options.parts, options.rounds)
        shown.append(_table(report["ratios"]))
    if options.trl:
        rows = [
            trl_online_dpo.measure(setting, precision, options.rounds)
            for precision in options.precision
        ]
        report["trl"] = rows
        shown += ["A step of TRL's OnlineDPO:", _table([row["shown"] for row in rows])]
    report_figures(report, options.out, shown="\n\n".join(shown))


if __name__ == "__main__":
    main()

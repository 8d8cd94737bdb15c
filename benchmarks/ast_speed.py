"""How much faster conversations are played and learned from than in the plain way.

    python benchmarks/ast_speed.py --model tiny --parts rollout update iteration
    python benchmarks/ast_speed.py --model smollm2 --precision fp32 bf16 --memory

The plain way (`plain_ast.py`) and ours do the same work in turns: the same opening prompts, chat
formats, tree and turns of one length. Before updates are timed, loss and gradients of both are
compared on the same pairs. Prints Markdown with the ratios.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers
import trl_online_dpo
from ast_work import (
    Files,
    Setting,
    build_plain,
    unique_pair_tokens,
    unique_rollout_tokens,
    write_scenario,
)
from measuring import (
    forget_peak_memory,
    held_memory_bytes,
    markdown_table,
    median_by_name,
    options_of,
    shown_command,
    tell,
)
from our_ast import (
    DTYPES,
    LARGEST_DEVIATION,
    OurAst,
    as_pairs,
    samples_of_few_trees,
    update_deviation,
)
from plain_ast import PlainAst

from nip_astra.tracking.environment import describe_environment
from nip_astra.utils.processor import peak_memory_bytes

PLAIN = "plain"
PARTS = ("rollout", "update", "iteration")
NUM_CORES = torch.get_num_threads()
Figures = dict[str, Any]


@contextmanager
def on_disk(setting: Setting) -> Iterator[Files]:
    """Write a setting into a folder that goes away."""
    with tempfile.TemporaryDirectory() as root:
        yield write_scenario(setting, Path(root))


@dataclass
class Contest:
    """Both ways, built for one setting.

    Attributes
    ----------
    overrides : Sequence[str]
        Of ours, whose attacker computes in each of `precision`.
    repeats, plain_repeats : int
        Timed runs of each of ours and of the plain way; the ways take turns.
    plain_episodes : int or None
        Episodes that the plain way plays; the time of all follows from these, since it plays one
        after the other. None plays all.
    """

    setting: Setting
    files: Files
    precision: Sequence[str] = ("fp32",)
    overrides: Sequence[str] = ()
    repeats: int = 5
    plain_repeats: int = 1
    plain_episodes: int | None = None
    plain: PlainAst = field(init=False)
    ours: dict[str, OurAst] = field(init=False)

    def __post_init__(self) -> None:
        self.plain = build_plain(self.setting, self.files)
        self.ours = {
            name: OurAst(self.setting, self.files, name, self.overrides) for name in self.precision
        }

    def run(self, parts: Sequence[str]) -> Figures:
        """Measure the parts: `rollout`, `update` on the same pairs, `iteration` of both."""
        found: Figures = {}
        if "update" in parts:
            found["deviation"] = self._check()
            found["update"] = self._updates()
        if "rollout" in parts or "iteration" in parts:
            found |= self._iterations(with_updates="iteration" in parts)
        return found

    def _check(self) -> Figures:
        """Compare loss and gradients; ours in less than float32 may differ, and says how far."""
        found = {}
        for name, ours in self.ours.items():
            # The reference's log-probabilities are to come from the same way as the policy's.
            samples = samples_of_few_trees(ours.play(0), self.setting.pairs)
            deviation = update_deviation(ours, self.plain, samples)
            found[name] = deviation._asdict()
            is_far = any(a > b for a, b in zip(deviation, LARGEST_DEVIATION, strict=True))
            if name == "fp32" and is_far:
                raise SystemExit(
                    f"the two ways should have the same loss and gradients in float32, but on "
                    f"{len(samples)} pairs they differ by {deviation}, more than "
                    f"{LARGEST_DEVIATION}. One of them is wrong: nothing was timed."
                )
        return found

    def _updates(self) -> Figures:
        first = next(iter(self.ours.values()))
        samples = samples_of_few_trees(first.play(0), self.setting.pairs)
        pairs, batch = as_pairs(samples), first.trainer.collate_fn(samples)
        # The first step makes room for the optimizer's moments, and is not timed.
        self.plain.step(pairs[0])
        for ours in self.ours.values():
            ours.step_through([batch])
        figures = self._take_turns(
            lambda _: self.plain.learn(pairs), lambda ours, _: ours.step_through([batch])
        )
        unique = unique_pair_tokens(pairs)
        for name, values in figures.items():
            roles = ("attacker", "reference") if name == PLAIN else ("attacker",)
            _tell_work(values, "update", dict.fromkeys(roles, unique), len(pairs))
        return figures

    def _iterations(self, *, with_updates: bool) -> Figures:
        """Time rollouts and the updates on what they gave; two parts of the same runs."""
        setting, prompts = self.setting, self.files.prompts[: self.plain_episodes]
        forwarded: dict[str, dict[str, int]] = {}

        def run_plainly(_: int) -> None:
            trees = self.plain.play(prompts, width=setting.width, depth=setting.depth)
            forwarded[PLAIN] = self.plain.forwarded()
            if with_updates:
                self.plain.learn(self.plain.pairs(trees))

        def run(ours: OurAst, number: int) -> None:
            # Not the iteration of the warm-up: the scorer knows its texts.
            samples = ours.play(number + 1).samples
            forwarded[ours.precision] = ours.forwarded()
            if with_updates:
                ours.learn(samples, number + 1)

        # The first of anything is slow, and is not timed.
        self.plain.play(prompts[:1], width=setting.width, depth=1)
        for ours in self.ours.values():
            samples = ours.play(0).samples[: setting.pairs]
            if with_updates:
                ours.learn(samples, 0)
        figures = self._take_turns(run_plainly, run)
        unique = unique_rollout_tokens(setting, self.files)
        for name, values in figures.items():
            values["forwarded"] = _difference(forwarded[name], values["before"])
            if name == PLAIN and len(prompts) < len(self.files.prompts):
                _scale(values, len(self.files.prompts) / len(prompts))
            roles = ("attacker", "target") if name == PLAIN else tuple(unique)
            own = {role: unique[role] for role in roles}
            _tell_work(values, "rollout", own, setting.num_generated_tokens)
        return {"iteration" if with_updates else "rollout": figures}

    def _take_turns(
        self, plainly: Callable[[int], Any], run: Callable[[OurAst, int], Any]
    ) -> Figures:
        """Run the ways in turn; each one's median seconds by phase, and its last run's work."""
        runs: dict[str, Callable[[int], Any]] = {PLAIN: plainly}
        for name, ours in self.ours.items():
            runs[name] = lambda number, ours=ours: run(ours, number)
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        figures: Figures = {name: {} for name in runs}
        for name in turns(list(self.ours), self.repeats, self.plain_repeats):
            way = self.plain if name == PLAIN else self.ours[name]
            way.watch.seconds.clear()
            before = way.forwarded()
            runs[name](len(seconds[name]))
            seconds[name].append(dict(way.watch.seconds))
            done = _difference(way.forwarded(), before)
            figures[name] = {"before": before, "forwarded": done, "is_scaled": False}
        for name, measured in seconds.items():
            figures[name] |= {"phases": median_by_name(measured), "runs": measured}
        return figures


def turns(variants: Sequence[str], repeats: int, plain_repeats: int) -> Iterator[str]:
    """Who is timed next, as often as said."""
    for number in range(max(repeats, plain_repeats)):
        if number < plain_repeats:
            yield PLAIN
        if number < repeats:
            yield from variants


def _difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {role: count - before[role] for role, count in after.items()}


def _scale(values: Figures, share: float) -> None:
    """Make what some episodes took what all take."""
    for name in ("phases", "forwarded"):
        values[name] = {part: share * value for part, value in values[name].items()}
    values["is_scaled"] = True


def _tell_work(values: Figures, part: str, unique: Mapping[str, int], num_units: int) -> None:
    """Rates and the work done, by what must be done."""
    del values["before"]
    forwarded = sum(values["forwarded"][role] for role in unique)
    values["forwarded_per_unique"] = forwarded / sum(unique.values())
    values["per_second"] = num_units / values["phases"][part]


# ---- ratios


def ratios(parts: Figures) -> list[Figures]:
    """A row for each part and precision of what was measured."""
    rows = []
    for part in PARTS:
        # A whole iteration begins with a rollout.
        measured = parts.get(part) or (parts.get("iteration") if part == "rollout" else None) or {}
        for precision, ours in measured.items():
            if precision == PLAIN:
                continue
            plain = measured[PLAIN]
            slow, fast = _seconds_of(plain, part), _seconds_of(ours, part)
            row = {
                "part": part,
                "ours in": precision,
                "plain, s": slow,
                "ours, s": fast,
                "ratio": slow / fast,
                "is scaled": "scaled" if plain["is_scaled"] else "",
            }
            if part != "iteration":
                for name in ("per_second", "forwarded_per_unique"):
                    shown = name.replace("_", " ")
                    row |= {f"plain {shown}": plain[name], f"ours {shown}": ours[name]}
            rows.append(row)
    return rows


def _seconds_of(figures: Figures, part: str) -> float:
    """The seconds of a part; an iteration is its rollout and its updates."""
    phases: dict[str, float] = figures["phases"]
    return phases["rollout"] + phases["update"] if part == "iteration" else phases[part]


def _table(rows: Sequence[Figures]) -> str:
    header = list(dict.fromkeys(name for row in rows for name in row))
    return markdown_table(header, [[row.get(name) for name in header] for row in rows])


# ---- memory


def memory_of(setting: Setting, way: str, overrides: Sequence[str]) -> Figures:
    """What one iteration takes at most in this process, by part; bytes.

    Only a process of its own says something: what was held before counts too.
    """
    with on_disk(setting) as files:
        ours = None if way == PLAIN else OurAst(setting, files, way, overrides)
        plain = build_plain(setting, files) if ours is None else None
        loaded, loading_peak = held_memory_bytes(), peak_memory_bytes()
        forget_peak_memory()
        if ours is not None:
            samples = ours.play(0).samples
            playing_peak = peak_memory_bytes()
            ours.learn(samples, 0)
        elif plain is not None:
            trees = plain.play(files.prompts, width=setting.width, depth=setting.depth)
            playing_peak = peak_memory_bytes()
            plain.learn(plain.pairs(trees))
    peak = peak_memory_bytes()
    return {
        "after_loading": loaded,
        "peak_of_rollout": playing_peak,
        "peak_of_iteration": peak,
        "peak": max(loading_peak, peak),
        "peak_on_device": torch.cuda.max_memory_allocated() if setting.device == "cuda" else None,
    }


def measure_memory(setting: Setting, options: argparse.Namespace) -> list[Figures]:
    """Let each way run one iteration in a process of its own, forked before anything is loaded."""
    rows = []
    for way in (PLAIN, *options.precision):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found = pool.apply(memory_of, (setting, way, options.override))
        rows.append({"way": way, **found})
    return rows


# ---- options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = _parser().parse_args(arguments)
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    names = {one.name for one in fields(Setting)} & set(vars(options))
    setting = Setting(**{name: getattr(options, name) for name in names})
    torch.manual_seed(setting.seed)
    # Both ways the same threads; waking a second one costs more than a tiny model does.
    torch.set_num_threads(options.threads or (1 if setting.model == "tiny" else NUM_CORES))
    memory = measure_memory(setting, options) if options.memory else []
    command, environment = shown_command("ast_speed.py", arguments), describe_environment()
    shown = [f"`{command}` on {environment['machine']}: {setting.label}."]
    report: Figures = {"command": command, "environment": environment, "setting": asdict(setting)}
    report["memory"] = memory
    if parts := [part for part in options.parts if part != "none"]:
        given = ("precision", "repeats", "plain_repeats", "plain_episodes")
        effort = {name: getattr(options, name) for name in given}
        with on_disk(setting) as files:
            contest = Contest(setting, files, overrides=options.override, **effort)
            report["parts"] = contest.run(parts)
        report["ratios"] = ratios(report["parts"])
        shown.append(_table(report["ratios"]))
    if memory:
        shown += ["Memory of an iteration, bytes:", _table(memory)]
    if options.trl:
        rows = [trl_online_dpo.measure(setting, one, options.repeats) for one in options.precision]
        report["trl"] = rows
        shown += ["A step of TRL's OnlineDPO:", _table([row["shown"] for row in rows])]
    tell(report, options.out, shown="\n\n".join(shown))


def _parser() -> argparse.ArgumentParser:
    return options_of(
        __doc__,
        model={"default": "tiny", "help": "tiny, smollm2, or a model's path"},
        width=2,
        depth=3,
        episodes=2,
        context=64,
        turn_tokens=32,
        mode={"default": "lora", "choices": ["lora", "full"], "help": "what learns"},
        pairs={"type": int, "default": 4, "help": "pairs in one step of ours"},
        device={"default": "cpu", "choices": ["cpu", "cuda"]},
        threads={"type": int, "help": "CPU threads; 1 for tiny, else all cores"},
        seed=0,
        precision={"nargs": "+", "default": ["fp32"], "choices": list(DTYPES), "help": "of ours"},
        override={"nargs": "*", "default": [], "metavar": "KEY=VALUE", "help": "of ours"},
        parts={"nargs": "+", "default": list(PARTS), "choices": [*PARTS, "none"]},
        repeats={"type": int, "default": 5, "help": "timed runs of ours"},
        plain_repeats={"type": int, "default": 1, "help": "of the plain way"},
        plain_episodes={"type": int, "help": "play fewer, and scale its time"},
        memory={"action": "store_true", "help": "peak memory of both ways too"},
        trl={"action": "store_true", "help": "TRL's OnlineDPO beside ours"},
    )


if __name__ == "__main__":
    main()

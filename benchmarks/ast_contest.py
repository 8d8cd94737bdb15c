"""The plain way and ours do the same work in turns, and are timed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
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
    median_by_name,
    undisturbed,
)
from our_ast import (
    LARGEST_DEVIATION,
    OurAst,
    as_pairs,
    samples_of_few_trees,
    update_deviation,
)
from plain_ast import PlainAst

from nip_astra.rollouts.samples import Sample
from nip_astra.utils.processor import peak_memory_bytes

PLAIN = "plain"
PARTS = ("rollout", "update", "iteration")
Figures = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How often each way is timed.

    Attributes
    ----------
    repeats, plain_repeats : int
        Timed runs of ours and of the plain way.
    plain_episodes : int or None
        Episodes that the plain way plays; the time of all follows from these, since it plays one
        after the other. None plays all.
    """

    repeats: int = 5
    plain_repeats: int = 1
    plain_episodes: int | None = None

    def turns(self, variants: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Who is timed next and for the how-many-th time; the ways take turns."""
        rounds = max(self.repeats, self.plain_repeats)
        for number in range(rounds):
            plain_before = -(-number * self.plain_repeats // rounds)
            if plain_before < -(-(number + 1) * self.plain_repeats // rounds):
                yield PLAIN, plain_before
            if number < self.repeats:
                for variant in variants:
                    yield variant, number


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
    variants : Mapping[str, Sequence[str]]
        Overrides of ours, by name; several may take part.
    """

    setting: Setting
    files: Files
    effort: Effort
    variants: Mapping[str, Sequence[str]]
    plain: PlainAst = field(init=False)
    ours: dict[str, OurAst] = field(init=False)

    def __post_init__(self) -> None:
        self.plain = build_plain(self.setting, self.files)
        self.ours = {
            name: OurAst(self.setting, self.files, overrides)
            for name, overrides in self.variants.items()
        }

    @property
    def plain_prompts(self) -> list[str]:
        """What the plain way plays."""
        return self.files.prompts[: self.effort.plain_episodes]

    def run(self, parts: Sequence[str]) -> Figures:
        """Measure the parts: `rollout`, `update` on the same pairs, `iteration` of both."""
        first = next(iter(self.ours.values()))
        samples = samples_of_few_trees(first.play(0), self.setting.num_pairs)
        found: Figures = {}
        if "update" in parts:
            found["deviation"] = self._check()
            found["update"] = self._updates(samples)
        if "rollout" in parts or "iteration" in parts:
            found |= self._iterations(with_updates="iteration" in parts)
        return found

    # ---- updates

    def _check(self) -> Figures:
        """Compare loss and gradients; ours in less than float32 may differ, and says how far."""
        found = {}
        for name, ours in self.ours.items():
            # The reference's log-probabilities are to come from the same way as the policy's.
            samples = samples_of_few_trees(ours.play(0), self.setting.num_pairs)
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

    def _updates(self, samples: Sequence[Sample]) -> Figures:
        pairs = as_pairs(samples)
        batch = next(iter(self.ours.values())).trainer.collate_fn(samples)

        def learn(ours: OurAst) -> Callable[[int], Figures]:
            def step(_: int) -> Figures:
                ours.step_through([batch])
                return {"num_pairs": len(pairs)}

            return step

        def learn_plainly(_: int) -> Figures:
            return {"num_pairs": self.plain.learn(pairs)}

        # The first step makes room for the optimizer's moments, and is not timed.
        self.plain.step(pairs[0])
        for ours in self.ours.values():
            ours.step_through([batch])
        runs = {PLAIN: learn_plainly, **{name: learn(ours) for name, ours in self.ours.items()}}
        figures = self._take_turns(runs)
        unique = unique_pair_tokens(pairs)
        for name, values in figures.items():
            roles = ("attacker", "reference") if name == PLAIN else ("attacker",)
            values["unique"] = dict.fromkeys(roles, unique)
        return figures

    # ---- rollouts and whole iterations

    def _iterations(self, *, with_updates: bool) -> Figures:
        """Time rollouts and the updates on what they gave; two parts of the same runs."""
        setting = self.setting

        def run_plainly(_: int) -> Figures:
            trees = self.plain.play(self.plain_prompts, width=setting.width, depth=setting.depth)
            played = self.plain.work()
            num_pairs = self.plain.learn(self.plain.pairs(trees)) if with_updates else 0
            return {"played": played, "num_pairs": num_pairs, "num_steps": num_pairs}

        def run(ours: OurAst) -> Callable[[int], Figures]:
            def iterate(number: int) -> Figures:
                # Not the iteration of the warm-up: the scorer knows its texts.
                samples = ours.play(number + 1).samples
                played = ours.work()
                num_steps = ours.learn(samples, number + 1) if with_updates else 0
                return {"played": played, "num_pairs": len(samples), "num_steps": num_steps}

            return iterate

        # The first of anything is slow, and is not timed.
        self.plain.play(self.plain_prompts[:1], width=setting.width, depth=1)
        for ours in self.ours.values():
            samples = ours.play(0).samples[: setting.num_pairs]
            if with_updates:
                ours.learn(samples, 0)
        runs = {PLAIN: run_plainly, **{name: run(ours) for name, ours in self.ours.items()}}
        figures = self._take_turns(runs)
        share = len(self.files.prompts) / len(self.plain_prompts)
        if share != 1.0:
            figures[PLAIN] = _scaled(figures[PLAIN], share)
        unique = unique_rollout_tokens(setting, self.files)
        for name, values in figures.items():
            roles = ("attacker", "target") if name == PLAIN else tuple(unique)
            values["unique"] = {role: unique[role] for role in roles}
        return {"iteration" if with_updates else "rollout": figures}

    # ---- timing

    def _take_turns(self, runs: Mapping[str, Callable[[int], Figures]]) -> Figures:
        """Run the ways in turn, and give each one's median seconds by phase, and its work.

        `work` is that of the last run, of its rollout alone where it had one.
        """
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        num_held_up = dict.fromkeys(runs, 0)
        figures: Figures = {name: {} for name in runs}
        for name, number in self.effort.turns(list(self.ours)):
            way = self.plain if name == PLAIN else self.ours[name]
            run = partial(_counted, way, partial(runs[name], number))
            figures[name], again = undisturbed(run, self.setting.device)
            seconds[name].append(dict(way.watch.seconds))
            num_held_up[name] += again
        for name, measured in seconds.items():
            figures[name] |= {
                "phases": median_by_name(measured),
                "runs": measured,
                "num_held_up": num_held_up[name],
                "is_scaled": False,
            }
        return figures


def _counted(way: PlainAst | OurAst, run: Callable[[], Figures]) -> Figures:
    """Run with a clock at 0 and give the work with what the run gave."""
    way.watch.seconds.clear()
    before = way.work()
    found = run()
    after, played = way.work(), found.pop("played", None)
    found["work"] = _difference(played or after, before)
    if played is not None:
        found["work_of_updates"] = _difference(after, played)
    return found


def _difference(
    after: dict[str, dict[str, int]], before: dict[str, dict[str, int]]
) -> dict[str, dict[str, int]]:
    return {
        role: {name: value - before[role][name] for name, value in counts.items()}
        for role, counts in after.items()
    }


def _scaled(figures: Figures, share: float) -> Figures:
    """What all episodes take where some were played."""
    scaled = figures | {
        "phases": {name: value * share for name, value in figures["phases"].items()},
        "is_scaled": True,
    }
    for name in ("work", "work_of_updates"):
        scaled[name] = {
            role: {what: round(value * share) for what, value in counts.items()}
            for role, counts in figures[name].items()
        }
    return scaled | {name: round(figures[name] * share) for name in ("num_pairs", "num_steps")}


def measure(
    setting: Setting, variants: Mapping[str, Sequence[str]], effort: Effort, parts: Sequence[str]
) -> Figures:
    """Measure one setting."""
    with on_disk(setting) as files:
        found = Contest(setting, files, effort, variants).run(parts)
    facts = asdict(setting) | {
        "model": setting.model_name,
        "num_threads": torch.get_num_threads(),
        "num_nodes": setting.num_nodes,
        "num_generated_tokens": setting.num_generated_tokens,
    }
    return {"label": setting.label, "setting": facts, "parts": found}


# ---- memory


def measure_memory(setting: Setting, who: str, overrides: Sequence[str]) -> Figures:
    """What one iteration takes at most in this process, by part; bytes.

    Only a process of its own says something: what was held before counts too.
    """
    before = held_memory_bytes()
    with on_disk(setting) as files:
        if who == PLAIN:
            plain = build_plain(setting, files)
        else:
            ours = OurAst(setting, files, overrides)
        loaded, loading_peak = held_memory_bytes(), peak_memory_bytes()
        forget_peak_memory()
        if who == PLAIN:
            trees = plain.play(files.prompts, width=setting.width, depth=setting.depth)
            playing_peak = peak_memory_bytes()
            plain.learn(plain.pairs(trees))
        else:
            samples = ours.play(0).samples
            playing_peak = peak_memory_bytes()
            ours.learn(samples, 0)
    peak = peak_memory_bytes()
    on_device = torch.cuda.max_memory_allocated() if setting.device == "cuda" else None
    return {
        "before_loading": before,
        "after_loading": loaded,
        "peak_while_loading": loading_peak,
        "peak_of_rollout": playing_peak,
        "peak_of_iteration": peak,
        "peak": max(loading_peak, peak),
        "peak_on_device": on_device,
    }

"""How long does a rollout take on actors of Ray, beside forked workers and one process?

    python benchmarks/ray_rollouts.py --episodes 256 --rounds 5 --out ray_rollouts.json

Trees of pocket_chat, the same ones each time: by this process alone, by two forked workers, by one
actor and by two. Beside them, two processes that play half of the episodes each and exchange
nothing: no way of dividing a rollout between two can be faster on this machine, now. The scorer
rates all texts each time, as it does in training, where they are new.

The ways take turns within each round, and ratios are medians over rounds of times of one round.
Where other work keeps the cores busy, seconds say little; so the seconds of processor that the
longest chain of work took are told too: this process', and those of the busiest other one that it
waits for. Starting Ray and its actors, and sending the models, is told apart. Every way's trees are
compared with those of this process, number by number.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from measuring import in_turns, markdown_table, options_of, ratio, tell

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.run import prepare_experiment
from nip_astra.utils import actors
from nip_astra.utils.actors import ActorOptions, Actors, using_actors
from nip_astra.utils.forked import call_at_once, using_processes

Play = Callable[[], RolloutTree]
ALONE, FORKED, FLOOR = "one process", "two forked workers", "two halves side by side"
RATIOS = {
    "two_actors_over_one": ("two actors", "one actor"),
    "two_actors_over_forked": ("two actors", FORKED),
    "forked_over_one_process": (FORKED, ALONE),
    "side_by_side_over_one_process": (FLOOR, ALONE),
}
"""Whose time is divided by whose."""


class Way(NamedTuple):
    """A way to play: what it gives, and the seconds of processor of the other processes."""

    play: Callable[[], RolloutTree | None]
    others: Callable[[], list[float]] = list


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print a table and write JSON."""
    options = options_of(__doc__, episodes=256, rounds=5, parts=2).parse_args(given)
    figures = measure(options.episodes, options.rounds, options.parts)
    tell(figures, options.out, shown=table(figures))


def measure(num_episodes: int, num_rounds: int, num_parts: int) -> dict[str, Any]:
    """Seconds of each way in each round, and what starting took."""
    trainer = _trainer(num_episodes, num_parts)
    halves = [_trainer(num_episodes // 2, max(num_parts // 2, 1)) for _ in range(2)]
    torch.set_num_threads(1)

    def play() -> RolloutTree:
        return trainer.rollouts.play(0)

    def forget() -> None:
        for one in (trainer, *halves):
            one.sampler.scorer._verdicts.clear()

    expected = play()
    started: dict[str, float] = {}
    loads: list[float] = []
    with ExitStack() as stack:
        ways = {
            ALONE: Way(play),
            FORKED: Way(partial(_forked, play)),
            FLOOR: Way(partial(_side_by_side, halves)),
        }
        for name, count in (("one actor", 1), ("two actors", 2)):
            forget()
            began = time.perf_counter()
            opened = Actors(ActorOptions(count, num_cpus=0.5))
            stack.callback(opened.close)
            ways[name] = Way(partial(_on, opened, play), partial(_seconds_of, opened))
            check(ways[name].play(), expected)
            started[name] = time.perf_counter() - began

        def timed(way: Way) -> tuple[float, float]:
            forget()
            loads.append(os.getloadavg()[0])
            before, own, began = way.others(), time.process_time(), time.perf_counter()
            tree = way.play()
            spent = time.perf_counter() - began
            more = [b - a for a, b in zip(before, way.others(), strict=True)]
            chain = time.process_time() - own + max(more, default=0.0)
            check(tree, expected)
            return spent, chain

        found = in_turns({name: partial(timed, way) for name, way in ways.items()}, num_rounds)
    seconds = {name: [one for one, _ in times] for name, times in found.items()}
    busy = {name: [one for _, one in times] for name, times in found.items()}
    return {
        "num_episodes": num_episodes,
        "num_parts": num_parts,
        "load_average": loads,
        "seconds": seconds,
        "processor_seconds": busy,
        "seconds_to_start": started,
        **{name: ratio(seconds[a], seconds[b]) for name, (a, b) in RATIOS.items()},
        "of_processor_seconds": {name: ratio(busy[a], busy[b]) for name, (a, b) in RATIOS.items()},
    }


def check(tree: RolloutTree | None, expected: RolloutTree) -> None:
    """Refuse another tree."""
    if tree is None:
        return
    assert (tree.probes, tree.responses) == (expected.probes, expected.responses)
    for name, values in expected.nodes.items():
        assert torch.equal(tree.nodes[name], values), name


def table(figures: dict[str, Any]) -> str:
    """The figures in Markdown."""
    rows = [
        [
            name,
            statistics.median(times),
            min(times),
            statistics.median(figures["processor_seconds"][name]),
            figures["seconds_to_start"].get(name),
        ]
        for name, times in figures["seconds"].items()
    ]
    header = ["way", "median, s", "least, s", "of processor, s", "to start, s"]
    lines = [markdown_table(header, rows)]
    loads = figures["load_average"]
    lines.append(f"load average: {min(loads):.1f} to {max(loads):.1f}")
    busy = figures["of_processor_seconds"]
    lines += [f"{name}: {figures[name]:.2f}, of processor {busy[name]:.2f}" for name in RATIOS]
    return "\n".join(lines)


def _trainer(num_episodes: int, num_parts: int) -> Any:
    overrides = [
        f"training.num_episodes_per_experience={num_episodes}",
        f"ast_chat.num_rollout_parts={num_parts}",
    ]
    resolved = resolve_experiment(trainer="ast_dpo", scenario="pocket_chat", overrides=overrides)
    return prepare_experiment(resolved, progress=False).trainer


def _forked(play: Play) -> RolloutTree:
    with using_processes(2):
        return play()


def _side_by_side(halves: Sequence[Any]) -> None:
    call_at_once([partial(_play_alone, half, index) for index, half in enumerate(halves)])


def _play_alone(trainer: Any, index: int) -> None:
    # Iteration k of half as many episodes opens with the prompts of half k of iteration 0.
    trainer.rollouts.play(index)


def _on(opened: Actors, play: Play) -> RolloutTree:
    """Play on actors that stay open between rounds."""
    with using_actors(ActorOptions(1)):
        actors._open = opened
        try:
            return play()
        finally:
            actors._open = None


def _seconds_of(opened: Actors) -> list[float]:
    """The seconds of processor that each actor has taken."""
    call = opened._sender.written(time.process_time)
    asked = [actor.make.remote([], {}, call, False) for actor in opened._actors]
    return opened._ray.get(asked)


if __name__ == "__main__":
    main()

"""How long does a rollout take on actors of Ray, beside forked workers and one process?

    python benchmarks/ray_rollouts.py --episodes 256 --rounds 5 --out ray_rollouts.json

Trees of pocket_chat, the same ones each time: by this process alone, by two forked workers, by one
actor and by two. The ways take turns within each round, and ratios are medians over rounds of
times of one round. Starting Ray and its actors, and sending the models, is told apart. Every way's
trees are compared with those of this process, number by number.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from measuring import in_turns, markdown_table, options_of, ratio, seconds_of, tell

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.run import prepare_experiment
from nip_astra.utils import actors
from nip_astra.utils.actors import ActorOptions, Actors, using_actors
from nip_astra.utils.forked import using_processes

Way = Callable[[], RolloutTree]


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print a table and write JSON."""
    options = options_of(__doc__, episodes=256, rounds=5, parts=2).parse_args(given)
    figures = measure(options.episodes, options.rounds, options.parts)
    rows = [
        [name, statistics.median(times), min(times), figures["seconds_to_start"].get(name)]
        for name, times in figures["seconds"].items()
    ]
    shown = markdown_table(["way", "median, s", "least, s", "to start, s"], rows)
    lines = [f"{name}: {value:.2f}" for name, value in figures.items() if "_over_" in name]
    tell(figures, options.out, shown="\n".join([shown, *lines]))


def measure(num_episodes: int, num_rounds: int, num_parts: int) -> dict[str, Any]:
    """Seconds of each way in each round, and what starting took."""
    overrides = [
        f"training.num_episodes_per_experience={num_episodes}",
        f"ast_chat.num_rollout_parts={num_parts}",
    ]
    resolved = resolve_experiment(trainer="ast_dpo", scenario="pocket_chat", overrides=overrides)
    trainer: Any = prepare_experiment(resolved, progress=False).trainer
    torch.set_num_threads(1)

    def play() -> RolloutTree:
        return trainer.rollouts.play(0)

    expected = play()
    started: dict[str, float] = {}
    with ExitStack() as stack:
        ways: dict[str, Way] = {"one process": play, "two forked workers": lambda: _forked(play)}
        for name, count in (("one actor", 1), ("two actors", 2)):
            began = time.perf_counter()
            opened = Actors(ActorOptions(count, num_cpus=0.5))
            stack.callback(opened.close)
            ways[name] = lambda opened=opened: _on(opened, play)
            check(ways[name](), expected)
            started[name] = time.perf_counter() - began
        timed = {name: partial(_timed, way, expected) for name, way in ways.items()}
        seconds = in_turns(timed, num_rounds)
    return {
        "num_episodes": num_episodes,
        "num_parts": num_parts,
        "seconds": seconds,
        "seconds_to_start": started,
        "two_actors_over_one": ratio(seconds["two actors"], seconds["one actor"]),
        "two_actors_over_forked": ratio(seconds["two actors"], seconds["two forked workers"]),
        "forked_over_one_process": ratio(seconds["two forked workers"], seconds["one process"]),
    }


def _timed(way: Way, expected: RolloutTree) -> float:
    trees: list[RolloutTree] = []
    seconds = seconds_of(lambda: trees.append(way()))
    check(trees[0], expected)
    return seconds


def check(tree: RolloutTree, expected: RolloutTree) -> None:
    """Refuse another tree."""
    assert (tree.probes, tree.responses) == (expected.probes, expected.responses)
    for name, values in expected.nodes.items():
        assert torch.equal(tree.nodes[name], values), name


def _forked(play: Way) -> RolloutTree:
    with using_processes(2):
        return play()


def _on(opened: Actors, play: Way) -> RolloutTree:
    """Play on actors that stay open between rounds."""
    with using_actors(ActorOptions(1)):
        actors._open = opened
        try:
            return play()
        finally:
            actors._open = None


if __name__ == "__main__":
    main()

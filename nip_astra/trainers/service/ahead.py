"""Playing ahead: rollouts of later iterations are played while an earlier one is learnt from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nip_astra.language_models.base import LanguageModel
from nip_astra.rollouts.trajectory import Trajectory

Rows = list[list[Any]]


@dataclass(frozen=True)
class Played:
    """What an iteration's problems gave.

    Attributes
    ----------
    trajectories : list of Trajectory
        What is learnt from.
    metrics : dict[str, float]
        What is logged of it.
    records : list
        Tables of what was said, for the run's records.
    version : int
        Iterations that the weights that sampled had learnt from.
    """

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    records: list[Rows] = field(default_factory=list)
    version: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Plain values and tensors, for a checkpoint."""
        return {
            "trajectories": [one.to_plain() for one in self.trajectories],
            "metrics": self.metrics,
            "records": self.records,
            "version": self.version,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Played:
        """Take what `to_plain` gave."""
        rows = [Trajectory(**fields) for fields in plain["trajectories"]]
        return cls(rows, plain["metrics"], plain["records"], plain["version"])


Play = Callable[[int], Played]
"""Plays an iteration's problems with the weights that sample."""


class PlayingAhead:
    """Rollouts that were played before their iteration, and those that are being played.

    The rollout of iteration i is played by the weights that had learnt from i - `max_staleness`
    iterations, exactly so once that many are over, however fast either side is. So the numbers of a
    run do not depend on timing, and one that goes on has those of one that never stopped.

    Parameters
    ----------
    policy, sampler : LanguageModel
        What learns, and its `sampler_copy`, which one thread beside the main one uses.
    """

    def __init__(
        self,
        play: Play,
        *,
        policy: LanguageModel,
        sampler: LanguageModel,
        max_staleness: int,
        num_iterations: int,
    ) -> None:
        self.max_staleness, self.num_iterations = max_staleness, num_iterations
        self._policy, self._sampler = policy, sampler
        self._play = play
        self._found: dict[int, Played] = {}
        self._pending: dict[int, Future[Played]] = {}
        self._worker: ThreadPoolExecutor | None = None

    def take(self, iteration: int) -> Played:
        """The rollout of an iteration; the one that comes `max_staleness` later is begun."""
        weights = self._policy.weight_copy()
        last = min(iteration + self.max_staleness, self.num_iterations - 1)
        for number in range(iteration, last + 1):
            if number not in self._found and number not in self._pending:
                self._begin(number, iteration, weights)
        if iteration in self._pending:
            self._found[iteration] = self._pending.pop(iteration).result()
        return self._found.pop(iteration)

    def _begin(self, number: int, version: int, weights: Mapping[str, Tensor]) -> None:
        if self._worker is None:
            # One thread: a rollout's weights stay while it is played, and calls keep their order.
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="playing-ahead")
        self._pending[number] = self._worker.submit(self._run, number, version, weights)

    def _run(self, number: int, version: int, weights: Mapping[str, Tensor]) -> Played:
        # Grad mode is each thread's own.
        with torch.no_grad():
            self._sampler.take_weights(weights)
            return replace(self._play(number), version=version)

    def wait(self) -> None:
        """Wait for what is being played; raises what went wrong in it."""
        for number in list(self._pending):
            self._found[number] = self._pending.pop(number).result()

    def state(self) -> dict[int, Any]:
        """The rollouts that are not used yet, those that are being played among them."""
        self.wait()
        return {number: played.to_plain() for number, played in self._found.items()}

    def load_state(self, state: Mapping[int, Any]) -> None:
        """Take up what `state` gave."""
        self._found = {number: Played.from_plain(plain) for number, plain in state.items()}

"""Asynchronous rollouts, which are sampled while an earlier iteration is learned from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import Field

from nip_astra.parameters.parameters_base import SubParameters

Rollout = TypeVar("Rollout")


class AsyncRolloutParameters(SubParameters):
    """How far sampling may be ahead of learning."""

    max_staleness: int = Field(default=0, ge=0, le=16)
    """Iterations by which the sampling weights lag behind the learning weights. 0 samples and
    learns in turn; above 0, actors (settings.num_actors) or, for tasks, a thread sample later
    iterations during the update. Larger waits less and learns from older samples."""


@dataclass
class PendingRollout(Generic[Rollout]):
    """A rollout that was started before its iteration.

    Attributes
    ----------
    version : int
        Iterations that the sampling weights had learned from.
    wait : Callable
        Waits for the rollout and returns it, whenever it is called.
    """

    version: int
    wait: Callable[[], Rollout]


class AsyncRollouts(Generic[Rollout]):
    """Buffer of rollouts that are sampled up to `max_staleness` iterations before they are used.

    The rollout of iteration i is sampled by weights that learned from i - `max_staleness`
    iterations (from none at first), however fast either side is. So the numbers of a run depend
    neither on timing nor on whether there are actors.

    Parameters
    ----------
    begin : Callable
        Starts the rollouts of some iterations with the current weights; returns a function for
        each that waits for it.
    to_plain, from_plain : Callable
        A rollout as a dict of plain values and tensors, and back for an iteration.
    num_iterations : int
        Iterations of the run; none after those is started.
    """

    def __init__(
        self,
        begin: Callable[[Sequence[int]], list[Callable[[], Rollout]]],
        to_plain: Callable[[Rollout], dict[str, Any]],
        from_plain: Callable[[int, Mapping[str, Any]], Rollout],
        *,
        max_staleness: int,
        num_iterations: int,
    ) -> None:
        self.max_staleness, self.num_iterations = max_staleness, num_iterations
        self._begin_with_current_weights = begin
        self._to_plain, self._from_plain = to_plain, from_plain
        self._pending: dict[int, PendingRollout[Rollout]] = {}

    def take(self, iteration: int) -> tuple[Rollout, int]:
        """The rollout of an iteration, and by how many iterations its weights lag behind."""
        self._begin([iteration], version=iteration)
        pending = self._pending.pop(iteration)
        return pending.wait(), iteration - pending.version

    def begin_next(self, iteration: int) -> None:
        """Start the rollouts after an iteration that may use the current weights."""
        last = min(iteration + self.max_staleness, self.num_iterations - 1)
        self._begin(range(iteration + 1, last + 1), version=iteration)

    def _begin(self, iterations: Sequence[int], *, version: int) -> None:
        missing = [number for number in iterations if number not in self._pending]
        if missing:
            started = self._begin_with_current_weights(missing)
            for number, wait in zip(missing, started, strict=True):
                self._pending[number] = PendingRollout(version, wait)

    def wait(self) -> None:
        """Wait for all rollouts in progress; raises their errors."""
        for pending in self._pending.values():
            rollout = pending.wait()
            pending.wait = lambda rollout=rollout: rollout  # type: ignore[misc]  # a default binds it

    def state(self) -> dict[int, Any]:
        """The rollouts that are not used yet, after waiting for those in progress."""
        self.wait()
        return {
            number: self._to_plain(pending.wait()) | {"version": pending.version}
            for number, pending in self._pending.items()
        }

    def load_state(self, state: Mapping[int, Any]) -> None:
        """Restore `state`."""
        self._pending = {}
        for number, plain in state.items():
            rollout = self._from_plain(number, plain)
            self._pending[number] = PendingRollout(plain["version"], lambda one=rollout: one)  # type: ignore[misc]  # as above

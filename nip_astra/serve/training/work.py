"""One thread that carries out operations on models, those of each model in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from nip_astra.errors import NipAstraError
from nip_astra.serve.api_errors import ApiError, failed, held, overloaded

logger = logging.getLogger(__name__)

SECONDS_SILENT = 120.0
"""Silence after which a client that used to report counts as dead."""
NUM_KEPT = 64
"""Operations of a model whose results are kept for repeated requests."""


@dataclass(eq=False)
class Operation:
    """One operation.

    Attributes
    ----------
    key : str
        Equal for a repeated request; differs for another request of the same number.
    group : object or None
        Waiting operations of one group are carried out by one call of `together`.
    """

    run: Callable[[], Any]
    key: str = ""
    group: object | None = None
    item: Any = None
    together: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    future: Future[Any] = field(default_factory=Future)


@dataclass
class Lane:
    """The operations of one model.

    Attributes
    ----------
    next_number : int
        Number of the next operation to queue.
    early : dict[int, Operation]
        Operations that arrived before one of a smaller number.
    known : OrderedDict[int, Operation]
        The newest queued or finished operations.
    used_at : float
        Time of the last request, `time.monotonic`.
    reports : bool
        Whether the client reports that it is alive between requests.
    """

    next_number: int = 1
    early: dict[int, Operation] = field(default_factory=dict)
    known: OrderedDict[int, Operation] = field(default_factory=OrderedDict)
    used_at: float = field(default_factory=time.monotonic)
    reports: bool = False

    def find(self, number: int) -> Operation | None:
        """The operation of a number, if it is known."""
        return self.known.get(number) or self.early.get(number)


class WorkQueue:
    """Carries out operations one after the other, in its own thread.

    Parameters
    ----------
    max_waiting : int
        Operations that may wait; further ones are refused.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._lanes: dict[str, Lane] = {}
        self._ready: deque[Operation] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="training work", daemon=True)
        self._thread.start()

    # ---- called from any thread

    def open_lane(self, name: str) -> None:
        """Accept operations of a model."""
        with self._changed:
            self._lanes[name] = Lane()

    def close_lane(self, name: str) -> None:
        """Accept no more operations of a model; those that wait for others fail."""
        with self._changed:
            lane = self._lanes.pop(name, None)
        for operation in lane.early.values() if lane is not None else ():
            operation.future.set_exception(failed(f"the model {name!r} was given up"))

    def report(self, name: str) -> None:
        """Note that a model's client is alive."""
        with self._changed:
            lane = self._lane(name)
            lane.used_at, lane.reports = time.monotonic(), True

    def is_given_up(self, name: str, max_idle_seconds: float) -> bool:
        """Whether a model's client is dead, or was idle for so long."""
        with self._changed:
            lane = self._lane(name)
            if any(not one.future.done() for one in lane.known.values()):
                return False
            most = min(max_idle_seconds, SECONDS_SILENT) if lane.reports else max_idle_seconds
            return time.monotonic() - lane.used_at > most

    def submit(self, operation: Operation) -> Operation:
        """Queue an operation that belongs to no order.

        Raises
        ------
        ApiError
            429 where too many wait.
        """
        with self._changed:
            self._check_room()
            self._ready.append(operation)
            self._changed.notify()
        return operation

    def submit_ordered(
        self, lane_name: str, number: int, operation: Operation, *, may_be_early: bool = False
    ) -> Operation:
        """Queue a model's operation by its number, or return it if it is known.

        Parameters
        ----------
        number : int
            1 for the first of the model, and so on.
        may_be_early : bool
            Whether it may arrive before those of smaller numbers, and wait for them.

        Returns
        -------
        Operation
            The given one, or an earlier one with the same number and key.

        Raises
        ------
        ApiError
            429 when too many wait; 409 when the number belongs to another request, is too old, or
            skips one; 404 when the model was dropped.
        """
        with self._changed:
            lane = self._lane(lane_name)
            lane.used_at = time.monotonic()
            known = lane.find(number)
            if known is not None:
                if known.key != operation.key:
                    raise _conflict(number, "another request had that number")
                return known
            if number < lane.next_number:
                raise _conflict(number, f"operation {lane.next_number} is next")
            most = self.max_waiting if may_be_early else 1
            if number >= lane.next_number + most:
                raise _conflict(number, f"operation {lane.next_number} never came")
            self._check_room()
            lane.early[number] = operation
            while lane.next_number in lane.early:
                following = lane.early.pop(lane.next_number)
                lane.known[lane.next_number] = following
                self._ready.append(following)
                lane.next_number += 1
            while len(lane.known) > NUM_KEPT and next(iter(lane.known.values())).future.done():
                lane.known.popitem(last=False)
            self._changed.notify()
        return operation

    def find(self, lane_name: str, number: int) -> Operation | None:
        """A model's operation, if it is known."""
        with self._changed:
            return self._lane(lane_name).find(number)

    @property
    def num_waiting(self) -> int:
        """Queued operations; early ones, which block no other client, are not counted."""
        return len(self._ready)

    def close(self) -> None:
        """End the thread after its current operation; the others fail."""
        with self._changed:
            self._is_closed = True
            left = list(self._ready)
            self._ready.clear()
            self._changed.notify()
        for operation in left:
            operation.future.set_exception(failed("the service is shutting down"))
        self._thread.join()

    def _lane(self, name: str) -> Lane:
        reason = "the model {name} is not in training. Make one, or load a saved state."
        return held(self._lanes, name, reason=reason, code="model_lost")

    def _check_room(self) -> None:
        if self._is_closed:
            raise failed("the service is shutting down")
        if self.num_waiting >= self.max_waiting:
            raise overloaded(
                f"{self.max_waiting} operations wait already, the most that this service takes. "
                "Try again later, or start it with a higher max_waiting.",
                "queue_full",
            )

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._ready or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                batch = self._next_batch()
            self._do(batch)

    def _next_batch(self) -> list[Operation]:
        """The next operation, and the waiting ones of its group."""
        first = self._ready.popleft()
        if first.group is None:
            return [first]
        others = [one for one in self._ready if one.group == first.group]
        if others:
            self._ready = deque(one for one in self._ready if one.group != first.group)
        return [first, *others]

    def _do(self, batch: Sequence[Operation]) -> None:
        together = batch[0].together
        try:
            if together is None:
                results: Sequence[Any] = [batch[0].run()]
            else:
                results = together([one.item for one in batch])
        except BaseException as error:
            # Only the requests of this operation fail; the thread goes on.
            if len(batch) > 1:
                for one in batch:
                    self._do([one])
                return
            batch[0].future.set_exception(_reported(error))
            return
        for one, result in zip(batch, results, strict=True):
            one.future.set_result(result)


def _reported(error: BaseException) -> ApiError:
    """The error that a client receives."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NipAstraError):
        return ApiError(400, str(error), code="operation_refused")
    logger.error("an operation failed: %s", error, exc_info=error)
    kind = type(error).__name__
    return failed(
        f"an operation failed with {kind}: {str(error)[:500]}. The model is unchanged; see the "
        "service's log."
    )


def _conflict(number: int, fault: str) -> ApiError:
    return ApiError(
        409,
        f"operation {number} of the model cannot be carried out: {fault}. A model follows one "
        "client at a time: give each client its own.",
        kind="conflict_error",
        code="operation_conflict",
    )

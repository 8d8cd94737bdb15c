"""One thread that carries out what is asked of models: each model's operations in their order."""

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
"""After which a client that reports regularly, and no longer does, is taken for dead."""
NUM_KEPT = 64
"""Operations of a model whose results are kept for a client that asks again."""


@dataclass(eq=False)
class Operation:
    """Something to do.

    Attributes
    ----------
    key : str
        Tells a repeated request, which has the same, from another one of the same number.
    group : object or None
        Operations of one group that wait beside each other are done by one call of `together`.
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
        Of the first operation that is not yet in the queue.
    early : dict[int, Operation]
        Those that came before one of a smaller number.
    known : OrderedDict[int, Operation]
        The newest in the queue or done.
    used_at : float
        When something was last asked, `time.monotonic`.
    reports : bool
        Whether the client reports that it is there, also while it asks for nothing.
    """

    next_number: int = 1
    early: dict[int, Operation] = field(default_factory=dict)
    known: OrderedDict[int, Operation] = field(default_factory=OrderedDict)
    used_at: float = field(default_factory=time.monotonic)
    reports: bool = False

    def find(self, number: int) -> Operation | None:
        """An operation that is known."""
        return self.known.get(number) or self.early.get(number)


class WorkQueue:
    """Does operations one after the other, in a thread of its own.

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
        """Begin to take operations of a model."""
        with self._changed:
            self._lanes[name] = Lane()

    def close_lane(self, name: str) -> None:
        """Take no more operations of a model; what has not begun fails."""
        with self._changed:
            lane = self._lanes.pop(name, None)
        for operation in lane.early.values() if lane is not None else ():
            operation.future.set_exception(failed(f"the model {name!r} was given up"))

    def report(self, name: str) -> None:
        """Note that a model's client is there."""
        with self._changed:
            lane = self._lane(name)
            lane.used_at, lane.reports = time.monotonic(), True

    def is_given_up(self, name: str, max_idle_seconds: float) -> bool:
        """Whether a model's client is dead, or has asked for nothing for so long."""
        with self._changed:
            lane = self._lane(name)
            if any(not one.future.done() for one in lane.known.values()):
                return False
            most = min(max_idle_seconds, SECONDS_SILENT) if lane.reports else max_idle_seconds
            return time.monotonic() - lane.used_at > most

    def submit(self, operation: Operation) -> Operation:
        """Queue an operation that has no place in any order.

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
        """Queue a model's operation in the place of its number, or find it where it is known.

        Parameters
        ----------
        number : int
            1 for the first of the model, and so on.
        may_be_early : bool
            Whether one may come before those of smaller numbers, and wait for them.

        Returns
        -------
        Operation
            The given one, or the one that came before with the same number and key.

        Raises
        ------
        ApiError
            429 where too many wait; 409 where the number was another request's, was passed long
            ago, or leaves one out; 404 where the model was given up.
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
        """A model's operation, where it is known."""
        with self._changed:
            return self._lane(lane_name).find(number)

    @property
    def num_waiting(self) -> int:
        """Operations that have not begun; those before their turn keep no other client waiting."""
        return len(self._ready)

    def close(self) -> None:
        """End the thread after the operation that it is at; the others fail."""
        with self._changed:
            self._is_closed = True
            left = list(self._ready)
            self._ready.clear()
            self._changed.notify()
        for operation in left:
            operation.future.set_exception(failed("the service is shutting down"))
        self._thread.join()

    def _lane(self, name: str) -> Lane:
        reason = "the model {name} is not in training. Make one, or go on from a saved state."
        return held(self._lanes, name, reason=reason, code="model_lost")

    def _check_room(self) -> None:
        if self._is_closed:
            raise failed("the service is shutting down")
        if self.num_waiting >= self.max_waiting:
            raise overloaded(
                f"{self.max_waiting} operations wait already, which is the most that this service "
                "takes. Come again later, or start it with a higher max_waiting.",
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
        """The next operation, and those that wait which one call can do with it."""
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
            # Whatever it was, only those who asked for it are told; others come.
            if len(batch) > 1:
                for one in batch:
                    self._do([one])
                return
            batch[0].future.set_exception(_told(error))
            return
        for one, result in zip(batch, results, strict=True):
            one.future.set_result(result)


def _told(error: BaseException) -> ApiError:
    """What the client is told of a failure."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NipAstraError):
        return ApiError(400, str(error), code="operation_refused")
    logger.error("an operation failed: %s", error, exc_info=error)
    kind = type(error).__name__
    return failed(
        f"an operation failed with {kind}: {str(error)[:500]}. The model is as it was before; the "
        "service's log says where it failed."
    )


def _conflict(number: int, fault: str) -> ApiError:
    return ApiError(
        409,
        f"operation {number} of the model was sent, but {fault}. A model follows one client at a "
        "time: give each client a model of its own.",
        kind="conflict_error",
        code="operation_conflict",
    )

"""Models trained for clients, and the thread that runs operations on them in order."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from nip_astra.errors import NipAstraError
from nip_astra.language_models.adapters import LoraParameters, adapters_drawn_from, add_adapter
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.sampling import find_end_ids
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.language_models.sources import find_tokenizer, load_model
from nip_astra.language_models.tree_engine.decoder import Decoder, build_decoder
from nip_astra.serve.requests import (
    ApiError,
    bad_request,
    internal_error,
    overloaded,
    shutting_down,
)
from nip_astra.serve.served_models import find_model, loadable_path

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_WEIGHT_DECAY = 100.0
SECONDS_SILENT = 120.0
"""Seconds of silence after which a reporting client counts as ended."""
NUM_KEPT = 64
"""Number of a model's operations whose results are kept for repeated requests, of a client that
sends several at once; of others, one."""


@dataclass(frozen=True)
class Base:
    """Frozen weights; `source` is their folder, hub id or `.gguf` file."""

    name: str
    source: str
    module: Any
    tokenizer: Any
    decoder: Decoder | None

    @property
    def vocab_size(self) -> int:
        """Vocabulary size, including padding."""
        return int(self.module.config.vocab_size)

    @property
    def context_window(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return int(getattr(self.module.config, "max_position_embeddings", 1 << 20))

    @property
    def end_ids(self) -> tuple[int, ...]:
        return find_end_ids(self.module.generation_config, self.tokenizer)


class Bases:
    """Loads models by name (from a folder, hub id or `.gguf` file), each once, in float32."""

    def __init__(
        self, models: Mapping[str, str], device: torch.device, conversions: Path | None = None
    ) -> None:
        self.device, self.conversions = device, conversions
        self._lock = threading.Lock()
        self._bases = {name: self._load(name, path) for name, path in models.items()}

    def _load(self, name: str, path: str) -> Base:
        source = find_model(path)
        loaded = loadable_path(source, self.conversions)
        module = load_model(loaded, None, None).to(self.device).eval().requires_grad_(False)
        return Base(name, source, module, find_tokenizer(loaded, None, None), build_decoder(module))

    @property
    def names(self) -> list[str]:
        return list(self._bases)

    def get(self, name: str) -> Base:
        """Return a model by its name or path; raise `ApiError` 404 without one."""
        if name in self._bases:
            return self._bases[name]
        # The client's parameters may name the folder or hub id that the service loaded it from. A
        # client may also send a path that no file system has.
        with suppress(NipAstraError, OSError, ValueError):
            source = find_model(name)
            for base in self._bases.values():
                if base.source == source:
                    return base
        raise ApiError(
            404,
            f"this service has no model {name[:200]!r}. It has: {', '.join(self.names)}.",
            code="model_not_found",
        )

    def policy(
        self,
        base: Base,
        lora: LoraParameters | None,
        *,
        seed: int = 0,
        trainable: bool = True,
    ) -> HuggingFaceLanguageModel:
        """Return a model to train or to sample from.

        Parameters
        ----------
        lora : LoraParameters, optional
            Adapter on the shared weights, initialised from `seed`. Without one, a trainable model
            has a copy of the weights.
        trainable : bool
            Whether it is trained. Otherwise it may sample any token, also unused ones.
        """
        if lora is not None:
            module = _copy_structure(base.module)
            # `adapters_drawn_from` seeds the generator of the whole process.
            with self._lock, adapters_drawn_from(seed):
                module = add_adapter(module, lora)
        elif trainable:
            module = copy.deepcopy(base.module)
            module.requires_grad_(True)
        else:
            module = _copy_structure(base.module)
        model = HuggingFaceLanguageModel(
            module,
            base.tokenizer,
            device=self.device,
            trainable=trainable,
            dtype=torch.float32,
            decoder=base.decoder,
            allows_any_token=not trainable,
        )
        model.source = base.source
        return model


def _copy_structure(module: Any) -> Any:
    """Return a second module on the same weights, unaffected by an adapter on the first."""
    # `deepcopy` takes an object that its memo has as already copied.
    memo = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo)


@dataclass
class HostedModel:
    """A model trained for a client: its base, its weights and its optimizer."""

    name: str
    base: Base
    service: LocalTrainingService

    @property
    def policy(self) -> HuggingFaceLanguageModel:
        policy = self.service.model
        assert isinstance(policy, HuggingFaceLanguageModel)
        return policy

    @contextmanager
    def gradients_or_none(self) -> Iterator[None]:
        """Add all gradients of the block or, if it fails, none."""
        learned = self.service.learned
        gradients_before = [
            None if parameter.grad is None else parameter.grad.clone() for parameter in learned
        ]
        try:
            yield
        except BaseException:
            # A client may repeat the request, and must not count a part of it twice.
            for parameter, gradient in zip(learned, gradients_before, strict=True):
                parameter.grad = gradient
            raise

    def check_ids(self, ids: Tensor, length: int) -> None:
        """Raise for unknown tokens, and for more than the window holds."""
        if ids.numel() == 0:
            raise bad_request("there are no tokens. Send at least one.")
        if ids.dtype != torch.int64:
            raise bad_request(f"tokens are {ids.dtype}. Send them as int64.")
        min_id, max_id = int(ids.min()), int(ids.max())
        if min_id < 0 or max_id >= self.base.vocab_size:
            unknown_id = min_id if min_id < 0 else max_id
            raise bad_request(
                f"the model {self.base.name!r} has no token {unknown_id}, only 0 to "
                f"{self.base.vocab_size - 1}. Encode texts by its tokenizer."
            )
        if length > self.policy.context_window:
            raise bad_request(
                f"{length} tokens exceed the window of the model {self.base.name!r}, "
                f"{self.policy.context_window}. Send shorter texts."
            )


def lookup(by_name: Mapping[str, T], name: str, *, reason: str, code: str) -> T:
    """Return what has a name, or raise `ApiError` 404 with `reason`, which has `{name}`."""
    match = by_name.get(name)
    if match is None:
        raise ApiError(404, reason.format(name=repr(name[:200])), code=code)
    return match


# ---- operations


@dataclass(eq=False)
class Operation:
    """Work for a client, and its result.

    Attributes
    ----------
    run : Callable
        Does the work of an operation without a group.
    key : str
        Identifies the request: a repeated one has the same.
    group : object, optional
        Waiting operations of equal groups are executed in one call of `run_together`.
    argument : Any
        What `run_together` gets of this operation.
    run_together : Callable, optional
        Takes the arguments of several operations and returns their results in order.
    """

    run: Callable[[], Any]
    key: str = ""
    group: object | None = None
    argument: Any = None
    run_together: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    future: Future[Any] = field(default_factory=Future)

    def release(self) -> None:
        """Free the request when it is done; only its result is kept for repeated requests."""
        # The closures hold the body of the request, of up to gigabytes.
        self.run = lambda: None
        self.argument = None
        self.run_together = None

    async def result(self, seconds: float) -> Any:
        """Return the result; raise `TimeoutError` if it takes longer."""
        # Shielded: neither the timeout nor a disconnected client may cancel the work.
        future = asyncio.shield(asyncio.wrap_future(self.future))
        return await asyncio.wait_for(future, seconds)


@dataclass
class Lane:
    """The operations of one model.

    Attributes
    ----------
    next_number : int
        Number of the next operation to queue.
    early : dict[int, Operation]
        Operations that wait for a smaller number.
    recent : OrderedDict[int, Operation]
        The newest queued or finished operations, oldest first.
    used_at : float
        Time of the last request, `time.monotonic`.
    reports : bool
        Whether the client reports that it is alive between requests.
    """

    next_number: int = 1
    early: dict[int, Operation] = field(default_factory=dict)
    recent: OrderedDict[int, Operation] = field(default_factory=OrderedDict)
    used_at: float = field(default_factory=time.monotonic)
    reports: bool = False

    def find(self, number: int) -> Operation | None:
        return self.recent.get(number) or self.early.get(number)

    def forget(self, num_kept: int) -> None:
        """Drop the oldest operations beyond a number, as far as they are finished."""
        while len(self.recent) > num_kept:
            oldest = next(iter(self.recent.values()))
            if not oldest.future.done():
                return
            self.recent.popitem(last=False)


class WorkQueue:
    """Runs operations one after the other in its own thread; at most `max_waiting` may wait."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._lanes: dict[str, Lane] = {}
        self._ready: deque[Operation] = deque()
        # Guards lanes and queue. Futures are set outside it: their callbacks run in the setter.
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="training work", daemon=True)
        self._thread.start()

    # ---- called from any thread

    def open_lane(self, name: str) -> None:
        with self._changed:
            self._lanes[name] = Lane()

    def close_lane(self, name: str) -> None:
        """Accept no more operations of a model; those that wait for others fail."""
        with self._changed:
            lane = self._lanes.pop(name, None)
        for operation in lane.early.values() if lane is not None else ():
            operation.future.set_exception(internal_error(f"the model {name!r} was closed"))

    def report(self, name: str) -> None:
        """Note that a model's client is alive."""
        with self._changed:
            lane = self._lane(name)
            lane.used_at = time.monotonic()
            lane.reports = True

    def is_given_up(self, name: str, max_idle_seconds: float) -> bool:
        """Return whether a model's client is dead, or was idle for so long."""
        with self._changed:
            lane = self._lane(name)
            if any(not operation.future.done() for operation in lane.recent.values()):
                return False
            if lane.reports:
                max_idle_seconds = min(max_idle_seconds, SECONDS_SILENT)
            return time.monotonic() - lane.used_at > max_idle_seconds

    def submit(self, operation: Operation) -> Operation:
        """Queue an operation without an order; `ApiError` 429 when too many wait."""
        with self._changed:
            self._check_room()
            self._ready.append(operation)
            self._changed.notify()
        return operation

    def submit_ordered(
        self, lane_name: str, number: int, operation: Operation, *, may_be_early: bool = False
    ) -> Operation:
        """Queue a model's operation by its number, or return the known one of that number and key.

        Parameters
        ----------
        number : int
            1 for the first of the model, and so on.
        may_be_early : bool
            Whether it may arrive before smaller numbers, and wait for them.

        Raises
        ------
        ApiError
            429 when too many wait; 409 when the number belongs to another request, is too old, or
            skips one; 404 when the model was closed.
        """
        with self._changed:
            lane = self._lane(lane_name)
            lane.used_at = time.monotonic()
            earlier_request = lane.find(number)
            if earlier_request is not None:
                if earlier_request.key != operation.key:
                    raise _conflict(number, "another request has that number")
                return earlier_request
            if number < lane.next_number:
                raise _conflict(number, f"operation {lane.next_number} is next")
            # Without early ones the next number is the only valid one.
            num_acceptable = self.max_waiting if may_be_early else 1
            if number >= lane.next_number + num_acceptable:
                raise _conflict(number, f"operation {lane.next_number} is missing")
            self._check_room()
            lane.early[number] = operation
            while lane.next_number in lane.early:
                next_operation = lane.early.pop(lane.next_number)
                lane.recent[lane.next_number] = next_operation
                self._ready.append(next_operation)
                lane.next_number += 1
            # A client without early operations has the result of the last when it sends the next.
            lane.forget(NUM_KEPT if may_be_early else 1)
            self._changed.notify()
        return operation

    def find(self, lane_name: str, number: int) -> Operation | None:
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
            unfinished = list(self._ready)
            self._ready.clear()
            self._changed.notify()
        for operation in unfinished:
            operation.future.set_exception(shutting_down())
        self._thread.join()

    def _lane(self, name: str) -> Lane:
        reason = "the model {name} is not in training. Create one, or load a saved state."
        return lookup(self._lanes, name, reason=reason, code="model_lost")

    def _check_room(self) -> None:
        if self._is_closed:
            raise shutting_down()
        if self.num_waiting >= self.max_waiting:
            raise overloaded(
                f"{self.max_waiting} operations wait already, the limit of this service. Retry "
                "later, or start it with a higher max_waiting.",
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
            self._execute(batch)

    def _next_batch(self) -> list[Operation]:
        """Remove the first operation, and those of its group, from the queue."""
        first = self._ready.popleft()
        if first.group is None:
            return [first]
        batch = [first]
        remaining: deque[Operation] = deque()
        for operation in self._ready:
            if operation.group == first.group:
                batch.append(operation)
            else:
                remaining.append(operation)
        self._ready = remaining
        return batch

    def _execute(self, batch: Sequence[Operation]) -> None:
        first = batch[0]
        try:
            if first.run_together is None:
                results: Sequence[Any] = [first.run()]
            else:
                results = first.run_together([operation.argument for operation in batch])
        except BaseException as error:
            # Only the requests of this operation fail; the thread continues.
            if len(batch) > 1:
                # One invalid request must not fail the others of its batch.
                for operation in batch:
                    self._execute([operation])
                return
            first.release()
            first.future.set_exception(_as_api_error(error))
            return
        for operation, result in zip(batch, results, strict=True):
            operation.release()
            operation.future.set_result(result)


def _as_api_error(error: BaseException) -> ApiError:
    """Return the error reported to the client of an operation."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NipAstraError):
        return ApiError(400, str(error), code="operation_refused")
    logger.error("an operation failed: %s", error, exc_info=error)
    kind = type(error).__name__
    return internal_error(
        f"an operation failed with {kind}: {str(error)[:500]}. The model is unchanged; see the "
        "service's log."
    )


def _conflict(number: int, fault: str) -> ApiError:
    return ApiError(
        409,
        f"operation {number} of the model is refused: {fault}. A model serves one client at a "
        "time: give each client its own.",
        kind="conflict_error",
        code="operation_conflict",
    )

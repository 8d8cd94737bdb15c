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
from nip_astra.serve.requests import ApiError, ending, failed, overloaded, wrong
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
        found = self._bases.get(name)
        if found is None:
            place = None
            # A client may send a path that no file system has.
            with suppress(NipAstraError, OSError, ValueError):
                place = find_model(name)
            found = next((base for base in self._bases.values() if base.source == place), None)
        if found is None:
            raise ApiError(
                404,
                f"this service has no model {name[:200]!r}. It has: {', '.join(self.names)}.",
                code="model_not_found",
            )
        return found

    def policy(
        self,
        base: Base,
        lora: LoraParameters | None,
        *,
        seed: int = 0,
        trainable: bool = True,
    ) -> HuggingFaceLanguageModel:
        """Return a model with an adapter initialised from `seed`, or a trainable copy of the
        weights.

        A model that is not trainable may sample any token.
        """
        shared = base.module if lora is not None or not trainable else None
        module = _twin(base.module) if shared is not None else copy.deepcopy(base.module)
        if lora is not None:
            # It sets the generator of the whole process.
            with self._lock, adapters_drawn_from(seed):
                module = add_adapter(module, lora)
        elif trainable:
            module.requires_grad_(True)
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


def _twin(module: Any) -> Any:
    """Return a second module on the same weights, unaffected by an adapter on the first."""
    shared = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)


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
        before = [one.grad.clone() if one.grad is not None else None for one in learned]
        try:
            yield
        except BaseException:
            for one, gradient in zip(learned, before, strict=True):
                one.grad = gradient
            raise

    def check_ids(self, ids: Tensor, length: int) -> None:
        """Raise for unknown tokens, and for more than the window holds."""
        if ids.numel() == 0:
            raise wrong("there are no tokens. Send at least one.")
        if ids.dtype != torch.int64:
            raise wrong(f"tokens are {ids.dtype}. Send them as int64.")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.base.vocab_size:
            raise wrong(
                f"the model {self.base.name!r} has no token {low if low < 0 else high}, only 0 to "
                f"{self.base.vocab_size - 1}. Encode texts by its tokenizer."
            )
        if length > self.policy.context_window:
            raise wrong(
                f"{length} tokens exceed the window of the model {self.base.name!r}, "
                f"{self.policy.context_window}. Send shorter texts."
            )


def lookup(things: Mapping[str, T], name: str, *, reason: str, code: str) -> T:
    """Return the entry of a name, or raise `ApiError` 404 with `reason`, which has `{name}`."""
    found = things.get(name)
    if found is None:
        raise ApiError(404, reason.format(name=repr(name[:200])), code=code)
    return found


# ---- operations


@dataclass(eq=False)
class Operation:
    """An operation; a repeated request has the same `key`, and a `group` runs `together`."""

    run: Callable[[], Any]
    key: str = ""
    group: object | None = None
    item: Any = None
    together: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    future: Future[Any] = field(default_factory=Future)

    def release(self) -> None:
        """Free the request when it is done; only its result is kept for repeated requests."""
        self.run, self.item, self.together = (lambda: None), None, None

    async def result(self, seconds: float) -> Any:
        """Return the result; raise `TimeoutError` if it takes longer."""
        waited = asyncio.shield(asyncio.wrap_future(self.future))
        return await asyncio.wait_for(waited, seconds)


@dataclass
class Lane:
    """The operations of one model.

    Attributes
    ----------
    next_number : int
        Number of the next operation to queue.
    early : dict[int, Operation]
        Operations that wait for a smaller number.
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
        return self.known.get(number) or self.early.get(number)


class WorkQueue:
    """Runs operations one after the other in its own thread; at most `max_waiting` may wait."""

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
        with self._changed:
            self._lanes[name] = Lane()

    def close_lane(self, name: str) -> None:
        """Accept no more operations of a model; those that wait for others fail."""
        with self._changed:
            lane = self._lanes.pop(name, None)
        for operation in lane.early.values() if lane is not None else ():
            operation.future.set_exception(failed(f"the model {name!r} was closed"))

    def report(self, name: str) -> None:
        """Note that a model's client is alive."""
        with self._changed:
            lane = self._lane(name)
            lane.used_at, lane.reports = time.monotonic(), True

    def is_given_up(self, name: str, max_idle_seconds: float) -> bool:
        """Return whether a model's client is dead, or was idle for so long."""
        with self._changed:
            lane = self._lane(name)
            if any(not one.future.done() for one in lane.known.values()):
                return False
            most = min(max_idle_seconds, SECONDS_SILENT) if lane.reports else max_idle_seconds
            return time.monotonic() - lane.used_at > most

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
            known = lane.find(number)
            if known is not None:
                if known.key != operation.key:
                    raise _conflict(number, "another request has that number")
                return known
            if number < lane.next_number:
                raise _conflict(number, f"operation {lane.next_number} is next")
            most = self.max_waiting if may_be_early else 1
            if number >= lane.next_number + most:
                raise _conflict(number, f"operation {lane.next_number} is missing")
            self._check_room()
            lane.early[number] = operation
            while lane.next_number in lane.early:
                following = lane.early.pop(lane.next_number)
                lane.known[lane.next_number] = following
                self._ready.append(following)
                lane.next_number += 1
            # A client without early operations has the result of the last when it sends the next.
            kept = NUM_KEPT if may_be_early else 1
            while len(lane.known) > kept and next(iter(lane.known.values())).future.done():
                lane.known.popitem(last=False)
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
            left = list(self._ready)
            self._ready.clear()
            self._changed.notify()
        for operation in left:
            operation.future.set_exception(ending())
        self._thread.join()

    def _lane(self, name: str) -> Lane:
        reason = "the model {name} is not in training. Create one, or load a saved state."
        return lookup(self._lanes, name, reason=reason, code="model_lost")

    def _check_room(self) -> None:
        if self._is_closed:
            raise ending()
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
            self._do(batch)

    def _next_batch(self) -> list[Operation]:
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
            # Only the requests of this operation fail; the thread continues.
            if len(batch) > 1:
                for one in batch:
                    self._do([one])
                return
            batch[0].release()
            batch[0].future.set_exception(_reported(error))
            return
        for one, result in zip(batch, results, strict=True):
            one.release()
            one.future.set_result(result)


def _reported(error: BaseException) -> ApiError:
    """Return the error reported to a client."""
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
        f"operation {number} of the model is refused: {fault}. A model serves one client at a "
        "time: give each client its own.",
        kind="conflict_error",
        code="operation_conflict",
    )

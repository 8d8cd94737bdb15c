"""Continuous batching: requests join a running batch, and leave it when they have ended.

One thread alternates between reading prompts and one token of every row that speaks. What a row
says depends on its request alone: its draws come from its seed, and the arithmetic differs from
that of a lone request by rounding at most.

Shape suffixes: `N` token, `R` row, `X` hidden unit.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nip_astra.errors import NipAstraError
from nip_astra.language_models.sampling import find_banned_ids, find_end_ids
from nip_astra.language_models.tree_engine.decoder import Decoder
from nip_astra.language_models.tree_engine.weights import Weights
from nip_astra.serve.drawing import draw_tokens
from nip_astra.serve.generation import GenerationRequest, Listener, Progress
from nip_astra.serve.routed_weights import Routes, routed
from nip_astra.serve.rows import Row
from nip_astra.serve.slots import ReadingAttention, ReadPrompt, Slots

logger = logging.getLogger(__name__)

MIN_SHARED = 16
"""Tokens at the beginning of a prompt that are worth copying rather than reading again."""
MAX_KEPT = 128
"""Prompts that are kept for later ones that begin alike; each new one is compared with all."""
_NO_NUMBERS = (
    "the model's logits are no numbers, so no token can be drawn. Serve other weights: these "
    "overflow, or hold numbers that are not finite."
)
_CLOSED = "the service is shutting down"


@dataclass(frozen=True)
class EngineLimits:
    """How much one engine does at once.

    Attributes
    ----------
    max_rows : int
        Most answers in the running batch.
    max_cache_bytes : int
        Most memory for keys and values of the running batch, with room for its longest answers.
    max_kept_bytes : int
        Most memory for keys and values of prompts that were read, for later ones that begin alike.
    max_read_tokens : int
        Most prompt tokens between two tokens of the rows that speak.
    """

    max_rows: int = 256
    max_cache_bytes: int = 2 << 30
    max_kept_bytes: int = 256 << 20
    max_read_tokens: int = 2048


class Engine:
    """Answers requests with one set of weights, many at once.

    Parameters
    ----------
    weights : Weights
        Stay as they are.
    generation_config
        Names the tokens that end a turn, besides the tokenizer.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        tokenizer: Any,
        generation_config: Any,
        *,
        vocab_size: int,
        context_window: int,
        num_parameters: int,
        limits: EngineLimits,
    ) -> None:
        self.decoder, self.tokenizer, self.limits = decoder, tokenizer, limits
        # Tokenizers may be used by one thread at a time.
        self._own_tokenizer = copy.deepcopy(tokenizer)
        self.context_window, self.vocab_size = context_window, vocab_size
        self.dtype, self.num_parameters = weights.dtype, num_parameters
        self.device = weights.embedding_VX.device
        self.end_ids = find_end_ids(generation_config, tokenizer)
        banned = find_banned_ids(tokenizer, self.end_ids, vocab_size)
        self._banned_ids = torch.tensor(banned, dtype=torch.long, device=self.device)
        self._ends = frozenset(self.end_ids)
        self._routes = Routes()
        self._weights = routed(weights, self._routes)
        self._shape = (decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self._token_bytes = decoder.cache_numbers_per_token * weights.dtype.itemsize
        self._slots = Slots(self._shape, weights.dtype, self.device)
        self._rows: list[Row] = []
        self._waiting: deque[GenerationRequest] = deque()
        self._reading: list[tuple[GenerationRequest, ReadPrompt]] = []
        self._kept: OrderedDict[tuple[int, tuple[int, ...]], ReadPrompt] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="text engine", daemon=True)
        self._thread.start()

    # ---- called from any thread

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        with self._changed:
            if not self._is_closed:
                self._waiting.append(request)
                self._changed.notify()
                return
        self._tell([_gave_up(request, index, _CLOSED) for index in range(request.num_samples)])

    def cancel(self, request: GenerationRequest) -> None:
        """Free what a request holds, at the next step; it is told of no more."""
        with self._changed:
            request.is_cancelled = True
            self._changed.notify()

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def num_rows(self) -> int:
        """Answers that are being said."""
        return len(self._rows)

    def answer(self, **options: Any) -> list[Progress]:
        """Answer one request and wait for it: the last progress of each of its answers."""
        found: dict[int, Progress] = {}
        done: Future[None] = Future()
        count = options.get("num_samples", 1)

        def listen(told: Sequence[Progress]) -> None:
            found.update({one.index: one for one in told if one.finish_reason})
            if len(found) == count:
                done.set_result(None)

        self.submit(GenerationRequest(listener=listen, **options))
        done.result()
        return [found[index] for index in range(count)]

    def close(self) -> None:
        """End the thread; what is not answered is told that it failed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    # ---- the engine's thread

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    while not (self._waiting or self._rows or self._reading or self._is_closed):
                        self._changed.wait()
                    if self._is_closed:
                        self._fail(_CLOSED)
                        return
                try:
                    self._drop_cancelled()
                    self._admit()
                    self._read()
                    self._speak()
                except Exception as error:
                    # Whatever it was, only those who were in the batch are told; others come.
                    known = isinstance(error, NipAstraError)
                    logger.log(
                        logging.WARNING if known else logging.ERROR,
                        "the batch is given up: %s",
                        error,
                        exc_info=not known,
                    )
                    self._fail(str(error) or type(error).__name__)

    def _fail(self, reason: str) -> None:
        with self._changed:
            waiting = list(self._waiting) if self._is_closed else []
            if self._is_closed:
                self._waiting.clear()
        begun = [(row.request, row.index) for row in self._rows]
        unbegun = [*waiting, *(request for request, _ in self._reading)]
        begun += [(one, index) for one in unbegun for index in range(one.num_samples)]
        self._rows, self._reading = [], []
        self._slots = Slots(self._shape, self._weights.dtype, self.device)
        self._tell([_gave_up(one, index, reason) for one, index in begun])

    def _drop_cancelled(self) -> None:
        with self._changed:
            if any(request.is_cancelled for request in self._waiting):
                self._waiting = deque(one for one in self._waiting if not one.is_cancelled)
        self._reading = [one for one in self._reading if not one[0].is_cancelled]
        self._keep_rows([not row.request.is_cancelled for row in self._rows])

    def _keep_rows(self, are_kept: Sequence[bool]) -> None:
        if not all(are_kept):
            self._rows = [self._rows[place] for place in self._slots.keep(are_kept)]

    def _admit(self) -> None:
        """Take requests from the queue, in their order, as long as there is room."""
        while True:
            with self._changed:
                request = self._waiting[0] if self._waiting else None
                if request is None or not self._has_room(request):
                    return
                self._waiting.popleft()
            prompt = ReadPrompt(request.prompt, self._shape, self._weights.dtype, self.device)
            self._reading.append((request, prompt))

    def _has_room(self, request: GenerationRequest) -> bool:
        running = [row.request for row in self._rows]
        running += [one for one, _ in self._reading for _ in range(one.num_samples)]
        if not running:
            return True
        together = [*running, *[request] * request.num_samples]
        longest = max(len(one.prompt) + one.max_tokens for one in together)
        size = len(together) * longest * self._token_bytes
        return len(together) <= self.limits.max_rows and size <= self.limits.max_cache_bytes

    # ---- reading prompts

    def _read(self) -> None:
        """Read the next tokens of prompts; those that end here begin to speak."""
        budget = self.limits.max_read_tokens
        parts: list[tuple[GenerationRequest, ReadPrompt, int]] = []
        for request, prompt in self._reading:
            if budget <= 0:
                break
            if prompt.num_read == 0:
                if self._waits_for(prompt, request, parts):
                    continue
                self._begin_like_another(prompt, request)
            length = min(budget, len(prompt.ids) - prompt.num_read)
            parts.append((request, prompt, length))
            budget -= length
        if not parts:
            return
        hidden_NX = self._forward_prompts(parts)
        ends = torch.tensor([length for _, _, length in parts]).cumsum(0) - 1
        last_RX = hidden_NX[ends.to(self.device)]
        ended = [
            (one, prompt) for one, prompt, n in parts if prompt.num_read + n == len(prompt.ids)
        ]
        if ended:
            self._slots.reserve(
                sum(one.num_samples for one, _ in ended), max(len(p.ids) for _, p in ended) + 1
            )
        begun: list[Row] = []
        places: list[int] = []
        for place, (request, prompt, length) in enumerate(parts):
            prompt.num_read += length
            if prompt.num_read == len(prompt.ids):
                begun += self._rows_of(request, prompt)
                places += [place] * request.num_samples
                self._keep_prompt(prompt, request)
        self._reading = [one for one in self._reading if one[1].num_read < len(one[1].ids)]
        if begun:
            self._rows += begun
            self._draw(last_RX[torch.tensor(places, device=self.device)], begun)

    def _rows_of(self, request: GenerationRequest, prompt: ReadPrompt) -> list[Row]:
        count = request.num_samples
        self._slots.add(prompt, count)
        return [
            Row(request, index, self._own_tokenizer, self._ends, device=self.device)
            for index in range(count)
        ]

    def _forward_prompts(
        self, parts: Sequence[tuple[GenerationRequest, ReadPrompt, int]]
    ) -> Tensor:
        spans = [(one, one.num_read, one.num_read + length) for _, one, length in parts]
        ids_N = torch.tensor([i for one, start, stop in spans for i in one.ids[start:stop]])
        positions_N = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        adapters = [request.adapter for request, _, length in parts for _ in range(length)]
        self._routes.set(adapters, self.device)
        return self.decoder.hidden(
            self._weights,
            ids_N.to(self.device),
            positions_N.to(self.device),
            ReadingAttention([(prompt, length) for _, prompt, length in parts]),
            num_positions=max(stop for _, _, stop in spans),
        )

    def _waits_for(
        self,
        prompt: ReadPrompt,
        request: GenerationRequest,
        parts: Sequence[tuple[GenerationRequest, ReadPrompt, int]],
    ) -> bool:
        """Whether a prompt begins like one that is being read just now."""
        shared = [
            one.num_shared(prompt.ids)
            for other, one, _ in parts
            if other.adapter is request.adapter and one.num_read == 0
        ]
        if max(shared, default=0) < MIN_SHARED:
            return False
        _, cached = self._nearest(prompt, request)
        return max(shared) - cached >= MIN_SHARED

    def _begin_like_another(self, prompt: ReadPrompt, request: GenerationRequest) -> None:
        nearest, length = self._nearest(prompt, request)
        if nearest is not None:
            prompt.take(nearest, length)

    def _nearest(
        self, prompt: ReadPrompt, request: GenerationRequest
    ) -> tuple[ReadPrompt | None, int]:
        """The kept prompt that begins most like this one, and how many tokens they share."""
        nearest, most = None, MIN_SHARED - 1
        for (adapter, _), other in self._kept.items():
            if adapter == id(request.adapter):
                # The last token is read in any case: what follows it is wanted.
                shared = min(other.num_shared(prompt.ids), len(prompt.ids) - 1)
                if shared > most:
                    nearest, most = other, shared
        return nearest, most if nearest is not None else 0

    def _keep_prompt(self, prompt: ReadPrompt, request: GenerationRequest) -> None:
        key = (id(request.adapter), prompt.ids)
        self._kept[key] = prompt
        self._kept.move_to_end(key)
        most = self.limits.max_kept_bytes // self._token_bytes
        while len(self._kept) > MAX_KEPT or sum(len(one.ids) for one in self._kept.values()) > most:
            self._kept.popitem(last=False)

    # ---- speaking

    def _speak(self) -> None:
        """Read the newest token of every row, and draw the next one."""
        if not self._rows:
            return
        positions = list(self._slots.lengths)
        self._routes.set([row.request.adapter for row in self._rows], self.device)
        hidden_RX = self.decoder.hidden(
            self._weights,
            torch.tensor([row.last for row in self._rows], device=self.device),
            torch.tensor(positions, device=self.device),
            self._slots.advance(),
            num_positions=max(positions) + 1,
        )
        self._draw(hidden_RX, self._rows)

    def _draw(self, hidden_RX: Tensor, rows: Sequence[Row]) -> None:
        logits_RV = self._weights.head(hidden_RX).float()
        for row, record in zip(rows, draw_tokens(logits_RV, rows, self._banned_ids), strict=True):
            if math.isfinite(record.logprob):
                row.say(record)
            else:
                row.fail(_NO_NUMBERS)
        told = [one for one in (row.take_progress() for row in rows) if one is not None]
        self._keep_rows([row.finish_reason is None for row in self._rows])
        if any(row.error is not None for row in rows):
            self._slots.repair()
        self._tell(told)

    @staticmethod
    def _tell(told: Sequence[Progress]) -> None:
        groups: dict[Listener, list[Progress]] = {}
        for one in told:
            if not one.request.is_cancelled:
                groups.setdefault(one.request.listener, []).append(one)
        for listener, those in groups.items():
            try:
                listener(those)
            except RuntimeError:
                # The listener's event loop has been closed: nobody waits for this.
                logger.debug("answers came after their listener had gone", exc_info=True)


def _gave_up(request: GenerationRequest, index: int, reason: str) -> Progress:
    return Progress(request, index, "", finish_reason="error", error=reason)

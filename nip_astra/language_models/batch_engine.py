"""Continuous batching: requests join a running batch, and leave it when they end.

Each step is one forward pass over the newest token of every running answer and the next tokens of
prompts. An answer depends on its request alone, up to rounding.

Shape suffixes: `N` token, `R` row, `V` vocabulary, `X` hidden unit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nip_astra.language_models.base import TokenCount
from nip_astra.language_models.sampling import Truncation, sample_with_noise
from nip_astra.language_models.scoring import MAX_LOGITS
from nip_astra.language_models.sequences import (
    GenerationRequest,
    Progress,
    RunningSequence,
    TokenRecord,
)
from nip_astra.language_models.structured import Grammars
from nip_astra.language_models.tree_engine.decoder import Attend, Decoder
from nip_astra.language_models.tree_engine.kv_cache import (
    BLOCK_TOKENS,
    KeptPrompts,
    KVCache,
    PartAttention,
    PrefilledPrompt,
    num_shared,
)
from nip_astra.language_models.tree_engine.routed_weights import Routes, routed
from nip_astra.language_models.tree_engine.weights import Weights

MAX_KEPT = 128
"""Maximum number of cached prompts for prefix reuse."""
NAN_LOGITS = (
    "its logits are NaN: weights or activations overflow. Compute in float32, or use other weights."
)


@dataclass(frozen=True)
class EngineLimits:
    """Limits of concurrent work in one engine."""

    max_rows: int = 256
    """Maximum answers in the running batch."""
    max_cache_bytes: int = 2 << 30
    """Maximum memory for keys and values of the running batch, sized for its longest answers."""
    max_kept_bytes: int = 256 << 20
    """Maximum memory for keys and values of cached prompts."""
    max_read_tokens: int = 2048
    """Maximum prompt tokens between two tokens of the running answers."""


@dataclass(eq=False)
class _Prefill:
    """A prompt that is being prefilled, for some of the answers to it."""

    request: GenerationRequest
    samples: range
    num_read: int = 0
    """Tokens that were forwarded or copied; their keys are those of `source`."""
    source: PrefilledPrompt | None = None
    owns_source: bool = False
    length: int = 0
    """Tokens that it has in the present step."""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.request.prompt

    @property
    def stop(self) -> int:
        """The position after its last token in the present step."""
        return self.num_read + self.length

    @property
    def becomes_row(self) -> bool:
        """Whether it ends in the present step, and answers to it begin."""
        return self.stop == len(self.ids) and self.request.max_tokens > 0

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are computed, for the first answers to it."""
        is_wanted = self.request.echo and self.request.num_top is not None
        return is_wanted and self.samples.start == 0


class BatchEngine:
    """Answers many requests at once with one set of weights; not thread-safe.

    The weights must not change. `banned_ids` are never drawn for an answer returned as text.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        tokenizer: Any,
        *,
        end_ids: Sequence[int],
        banned_ids: Sequence[int],
        limits: EngineLimits,
    ) -> None:
        self.decoder, self.tokenizer, self.limits = decoder, tokenizer, limits
        self.device = weights.embedding_VX.device
        self.token_count = TokenCount()
        self.waiting: deque[GenerationRequest] = deque()
        self.rows: list[RunningSequence] = []
        self._banned_ids = torch.tensor(banned_ids, dtype=torch.long, device=self.device)
        self._end_ids = frozenset(end_ids)
        self._routes = Routes()
        self._weights, self._routed_weights = weights, routed(weights, self._routes)
        shape = (decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self._token_bytes = decoder.cache_numbers_per_token * weights.dtype.itemsize
        self._cache = KVCache(shape, weights.dtype, self.device)
        self._prefilling: list[_Prefill] = []
        self._kept = KeptPrompts(MAX_KEPT, limits.max_kept_bytes // self._token_bytes)

    @property
    def is_busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.rows or self._prefilling)

    @torch.inference_mode()
    def run(self, requests: Sequence[GenerationRequest]) -> list[list[Progress]]:
        """Answer requests together; return the final progress of each answer of each request."""
        self.waiting.extend(requests)
        results: dict[tuple[int, int], Progress] = {}
        while self.is_busy:
            for one in self.step():
                if one.finish_reason is not None:
                    results[one.request.number, one.index] = one
        return [
            [results[request.number, index] for index in range(request.num_samples)]
            for request in requests
        ]

    def step(self) -> list[Progress]:
        """Draw a token of every row and prefill some prompt tokens; gives progress to report."""
        if any(request.is_cancelled for request in self.waiting):
            self.waiting = deque(one for one in self.waiting if not one.is_cancelled)
        self._prefilling = [one for one in self._prefilling if not one.request.is_cancelled]
        self._keep_rows([not row.request.is_cancelled for row in self.rows])
        self._admit()
        parts = self._next_parts()
        return self._forward(parts) if parts or self.rows else []

    def fail(self, reason: str, *, also_waiting: bool = False) -> list[Progress]:
        """Abort all started requests, optionally also the waiting ones."""
        given_up = [(row.request, row.index) for row in self.rows]
        given_up += [(one.request, index) for one in self._prefilling for index in one.samples]
        if also_waiting:
            for request in self.waiting:
                left = range(request.num_started, request.num_samples)
                given_up += [(request, index) for index in left]
            self.waiting.clear()
        self.rows, self._prefilling = [], []
        self._cache = KVCache(self._cache.shape, self._cache.dtype, self.device)
        return [failed_progress(request, index, reason) for request, index in given_up]

    def _keep_rows(self, are_kept: Sequence[bool]) -> None:
        if not all(are_kept):
            self.rows = [self.rows[place] for place in self._cache.keep(are_kept)]

    def _admit(self) -> None:
        """Start requests that wait, as far as their answers have room beside the running ones."""
        if not self.waiting:
            return
        running = [row.request for row in self.rows]
        running += [one.request for one in self._prefilling for _ in one.samples]
        count, longest = len(running), max(map(_num_positions, running), default=0)
        while self.waiting:
            request = self.waiting[0]
            first, left = request.num_started, request.num_samples - request.num_started
            longest = max(longest, _num_positions(request))
            room = self._max_rows(longest) - count
            # A request with too many answers starts alone, and continues where others end.
            needed = 1 if first else min(left, self._max_rows(_num_positions(request)))
            if count and room < needed:
                return
            request.num_started += min(left, max(room, 1))
            samples = range(first, request.num_started)
            self._prefilling.append(_Prefill(request, samples))
            count += len(samples)
            if samples.stop < request.num_samples:
                return
            self.waiting.popleft()

    def _max_rows(self, num_positions: int) -> int:
        """Return how many answers of some length fit in the batch together."""
        size = num_positions * self._token_bytes
        return min(self.limits.max_rows, self.limits.max_cache_bytes // size)

    # ---- prompts

    def _next_parts(self) -> list[_Prefill]:
        """Return the prompts with tokens in this step, whose numbers are set."""
        budget = self.limits.max_read_tokens
        parts: list[_Prefill] = []
        for one in self._prefilling:
            if budget <= 0:
                break
            # All tokens of a prompt that is scored are forwarded.
            if one.num_read == 0 and not one.is_scored:
                source, length = self._kept.nearest(one.ids, one.request.adapter)
                if _waits_for(one, length, parts):
                    continue
                one.source, one.num_read = source, length
            one.length = min(budget, len(one.ids) - one.num_read)
            parts.append(one)
            budget -= one.length
        return parts

    def _own_keys(self, one: _Prefill) -> PrefilledPrompt:
        """Return the keys of a prompt beside the batch, with room for the rest."""
        if one.source is not None and one.owns_source:
            return one.source
        own = self._cache.unread(one.ids)
        if one.source is not None:
            own.copy_from(one.source, one.num_read)
        one.source, one.owns_source = own, True
        return own

    def _start_rows(self, ending: Sequence[_Prefill]) -> list[int]:
        """Make a row of each ended prompt, then of its samples; return the row of each copy."""
        first = len(self.rows)
        self.rows += [self._sequence(one.request, one.samples.start) for one in ending]
        copied: list[int] = []
        for row, one in enumerate(ending, first):
            one.num_read = len(one.ids)
            if not self._kept.renew(one.ids, one.request.adapter):
                self._kept.add(self._cache.prompt(row, one.ids), one.request.adapter)
            if more := one.samples[1:]:
                self.rows += [self._sequence(one.request, index) for index in more]
                self._cache.repeat(row, len(more))
                copied += [row] * len(more)
        return copied

    def _advance_apart(self, parts: Sequence[_Prefill]) -> list[Progress]:
        """Count the tokens read beside the batch; gives answers that are the prompt alone."""
        progress: list[Progress] = []
        for one in parts:
            one.num_read = one.stop
            if one.num_read < len(one.ids):
                continue
            request = one.request
            if not self._kept.renew(one.ids, request.adapter):
                self._kept.add(self._own_keys(one), request.adapter)
            is_finite = all(math.isfinite(token.logprob) for token in request.prompt_tokens[1:])
            for row in (self._sequence(request, index) for index in one.samples):
                if not is_finite:
                    row.fail(NAN_LOGITS)
                progress += filter(None, [row.take_progress()])
        return progress

    def _sequence(self, request: GenerationRequest, index: int) -> RunningSequence:
        grammar = request.grammar
        matcher = None if grammar is None else self.grammars.matcher(grammar)
        return RunningSequence(
            *(request, index, self.tokenizer, self._end_ids), device=self.device, matcher=matcher
        )

    @cached_property
    def grammars(self) -> Grammars:
        """Return the grammars of its vocabulary; raises as `Grammars`."""
        return Grammars(self.tokenizer, self._end_ids, len(self._weights.embedding_VX))

    def _score_prompts(self, hidden_NX: Tensor, parts: Sequence[_Prefill], start: int) -> None:
        """Record log-probabilities of the tokens after those of the parts, which are at `start`."""
        rows: list[int] = []
        targets: list[int] = []
        owners: list[GenerationRequest] = []
        for one in parts:
            if one.is_scored:
                if one.num_read == 0:
                    one.request.prompt_tokens.append(TokenRecord(one.ids[0], math.nan))
                ids = one.ids[one.num_read + 1 : one.stop + 1]
                rows += range(start, start + len(ids))
                targets += ids
                owners += [one.request] * len(ids)
            start += one.length
        self.token_count.head_rows += len(rows)
        size = max(1, MAX_LOGITS // len(self._weights.embedding_VX))
        for first in range(0, len(rows), size):
            part = slice(first, first + size)
            hidden_RX = hidden_NX[torch.tensor(rows[part], device=self.device)]
            logprobs_RV = self._weights.head(hidden_RX).float().log_softmax(dim=1)
            tokens_R = torch.tensor(targets[part], device=self.device)
            records = _records(logprobs_RV, tokens_R, owners[part])
            for request, record in zip(owners[part], records, strict=True):
                request.prompt_tokens.append(record)

    # ---- a step

    def _forward(self, parts: Sequence[_Prefill]) -> list[Progress]:
        """Forward the newest token of every row and those of prompts, and draw the next tokens."""
        # Prompts that end are rows from now on, and rows with one new token come first.
        ending = sorted((one for one in parts if one.becomes_row), key=lambda one: one.length)
        apart = [one for one in parts if not one.becomes_row]
        num_old = len(self.rows)
        if ending:
            num_new = sum(len(one.samples) for one in ending)
            self._cache.reserve(num_new, max(len(one.ids) for one in ending))
        for one in ending:
            self._cache.add(one.source, one.num_read)
        counts = [1] * num_old + [one.length for one in ending]
        hidden_NX = self._hidden(counts, [*ending, *apart], apart)
        if any(one.is_scored for one in parts):
            self._score_prompts(hidden_NX, [*ending, *apart], num_old)
        copied = self._start_rows(ending)
        progress = self._advance_apart(apart)
        self._prefilling = [one for one in self._prefilling if one.num_read < len(one.ids)]
        if not self.rows:
            return progress
        if copied or len(hidden_NX) > len(counts):
            ends = [stop - 1 for stop in accumulate(counts)]
            ends += [ends[row] for row in copied]
            hidden_NX = hidden_NX[torch.tensor(ends, device=self.device)]
        return progress + self._draw(hidden_NX)

    def _hidden(
        self, counts: Sequence[int], parts: Sequence[_Prefill], apart: Sequence[_Prefill]
    ) -> Tensor:
        """Return the hidden states of `counts` new tokens of each row, and of separate prompts."""
        ids = [row.last for row in self.rows]
        adapters = [row.request.adapter for row in self.rows]
        for one in parts:
            ids += one.ids[one.num_read : one.stop]
            adapters += [one.request.adapter] * one.length
        self._routes.set(adapters, self.device)
        self.token_count.forwarded += len(ids)
        rows = self._cache.advance(counts)
        attend: Attend = rows
        positions_N, num_positions = rows.positions, max(self._cache.lengths, default=0)
        if apart:
            beside = PartAttention(
                [(self._own_keys(one), one.num_read, one.length) for one in apart]
            )
            own_N = [torch.arange(one.num_read, one.stop, device=self.device) for one in apart]
            positions_N = torch.cat([positions_N, *own_N])
            num_positions = max(num_positions, *(one.stop for one in apart))
            attend = beside.after(rows) if counts else beside
        return self.decoder.hidden(
            self._routed_weights if self._routes.current else self._weights,
            torch.tensor(ids, device=self.device),
            positions_N,
            attend,
            num_positions=num_positions,
        )

    def _draw(self, hidden_RX: Tensor) -> list[Progress]:
        """Draw the next token of every row."""
        rows = self.rows
        self.token_count.head_rows += len(rows)
        self.token_count.generated += len(rows)
        logits_RV = self._weights.head(hidden_RX).float()
        mask = None
        if any(row.matcher is not None for row in rows):
            mask = self.grammars.mask
        for row, record in zip(
            rows, draw_tokens(logits_RV, rows, self._banned_ids, mask), strict=True
        ):
            if record is None:
                row.fail(NAN_LOGITS)
            else:
                row.append(record)
        progress = [row.take_progress() for row in rows]
        has_failed = any(row.error is not None for row in rows)
        self._keep_rows([row.finish_reason is None for row in rows])
        if has_failed:
            self._cache.repair()
        return [one for one in progress if one is not None]


def _num_positions(request: GenerationRequest) -> int:
    return len(request.prompt) + request.max_tokens


def _waits_for(one: _Prefill, num_kept: int, parts: Sequence[_Prefill]) -> bool:
    """Return whether the next step could copy more of a prompt than the `num_kept` tokens now."""
    shared = [
        num_shared(other.ids, one.ids)
        for other in parts
        if other.request.adapter is one.request.adapter and other.num_read == 0
    ]
    most = max(shared, default=0)
    return most >= BLOCK_TOKENS and most - num_kept >= BLOCK_TOKENS


def failed_progress(request: GenerationRequest, index: int, reason: str) -> Progress:
    """Return the last progress of an aborted answer."""
    return Progress(request, index, "", finish_reason="error", error=reason)


def draw_tokens(
    logits_RV: Tensor,
    rows: Sequence[RunningSequence],
    banned_ids: Tensor,
    mask: Callable[[Tensor, Sequence[Any]], None] | None = None,
) -> list[TokenRecord | None]:
    """Sample one token per row by its request's options; overwrites the logits (float32).

    `mask` excludes the tokens that a row's grammar rejects. None for a row whose logits are not
    finite.
    """
    requests = [row.request for row in rows]
    scored = [row for row, one in enumerate(requests) if one.num_top is not None]
    logprobs_SV = None
    if scored:
        logprobs_SV = _rows_of(logits_RV, scored).log_softmax(dim=1)
    shown = [(place, one.shown_ids) for place, one in enumerate(requests) if one.shown_ids]
    kept = [logits_RV[place, list(ids)] for place, ids in shown]
    texts = [place for place, one in enumerate(requests) if not one.returns_token_ids]
    if len(texts) == len(rows):
        logits_RV.index_fill_(1, banned_ids, float("-inf"))
    elif texts:
        index = torch.tensor(texts, device=logits_RV.device)
        logits_RV[index[:, None], banned_ids] = float("-inf")
    for (place, ids), logits in zip(shown, kept, strict=True):
        logits_RV[place, list(ids)] = logits
    if mask is not None:
        mask(logits_RV, [row.matcher for row in rows])
    tokens_R = sample_with_noise(
        logits_RV,
        temperatures=[one.temperature for one in requests],
        truncations=[Truncation(request.top_k, request.top_p) for request in requests],
        generators=lambda row: rows[row].generator,
    )
    found: list[TokenRecord | None] = [TokenRecord(token, math.nan) for token in tokens_R.tolist()]
    if logprobs_SV is not None:
        tokens_S = _rows_of(tokens_R, scored)
        records = _records(logprobs_SV, tokens_S, [requests[row] for row in scored])
        for row, record in zip(scored, records, strict=True):
            found[row] = record
    # A NaN or infinite logit is the largest. A grammar may exclude all tokens, which is no fault.
    for row, drawn in enumerate(logits_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1).tolist()):
        if math.isnan(drawn) or drawn == math.inf:
            found[row] = None
    return found


def _rows_of(x: Tensor, rows: Sequence[int]) -> Tensor:
    return x if len(rows) == len(x) else x[torch.tensor(rows, device=x.device)]


def _records(
    logprobs_RV: Tensor, tokens_R: Tensor, requests: Sequence[GenerationRequest]
) -> list[TokenRecord]:
    chosen_R = logprobs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
    tops = _top_tokens(logprobs_RV, requests)
    return [
        TokenRecord(token, logprob, top)
        for token, logprob, top in zip(tokens_R.tolist(), chosen_R.tolist(), tops, strict=True)
    ]


def _top_tokens(
    logprobs_RV: Tensor, requests: Sequence[GenerationRequest]
) -> list[tuple[tuple[int, float], ...]]:
    numbers = [one.num_top or 0 for one in requests]
    most = min(max(numbers), logprobs_RV.shape[1])
    if most == 0:
        return [()] * len(requests)
    values, tokens = logprobs_RV.topk(most, dim=1)
    return [
        tuple(zip(ids[:number], logprobs[:number], strict=True))
        for ids, logprobs, number in zip(tokens.tolist(), values.tolist(), numbers, strict=True)
    ]

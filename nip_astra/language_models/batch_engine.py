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
    KVCache,
    PartAttention,
    PrefilledPrompt,
    PromptCache,
    PromptPart,
    count_shared,
)
from nip_astra.language_models.tree_engine.routed_weights import Routes, route_adapters
from nip_astra.language_models.tree_engine.weights import Weights

MAX_CACHED_PROMPTS = 128
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
    """Whether `source` may be extended; else it is a cached prompt, which is only read."""
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
        is_requested = self.request.echo and self.request.num_top is not None
        return is_requested and self.samples.start == 0


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
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.limits = limits
        self.device = weights.embedding_VX.device
        self.token_count = TokenCount()
        self.waiting: deque[GenerationRequest] = deque()
        self.rows: list[RunningSequence] = []
        self._banned_ids = torch.tensor(banned_ids, dtype=torch.long, device=self.device)
        self._end_ids = frozenset(end_ids)
        self._weights = weights
        # The adapters of a step's tokens are set before each forward pass.
        self._routes = Routes()
        self._routed_weights = route_adapters(weights, self._routes)
        shape = (decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self._token_bytes = decoder.cache_numbers_per_token * weights.dtype.itemsize
        self._cache = KVCache(shape, weights.dtype, self.device)
        self._prefilling: list[_Prefill] = []
        max_cached_tokens = limits.max_kept_bytes // self._token_bytes
        self._prompt_cache = PromptCache(MAX_CACHED_PROMPTS, max_cached_tokens)

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
            for progress in self.step():
                if progress.finish_reason is not None:
                    results[progress.request.number, progress.index] = progress
        return [
            [results[request.number, index] for index in range(request.num_samples)]
            for request in requests
        ]

    def step(self) -> list[Progress]:
        """Draw a token of every row and prefill some prompt tokens; gives progress to report."""
        if any(request.is_cancelled for request in self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.is_cancelled)
        self._prefilling = [
            prefill for prefill in self._prefilling if not prefill.request.is_cancelled
        ]
        self._keep_rows([not row.request.is_cancelled for row in self.rows])
        self._admit()
        parts = self._choose_parts()
        return self._forward(parts) if parts or self.rows else []

    def fail(self, reason: str, *, also_waiting: bool = False) -> list[Progress]:
        """Abort all started requests, optionally also the waiting ones."""
        aborted = [(row.request, row.index) for row in self.rows]
        for prefill in self._prefilling:
            aborted += [(prefill.request, index) for index in prefill.samples]
        if also_waiting:
            for request in self.waiting:
                not_started = range(request.num_started, request.num_samples)
                aborted += [(request, index) for index in not_started]
            self.waiting.clear()
        self.rows = []
        self._prefilling = []
        # The error may have left keys half written.
        self._cache = KVCache(self._cache.shape, self._cache.dtype, self.device)
        return [failed_progress(request, index, reason) for request, index in aborted]

    def _keep_rows(self, are_kept: Sequence[bool]) -> None:
        if not all(are_kept):
            self.rows = [self.rows[row] for row in self._cache.keep(are_kept)]

    def _admit(self) -> None:
        """Start requests that wait, as far as their answers have room beside the running ones."""
        if not self.waiting:
            return
        running = [row.request for row in self.rows]
        for prefill in self._prefilling:
            running += [prefill.request] * len(prefill.samples)
        num_running = len(running)
        # All rows of the cache have the length of the longest.
        longest = max(map(_max_positions, running), default=0)
        while self.waiting:
            request = self.waiting[0]
            first_sample = request.num_started
            num_left = request.num_samples - first_sample
            longest = max(longest, _max_positions(request))
            room = self._max_rows(longest) - num_running
            if first_sample > 0:
                needed = 1
            else:
                # A request with too many answers starts alone, and continues where others end.
                needed = min(num_left, self._max_rows(_max_positions(request)))
            if num_running and room < needed:
                return
            num_admitted = min(num_left, max(room, 1))
            request.num_started += num_admitted
            samples = range(first_sample, request.num_started)
            self._prefilling.append(_Prefill(request, samples))
            num_running += num_admitted
            if request.num_started < request.num_samples:
                return
            self.waiting.popleft()

    def _max_rows(self, num_positions: int) -> int:
        """Return how many answers of some length fit in the batch together."""
        size = num_positions * self._token_bytes
        return min(self.limits.max_rows, self.limits.max_cache_bytes // size)

    # ---- prompts

    def _choose_parts(self) -> list[_Prefill]:
        """Return the prompts with tokens in this step, whose numbers are set."""
        budget = self.limits.max_read_tokens
        parts: list[_Prefill] = []
        for prefill in self._prefilling:
            if budget <= 0:
                break
            # All tokens of a prompt that is scored are forwarded.
            if prefill.num_read == 0 and not prefill.is_scored:
                source, num_cached = self._prompt_cache.find_nearest(
                    prefill.ids, prefill.request.adapter
                )
                if _should_wait(prefill, num_cached, parts):
                    continue
                prefill.source = source
                prefill.num_read = num_cached
            prefill.length = min(budget, len(prefill.ids) - prefill.num_read)
            parts.append(prefill)
            budget -= prefill.length
        return parts

    def _keys_beside_batch(self, prefill: _Prefill) -> PrefilledPrompt:
        """Return the keys of a prompt beside the batch, with room for the rest."""
        if prefill.source is not None and prefill.owns_source:
            return prefill.source
        prompt = self._cache.allocate_prompt(prefill.ids)
        if prefill.source is not None:
            prompt.copy_from(prefill.source, prefill.num_read)
        prefill.source = prompt
        prefill.owns_source = True
        return prompt

    def _start_rows(self, ending: Sequence[_Prefill]) -> list[int]:
        """Make a row of each ended prompt, then of its samples; return the row of each copy."""
        first_row = len(self.rows)
        # In the order of their keys in the cache: prompts first, then copies.
        self.rows += [
            self._start_sequence(prefill.request, prefill.samples.start) for prefill in ending
        ]
        copied_rows: list[int] = []
        for row, prefill in enumerate(ending, first_row):
            prefill.num_read = len(prefill.ids)
            adapter = prefill.request.adapter
            if not self._prompt_cache.renew(prefill.ids, adapter):
                self._prompt_cache.add(self._cache.copy_prompt(row, prefill.ids), adapter)
            further_samples = prefill.samples[1:]
            if further_samples:
                self.rows += [
                    self._start_sequence(prefill.request, index) for index in further_samples
                ]
                self._cache.repeat(row, len(further_samples))
                copied_rows += [row] * len(further_samples)
        return copied_rows

    def _advance_apart(self, parts: Sequence[_Prefill]) -> list[Progress]:
        """Count the tokens read beside the batch; gives answers that are the prompt alone."""
        results: list[Progress] = []
        for prefill in parts:
            prefill.num_read = prefill.stop
            if prefill.num_read < len(prefill.ids):
                continue
            request = prefill.request
            if not self._prompt_cache.renew(prefill.ids, request.adapter):
                self._prompt_cache.add(self._keys_beside_batch(prefill), request.adapter)
            # The first token has no log-probability.
            is_finite = all(math.isfinite(token.logprob) for token in request.prompt_tokens[1:])
            for index in prefill.samples:
                sequence = self._start_sequence(request, index)
                if not is_finite:
                    sequence.fail(NAN_LOGITS)
                progress = sequence.take_progress()
                if progress is not None:
                    results.append(progress)
        return results

    def _start_sequence(self, request: GenerationRequest, index: int) -> RunningSequence:
        grammar = request.grammar
        matcher = None if grammar is None else self.grammars.matcher(grammar)
        return RunningSequence(
            request, index, self.tokenizer, self._end_ids, device=self.device, matcher=matcher
        )

    @cached_property
    def grammars(self) -> Grammars:
        """Return the grammars of its vocabulary; raises as `Grammars`."""
        return Grammars(self.tokenizer, self._end_ids, len(self._weights.embedding_VX))

    def _score_prompts(
        self, hidden_NX: Tensor, parts: Sequence[_Prefill], first_token: int
    ) -> None:
        """Record log-probabilities of the tokens after those of the parts.

        The hidden states of the parts begin at `first_token`.
        """
        positions: list[int] = []
        targets: list[int] = []
        requests: list[GenerationRequest] = []
        for prefill in parts:
            if prefill.is_scored:
                if prefill.num_read == 0:
                    prefill.request.prompt_tokens.append(TokenRecord(prefill.ids[0], math.nan))
                # Each position predicts the next token; the last one, the answer's first.
                ids = prefill.ids[prefill.num_read + 1 : prefill.stop + 1]
                positions += range(first_token, first_token + len(ids))
                targets += ids
                requests += [prefill.request] * len(ids)
            first_token += prefill.length
        self.token_count.head_rows += len(positions)
        chunk_size = max(1, MAX_LOGITS // len(self._weights.embedding_VX))
        for start in range(0, len(positions), chunk_size):
            chunk = slice(start, start + chunk_size)
            hidden_RX = hidden_NX[torch.tensor(positions[chunk], device=self.device)]
            logprobs_RV = self._weights.head(hidden_RX).float().log_softmax(dim=1)
            tokens_R = torch.tensor(targets[chunk], device=self.device)
            records = _build_records(logprobs_RV, tokens_R, requests[chunk])
            for request, record in zip(requests[chunk], records, strict=True):
                request.prompt_tokens.append(record)

    # ---- a step

    def _forward(self, parts: Sequence[_Prefill]) -> list[Progress]:
        """Forward the newest token of every row and those of prompts, and draw the next tokens."""
        # Prompts that end are rows from now on, and rows with one new token come first.
        ending = [prefill for prefill in parts if prefill.becomes_row]
        ending.sort(key=lambda prefill: prefill.length)
        apart = [prefill for prefill in parts if not prefill.becomes_row]
        num_old_rows = len(self.rows)
        if ending:
            num_new_rows = sum(len(prefill.samples) for prefill in ending)
            longest = max(len(prefill.ids) for prefill in ending)
            self._cache.reserve(num_new_rows, longest)
        for prefill in ending:
            self._cache.add(prefill.source, prefill.num_read)
        # New tokens of each row; those of the prompts apart follow.
        counts = [1] * num_old_rows + [prefill.length for prefill in ending]
        hidden_NX = self._compute_hidden(counts, ending, apart)
        if any(prefill.is_scored for prefill in parts):
            self._score_prompts(hidden_NX, [*ending, *apart], num_old_rows)
        copied_rows = self._start_rows(ending)
        results = self._advance_apart(apart)
        self._prefilling = [
            prefill for prefill in self._prefilling if prefill.num_read < len(prefill.ids)
        ]
        if not self.rows:
            return results
        if copied_rows or len(hidden_NX) > len(counts):
            # The last position of each row, and of the prompt for its copies.
            last_positions = [stop - 1 for stop in accumulate(counts)]
            last_positions += [last_positions[row] for row in copied_rows]
            hidden_NX = hidden_NX[torch.tensor(last_positions, device=self.device)]
        return results + self._draw(hidden_NX)

    def _compute_hidden(
        self, counts: Sequence[int], ending: Sequence[_Prefill], apart: Sequence[_Prefill]
    ) -> Tensor:
        """Return the hidden states of `counts` new tokens of each row, and of prompts apart."""
        ids = [row.last for row in self.rows]
        adapters = [row.request.adapter for row in self.rows]
        for prefill in (*ending, *apart):
            ids += prefill.ids[prefill.num_read : prefill.stop]
            adapters += [prefill.request.adapter] * prefill.length
        self._routes.set(adapters, self.device)
        self.token_count.forwarded += len(ids)
        row_attention = self._cache.advance(counts)
        attend: Attend = row_attention
        positions_N = row_attention.positions
        num_positions = max(self._cache.lengths, default=0)
        if apart:
            part_attention = PartAttention(
                [
                    PromptPart(self._keys_beside_batch(prefill), prefill.num_read, prefill.length)
                    for prefill in apart
                ]
            )
            attend = part_attention.after(row_attention) if counts else part_attention
            part_positions = [
                torch.arange(prefill.num_read, prefill.stop, device=self.device)
                for prefill in apart
            ]
            positions_N = torch.cat([positions_N, *part_positions])
            num_positions = max(num_positions, *(prefill.stop for prefill in apart))
        return self.decoder.hidden(
            self._routed_weights if self._routes.active else self._weights,
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
        records = draw_tokens(logits_RV, rows, self._banned_ids, mask)
        for row, record in zip(rows, records, strict=True):
            if record is None:
                row.fail(NAN_LOGITS)
            else:
                row.append(record)
        progress = [row.take_progress() for row in rows]
        has_failed = any(row.error is not None for row in rows)
        self._keep_rows([row.finish_reason is None for row in rows])
        if has_failed:
            # A failed row's keys may be NaN, and its memory serves other rows from now on.
            self._cache.repair()
        return [item for item in progress if item is not None]


def _max_positions(request: GenerationRequest) -> int:
    return len(request.prompt) + request.max_tokens


def _should_wait(prefill: _Prefill, num_cached: int, parts: Sequence[_Prefill]) -> bool:
    """Return whether the next step could copy more of a prompt than the cached tokens now."""
    num_copyable = 0
    for part in parts:
        # Only a prompt that is read from its beginning is not yet in the cache.
        if part.request.adapter is prefill.request.adapter and part.num_read == 0:
            num_copyable = max(num_copyable, count_shared(part.ids, prefill.ids))
    return num_copyable >= BLOCK_TOKENS and num_copyable - num_cached >= BLOCK_TOKENS


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
    # Before any token is excluded: log-probabilities are the model's own.
    scored_rows = [row for row, request in enumerate(requests) if request.num_top is not None]
    logprobs_SV = None
    if scored_rows:
        logprobs_SV = _select_rows(logits_RV, scored_rows).log_softmax(dim=1)
    _exclude_banned(logits_RV, requests, banned_ids)
    if mask is not None:
        mask(logits_RV, [row.matcher for row in rows])
    tokens_R = sample_with_noise(
        logits_RV,
        temperatures=[request.temperature for request in requests],
        truncations=[Truncation(request.top_k, request.top_p) for request in requests],
        generators=lambda row: rows[row].generator,
    )
    records: list[TokenRecord | None]
    records = [TokenRecord(token, math.nan) for token in tokens_R.tolist()]
    if logprobs_SV is not None:
        tokens_S = _select_rows(tokens_R, scored_rows)
        scored_requests = [requests[row] for row in scored_rows]
        scored_records = _build_records(logprobs_SV, tokens_S, scored_requests)
        for row, record in zip(scored_rows, scored_records, strict=True):
            records[row] = record
    # A NaN or infinite logit is the largest. A grammar may exclude all tokens, which is no fault.
    drawn_logits_R = logits_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
    for row, logit in enumerate(drawn_logits_R.tolist()):
        if math.isnan(logit) or logit == math.inf:
            records[row] = None
    return records


def _exclude_banned(
    logits_RV: Tensor, requests: Sequence[GenerationRequest], banned_ids: Tensor
) -> None:
    """Set the logits of banned tokens to -inf in rows whose answers are returned as text.

    A request may allow some of them, such as the marks of calls (`shown_ids`).
    """
    allowed = [(row, list(request.shown_ids)) for row, request in enumerate(requests)]
    allowed = [(row, ids) for row, ids in allowed if ids]
    # Saved and written back, so that one operation serves all rows.
    saved_logits = [logits_RV[row, ids] for row, ids in allowed]
    text_rows = [row for row, request in enumerate(requests) if not request.returns_token_ids]
    if len(text_rows) == len(requests):
        logits_RV.index_fill_(1, banned_ids, float("-inf"))
    elif text_rows:
        rows_S1 = torch.tensor(text_rows, device=logits_RV.device)[:, None]
        logits_RV[rows_S1, banned_ids] = float("-inf")
    for (row, ids), logits in zip(allowed, saved_logits, strict=True):
        logits_RV[row, ids] = logits


def _select_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    # All rows are returned as they are, without a copy.
    return x if len(rows) == len(x) else x[torch.tensor(rows, device=x.device)]


def _build_records(
    logprobs_RV: Tensor, tokens_R: Tensor, requests: Sequence[GenerationRequest]
) -> list[TokenRecord]:
    chosen_R = logprobs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
    top_tokens = _find_top_tokens(logprobs_RV, requests)
    return [
        TokenRecord(token, logprob, top)
        for token, logprob, top in zip(
            tokens_R.tolist(), chosen_R.tolist(), top_tokens, strict=True
        )
    ]


def _find_top_tokens(
    logprobs_RV: Tensor, requests: Sequence[GenerationRequest]
) -> list[tuple[tuple[int, float], ...]]:
    """Return the most likely tokens of each row with their log-probabilities, as requested."""
    num_requested = [request.num_top or 0 for request in requests]
    max_requested = min(max(num_requested), logprobs_RV.shape[1])
    if max_requested == 0:
        return [()] * len(requests)
    logprobs_RK, tokens_RK = logprobs_RV.topk(max_requested, dim=1)
    top_tokens = []
    for tokens, logprobs, number in zip(
        tokens_RK.tolist(), logprobs_RK.tolist(), num_requested, strict=True
    ):
        top_tokens.append(tuple(zip(tokens[:number], logprobs[:number], strict=True)))
    return top_tokens

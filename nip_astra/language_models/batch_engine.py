"""Continuous batching: requests join a running batch, and leave it when they end.

Steps alternate between prefilling prompts and decoding one token of every running sequence. An
answer depends on its request alone, up to rounding.

Shape suffixes: `N` token, `R` row, `V` vocabulary, `X` hidden unit.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nip_astra.language_models.sampling import sample_with_noise
from nip_astra.language_models.scoring import MAX_LOGITS
from nip_astra.language_models.sequences import (
    GenerationRequest,
    Progress,
    RunningSequence,
    TokenRecord,
)
from nip_astra.language_models.structured import Grammars
from nip_astra.language_models.tokens import TokenCount
from nip_astra.language_models.tree_engine.decoder import Decoder
from nip_astra.language_models.tree_engine.kv_cache import (
    KVCache,
    PrefillAttention,
    PrefilledPrompt,
)
from nip_astra.language_models.tree_engine.routed_weights import Adapter, Routes, routed
from nip_astra.language_models.tree_engine.weights import Weights

MIN_SHARED = 16
"""Minimum length of a common prefix of two prompts that is copied instead of recomputed."""
MAX_KEPT = 128
"""Maximum number of cached prompts for prefix reuse; each new prompt is compared with all."""
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
        self._weights = routed(weights, self._routes)
        self._shape = (decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self._token_bytes = decoder.cache_numbers_per_token * weights.dtype.itemsize
        self._cache = KVCache(self._shape, weights.dtype, self.device)
        self._prefilling: list[tuple[GenerationRequest, PrefilledPrompt]] = []
        # Stores the adapter itself: the id of a deleted one could be reused.
        self._kept: OrderedDict[
            tuple[int, tuple[int, ...]], tuple[Adapter | None, PrefilledPrompt]
        ] = OrderedDict()

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
            for one in chain.from_iterable(self.step()):
                if one.finish_reason is not None:
                    results[one.request.number, one.index] = one
        return [
            [results[request.number, index] for index in range(request.num_samples)]
            for request in requests
        ]

    def step(self) -> Iterator[list[Progress]]:
        """Prefill prompt tokens and decode one token per row; yield progress to report."""
        if any(request.is_cancelled for request in self.waiting):
            self.waiting = deque(one for one in self.waiting if not one.is_cancelled)
        self._prefilling = [one for one in self._prefilling if not one[0].is_cancelled]
        self._keep_rows([not row.request.is_cancelled for row in self.rows])
        while self.waiting and self._has_room(self.waiting[0]):
            request = self.waiting.popleft()
            prompt = PrefilledPrompt(request.prompt, self._shape, self._weights.dtype, self.device)
            self._prefilling.append((request, prompt))
        yield self._prefill()
        yield self._decode()

    def fail(self, reason: str, *, also_waiting: bool = False) -> list[Progress]:
        """Abort all started requests, optionally also the waiting ones."""
        given_up = [(row.request, row.index) for row in self.rows]
        unstarted = [request for request, _ in self._prefilling]
        if also_waiting:
            unstarted += self.waiting
            self.waiting.clear()
        given_up += [
            (request, index) for request in unstarted for index in range(request.num_samples)
        ]
        self.rows, self._prefilling = [], []
        self._cache = KVCache(self._shape, self._weights.dtype, self.device)
        return [failed_progress(request, index, reason) for request, index in given_up]

    def _keep_rows(self, are_kept: Sequence[bool]) -> None:
        if not all(are_kept):
            self.rows = [self.rows[place] for place in self._cache.keep(are_kept)]

    def _has_room(self, request: GenerationRequest) -> bool:
        running = [row.request for row in self.rows]
        running += [one for one, _ in self._prefilling for _ in range(one.num_samples)]
        if not running:
            return True
        together = [*running, *[request] * request.num_samples]
        longest = max(len(one.prompt) + one.max_tokens for one in together)
        size = len(together) * longest * self._token_bytes
        return len(together) <= self.limits.max_rows and size <= self.limits.max_cache_bytes

    # ---- prompts

    def _prefill(self) -> list[Progress]:
        """Forward the next tokens of prompts; sample the first tokens of complete prompts."""
        budget = self.limits.max_read_tokens
        parts: list[tuple[GenerationRequest, PrefilledPrompt, int]] = []
        for request, prompt in self._prefilling:
            if budget <= 0:
                break
            # All tokens of a prompt that is scored are forwarded.
            if prompt.num_read == 0 and not _is_scored(request):
                if self._waits_for(prompt, request, parts):
                    continue
                nearest, length = self._nearest(prompt, request)
                if nearest is not None:
                    prompt.take(nearest, length)
            length = min(budget, len(prompt.ids) - prompt.num_read)
            parts.append((request, prompt, length))
            budget -= length
        if not parts:
            return []
        hidden_NX = self._forward_prompts(parts)
        ends = torch.tensor([length for _, _, length in parts]).cumsum(0) - 1
        last_RX = hidden_NX[ends.to(self.device)]
        self._score_prompts(hidden_NX, parts)
        ended = [
            (one, prompt)
            for one, prompt, n in parts
            if prompt.num_read + n == len(prompt.ids) and one.max_tokens
        ]
        if ended:
            self._cache.reserve(
                sum(one.num_samples for one, _ in ended), max(len(p.ids) for _, p in ended) + 1
            )
        started: list[RunningSequence] = []
        scored: list[RunningSequence] = []
        places: list[int] = []
        for place, (request, prompt, length) in enumerate(parts):
            prompt.num_read += length
            if prompt.num_read == len(prompt.ids):
                rows = [self._sequence(request, index) for index in range(request.num_samples)]
                self._keep_prompt(prompt, request)
                if request.max_tokens == 0:
                    if not all(math.isfinite(one.logprob) for one in request.prompt_tokens[1:]):
                        for row in rows:
                            row.fail(NAN_LOGITS)
                    scored += rows
                    continue
                self._cache.add(prompt, request.num_samples)
                started += rows
                places += [place] * request.num_samples
        self._prefilling = [one for one in self._prefilling if one[1].num_read < len(one[1].ids)]
        progress = [one for one in (row.take_progress() for row in scored) if one is not None]
        if not started:
            return progress
        self.rows += started
        drawn = self._draw(last_RX[torch.tensor(places, device=self.device)], started)
        return progress + drawn

    def _sequence(self, request: GenerationRequest, index: int) -> RunningSequence:
        grammar = request.grammar
        matcher = None if grammar is None else self.grammars.matcher(grammar)
        return RunningSequence(
            *(request, index, self.tokenizer, self._end_ids),
            device=self.device,
            matcher=matcher,
        )

    @cached_property
    def grammars(self) -> Grammars:
        """Return the grammars of its vocabulary; raises as `Grammars`."""
        return Grammars(self.tokenizer, self._end_ids, len(self._weights.embedding_VX))

    def _score_prompts(
        self, hidden_NX: Tensor, parts: Sequence[tuple[GenerationRequest, PrefilledPrompt, int]]
    ) -> None:
        """Record the log-probabilities of the tokens that follow those of this pass."""
        rows: list[int] = []
        targets: list[int] = []
        owners: list[GenerationRequest] = []
        start = 0
        for request, prompt, length in parts:
            if _is_scored(request):
                if prompt.num_read == 0:
                    request.prompt_tokens.append(TokenRecord(prompt.ids[0], math.nan))
                ids = prompt.ids[prompt.num_read + 1 : prompt.num_read + length + 1]
                rows += range(start, start + len(ids))
                targets += ids
                owners += [request] * len(ids)
            start += length
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

    def _forward_prompts(
        self, parts: Sequence[tuple[GenerationRequest, PrefilledPrompt, int]]
    ) -> Tensor:
        spans = [(one, one.num_read, one.num_read + length) for _, one, length in parts]
        ids_N = torch.tensor([i for one, start, stop in spans for i in one.ids[start:stop]])
        positions_N = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        adapters = [request.adapter for request, _, length in parts for _ in range(length)]
        self._routes.set(adapters, self.device)
        self.token_count.forwarded += len(ids_N)
        return self.decoder.hidden(
            self._weights,
            ids_N.to(self.device),
            positions_N.to(self.device),
            PrefillAttention([(prompt, length) for _, prompt, length in parts]),
            num_positions=max(stop for _, _, stop in spans),
        )

    def _waits_for(
        self,
        prompt: PrefilledPrompt,
        request: GenerationRequest,
        parts: Sequence[tuple[GenerationRequest, PrefilledPrompt, int]],
    ) -> bool:
        """Whether a prompt shares a prefix with one in this pass, to be copied in the next step."""
        shared = [
            one.num_shared(prompt.ids)
            for other, one, _ in parts
            if other.adapter is request.adapter and one.num_read == 0
        ]
        if max(shared, default=0) < MIN_SHARED:
            return False
        _, cached = self._nearest(prompt, request)
        return max(shared) - cached >= MIN_SHARED

    def _nearest(
        self, prompt: PrefilledPrompt, request: GenerationRequest
    ) -> tuple[PrefilledPrompt | None, int]:
        """Return the cached prompt with the longest common prefix, and the prefix length."""
        nearest, most = None, MIN_SHARED - 1
        for adapter, other in self._kept.values():
            if adapter is request.adapter:
                # The last token is forwarded in any case: it predicts the answer.
                shared = min(other.num_shared(prompt.ids), len(prompt.ids) - 1)
                if shared > most:
                    nearest, most = other, shared
        return nearest, most if nearest is not None else 0

    def _keep_prompt(self, prompt: PrefilledPrompt, request: GenerationRequest) -> None:
        key = (id(request.adapter), prompt.ids)
        self._kept[key] = request.adapter, prompt
        self._kept.move_to_end(key)
        most = self.limits.max_kept_bytes // self._token_bytes
        while (
            len(self._kept) > MAX_KEPT or sum(len(one.ids) for _, one in self._kept.values()) > most
        ):
            self._kept.popitem(last=False)

    # ---- answers

    def _decode(self) -> list[Progress]:
        """Forward the newest token of every row, and sample the next one."""
        if not self.rows:
            return []
        positions = list(self._cache.lengths)
        self._routes.set([row.request.adapter for row in self.rows], self.device)
        self.token_count.forwarded += len(self.rows)
        hidden_RX = self.decoder.hidden(
            self._weights,
            torch.tensor([row.last for row in self.rows], device=self.device),
            torch.tensor(positions, device=self.device),
            self._cache.advance(),
            num_positions=max(positions) + 1,
        )
        return self._draw(hidden_RX, self.rows)

    def _draw(self, hidden_RX: Tensor, rows: Sequence[RunningSequence]) -> list[Progress]:
        self.token_count.head_rows += len(rows)
        self.token_count.generated += len(rows)
        logits_RV = self._weights.head(hidden_RX).float()
        if any(row.matcher is not None for row in rows):
            records = draw_tokens(logits_RV, rows, self._banned_ids, self.grammars.mask)
        else:
            records = draw_tokens(logits_RV, rows, self._banned_ids)
        for row, record in zip(rows, records, strict=True):
            if math.isfinite(record.logprob):
                row.append(record)
            else:
                row.fail(NAN_LOGITS)
        progress = [one for one in (row.take_progress() for row in rows) if one is not None]
        self._keep_rows([row.finish_reason is None for row in self.rows])
        if any(row.error is not None for row in rows):
            self._cache.repair()
        return progress


def _is_scored(request: GenerationRequest) -> bool:
    """Whether a request returns log-probabilities of its prompt."""
    return request.echo and request.num_top is not None


def failed_progress(request: GenerationRequest, index: int, reason: str) -> Progress:
    """Return the last progress of an aborted answer."""
    return Progress(request, index, "", finish_reason="error", error=reason)


def draw_tokens(
    logits_RV: Tensor,
    rows: Sequence[RunningSequence],
    banned_ids: Tensor,
    mask: Callable[[Tensor, Sequence[Any]], None] | None = None,
) -> list[TokenRecord]:
    """Sample one token per row by its request's options; overwrites the logits (float32).

    `mask` excludes the tokens that a row's grammar rejects. A log-probability is not finite if the
    row's logits are not.
    """
    requests = [row.request for row in rows]
    logprobs_RV = logits_RV.log_softmax(dim=1)
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
        cuts=[(one.top_k, one.top_p) for one in requests],
        generators=[row.generator for row in rows],
    )
    return _records(logprobs_RV, tokens_R, requests)


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

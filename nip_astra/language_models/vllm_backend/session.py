"""One rollout through vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from nip_astra.language_models.base import (
    Generation,
    GenerationSession,
    SamplingOptions,
    TokenCount,
    Turns,
)
from nip_astra.language_models.vllm_backend.requests import (
    Reply,
    Request,
    padded_rows,
    padded_turns,
    seed_of,
)


class AskedByRequest(Protocol):
    """A model that samples a turn for each request."""

    token_count: TokenCount

    def ask(self, requests: Sequence[Request], options: SamplingOptions) -> list[Reply]:
        """Sample a turn for each request from the weights as they are now."""

    def rescored(
        self, contexts: Sequence[Sequence[int]], rows_per_context: int, said: Generation
    ) -> Generation:
        """What was said, with the log-probabilities that losses compare with."""


class VllmSession(GenerationSession):
    """Turns by vLLM, whose prefix cache takes the place of caches of our own."""

    def __init__(self, model: AskedByRequest) -> None:
        self.model = model

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_RT: Tensor,
        options: SamplingOptions,
        *,
        branching: int = 1,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Turns:
        # A request a row: with vLLM's n, siblings would have neighbouring seeds instead of theirs.
        seeds = [seed_of(row_T) for row_T in uniforms_RT]
        requests = [
            Request(
                contexts[row // rows_per_context],
                seed,
                scores_context=spans is not None and row % rows_per_context == 0,
            )
            for row, seed in enumerate(seeds)
        ]
        replies = self.model.ask(requests, options)
        said = padded_turns(replies, options.max_new_tokens)
        self.model.token_count.generated += int(said.mask_BT.sum())
        scores = None
        if spans is not None:
            read = zip(replies[::rows_per_context], spans, strict=True)
            scores = padded_rows([(reply.context_logprobs or [])[a:b] for reply, (a, b) in read])
        return Turns(self.model.rescored(contexts, rows_per_context, said), scores)

"""Log-probabilities of tokens: from hidden states, and of continuations as one tree of tokens.

Shape suffixes: `B` row, `C` context position, `T` continuation position, `N` token of the tree,
`S` scored position, `X` hidden unit, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nip_astra.language_models.base import TokenCount, TokenRows, TokenScores
from nip_astra.language_models.sampling import (
    LogitsTransform,
    SamplingOptions,
    SupportMask,
    keep_likely,
)
from nip_astra.language_models.tree_engine.attention import (
    SMALLEST_FLASH,
    trie_attention,
    uses_flex_attention,
)
from nip_astra.language_models.tree_engine.decoder import Decoder
from nip_astra.language_models.tree_engine.token_trie import TokenTrie
from nip_astra.language_models.tree_engine.weights import Weights

MAX_LOGITS = 1 << 24
"""Maximum logits computed at once without gradients: 64 MiB of float32."""
MAX_JOINT_LOGITS = 1 << 26
"""Maximum logits computed at once with gradients."""
MAX_KEPT_LOGITS = 1 << 28
"""Maximum logits kept for the backward pass (1 GiB); beyond it, each chunk's are recomputed."""
MAX_CACHED_LOGITS = 1 << 18
"""Logits that a processor reads several times before the next ones, so that they stay in its cache
(1 MiB)."""
MAX_MASK_BYTES = 1 << 28
"""Maximum size of a row's dense mask."""


@dataclass(frozen=True)
class ScoreNeeds:
    """Outputs of scoring besides log-probabilities, and the distribution of all of them."""

    entropy: bool = False
    hidden: bool = False
    transform: LogitsTransform | None = None
    """None for the model's own distribution."""


def token_logprobs(hidden_SX: Tensor, ids_S: Tensor, weights: Weights) -> Tensor:
    """Return the log-probability of one token per position, float32 `[S]` nats."""
    logprobs_S, _ = token_logprobs_and_entropy(hidden_SX, ids_S, weights, needs_entropy=False)
    return logprobs_S


def token_logprobs_and_entropy(
    hidden_SX: Tensor,
    ids_S: Tensor,
    weights: Weights,
    *,
    needs_entropy: bool = True,
    transform: LogitsTransform | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of one token and the entropy at each position, float32 `[S]` nats.

    Gradients flow through both. The entropy is None unless requested.
    """

    def score(
        hidden: Tensor, ids: Tensor, transform: LogitsTransform | None
    ) -> tuple[Tensor, Tensor | None]:
        logits = weights.head(hidden)
        return chosen_logprobs(logits, ids, transform, needs_entropy=needs_entropy)

    vocab_size = len(weights.embedding_VX)
    num_logits = len(ids_S) * vocab_size
    has_gradient = torch.is_grad_enabled() and hidden_SX.requires_grad
    if has_gradient and num_logits <= MAX_JOINT_LOGITS:
        return score(hidden_SX, ids_S, transform)
    # Logits are by far the largest tensor: without gradients a chunk's are freed before the next
    # ones, with gradients they are recomputed in the backward pass if they would not all fit.
    is_recomputed = has_gradient and num_logits > MAX_KEPT_LOGITS
    chunk_size = max(1, MAX_LOGITS // vocab_size)
    chunks = zip(torch.split(hidden_SX, chunk_size), torch.split(ids_S, chunk_size), strict=True)
    start = 0
    logprobs, entropies = [], []
    for hidden, ids in chunks:
        stop = start + len(ids)
        chunk_transform = None if transform is None else transform.at(range(start, stop))
        if is_recomputed:
            chunk_logprobs, chunk_entropy = checkpoint(
                score, hidden, ids, chunk_transform, use_reentrant=False
            )
        else:
            chunk_logprobs, chunk_entropy = score(hidden, ids, chunk_transform)
        logprobs.append(chunk_logprobs)
        entropies.append(chunk_entropy)
        start = stop
    return torch.cat(logprobs), torch.cat(entropies) if needs_entropy else None


def chosen_logprobs(
    logits_SV: Tensor,
    ids_S: Tensor,
    transform: LogitsTransform | None = None,
    *,
    needs_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute `token_logprobs_and_entropy` from logits."""
    logits_SV = logits_SV.float()
    if transform is not None:
        logits_SV = transform.apply(logits_SV)
    # torch leaves `apply` without types.
    if needs_entropy:
        logprobs_S, entropy_S = _ChosenLogprobsAndEntropy.apply(logits_SV, ids_S)  # type: ignore[no-untyped-call]
        return logprobs_S, entropy_S
    return _ChosenLogprobs.apply(logits_SV, ids_S), None  # type: ignore[no-untyped-call]


def _num_cached_rows(logits_SV: Tensor) -> int:
    """Return the number of rows that stay in a processor's cache."""
    num_rows, vocab_size = logits_SV.shape
    if logits_SV.device.type != "cpu":
        return max(1, num_rows)
    return max(1, MAX_CACHED_LOGITS // max(1, vocab_size))


class _ChosenLogprobs(torch.autograd.Function):
    """Log-softmax at one index per row; its backward pass allocates one tensor of the logits' size.

    The gradient with respect to the logits is `g * (onehot(ids) - softmax(logits))`.
    """

    @staticmethod
    def forward(ctx: Any, logits_SV: Tensor, ids_S: Tensor) -> Tensor:
        chunks = torch.split(logits_SV, _num_cached_rows(logits_SV))
        normalizer_S1 = torch.cat([chunk.logsumexp(dim=1, keepdim=True) for chunk in chunks])
        # Not the log-probabilities of all tokens: the backward pass makes them from these.
        ctx.save_for_backward(logits_SV, ids_S, normalizer_S1)
        chosen_S1 = logits_SV.gather(1, ids_S.unsqueeze(1))
        return (chosen_S1 - normalizer_S1).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits_SV, ids_S, normalizer_S1 = ctx.saved_tensors
        grad_S1 = gradients[0].unsqueeze(1)
        grad_SV = torch.empty_like(logits_SV)
        # Three operations in place on a few rows at a time, which stay in the cache between them.
        size = _num_cached_rows(logits_SV)
        chunks = zip(
            torch.split(logits_SV, size),
            torch.split(normalizer_S1, size),
            torch.split(grad_S1, size),
            torch.split(grad_SV, size),
            strict=True,
        )
        for logits, normalizer, grad, out in chunks:
            torch.sub(logits, normalizer, out=out).exp_().mul_(-grad)
        return grad_SV.scatter_add_(1, ids_S.unsqueeze(1), grad_S1), None


class _ChosenLogprobsAndEntropy(torch.autograd.Function):
    """The same with the entropy `H` of each row's distribution `p`.

    The entropy adds `-g * p * (log p + H)` to the gradient with respect to the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits_SV: Tensor, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_SV = logits_SV - logits_SV.logsumexp(dim=1, keepdim=True)
        # A token of probability 0 adds nothing, though its log-probability is minus infinity.
        lowest = torch.finfo(logprobs_SV.dtype).min
        entropy_S = -(logprobs_SV.exp() * logprobs_SV.clamp(min=lowest)).sum(dim=1)
        ctx.save_for_backward(logprobs_SV, ids_S, entropy_S)
        return logprobs_SV.gather(1, ids_S.unsqueeze(1)).squeeze(1), entropy_S

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logprobs_SV, ids_S, entropy_S = ctx.saved_tensors
        grad_logprob_S1 = gradients[0].unsqueeze(1)
        grad_entropy_S1 = gradients[1].unsqueeze(1)
        # 0 * -inf would be NaN.
        lowest = torch.finfo(logprobs_SV.dtype).min
        finite_SV = logprobs_SV.clamp(min=lowest)
        # -p * (g_entropy * (log p + H) + g_logprob), then g_logprob at the token itself.
        slope_SV = finite_SV.add_(entropy_S.unsqueeze(1)).mul_(grad_entropy_S1)
        grad_SV = slope_SV.add_(grad_logprob_S1).mul_(logprobs_SV.exp()).neg_()
        return grad_SV.scatter_add_(1, ids_S.unsqueeze(1), grad_logprob_S1), None


def scatter_scores(
    mask_BT: Tensor, logprobs_S: Tensor, entropy_S: Tensor | None, hidden_SX: Tensor | None
) -> TokenScores:
    """Scatter the values of scored positions over `[B, T]`, 0 elsewhere."""
    index = mask_BT.nonzero(as_tuple=True)

    def scatter(values: Tensor) -> Tensor:
        empty = values.new_zeros(*mask_BT.shape, *values.shape[1:])
        # Not in place: gradients flow to the values.
        return empty.index_put(index, values)

    return TokenScores(
        scatter(logprobs_S),
        None if entropy_S is None else scatter(entropy_S),
        None if hidden_SX is None else scatter(hidden_SX),
    )


# ---- continuations as one tree: shared tokens are forwarded once


def sequences_to_read(rows: TokenRows) -> list[list[int]]:
    """Return the tokens to forward to score each row: all but its last."""
    context_BC, context_mask_BC, ids_BT, mask_BT = rows
    width = context_BC.shape[1]
    sequences = []
    for context, context_size, ids, num_ids in zip(
        context_BC.tolist(),
        context_mask_BC.sum(dim=1).tolist(),
        ids_BT.tolist(),
        mask_BT.sum(dim=1).tolist(),
        strict=True,
    ):
        # Contexts are padded on the left, continuations on the right.
        context_tokens = context[width - context_size :]
        tokens_before_last = ids[: max(num_ids - 1, 0)]
        sequences.append(context_tokens + tokens_before_last)
    return sequences


def row_limits(
    decoder: Decoder | None, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return options of `build_trie` for the attention on a device.

    Only dense masks take memory quadratic in a row. Flex attention skips unrelated tokens, but rows
    that share almost nothing can be computed in several passes.
    """
    if decoder is None:
        return {}
    if uses_flex_attention(device, dtype):
        return {"pair_cost": decoder.pair_cost, "max_dense_tokens": 0}
    if device.type == "cpu":
        # Longer rows are computed in blocks; see `TrieAttention`.
        smallest_in_blocks = SMALLEST_FLASH // (decoder.num_heads * decoder.head_dim)
        return {
            "pair_cost": decoder.pair_cost,
            "max_dense_tokens": math.isqrt(smallest_in_blocks),
        }
    max_row_tokens = math.isqrt(MAX_MASK_BYTES // dtype.itemsize)
    return {"pair_cost": decoder.pair_cost, "max_row_tokens": max_row_tokens}


def score_trie(
    decoder: Decoder,
    weights: Weights,
    trie: TokenTrie,
    rows: TokenRows,
    needs: ScoreNeeds,
    *,
    max_batch_tokens: int,
) -> tuple[TokenScores, TokenCount]:
    """Score each continuation token with the trie of `sequences_to_read`, and count the work."""
    _, context_mask_BC, ids_BT, mask_BT = rows
    device = weights.embedding_VX.device
    trie = trie.to(device)
    # Elsewhere a backward pass keeps the activations of all passes anyway. Flex attention's mask
    # takes memory quadratic in the tokens of a pass.
    is_split = not torch.is_grad_enabled() or uses_flex_attention(device, weights.dtype)
    hidden_by_pass = []
    for part in trie.passes(max_batch_tokens if is_split else trie.num_tokens):
        hidden_by_pass.append(
            decoder.hidden(
                weights,
                part.ids_N,
                part.positions_N,
                trie_attention(part, weights.dtype),
                num_positions=trie.nodes_SD.shape[1],
                max_tokens=max_batch_tokens,
            )
        )
    hidden_NX = torch.cat(hidden_by_pass)
    # On the device of the masks, without a synchronisation.
    row_S, column_S = mask_BT.nonzero(as_tuple=True)
    # The position before a token predicts it.
    context_sizes_B = context_mask_BC.sum(dim=1)
    depth_S = context_sizes_B[row_S] - 1 + column_S
    nodes_S = trie.nodes_SD[row_S.to(device), depth_S.to(device)]
    # Rows that share a token read the same hidden state; their gradients add up.
    hidden_SX = hidden_NX[nodes_S]
    ids_S = ids_BT[mask_BT].to(device)
    logprobs_S, entropy_S = token_logprobs_and_entropy(
        hidden_SX, ids_S, weights, needs_entropy=needs.entropy, transform=needs.transform
    )
    scores = scatter_scores(
        mask_BT, logprobs_S, entropy_S, hidden_SX.float() if needs.hidden else None
    )
    return scores, TokenCount(forwarded=trie.num_tokens, head_rows=len(ids_S))


def find_support(
    head: Callable[[Tensor], Tensor],
    hidden_SX: Tensor,
    ids_S: Tensor,
    transform: LogitsTransform,
    options: SamplingOptions,
    vocab_size: int,
) -> SupportMask:
    """Return the tokens that `top_k` and `top_p` keep, always with the drawn one, on the CPU.

    Sampling may take another path through the model, whose rounding moves that token across the
    threshold. Chunks bound the memory for logits.
    """
    # Empty tensors give `cat` the right types if nothing is scored.
    ids = [torch.zeros(0, dtype=torch.int32)]
    counts = [torch.zeros(0, dtype=torch.long)]
    chunk_size = max(1, MAX_LOGITS // vocab_size)
    for start in range(0, len(ids_S), chunk_size):
        stop = min(start + chunk_size, len(ids_S))
        logits_SV = head(hidden_SX[start:stop]).float()
        logits_SV = transform.at(range(start, stop)).apply(logits_SV)
        is_kept_SV = keep_likely(logits_SV, top_k=options.top_k, top_p=options.top_p)
        is_kept_SV.scatter_(1, ids_S[start:stop].unsqueeze(1), True)
        kept_ids = is_kept_SV.nonzero()[:, 1]
        ids.append(kept_ids.int().cpu())
        counts.append(is_kept_SV.sum(dim=1).cpu())
    return SupportMask(torch.cat(ids), torch.cat(counts))

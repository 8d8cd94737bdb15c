"""Scoring of continuations as one tree of tokens: shared tokens are forwarded once.

Shape suffixes: `B` row, `C` context position, `T` continuation position, `N` token of the tree,
`S` scored position, `X` hidden unit, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nip_astra.language_models.base import TokenCount, TokenRows, TokenScores
from nip_astra.language_models.plain_forward import spread
from nip_astra.language_models.sampling import (
    LogitsTransform,
    SamplingOptions,
    SupportMask,
    keep_likely,
)
from nip_astra.language_models.scoring import MAX_LOGITS, ScoreNeeds, token_logprobs_and_entropy
from nip_astra.language_models.tree_engine.attention import (
    SMALLEST_IN_BLOCKS,
    trie_attention,
    uses_flex_attention,
)
from nip_astra.language_models.tree_engine.decoder import Decoder
from nip_astra.language_models.tree_engine.token_trie import TokenTrie
from nip_astra.language_models.tree_engine.weights import Weights

MAX_MASK_BYTES = 1 << 28
"""Maximum size of a row's dense mask."""


def sequences_to_read(rows: TokenRows) -> list[list[int]]:
    """Return the tokens to forward to score each row: all but its last."""
    context_BC, context_mask_BC, ids_BT, mask_BT = rows
    width = context_BC.shape[1]
    return [
        [*context[width - size :], *ids[: max(length - 1, 0)]]
        for context, size, ids, length in zip(
            context_BC.tolist(),
            context_mask_BC.sum(dim=1).tolist(),
            ids_BT.tolist(),
            mask_BT.sum(dim=1).tolist(),
            strict=True,
        )
    ]


def row_limits(
    decoder: Decoder | None, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return options of `build_trie` for the attention on a device.

    Only dense masks take memory quadratic in a row. Flex attention skips unrelated tokens, but rows
    that share almost nothing can be computed in several passes.
    """
    if decoder is None:
        return {}
    if uses_flex_attention(device):
        return {"pair_cost": decoder.pair_cost, "max_dense_tokens": 0}
    if device.type == "cpu":
        in_blocks = math.isqrt(SMALLEST_IN_BLOCKS // (decoder.num_heads * decoder.head_dim))
        return {"pair_cost": decoder.pair_cost, "max_dense_tokens": in_blocks}
    longest = math.isqrt(MAX_MASK_BYTES // dtype.itemsize)
    return {"pair_cost": decoder.pair_cost, "max_row_tokens": longest}


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
    # The mask of block attention takes memory quadratic in the tokens of a pass.
    is_bounded = not torch.is_grad_enabled() or uses_flex_attention(device)
    limit = max_batch_tokens if is_bounded else trie.num_tokens
    hidden_NX = torch.cat(
        [
            decoder.hidden(
                weights,
                part.ids_N,
                part.positions_N,
                trie_attention(part, weights.dtype),
                num_positions=trie.nodes_SD.shape[1],
                max_tokens=max_batch_tokens,
            )
            for part in trie.passes(limit)
        ]
    )
    # On the device of the masks, without a synchronisation.
    row_S, column_S = mask_BT.nonzero(as_tuple=True)
    # The position before a token predicts it.
    before_S = context_mask_BC.sum(dim=1)[row_S] - 1
    nodes_S = trie.nodes_SD[row_S.to(device), (before_S + column_S).to(device)]
    hidden_SX = hidden_NX[nodes_S]
    ids_S = ids_BT[mask_BT].to(device)
    scores = token_logprobs_and_entropy(
        hidden_SX, ids_S, weights, needs_entropy=needs.entropy, transform=needs.transform
    )
    spent = TokenCount(forwarded=trie.num_tokens, head_rows=len(ids_S))
    return spread(mask_BT, *scores, hidden_SX.float() if needs.hidden else None), spent


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
    ids, counts = [torch.zeros(0, dtype=torch.int32)], [torch.zeros(0, dtype=torch.long)]
    size = max(1, MAX_LOGITS // vocab_size)
    for start in range(0, len(ids_S), size):
        part = slice(start, start + size)
        positions = range(len(ids_S))[part]
        logits_SV = transform.at(positions).apply(head(hidden_SX[part]).float())
        is_kept_SV = keep_likely(logits_SV, top_k=options.top_k, top_p=options.top_p)
        is_kept_SV.scatter_(1, ids_S[part].unsqueeze(1), True)
        ids.append(is_kept_SV.nonzero()[:, 1].int().cpu())
        counts.append(is_kept_SV.sum(dim=1).cpu())
    return SupportMask(torch.cat(ids), torch.cat(counts))

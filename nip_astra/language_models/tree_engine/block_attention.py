"""Attention over a token trie in blocks of queries, each with the keys that it can see alone.

A token sees itself and its ancestors, which are few of a row. The tokens of a block stand one after
the other in the trie and share most of what they see, so that strangers are hardly computed.

Shape suffixes: `N` token, `K` key-value head, `G` query heads of one key-value head, `D` head
dimension, `Q` query of a block, once for each of `G`, `L` key of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.language_models.tree_engine.token_trie import TokenTrie

BLOCK_TOKENS = 96
"""Smaller blocks compute fewer strangers, in more and smaller products."""


class Block(NamedTuple):
    """Queries that stand together, and the keys that one of them sees.

    Attributes
    ----------
    start, stop : int
        Tokens of the queries.
    keys_L : Tensor
        int64 tokens.
    bias_QL : Tensor
        float32: 0 where a key is seen, -inf where not.
    """

    start: int
    stop: int
    keys_L: Tensor
    bias_QL: Tensor


def blocks_of(trie: TokenTrie, group: int) -> list[Block]:
    """Divide the rows of a trie into blocks, for `group` query heads a key-value head."""
    blocks, first = [], 0
    for mask in trie.row_masks():
        for start in range(0, len(mask), BLOCK_TOKENS):
            seen = mask[start : start + BLOCK_TOKENS]
            keys = seen.any(dim=0).nonzero().squeeze(1)
            is_hidden_QL = ~seen[:, keys].repeat_interleave(group, dim=0)
            bias_QL = torch.zeros(is_hidden_QL.shape, device=mask.device)
            bias_QL.masked_fill_(is_hidden_QL, float("-inf"))
            begin = first + start
            blocks.append(Block(begin, begin + len(seen), keys + first, bias_QL))
        first += len(mask)
    return blocks


def block_attention(
    queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, blocks: list[Block]
) -> Tensor:
    """The attended values `[N, H * D]`; the queries carry the scale, gradients flow."""
    num_tokens, num_keys, dim = keys_NKD.shape
    # Query heads of one group side by side: they read the same keys.
    queries_KND = queries_NHD.view(num_tokens, num_keys, -1, dim).transpose(0, 1)
    attended: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
        queries_KND.reshape(num_keys, -1, dim),
        keys_NKD.transpose(0, 1),
        values_NKD.transpose(0, 1),
        blocks,
    )
    return attended.view(num_keys, num_tokens, -1).transpose(0, 1).reshape(num_tokens, -1)


class _BlockAttention(torch.autograd.Function):
    """Nothing of the size of queries times keys is kept: the backward pass computes it again."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys_KND: Tensor, values_KND: Tensor, blocks: list[Block]
    ) -> Tensor:
        ctx.save_for_backward(queries, keys_KND, values_KND)
        ctx.blocks = blocks
        attended = []
        for block, shares_KQL in zip(blocks, _shares(queries, keys_KND, blocks), strict=True):
            attended.append(torch.bmm(shares_KQL, values_KND.index_select(1, block.keys_L)))
        return torch.cat(attended, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys_KND, values_KND = ctx.saved_tensors
        grad_queries = torch.empty_like(queries)
        # Many blocks add to one key, which in bfloat16 would lose what each adds.
        grad_keys = torch.zeros(keys_KND.shape, device=queries.device)
        grad_values = torch.zeros_like(grad_keys)
        group = queries.shape[1] // keys_KND.shape[1]
        for block, shares_KQL in zip(
            ctx.blocks, _shares(queries, keys_KND, ctx.blocks), strict=True
        ):
            own = slice(block.start * group, block.stop * group)
            grad_KQD = gradients[0][:, own]
            values_KLD = values_KND.index_select(1, block.keys_L)
            grad_shares = torch.bmm(grad_KQD, values_KLD.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(
                grad_shares, shares_KQL, -1, shares_KQL.dtype
            )
            grad_queries[:, own] = torch.bmm(grad_scores, keys_KND.index_select(1, block.keys_L))
            new_keys = torch.bmm(grad_scores.transpose(1, 2), queries[:, own])
            new_values = torch.bmm(shares_KQL.transpose(1, 2), grad_KQD)
            grad_keys.index_add_(1, block.keys_L, new_keys.float())
            grad_values.index_add_(1, block.keys_L, new_values.float())
        return grad_queries, grad_keys.to(keys_KND), grad_values.to(values_KND), None


def _shares(queries: Tensor, keys_KND: Tensor, blocks: list[Block]) -> Iterator[Tensor]:
    """The weight of each key for each query, `[K, Q, L]`, block by block."""
    group = queries.shape[1] // keys_KND.shape[1]
    # In float32: rounded to bfloat16, a large score would be off by more than its inputs are.
    exact_queries, exact_keys_KND = queries.float(), keys_KND.float()
    for block in blocks:
        queries_KQD = exact_queries[:, block.start * group : block.stop * group]
        keys_KDL = exact_keys_KND.index_select(1, block.keys_L).transpose(1, 2)
        scores = torch.baddbmm(block.bias_QL, queries_KQD, keys_KDL)
        yield scores.softmax(dim=-1).to(keys_KND.dtype)

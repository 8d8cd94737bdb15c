"""Attention over token trees: each token sees itself and its ancestors, which are stored once.

Shape suffixes: `N` token, `R` row, `T` query position, `K` key-value head, `G` query heads of one
key-value head, `H` all query heads, `D` head dimension, `L` key position, `P` group of rows that
share keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.language_models.tree_engine.block_attention import Block, block_attention, blocks_of
from nip_astra.language_models.tree_engine.token_trie import TokenTrie

SMALLEST_IN_BLOCKS = 1 << 26
"""Multiplications that scores of a row take, below which one product is as fast as blocks."""


class TrieAttention:
    """Attention within the rows of a trie; gradients flow.

    On a CPU long rows are attended to in blocks that leave strangers out.

    Parameters
    ----------
    trie : TokenTrie
        On the device of the model.
    dtype : torch.dtype
        Of queries and keys.
    """

    def __init__(self, trie: TokenTrie, dtype: torch.dtype) -> None:
        self.trie = trie
        self.dtype = dtype
        self.row_lengths = trie.row_lengths
        self._blocks: list[Block] | None = None

    @cached_property
    def biases(self) -> list[Tensor]:
        """What each row adds to its scores: 0 where a token is seen, -inf where not."""
        return [_as_bias(mask, self.dtype) for mask in self.trie.row_masks()]

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """The attended values `[N, H * D]`; the queries carry the scale."""
        if self._is_in_blocks(queries_NHD):
            if self._blocks is None:
                self._blocks = blocks_of(self.trie, queries_NHD.shape[1] // keys_NKD.shape[1])
            return block_attention(queries_NHD, keys_NKD, values_NKD, self._blocks)
        rows = []
        inputs = (queries_NHD, keys_NKD, values_NKD)
        splits = (torch.split(x, self.row_lengths) for x in inputs)
        for query, key, value, bias in zip(*splits, self.biases, strict=True):
            length, num_keys, dim = key.shape
            grouped_KGLD = query.view(length, num_keys, -1, dim).permute(1, 2, 0, 3)
            shape = grouped_KGLD.shape
            attended_KGLD = F.scaled_dot_product_attention(
                grouped_KGLD,
                # Query heads of one group read the same keys, without copies of them.
                key.transpose(0, 1).unsqueeze(1).expand(shape),
                value.transpose(0, 1).unsqueeze(1).expand(shape),
                attn_mask=bias,
                scale=1.0,
            )
            rows.append(attended_KGLD.permute(2, 0, 1, 3).reshape(length, -1))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _is_in_blocks(self, queries_NHD: Tensor) -> bool:
        _, num_heads, dim = queries_NHD.shape
        size = num_heads * dim * max(self.row_lengths, default=0) ** 2
        return queries_NHD.device.type == "cpu" and size >= SMALLEST_IN_BLOCKS


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, float("-inf"))


class SharedKeys(NamedTuple):
    """Keys and values that several rows read.

    Attributes
    ----------
    keys : Tensor
        `[P, K, D, L]`; row r reads group `r // (R / P)`.
    values : Tensor
        `[P, K, L, D]`.
    bias : Tensor or None
        `[P, 1, 1, 1 or T, 1, L]`: 0 where a key may be seen, -inf where not; None where all may.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor | None


def causal_bias(
    num_queries: int,
    num_old: int,
    old_bias_PL: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Let each new token see the old keys of its group and the new ones up to itself.

    Returns
    -------
    Tensor
        `[P or 1, 1, 1, T, 1, num_old + T]`.
    """
    future = torch.ones(num_queries, num_queries, dtype=torch.bool, device=device).triu(1)
    new = torch.zeros(num_queries, num_queries, dtype=dtype, device=device)
    new.masked_fill_(future, float("-inf"))
    num_groups = 1 if old_bias_PL is None else len(old_bias_PL)
    old = torch.zeros(num_groups, num_old, dtype=dtype, device=device)
    if old_bias_PL is not None:
        old = old_bias_PL
    bias = torch.cat(
        [old[:, None].expand(-1, num_queries, -1), new.expand(num_groups, -1, -1)], dim=-1
    )
    return bias[:, None, None, :, None]


def cascade_attention(queries_RTKGD: Tensor, segments: Sequence[SharedKeys]) -> Tensor:
    """Attend to several segments of keys, each read once by all the rows that share it.

    Parameters
    ----------
    queries_RTKGD : Tensor
        Scaled by `1 / sqrt(D)` already.
    segments : Sequence[SharedKeys]
        In any order; their softmax is one.

    Returns
    -------
    Tensor
        `[R, T, K, G, D]`.
    """
    num_rows, num_queries, num_keys, group, dim = queries_RTKGD.shape
    scores = []
    for keys, _, bias in segments:
        num_groups, _, _, length = keys.shape
        sharing = num_rows // num_groups
        grouped = _gather_groups(queries_RTKGD, num_groups)
        score = torch.bmm(grouped, keys.view(-1, dim, length))
        score = score.view(num_groups, num_keys, sharing, num_queries, group, length)
        if bias is not None:
            score = score + bias
        scores.append(_scatter_groups(score))
    together = scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)
    probabilities = together.softmax(dim=-1)
    attended = None
    start = 0
    for _, values, _ in segments:
        num_groups, _, length, _ = values.shape
        sharing = num_rows // num_groups
        part = _gather_groups(probabilities[..., start : start + length], num_groups)
        found = torch.bmm(part, values.view(-1, length, dim))
        found = _scatter_groups(found.view(num_groups, num_keys, sharing, num_queries, group, dim))
        attended = found if attended is None else attended + found
        start += length
    assert attended is not None
    return attended


def _gather_groups(x_RTKGX: Tensor, num_groups: int) -> Tensor:
    """Put the queries of all rows of a group side by side: `[P * K, (R / P) * T * G, X]`."""
    num_rows, num_queries, num_keys, group, size = x_RTKGX.shape
    if num_groups == num_rows and num_queries == 1:
        return x_RTKGX.reshape(num_groups * num_keys, group, size)
    grouped = x_RTKGX.view(
        num_groups, num_rows // num_groups, num_queries, num_keys, group, size
    ).permute(0, 3, 1, 2, 4, 5)
    return grouped.reshape(num_groups * num_keys, -1, size)


def _scatter_groups(x: Tensor) -> Tensor:
    """Undo `_gather_groups`: `[P, K, R / P, T, G, X]` to `[R, T, K, G, X]`."""
    if x.shape[2] == x.shape[3] == 1:
        return x.reshape(x.shape[0], 1, x.shape[1], x.shape[4], x.shape[5])
    rows = x.permute(0, 2, 3, 1, 4, 5)
    return rows.reshape(x.shape[0] * x.shape[2], x.shape[3], x.shape[1], x.shape[4], x.shape[5])

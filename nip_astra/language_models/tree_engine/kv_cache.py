"""Keys and values of a running batch: of prompts while they are prefilled, and of answers.

Shape suffixes: `Y` layer, `R` row, `N` token, `K` key-value head, `H` query head, `D` head
dimension, `L` key position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.language_models.tree_engine.attention import SharedKeys, cascade_attention

STEP_POSITIONS = 64
"""Positions by which rows grow at a time; each growth copies all of them."""
MAX_IDLE_BYTES = 64 << 20
"""Most memory for keys held without a row."""


class PrefilledPrompt:
    """A prompt with the keys and values of the tokens read so far.

    Attributes
    ----------
    ids : tuple of int
        All tokens of the prompt.
    keys : Tensor
        `[Y, K, D, L]`.
    values : Tensor
        `[Y, K, L, D]`.
    num_read : int
        Positions that are filled.
    """

    def __init__(
        self,
        ids: Sequence[int],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layers, heads, dim = shape
        self.ids = tuple(ids)
        self.num_read = 0
        self.keys = torch.zeros(layers, heads, dim, len(ids), dtype=dtype, device=device)
        self.values = torch.zeros(layers, heads, len(ids), dim, dtype=dtype, device=device)

    def take(self, other: PrefilledPrompt, length: int) -> None:
        """Copy the first positions of another prompt, which has the same tokens there."""
        self.keys[..., :length] = other.keys[..., :length]
        self.values[:, :, :length] = other.values[:, :, :length]
        self.num_read = length

    def num_shared(self, ids: Sequence[int]) -> int:
        """Length of the common beginning with other ids."""
        stop = min(len(self.ids), len(ids))
        if self.ids[:stop] == tuple(ids[:stop]):
            return stop
        return next(i for i in range(stop) if self.ids[i] != ids[i])


class PrefillAttention:
    """Attention of the next tokens of several prompts, each to its own prompt.

    Parameters
    ----------
    parts : Sequence[tuple[PrefilledPrompt, int]]
        The prompts in the order of the tokens, and the number of tokens of each.
    """

    def __init__(self, parts: Sequence[tuple[PrefilledPrompt, int]]) -> None:
        self.parts = parts
        self.lengths = [length for _, length in parts]
        self.masks = [self._mask(prompt, length) for prompt, length in parts]

    @staticmethod
    def _mask(prompt: PrefilledPrompt, length: int) -> Tensor | None:
        if prompt.num_read == 0:
            return None
        stop = prompt.num_read + length
        seen = torch.ones(length, stop, dtype=torch.bool, device=prompt.keys.device)
        return seen.tril(prompt.num_read)

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """The attended values `[N, H * D]`; the queries carry the scale."""
        rows = []
        splits = (torch.split(x, self.lengths) for x in (queries_NHD, keys_NKD, values_NKD))
        for (prompt, length), mask, query, key, value in zip(
            self.parts, self.masks, *splits, strict=True
        ):
            start, stop = prompt.num_read, prompt.num_read + length
            prompt.keys[layer, :, :, start:stop] = key.permute(1, 2, 0)
            prompt.values[layer, :, start:stop] = value.transpose(0, 1)
            # Query heads of one group read the same keys.
            grouped_KGLD = query.view(length, key.shape[1], -1, key.shape[2]).permute(1, 2, 0, 3)
            size = (*grouped_KGLD.shape[:2], -1, -1)
            attended_KGLD = F.scaled_dot_product_attention(
                grouped_KGLD,
                prompt.keys[layer, :, :, :stop].transpose(1, 2).unsqueeze(1).expand(size),
                prompt.values[layer, :, :stop].unsqueeze(1).expand(size),
                attn_mask=mask,
                is_causal=mask is None,
                scale=1.0,
            )
            rows.append(attended_KGLD.permute(2, 0, 1, 3).reshape(length, -1))
        return torch.cat(rows)


class KVCache:
    """Keys and values of the rows that speak; row r is the r-th of the batch.

    Parameters
    ----------
    shape : tuple[int, int, int]
        Layers, key-value heads and head dimension.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.lengths: list[int] = []
        self._keys, self._values = self._new(0, 0)

    def _new(self, num_rows: int, num_positions: int) -> tuple[Tensor, Tensor]:
        layers, heads, dim = self.shape
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        # Zeros, because unwritten positions are multiplied by a weight of 0.
        return (
            like.new_zeros(layers, num_rows, heads, dim, num_positions),
            like.new_zeros(layers, num_rows, heads, num_positions, dim),
        )

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self.lengths)

    def reserve(self, num_rows: int, num_positions: int) -> None:
        """Make room for more rows, of at most `num_positions` positions."""
        self._reserve(self.num_rows + num_rows, num_positions)

    def add(self, prompt: PrefilledPrompt, count: int) -> None:
        """Append rows that all continue a prompt."""
        length, first = prompt.num_read, self.num_rows
        self._reserve(first + count, length + 1)
        self._keys[:, first : first + count, ..., :length] = prompt.keys[:, None]
        self._values[:, first : first + count, :, :length] = prompt.values[:, None]
        self.lengths += [length] * count

    def keep(self, are_kept: Sequence[bool]) -> list[int]:
        """Drop rows, moving the last ones into their places; give the old indices of the rest.

        Parameters
        ----------
        are_kept : Sequence[bool]
            Of each row.
        """
        count = sum(are_kept)
        gaps = [row for row in range(count) if not are_kept[row]]
        movers = [row for row in range(count, len(are_kept)) if are_kept[row]]
        order = list(range(count))
        if gaps:
            length = max(self.lengths[row] for row in movers)
            to = torch.tensor(gaps, device=self.device)
            of = torch.tensor(movers, device=self.device)
            self._keys[:, to, ..., :length] = self._keys[:, of, ..., :length]
            self._values[:, to, :, :length] = self._values[:, of, :, :length]
            for gap, mover in zip(gaps, movers, strict=True):
                order[gap] = mover
        self.lengths = [self.lengths[row] for row in order]
        if not order and self._keys.nbytes > MAX_IDLE_BYTES:
            self._keys, self._values = self._new(0, 0)
        return order

    def repair(self) -> None:
        """Zero NaN keys and values: masked positions are multiplied too, by zero."""
        self._keys.nan_to_num_(0.0, 0.0, 0.0)
        self._values.nan_to_num_(0.0, 0.0, 0.0)

    def _reserve(self, num_rows: int, num_positions: int) -> None:
        had_rows, had_positions = self._keys.shape[1], self._keys.shape[4]
        if num_rows <= had_rows and num_positions <= had_positions:
            return
        rows = had_rows if num_rows <= had_rows else 1 << (num_rows - 1).bit_length()
        positions = -(-num_positions // STEP_POSITIONS) * STEP_POSITIONS
        positions = max(positions, had_positions)
        keys, values = self._new(rows, positions)
        used = self.num_rows
        keys[:, :used, ..., :had_positions] = self._keys[:, :used]
        values[:, :used, :, :had_positions] = self._values[:, :used]
        self._keys, self._values = keys, values

    def advance(self) -> DecodeAttention:
        """Make room for one more token of every row."""
        self._reserve(self.num_rows, max(self.lengths) + 1)
        attention = DecodeAttention(self._keys, self._values, self.lengths)
        self.lengths = [length + 1 for length in self.lengths]
        return attention


class DecodeAttention:
    """Attention of one new token of every row to its row.

    Parameters
    ----------
    keys, values : Tensor
        `[Y, R or more, K, D, L]` and `[Y, R or more, K, L, D]`.
    lengths : Sequence[int]
        Filled positions of each row; the new token comes after them.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: Sequence[int]) -> None:
        self.keys, self.values = keys, values
        self.num_rows, self.stop = len(lengths), max(lengths) + 1
        self.rows = torch.arange(self.num_rows, device=keys.device)
        self.positions = torch.tensor(lengths, device=keys.device)
        self.bias = None
        if min(lengths) < self.stop - 1:
            seen = torch.arange(self.stop, device=keys.device) <= self.positions[:, None]
            bias = torch.zeros(seen.shape, dtype=keys.dtype, device=keys.device)
            self.bias = bias.masked_fill_(~seen, float("-inf"))[:, None, None, None, None]

    def __call__(
        self, layer: int, queries_RHD: Tensor, keys_RKD: Tensor, values_RKD: Tensor
    ) -> Tensor:
        """The attended values `[R, H * D]`; the queries carry the scale."""
        self.keys[layer][self.rows, :, :, self.positions] = keys_RKD
        self.values[layer][self.rows, :, self.positions] = values_RKD
        rows = slice(0, self.num_rows)
        own = SharedKeys(
            self.keys[layer, rows, :, :, : self.stop],
            self.values[layer, rows, :, : self.stop],
            self.bias,
        )
        grouped = queries_RHD.view(self.num_rows, 1, keys_RKD.shape[1], -1, keys_RKD.shape[2])
        return cascade_attention(grouped, [own]).flatten(1)

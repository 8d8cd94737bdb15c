"""Keys and values of a running batch: of prompts while they are prefilled, and of answers.

Shape suffixes: `Y` layer, `R` row, `N` token, `K` key-value head, `H` query head, `D` head
dimension, `L` key position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nip_astra.language_models.tree_engine.attention import (
    SharedKeys,
    cascade_attention,
    grouped_attention,
)

STEP_POSITIONS = 64
"""Positions by which rows grow at a time; each growth copies all of them."""
MAX_IDLE_BYTES = 64 << 20
"""Most memory for keys that is kept without a row."""


class PrefilledPrompt:
    """A prompt with keys `[Y, K, D, L]` and values `[Y, K, L, D]` of its first tokens."""

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
        """Copy the first positions of a prompt with the same tokens there."""
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
    """Attention of the next tokens of several prompts, each to its own prompt."""

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
            keys_KLD = prompt.keys[layer, :, :, :stop].transpose(1, 2)
            values_KLD = prompt.values[layer, :, :stop]
            rows.append(grouped_attention(query, keys_KLD, values_KLD, mask))
        return torch.cat(rows)


class KVCache:
    """Keys and values of the rows that speak; row r is the r-th of the batch."""

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
        """Drop rows, moving the last ones into their places; the old indices of the rest."""
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
    """Attention of one new token of every row to its row, after `lengths` filled positions."""

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


FIRST_ROOM = 8
"""Tokens of a turn that there is room for at first: most turns are far shorter than allowed."""
FOLD_TOKENS = 400
"""Shared keys are copied to their readers where that adds at most this many: reading a few keys
again costs less than one more segment of attention."""


@dataclass
class Block:
    """One part of the tree."""

    keys: Tensor
    """`[Y, P, K, D, L]`; positions from `length` on are free."""
    values: Tensor
    """`[Y, P, K, L, D]`."""
    bias_PL: Tensor | None = None
    """0 where a key may be seen, -inf on padding; None where nothing is padded."""
    length: int = 0
    """Positions in use."""

    @property
    def num_groups(self) -> int:
        """Groups of rows, each with keys of its own."""
        return int(self.keys.shape[1])

    def write(self, layer: int, groups: slice, start: int, keys: Tensor, values: Tensor) -> None:
        """Store `[P, T, K, D]` keys and values at the positions from `start` on."""
        stop = start + keys.shape[1]
        self.keys[layer, groups, :, :, start:stop] = keys.permute(0, 2, 3, 1)
        self.values[layer, groups, :, start:stop] = values.transpose(1, 2)

    def read(self, layer: int, groups: slice, stop: int, bias: Tensor | None) -> SharedKeys:
        """The keys and values of some groups in one layer, up to a position."""
        return SharedKeys(
            self.keys[layer, groups, :, :, :stop], self.values[layer, groups, :, :stop], bias
        )

    def make_room(self, num_positions: int, *, most: int) -> None:
        """Make room for so many positions, and for half as many more up to `most`."""
        if num_positions <= self.values.shape[3]:
            return
        size = min(num_positions + max(num_positions // 2, FIRST_ROOM), most)
        keys = self.keys.new_zeros(*self.keys.shape[:4], size)
        values = self.values.new_zeros(*self.values.shape[:3], size, self.values.shape[4])
        old = self.values.shape[3]
        keys[..., :old], values[..., :old, :] = self.keys, self.values
        self.keys, self.values = keys, values


def first_room(num_new: int, num_before: int) -> int:
    """Return for how many of a turn's tokens there is room at first, behind others of its row."""
    return min(num_new, max(FIRST_ROOM, num_before // 4))


class KeyValueTree:
    """The blocks from the root to the newest level; rows of a level are ordered by parent."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.blocks: list[Block] = []

    @property
    def top(self) -> Block:
        """The newest block."""
        return self.blocks[-1]

    def clear(self) -> None:
        """Forget everything."""
        self.blocks = []

    def grow(self, num_groups: int, capacity: int) -> Block:
        """Return a top block of `num_groups` with room for `capacity` more positions.

        If it is cheap, the block below is copied into it instead of being read beside it. A block
        of as many groups that has room is used further.
        """
        layers, num_heads, dim = self.shape
        below = self.blocks[-1] if self.blocks else None
        sharing = num_groups // below.num_groups if below else 0
        is_folded = (
            below is not None and (num_groups - below.num_groups) * below.length <= FOLD_TOKENS
        )
        old = below.length if below is not None and is_folded else 0
        size = old + capacity
        if below is not None and num_groups == below.num_groups:
            if size <= below.values.shape[3]:
                return below
            # Room for later turns, or each turn would copy all that came before it.
            size += old // 4
        # Zeros, because padding that was never written is multiplied by a weight of 0.
        block = Block(
            keys=self._zeros(num_groups, num_heads, dim, size),
            values=self._zeros(num_groups, num_heads, size, dim),
            length=old,
        )
        if below is not None and is_folded:
            groups = (layers, below.num_groups, sharing, num_heads)
            block.keys.view(*groups, dim, size)[..., :old] = below.keys[:, :, None, :, :, :old]
            values = block.values.view(*groups, size, dim)
            values[..., :old, :] = below.values[:, :, None, :, :old]
            if below.bias_PL is not None:
                block.bias_PL = below.bias_PL.repeat_interleave(sharing, dim=0)
            self.blocks.pop()
        self.blocks.append(block)
        return block

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(self.shape[0], *size, dtype=self.dtype, device=self.device)

    def close(self, added_P: Sequence[int]) -> None:
        """Count the new positions of the top block, of which each group uses `added_P`."""
        block = self.top
        longest = max(added_P, default=0)
        old, block.length = block.length, block.length + longest
        if block.bias_PL is None and min(added_P, default=0) == longest:
            return
        bias = torch.zeros(block.num_groups, block.length, dtype=self.dtype, device=self.device)
        if block.bias_PL is not None:
            bias[:, :old] = block.bias_PL
        used = torch.tensor(added_P, device=self.device)
        padding = torch.arange(longest, device=self.device) >= used[:, None]
        bias[:, old:].masked_fill_(padding, float("-inf"))
        block.bias_PL = bias

    def keep(self, rows_K: Tensor) -> None:
        """Keep some rows of the top block, with all that they read in one block without gaps."""
        num_rows, keys, values, padding = self.top.num_groups, [], [], []
        for block in self.blocks:
            groups_K = rows_K // (num_rows // block.num_groups)
            keys.append(block.keys[:, groups_K, ..., : block.length])
            values.append(block.values[:, groups_K, :, : block.length])
            bias_PL = block.bias_PL
            if bias_PL is None:
                bias_PL = torch.zeros(block.num_groups, block.length, device=self.device)
            padding.append(bias_PL[groups_K] < 0)
        is_padding_KL = torch.cat(padding, dim=1)
        lengths_K = (~is_padding_KL).sum(dim=1)
        # A stable sort moves the padding behind the rest.
        order_KL = is_padding_KL.int().argsort(dim=1, stable=True)[:, : int(lengths_K.max())]
        all_keys, all_values = torch.cat(keys, dim=-1), torch.cat(values, dim=-2)
        order = order_KL[None, :, None, None].expand(*all_keys.shape[:-1], -1)
        self.blocks = [
            Block(all_keys.gather(-1, order), all_values.gather(-2, order.transpose(-1, -2)))
        ]
        self.close(lengths_K.tolist())

    def read_below(self, layer: int, rows: slice, num_rows: int) -> list[SharedKeys]:
        """The keys and values that some rows of the top block read from the blocks below."""
        found = []
        for block in self.blocks[:-1]:
            sharing = num_rows // block.num_groups
            groups = slice(rows.start // sharing, -(-rows.stop // sharing))
            bias = None
            if block.bias_PL is not None:
                bias = block.bias_PL[groups, None, None, None, None]
            found.append(block.read(layer, groups, block.length, bias))
        return found

    def chunks(self, num_rows: int, limit: int) -> list[slice]:
        """Divide rows into ranges of about `limit` that begin and end with whole groups."""
        # Each of these divides the next: a block's groups are whole groups of the block below.
        sizes = sorted({num_rows // block.num_groups for block in self.blocks})
        base = max([1, *(size for size in sizes if size <= limit)])
        times = max(1, limit // base)
        larger = [size for size in sizes if size > base]
        while larger and (larger[0] // base) % times:
            times -= 1
        step = base * times
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

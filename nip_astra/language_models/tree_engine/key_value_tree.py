"""Keys and values of a growing tree of token sequences, kept once for all that continue them.

Shape suffixes: `Y` layer, `P` group of rows that share keys, `K` key-value head, `L` key position,
`D` head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nip_astra.language_models.tree_engine.attention import SharedKeys

FOLD_TOKENS = 400
"""Shared keys are copied to their readers where that adds at most this many: reading a few keys
again costs less than one more segment of attention."""


@dataclass
class Block:
    """One part of the tree.

    Attributes
    ----------
    keys : Tensor
        `[Y, P, K, D, L]`; positions from `length` on are free.
    values : Tensor
        `[Y, P, K, L, D]`.
    bias_PL : Tensor or None
        0 where a key may be seen, -inf on padding; None where nothing is padded.
    length : int
        Positions in use.
    """

    keys: Tensor
    values: Tensor
    bias_PL: Tensor | None = None
    length: int = 0

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


class KeyValueTree:
    """The blocks from the root to the newest level; rows of a level are ordered by parent.

    Parameters
    ----------
    shape : tuple[int, int, int]
        Layers, key-value heads and head dimension.
    """

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
        """Add a block of `num_groups` with room for `capacity` positions, and give it.

        Where it is cheap the block below is copied into it instead of being read beside it.
        """
        layers, num_heads, dim = self.shape
        below = self.blocks[-1] if self.blocks else None
        sharing = num_groups // below.num_groups if below else 0
        is_folded = (
            below is not None and (num_groups - below.num_groups) * below.length <= FOLD_TOKENS
        )
        old = below.length if below is not None and is_folded else 0
        size = old + capacity
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

    def read_below(self, layer: int, rows: slice, num_rows: int) -> list[SharedKeys]:
        """What some rows of the top block read of the blocks below it."""
        found = []
        for block in self.blocks[:-1]:
            groups = _groups_of(rows, num_rows // block.num_groups)
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


def _groups_of(rows: slice, sharing: int) -> slice:
    return slice(rows.start // sharing, -(-rows.stop // sharing))

"""Keys and values of a running batch: of prompts during prefill, and of answers.

Shape suffixes: `Y` layer, `R` row, `N` token, `K` key-value head, `H` query head, `D` head
dimension, `L` key position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nip_astra.language_models.tree_engine.attention import (
    SharedKeys,
    cascade_attention,
    grouped_attention,
)
from nip_astra.language_models.tree_engine.decoder import Attend

STEP_POSITIONS = 64
"""Positions by which rows grow at a time; each growth copies all of them."""
MAX_IDLE_BYTES = 64 << 20
"""Maximum memory for keys without rows."""
BLOCK_TOKENS = 16
"""Minimum common prefix of two different prompts that is copied instead of recomputed."""
MAX_PADDED_PAIRS = 1 << 18
"""Maximum pairs of tokens and keys, including padding, of rows that are attended together."""


class PrefilledPrompt:
    """Keys `[Y, K, D, L]` and values `[Y, K, L, D]` of the first tokens of a prompt."""

    def __init__(self, ids: tuple[int, ...], keys: Tensor, values: Tensor) -> None:
        self.ids = ids
        self.keys, self.values = keys, values

    def copy_from(self, other: PrefilledPrompt, length: int) -> None:
        """Copy the first positions of a prompt with equal tokens there."""
        self.keys[..., :length] = other.keys[..., :length]
        self.values[:, :, :length] = other.values[:, :, :length]


class KeptPrompts:
    """Cached prompts for prefix reuse; the oldest are dropped first.

    Every prefix of whole blocks has an entry, so that a new prompt is compared only with those that
    share its longest known prefix.

    Parameters
    ----------
    max_prompts, max_tokens : int
        Most prompts, and most tokens of all of them together.
    """

    def __init__(self, max_prompts: int, max_tokens: int) -> None:
        self.max_prompts, self.max_tokens = max_prompts, max_tokens
        self._num_tokens = 0
        # Each with the owner of its keys: the id of one that is gone could be another's.
        self._prompts: OrderedDict[_Key, tuple[object, PrefilledPrompt]] = OrderedDict()
        self._by_beginning: dict[int, dict[_Key, PrefilledPrompt]] = {}

    def renew(self, ids: tuple[int, ...], owner: object) -> bool:
        """Return whether exactly these tokens are cached; marks them as the newest."""
        key = (id(owner), ids)
        if key not in self._prompts:
            return False
        self._prompts.move_to_end(key)
        return True

    def add(self, prompt: PrefilledPrompt, owner: object) -> None:
        """Cache a new prompt; `owner` is its adapter."""
        key = (id(owner), prompt.ids)
        self._prompts[key] = owner, prompt
        self._num_tokens += len(prompt.ids)
        for beginning in _beginnings(*key):
            self._by_beginning.setdefault(beginning, {})[key] = prompt
        while len(self._prompts) > self.max_prompts or self._num_tokens > self.max_tokens:
            old_key, (_, old) = self._prompts.popitem(last=False)
            self._num_tokens -= len(old.ids)
            for beginning in _beginnings(*old_key):
                alike = self._by_beginning[beginning]
                del alike[old_key]
                if not alike:
                    del self._by_beginning[beginning]

    def nearest(self, ids: tuple[int, ...], owner: object) -> tuple[PrefilledPrompt | None, int]:
        """Return the cached prompt with the longest common prefix, and the prefix length.

        Only whole prompts are found by beginnings shorter than a block. The last token never
        counts: it is forwarded in any case, since it predicts the answer.
        """
        most = len(ids) - 1
        same = self._prompts.get((id(owner), ids))
        if same is not None:
            return same[1], most
        alike: dict[_Key, PrefilledPrompt] = {}
        for beginning in _beginnings(id(owner), ids):
            if beginning not in self._by_beginning:
                break
            alike = self._by_beginning[beginning]
        nearest, longest = None, BLOCK_TOKENS - 1
        for prompt in alike.values():
            shared = min(num_shared(prompt.ids, ids), most)
            if shared > longest:
                nearest, longest = prompt, shared
        return nearest, longest if nearest is not None else 0


_Key = tuple[int, tuple[int, ...]]


def _beginnings(owner: int, ids: tuple[int, ...]) -> Iterator[int]:
    """Yield a hash of each prefix of whole blocks, each computed from the previous one."""
    beginning = owner
    for stop in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        beginning = hash((beginning, ids[stop - BLOCK_TOKENS : stop]))
        yield beginning


def num_shared(ids: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    stop = min(len(ids), len(other))
    # Whole blocks at first: comparing slices is much faster than comparing numbers in Python.
    start = 0
    while start < stop and ids[start : start + BLOCK_TOKENS] == other[start : start + BLOCK_TOKENS]:
        start += BLOCK_TOKENS
    start = min(start, stop)
    return next((i for i in range(start, stop) if ids[i] != other[i]), stop)


class PartAttention:
    """Attention of the next tokens of several prompts, each to its own keys, which it extends.

    Parameters
    ----------
    parts : Sequence[tuple[PrefilledPrompt, int, int]]
        Prompts with room for all of their keys, the position of their first new token, and the
        number of new tokens.
    """

    def __init__(self, parts: Sequence[tuple[PrefilledPrompt, int, int]]) -> None:
        self.parts = parts
        self.lengths = [length for _, _, length in parts]
        self.masks = [causal_mask(start, length, one.keys.device) for one, start, length in parts]

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """Return the attended values `[N, H * D]`; the queries are scaled."""
        rows = []
        splits = (torch.split(x, self.lengths) for x in (queries_NHD, keys_NKD, values_NKD))
        for (prompt, start, length), mask, query, key, value in zip(
            self.parts, self.masks, *splits, strict=True
        ):
            stop = start + length
            prompt.keys[layer, :, :, start:stop] = key.permute(1, 2, 0)
            prompt.values[layer, :, start:stop] = value.transpose(0, 1)
            keys_KLD = prompt.keys[layer, :, :, :stop].transpose(1, 2)
            rows.append(grouped_attention(query, keys_KLD, prompt.values[layer, :, :stop], mask))
        return torch.cat(rows)

    def after(self, rows: RowAttention) -> Attend:
        """Return the attention of tokens of rows followed by these."""
        count = len(rows.positions)

        def attend(layer: int, *inputs: Tensor) -> Tensor:
            parts = rows(layer, *(x[:count] for x in inputs))
            return torch.cat([parts, self(layer, *(x[count:] for x in inputs))])

        return attend


def causal_mask(start: int, length: int, device: torch.device) -> Tensor | None:
    """Return the positions visible to tokens from `start` on, `[length, start + length]`; None from
    0.
    """
    if start == 0:
        return None
    seen = torch.ones(length, start + length, dtype=torch.bool, device=device)
    return seen.tril(start)


class KVCache:
    """Keys and values of the generating rows; row r is the r-th of the batch."""

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
        """Number of rows in use."""
        return len(self.lengths)

    def reserve(self, num_rows: int, num_positions: int) -> None:
        """Allocate more rows, of at most `num_positions` positions."""
        self._reserve(self.num_rows + num_rows, num_positions)

    def add(self, prompt: PrefilledPrompt | None, length: int) -> None:
        """Append a row that starts with the first positions of a prompt."""
        row = self.num_rows
        self._reserve(row + 1, length + 1)
        if prompt is not None and length:
            self._keys[:, row, ..., :length] = prompt.keys[..., :length]
            self._values[:, row, :, :length] = prompt.values[:, :, :length]
        self.lengths.append(length)

    def repeat(self, row: int, count: int) -> None:
        """Append copies of a row."""
        length, first = self.lengths[row], self.num_rows
        self._reserve(first + count, length + 1)
        copies = slice(first, first + count)
        self._keys[:, copies, ..., :length] = self._keys[:, row : row + 1, ..., :length]
        self._values[:, copies, :, :length] = self._values[:, row : row + 1, :, :length]
        self.lengths += [length] * count

    def prompt(self, row: int, ids: tuple[int, ...]) -> PrefilledPrompt:
        """Copy the first positions of a row, which are those of a prompt."""
        keys = self._keys[:, row, ..., : len(ids)].contiguous()
        return PrefilledPrompt(ids, keys, self._values[:, row, :, : len(ids)].contiguous())

    def unread(self, ids: tuple[int, ...]) -> PrefilledPrompt:
        """Allocate a prompt outside of the rows."""
        keys, values = self._new(1, len(ids))
        return PrefilledPrompt(ids, keys[:, 0], values[:, 0])

    def keep(self, are_kept: Sequence[bool]) -> list[int]:
        """Drop rows, moving the last ones into their places; return the old indices of the rest."""
        count = sum(are_kept)
        gaps = [row for row in range(count) if not are_kept[row]]
        movers = [row for row in range(count, len(are_kept)) if are_kept[row]]
        order = list(range(count))
        for gap, mover in zip(gaps, movers, strict=True):
            length = self.lengths[mover]
            self._keys[:, gap, ..., :length] = self._keys[:, mover, ..., :length]
            self._values[:, gap, :, :length] = self._values[:, mover, :, :length]
            order[gap] = mover
        self.lengths = [self.lengths[row] for row in order]
        if not order and self._keys.nbytes > MAX_IDLE_BYTES:
            self._keys, self._values = self._new(0, 0)
        return order

    def repair(self) -> None:
        """Zero NaN keys and values: masked positions are multiplied, too, by zero."""
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

    def advance(self, counts: Sequence[int]) -> RowAttention:
        """Allocate new tokens, `counts` per row, in ascending order."""
        starts = self.lengths
        self.lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self._reserve(self.num_rows, max(self.lengths, default=0))
        return RowAttention(self._keys, self._values, starts, counts)


class RowAttention:
    """Attention of new tokens of every row to its row; the tokens of a row are consecutive.

    `counts`, the new tokens of each row, ascend; `starts` are the positions of the first ones.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        self.keys, self.values = keys, values
        device, num_rows = keys.device, len(counts)
        self.num_single = bisect_right(counts, 1)
        positions = list(starts[: self.num_single])
        rows = list(range(self.num_single))
        for row in range(self.num_single, num_rows):
            positions += range(starts[row], starts[row] + counts[row])
            rows += [row] * counts[row]
        self.positions = torch.tensor(positions, dtype=torch.long, device=device)
        self.rows = torch.tensor(rows, dtype=torch.long, device=device)
        self.stop = max(starts[: self.num_single], default=0) + 1
        self.bias: Tensor | None = None
        if min(starts[: self.num_single], default=0) < self.stop - 1:
            self.bias = _bias(self.positions[: self.num_single, None], self.stop, keys.dtype)
        self.groups = [
            _RowGroup(keys, slice(*rows), first, starts, counts)
            for rows, first in _groups(self.num_single, starts, counts)
        ]

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """Return the attended values `[N, H * D]`; the queries are scaled."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, :, self.positions] = keys_NKD
        values[self.rows, :, self.positions] = values_NKD
        parts = []
        if self.num_single:
            own = SharedKeys(
                keys[: self.num_single, :, :, : self.stop],
                values[: self.num_single, :, : self.stop],
                self.bias,
            )
            queries = queries_NHD[: self.num_single]
            grouped = queries.view(self.num_single, 1, keys.shape[1], -1, keys.shape[2])
            parts.append(cascade_attention(grouped, [own]).flatten(1))
        parts += [group.attend(keys, values, queries_NHD[group.tokens]) for group in self.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bias(positions_PT: Tensor, stop: int, dtype: torch.dtype) -> Tensor:
    """Return 0 for keys up to each position, -inf from there to `stop`: `[P, 1, 1, T, 1, stop]`."""
    seen = torch.arange(stop, device=positions_PT.device) <= positions_PT[..., None]
    bias = torch.zeros(seen.shape, dtype=dtype, device=positions_PT.device)
    return bias.masked_fill_(~seen, float("-inf"))[:, None, None, :, None]


def _groups(
    first_row: int, starts: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield rows with several new tokens to attend together, and the index of their first token."""
    row, token = first_row, first_row
    while row < len(counts):
        stop, last = row, 0
        while stop < len(counts):
            last = max(last, starts[stop] + counts[stop])
            if stop > row and (stop + 1 - row) * counts[stop] * last > MAX_PADDED_PAIRS:
                break
            stop += 1
        yield (row, stop), token
        token += sum(counts[row:stop])
        row = stop


class _RowGroup:
    """Rows with several new tokens, padded to the longest; a long one is alone, not padded."""

    def __init__(
        self,
        keys: Tensor,
        rows: slice,
        first: int,
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        self.rows, device = rows, keys.device
        starts, counts = starts[rows], counts[rows]
        num_rows, longest = len(counts), counts[-1]
        self.tokens = slice(first, first + sum(counts))
        self.stop = max(start + count for start, count in zip(starts, counts, strict=True))
        self.mask: Tensor | None = None
        self.is_long = num_rows * longest * self.stop > MAX_PADDED_PAIRS
        if self.is_long:
            self.mask = causal_mask(starts[0], longest, device)
            return
        steps_T = torch.arange(longest, device=device)
        counts_P1 = torch.tensor(counts, device=device)[:, None]
        firsts_P1 = counts_P1.cumsum(0) - counts_P1
        # Padding repeats the last token of its row.
        places_PT = torch.minimum(steps_T, counts_P1 - 1)
        self.padded = (firsts_P1 + places_PT).flatten()
        self.unpadded = (steps_T < counts_P1).flatten().nonzero().squeeze(1)
        positions_PT = torch.tensor(starts, device=device)[:, None] + places_PT
        self.bias = _bias(positions_PT, self.stop, keys.dtype)

    def attend(self, keys: Tensor, values: Tensor, queries_NHD: Tensor) -> Tensor:
        """Return the attended values `[N, H * D]` of the tokens of these rows."""
        keys, values = keys[self.rows, :, :, : self.stop], values[self.rows, :, : self.stop]
        num_rows, num_keys, dim, _ = keys.shape
        if self.is_long:
            return grouped_attention(queries_NHD, keys[0].transpose(1, 2), values[0], self.mask)
        padded = queries_NHD.index_select(0, self.padded)
        grouped = padded.view(num_rows, -1, num_keys, padded.shape[1] // num_keys, dim)
        attended = cascade_attention(grouped, [SharedKeys(keys, values, self.bias)])
        return attended.reshape(len(self.padded), -1).index_select(0, self.unpadded)


FIRST_ROOM = 8
"""Tokens of a turn that are allocated initially: most turns are far shorter than allowed."""
FOLD_TOKENS = 400
"""Shared keys are copied to their readers if that adds at most this many: rereading a few keys is
cheaper than another segment of attention."""


@dataclass
class Block:
    """One part of the tree."""

    keys: Tensor
    """`[Y, P, K, D, L]`; positions from `length` on are free."""
    values: Tensor
    """`[Y, P, K, L, D]`."""
    bias_PL: Tensor | None = None
    """0 for visible keys, -inf on padding; None without padding."""
    length: int = 0
    """Positions in use."""

    @property
    def num_groups(self) -> int:
        """Number of row groups, each with its own keys."""
        return int(self.keys.shape[1])

    def write(self, layer: int, groups: slice, start: int, keys: Tensor, values: Tensor) -> None:
        """Store `[P, T, K, D]` keys and values at the positions from `start` on."""
        stop = start + keys.shape[1]
        self.keys[layer, groups, :, :, start:stop] = keys.permute(0, 2, 3, 1)
        self.values[layer, groups, :, start:stop] = values.transpose(1, 2)

    def read(self, layer: int, groups: slice, stop: int, bias: Tensor | None) -> SharedKeys:
        """Return the keys and values of some groups in one layer, up to a position."""
        return SharedKeys(
            self.keys[layer, groups, :, :, :stop], self.values[layer, groups, :, :stop], bias
        )

    def make_room(self, num_positions: int, *, most: int) -> None:
        """Allocate the given positions, and half as many more up to `most`."""
        if num_positions <= self.values.shape[3]:
            return
        size = min(num_positions + max(num_positions // 2, FIRST_ROOM), most)
        keys = self.keys.new_zeros(*self.keys.shape[:4], size)
        values = self.values.new_zeros(*self.values.shape[:3], size, self.values.shape[4])
        old = self.values.shape[3]
        keys[..., :old], values[..., :old, :] = self.keys, self.values
        self.keys, self.values = keys, values


def first_room(num_new: int, num_before: int) -> int:
    """Return the number of a turn's tokens to allocate initially, given the row's other tokens."""
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

    @property
    def has_padding(self) -> bool:
        """Whether some rows do not see all positions of their blocks."""
        return any(block.bias_PL is not None for block in self.blocks)

    def clear(self) -> None:
        """Drop all blocks."""
        self.blocks = []

    def grow(self, num_groups: int, capacity: int) -> Block:
        """Return a top block of `num_groups` with room for `capacity` more positions.

        If it is cheap, the block below is copied into it instead of being read separately. A block
        with as many groups and enough room is reused.
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
        """Keep some rows of the top block, with all of their keys in one block without gaps."""
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
        """Return the keys and values that some rows of the top block read from the blocks below."""
        found = []
        for block in self.blocks[:-1]:
            sharing = num_rows // block.num_groups
            groups = slice(rows.start // sharing, -(-rows.stop // sharing))
            bias = None
            if block.bias_PL is not None:
                bias = block.bias_PL[groups, None, None, None, None]
            found.append(block.read(layer, groups, block.length, bias))
        return found

    def read_all(self, layer: int, rows: slice, num_rows: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return copies of what some rows of the top block read: keys and values, `[R, K, L, D]`.

        Of the top block they contain the positions up to `stop`.
        """
        top = self.top.read(layer, rows, stop, None)
        keys, values = [], []
        for segment in (*self.read_below(layer, rows, num_rows), top):
            sharing = len(top.keys) // len(segment.keys)
            keys.append(segment.keys.transpose(2, 3).repeat_interleave(sharing, dim=0))
            values.append(segment.values.repeat_interleave(sharing, dim=0))
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def chunks(self, num_rows: int, limit: int) -> list[slice]:
        """Split rows into ranges of about `limit` that begin and end with whole groups."""
        # Each of these divides the next: a block's groups are whole groups of the block below.
        sizes = sorted({num_rows // block.num_groups for block in self.blocks})
        base = max([1, *(size for size in sizes if size <= limit)])
        times = max(1, limit // base)
        larger = [size for size in sizes if size > base]
        while larger and (larger[0] // base) % times:
            times -= 1
        step = base * times
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

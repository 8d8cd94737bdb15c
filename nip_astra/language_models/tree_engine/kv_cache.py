"""Keys and values of a running batch: of prompts during prefill, and of answers.

Shape suffixes: `Y` layer, `R` row, `N` token, `K` key-value head, `H` query head, `D` head
dimension, `L` key position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        self.keys = keys
        self.values = values

    def copy_from(self, source: PrefilledPrompt, length: int) -> None:
        """Copy the first positions of a prompt with equal tokens there."""
        self.keys[..., :length] = source.keys[..., :length]
        self.values[:, :, :length] = source.values[:, :, :length]


class PromptCache:
    """Cached prompts for prefix reuse; the oldest are dropped first.

    Every prefix of whole blocks has an entry, so that a new prompt is compared only with those that
    share its longest known prefix.

    Parameters
    ----------
    max_prompts, max_tokens : int
        Most prompts, and most tokens of all of them together.
    """

    def __init__(self, max_prompts: int, max_tokens: int) -> None:
        self.max_prompts = max_prompts
        self.max_tokens = max_tokens
        self._num_tokens = 0
        # Each with the owner of its keys: the id of an object that is gone could be another's.
        self._prompts: OrderedDict[_PromptKey, tuple[object, PrefilledPrompt]] = OrderedDict()
        self._by_prefix: dict[int, dict[_PromptKey, PrefilledPrompt]] = {}

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
        for prefix_hash in _hash_prefixes(*key):
            self._by_prefix.setdefault(prefix_hash, {})[key] = prompt
        while len(self._prompts) > self.max_prompts or self._num_tokens > self.max_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key, (_, prompt) = self._prompts.popitem(last=False)
        self._num_tokens -= len(prompt.ids)
        for prefix_hash in _hash_prefixes(*key):
            candidates = self._by_prefix[prefix_hash]
            del candidates[key]
            if not candidates:
                del self._by_prefix[prefix_hash]

    def find_nearest(
        self, ids: tuple[int, ...], owner: object
    ) -> tuple[PrefilledPrompt | None, int]:
        """Return the cached prompt with the longest common prefix, and the prefix length.

        A prompt shares at least a block, unless it has exactly these tokens. The last token never
        counts: it is forwarded in any case, since it predicts the answer.
        """
        max_length = len(ids) - 1
        same = self._prompts.get((id(owner), ids))
        if same is not None:
            _, prompt = same
            return prompt, max_length
        # From the shortest prefix on, as long as any prompt has it.
        candidates: dict[_PromptKey, PrefilledPrompt] = {}
        for prefix_hash in _hash_prefixes(id(owner), ids):
            if prefix_hash not in self._by_prefix:
                break
            candidates = self._by_prefix[prefix_hash]
        nearest: PrefilledPrompt | None = None
        length = 0
        for prompt in candidates.values():
            # Compared token by token, since hashes may be equal by chance.
            num_shared = min(count_shared(prompt.ids, ids), max_length)
            if num_shared >= BLOCK_TOKENS and num_shared > length:
                nearest, length = prompt, num_shared
        return nearest, length


_PromptKey = tuple[int, tuple[int, ...]]
"""The id of the owner, and the tokens."""


def _hash_prefixes(owner_id: int, ids: tuple[int, ...]) -> Iterator[int]:
    """Yield a hash of each prefix of whole blocks, each computed from the previous one."""
    prefix_hash = owner_id
    for stop in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        block = ids[stop - BLOCK_TOKENS : stop]
        prefix_hash = hash((prefix_hash, block))
        yield prefix_hash


def count_shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    stop = min(len(first), len(second))
    # Whole blocks at first: comparing slices is much faster than comparing numbers in Python.
    start = 0
    while start < stop:
        end = start + BLOCK_TOKENS
        if first[start:end] != second[start:end]:
            break
        start = end
    for position in range(start, stop):
        if first[position] != second[position]:
            return position
    return stop


class PromptPart(NamedTuple):
    """The next tokens of a prompt that is read in parts."""

    prompt: PrefilledPrompt
    """With room for all of its keys."""
    start: int
    """Position of the first new token."""
    length: int
    """Number of new tokens."""


class PartAttention:
    """Attention of the next tokens of several prompts, each to its own keys, which it extends."""

    def __init__(self, parts: Sequence[PromptPart]) -> None:
        self.parts = parts
        self.lengths = [part.length for part in parts]
        self.masks = [
            causal_mask(part.start, part.length, part.prompt.keys.device) for part in parts
        ]

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """Return the attended values `[N, H * D]`; the queries are scaled."""
        attended = []
        for (prompt, start, length), mask, queries, keys, values in zip(
            self.parts,
            self.masks,
            torch.split(queries_NHD, self.lengths),
            torch.split(keys_NKD, self.lengths),
            torch.split(values_NKD, self.lengths),
            strict=True,
        ):
            stop = start + length
            prompt.keys[layer, :, :, start:stop] = keys.permute(1, 2, 0)
            prompt.values[layer, :, start:stop] = values.transpose(0, 1)
            keys_KLD = prompt.keys[layer, :, :, :stop].transpose(1, 2)
            values_KLD = prompt.values[layer, :, :stop]
            attended.append(grouped_attention(queries, keys_KLD, values_KLD, mask))
        return torch.cat(attended)

    def after(self, rows: RowAttention) -> Attend:
        """Return the attention of tokens of rows followed by these."""
        num_row_tokens = len(rows.positions)

        def attend(layer: int, *inputs: Tensor) -> Tensor:
            row_inputs = [tensor[:num_row_tokens] for tensor in inputs]
            part_inputs = [tensor[num_row_tokens:] for tensor in inputs]
            return torch.cat([rows(layer, *row_inputs), self(layer, *part_inputs)])

        return attend


def causal_mask(start: int, length: int, device: torch.device) -> Tensor | None:
    """Return the positions visible to tokens from `start` on, `[length, start + length]`.

    None from 0, where torch's own causal attention is faster.
    """
    if start == 0:
        return None
    is_visible = torch.ones(length, start + length, dtype=torch.bool, device=device)
    return is_visible.tril(start)


class KVCache:
    """Keys and values of the generating rows; row r is the r-th of the batch."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.lengths: list[int] = []
        self._keys, self._values = self._allocate(0, 0)

    def _allocate(self, num_rows: int, num_positions: int) -> tuple[Tensor, Tensor]:
        num_layers, num_heads, head_dim = self.shape
        keys_shape = (num_layers, num_rows, num_heads, head_dim, num_positions)
        values_shape = (num_layers, num_rows, num_heads, num_positions, head_dim)
        # Zeros, because unwritten positions are multiplied by a weight of 0.
        keys = torch.zeros(keys_shape, dtype=self.dtype, device=self.device)
        values = torch.zeros(values_shape, dtype=self.dtype, device=self.device)
        return keys, values

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
        length = self.lengths[row]
        first_copy = self.num_rows
        self._reserve(first_copy + count, length + 1)
        copies = slice(first_copy, first_copy + count)
        self._keys[:, copies, ..., :length] = self._keys[:, row : row + 1, ..., :length]
        self._values[:, copies, :, :length] = self._values[:, row : row + 1, :, :length]
        self.lengths += [length] * count

    def copy_prompt(self, row: int, ids: tuple[int, ...]) -> PrefilledPrompt:
        """Copy the first positions of a row, which are those of a prompt."""
        length = len(ids)
        keys = self._keys[:, row, ..., :length].contiguous()
        values = self._values[:, row, :, :length].contiguous()
        return PrefilledPrompt(ids, keys, values)

    def allocate_prompt(self, ids: tuple[int, ...]) -> PrefilledPrompt:
        """Allocate a prompt outside of the rows."""
        keys, values = self._allocate(1, len(ids))
        return PrefilledPrompt(ids, keys[:, 0], values[:, 0])

    def keep(self, are_kept: Sequence[bool]) -> list[int]:
        """Drop rows, moving the last ones into their places; return the old indices of the rest."""
        num_kept = sum(are_kept)
        gaps = [row for row in range(num_kept) if not are_kept[row]]
        movers = [row for row in range(num_kept, len(are_kept)) if are_kept[row]]
        order = list(range(num_kept))
        for gap, mover in zip(gaps, movers, strict=True):
            length = self.lengths[mover]
            self._keys[:, gap, ..., :length] = self._keys[:, mover, ..., :length]
            self._values[:, gap, :, :length] = self._values[:, mover, :, :length]
            order[gap] = mover
        self.lengths = [self.lengths[row] for row in order]
        if not order and self._keys.nbytes > MAX_IDLE_BYTES:
            self._keys, self._values = self._allocate(0, 0)
        return order

    def repair(self) -> None:
        """Zero NaN keys and values: masked positions have a weight of 0, and 0 * NaN is NaN."""
        self._keys.nan_to_num_(0.0, 0.0, 0.0)
        self._values.nan_to_num_(0.0, 0.0, 0.0)

    def _reserve(self, num_rows: int, num_positions: int) -> None:
        old_rows, old_positions = self._keys.shape[1], self._keys.shape[4]
        if num_rows <= old_rows and num_positions <= old_positions:
            return
        # Rows to the next power of two, so that a growing batch is rarely copied.
        new_rows = old_rows if num_rows <= old_rows else 1 << (num_rows - 1).bit_length()
        new_positions = -(-num_positions // STEP_POSITIONS) * STEP_POSITIONS
        new_positions = max(new_positions, old_positions)
        keys, values = self._allocate(new_rows, new_positions)
        num_used = self.num_rows
        keys[:, :num_used, ..., :old_positions] = self._keys[:, :num_used]
        values[:, :num_used, :, :old_positions] = self._values[:, :num_used]
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
        self.keys = keys
        self.values = values
        device = keys.device
        # Rows with one new token are decoding; the others are the last parts of prompts.
        self.num_single = bisect_right(counts, 1)
        single_starts = starts[: self.num_single]
        positions = list(single_starts)
        rows = list(range(self.num_single))
        for row in range(self.num_single, len(counts)):
            positions += range(starts[row], starts[row] + counts[row])
            rows += [row] * counts[row]
        self.positions = torch.tensor(positions, dtype=torch.long, device=device)
        self.rows = torch.tensor(rows, dtype=torch.long, device=device)
        longest = max(single_starts, default=0)
        self.stop = longest + 1
        self.bias: Tensor | None = None
        if min(single_starts, default=0) < longest:
            positions_P1 = self.positions[: self.num_single, None]
            self.bias = _build_bias(positions_P1, self.stop, keys.dtype)
        self.groups = _group_rows(self.num_single, starts, counts, device, keys.dtype)

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """Return the attended values `[N, H * D]`; the queries are scaled."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, :, self.positions] = keys_NKD
        values[self.rows, :, self.positions] = values_NKD
        parts = []
        if self.num_single:
            single_keys = SharedKeys(
                keys[: self.num_single, :, :, : self.stop],
                values[: self.num_single, :, : self.stop],
                self.bias,
            )
            num_heads, head_dim = keys.shape[1:3]
            queries = queries_NHD[: self.num_single]
            queries_RTKGD = queries.view(self.num_single, 1, num_heads, -1, head_dim)
            parts.append(cascade_attention(queries_RTKGD, [single_keys]).flatten(1))
        for group in self.groups:
            parts.append(group.attend(keys, values, queries_NHD[group.tokens]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _build_bias(positions_PT: Tensor, stop: int, dtype: torch.dtype) -> Tensor:
    """Return 0 for keys up to each position, -inf from there to `stop`: `[P, 1, 1, T, 1, stop]`."""
    is_visible_PTL = torch.arange(stop, device=positions_PT.device) <= positions_PT[..., None]
    bias_PTL = torch.zeros(is_visible_PTL.shape, dtype=dtype, device=positions_PT.device)
    bias_PTL.masked_fill_(~is_visible_PTL, float("-inf"))
    return bias_PTL[:, None, None, :, None]


def _group_rows(
    first_row: int,
    starts: Sequence[int],
    counts: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> list[_RowGroup]:
    """Group the rows with several new tokens, from `first_row` on, to attend together."""
    groups = []
    row = token = first_row
    while row < len(counts):
        stop_row = row
        num_positions = 0
        while stop_row < len(counts):
            # With this row, all rows of the group are padded to its length: counts ascend.
            num_positions = max(num_positions, starts[stop_row] + counts[stop_row])
            num_rows = stop_row + 1 - row
            num_pairs = num_rows * counts[stop_row] * num_positions
            if num_rows > 1 and num_pairs > MAX_PADDED_PAIRS:
                break
            stop_row += 1
        group = _RowGroup(slice(row, stop_row), token, starts, counts, device, dtype)
        groups.append(group)
        token = group.tokens.stop
        row = stop_row
    return groups


class _RowGroup:
    """Rows with several new tokens, padded to the longest; a long one is alone, not padded.

    Their tokens follow each other from `first_token` on.
    """

    def __init__(
        self,
        rows: slice,
        first_token: int,
        starts: Sequence[int],
        counts: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.rows = rows
        starts, counts = starts[rows], counts[rows]
        longest = counts[-1]
        self.tokens = slice(first_token, first_token + sum(counts))
        self.stop = max(start + count for start, count in zip(starts, counts, strict=True))
        self.mask: Tensor | None = None
        self.is_long = len(counts) * longest * self.stop > MAX_PADDED_PAIRS
        if self.is_long:
            self.mask = causal_mask(starts[0], longest, device)
            return
        steps_T = torch.arange(longest, device=device)
        counts_P1 = torch.tensor(counts, device=device)[:, None]
        first_tokens_P1 = counts_P1.cumsum(0) - counts_P1
        # Padding repeats the last token of its row.
        steps_PT = torch.minimum(steps_T, counts_P1 - 1)
        self.padded = (first_tokens_P1 + steps_PT).flatten()
        self.unpadded = (steps_T < counts_P1).flatten().nonzero().squeeze(1)
        positions_PT = torch.tensor(starts, device=device)[:, None] + steps_PT
        self.bias = _build_bias(positions_PT, self.stop, dtype)

    def attend(self, keys: Tensor, values: Tensor, queries_NHD: Tensor) -> Tensor:
        """Return the attended values `[N, H * D]` of the tokens of these rows."""
        keys = keys[self.rows, :, :, : self.stop]
        values = values[self.rows, :, : self.stop]
        num_rows, num_keys, head_dim, _ = keys.shape
        if self.is_long:
            return grouped_attention(queries_NHD, keys[0].transpose(1, 2), values[0], self.mask)
        padded = queries_NHD.index_select(0, self.padded)
        group = padded.shape[1] // num_keys
        queries_PTKGD = padded.view(num_rows, -1, num_keys, group, head_dim)
        attended = cascade_attention(queries_PTKGD, [SharedKeys(keys, values, self.bias)])
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

    def make_room(self, num_positions: int, *, max_positions: int) -> None:
        """Allocate the given positions, and half as many more up to `max_positions`."""
        old_size = self.values.shape[3]
        if num_positions <= old_size:
            return
        extra = max(num_positions // 2, FIRST_ROOM)
        size = min(num_positions + extra, max_positions)
        keys = self.keys.new_zeros(*self.keys.shape[:4], size)
        values = self.values.new_zeros(*self.values.shape[:3], size, self.values.shape[4])
        keys[..., :old_size] = self.keys
        values[..., :old_size, :] = self.values
        self.keys, self.values = keys, values


def initial_capacity(num_new: int, num_before: int) -> int:
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
        if not self.blocks:
            block = self._allocate_block(num_groups, capacity)
            self.blocks.append(block)
            return block
        below = self.top
        num_new_copies = num_groups - below.num_groups
        is_folded = num_new_copies * below.length <= FOLD_TOKENS
        num_copied = below.length if is_folded else 0
        size = num_copied + capacity
        if num_new_copies == 0:
            if size <= below.values.shape[3]:
                return below
            # Room for later turns, or each turn would copy all that came before it.
            size += num_copied // 4
        block = self._allocate_block(num_groups, size)
        if is_folded:
            self._copy_to_readers(below, block)
            self.blocks.pop()
        self.blocks.append(block)
        return block

    def _allocate_block(self, num_groups: int, size: int) -> Block:
        num_layers, num_heads, head_dim = self.shape
        keys_shape = (num_layers, num_groups, num_heads, head_dim, size)
        values_shape = (num_layers, num_groups, num_heads, size, head_dim)
        # Zeros, because padding that was never written is multiplied by a weight of 0.
        keys = torch.zeros(keys_shape, dtype=self.dtype, device=self.device)
        values = torch.zeros(values_shape, dtype=self.dtype, device=self.device)
        return Block(keys, values)

    def _copy_to_readers(self, below: Block, block: Block) -> None:
        """Copy a block's positions to the start of the block above it, once for each reader."""
        num_layers, num_heads, head_dim = self.shape
        length, size = below.length, block.values.shape[3]
        sharing = block.num_groups // below.num_groups
        by_reader = (num_layers, below.num_groups, sharing, num_heads)
        keys = block.keys.view(*by_reader, head_dim, size)
        keys[..., :length] = below.keys[:, :, None, :, :, :length]
        values = block.values.view(*by_reader, size, head_dim)
        values[..., :length, :] = below.values[:, :, None, :, :length]
        if below.bias_PL is not None:
            block.bias_PL = below.bias_PL.repeat_interleave(sharing, dim=0)
        block.length = length

    def close(self, added_P: Sequence[int]) -> None:
        """Count the new positions of the top block, of which each group uses `added_P`."""
        block = self.top
        old_length = block.length
        num_added = max(added_P, default=0)
        block.length = old_length + num_added
        is_ragged = min(added_P, default=0) < num_added
        if block.bias_PL is None and not is_ragged:
            return
        bias_PL = torch.zeros(block.num_groups, block.length, dtype=self.dtype, device=self.device)
        if block.bias_PL is not None:
            bias_PL[:, :old_length] = block.bias_PL
        used_P1 = torch.tensor(added_P, device=self.device)[:, None]
        is_padding = torch.arange(num_added, device=self.device) >= used_P1
        bias_PL[:, old_length:].masked_fill_(is_padding, float("-inf"))
        block.bias_PL = bias_PL

    def keep(self, rows_K: Tensor) -> None:
        """Keep some rows of the top block, with all of their keys in one block without gaps."""
        num_rows = self.top.num_groups
        keys, values, is_padding = [], [], []
        for block in self.blocks:
            sharing = num_rows // block.num_groups
            groups_K = rows_K // sharing
            keys.append(block.keys[:, groups_K, ..., : block.length])
            values.append(block.values[:, groups_K, :, : block.length])
            bias_PL = block.bias_PL
            if bias_PL is None:
                bias_PL = torch.zeros(block.num_groups, block.length, device=self.device)
            is_padding.append(bias_PL[groups_K] < 0)
        all_keys = torch.cat(keys, dim=-1)
        all_values = torch.cat(values, dim=-2)
        is_padding_KL = torch.cat(is_padding, dim=1)
        lengths_K = (~is_padding_KL).sum(dim=1)
        # A stable sort moves the padding behind the rest.
        order_KL = is_padding_KL.int().argsort(dim=1, stable=True)
        order_KL = order_KL[:, : int(lengths_K.max())]
        order = order_KL[None, :, None, None].expand(*all_keys.shape[:-1], -1)
        self.blocks = [
            Block(all_keys.gather(-1, order), all_values.gather(-2, order.transpose(-1, -2)))
        ]
        self.close(lengths_K.tolist())

    def read_below(self, layer: int, rows: slice, num_rows: int) -> list[SharedKeys]:
        """Return the keys and values that some rows of the top block read from the blocks below."""
        segments = []
        for block in self.blocks[:-1]:
            sharing = num_rows // block.num_groups
            last_group = -(-rows.stop // sharing)
            groups = slice(rows.start // sharing, last_group)
            bias = None
            if block.bias_PL is not None:
                bias = block.bias_PL[groups, None, None, None, None]
            segments.append(block.read(layer, groups, block.length, bias))
        return segments

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
        num_bases = max(1, limit // base)
        larger_sizes = [size for size in sizes if size > base]
        if larger_sizes:
            # A chunk must not cross the border of the next larger group.
            while (larger_sizes[0] // base) % num_bases:
                num_bases -= 1
        step = base * num_bases
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

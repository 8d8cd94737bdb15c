"""Token sequences as a trie, in which shared prefixes are stored once.

Shape suffixes: `S` sequence, `D` depth (position in a sequence), `N` unique token, `L` token of one
row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

IntArray = NDArray[np.int64]

SMALLEST_PART = 12
"""Minimum size of both parts of a split row, relative to the repeated tokens."""
MAX_REPEATED = 0.05
"""Maximum share of unique tokens repeated by splits of long rows."""


@dataclass(frozen=True)
class TokenTrie:
    """The unique tokens of some sequences, with their positions."""

    ids_N: Tensor
    """int64 tokens, in rows that share nothing; within a row a token comes after all tokens that
    precede it in a sequence, and before all tokens that do not continue it (preorder)."""
    positions_N: Tensor
    """int64 positions in the sequence, from 0."""
    ends_N: Tensor
    """int64: end of the tokens that continue this one, as an index into the row's tokens."""
    row_lengths: list[int]
    """Tokens of each row."""
    nodes_SD: Tensor
    """int64 `[S, D]`: index in `ids_N` of each token of each sequence; -1 on padding."""
    num_unique: int
    """Number of tokens without those that rows repeat."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens to forward."""
        return len(self.ids_N)

    def row_masks(self) -> list[Tensor]:
        """Return a bool mask `[L, L]` per row: True where the row's token sees the column's."""
        masks = []
        start = 0
        for length in self.row_lengths:
            index = torch.arange(length, device=self.ids_N.device)
            ends = self.ends_N[start : start + length]
            masks.append((index[None, :] <= index[:, None]) & (index[:, None] < ends[None, :]))
            start += length
        return masks

    def passes(self, max_tokens: int) -> list[TokenTrie]:
        """Split rows into tries of at most `max_tokens`, or of one row; `nodes_SD` is not split.

        The tokens of the parts, in order, are the tokens of the whole.
        """
        parts, first, start = [], 0, 0
        while first < len(self.row_lengths):
            last, stop = first + 1, start + self.row_lengths[first]
            while (
                last < len(self.row_lengths) and stop + self.row_lengths[last] - start <= max_tokens
            ):
                stop += self.row_lengths[last]
                last += 1
            tokens = {
                name: getattr(self, name)[start:stop] for name in ("ids_N", "positions_N", "ends_N")
            }
            parts.append(replace(self, row_lengths=self.row_lengths[first:last], **tokens))
            first, start = last, stop
        return parts

    def to(self, device: torch.device) -> TokenTrie:
        """Move the trie to a device."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("ids_N", "positions_N", "ends_N", "nodes_SD")
        }
        return replace(self, **moved)


def build_trie(
    sequences: Sequence[Sequence[int]],
    *,
    pair_cost: float = 0.0,
    max_dense_tokens: float = math.inf,
    max_row_tokens: float = math.inf,
) -> TokenTrie:
    """Merge sequences into a trie, in one or several rows.

    A row attends within itself at a cost that grows with its square, and a cut between rows
    repeats what both sides share; a cut is made where it saves more than it costs, and where a row
    would be longer than `max_row_tokens`, always where the least is shared.

    Parameters
    ----------
    pair_cost : float
        Cost of one token attending to one other, in forwarded tokens.
    max_dense_tokens : float
        Longer rows skip unrelated tokens, and are cut only where almost nothing is shared.
    max_row_tokens : float
        Most tokens of a row; one sequence alone may be longer. Cuts are logged.
    """
    num_sequences = len(sequences)
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    width = max(int(lengths.max(initial=0)), 1)
    tokens_SD = np.full((num_sequences, width), -1, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        tokens_SD[row, : len(sequence)] = sequence
    order = np.lexsort(tokens_SD.T[::-1])
    tokens_SD, lengths = tokens_SD[order], lengths[order]
    shared_S = _shared_with_previous(tokens_SD, lengths)
    num_unique = int((lengths - shared_S).sum())
    rows = _cut(lengths, shared_S, pair_cost, max_dense_tokens, max_row_tokens)
    shared_S[[start for start, _ in rows]] = 0
    depth_D = np.arange(width)
    is_new_SD = (depth_D >= shared_S[:, None]) & (depth_D < lengths[:, None])
    # A token that is not new is the one that the sequence before has at this depth.
    numbers_SD = np.where(is_new_SD, np.cumsum(is_new_SD).reshape(is_new_SD.shape) - 1, -1)
    nodes_SD = np.maximum.accumulate(numbers_SD, axis=0)
    nodes_SD[depth_D >= lengths[:, None]] = -1
    sequence_N, depth_N = is_new_SD.nonzero()
    row_lengths = [int(is_new_SD[start:stop].sum()) for start, stop in rows]
    ends_N = _ends(shared_S, depth_N, is_new_SD, rows)
    unsorted_SD = np.empty_like(nodes_SD)
    unsorted_SD[order] = nodes_SD
    return TokenTrie(
        torch.from_numpy(tokens_SD[sequence_N, depth_N]),
        torch.from_numpy(depth_N),
        torch.from_numpy(ends_N),
        row_lengths,
        torch.from_numpy(unsorted_SD),
        num_unique,
    )


def _shared_with_previous(tokens_SD: IntArray, lengths: IntArray) -> IntArray:
    """Return the length of each sequence's common prefix with the previous one."""
    shared_S = np.zeros(len(tokens_SD), dtype=np.int64)
    if len(tokens_SD) > 1:
        differs = tokens_SD[1:] != tokens_SD[:-1]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), lengths[1:])
        shared_S[1:] = np.minimum(first, np.minimum(lengths[1:], lengths[:-1]))
    return shared_S


def _cut(
    lengths: IntArray,
    shared_S: IntArray,
    pair_cost: float,
    max_dense_tokens: float,
    max_row_tokens: float,
) -> list[tuple[int, int]]:
    """Return the ranges of sequences that form rows."""
    new_S = lengths - shared_S
    todo, rows = [(0, len(lengths))], []
    spare = MAX_REPEATED * new_S.sum()
    while todo:
        start, stop = todo.pop()
        size = int(new_S[start:stop].sum() + shared_S[start]) if stop > start else 0
        if stop - start > 1:
            # Where the least is shared, and of such places the one nearest to the middle.
            inner = shared_S[start + 1 : stop]
            places = np.flatnonzero(inner == inner.min()) + start + 1
            tokens_before = np.cumsum(new_S[start:stop])[places - start - 1] + shared_S[start]
            best = int(np.abs(tokens_before - size / 2).argmin())
            place, left = int(places[best]), int(tokens_before[best])
            repeated = int(shared_S[place])
            right = size - left + repeated
            saved = pair_cost * (size**2 - left**2 - right**2)
            is_cheap = saved > repeated
            if size > max_dense_tokens:
                is_cheap &= repeated <= min(spare, left / SMALLEST_PART, right / SMALLEST_PART)
                spare -= repeated * is_cheap
            if is_cheap or size > max_row_tokens:
                if not is_cheap:
                    logger.info(
                        "a tree of %d tokens is cut, which repeats %d: its mask would be too large",
                        size,
                        repeated,
                    )
                todo += [(place, stop), (start, place)]
                continue
        if stop > start:
            rows.append((start, stop))
    return rows


def _ends(
    shared_S: IntArray, depth_N: IntArray, is_new_SD: NDArray[np.bool_], rows: list[tuple[int, int]]
) -> IntArray:
    """Return, for each token, the index in its row at which its continuations end.

    That is the start of the first later sequence of the row that does not share the token.
    """
    first_token_S = np.concatenate([[0], np.cumsum(is_new_SD.sum(axis=1))])
    ends_N = np.empty(len(depth_N), dtype=np.int64)
    for start, stop in rows:
        offset = first_token_S[start]
        end_D = np.full(is_new_SD.shape[1], first_token_S[stop] - offset)
        # From the last sequence to the first: what one does not share ends where it begins.
        for sequence in range(stop - 1, start - 1, -1):
            own = slice(first_token_S[sequence], first_token_S[sequence + 1])
            ends_N[own] = end_D[depth_N[own]]
            end_D[shared_S[sequence] :] = first_token_S[sequence] - offset
    return ends_N

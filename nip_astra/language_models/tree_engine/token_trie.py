"""Token sequences as a trie, in which shared prefixes are stored once.

Shape suffixes: `S` sequence, `D` depth (position in a sequence), `N` unique token, `L` token of one
row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
        for ends_L in torch.split(self.ends_N, self.row_lengths):
            index_L = torch.arange(len(ends_L), device=self.ids_N.device)
            # In preorder, the descendants of a token are the ones from itself to its end.
            is_earlier_LL = index_L[None, :] <= index_L[:, None]
            is_open_LL = index_L[:, None] < ends_L[None, :]
            masks.append(is_earlier_LL & is_open_LL)
        return masks

    def passes(self, max_tokens: int) -> list[TokenTrie]:
        """Split rows into tries of at most `max_tokens`, or of one row; `nodes_SD` is not split.

        The tokens of the parts, in order, are the tokens of the whole.
        """
        num_rows = len(self.row_lengths)
        parts: list[TokenTrie] = []
        first_row = start = 0
        while first_row < num_rows:
            last_row = first_row + 1
            stop = start + self.row_lengths[first_row]
            while last_row < num_rows:
                stop_with_next = stop + self.row_lengths[last_row]
                if stop_with_next - start > max_tokens:
                    break
                stop = stop_with_next
                last_row += 1
            parts.append(
                replace(
                    self,
                    ids_N=self.ids_N[start:stop],
                    positions_N=self.positions_N[start:stop],
                    ends_N=self.ends_N[start:stop],
                    row_lengths=self.row_lengths[first_row:last_row],
                )
            )
            first_row, start = last_row, stop
        return parts

    def to(self, device: torch.device) -> TokenTrie:
        """Move the trie to a device."""
        return replace(
            self,
            ids_N=self.ids_N.to(device),
            positions_N=self.positions_N.to(device),
            ends_N=self.ends_N.to(device),
            nodes_SD=self.nodes_SD.to(device),
        )


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
    lengths_S = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    width = max(int(lengths_S.max(initial=0)), 1)
    # -1 is no token, so that a sequence sorts before its continuations.
    tokens_SD = np.full((num_sequences, width), -1, dtype=np.int64)
    for index, sequence in enumerate(sequences):
        tokens_SD[index, : len(sequence)] = sequence
    # In lexical order a sequence shares most with its neighbours, and their tokens are in preorder.
    order_S = np.lexsort(tokens_SD.T[::-1])
    tokens_SD = tokens_SD[order_S]
    lengths_S = lengths_S[order_S]
    shared_S = _count_shared_with_previous(tokens_SD, lengths_S)
    num_unique = int((lengths_S - shared_S).sum())
    rows = _cut_into_rows(lengths_S, shared_S, pair_cost, max_dense_tokens, max_row_tokens)
    # The first sequence of a row repeats what it shares with the row before.
    first_sequences = [start for start, _ in rows]
    shared_S[first_sequences] = 0
    depth_D = np.arange(width)
    is_padding_SD = depth_D >= lengths_S[:, None]
    is_new_SD = (depth_D >= shared_S[:, None]) & ~is_padding_SD
    # Number the new tokens. Any other is the one that the sequence before has at this depth.
    numbers_SD = np.cumsum(is_new_SD).reshape(is_new_SD.shape) - 1
    nodes_SD = np.maximum.accumulate(np.where(is_new_SD, numbers_SD, -1), axis=0)
    nodes_SD[is_padding_SD] = -1
    sequence_N, depth_N = is_new_SD.nonzero()
    row_lengths = [int(is_new_SD[start:stop].sum()) for start, stop in rows]
    ends_N = _find_ends(shared_S, depth_N, is_new_SD, rows)
    nodes_in_given_order_SD = np.empty_like(nodes_SD)
    nodes_in_given_order_SD[order_S] = nodes_SD
    return TokenTrie(
        torch.from_numpy(tokens_SD[sequence_N, depth_N]),
        torch.from_numpy(depth_N),
        torch.from_numpy(ends_N),
        row_lengths,
        torch.from_numpy(nodes_in_given_order_SD),
        num_unique,
    )


def _count_shared_with_previous(tokens_SD: IntArray, lengths_S: IntArray) -> IntArray:
    """Return the length of each sequence's common prefix with the previous one."""
    shared_S = np.zeros(len(tokens_SD), dtype=np.int64)
    if len(tokens_SD) > 1:
        differs = tokens_SD[1:] != tokens_SD[:-1]
        # Without a difference, `argmax` would be 0.
        first_difference = np.where(differs.any(axis=1), differs.argmax(axis=1), lengths_S[1:])
        shorter = np.minimum(lengths_S[1:], lengths_S[:-1])
        shared_S[1:] = np.minimum(first_difference, shorter)
    return shared_S


class _Cut(NamedTuple):
    """A place to cut a range of sequences in two."""

    sequence: int
    """The first sequence after the cut."""
    num_repeated: int
    """Tokens that both sides share, and each then has."""
    num_left: int
    num_right: int
    """Tokens of each side."""


def _cut_into_rows(
    lengths_S: IntArray,
    shared_S: IntArray,
    pair_cost: float,
    max_dense_tokens: float,
    max_row_tokens: float,
) -> list[tuple[int, int]]:
    """Return the ranges of sequences that form rows."""
    new_S = lengths_S - shared_S
    rows: list[tuple[int, int]] = []
    # A stack whose top is the leftmost range, so that rows come out in order.
    ranges = [(0, len(lengths_S))]
    repeatable = MAX_REPEATED * new_S.sum()
    while ranges:
        start, stop = ranges.pop()
        if stop == start:
            continue
        if stop == start + 1:
            rows.append((start, stop))
            continue
        num_tokens = int(new_S[start:stop].sum() + shared_S[start])
        cut = _find_cut(new_S, shared_S, start, stop, num_tokens)
        # Attention costs the square of a row's length, at which two halves are cheaper.
        num_pairs_saved = num_tokens**2 - cut.num_left**2 - cut.num_right**2
        is_worthwhile = pair_cost * num_pairs_saved > cut.num_repeated
        if num_tokens > max_dense_tokens:
            # Unrelated pairs cost nothing here. A cut saves little, so it may cost little.
            smaller_side = min(cut.num_left, cut.num_right)
            max_repeated = min(repeatable, smaller_side / SMALLEST_PART)
            is_worthwhile &= cut.num_repeated <= max_repeated
            repeatable -= cut.num_repeated * is_worthwhile
        if is_worthwhile or num_tokens > max_row_tokens:
            if not is_worthwhile:
                logger.info(
                    "a tree of %d tokens is cut, which repeats %d: its mask would be too large",
                    num_tokens,
                    cut.num_repeated,
                )
            ranges += [(cut.sequence, stop), (start, cut.sequence)]
        else:
            rows.append((start, stop))
    return rows


def _find_cut(new_S: IntArray, shared_S: IntArray, start: int, stop: int, num_tokens: int) -> _Cut:
    """Return the place where the least is shared, of several the one nearest to the middle."""
    shared_inside = shared_S[start + 1 : stop]
    candidates = np.flatnonzero(shared_inside == shared_inside.min()) + start + 1
    tokens_up_to = np.cumsum(new_S[start:stop]) + shared_S[start]
    tokens_before = tokens_up_to[candidates - start - 1]
    nearest = int(np.abs(tokens_before - num_tokens / 2).argmin())
    sequence = int(candidates[nearest])
    num_left = int(tokens_before[nearest])
    num_repeated = int(shared_S[sequence])
    num_right = num_tokens - num_left + num_repeated
    return _Cut(sequence, num_repeated, num_left, num_right)


def _find_ends(
    shared_S: IntArray, depth_N: IntArray, is_new_SD: NDArray[np.bool_], rows: list[tuple[int, int]]
) -> IntArray:
    """Return, for each token, the index in its row at which its continuations end.

    That is the start of the first later sequence of the row that does not share the token.
    """
    first_token_S = np.concatenate([[0], np.cumsum(is_new_SD.sum(axis=1))])
    ends_N = np.empty(len(depth_N), dtype=np.int64)
    for start, stop in rows:
        row_start = first_token_S[start]
        end_D = np.full(is_new_SD.shape[1], first_token_S[stop] - row_start)
        # From the last sequence to the first. `end_D` is where a token at each depth ends: tokens
        # that this sequence does not share with the one before end where it begins.
        for sequence in range(stop - 1, start - 1, -1):
            new_tokens = slice(first_token_S[sequence], first_token_S[sequence + 1])
            ends_N[new_tokens] = end_D[depth_N[new_tokens]]
            end_D[shared_S[sequence] :] = first_token_S[sequence] - row_start
    return ends_N

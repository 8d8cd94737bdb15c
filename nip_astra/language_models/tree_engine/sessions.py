"""A rollout through one model: each level of a tree starts from the caches of the last one.

Shape suffixes: `N` token, `R` row, `C` context, `T` token of a turn or span, `K` key-value head,
`H` query head, `D` head dimension, `X` hidden unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.language_models.base import (
    Draw,
    GenerationSession,
    SamplingOptions,
    TokenCount,
    Turns,
)
from nip_astra.language_models.generation import DecodeLoop
from nip_astra.language_models.scoring import token_logprobs
from nip_astra.language_models.tree_engine.attention import cascade_attention, causal_bias
from nip_astra.language_models.tree_engine.decode_graphs import FixedSteps
from nip_astra.language_models.tree_engine.decoder import Decoder
from nip_astra.language_models.tree_engine.key_value_tree import KeyValueTree
from nip_astra.language_models.tree_engine.weights import Weights

MAX_SCORES = 1 << 26
"""Attention scores computed at once: 256 MiB of float32."""


@dataclass(frozen=True)
class _Pass:
    """Hidden states of consecutive positions of the contexts, from one forward pass.

    Attributes
    ----------
    sharing : int
        Contexts per node.
    starts, stops : list[int]
        First and last position of each node.
    offsets : list[int]
        Start of each node in the hidden states.
    """

    hidden_NX: Tensor
    sharing: int
    starts: list[int]
    stops: list[int]
    offsets: list[int]

    def last_hidden(self) -> Tensor:
        """The hidden state of the last position of each node, `[C, X]`."""
        ends = [*self.offsets[1:], len(self.hidden_NX)]
        return self.hidden_NX[torch.tensor(ends, device=self.hidden_NX.device) - 1]

    def hidden_of(self, context: int, start: int, stop: int) -> Tensor:
        """Hidden states of a context's positions in a range, as far as they are in this pass."""
        node = context // self.sharing
        first, last = max(start, self.starts[node]), min(stop, self.stops[node])
        offset = self.offsets[node] - self.starts[node]
        return self.hidden_NX[offset + first : offset + max(first, last)]


class CachedSession(GenerationSession):
    """Generation that forwards no token twice.

    Contexts that continue rows of the last call start from their keys and values; common beginnings
    of several contexts are forwarded once.

    Parameters
    ----------
    weights : Weights
        Must not change during the session.
    draw : Draw
        Draws tokens from logits.
    end_ids : tuple[int, ...]
        Tokens that end a turn of this model.
    token_count : TokenCount
        Counts what is forwarded.
    max_batch_tokens : int
        Most tokens in one forward pass.
    steps : FixedSteps, optional
        Decode with fixed shapes.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        draw: Draw,
        *,
        end_ids: tuple[int, ...],
        token_count: TokenCount,
        max_batch_tokens: int,
        steps: FixedSteps | None = None,
    ) -> None:
        self.decoder = decoder
        self.weights = weights
        self.token_count = token_count
        self.decode_loop = DecodeLoop(
            decoder, weights, draw, end_ids=end_ids, token_count=token_count, steps=steps
        )
        self.max_batch_tokens = max_batch_tokens
        self.device = weights.embedding_VX.device
        shape = (decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self._tree = KeyValueTree(shape, weights.dtype, self.device)
        self._cached: list[list[int]] = []

    @torch.no_grad()
    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_RT: Tensor,
        options: SamplingOptions,
        *,
        branching: int = 1,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Turns:
        # The last token of a turn is not forwarded.
        reserve = options.max_new_tokens - 1
        firsts = None if spans is None else [start for start, _ in spans]
        passes = self._read(contexts, branching, reserve if rows_per_context == 1 else 0, firsts)
        span_logprobs = None if spans is None else self._score_spans(contexts, spans, passes)
        hidden_RX = passes[-1].last_hidden()
        if rows_per_context > 1:
            hidden_RX = hidden_RX.repeat_interleave(rows_per_context, dim=0)
            self._tree.grow(len(hidden_RX), reserve)
        lengths = [len(context) for context in contexts for _ in range(rows_per_context)]
        generation = self.decode_loop.generate(self._tree, hidden_RX, lengths, uniforms_RT, options)
        ids_RT, lengths = generation.ids_BT.tolist(), generation.mask_BT.sum(dim=1).tolist()
        self._tree.close([max(length - 1, 0) for length in lengths])
        self._cached = [
            [*contexts[row // rows_per_context], *ids[: max(length - 1, 0)]]
            for row, (ids, length) in enumerate(zip(ids_RT, lengths, strict=True))
        ]
        self.token_count.generated += sum(lengths)
        return Turns(generation, span_logprobs)

    def close(self) -> None:
        self._tree.clear()
        self._cached = []

    # ---- reading contexts

    def _read(
        self,
        contexts: Sequence[Sequence[int]],
        branching: int,
        reserve: int,
        firsts: Sequence[int] | None = None,
    ) -> list[_Pass]:
        """Forward new tokens of the contexts: first those that siblings share, then the rest.

        Parameters
        ----------
        firsts : Sequence[int], optional
            First position to predict, for each context.
        """
        starts = self._num_cached(contexts, branching)
        if starts is not None and firsts is not None:
            # If nothing separates two turns, the position before was forwarded while decoding,
            # and only its keys were kept.
            is_kept = all(start < first for start, first in zip(starts, firsts, strict=True))
            starts = starts if is_kept else None
        is_fresh = starts is None
        if starts is None:
            self._tree.clear()
            starts = [0] * len(contexts)
        passes = []
        for sharing in dict.fromkeys([*([len(contexts)] if is_fresh else []), branching]):
            if sharing > 1:
                groups = [contexts[i : i + sharing] for i in range(0, len(contexts), sharing)]
                begins = starts[::sharing]
                stops = [
                    begin + _num_shared(group, begin)
                    for group, begin in zip(groups, begins, strict=True)
                ]
                if stops != begins:
                    passes.append(self._extend([g[0] for g in groups], begins, stops, sharing, 0))
                starts = [stop for stop in stops for _ in range(sharing)]
        stops = [len(context) for context in contexts]
        return [*passes, self._extend(contexts, starts, stops, 1, reserve)]

    def _num_cached(self, contexts: Sequence[Sequence[int]], branching: int) -> list[int] | None:
        """Cached tokens of each context; None unless every context continues its row."""
        if len(contexts) != len(self._cached) * branching:
            return None
        rows = [row for row in self._cached for _ in range(branching)]
        if all(
            len(row) < len(context) and list(context[: len(row)]) == row
            for row, context in zip(rows, contexts, strict=True)
        ):
            return [len(row) for row in rows]
        return None

    def _extend(
        self,
        contexts: Sequence[Sequence[int]],
        starts: list[int],
        stops: list[int],
        sharing: int,
        reserve: int,
    ) -> _Pass:
        """Forward positions start to stop of each context, and keep their keys."""
        lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
        self._tree.grow(len(contexts), max(lengths) + reserve)
        limit = max(1, self.max_batch_tokens // max(1, max(lengths)))
        hidden = []
        for rows in self._tree.chunks(len(contexts), limit):
            ids = [
                i for r in range(rows.start, rows.stop) for i in contexts[r][starts[r] : stops[r]]
            ]
            positions = torch.cat(
                [torch.arange(starts[r], stops[r]) for r in range(rows.start, rows.stop)]
            )
            attend = _PrefillAttention(self._tree, rows, len(contexts), lengths[rows])
            hidden.append(self._forward(torch.tensor(ids), positions, attend, max(stops)))
        self._tree.close(lengths)
        offsets = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
        return _Pass(torch.cat(hidden), sharing, starts, stops, offsets)

    def _forward(
        self,
        ids_N: Tensor,
        positions_N: Tensor,
        attend: Callable[..., Tensor],
        num_positions: int,
    ) -> Tensor:
        self.token_count.forwarded += len(ids_N)
        if len(ids_N) == 0:
            return self.weights.embedding_VX.new_zeros(0, self.weights.embedding_VX.shape[1])
        return self.decoder.hidden(
            self.weights,
            ids_N.to(self.device),
            positions_N.to(self.device),
            attend,
            num_positions=num_positions,
        )

    def _score_spans(
        self,
        contexts: Sequence[Sequence[int]],
        spans: Sequence[tuple[int, int]],
        passes: list[_Pass],
    ) -> Tensor:
        """Log-probabilities of each context's tokens in a span, `[C, T]`, 0 on padding."""
        hidden = [
            piece.hidden_of(index, start - 1, stop - 1)
            for index, (start, stop) in enumerate(spans)
            for piece in passes
        ]
        ids = [i for context, (a, b) in zip(contexts, spans, strict=True) for i in context[a:b]]
        self.token_count.head_rows += len(ids)
        logprobs = token_logprobs(
            torch.cat(hidden), torch.tensor(ids, dtype=torch.long, device=self.device), self.weights
        )
        lengths = [stop - start for start, stop in spans]
        return pad_sequence(list(torch.split(logprobs.cpu(), lengths)), batch_first=True)


class _PrefillAttention:
    """Attention of new context tokens, ragged over rows, to the blocks below and themselves."""

    def __init__(
        self, tree: KeyValueTree, rows: slice, num_rows: int, lengths: Sequence[int]
    ) -> None:
        self.tree = tree
        self.rows = rows
        self.num_rows = num_rows
        self.width = max(lengths)
        device, dtype = tree.device, tree.dtype
        is_ragged = min(lengths) < self.width
        self.padded = self.packed = None
        if is_ragged:
            used = torch.arange(self.width) < torch.tensor(lengths).unsqueeze(1)
            index = torch.zeros(used.shape, dtype=torch.long)
            index[used] = torch.arange(int(used.sum()))
            self.padded = index.flatten().to(device)
            self.packed = used.flatten().nonzero().squeeze(1).to(device)
        old = tree.top.bias_PL
        self.bias = causal_bias(
            self.width, tree.top.length, None if old is None else old[rows], dtype, device
        )

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.padded is not None:
            queries, keys, values = queries[self.padded], keys[self.padded], values[self.padded]
        shape = (len(keys) // self.width, self.width, *keys.shape[1:])
        block, start = self.tree.top, self.tree.top.length
        block.write(layer, self.rows, start, keys.view(shape), values.view(shape))
        own = block.read(layer, self.rows, start + self.width, self.bias)
        below = self.tree.read_below(layer, self.rows, self.num_rows)
        grouped = queries.view(*shape[:3], -1, shape[3])
        num_keys = sum(values.shape[2] for _, values, _ in [*below, own])
        size = max(1, MAX_SCORES // (len(grouped) * grouped[0, 0].numel() // shape[3] * num_keys))
        parts = [
            cascade_attention(
                part, [*below, own._replace(bias=self.bias[:, :, :, first : first + size])]
            )
            for first, part in zip(
                range(0, self.width, size), torch.split(grouped, size, dim=1), strict=True
            )
        ]
        attended = torch.cat(parts, dim=1).flatten(0, 1).flatten(1)
        return attended if self.packed is None else attended[self.packed]


def _num_shared(contexts: Sequence[Sequence[int]], start: int) -> int:
    """Length of the common part from `start` on, without the last token of the shortest."""
    stop = min(len(context) for context in contexts) - 1
    first = contexts[0][start:stop]
    for context in contexts[1:]:
        other = context[start : start + len(first)]
        if list(first) != list(other):
            same = (a == b for a, b in zip(first, other, strict=True))
            first = first[: next(i for i, is_same in enumerate(same) if not is_same)]
    return len(first)

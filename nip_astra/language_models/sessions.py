"""A rollout through one model: each level of a tree starts from the caches of the one before.

Shape suffixes: `N` token, `R` row, `C` context, `T` token of a turn or span, `K` key-value head,
`H` query head, `D` head dimension, `X` hidden unit, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.language_models.attention import cascade_attention, causal_bias
from nip_astra.language_models.base import (
    Draw,
    Generation,
    GenerationSession,
    SamplingOptions,
    TokenCount,
    Turns,
)
from nip_astra.language_models.decoder import Decoder, Weights
from nip_astra.language_models.key_value_tree import KeyValueTree
from nip_astra.language_models.scoring import MAX_LOGITS, token_logprobs

MAX_SCORES = 1 << 26
"""Attention scores computed at once: 256 MiB of float32."""


@dataclass(frozen=True)
class _Pass:
    """One part of the contexts as it was read: hidden states of consecutive positions.

    Attributes
    ----------
    sharing : int
        Contexts that share each of the nodes.
    starts, stops : list[int]
        Positions read of each node.
    offsets : list[int]
        Where each node begins in the hidden states.
    """

    hidden_NX: Tensor
    sharing: int
    starts: list[int]
    stops: list[int]
    offsets: list[int]

    def last_hidden(self) -> Tensor:
        """Give the hidden state of the last position of each node, `[C, X]`."""
        ends = [*self.offsets[1:], len(self.hidden_NX)]
        return self.hidden_NX[torch.tensor(ends, device=self.hidden_NX.device) - 1]

    def hidden_of(self, context: int, start: int, stop: int) -> Tensor:
        """Give the hidden states of a context's positions in a range, as far as read here."""
        node = context // self.sharing
        first, last = max(start, self.starts[node]), min(stop, self.stops[node])
        offset = self.offsets[node] - self.starts[node]
        return self.hidden_NX[offset + first : offset + max(first, last)]


class CachedSession(GenerationSession):
    """Generation that forwards no token twice.

    Contexts that continue the rows of the last call start from their keys and values; what several
    contexts have in common is forwarded once and read by all of them.

    Parameters
    ----------
    weights : Weights
        As they are to stay for the session.
    draw : Draw
        Draws tokens from logits.
    end_ids : tuple[int, ...]
        Tokens that end a turn of this model.
    token_count : TokenCount
        Counts what is forwarded.
    max_batch_tokens : int
        Most tokens in one forward pass.
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
    ) -> None:
        self.decoder = decoder
        self.weights = weights
        self.draw = draw
        self.end_ids = end_ids
        self.token_count = token_count
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
        # The last token of a turn is predicted and not read.
        reserve = options.max_new_tokens - 1
        passes = self._read(contexts, branching, reserve if rows_per_context == 1 else 0)
        span_logprobs = None if spans is None else self._score_spans(contexts, spans, passes)
        hidden_RX = passes[-1].last_hidden()
        if rows_per_context > 1:
            hidden_RX = hidden_RX.repeat_interleave(rows_per_context, dim=0)
            self._tree.grow(len(hidden_RX), reserve)
        lengths = [len(context) for context in contexts for _ in range(rows_per_context)]
        generation = self._decode(hidden_RX, lengths, uniforms_RT.to(self.device), options)
        said = generation.mask_BT.sum(dim=1).tolist()
        self._tree.close([max(length - 1, 0) for length in said])
        self._cached = [
            [*contexts[row // rows_per_context], *ids[: max(length - 1, 0)]]
            for row, (ids, length) in enumerate(zip(generation.ids_BT.tolist(), said, strict=True))
        ]
        self.token_count.generated += sum(said)
        return Turns(generation, span_logprobs)

    # ---- reading contexts

    def _read(self, contexts: Sequence[Sequence[int]], branching: int, reserve: int) -> list[_Pass]:
        """Forward what is new of the contexts: first what siblings share, then the rest."""
        starts = self._num_cached(contexts, branching)
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
        """Give how much of each context its row has read already; None unless all rows fit."""
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
        """Forward the positions from start to stop of each context, and keep their keys."""
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
            attend = _ReadingAttention(self._tree, rows, len(contexts), lengths[rows])
            hidden.append(self._forward(torch.tensor(ids), positions, attend))
        self._tree.close(lengths)
        offsets = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
        return _Pass(torch.cat(hidden), sharing, starts, stops, offsets)

    def _forward(self, ids_N: Tensor, positions_N: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        self.token_count.forwarded += len(ids_N)
        if len(ids_N) == 0:
            return self.weights.embedding_VX.new_zeros(0, self.weights.embedding_VX.shape[1])
        return self.decoder.hidden(
            self.weights, ids_N.to(self.device), positions_N.to(self.device), attend
        )

    def _score_spans(
        self,
        contexts: Sequence[Sequence[int]],
        spans: Sequence[tuple[int, int]],
        passes: list[_Pass],
    ) -> Tensor:
        """Give log p of each context's tokens in a span, `[C, T]`, 0 on padding."""
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

    # ---- saying something

    def _decode(
        self,
        hidden_RX: Tensor,
        lengths: Sequence[int],
        uniforms_RT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        """Sample a turn of each row; a row that has ended is forwarded no more."""
        num_rows, width = len(hidden_RX), options.max_new_tokens
        ids_RT = torch.zeros(num_rows, width, dtype=torch.long, device=self.device)
        mask_RT = torch.zeros(num_rows, width, dtype=torch.bool, device=self.device)
        logprobs_RT = torch.zeros(num_rows, width, device=self.device)
        rows_A = torch.arange(num_rows, device=self.device)
        positions_R = torch.tensor(lengths, device=self.device)
        end_ids = torch.tensor([*self.end_ids, *options.end_ids], device=self.device)
        attend = _SpeakingAttention(self._tree, num_rows)
        for step in range(width):
            tokens_A, chosen_A = self._draw_all(hidden_RX, uniforms_RT[rows_A, step], step, options)
            ids_RT[rows_A, step] = tokens_A
            mask_RT[rows_A, step] = True
            logprobs_RT[rows_A, step] = chosen_A
            goes_on_A = ~torch.isin(tokens_A, end_ids)
            if step + 1 == width or not goes_on_A.any():
                break
            if not goes_on_A.all():
                rows_A, tokens_A = rows_A[goes_on_A], tokens_A[goes_on_A]
            attend.advance(rows_A)
            hidden_RX = self._forward(tokens_A, positions_R[rows_A] + step, attend)
        return Generation(ids_RT.cpu(), mask_RT.cpu(), logprobs_RT.cpu())

    def _draw_all(
        self, hidden_RX: Tensor, uniforms_R: Tensor, step: int, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        self.token_count.head_rows += len(hidden_RX)
        size = max(1, 2 * MAX_LOGITS // len(self.weights.embedding_VX))
        found = [
            self.draw(self.weights.head(hidden).float(), uniforms, step, options)
            for hidden, uniforms in zip(
                torch.split(hidden_RX, size), torch.split(uniforms_R, size), strict=True
            )
        ]
        return torch.cat([tokens for tokens, _ in found]), torch.cat(
            [chosen for _, chosen in found]
        )


class _ReadingAttention:
    """Attention of new context tokens, ragged over rows, to what is below and to themselves."""

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


class _SpeakingAttention:
    """Attention of one new token of each row that goes on."""

    def __init__(self, tree: KeyValueTree, num_rows: int) -> None:
        self.num_rows = num_rows
        self.block = tree.top
        everyone = slice(0, num_rows)
        self.below = [
            tree.read_below(layer, everyone, num_rows) for layer in range(len(self.block.keys))
        ]
        self.bias = None
        if self.block.bias_PL is not None:
            free = self.block.values.shape[3] - self.block.length
            self.bias = F.pad(self.block.bias_PL, (0, free))[:, None, None, None, None]
        self.rows_A: Tensor | None = None
        self.end = self.block.length

    def advance(self, rows_A: Tensor) -> None:
        """Make room for one token of the given rows."""
        self.rows_A = rows_A if len(rows_A) < self.num_rows else None
        self.end += 1

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        block, end = self.block, self.end
        rows = slice(None) if self.rows_A is None else self.rows_A
        block.keys[layer, rows, :, :, end - 1] = keys
        block.values[layer, rows, :, end - 1] = values
        if self.rows_A is not None:
            everyone = queries.new_zeros(self.num_rows, *queries.shape[1:])
            everyone[self.rows_A] = queries
            queries = everyone
        bias = None if self.bias is None else self.bias[..., :end]
        own = block.read(layer, slice(None), end, bias)
        grouped = queries.view(self.num_rows, 1, keys.shape[1], -1, keys.shape[2])
        attended = cascade_attention(grouped, [*self.below[layer], own]).flatten(1)
        return attended if self.rows_A is None else attended[self.rows_A]


def _num_shared(contexts: Sequence[Sequence[int]], start: int) -> int:
    """Give how many tokens from `start` on all contexts share, short of the shortest's last."""
    stop = min(len(context) for context in contexts) - 1
    first = contexts[0][start:stop]
    for context in contexts[1:]:
        other = context[start : start + len(first)]
        if list(first) != list(other):
            same = (a == b for a, b in zip(first, other, strict=True))
            first = first[: next(i for i, is_same in enumerate(same) if not is_same)]
    return len(first)

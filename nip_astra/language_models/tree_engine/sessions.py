"""Rollouts through one model: each tree level continues from the caches of the level above.

Shape suffixes: `N` token, `R` row, `A` unfinished row, `C` context, `T` token of a turn or span,
`K` key-value head, `H` query head, `D` head dimension, `X` hidden unit, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.language_models.base import (
    Generation,
    GenerationSession,
    TokenCount,
    Turns,
)
from nip_astra.language_models.sampling import Draw, SamplingOptions
from nip_astra.language_models.scoring import MAX_LOGITS, token_logprobs
from nip_astra.language_models.tree_engine.attention import (
    cascade_attention,
    causal_attention,
    causal_bias,
    is_flash_faster,
)
from nip_astra.language_models.tree_engine.decode_graphs import FixedStep, FixedSteps
from nip_astra.language_models.tree_engine.decoder import Decoder
from nip_astra.language_models.tree_engine.kv_cache import KeyValueTree, first_room
from nip_astra.language_models.tree_engine.weights import Weights

MAX_SCORES = 1 << 26
"""Maximum attention scores computed at once: 256 MiB of float32."""
CHECK_PERIOD = 8
"""Steps on a GPU between checks for ended rows; a check synchronises, ended rows cost steps."""


@dataclass(frozen=True)
class _Pass:
    """Hidden states of consecutive positions of the contexts, from one forward pass."""

    hidden_NX: Tensor
    sharing: int
    """Contexts that share a node."""
    starts: list[int]
    stops: list[int]
    """Positions of each node."""
    offsets: list[int]
    """First hidden state of each node."""

    def last_hidden(self) -> Tensor:
        """Return the hidden state of the last position of each node, `[C, X]`."""
        ends = [*self.offsets[1:], len(self.hidden_NX)]
        return self.hidden_NX[torch.tensor(ends, device=self.hidden_NX.device) - 1]

    def hidden_of(self, context: int, start: int, stop: int) -> Tensor:
        """Return hidden states of a context's positions in a range computed by this pass."""
        node = context // self.sharing
        first, last = max(start, self.starts[node]), min(stop, self.stops[node])
        offset = self.offsets[node] - self.starts[node]
        return self.hidden_NX[offset + first : offset + max(first, last)]


class CachedSession(GenerationSession):
    """Generation that forwards no token twice.

    Contexts that continue rows of the last call start from their keys and values; common prefixes
    of several contexts are forwarded once. Decoding has fixed shapes if `steps` is given; otherwise
    ended rows leave the batch.
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
        self.decoder, self.weights, self.draw = decoder, weights, draw
        self.end_ids, self.token_count, self.steps = end_ids, token_count, steps
        self.max_batch_tokens = max_batch_tokens
        self.device = weights.embedding_VX.device
        shape = (decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self._tree = KeyValueTree(shape, weights.dtype, self.device)
        self._cached: list[list[int]] = []

    @property
    def check_period(self) -> int:
        """Steps between checks for ended rows."""
        return 1 if self.steps is None and self.device.type == "cpu" else CHECK_PERIOD

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
            self._tree.grow(len(hidden_RX), first_room(reserve, 0))
        lengths = [len(context) for context in contexts for _ in range(rows_per_context)]
        fixed = None
        if self.steps is not None and reserve:
            fixed = self.steps.begin(self.weights, self._tree, lengths, reserve)
        uniforms_RT = uniforms_RT.to(self.device)
        sampled = self._generate(fixed, hidden_RX, lengths, uniforms_RT, options)
        generation = Generation(*(x.cpu() for x in sampled))
        ids_RT, lengths = generation.ids_BT.tolist(), generation.mask_BT.sum(dim=1).tolist()
        self._tree.close([max(length - 1, 0) for length in lengths])
        self._cached = [
            [*contexts[row // rows_per_context], *ids[: max(length - 1, 0)]]
            for row, (ids, length) in enumerate(zip(ids_RT, lengths, strict=True))
        ]
        self.token_count.generated += sum(lengths)
        return Turns(generation, span_logprobs)

    def keep(self, are_kept: Sequence[bool]) -> None:
        if not all(are_kept):
            self._tree.keep(torch.tensor(are_kept, device=self.device).nonzero().squeeze(1))
            self._cached = list(compress(self._cached, are_kept))

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
        """Forward new tokens of the contexts: first those shared by siblings, then the rest."""
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
        """Return each context's number of cached tokens; None unless all continue their rows."""
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
        """Forward positions start to stop of each context, and store their keys."""
        lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
        self._tree.grow(len(contexts), max(lengths) + first_room(reserve, max(stops)))
        limit = max(1, self.max_batch_tokens // max(1, max(lengths)))
        hidden = []
        for rows in self._tree.chunks(len(contexts), limit):
            own = range(rows.start, rows.stop)
            ids = [i for r in own for i in contexts[r][starts[r] : stops[r]]]
            if not ids:
                hidden.append(self.weights.final_norm.new_zeros(0, len(self.weights.final_norm)))
                continue
            self.token_count.forwarded += len(ids)
            positions = torch.cat([torch.arange(starts[r], stops[r]) for r in own])
            hidden.append(
                self.decoder.hidden(
                    self.weights,
                    torch.tensor(ids, device=self.device),
                    positions.to(self.device),
                    _PrefillAttention(self._tree, rows, len(contexts), lengths[rows]),
                    num_positions=max(stops),
                )
            )
        self._tree.close(lengths)
        offsets = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
        return _Pass(torch.cat(hidden), sharing, starts, stops, offsets)

    def _score_spans(
        self,
        contexts: Sequence[Sequence[int]],
        spans: Sequence[tuple[int, int]],
        passes: list[_Pass],
    ) -> Tensor:
        """Return log-probabilities of each context's tokens in a span, `[C, T]`, 0 on padding."""
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

    # ---- decoding

    def _generate(
        self,
        fixed: FixedStep | None,
        hidden_RX: Tensor,
        lengths: Sequence[int],
        uniforms_RT: Tensor,
        options: SamplingOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample a turn per row from the last hidden states of the contexts.

        New keys and values go into the tree's top block. On a GPU it is checked only occasionally
        whether rows have ended; these leave the batch then, except with fixed shapes.
        """
        num_rows, width = len(hidden_RX), options.max_new_tokens
        ids_RT = torch.zeros(num_rows, width, dtype=torch.long, device=self.device)
        mask_RT = torch.zeros(num_rows, width, dtype=torch.bool, device=self.device)
        logprobs_RT = torch.zeros(num_rows, width, device=self.device)
        rows_A = torch.arange(num_rows, device=self.device)
        is_open_A = torch.ones(num_rows, dtype=torch.bool, device=self.device)
        positions_R = torch.tensor(lengths, device=self.device)
        end_ids = torch.tensor([*self.end_ids, *options.end_ids], device=self.device)
        attend = _DecodeAttention(self._tree, num_rows, width - 1) if fixed is None else None
        tokens_A, chosen_A = self._draw_after(hidden_RX, uniforms_RT[:, 0], 0, options)
        for step in range(width):
            ids_RT[rows_A, step] = tokens_A * is_open_A
            mask_RT[rows_A, step] = is_open_A
            logprobs_RT[rows_A, step] = torch.where(is_open_A, chosen_A, 0.0)
            is_open_A = is_open_A & ~torch.isin(tokens_A, end_ids)
            if step + 1 == width:
                break
            if (step + 1) % self.check_period == 0:
                open_A = is_open_A.nonzero().squeeze(1)
                if len(open_A) == 0:
                    break
                if attend is not None and len(open_A) < len(rows_A):
                    rows_A, tokens_A = rows_A[open_A], tokens_A[open_A]
                    is_open_A = torch.ones_like(open_A, dtype=torch.bool)
            uniforms_A = uniforms_RT[rows_A, step + 1]
            if fixed is not None:
                self.token_count.forwarded += len(fixed.tokens_R)
                self.token_count.head_rows += len(fixed.tokens_R)
                logits_RV = fixed.advance(tokens_A).float()
                tokens_A, chosen_A = self.draw(logits_RV, uniforms_A, step + 1, options)
                continue
            assert attend is not None
            attend.advance(rows_A)
            self.token_count.forwarded += len(tokens_A)
            hidden_AX = self.decoder.hidden(
                self.weights,
                tokens_A,
                positions_R[rows_A] + step,
                attend,
                num_positions=max(lengths) + step + 1,
            )
            tokens_A, chosen_A = self._draw_after(hidden_AX, uniforms_A, step + 1, options)
        if fixed is not None:
            fixed.close()
        return ids_RT, mask_RT, logprobs_RT

    def _draw_after(
        self, hidden_RX: Tensor, uniforms_R: Tensor, step: int, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        """Sample a token per row, in chunks that bound the memory for logits."""
        self.token_count.head_rows += len(hidden_RX)
        size = max(1, 2 * MAX_LOGITS // len(self.weights.embedding_VX))
        parts = [
            self.draw(self.weights.head(hidden).float(), uniforms, step, options)
            for hidden, uniforms in zip(
                torch.split(hidden_RX, size), torch.split(uniforms_R, size), strict=True
            )
        ]
        tokens, chosen = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(chosen)


class _PrefillAttention:
    """Attention of new context tokens, ragged over rows, to the blocks below and to themselves."""

    def __init__(
        self, tree: KeyValueTree, rows: slice, num_rows: int, lengths: Sequence[int]
    ) -> None:
        self.tree = tree
        self.rows = rows
        self.num_rows = num_rows
        self.width = max(lengths)
        is_ragged = min(lengths) < self.width
        self.padded = self.packed = None
        if is_ragged:
            used = torch.arange(self.width) < torch.tensor(lengths).unsqueeze(1)
            index = torch.zeros(used.shape, dtype=torch.long)
            index[used] = torch.arange(int(used.sum()))
            self.padded = index.flatten().to(tree.device)
            self.packed = used.flatten().nonzero().squeeze(1).to(tree.device)

    @cached_property
    def bias(self) -> Tensor:
        """Return what each new token sees of its block, for `cascade_attention`."""
        block = self.tree.top
        old = None if block.bias_PL is None else block.bias_PL[self.rows]
        return causal_bias(self.width, block.length, old, self.tree.dtype, self.tree.device)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.padded is not None:
            queries, keys, values = queries[self.padded], keys[self.padded], values[self.padded]
        queries, keys, values = (
            x.view(-1, self.width, *x.shape[1:]) for x in (queries, keys, values)
        )
        block = self.tree.top
        block.write(layer, self.rows, block.length, keys, values)
        if not self.tree.has_padding and is_flash_faster(queries):
            seen = self.tree.read_all(layer, self.rows, self.num_rows, block.length + self.width)
            attended = causal_attention(queries, *seen)
        else:
            attended = self._cascade(layer, queries)
        attended = attended.flatten(0, 1).flatten(1)
        return attended if self.packed is None else attended[self.packed]

    def _cascade(self, layer: int, queries_RTHD: Tensor) -> Tensor:
        """Attend to the blocks below and the own one, in chunks that bound the memory."""
        block, num_keys = self.tree.top, self.tree.shape[1]
        own = block.read(layer, self.rows, block.length + self.width, self.bias)
        below = self.tree.read_below(layer, self.rows, self.num_rows)
        num_rows, _, num_heads, dim = queries_RTHD.shape
        num_positions = sum(values.shape[2] for _, values, _ in [*below, own])
        size = max(1, MAX_SCORES // (num_rows * num_heads * num_positions))
        grouped = queries_RTHD.view(num_rows, self.width, num_keys, -1, dim)
        parts = [
            cascade_attention(
                part, [*below, own._replace(bias=self.bias[:, :, :, first : first + size])]
            )
            for first, part in zip(
                range(0, self.width, size), torch.split(grouped, size, dim=1), strict=True
            )
        ]
        return torch.cat(parts, dim=1)


def _num_shared(contexts: Sequence[Sequence[int]], start: int) -> int:
    """Return the length of the common part from `start` on, except the shortest's last token."""
    stop = min(len(context) for context in contexts) - 1
    first = contexts[0][start:stop]
    for context in contexts[1:]:
        other = context[start : start + len(first)]
        if list(first) != list(other):
            same = (a == b for a, b in zip(first, other, strict=True))
            first = first[: next(i for i, is_same in enumerate(same) if not is_same)]
    return len(first)


class _DecodeAttention:
    """Attention of one new token of each unfinished row."""

    def __init__(self, tree: KeyValueTree, num_rows: int, num_new: int) -> None:
        self.num_rows = num_rows
        self.block = tree.top
        self.most = self.block.length + num_new
        all_rows = slice(0, num_rows)
        self.below = [
            tree.read_below(layer, all_rows, num_rows) for layer in range(len(self.block.keys))
        ]
        self.bias = None
        if self.block.bias_PL is not None:
            self.bias = F.pad(self.block.bias_PL, (0, num_new))[:, None, None, None, None]
        self.rows_A: Tensor | None = None
        self.end = self.block.length

    def advance(self, rows_A: Tensor) -> None:
        """Allocate one token for the given rows."""
        self.rows_A = rows_A if len(rows_A) < self.num_rows else None
        self.end += 1
        self.block.make_room(self.end, most=self.most)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        block, end = self.block, self.end
        rows = slice(None) if self.rows_A is None else self.rows_A
        block.keys[layer, rows, :, :, end - 1] = keys
        block.values[layer, rows, :, end - 1] = values
        if self.rows_A is not None:
            all_rows = queries.new_zeros(self.num_rows, *queries.shape[1:])
            all_rows[self.rows_A] = queries
            queries = all_rows
        bias = None if self.bias is None else self.bias[..., :end]
        own = block.read(layer, slice(None), end, bias)
        grouped = queries.view(self.num_rows, 1, keys.shape[1], -1, keys.shape[2])
        attended = cascade_attention(grouped, [*self.below[layer], own]).flatten(1)
        return attended if self.rows_A is None else attended[self.rows_A]

"""Rollouts through one model: each tree level continues from the caches of the level above.

Shape suffixes: `N` token, `R` row, `A` unfinished row, `C` context, `T` token of a turn or span,
`K` key-value head, `H` query head, `D` head dimension, `X` hidden unit, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress

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
from nip_astra.language_models.tree_engine.kv_cache import KeyValueTree, initial_capacity
from nip_astra.language_models.tree_engine.weights import Weights

MAX_SCORES = 1 << 26
"""Maximum attention scores computed at once: 256 MiB of float32."""
CHECK_PERIOD = 8
"""Steps on a GPU between checks for ended rows; a check synchronises, ended rows cost steps."""


@dataclass(frozen=True)
class _Pass:
    """Hidden states of consecutive positions of the contexts, from one forward pass.

    A node is what neighbouring contexts share in this pass, or the rest of one context.
    """

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

    def select_hidden(self, context: int, start: int, stop: int) -> Tensor:
        """Return hidden states of a context's positions in a range computed by this pass."""
        node = context // self.sharing
        first = max(start, self.starts[node])
        last = max(first, min(stop, self.stops[node]))
        offset = self.offsets[node] - self.starts[node]
        return self.hidden_NX[offset + first : offset + last]


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
        self.decoder = decoder
        self.weights = weights
        self.draw = draw
        self.end_ids = end_ids
        self.token_count = token_count
        self.steps = steps
        self.max_batch_tokens = max_batch_tokens
        self.device = weights.embedding_VX.device
        shape = (decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self._tree = KeyValueTree(shape, weights.dtype, self.device)
        self._cached_rows: list[list[int]] = []
        """The tokens whose keys each row of the last call has."""

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
        num_decoded = options.max_new_tokens - 1
        span_starts = None if spans is None else [start for start, _ in spans]
        # With one row per context, the turn's keys go into the block of its context.
        reserve = num_decoded if rows_per_context == 1 else 0
        passes = self._forward_contexts(contexts, branching, reserve, span_starts)
        span_logprobs = None if spans is None else self._score_spans(contexts, spans, passes)
        hidden_RX = passes[-1].last_hidden()
        if rows_per_context > 1:
            hidden_RX = hidden_RX.repeat_interleave(rows_per_context, dim=0)
            self._tree.grow(len(hidden_RX), initial_capacity(num_decoded, 0))
        context_lengths = [len(context) for context in contexts for _ in range(rows_per_context)]
        fixed = None
        if self.steps is not None and num_decoded:
            fixed = self.steps.begin(self.weights, self._tree, context_lengths, num_decoded)
        uniforms_RT = uniforms_RT.to(self.device)
        turns = self._sample_turns(fixed, hidden_RX, context_lengths, uniforms_RT, options)
        generation = Generation(turns.ids_BT.cpu(), turns.mask_BT.cpu(), turns.logprobs_BT.cpu())
        turn_lengths = generation.mask_BT.sum(dim=1).tolist()
        self.token_count.generated += sum(turn_lengths)
        # Neither of an empty turn nor of a turn's last token are there keys.
        num_cached = [max(length - 1, 0) for length in turn_lengths]
        self._tree.close(num_cached)
        self._cached_rows = []
        for row, ids in enumerate(generation.ids_BT.tolist()):
            context = contexts[row // rows_per_context]
            self._cached_rows.append([*context, *ids[: num_cached[row]]])
        return Turns(generation, span_logprobs)

    def keep(self, are_kept: Sequence[bool]) -> None:
        if not all(are_kept):
            self._tree.keep(torch.tensor(are_kept, device=self.device).nonzero().squeeze(1))
            self._cached_rows = list(compress(self._cached_rows, are_kept))

    def close(self) -> None:
        self._tree.clear()
        self._cached_rows = []

    # ---- reading contexts

    def _forward_contexts(
        self,
        contexts: Sequence[Sequence[int]],
        branching: int,
        reserve: int,
        span_starts: Sequence[int] | None = None,
    ) -> list[_Pass]:
        """Forward new tokens of the contexts: first those shared by siblings, then the rest.

        `reserve` is the number of positions for which each context may need room afterwards.
        """
        starts = self._count_cached(contexts, branching)
        if starts is not None and span_starts is not None:
            # If nothing separates two turns, the position before was forwarded while decoding,
            # and only its keys were kept.
            has_position_before = [
                start < span_start for start, span_start in zip(starts, span_starts, strict=True)
            ]
            if not all(has_position_before):
                starts = None
        # Contexts in groups that share a prefix, from the largest group to the smallest.
        group_sizes = [branching]
        if starts is None:
            self._tree.clear()
            starts = [0] * len(contexts)
            # All contexts may begin alike, for instance with a system prompt.
            group_sizes = [len(contexts), branching]
        passes = []
        for group_size in dict.fromkeys(group_sizes):
            if group_size == 1:
                continue
            groups = [contexts[i : i + group_size] for i in range(0, len(contexts), group_size)]
            group_starts = starts[::group_size]
            group_stops = []
            for group, start in zip(groups, group_starts, strict=True):
                group_stops.append(start + _count_shared(group, start))
            if group_stops != group_starts:
                first_contexts = [group[0] for group in groups]
                passes.append(
                    self._extend(first_contexts, group_starts, group_stops, group_size, 0)
                )
            starts = [stop for stop in group_stops for _ in range(group_size)]
        stops = [len(context) for context in contexts]
        passes.append(self._extend(contexts, starts, stops, 1, reserve))
        return passes

    def _count_cached(self, contexts: Sequence[Sequence[int]], branching: int) -> list[int] | None:
        """Return each context's number of cached tokens; None unless all continue their rows."""
        if len(contexts) != len(self._cached_rows) * branching:
            return None
        num_cached = []
        for index, context in enumerate(contexts):
            row = self._cached_rows[index // branching]
            # At least one token must be forwarded, since it predicts the next one.
            if len(row) >= len(context) or list(context[: len(row)]) != row:
                return None
            num_cached.append(len(row))
        return num_cached

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
        longest = max(lengths)
        self._tree.grow(len(contexts), longest + initial_capacity(reserve, max(stops)))
        # Attention pads the contexts of a chunk to the longest.
        max_contexts = max(1, self.max_batch_tokens // max(1, longest))
        hidden = []
        for chunk in self._tree.chunks(len(contexts), max_contexts):
            ids: list[int] = []
            positions = []
            for index in range(chunk.start, chunk.stop):
                ids += contexts[index][starts[index] : stops[index]]
                positions.append(torch.arange(starts[index], stops[index]))
            if not ids:
                hidden.append(self.weights.final_norm.new_zeros(0, len(self.weights.final_norm)))
                continue
            self.token_count.forwarded += len(ids)
            attend = _PrefillAttention(self._tree, chunk, len(contexts), lengths[chunk])
            hidden.append(
                self.decoder.hidden(
                    self.weights,
                    torch.tensor(ids, device=self.device),
                    torch.cat(positions).to(self.device),
                    attend,
                    num_positions=max(stops),
                )
            )
        self._tree.close(lengths)
        offsets = [0, *accumulate(lengths)][:-1]
        return _Pass(torch.cat(hidden), sharing, starts, stops, offsets)

    def _score_spans(
        self,
        contexts: Sequence[Sequence[int]],
        spans: Sequence[tuple[int, int]],
        passes: list[_Pass],
    ) -> Tensor:
        """Return log-probabilities of each context's tokens in a span, `[C, T]`, 0 on padding."""
        hidden: list[Tensor] = []
        ids: list[int] = []
        for index, (context, (start, stop)) in enumerate(zip(contexts, spans, strict=True)):
            # The position before a token predicts it. The passes cover the positions in order.
            hidden += [part.select_hidden(index, start - 1, stop - 1) for part in passes]
            ids += context[start:stop]
        self.token_count.head_rows += len(ids)
        ids_S = torch.tensor(ids, dtype=torch.long, device=self.device)
        logprobs_S = token_logprobs(torch.cat(hidden), ids_S, self.weights)
        lengths = [stop - start for start, stop in spans]
        logprobs_by_context = torch.split(logprobs_S.cpu(), lengths)
        return pad_sequence(list(logprobs_by_context), batch_first=True)

    # ---- decoding

    def _sample_turns(
        self,
        fixed: FixedStep | None,
        hidden_RX: Tensor,
        context_lengths: Sequence[int],
        uniforms_RT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        """Sample a turn per row from the last hidden states of the contexts, on the device.

        New keys and values go into the tree's top block. On a GPU it is checked only occasionally
        whether rows have ended; these leave the batch then, except with fixed shapes.
        """
        num_rows, width = len(hidden_RX), options.max_new_tokens
        ids_RT = torch.zeros(num_rows, width, dtype=torch.long, device=self.device)
        mask_RT = torch.zeros(num_rows, width, dtype=torch.bool, device=self.device)
        logprobs_RT = torch.zeros(num_rows, width, device=self.device)
        # The rows of the batch, some of which may have ended since the last check.
        rows_A = torch.arange(num_rows, device=self.device)
        is_open_A = torch.ones(num_rows, dtype=torch.bool, device=self.device)
        positions_R = torch.tensor(context_lengths, device=self.device)
        longest_context = max(context_lengths)
        end_ids = torch.tensor([*self.end_ids, *options.end_ids], device=self.device)
        attend = _DecodeAttention(self._tree, num_rows, width - 1) if fixed is None else None
        tokens_A, logprobs_A = self._draw_after(hidden_RX, uniforms_RT[:, 0], 0, options)
        for step in range(width):
            # What an ended row draws is discarded.
            ids_RT[rows_A, step] = tokens_A * is_open_A
            mask_RT[rows_A, step] = is_open_A
            logprobs_RT[rows_A, step] = torch.where(is_open_A, logprobs_A, 0.0)
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
                tokens_A, logprobs_A = self.draw(logits_RV, uniforms_A, step + 1, options)
                continue
            assert attend is not None
            attend.advance(rows_A)
            self.token_count.forwarded += len(tokens_A)
            hidden_AX = self.decoder.hidden(
                self.weights,
                tokens_A,
                positions_R[rows_A] + step,
                attend,
                num_positions=longest_context + step + 1,
            )
            tokens_A, logprobs_A = self._draw_after(hidden_AX, uniforms_A, step + 1, options)
        if fixed is not None:
            fixed.close()
        return Generation(ids_RT, mask_RT, logprobs_RT)

    def _draw_after(
        self, hidden_RX: Tensor, uniforms_R: Tensor, step: int, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        """Sample a token per row, in chunks that bound the memory for logits."""
        self.token_count.head_rows += len(hidden_RX)
        chunk_size = max(1, 2 * MAX_LOGITS // len(self.weights.embedding_VX))
        tokens, logprobs = [], []
        for hidden, uniforms in zip(
            torch.split(hidden_RX, chunk_size), torch.split(uniforms_R, chunk_size), strict=True
        ):
            logits = self.weights.head(hidden).float()
            chunk_tokens, chunk_logprobs = self.draw(logits, uniforms, step, options)
            tokens.append(chunk_tokens)
            logprobs.append(chunk_logprobs)
        return torch.cat(tokens), torch.cat(logprobs)


class _PrefillAttention:
    """Attention of new context tokens, ragged over rows, to the blocks below and to themselves."""

    def __init__(
        self, tree: KeyValueTree, rows: slice, num_rows: int, lengths: Sequence[int]
    ) -> None:
        self.tree = tree
        self.rows = rows
        self.num_rows = num_rows
        self.width = max(lengths)
        self.padded_to_packed: Tensor | None = None
        """Index of the token at each padded position; padding takes the first token."""
        self.packed_to_padded: Tensor | None = None
        is_ragged = min(lengths) < self.width
        if is_ragged:
            is_used_RT = torch.arange(self.width) < torch.tensor(lengths).unsqueeze(1)
            index_RT = torch.zeros(is_used_RT.shape, dtype=torch.long)
            index_RT[is_used_RT] = torch.arange(int(is_used_RT.sum()))
            self.padded_to_packed = index_RT.flatten().to(tree.device)
            self.packed_to_padded = is_used_RT.flatten().nonzero().squeeze(1).to(tree.device)

    @cached_property
    def bias(self) -> Tensor:
        """Return what each new token sees of its block, for `cascade_attention`."""
        block = self.tree.top
        old_bias_PL = None if block.bias_PL is None else block.bias_PL[self.rows]
        return causal_bias(self.width, block.length, old_bias_PL, self.tree.dtype, self.tree.device)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries_RTHD, keys_RTKD, values_RTKD = map(self._pad, (queries, keys, values))
        block = self.tree.top
        # Keys of padding are written too; `KeyValueTree.close` hides them from later turns.
        block.write(layer, self.rows, block.length, keys_RTKD, values_RTKD)
        if not self.tree.has_padding and is_flash_faster(queries_RTHD):
            stop = block.length + self.width
            all_keys, all_values = self.tree.read_all(layer, self.rows, self.num_rows, stop)
            attended_RTHD = causal_attention(queries_RTHD, all_keys, all_values)
            attended = attended_RTHD.flatten(0, 1).flatten(1)
        else:
            attended = self._attend_by_segments(layer, queries_RTHD).flatten(0, 1).flatten(1)
        return attended if self.packed_to_padded is None else attended[self.packed_to_padded]

    def _pad(self, x: Tensor) -> Tensor:
        """Return the rows of packed tokens as `[R, T, ...]`."""
        if self.padded_to_packed is not None:
            x = x[self.padded_to_packed]
        return x.view(-1, self.width, *x.shape[1:])

    def _attend_by_segments(self, layer: int, queries_RTHD: Tensor) -> Tensor:
        """Attend to the blocks below and the top one, in chunks that bound the memory."""
        top_block, num_keys = self.tree.top, self.tree.shape[1]
        top = top_block.read(layer, self.rows, top_block.length + self.width, self.bias)
        below = self.tree.read_below(layer, self.rows, self.num_rows)
        num_rows, _, num_heads, dim = queries_RTHD.shape
        num_positions = sum(segment.values.shape[2] for segment in (*below, top))
        chunk_size = max(1, MAX_SCORES // (num_rows * num_heads * num_positions))
        queries_RTKGD = queries_RTHD.view(num_rows, self.width, num_keys, -1, dim)
        parts = []
        for start in range(0, self.width, chunk_size):
            stop = start + chunk_size
            chunk_top = top._replace(bias=self.bias[:, :, :, start:stop])
            parts.append(cascade_attention(queries_RTKGD[:, start:stop], [*below, chunk_top]))
        return torch.cat(parts, dim=1)


def _count_shared(contexts: Sequence[Sequence[int]], start: int) -> int:
    """Return the length of the common part from `start` on, except the shortest's last token."""
    stop = min(len(context) for context in contexts) - 1
    shared = list(contexts[0][start:stop])
    for context in contexts[1:]:
        tokens = list(context[start : start + len(shared)])
        # Lists are compared much faster than their numbers in Python.
        if tokens != shared:
            is_equal = [a == b for a, b in zip(shared, tokens, strict=True)]
            shared = shared[: is_equal.index(False)]
    return len(shared)


class _DecodeAttention:
    """Attention of one new token of each unfinished row."""

    def __init__(self, tree: KeyValueTree, num_rows: int, num_new: int) -> None:
        self.num_rows = num_rows
        self.block = tree.top
        self.max_positions = self.block.length + num_new
        all_rows = slice(0, num_rows)
        # The blocks below stay the same throughout the turn.
        self.below_by_layer = [
            tree.read_below(layer, all_rows, num_rows) for layer in range(len(self.block.keys))
        ]
        self.bias: Tensor | None = None
        if self.block.bias_PL is not None:
            # Each row sees all of its own new positions.
            bias_PL = F.pad(self.block.bias_PL, (0, num_new))
            self.bias = bias_PL[:, None, None, None, None]
        self.rows_A: Tensor | None = None
        """The unfinished rows; None if no row has ended."""
        self.end = self.block.length

    def advance(self, rows_A: Tensor) -> None:
        """Allocate one token for the given rows."""
        self.rows_A = rows_A if len(rows_A) < self.num_rows else None
        self.end += 1
        self.block.make_room(self.end, max_positions=self.max_positions)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        block, end = self.block, self.end
        rows = slice(None) if self.rows_A is None else self.rows_A
        block.keys[layer, rows, :, :, end - 1] = keys
        block.values[layer, rows, :, end - 1] = values
        if self.rows_A is not None:
            # Queries of 0 for ended rows cost less than a copy of the keys of the others.
            all_queries = queries.new_zeros(self.num_rows, *queries.shape[1:])
            all_queries[self.rows_A] = queries
            queries = all_queries
        bias = None if self.bias is None else self.bias[..., :end]
        top = block.read(layer, slice(None), end, bias)
        num_keys, head_dim = keys.shape[1:]
        queries_RTKGD = queries.view(self.num_rows, 1, num_keys, -1, head_dim)
        attended = cascade_attention(queries_RTKGD, [*self.below_by_layer[layer], top]).flatten(1)
        return attended if self.rows_A is None else attended[self.rows_A]

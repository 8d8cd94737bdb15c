"""The decode loop of a level of a tree: draw a token per row, forward it, until all rows end.

Shape suffixes: `R` row, `A` unfinished row, `T` token of a turn, `X` hidden unit, `K` key-value
head, `D` head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.language_models.sampling import Draw, SamplingOptions
from nip_astra.language_models.scoring import MAX_LOGITS
from nip_astra.language_models.tokens import Generation, TokenCount
from nip_astra.language_models.tree_engine.attention import cascade_attention
from nip_astra.language_models.tree_engine.decode_graphs import FixedDecoding, FixedSteps
from nip_astra.language_models.tree_engine.decoder import Decoder
from nip_astra.language_models.tree_engine.key_value_tree import KeyValueTree
from nip_astra.language_models.tree_engine.weights import Weights

CHECK_PERIOD = 8
"""Fixed-shape steps between checks whether all rows have ended: a check waits for the device, and
steps after the last end are wasted."""


class DecodeLoop:
    """Samples the turns of a level of a tree.

    Parameters
    ----------
    draw : Draw
        Draws tokens from logits.
    end_ids : tuple[int, ...]
        Tokens that end a turn of this model.
    steps : FixedSteps or None
        Decodes with fixed shapes; if None, rows leave the batch when they end.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        draw: Draw,
        *,
        end_ids: tuple[int, ...],
        token_count: TokenCount,
        steps: FixedSteps | None,
    ) -> None:
        self.decoder = decoder
        self.weights = weights
        self.draw = draw
        self.end_ids = end_ids
        self.token_count = token_count
        self.steps = steps
        self.device = weights.embedding_VX.device

    def generate(
        self,
        tree: KeyValueTree,
        hidden_RX: Tensor,
        lengths: Sequence[int],
        uniforms_RT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        """Sample a turn per row; new keys and values go into the tree's top block.

        Parameters
        ----------
        hidden_RX : Tensor
            Last hidden state of each row's context.
        lengths : Sequence[int]
            Tokens of each row's context.
        """
        uniforms_RT = uniforms_RT.to(self.device)
        fixed = None
        if self.steps is not None and options.max_new_tokens > 1:
            # The last token of a turn is predicted and not read.
            fixed = self.steps.begin(self.weights, tree, lengths, options.max_new_tokens - 1)
        if fixed is None:
            sampled = self._generate_shrinking(tree, hidden_RX, lengths, uniforms_RT, options)
        else:
            sampled = self._generate_fixed(fixed, hidden_RX, uniforms_RT, options)
        ids_RT, mask_RT, logprobs_RT = (x.cpu() for x in sampled)
        return Generation(ids_RT, mask_RT, logprobs_RT)

    def _generate_shrinking(
        self,
        tree: KeyValueTree,
        hidden_RX: Tensor,
        lengths: Sequence[int],
        uniforms_RT: Tensor,
        options: SamplingOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Drop rows from the batch when they end."""
        num_rows, width = len(hidden_RX), options.max_new_tokens
        ids_RT, mask_RT, logprobs_RT = self._empty(num_rows, width)
        rows_A = torch.arange(num_rows, device=self.device)
        positions_R = torch.tensor(lengths, device=self.device)
        end_ids = self._ends(options)
        attend = _DecodeAttention(tree, num_rows)
        for step in range(width):
            tokens_A, chosen_A = self._draw_after(
                hidden_RX, uniforms_RT[rows_A, step], step, options
            )
            ids_RT[rows_A, step] = tokens_A
            mask_RT[rows_A, step] = True
            logprobs_RT[rows_A, step] = chosen_A
            is_open_A = ~torch.isin(tokens_A, end_ids)
            if step + 1 == width or not is_open_A.any():
                break
            if not is_open_A.all():
                rows_A, tokens_A = rows_A[is_open_A], tokens_A[is_open_A]
            attend.advance(rows_A)
            self.token_count.forwarded += len(tokens_A)
            hidden_RX = self.decoder.hidden(
                self.weights,
                tokens_A,
                positions_R[rows_A] + step,
                attend,
                num_positions=max(lengths) + step + 1,
            )
        return ids_RT, mask_RT, logprobs_RT

    def _generate_fixed(
        self,
        fixed: FixedDecoding,
        hidden_RX: Tensor,
        uniforms_RT: Tensor,
        options: SamplingOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Forward all rows to the end, checking for the end only now and then."""
        num_rows, width = len(hidden_RX), options.max_new_tokens
        ids_RT, mask_RT, logprobs_RT = self._empty(num_rows, width)
        end_ids = self._ends(options)
        is_open_R = torch.ones(num_rows, dtype=torch.bool, device=self.device)
        tokens_R, chosen_R = self._draw_after(hidden_RX, uniforms_RT[:, 0], 0, options)
        for step in range(width):
            ids_RT[:, step] = tokens_R * is_open_R
            mask_RT[:, step] = is_open_R
            logprobs_RT[:, step] = torch.where(is_open_R, chosen_R, 0.0)
            is_open_R = is_open_R & ~torch.isin(tokens_R, end_ids)
            is_check = (step + 1) % CHECK_PERIOD == 0
            if step + 1 == width or (is_check and not is_open_R.any()):
                break
            self.token_count.forwarded += fixed.num_forwarded
            self.token_count.head_rows += fixed.num_forwarded
            logits_RV = fixed.advance(tokens_R).float()
            tokens_R, chosen_R = self.draw(logits_RV, uniforms_RT[:, step + 1], step + 1, options)
        fixed.close()
        return ids_RT, mask_RT, logprobs_RT

    def _empty(self, num_rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        size, device = (num_rows, width), self.device
        ids_RT = torch.zeros(size, dtype=torch.long, device=device)
        mask_RT = torch.zeros(size, dtype=torch.bool, device=device)
        return ids_RT, mask_RT, torch.zeros(size, device=device)

    def _ends(self, options: SamplingOptions) -> Tensor:
        return torch.tensor([*self.end_ids, *options.end_ids], device=self.device)

    def _draw_after(
        self, hidden_RX: Tensor, uniforms_R: Tensor, step: int, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        """Draw a token per row, in chunks that bound the memory for logits."""
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


class _DecodeAttention:
    """Attention of one new token of each unfinished row."""

    def __init__(self, tree: KeyValueTree, num_rows: int) -> None:
        self.num_rows = num_rows
        self.block = tree.top
        all_rows = slice(0, num_rows)
        self.below = [
            tree.read_below(layer, all_rows, num_rows) for layer in range(len(self.block.keys))
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
            all_rows = queries.new_zeros(self.num_rows, *queries.shape[1:])
            all_rows[self.rows_A] = queries
            queries = all_rows
        bias = None if self.bias is None else self.bias[..., :end]
        own = block.read(layer, slice(None), end, bias)
        grouped = queries.view(self.num_rows, 1, keys.shape[1], -1, keys.shape[2])
        attended = cascade_attention(grouped, [*self.below[layer], own]).flatten(1)
        return attended if self.rows_A is None else attended[self.rows_A]

"""Sampling and scoring with a module's own `generate` and `forward`, row by row.

For models that `Decoder` does not support.

Shape suffixes: `B` row, `C` context position, `T` sampled position, `L` any position, `S` scored
position, `X` hidden unit, `V` vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import Generation, TokenCount, TokenRows, TokenScores, pad_left
from nip_astra.language_models.sampling import Draw, SamplingOptions
from nip_astra.language_models.scoring import ScoreNeeds, chosen_logprobs, scatter_scores


class _ForcedDraw:
    """A logits processor that samples the token itself, and forces `generate` to use it."""

    def __init__(self, draw: Draw, uniforms_BT: Tensor, options: SamplingOptions) -> None:
        self.draw = draw
        self.uniforms_BT = uniforms_BT
        self.options = options
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = len(self.tokens)
        uniforms_B = self.uniforms_BT[:, step].to(scores.device)
        # A copy, since `draw` overwrites its logits.
        logits_BV = scores.float().clone()
        tokens_B, logprobs_B = self.draw(logits_BV, uniforms_B, step, self.options)
        self.tokens.append(tokens_B)
        self.logprobs.append(logprobs_B)
        # Greedy decoding can only choose the drawn token.
        forced_BV = torch.full_like(scores, float("-inf"))
        return forced_BV.scatter_(1, tokens_B.unsqueeze(1), 0.0)


def generate_turns(
    module: Any,
    rows: Sequence[Sequence[int]],
    uniforms_BT: Tensor,
    options: SamplingOptions,
    *,
    draw: Draw,
    end_ids: tuple[int, ...],
    max_batch_tokens: int,
) -> tuple[Generation, TokenCount]:
    """Sample a turn for each row's context; return it and the work done."""
    batches: list[Generation] = []
    order: list[int] = []
    spent = TokenCount()
    max_lengths = [len(row) + options.max_new_tokens for row in rows]
    for batch_rows in _split_into_batches(max_lengths, max_batch_tokens):
        context_BC, mask_BC = pad_left([rows[row] for row in batch_rows], module.device)
        processor = _ForcedDraw(draw, uniforms_BT[batch_rows], options)
        turns = _generate_batch(module, context_BC, mask_BC, processor, end_ids)
        # Rows that have ended are computed until the last one of the batch ends.
        num_steps = int(turns.mask_BT.any(dim=0).sum())
        spent.forwarded += context_BC.numel() + len(batch_rows) * max(num_steps - 1, 0)
        spent.head_rows += len(batch_rows) * num_steps
        spent.generated += int(turns.mask_BT.sum())
        batches.append(turns)
        order += batch_rows
    restore_B = torch.tensor(order).argsort()
    generation = Generation(
        torch.cat([batch.ids_BT for batch in batches])[restore_B],
        torch.cat([batch.mask_BT for batch in batches])[restore_B],
        torch.cat([batch.logprobs_BT for batch in batches])[restore_B],
    )
    return generation, spent


def _generate_batch(
    module: Any,
    context_BC: Tensor,
    mask_BC: Tensor,
    processor: _ForcedDraw,
    end_ids: tuple[int, ...],
) -> Generation:
    from transformers import GenerationConfig, LogitsProcessorList

    options = processor.options
    stop_ids = sorted({*end_ids, *options.end_ids})
    generation_config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0] if stop_ids else 0,
    )
    # The checkpoint's own configuration would fill in options that change the distribution.
    checkpoint_config = module.generation_config
    module.generation_config = GenerationConfig()
    try:
        module.generate(
            input_ids=context_BC,
            attention_mask=mask_BC.long(),
            generation_config=generation_config,
            logits_processor=LogitsProcessorList([processor]),
        )
    finally:
        module.generation_config = checkpoint_config
    ids_BT = torch.stack(processor.tokens, 1)
    logprobs_BT = torch.stack(processor.logprobs, 1)
    is_end_BT = torch.isin(ids_BT, torch.tensor(stop_ids, device=ids_BT.device)).long()
    # Up to and including the first end token.
    num_ends_before_BT = is_end_BT.cumsum(dim=1) - is_end_BT
    mask_BT = num_ends_before_BT == 0
    padding = (0, options.max_new_tokens - ids_BT.shape[1])
    return Generation(
        F.pad(ids_BT * mask_BT, padding).cpu(),
        F.pad(mask_BT, padding).cpu(),
        F.pad(logprobs_BT * mask_BT, padding).cpu(),
    )


class RowReader(torch.nn.Module):
    """A causal language model's forward pass over rows, as one module.

    FSDP, which hooks a module's calls, wraps whole passes; the head is applied to the scored
    positions only.
    """

    def __init__(
        self, causal_lm: Any, dtype: torch.dtype, *, recomputes_layers: bool = False
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.autocast = autocast_to(causal_lm, dtype)
        self.recomputed_layers = find_layers(causal_lm) if recomputes_layers else []

    def forward(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        *,
        needs: ScoreNeeds,
    ) -> TokenScores:
        """Return scores of each continuation token; see `score_rows`."""
        rows = (context_BC, context_mask_BC, ids_BT, mask_BT)
        recomputed_layers = self.recomputed_layers if torch.is_grad_enabled() else []
        with self.autocast(), _recomputing(recomputed_layers):
            return _score_batch(self.causal_lm, rows, needs)


def autocast_to(module: Any, dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that creates a context in which a module computes in `dtype`."""
    if next(module.parameters()).dtype == dtype:
        return nullcontext
    return partial(torch.autocast, module.device.type, dtype=dtype)


def find_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a transformers model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"the layers of {type(module).__name__} are unknown: no GradientCheckpointingLayer. "
            "Set sharding to none and gradient_checkpointing to false, or use another model."
        )
    return layers


@contextmanager
def _recomputing(layers: Sequence[Any]) -> Iterator[None]:
    """Keep only the inputs of layers called within the block.

    Transformers' own gradient checkpointing requires train mode, in which dropout is active.
    """
    for layer in layers:
        # An attribute of the instance, which hides the method of its class until deleted.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def score_rows(
    reader: RowReader, rows: TokenRows, needs: ScoreNeeds, *, max_batch_tokens: int | None
) -> tuple[TokenScores, TokenCount]:
    """Score each continuation token, and count the work; in one pass without `max_batch_tokens`."""
    context_BC, context_mask_BC, ids_BT, mask_BT = rows
    context_sizes = context_mask_BC.sum(dim=1).tolist()
    lengths = [size + ids_BT.shape[1] for size in context_sizes]
    if max_batch_tokens is None:
        max_batch_tokens = len(lengths) * max(lengths)
    # A transform has one entry per scored position, row by row.
    stops = mask_BT.sum(dim=1).cumsum(0).tolist()
    starts = [0, *stops]
    batches: list[TokenScores] = []
    order: list[int] = []
    spent = TokenCount()
    for batch_rows in _split_into_batches(lengths, max_batch_tokens):
        # Without columns that are padding in all rows of this batch.
        longest_context = max(context_sizes[row] for row in batch_rows)
        first_column = context_BC.shape[1] - longest_context
        context = context_BC[batch_rows, first_column:]
        context_mask = context_mask_BC[batch_rows, first_column:]
        batch_needs = needs
        if needs.transform is not None:
            positions: list[int] = []
            for row in batch_rows:
                positions += range(starts[row], stops[row])
            batch_needs = replace(needs, transform=needs.transform.at(positions))
        mask = mask_BT[batch_rows]
        batches.append(reader(context, context_mask, ids_BT[batch_rows], mask, needs=batch_needs))
        spent.forwarded += len(batch_rows) * (context.shape[1] + ids_BT.shape[1])
        spent.head_rows += int(mask.sum())
        order += batch_rows
    restore_B = torch.tensor(order).argsort()

    def join(column: Sequence[Tensor | None]) -> Tensor | None:
        """Concatenate an output of all batches; None if it was not requested."""
        present = [part for part in column if part is not None]
        return torch.cat(present)[restore_B] if present else None

    logprobs_BT = torch.cat([batch.logprobs_BT for batch in batches])[restore_B]
    entropy_BT = join([batch.entropy_BT for batch in batches])
    hidden_BTX = join([batch.hidden_BTX for batch in batches])
    return TokenScores(logprobs_BT, entropy_BT, hidden_BTX), spent


def _score_batch(module: Any, rows: TokenRows, needs: ScoreNeeds) -> TokenScores:
    """Score one batch, with the head on scored positions only."""
    context_BC, context_mask_BC, ids_BT, mask_BT = rows
    device = module.device
    input_ids = torch.cat([context_BC, ids_BT], dim=1).to(device)
    input_mask = torch.cat([context_mask_BC, mask_BT], dim=1).long().to(device)
    mask_BT = mask_BT.to(device)
    ids_S = ids_BT.to(device)[mask_BT]
    inputs = {"input_ids": input_ids, "attention_mask": input_mask}
    # Some architectures take none.
    if "position_ids" in inspect.signature(module.forward).parameters:
        inputs["position_ids"] = (input_mask.cumsum(dim=1) - 1).clamp_(min=0)
    first_position = context_BC.shape[1] - 1

    def select_predicting(hidden_BLX: Tensor) -> Tensor:
        # The position before a token predicts it.
        return hidden_BLX[:, first_position:-1][mask_BT]

    hidden_SX, logits_SV = compute_logits(module, select_predicting, **inputs)
    hidden_output_SX = hidden_SX.float() if needs.hidden else None
    if needs.transform is not None:
        logprobs_S, entropy_S = chosen_logprobs(
            logits_SV, ids_S, needs.transform, needs_entropy=needs.entropy
        )
        return scatter_scores(mask_BT, logprobs_S, entropy_S, hidden_output_SX)
    # Where no logit is -inf, torch's own functions have finite gradients.
    logprobs_SV = logits_SV.log_softmax(dim=1)
    logprobs_S = logprobs_SV.gather(1, ids_S.unsqueeze(1)).squeeze(1)
    entropy_S = torch.special.entr(logprobs_SV.exp()).sum(dim=1) if needs.entropy else None
    return scatter_scores(mask_BT, logprobs_S, entropy_S, hidden_output_SX)


def compute_logits(
    module: Any, select: Callable[[Tensor], Tensor], **inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return hidden states selected from those of a forward pass, and their logits in float32.

    The head runs within the module's own pass, which may scale or cap its logits (as Gemma's and
    Cohere's do).
    """
    selected: list[Tensor] = []

    def select_before_head(_: Any, arguments: tuple[Tensor, ...]) -> Tensor:
        hidden_SX = select(arguments[0])
        selected.append(hidden_SX)
        return hidden_SX.unsqueeze(0)

    head = module.get_output_embeddings()
    hook = head.register_forward_pre_hook(select_before_head)
    try:
        logits_1SV: Tensor = module(**inputs, use_cache=False).logits
    finally:
        hook.remove()
    return selected[0], logits_1SV[0].float()


def _split_into_batches(lengths: Sequence[int], max_batch_tokens: int) -> Iterator[list[int]]:
    """Split rows, longest first, into batches within the token budget."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        batch_size = max(1, max_batch_tokens // max(1, longest))
        yield sorted(order[start : start + batch_size])
        start += batch_size

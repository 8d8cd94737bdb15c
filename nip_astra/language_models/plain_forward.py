"""Sampling and scoring with a module's own `generate` and `forward`, row by row.

For models that `Decoder` does not support.

Shape suffixes: `B` row, `C` context position, `T` sampled position, `V` vocabulary.
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
from nip_astra.language_models.scoring import ScoreNeeds, chosen_logprobs, spread


class _Draw:
    """Samples the token itself, and forces `generate` to use it."""

    def __init__(self, draw: Draw, uniforms_BT: Tensor, options: SamplingOptions) -> None:
        self.draw, self.uniforms_BT, self.options = draw, uniforms_BT, options
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = len(self.tokens)
        tokens_B, logprobs_B = self.draw(
            scores.float().clone(), self.uniforms_BT[:, step].to(scores.device), step, self.options
        )
        self.tokens.append(tokens_B)
        self.logprobs.append(logprobs_B)
        forced = torch.full_like(scores, float("-inf"))
        return forced.scatter_(1, tokens_B.unsqueeze(1), 0.0)


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
    parts, order, spent = [], [], TokenCount()
    for part in _parts([len(row) + options.max_new_tokens for row in rows], max_batch_tokens):
        context_BC, mask_BC = pad_left([rows[i] for i in part], module.device)
        drawn = _generate_batch(
            module, context_BC, mask_BC, _Draw(draw, uniforms_BT[part], options), end_ids
        )
        steps = int(drawn.mask_BT.any(dim=0).sum())
        spent.forwarded += context_BC.numel() + len(part) * max(steps - 1, 0)
        spent.head_rows += len(part) * steps
        spent.generated += int(drawn.mask_BT.sum())
        parts.append(drawn)
        order += part
    back = torch.tensor(order).argsort()
    ids, mask, logprobs = (
        torch.cat([getattr(piece, name) for piece in parts])[back]
        for name in ("ids_BT", "mask_BT", "logprobs_BT")
    )
    return Generation(ids, mask, logprobs), spent


def _generate_batch(
    module: Any, context_BC: Tensor, mask_BC: Tensor, processor: _Draw, end_ids: tuple[int, ...]
) -> Generation:
    from transformers import GenerationConfig, LogitsProcessorList

    options = processor.options
    ends = sorted({*end_ids, *options.end_ids})
    # The checkpoint's own configuration would fill in options that change the distribution.
    own, module.generation_config = module.generation_config, GenerationConfig()
    try:
        module.generate(
            input_ids=context_BC,
            attention_mask=mask_BC.long(),
            generation_config=GenerationConfig(
                max_new_tokens=options.max_new_tokens,
                eos_token_id=ends,
                pad_token_id=ends[0] if ends else 0,
            ),
            logits_processor=LogitsProcessorList([processor]),
        )
    finally:
        module.generation_config = own
    ids_BT, logprobs_BT = torch.stack(processor.tokens, 1), torch.stack(processor.logprobs, 1)
    is_end_BT = torch.isin(ids_BT, torch.tensor(ends, device=ids_BT.device))
    mask_BT = (is_end_BT.long().cumsum(dim=1) - is_end_BT.long()) == 0
    padding = (0, options.max_new_tokens - ids_BT.shape[1])
    ids, mask, logprobs = (
        F.pad(x, padding).cpu() for x in (ids_BT * mask_BT, mask_BT, logprobs_BT * mask_BT)
    )
    return Generation(ids, mask, logprobs)


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
        self.recomputed = layers_of(causal_lm) if recomputes_layers else []

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
        with self.autocast(), _recomputing(self.recomputed if torch.is_grad_enabled() else []):
            rows = (context_BC, context_mask_BC, ids_BT, mask_BT)
            return _score_batch(self.causal_lm, rows, needs)


def autocast_to(module: Any, dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that creates a context in which a module computes in `dtype`."""
    if next(module.parameters()).dtype == dtype:
        return nullcontext
    return partial(torch.autocast, module.device.type, dtype=dtype)


def layers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a transformers model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [one for one in module.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"the layers of {type(module).__name__} are unknown: no GradientCheckpointingLayer. "
            "Set sharding to none and gradient_checkpointing to false, or use another model."
        )
    return layers


@contextmanager
def _recomputing(layers: Sequence[Any]) -> Iterator[None]:
    """Keep only the inputs of layers called within the block.

    Transformers' own gradient checkpointing requires train mode.
    """
    for layer in layers:
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
    """Score each continuation token, in one pass without `max_batch_tokens`; also count
    the work.
    """
    context_BC, context_mask_BC, ids_BT, mask_BT = rows
    widths = context_mask_BC.sum(dim=1).tolist()
    pieces, order, spent = [], [], TokenCount()
    lengths = [width + ids_BT.shape[1] for width in widths]
    limit = len(lengths) * max(lengths) if max_batch_tokens is None else max_batch_tokens
    # Scored positions are counted row by row.
    stops = mask_BT.sum(dim=1).cumsum(0).tolist()
    starts, own = [0, *stops], needs
    for part in _parts(lengths, limit):
        # Without columns that are padding in all rows of this part.
        start = context_BC.shape[1] - max(widths[i] for i in part)
        context, mask = context_BC[part, start:], context_mask_BC[part, start:]
        if needs.transform is not None:
            positions = [position for row in part for position in range(starts[row], stops[row])]
            own = replace(needs, transform=needs.transform.at(positions))
        pieces.append(reader(context, mask, ids_BT[part], mask_BT[part], needs=own))
        spent.forwarded += len(part) * (context.shape[1] + ids_BT.shape[1])
        spent.head_rows += int(mask_BT[part].sum())
        order += part
    again = torch.tensor(order).argsort()

    def joined(column: Sequence[Tensor | None]) -> Tensor | None:
        found = [piece for piece in column if piece is not None]
        return torch.cat(found)[again] if found else None

    logprobs, entropies, hidden = zip(*pieces, strict=True)
    return TokenScores(torch.cat(logprobs)[again], joined(entropies), joined(hidden)), spent


def _score_batch(module: Any, rows: TokenRows, needs: ScoreNeeds) -> TokenScores:
    """Score one batch, with the head on scored positions only."""
    context_BC, context_mask_BC, ids_BT, mask_BT = rows
    device = module.device
    ids = torch.cat([context_BC, ids_BT], dim=1).to(device)
    mask = torch.cat([context_mask_BC, mask_BT], dim=1).to(device)
    scored_BT = mask_BT.to(device)
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    # Some architectures take none.
    if "position_ids" in inspect.signature(module.forward).parameters:
        inputs["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)
    # The position before a token predicts it.
    before_NX, logits_NV = logits_of(
        module, lambda hidden: hidden[:, context_BC.shape[1] - 1 : -1][scored_BT], **inputs
    )
    ids_N = ids_BT.to(device)[scored_BT]
    hidden_NX = before_NX.float() if needs.hidden else None
    if needs.transform is not None:
        found = chosen_logprobs(logits_NV, ids_N, needs.transform, needs_entropy=needs.entropy)
        return spread(scored_BT, *found, hidden_NX)
    logprobs_NV = logits_NV.log_softmax(dim=1)
    return spread(
        scored_BT,
        logprobs_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1),
        torch.special.entr(logprobs_NV.exp()).sum(dim=1) if needs.entropy else None,
        hidden_NX,
    )


def logits_of(
    module: Any, choose: Callable[[Tensor], Tensor], **inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return hidden states chosen among those of a forward pass, and their logits in float32.

    The head runs within the module's own pass, which may scale or cap its logits.
    """
    chosen: list[Tensor] = []

    def choose_for_head(_: Any, arguments: tuple[Tensor, ...]) -> Tensor:
        chosen.append(choose(arguments[0]))
        return chosen[0].unsqueeze(0)

    hook = module.get_output_embeddings().register_forward_pre_hook(choose_for_head)
    try:
        logits_1NV: Tensor = module(**inputs, use_cache=False).logits
    finally:
        hook.remove()
    return chosen[0], logits_1NV[0].float()


def _parts(lengths: Sequence[int], max_batch_tokens: int) -> Iterator[list[int]]:
    """Split rows, longest first, into batches within the token budget."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        size = max(1, max_batch_tokens // max(1, lengths[order[start]]))
        yield sorted(order[start : start + size])
        start += size

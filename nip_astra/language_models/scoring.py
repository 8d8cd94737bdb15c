"""Log-probabilities of tokens from hidden states, without logits of all positions at once.

Shape suffixes: `S` scored position, `X` hidden unit, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nip_astra.language_models.decoder import Weights

MAX_LOGITS = 1 << 24
"""Logits computed at once without gradients: 64 MiB of float32."""
MAX_KEPT_LOGITS = 1 << 26
"""Logits kept for the backward pass; of more, those of a chunk are computed again there."""


def token_logprobs(hidden_SX: Tensor, ids_S: Tensor, weights: Weights) -> Tensor:
    """Give log p of one token a position, float32 `[S]` nats.

    Parameters
    ----------
    hidden_SX : Tensor
        Last hidden states of the positions that predict the tokens; gradients flow.
    """
    vocab_size = len(weights.embedding_VX)
    has_gradient = torch.is_grad_enabled() and hidden_SX.requires_grad
    if has_gradient and len(ids_S) * vocab_size <= MAX_KEPT_LOGITS:
        return _chunk(hidden_SX, ids_S, weights)
    size = max(1, MAX_LOGITS // vocab_size)
    chunks = zip(torch.split(hidden_SX, size), torch.split(ids_S, size), strict=True)
    if has_gradient:
        found = [checkpoint(_chunk, *chunk, weights, use_reentrant=False) for chunk in chunks]
    else:
        found = [_chunk(*chunk, weights) for chunk in chunks]
    return torch.cat(found)


def _chunk(hidden_SX: Tensor, ids_S: Tensor, weights: Weights) -> Tensor:
    logits_SV = weights.head(hidden_SX).float()
    logprobs_S: Tensor = _ChosenLogprobs.apply(logits_SV, ids_S)  # type: ignore[no-untyped-call]
    return logprobs_S


class _ChosenLogprobs(torch.autograd.Function):
    """Log-softmax at one index a row, with a backward pass that makes one tensor of logits' size.

    The gradient with respect to the logits is `g * (onehot(ids) - softmax(logits))`.
    """

    @staticmethod
    def forward(ctx: Any, logits_SV: Tensor, ids_S: Tensor) -> Tensor:
        mass_S1 = logits_SV.logsumexp(dim=1, keepdim=True)
        ctx.save_for_backward(logits_SV, ids_S, mass_S1)
        return (logits_SV.gather(1, ids_S.unsqueeze(1)) - mass_S1).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits_SV, ids_S, mass_S1 = ctx.saved_tensors
        grad_S1 = gradients[0].unsqueeze(1)
        grad_SV = (logits_SV - mass_S1).exp_().mul_(-grad_S1)
        return grad_SV.scatter_add_(1, ids_S.unsqueeze(1), grad_S1), None

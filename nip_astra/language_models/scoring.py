"""Log-probabilities of tokens from hidden states, without materialising all logits at once.

Shape suffixes: `S` scored position, `X` hidden unit, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nip_astra.errors import NonFiniteOutputError
from nip_astra.language_models.sampling import LogitsTransform
from nip_astra.language_models.tree_engine.weights import Weights

MAX_LOGITS = 1 << 24
"""Maximum logits computed at once without gradients: 64 MiB of float32."""
MAX_KEPT_LOGITS = 1 << 26
"""Maximum logits kept for the backward pass; beyond it, each chunk's are recomputed there."""


@dataclass(frozen=True)
class ScoreNeeds:
    """Outputs of scoring besides log-probabilities, and the distribution of all of them."""

    entropy: bool = False
    hidden: bool = False
    transform: LogitsTransform | None = None
    """None for the model's own distribution."""


def token_logprobs(hidden_SX: Tensor, ids_S: Tensor, weights: Weights) -> Tensor:
    """Return the log-probability of one token per position, float32 `[S]` nats."""
    logprobs_S, _ = token_logprobs_and_entropy(hidden_SX, ids_S, weights, needs_entropy=False)
    return logprobs_S


def token_logprobs_and_entropy(
    hidden_SX: Tensor,
    ids_S: Tensor,
    weights: Weights,
    *,
    needs_entropy: bool = True,
    transform: LogitsTransform | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of one token and the entropy at each position, float32 `[S]` nats.

    Gradients flow through both. The entropy is None unless requested.
    """
    vocab_size = len(weights.embedding_VX)
    has_gradient = torch.is_grad_enabled() and hidden_SX.requires_grad

    def function(
        hidden: Tensor, ids: Tensor, transform: LogitsTransform | None
    ) -> tuple[Tensor, Tensor | None]:
        return chosen_logprobs(weights.head(hidden), ids, transform, needs_entropy=needs_entropy)

    if has_gradient and len(ids_S) * vocab_size <= MAX_KEPT_LOGITS:
        results = [function(hidden_SX, ids_S, transform)]
    else:
        size = max(1, MAX_LOGITS // vocab_size)
        parts = torch.split(torch.arange(len(ids_S)), size)
        transforms = [None if transform is None else transform.at(part.tolist()) for part in parts]
        chunks = zip(
            torch.split(hidden_SX, size), torch.split(ids_S, size), transforms, strict=True
        )
        if has_gradient:
            results = [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]
        else:
            results = [function(*chunk) for chunk in chunks]
    logprobs_S = torch.cat([logprobs for logprobs, _ in results])
    entropies = [entropy for _, entropy in results if entropy is not None]
    return logprobs_S, torch.cat(entropies) if needs_entropy else None


def chosen_logprobs(
    logits_SV: Tensor,
    ids_S: Tensor,
    transform: LogitsTransform | None = None,
    *,
    needs_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute `token_logprobs_and_entropy` from logits."""
    logits_SV = logits_SV.float()
    if transform is not None:
        logits_SV = transform.apply(logits_SV)
    if needs_entropy:
        result: tuple[Tensor, Tensor] = _ChosenLogprobsAndEntropy.apply(logits_SV, ids_S)  # type: ignore[no-untyped-call]
        return result
    return _ChosenLogprobs.apply(logits_SV, ids_S), None  # type: ignore[no-untyped-call]


class _ChosenLogprobs(torch.autograd.Function):
    """Log-softmax at one index per row; its backward pass allocates one tensor of the logits' size.

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


class _ChosenLogprobsAndEntropy(torch.autograd.Function):
    """The same with the entropy `H` of each row's distribution `p`.

    The entropy adds `-g * p * (log p + H)` to the gradient with respect to the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits_SV: Tensor, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_SV = logits_SV - logits_SV.logsumexp(dim=1, keepdim=True)
        # A token of probability 0 adds nothing, though its log-probability is minus infinity.
        lowest = torch.finfo(logprobs_SV.dtype).min
        entropy_S = -(logprobs_SV.exp() * logprobs_SV.clamp(min=lowest)).sum(dim=1)
        ctx.save_for_backward(logprobs_SV, ids_S, entropy_S)
        return logprobs_SV.gather(1, ids_S.unsqueeze(1)).squeeze(1), entropy_S

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logprobs_SV, ids_S, entropy_S = ctx.saved_tensors
        grad_logprob_S1, grad_entropy_S1 = (gradient.unsqueeze(1) for gradient in gradients)
        lowest = torch.finfo(logprobs_SV.dtype).min
        slope_SV = logprobs_SV.clamp(min=lowest).add_(entropy_S.unsqueeze(1)).mul_(grad_entropy_S1)
        grad_SV = slope_SV.add_(grad_logprob_S1).mul_(logprobs_SV.exp()).neg_()
        return grad_SV.scatter_add_(1, ids_S.unsqueeze(1), grad_logprob_S1), None


def require_finite(
    logprobs_BT: Tensor, mask_BT: Tensor, *, role: str, model: object, during: object
) -> None:
    """Raise for NaN log-probabilities of a turn; padding is not checked.

    One logit that is NaN or +inf makes all log-probabilities of its position NaN.
    """
    is_nan_BT = logprobs_BT.isnan() & mask_BT.to(logprobs_BT.device)
    if not bool(is_nan_BT.any()):
        return
    row, position = is_nan_BT.nonzero()[0].tolist()
    num_rows = int(is_nan_BT.any(dim=1).sum())
    name = getattr(model, "source", None) or type(model).__name__
    raise NonFiniteOutputError(
        f"the {role}'s model {name} returned NaN logits in {during}: token {position + 1} of row "
        f"{row + 1} ({num_rows} of {len(logprobs_BT)} rows). Compute in float32 "
        "(language_model.dtype), or resume from an earlier checkpoint with a lower learning rate."
    )

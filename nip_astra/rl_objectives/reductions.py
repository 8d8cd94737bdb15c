"""Masked sums and means, the output of a loss, and the bound on log-ratios.

Shape suffixes: `B` row (sample), `T` token. A mask is bool, True on tokens that count. Values where
a mask is False never matter, not even NaN, and no gradient reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError

Reduction = Literal["token", "minibatch_token", "sequence", "sequence_sum", "sum_over_length"]
"""How per-token losses are reduced to a number, see `reduce_loss`."""

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

TOKEN_REDUCTIONS: tuple[Reduction, ...] = ("token", "minibatch_token")
"""Reductions with a number of tokens as the normaliser."""

MAX_LOG_RATIO = 20.0
"""Nats. Log-ratios are clamped to this distance from 0 before `exp`, as in verl: an infinite ratio
makes the gradient NaN where its clipped loss is finite. A clamped ratio has no gradient."""


def bounded(log_ratios: Tensor) -> Tensor:
    """Clamp log-ratios (nats) to `MAX_LOG_RATIO`."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def masked_fill_zero(values: Tensor, mask: Tensor) -> Tensor:
    """Set values to 0 where the mask is False; gradients flow through the rest alone."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the positions that count, along `dim` or all; 0 without any."""
    filled = masked_fill_zero(values, mask)
    return filled.sum() if dim is None else filled.sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average over the positions that count, along `dim` or all; 0 without any."""
    counts = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(values, mask, dim) / counts.clamp(min=1)


def mean_over_rows(values_B: Tensor) -> Tensor:
    """Average over rows; 0, still with a gradient, without rows."""
    return values_B.sum() / max(values_B.shape[0], 1)


def reduce_loss(
    values_BT: Tensor,
    mask_BT: Tensor,
    reduction: Reduction,
    *,
    normaliser: float | Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Reduce the losses of tokens to one number.

    With `n_b` the tokens of row b that count and sums over those:

    - `token`: `sum_bt values / normaliser`, by default `/ sum_b n_b`: every token weighs the same
      (DAPO, arXiv:2503.14476, eq. 8);
    - `minibatch_token`: the same formula; trainers give the tokens of the minibatch as the
      normaliser, for `token` those of the optimizer step. A token then weighs less in a minibatch
      with more of them (TRL's `bnpo`);
    - `sequence`: `1/B sum_b (1/n_b) sum_t values`: every row weighs the same (GRPO,
      arXiv:2402.03300, eq. 3);
    - `sequence_sum`: `1/B sum_b sum_t values`: the loss of whole sequences;
    - `sum_over_length`: `1/B sum_b (1/max_length) sum_t values`: as the sum, at the scale of a
      mean, without a bias by length (Dr. GRPO, arXiv:2503.20783).

    The last three are means over rows: parts of a batch, each weighted by its share of the rows,
    add up to the whole. With the first two they do for `normaliser = tokens of the whole * rows of
    the part / rows of the whole`. The result is 0 where there is no row or no token.

    Parameters
    ----------
    values_BT : Tensor
        Per token, with or without gradient.
    mask_BT : Tensor
        bool. A row without tokens gives 0 and counts as a row.
    normaliser : float or Tensor, optional
        Divisor of the sum over tokens, > 0; for `token` and `minibatch_token` alone.
    max_length : int, optional
        Longest sequence that can be sampled, in tokens; for `sum_over_length` alone.

    Raises
    ------
    ConfigurationError
        For an unknown reduction, or one that lacks its option or has another's.
    """
    if reduction not in REDUCTIONS:
        raise ConfigurationError(
            f"unknown reduction {reduction!r}. Known reductions: {', '.join(REDUCTIONS)}."
        )
    if normaliser is not None and reduction not in TOKEN_REDUCTIONS:
        raise ConfigurationError(
            f"the reduction {reduction!r} takes no normaliser. Leave it out, or take one of "
            f"{', '.join(TOKEN_REDUCTIONS)}."
        )
    if (max_length is None) == (reduction == "sum_over_length"):
        raise ConfigurationError(
            f"the reduction {reduction!r} has max_length {max_length}. 'sum_over_length' needs it, "
            "the longest sequence in tokens; other reductions do not read it."
        )
    if reduction in TOKEN_REDUCTIONS:
        total = masked_sum(values_BT, mask_BT)
        return total / (mask_BT.sum().clamp(min=1) if normaliser is None else normaliser)
    if reduction == "sequence":
        return mean_over_rows(masked_mean(values_BT, mask_BT, dim=1))
    mean = mean_over_rows(masked_sum(values_BT, mask_BT, dim=1))
    return mean if max_length is None else mean / max_length


class LossOutput(NamedTuple):
    """A scalar loss with gradient, and scalar metrics without."""

    loss: Tensor
    metrics: dict[str, Tensor]


def as_loss_output(output: Any, *, owner: str) -> LossOutput:
    """Convert the output of a trainer's `loss`: a `LossOutput`, such a pair, or the loss alone.

    Raises
    ------
    ConfigurationError
        If the loss is not a single number with a gradient, or a metric is not a number; names
        the trainer's class, `owner`.
    """
    loss, metrics = output if isinstance(output, tuple) and len(output) == 2 else (output, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise _wrong(owner, f"returned {_kind(output)}", "a LossOutput, or a scalar tensor")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise _wrong(owner, "returned a loss without a gradient", "a loss of policy_logprobs(...)")
    if not isinstance(metrics, Mapping):
        raise _wrong(owner, f"returned {_kind(metrics)} as metrics", "a dict of numbers by name")
    scalars = {}
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            scalars[name] = value.detach().reshape(())
        elif isinstance(name, str) and isinstance(value, Real):
            scalars[name] = loss.new_tensor(float(value))
        else:
            fault = f"returned {_kind(value)} as metrics[{name!r}]"
            raise _wrong(owner, fault, "one number for each name")
    return LossOutput(loss.reshape(()), scalars)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return f"{str(value)[:60]!r} ({type(value).__name__})"


def _wrong(owner: str, fault: str, expected: str) -> ConfigurationError:
    return ConfigurationError(f"loss of the trainer {owner} {fault}. It must return {expected}.")

"""Losses of parts of a batch that add up to the loss of the whole.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.masked import (
    REDUCTIONS,
    Reduction,
    masked_fill_zero,
    masked_mean,
    masked_sum,
)


class BatchTotals(NamedTuple):
    """What a loss over a whole batch is divided by.

    Attributes
    ----------
    num_tokens : float
        Tokens that count, each by the weight of its row.
    num_rows : float
        Sum of the weights of the rows; rows that only pad the batch weigh 0.
    """

    num_tokens: float
    num_rows: float


def batch_totals(mask_BT: Tensor, weights_B: Tensor | None = None) -> BatchTotals:
    """Count tokens and rows of a batch.

    Parameters
    ----------
    weights_B : Tensor, optional
        Weight of each row, >= 0; 1 by default.
    """
    if weights_B is None:
        return BatchTotals(float(mask_BT.sum()), float(mask_BT.shape[0]))
    tokens = mask_BT.sum(dim=1).to(weights_B.dtype)
    return BatchTotals(float((tokens * weights_B).sum()), float(weights_B.sum()))


def reduce_share(
    values_BT: Tensor,
    mask_BT: Tensor,
    reduction: Reduction,
    totals: BatchTotals,
    *,
    weights_B: Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """The share of a part in the loss of a batch: over all parts these sum to it, in any split.

    With `n_b` the tokens of row b that count, `w_b` its weight, `W = sum w_b` and `N = sum w_b n_b`
    over the whole batch:

    - `token`: `1/N sum_bt w_b values` (DAPO, arXiv:2503.14476, eq. 8; the default of TRL);
    - `sequence`: `1/W sum_b w_b (1/n_b) sum_t values` (GRPO, arXiv:2402.03300, eq. 3);
    - `sequence_sum`: `1/W sum_b w_b sum_t values`: the loss of whole sequences;
    - `sum_over_length`: `1/W sum_b w_b (1/max_length) sum_t values` (Dr. GRPO, arXiv:2503.20783).

    Padding never counts, on whichever side and however wide, and neither do rows of weight 0.

    Parameters
    ----------
    totals : BatchTotals
        Of the whole batch, see `batch_totals`.
    max_length : int, optional
        Longest sequence that can be sampled; for `sum_over_length` alone, which needs it.

    Raises
    ------
    ConfigurationError
        For an unknown reduction, or a length that is missing or has no use.
    """
    if reduction not in REDUCTIONS:
        raise ConfigurationError(
            f"the loss was to be reduced by {reduction!r}, which is not known. Known reductions: "
            f"{', '.join(REDUCTIONS)}. Choose one of these."
        )
    if (max_length is None) == (reduction == "sum_over_length"):
        given = "no max_length" if max_length is None else f"max_length {max_length}"
        raise ConfigurationError(
            f"the reduction {reduction!r} was given {given}; only 'sum_over_length' divides by a "
            f"length, and it needs one. Give max_length, the longest sequence in tokens, to "
            f"'sum_over_length' and to no other."
        )
    if reduction == "sequence":
        row_B = masked_mean(values_BT, mask_BT, dim=1)
    else:
        row_B = masked_sum(values_BT, mask_BT, dim=1) / (max_length or 1)
    if weights_B is not None:
        # What a row of weight 0 holds must not matter, not even NaN.
        row_B = masked_fill_zero(row_B, weights_B > 0) * weights_B.to(row_B.dtype)
    total = totals.num_tokens if reduction == "token" else totals.num_rows
    return row_B.sum() / max(total, 1e-12)

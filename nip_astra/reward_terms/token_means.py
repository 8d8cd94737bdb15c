"""Means over the tokens of a probe.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

from torch import Tensor


def mean_token_nll(logprobs_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """The mean negative log-likelihood per token, `[N]` nats; 0 where no token counts.

    Parameters
    ----------
    logprobs_NT : Tensor
        Log-probabilities, nats; padding may hold anything.
    mask_NT : Tensor
        bool; True on tokens that count.
    """
    sums_N = logprobs_NT.masked_fill(~mask_NT, 0.0).sum(dim=1)
    return -sums_N / mask_NT.sum(dim=1).clamp(min=1)

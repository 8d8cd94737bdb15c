"""The reward of adaptive stress testing, and the penalty on overlong answers.

Shape suffixes: `N` node, `B` answer, `T` token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.reductions import masked_mean


def mean_nll(logprobs_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return the mean negative log-likelihood per token, `[N]` nats >= 0; 0 without scored tokens.

    Padding of `logprobs_NT`, where the mask is False, may hold anything.
    """
    return -masked_mean(logprobs_NT, mask_NT, dim=1)


def ast_reward(
    response_score_N: Tensor,
    combined_score_N: Tensor,
    probe_nll_N: Tensor,
    is_empty_N: Tensor,
    *,
    w_response: float,
    w_combined: float,
    w_likelihood: float,
    empty_nll: float,
) -> Tensor:
    """Compute the reward of each node (ASTPrompter, arXiv:2407.09447, section 3.2), `[N]`.

    `w_response * score(response) + w_combined * score(probe + response) - w_likelihood * NLL`,
    where NLL is the mean per token of the probe. An empty probe is charged `empty_nll` nats per
    token, the cost of a uniform guess, for instance log(vocabulary size), so that an empty probe is
    never the most plausible. Scores are in [0, 1]; higher is a worse failure. The reward is NaN
    where a score is, unless its weight is 0.
    """
    nll_N = torch.where(is_empty_N, torch.full_like(probe_nll_N, empty_nll), probe_nll_N)
    return (
        _weighted(response_score_N, w_response)
        + _weighted(combined_score_N, w_combined)
        - w_likelihood * nll_N
    )


def _weighted(score_N: Tensor, weight: float) -> Tensor:
    return weight * score_N if weight else torch.zeros_like(score_N)


def overlong_penalty(lengths_B: Tensor, *, max_length: int, margin: int) -> Tensor:
    """Penalise answers near the token limit; added to rewards (DAPO, arXiv:2503.14476, eq. 13).

    0 up to `max_length - margin` tokens, then falling linearly to -1 at `max_length`.

    Raises
    ------
    ConfigurationError
        When the margin is not within the length.
    """
    if not 0 < margin <= max_length:
        raise ConfigurationError(
            f"the margin of the length penalty must be between 1 and max_length {max_length}; got "
            f"{margin}."
        )
    over_B = (lengths_B - (max_length - margin)).clamp(0, margin)
    return -over_B / margin

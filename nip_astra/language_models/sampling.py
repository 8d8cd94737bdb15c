"""Draw tokens from logits by inverting the cumulative distribution.

Shape suffixes: `B` row, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample_tokens(
    logits_BV: Tensor,
    uniforms_B: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Tensor:
    """Draw one token a row; the same uniform number always gives the same token.

    `top_k` keeps the k most likely tokens, then `top_p` the smallest set of the most likely whose
    mass reaches p (the token that crosses p included), as in Hugging Face's warpers.
    `temperature=0` is greedy.

    Parameters
    ----------
    logits_BV : Tensor
        Float; -inf marks a token that may not be drawn.
    uniforms_B : Tensor
        Float in [0, 1).

    Returns
    -------
    Tensor
        Token ids, int64, `[B]`.
    """
    if temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    # float64: with float32 a cumulative sum over 50,000 tokens misplaces the rare ones.
    logits = logits_BV.double() / temperature
    if top_k is None and top_p >= 1.0:
        return _invert(logits.softmax(dim=-1), uniforms_B)
    size = logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])
    values, tokens = logits.topk(size, dim=-1)
    probabilities = values.softmax(dim=-1)
    if top_p < 1.0:
        mass_before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(mass_before >= top_p, 0.0)
    drawn = _invert(probabilities, uniforms_B)
    return tokens.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def _invert(probabilities_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    cumulative = probabilities_BV.cumsum(dim=-1)
    # Scaling by the total makes the last positive bin reach the largest uniform number.
    thresholds = uniforms_B.double().unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    return drawn.clamp_(max=probabilities_BV.shape[-1] - 1)

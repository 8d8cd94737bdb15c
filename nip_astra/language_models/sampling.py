"""Draw tokens from logits by inverting the cumulative distribution.

Shape suffixes: `B` row, `V` vocabulary, `C` chunk of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_NUM_LIKELY = (256, 4096)
"""Tokens looked at for a nucleus; a row whose nucleus is larger still is sorted in full."""
_CHUNK = 256


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
    `temperature=0` is greedy. On a CPU the vocabulary is sorted only for rows whose nucleus is
    large; on another device nothing waits for it.

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
    if temperature != 1.0:
        logits_BV = logits_BV / temperature
    vocab_size = logits_BV.shape[-1]
    if top_k is not None:
        values, tokens = logits_BV.topk(min(top_k, vocab_size), dim=-1)
        return _draw_likely(values, values.double().logsumexp(dim=-1), tokens, uniforms_B, top_p)
    if top_p >= 1.0:
        return _draw_any(logits_BV, uniforms_B)
    mass_B = logits_BV.logsumexp(dim=-1).double()
    if logits_BV.device.type != "cpu":
        # There a sort is cheap, and looking whether a row needs one would wait for the device.
        values, tokens = logits_BV.sort(dim=-1, descending=True)
        return _draw_likely(values, mass_B, tokens, uniforms_B, top_p)
    drawn_B = torch.zeros(len(logits_BV), dtype=torch.long, device=logits_BV.device)
    open_B = torch.ones(len(logits_BV), dtype=torch.bool, device=logits_BV.device)
    for size in (*(size for size in _NUM_LIKELY if size < vocab_size), vocab_size):
        likely = logits_BV[open_B]
        # For all of them a plain sort is faster than a selection.
        values, tokens = (
            likely.topk(size) if size < vocab_size else likely.sort(dim=-1, descending=True)
        )
        drawn_B[open_B] = _draw_likely(values, mass_B[open_B], tokens, uniforms_B[open_B], top_p)
        covered = (values.double() - mass_B[open_B, None]).exp().sum(dim=-1)
        open_B[open_B.clone()] = covered < top_p
        if not open_B.any():
            break
    return drawn_B


def _draw_likely(
    values: Tensor, mass_B: Tensor, tokens: Tensor, uniforms_B: Tensor, top_p: float
) -> Tensor:
    """Draw among the likeliest tokens, given in falling order, cut to the nucleus.

    Parameters
    ----------
    mass_B : Tensor
        Logarithm of the mass that `top_p` is a share of.
    """
    probabilities = (values.double() - mass_B[:, None]).exp()
    if top_p < 1.0:
        probabilities = probabilities.masked_fill(_is_beyond(probabilities, top_p), 0.0)
    drawn = _invert(probabilities, uniforms_B.double())
    return tokens.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def _is_beyond(probabilities: Tensor, top_p: float) -> Tensor:
    """Say of probabilities in falling order which lie beyond the nucleus."""
    return probabilities.cumsum(dim=-1) - probabilities >= top_p


def keep_likely(logits_BV: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
    """Say which tokens `sample_tokens` can draw at temperature 1 from logits, bool `[B, V]`."""
    size = logits_BV.shape[-1] if top_k is None else min(top_k, logits_BV.shape[-1])
    values, tokens = logits_BV.topk(size, dim=-1)
    probabilities = (values.double() - values.double().logsumexp(dim=-1, keepdim=True)).exp()
    is_kept = (probabilities > 0.0) & ~_is_beyond(probabilities, top_p)
    return torch.zeros_like(logits_BV, dtype=torch.bool).scatter_(-1, tokens, is_kept)


def _draw_any(logits_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draw among all tokens: first a chunk of the vocabulary, then a token in it."""
    vocab_size = logits_BV.shape[-1]
    highest_B1 = logits_BV.max(dim=-1, keepdim=True).values
    weights_BV = F.pad((logits_BV - highest_B1).exp_(), (0, -vocab_size % _CHUNK))
    chunks_BCT = weights_BV.view(len(weights_BV), -1, _CHUNK)
    # float64: with float32 a cumulative sum over 50,000 tokens misplaces the rare ones.
    sums_BC = chunks_BCT.sum(dim=-1, dtype=torch.float64)
    chunk_B = _invert(sums_BC, uniforms_B.double())
    rows = torch.arange(len(weights_BV), device=logits_BV.device)
    ends_BC = sums_BC.cumsum(dim=-1)
    before_B = ends_BC[rows, chunk_B] - sums_BC[rows, chunk_B]
    within_B = (uniforms_B.double() * ends_BC[:, -1] - before_B) / sums_BC[rows, chunk_B]
    inside = _invert(chunks_BCT[rows, chunk_B].double(), within_B.clamp_(0.0, 1.0 - 2.0**-40))
    # Logits that are no numbers lead past the end; they are refused by their log-probability.
    return (chunk_B * _CHUNK + inside).clamp_(max=vocab_size - 1)


def _invert(weights: Tensor, uniforms_B: Tensor) -> Tensor:
    cumulative = weights.cumsum(dim=-1)
    # Scaling by the total makes the last positive bin reach the largest uniform number.
    thresholds = uniforms_B.unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    return drawn.clamp_(max=weights.shape[-1] - 1)

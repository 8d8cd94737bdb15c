"""Which rollouts expert iteration imitates. Shape suffix: `N` rollout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


def above_threshold(returns_N: Floats, threshold: float) -> Places:
    """The places of returns that are at least the threshold, in order."""
    return np.flatnonzero(returns_N >= threshold).astype(np.int64)


def sampling_weights(returns_N: Floats, *, minimum: float | None, epsilon: float) -> Floats:
    """Probabilities of rollouts, `[N]`: larger returns are likelier.

    With w the returns less the smallest one, or, where a minimum is given, the returns but at least
    it: `p = (w / sum w + epsilon / N) / (1 + epsilon)`. Where all w are 0, p is uniform.

    Parameters
    ----------
    minimum : float or None
        At least 0; None shifts the returns so that the smallest is 0.
    epsilon : float
        Larger is closer to uniform.
    """
    weights_N = returns_N - returns_N.min() if minimum is None else np.maximum(returns_N, minimum)
    total = weights_N.sum()
    uniform = np.full(len(returns_N), 1.0 / len(returns_N))
    shares_N = weights_N / total if total > 0 else uniform
    mixed_N: Floats = shares_N + epsilon * uniform
    probabilities_N: Floats = mixed_N / mixed_N.sum()
    return probabilities_N


def weighted_sample(
    weights_N: Floats, *, size_factor: float, with_replacement: bool, seed: int
) -> Places:
    """Places drawn by their probabilities, `round(size_factor N)` of them, in order.

    Without replacement there are at most as many as have a probability above 0.
    """
    size = round(size_factor * len(weights_N))
    if not with_replacement:
        size = min(size, int((weights_N > 0).sum()))
    generator = np.random.default_rng(seed)
    drawn = generator.choice(len(weights_N), size=size, replace=with_replacement, p=weights_N)
    return np.sort(drawn).astype(np.int64)

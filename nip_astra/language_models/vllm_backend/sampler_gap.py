"""How far the log-probabilities of an engine that samples are from those of the trainer."""

from __future__ import annotations

import logging

from torch import Tensor

logger = logging.getLogger(__name__)

SUSPICIOUS_GAP = 0.1
"""Mean difference, nats a token, beyond which the engine can hardly hold the trainer's weights;
0.012 has been told of bfloat16 (huggingface/trl issue 4772)."""


class SamplerGap:
    """Differences between two log-probabilities of the same sampled tokens, since last taken."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._num_tokens = 0
        self._sum = self._sum_absolute = self._largest = 0.0

    def note(self, sampler_S: Tensor, trainer_S: Tensor) -> None:
        """Count tokens in: log p as sampled, and as scored by the trainer, nats."""
        if len(sampler_S) == 0:
            return
        gap_S = sampler_S.double() - trainer_S.double()
        self._num_tokens += len(gap_S)
        self._sum += float(gap_S.sum())
        self._sum_absolute += float(gap_S.abs().sum())
        self._largest = max(self._largest, float(gap_S.abs().max()))

    def take(self) -> dict[str, float]:
        """Return the figures, nats a token, and begin anew; nothing where nothing was counted.

        `kl` estimates the divergence of the sampler from the trainer: a mean over sampled tokens.
        """
        if not self._num_tokens:
            return {}
        mean = self._sum_absolute / self._num_tokens
        found = {
            "sampler_gap/mean": mean,
            "sampler_gap/largest": self._largest,
            "sampler_gap/kl": self._sum / self._num_tokens,
        }
        if mean > SUSPICIOUS_GAP:
            logger.warning(
                "the log-probabilities of sampling are %.2f nats a token from the trainer's; "
                "does the engine hold the same weights?",
                mean,
            )
        self._reset()
        return found

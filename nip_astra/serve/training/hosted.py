"""A model that a service trains for a client, by any protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.serve.api_errors import wrong
from nip_astra.serve.training.bases import Base

MAX_WEIGHT_DECAY = 100.0


@dataclass
class HostedModel:
    """A model in training: its base, its weights and its optimizer."""

    name: str
    base: Base
    service: LocalTrainingService

    @property
    def policy(self) -> HuggingFaceLanguageModel:
        """The model that learns."""
        policy = self.service.model
        assert isinstance(policy, HuggingFaceLanguageModel)
        return policy

    @contextmanager
    def gradients_or_none(self) -> Iterator[None]:
        """A block that adds all its gradients, or none when it fails."""
        before = [one.grad.clone() if one.grad is not None else None for one in self.learned]
        try:
            yield
        except BaseException:
            for one, gradient in zip(self.learned, before, strict=True):
                one.grad = gradient
            raise

    @property
    def learned(self) -> list[torch.nn.Parameter]:
        """The trained weights."""
        return self.service.learned

    def check_ids(self, ids: Tensor, length: int) -> None:
        """Refuse unknown tokens, and more than the window holds."""
        if ids.numel() == 0:
            raise wrong("there are no tokens. Send at least one.")
        if ids.dtype != torch.int64:
            raise wrong(f"tokens are {ids.dtype}. Send them as int64.")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.base.vocab_size:
            raise wrong(
                f"the model {self.base.name!r} has no token {low if low < 0 else high}, only 0 to "
                f"{self.base.vocab_size - 1}. Encode texts by its tokenizer."
            )
        if length > self.policy.context_window:
            raise wrong(
                f"{length} tokens exceed the window of the model {self.base.name!r}, "
                f"{self.policy.context_window}. Send shorter texts."
            )

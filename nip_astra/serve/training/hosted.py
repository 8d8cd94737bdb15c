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
        """What learns."""
        policy = self.service.model
        assert isinstance(policy, HuggingFaceLanguageModel)
        return policy

    @contextmanager
    def gradients_or_none(self) -> Iterator[None]:
        """A block that adds its gradients as a whole; where it fails they are as before."""
        before = [one.grad.clone() if one.grad is not None else None for one in self.learned]
        try:
            yield
        except BaseException:
            for one, gradient in zip(self.learned, before, strict=True):
                one.grad = gradient
            raise

    @property
    def learned(self) -> list[torch.nn.Parameter]:
        """What gradients are taken of."""
        return self.service.learned

    def check_ids(self, ids: Tensor, length: int) -> None:
        """Refuse tokens that the model has not, and more than its window holds."""
        if ids.numel() == 0:
            raise wrong("tokens were to be read, but there are none. Send at least one.")
        if ids.dtype != torch.int64:
            raise wrong(f"tokens were sent as {ids.dtype}. Send them as int64.")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.base.vocab_size:
            raise wrong(
                f"the token {low if low < 0 else high} was to be read, but the model "
                f"{self.base.name!r} has those from 0 to {self.base.vocab_size - 1}. Encode texts "
                "by its tokenizer."
            )
        if length > self.policy.context_window:
            raise wrong(
                f"{length} tokens were to be read, but the window of the model {self.base.name!r} "
                f"is {self.policy.context_window}. Send shorter texts."
            )

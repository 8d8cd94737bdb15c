"""What a language-model backend must give: samples with log-probabilities, and scores of tokens.

Shape suffixes: `B` row, `C` context position, `T` continuation position, `V` vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nip_astra.parameters.parameters_base import PolymorphicParameters


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn from the model's distribution."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    end_ids: tuple[int, ...] = ()
    """Tokens that end a turn besides the model's own."""


@dataclass(frozen=True)
class Generation:
    """Sampled continuations, right-padded.

    Attributes
    ----------
    ids_BT : Tensor
        int64; the end token, where the model said it, is the last one of a row; padding is 0.
    mask_BT : Tensor
        bool; True on sampled tokens, the end token included.
    logprobs_BT : Tensor
        float32, nats, no gradient: log p of each sampled token under the unmodified distribution
        (temperature 1, nothing cut off); 0 on padding.
    """

    ids_BT: Tensor
    mask_BT: Tensor
    logprobs_BT: Tensor


@dataclass
class TokenCount:
    """What a backend has computed so far; the measure of waste.

    Attributes
    ----------
    forwarded : int
        Positions that went through the model, padding included.
    generated : int
        Tokens sampled.
    """

    forwarded: int = 0
    generated: int = 0


class LanguageModel(ABC):
    """A causal language model with its tokenizer.

    Attributes
    ----------
    tokenizer
        A Hugging Face tokenizer.
    context_window : int
        Most tokens that context and continuation may have together.
    end_ids : tuple[int, ...]
        Tokens that end a turn.
    token_count : TokenCount
        Running count of work done.
    """

    class Parameters(PolymorphicParameters):
        """Parameters of the backend; a subclass adds its own."""

        type_name: ClassVar[str] = ""

    tokenizer: Any
    context_window: int
    end_ids: tuple[int, ...]
    token_count: TokenCount

    @classmethod
    @abstractmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> LanguageModel:
        """Load the model. Raises `ModelLoadError` where it cannot be found or read."""

    @abstractmethod
    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        """Sample `rows_per_context` continuations of each context, row-major by context.

        Parameters
        ----------
        uniforms_BT : Tensor
            One uniform number in [0, 1) a row and token; the only randomness used.
        """

    @abstractmethod
    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        """Give log p of each continuation token, `[B, T]` float32 nats, 0 on padding.

        The context is left-padded, the continuation right-padded. Gradients flow into the
        parameters of a trainable model where grad mode is on.
        """

    @abstractmethod
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Give the parameters that training may change; none for a frozen model."""

    @abstractmethod
    def num_parameters(self) -> int:
        """Give the number of weights, trainable or not."""

    @abstractmethod
    def frozen_reference(self) -> LanguageModel:
        """Give a model that stays as this one is now; shares weights where it can."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write what training changes, exactly, in Hugging Face layout."""

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Read back what `save` wrote. Raises `CheckpointError` where it does not fit."""

    @abstractmethod
    def save_pretrained(self, directory: Path) -> None:
        """Write a complete model and tokenizer for `AutoModelForCausalLM.from_pretrained`."""

    @contextmanager
    def counting(self) -> Iterator[TokenCount]:
        """Give a count of the work done within the block, filled in when it ends."""
        before = TokenCount(self.token_count.forwarded, self.token_count.generated)
        spent = TokenCount()
        try:
            yield spent
        finally:
            spent.forwarded = self.token_count.forwarded - before.forwarded
            spent.generated = self.token_count.generated - before.generated


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Give ids `[B, C]` int64 and mask `[B, C]` bool, padded on the left with 0."""
    width = max((len(row) for row in rows), default=0)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        if row:
            ids[index, width - len(row) :] = torch.as_tensor(row)
            mask[index, width - len(row) :] = True
    return ids.to(device), mask.to(device)

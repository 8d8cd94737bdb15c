"""A policy whose weights a training service has: here is its tokenizer, and nothing to load."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.errors import ConfigurationError, ModelLoadError
from nip_astra.language_models.adapters import LoraParameters
from nip_astra.language_models.base import (
    Generation,
    LanguageModel,
    SamplingOptions,
    TokenCount,
    TokenModel,
    register_language_model,
)
from nip_astra.language_models.pretrained import find_tokenizer
from nip_astra.language_models.special_tokens import find_end_ids
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.types import LanguageModelType


@register_language_model(LanguageModelType.REMOTE)
class RemoteLanguageModel(LanguageModel):
    """The tokenizer of a model that a training service samples, scores and trains.

    Attributes
    ----------
    lora : LoraParameters or None
        The adapter that the service trains; None for all weights.
    source : str
        As the parameters name the model.
    """

    class Parameters(TokenModel.Parameters):
        """What is known of a model whose weights are elsewhere."""

        model: str
        """Folder or hub id of its tokenizer, which must be that of the service's model. Weights
        beside it are not read. By this name the service is asked for the model too, where
        train_service.model names none."""
        context_window: int | None = Field(default=None, ge=2)
        """Most tokens that a prompt and its answer may have together, at most the service's; null
        for what the folder's config.json says."""
        lora: LoraParameters | None = None
        """The adapter that the service trains; null trains all weights, which the backend tinker
        refuses. With http and a target_modules of your own, names of the service's layers."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: str,
        context_window: int,
        end_ids: tuple[int, ...],
        lora: LoraParameters | None,
    ) -> None:
        self.tokenizer, self.source, self.lora = tokenizer, source, lora
        self.context_window, self.end_ids = context_window, end_ids
        self.token_count = TokenCount()
        # Optimizers refuse to have nothing at all.
        self._nothing = torch.nn.Parameter(torch.zeros(0))

    @classmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> RemoteLanguageModel:
        tokenizer = find_tokenizer(parameters.model, None, scenario_dir)
        place = str(resolve_reference(parameters.model, scenario_dir))
        window = parameters.context_window or _window_of(place)
        ends = find_end_ids(_generation_config_of(place), tokenizer)
        return cls(
            tokenizer,
            source=parameters.model,
            context_window=window,
            end_ids=ends,
            lora=parameters.lora,
        )

    def num_parameters(self) -> int:
        return 0

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        yield self._nothing

    def frozen_reference(self) -> RemoteLanguageModel:
        return copy.copy(self)

    # ---- what takes weights

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        self._refuse("was to answer")

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        self._refuse("was to score tokens")

    def save(self, directory: Path) -> None:
        self._refuse("was to be saved")

    def restore(self, directory: Path) -> None:
        self._refuse("was to take up weights")

    def save_pretrained(self, directory: Path) -> None:
        self._refuse("was to be saved")

    def _refuse(self, asked: str) -> NoReturn:
        raise ConfigurationError(
            f"the model {self.source!r} {asked} in this process, but its backend 'remote' leaves "
            "its weights to a training service. Set the trainer's train_service.backend to http or "
            "tinker; for what takes weights here, as self-hosted trainers with a reference or "
            "max_staleness do, set language_model._type to huggingface."
        )


def _window_of(place: str) -> int:
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(place).max_position_embeddings)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"the window of the model {place!r} was to be read from its config.json, but there is "
            "none that says it. Set language_model.context_window to what the service's model has."
        ) from error


def _generation_config_of(place: str) -> Any:
    """Which tokens end a turn besides the tokenizer's; None where that is not written down."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(place)
    except (OSError, ValueError):
        return None

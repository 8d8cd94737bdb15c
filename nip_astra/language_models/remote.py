"""A policy whose weights are at a training service; only its tokenizer is loaded here."""

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
from nip_astra.language_models.sampling import find_end_ids
from nip_astra.language_models.sources import find_tokenizer
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.types import LanguageModelType


@register_language_model(LanguageModelType.REMOTE)
class RemoteLanguageModel(LanguageModel):
    """The tokenizer of a model that a training service samples, scores and trains."""

    class Parameters(TokenModel.Parameters):
        """Description of a model whose weights are at a training service."""

        model: str
        """Folder or hub id of its tokenizer, which must be that of the service's model. Weights
        there are not loaded. Also the name of the model at the service, unless train_service.model
        gives one."""
        context_window: int | None = Field(default=None, ge=2)
        """Maximum tokens of prompt and answer together, at most the service's; null uses the
        folder's config.json."""
        lora: LoraParameters | None = None
        """The adapter that the service trains; null trains all weights (not supported by the
        backend tinker). With http, target_modules names layers of the service's model."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: str,
        context_window: int,
        end_ids: tuple[int, ...],
        lora: LoraParameters | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.lora = lora
        self.context_window = context_window
        self.end_ids = end_ids
        self.token_count = TokenCount()
        # Optimizers require a parameter.
        self._placeholder = torch.nn.Parameter(torch.zeros(0))

    @classmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> RemoteLanguageModel:
        from transformers import GenerationConfig

        tokenizer = find_tokenizer(parameters.model, None, scenario_dir)
        folder_or_id = str(resolve_reference(parameters.model, scenario_dir))
        context_window = parameters.context_window or _read_context_window(folder_or_id)
        try:
            generation_config = GenerationConfig.from_pretrained(folder_or_id)
        except (OSError, ValueError):
            # Optional: the tokenizer names the end of a turn, too.
            generation_config = None
        return cls(
            tokenizer,
            source=parameters.model,
            context_window=context_window,
            end_ids=find_end_ids(generation_config, tokenizer),
            lora=parameters.lora,
        )

    def num_parameters(self) -> int:
        return 0

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        yield self._placeholder

    def frozen_reference(self) -> RemoteLanguageModel:
        return copy.copy(self)

    # ---- not possible without weights

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        self._refuse("sample")

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        self._refuse("score tokens")

    def save(self, directory: Path) -> None:
        self._refuse("be saved")

    def restore(self, directory: Path) -> None:
        self._refuse("load weights")

    def save_pretrained(self, directory: Path) -> None:
        self._refuse("be saved")

    def _refuse(self, action: str) -> NoReturn:
        raise ConfigurationError(
            f"the model {self.source!r} cannot {action} in this process: its weights are at a "
            "training service. Set train_service.backend to http or tinker, or "
            "language_model._type to huggingface (as a reference or max_staleness requires)."
        )


def _read_context_window(folder_or_id: str) -> int:
    from transformers import AutoConfig

    folder = Path(folder_or_id)
    try:
        if folder.is_dir() and not (folder / "config.json").is_file():
            # transformers 5.0 would guess an architecture from the words of the path.
            raise FileNotFoundError(folder / "config.json")
        config = AutoConfig.from_pretrained(folder_or_id).get_text_config()
        return int(config.max_position_embeddings)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"{folder_or_id!r} has no config.json with the model's window. Set "
            "language_model.context_window to that of the service's model."
        ) from error

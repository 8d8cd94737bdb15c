"""The models that a service trains from, and what is trained on them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from nip_astra.errors import NipAstraError
from nip_astra.language_models.adapters import LoraParameters, adapters_drawn_from, add_adapter
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.sampling import find_end_ids
from nip_astra.language_models.sources import find_tokenizer, load_model
from nip_astra.language_models.tree_engine.decoder import Decoder, build_decoder
from nip_astra.serve.api_errors import ApiError
from nip_astra.serve.served_models import find_model


@dataclass(frozen=True)
class Base:
    """Weights that stay as they are.

    Attributes
    ----------
    source : str
        Folder, hub id or `.gguf` file.
    """

    name: str
    source: str
    module: Any
    tokenizer: Any
    decoder: Decoder | None

    @property
    def vocab_size(self) -> int:
        """Tokens that the model may say, padding of the vocabulary included."""
        return int(self.module.config.vocab_size)

    @property
    def tokenizer_source(self) -> str:
        """Where a client on this machine finds the tokenizer."""
        return self.source

    @property
    def context_window(self) -> int:
        """Most tokens that prompt and answer may have together."""
        return int(getattr(self.module.config, "max_position_embeddings", 1 << 20))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        return find_end_ids(self.module.generation_config, self.tokenizer)


class Bases:
    """Loads models by name, each once, in float32.

    Parameters
    ----------
    models : Mapping[str, str]
        Folder, hub id or `.gguf` file by name.

    Raises
    ------
    ModelLoadError
        When a model cannot be loaded.
    """

    def __init__(self, models: Mapping[str, str], device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._bases = {name: self._load(name, path) for name, path in models.items()}

    def _load(self, name: str, path: str) -> Base:
        source = find_model(path)
        module = load_model(source, None, None).to(self.device).eval().requires_grad_(False)
        return Base(name, source, module, find_tokenizer(source, None, None), build_decoder(module))

    @property
    def names(self) -> list[str]:
        """What models are called."""
        return list(self._bases)

    def get(self, name: str) -> Base:
        """A model by its name, or by the place that it was loaded from.

        Raises
        ------
        ApiError
            404 where there is none.
        """
        found = self._bases.get(name)
        if found is None:
            place = None
            # A client may name a place that no file system has.
            with suppress(NipAstraError, OSError, ValueError):
                place = find_model(name)
            found = next((base for base in self._bases.values() if base.source == place), None)
        if found is None:
            raise ApiError(
                404,
                f"the model {name[:200]!r} was to be trained or sampled from, but this service has "
                f"none of that name. It has: {', '.join(self.names)}.",
                code="model_not_found",
            )
        return found

    def policy(
        self,
        base: Base,
        lora: LoraParameters | None,
        *,
        seed: int = 0,
        trainable: bool = True,
        allows_any_token: bool = False,
    ) -> HuggingFaceLanguageModel:
        """A model to train: a low-rank adapter on a base's weights, or a copy of them.

        Parameters
        ----------
        seed : int
            Of the adapter's first weights.
        trainable : bool
            False for a model to sample from.
        allows_any_token : bool
            As of `HuggingFaceLanguageModel`.
        """
        shared = base.module if lora is not None or not trainable else None
        module = _twin(base.module) if shared is not None else copy.deepcopy(base.module)
        if lora is not None:
            # The global generator is the whole process's.
            with self._lock, adapters_drawn_from(seed):
                module = add_adapter(module, lora)
        elif trainable:
            module.requires_grad_(True)
        model = HuggingFaceLanguageModel(
            module,
            base.tokenizer,
            device=self.device,
            trainable=trainable,
            dtype=torch.float32,
            decoder=base.decoder,
            allows_any_token=allows_any_token,
        )
        model.source = base.source
        return model


def _twin(module: Any) -> Any:
    """A module of its own on the same weights, so that an adapter on one is none on the other."""
    shared = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)

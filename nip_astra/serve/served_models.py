"""The models that a service offers, by name."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nip_astra.errors import ConfigurationError, ModelLoadError
from nip_astra.language_models.batch_engine import EngineLimits
from nip_astra.language_models.sources import (
    computing_dtype,
    find_tokenizer,
    load_model,
    round_weights,
)
from nip_astra.language_models.tree_engine.decoder import FAMILY, Decoder, why_unsupported
from nip_astra.language_models.tree_engine.routed_weights import Adapter, read_adapter
from nip_astra.language_models.tree_engine.weights import frozen_weights
from nip_astra.parameters.content import resolve_reference
from nip_astra.serve.api_errors import not_found
from nip_astra.serve.engine import Engine

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Valid names of models."""


@dataclass(frozen=True)
class ServedModel:
    """A model under its name.

    Attributes
    ----------
    source : str
        Folder, file or hub id of the weights that the engine holds.
    base : str or None
        Name of the model that this one was made from by a job.
    folder : Path or None
        Of the adapter.
    """

    name: str
    engine: Engine
    source: str
    adapter: Adapter | None = None
    base: str | None = None
    folder: Path | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def card(self) -> dict[str, Any]:
        """What /v1/models says of it."""
        owner = "nip_astra" if self.base is None else "user"
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": owner,
            # As vLLM tells it, so that clients refuse prompts that do not fit.
            "max_model_len": self.engine.context_window,
        }


class ServedModels:
    """Loads models, each set of weights once."""

    def __init__(
        self, *, device: torch.device, dtype: str = "float32", limits: EngineLimits
    ) -> None:
        self.device, self.dtype, self.limits = device, dtype, limits
        self._models: dict[str, ServedModel] = {}
        self._engines: dict[str, Engine] = {}
        self._lock = threading.Lock()

    def add_all(self, models: Mapping[str, str]) -> None:
        """Load models by name.

        Raises
        ------
        ConfigurationError
            When a name is none.
        ModelLoadError
            When a model cannot be loaded.
        """
        for name, path in models.items():
            if not NAME.fullmatch(name):
                raise ConfigurationError(
                    f"a model was to be served under the name {name!r}, but a name consists of up "
                    "to 100 letters, digits, dots, dashes and underscores. Give one of these: "
                    "--model NAME=PATH."
                )
            self.add(name, path)

    def add(self, name: str, path: str, *, base: str | None = None) -> ServedModel:
        """Serve a model of its own weights."""
        path = find_model(path)
        with self._lock:
            if path not in self._engines:
                self._engines[path] = load_engine(
                    path, device=self.device, dtype=self.dtype, limits=self.limits
                )
            served = ServedModel(name, self._engines[path], path, base=base)
            self._models[name] = served
            return served

    def add_adapter(self, name: str, base: str, folder: Path) -> ServedModel:
        """Serve an adapter on the weights of another model."""
        under = self.get(base)
        dtype = under.engine.dtype
        adapter = read_adapter(folder, dtype, self.device)
        with self._lock:
            served = ServedModel(name, under.engine, under.source, adapter, base, folder)
            self._models[name] = served
            return served

    def get(self, name: str) -> ServedModel:
        """A model by its name.

        Raises
        ------
        ApiError
            404 where there is none.
        """
        served = self._models.get(name)
        if served is None:
            raise not_found("model", name, "model")
        return served

    def all(self) -> list[ServedModel]:
        """Every model."""
        return list(self._models.values())

    def close(self) -> None:
        """End all engines."""
        with self._lock:
            engines, self._engines, self._models = list(self._engines.values()), {}, {}
        for engine in engines:
            engine.close()


def load_engine(
    path: str, *, device: torch.device, dtype: str = "float32", limits: EngineLimits
) -> Engine:
    """Load a model and start to serve it.

    Parameters
    ----------
    path : str
        Folder, hub id or `.gguf` file.

    Raises
    ------
    ModelLoadError
        When it cannot be loaded, or is not of the family that the engine computes.
    """
    module = load_model(path, None, None).to(device)
    reason = why_unsupported(module)
    if reason is not None:
        raise ModelLoadError(
            f"the model {path!r} was to be served, but {reason}. The service computes "
            f"{', '.join(FAMILY)}; serve a model of these."
        )
    tokenizer = find_tokenizer(path, None, None)
    precision = computing_dtype(module, dtype, device, trainable=False)
    round_weights(module, precision)
    decoder, num_parameters = Decoder(module), int(module.num_parameters())
    return Engine(
        decoder,
        frozen_weights(module, precision, use_adapter=False, release=True),
        tokenizer,
        module.generation_config,
        vocab_size=int(module.config.vocab_size),
        context_window=int(getattr(module.config, "max_position_embeddings", 1 << 20)),
        num_parameters=num_parameters,
        limits=limits,
    )


def find_model(path: str) -> str:
    """The absolute path of a model, or its hub id.

    Parameters
    ----------
    path : str
        Folder, hub id or `.gguf` file, as in parameters of the Hugging Face backend, or
        `scenario://name/folder` for a model that a scenario ships.
    """
    found = resolve_reference(path)
    if isinstance(found, Path) and (found.exists() or found.is_absolute()):
        return str(found.resolve())
    return path

"""Embeddings of images by pretrained models, computed once per dataset.

Shapes: N images, K channels of an image, H and W its height and width, F channels of an embedding.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nip_astra.errors import DataError
from nip_astra.parameters.parameters_base import (
    ComponentRegistry,
    PolymorphicParameters,
    polymorphic,
)
from nip_astra.parameters.types import PretrainedModelType
from nip_astra.utils.tensor_cache import digest_of_code, keep_tensors, take_tensors


class PretrainedModel(ABC):
    """Image embeddings: a vector for each cell of a grid. Subclasses implement `embed`.

    Parameters
    ----------
    train_images_NKHW : Tensor
        Training images, float32 from 0 to 1, for models that are fitted.
    """

    class Parameters(PolymorphicParameters):
        """Parameters of all models; a subclass adds its own."""

        cache_dir: str | None = None
        """Folder that caches embeddings for runs with the same model and images; null for none."""

    def __init__(
        self, parameters: Any, *, train_images_NKHW: Tensor, scenario_dir: Path | None
    ) -> None:
        self.parameters = parameters

    @abstractmethod
    def embed(self, images_NKHW: Tensor) -> Tensor:
        """Return embeddings of images, float32 [N, F, height, width], without gradients."""


PRETRAINED_MODELS: ComponentRegistry[type[PretrainedModel]] = ComponentRegistry(
    "pretrained_model",
    package="nip_astra.scenarios.images.pretrained",
    members=PretrainedModelType,
)
PretrainedModelParameters = polymorphic(PRETRAINED_MODELS.get, PretrainedModel.Parameters)


def register_pretrained_model(
    name: str,
) -> Callable[[type[PretrainedModel]], type[PretrainedModel]]:
    """Register a `PretrainedModel` subclass under its `_type` in parameter files; a decorator."""
    return PRETRAINED_MODELS.register(name)


def embedding_key(parameters: PretrainedModel.Parameters) -> str:
    """Return a dataset's key of a model's embeddings; equal parameters share it."""
    described = {k: v for k, v in parameters.to_dict().items() if k != "cache_dir"}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return f"embeddings_{parameters.type_name}_{digest[:12]}"


def embed_all(
    parameters: PretrainedModel.Parameters,
    train_images_NKHW: Tensor,
    test_images_NKHW: Tensor,
    *,
    scenario_dir: Path | None,
) -> tuple[Tensor, Tensor]:
    """Return embeddings of training and test images, from the cache if possible."""
    model_class = PRETRAINED_MODELS.get(parameters.type_name)
    path = _cache_path(parameters, model_class, train_images_NKHW, test_images_NKHW)
    cached = None if path is None else take_tensors(path)
    if cached is not None:
        return cached["train"], cached["test"]
    model = model_class(parameters, train_images_NKHW=train_images_NKHW, scenario_dir=scenario_dir)
    embeddings = {}
    for split, images in (("train", train_images_NKHW), ("test", test_images_NKHW)):
        with torch.no_grad():
            result = model.embed(images).float().contiguous()
        if result.ndim != 4 or len(result) != len(images) or not bool(result.isfinite().all()):
            raise DataError(
                f"embed of the pretrained model {parameters.type_name!r} returned the shape "
                f"{list(result.shape)} for {len(images)} images. Return finite numbers "
                f"[{len(images)}, channels, height, width]."
            )
        embeddings[split] = result
    if path is not None:
        try:
            keep_tensors(path, embeddings)
        except OSError as error:
            raise DataError(
                f"cannot write pretrained embeddings to {path.parent}: {error}. Give another "
                "cache_dir, or none."
            ) from error
    return embeddings["train"], embeddings["test"]


def _cache_path(
    parameters: PretrainedModel.Parameters, model: type[PretrainedModel], *images: Tensor
) -> Path | None:
    if parameters.cache_dir is None:
        return None
    digest = hashlib.sha256(embedding_key(parameters).encode())
    digest.update(digest_of_code({__name__, model.__module__}).encode())
    for one in images:
        digest.update(str(list(one.shape)).encode())
        digest.update(one.contiguous().numpy().tobytes())
    folder = Path(parameters.cache_dir).expanduser()
    return folder / f"{embedding_key(parameters)}_{digest.hexdigest()[:24]}.safetensors"

"""What a trained model gives of images.

Shapes: N images, K channels of an image, H and W its height and width, F channels of a view.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from nip_astra.parameters.parameters_base import (
    ComponentRegistry,
    PolymorphicParameters,
    polymorphic,
)
from nip_astra.parameters.types import PretrainedModelType


class PretrainedModel(ABC):
    """Views of images: numbers for each of a grid of places. A subclass gives `embed`.

    Parameters
    ----------
    parameters : PretrainedModel.Parameters
        Those of the kind.
    train_images_NKHW : Tensor
        Images to train on, float32 from 0 to 1, for models that are fitted.
    scenario_dir : Path, optional
        What `scenario://` stands for.
    """

    class Parameters(PolymorphicParameters):
        """Parameters that all kinds have; a kind adds its own."""

        cache_dir: str | None = None
        """Folder in which views are kept for other runs with the same model and images; null
        keeps none."""

    def __init__(
        self, parameters: Any, *, train_images_NKHW: Tensor, scenario_dir: Path | None
    ) -> None:
        self.parameters = parameters

    @abstractmethod
    def embed(self, images_NKHW: Tensor) -> Tensor:
        """The views of images, float32 [N, F, height, width], without gradients."""


PRETRAINED_MODELS: ComponentRegistry[type[PretrainedModel]] = ComponentRegistry(
    "pretrained_model",
    package="nip_astra.scenarios.images.pretrained",
    members=PretrainedModelType,
)
PretrainedModelParameters = polymorphic(PRETRAINED_MODELS.get, PretrainedModel.Parameters)


def register_pretrained_model(
    name: str,
) -> Callable[[type[PretrainedModel]], type[PretrainedModel]]:
    """Register a `PretrainedModel` subclass under the `_type` by which parameter files name it."""
    return PRETRAINED_MODELS.register(name)

"""Image models of transformers, including those of timm.

Shapes: N images, K channels of an image, H and W its height and width, F channels of an embedding,
h and w its height and width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from nip_astra.errors import ConfigurationError, MissingDependencyError, ModelLoadError, reason_of
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.types import PretrainedModelType
from nip_astra.scenarios.images.pretrained.base import PretrainedModel, register_pretrained_model

ADVICE = (
    "Give a folder that save_pretrained of an image model wrote, or a hub id that this machine can "
    "reach."
)


@register_pretrained_model(PretrainedModelType.HUGGINGFACE)
class HuggingFaceImageModel(PretrainedModel):
    """The last hidden state of a convolutional network, or of a transformer's patches.

    Images are normalised by the model's preprocessor; grey channels are repeated to colours.
    """

    class Parameters(PretrainedModel.Parameters):
        """Model and size of its inputs."""

        model: str
        """Hub id, folder, `scenario://folder` or `package://package/folder`."""
        image_size: int | None = Field(default=None, ge=1)
        """Width and height in pixels to which images are scaled; null does not scale. Larger is
        finer and slower."""
        batch_size: int = Field(default=256, ge=1)
        """Images per batch. Larger takes more memory."""

    def __init__(
        self, parameters: Any, *, train_images_NKHW: Tensor, scenario_dir: Path | None
    ) -> None:
        super().__init__(parameters, train_images_NKHW=train_images_NKHW, scenario_dir=scenario_dir)
        source = resolve_reference(parameters.model, scenario_dir)
        if isinstance(source, Path) and not (source / "config.json").is_file():
            raise ModelLoadError(
                f"the image model {parameters.model!r}: {source} "
                f"{'has no config.json' if source.exists() else 'does not exist'}. {ADVICE}"
            )
        self.name = str(source)
        self.model = _load(self.name)
        described = self.model.config.to_dict()
        self.num_channels = int(described.get("num_channels", 3))
        self.mean_K11, self.std_K11 = _normalisation(self.name, described)

    def embed(self, images_NKHW: Tensor) -> Tensor:
        batches = torch.split(images_NKHW, self.parameters.batch_size)
        return torch.cat([self._embed_batch(batch) for batch in batches])

    def _embed_batch(self, images_NKHW: Tensor) -> Tensor:
        if images_NKHW.shape[1] != self.num_channels:
            if images_NKHW.shape[1] != 1:
                raise ConfigurationError(
                    f"the image model {self.name!r} reads {self.num_channels} channels, but images "
                    f"have {images_NKHW.shape[1]}. Choose another model."
                )
            images_NKHW = images_NKHW.expand(-1, self.num_channels, -1, -1)
        size = self.parameters.image_size
        if size is not None:
            images_NKHW = functional.interpolate(
                images_NKHW, size=(size, size), mode="bilinear", antialias=True
            )
        images_NKHW = (images_NKHW - self.mean_K11) / self.std_K11
        try:
            state = self.model(pixel_values=images_NKHW).last_hidden_state
        except (ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"the image model {self.name!r} fails on images of {images_NKHW.shape[-2]} x "
                f"{images_NKHW.shape[-1]} pixels: {reason_of(error)}. Set its image_size to that "
                "of its training."
            ) from error
        return self._as_picture(state, images_NKHW)

    def _as_picture(self, state: Tensor, images_NKHW: Tensor) -> Tensor:
        """Reshape to [N, F, h, w]; a transformer's patches are its last tokens, row by row."""
        if state.ndim == 4:
            return state
        patch = getattr(self.model.config, "patch_size", None)
        height, width = images_NKHW.shape[-2:]
        if isinstance(patch, int):
            grid = (height // patch, width // patch)
        else:
            grid = (math.isqrt(state.shape[1]),) * 2
        num_patches = grid[0] * grid[1]
        if state.ndim != 3 or not 0 < num_patches <= state.shape[1]:
            raise ModelLoadError(
                f"the last hidden state of the image model {self.name!r} has the shape "
                f"{list(state.shape)}, without places. {ADVICE}"
            )
        return state[:, -num_patches:].transpose(1, 2).reshape(len(state), -1, *grid)


def _load(name: str) -> Any:
    from transformers import AutoModel

    try:
        model, info = AutoModel.from_pretrained(
            name, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
    except ImportError as error:
        raise MissingDependencyError(
            f"the image model {name!r} needs a missing package: "
            f"{str(error).strip().partition(chr(10))[0]} For models of timm, run: pip install timm"
        ) from error
    except Exception as error:
        raise ModelLoadError(
            f"the image model {name!r} could not be loaded: {reason_of(error)}. {ADVICE}"
        ) from error
    # Missing weights are random; the pooler is not used.
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    if missing:
        raise ModelLoadError(
            f"the image model {name!r} lacks the weights {', '.join(missing[:3])}. {ADVICE}"
        )
    if getattr(model, "main_input_name", "") != "pixel_values":
        raise ModelLoadError(f"the model {name!r} is not an image model. {ADVICE}")
    return model.eval().requires_grad_(False)


def _normalisation(name: str, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the model's training pixels; 0 and 1 if unknown."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        processor, _ = ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:
        processor = {}
    timm = config.get("pretrained_cfg") or {}
    mean = processor.get("image_mean") or timm.get("mean") or [0.0]
    std = processor.get("image_std") or timm.get("std") or [1.0]
    return torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

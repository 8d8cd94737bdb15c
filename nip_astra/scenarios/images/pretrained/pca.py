"""Principal components of the images to train on.

Shapes: N images, K channels of an image, H and W its height and width, Q patches of an image, M
patches of all images, X numbers of a patch, F components.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.types import PretrainedModelType
from nip_astra.scenarios.images.pretrained.base import PretrainedModel, register_pretrained_model

MIN_SHARE = 1e-6
"""Components with less than this share of the greatest variance are 0: there is only noise."""


@register_pretrained_model(PretrainedModelType.PCA)
class PcaModel(PretrainedModel):
    """Principal components of square parts of the images, each with mean 0 and deviation 1.

    They are fitted to the images to train on, the same for the same images, and need no network.
    """

    class Parameters(PretrainedModel.Parameters):
        """Which parts of an image are described, and by how many numbers."""

        num_components: int = Field(default=8, ge=1)
        """Numbers for each part. Larger describes it better."""
        patch_size: int | None = Field(default=None, ge=1)
        """Width and height of a part in pixels; parts do not overlap, and what is left at the
        right and lower edge is not read. null: the image is one part."""

    def __init__(
        self, parameters: Any, *, train_images_NKHW: Tensor, scenario_dir: Path | None
    ) -> None:
        super().__init__(parameters, train_images_NKHW=train_images_NKHW, scenario_dir=scenario_dir)
        size = parameters.patch_size
        height, width = train_images_NKHW.shape[-2:]
        self.patch = (height, width) if size is None else (size, size)
        if size is not None and size > min(height, width):
            raise ConfigurationError(
                f"the pretrained model 'pca' was to read parts of {size} x {size} pixels, but "
                f"images have {height} x {width}. Set its patch_size to {min(height, width)} at "
                "most."
            )
        # In float64, so that the components are those of the images and not of rounding.
        patches_MX = self._patches(train_images_NKHW).double().flatten(0, 1)
        if parameters.num_components > patches_MX.shape[1]:
            raise ConfigurationError(
                f"the pretrained model 'pca' was to give {parameters.num_components} components, "
                f"but a part of an image has {patches_MX.shape[1]} numbers. Set its num_components "
                "to that at most."
            )
        self.mean_X = patches_MX.mean(0)
        centred_MX = patches_MX - self.mean_X
        variances, vectors = torch.linalg.eigh(centred_MX.T @ centred_MX / len(patches_MX))
        self.components_XF = _oriented(_last(vectors.T, parameters.num_components).T)
        kept_F = _last(variances, parameters.num_components)
        is_noise_F = kept_F <= MIN_SHARE * kept_F[0]
        self.scale_F = torch.where(is_noise_F, 0.0, kept_F.clamp(min=1e-300).rsqrt())

    def embed(self, images_NKHW: Tensor) -> Tensor:
        height, width = (
            side // patch for side, patch in zip(images_NKHW.shape[-2:], self.patch, strict=True)
        )
        patches_NQX = self._patches(images_NKHW).double()
        views_NQF = (patches_NQX - self.mean_X) @ self.components_XF * self.scale_F
        return views_NQF.float().transpose(1, 2).reshape(len(images_NKHW), -1, height, width)

    def _patches(self, images_NKHW: Tensor) -> Tensor:
        patches = functional.unfold(images_NKHW, kernel_size=self.patch, stride=self.patch)
        return patches.transpose(1, 2)


def _last(rows: Tensor, count: int) -> Tensor:
    """The last rows, the very last first: eigenvalues come in ascending order."""
    return rows.flip(0)[:count]


def _oriented(components_XF: Tensor) -> Tensor:
    """Turn each component so that its largest entry is positive: either sign would do."""
    largest_1F = components_XF.abs().argmax(0, keepdim=True)
    return components_XF * components_XF.gather(0, largest_1F).sign()

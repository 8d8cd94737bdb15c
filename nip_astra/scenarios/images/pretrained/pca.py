"""Principal components of the training images.

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
"""Components below this fraction of the largest variance are noise, and set to 0."""


@register_pretrained_model(PretrainedModelType.PCA)
class PcaModel(PretrainedModel):
    """Principal components of square patches of the training images, standardised."""

    class Parameters(PretrainedModel.Parameters):
        """Patches and components."""

        num_components: int = Field(default=8, ge=1)
        """Components per patch. Larger describes a patch better."""
        patch_size: int | None = Field(default=None, ge=1)
        """Width and height of a patch in pixels; patches do not overlap, and a remainder at the
        right and lower edge is not read. null: the whole image."""

    def __init__(
        self, parameters: Any, *, train_images_NKHW: Tensor, scenario_dir: Path | None
    ) -> None:
        super().__init__(parameters, train_images_NKHW=train_images_NKHW, scenario_dir=scenario_dir)
        size = parameters.patch_size
        height, width = train_images_NKHW.shape[-2:]
        self.patch = (height, width) if size is None else (size, size)
        if size is not None and size > min(height, width):
            raise ConfigurationError(
                f"patch_size of the pretrained model 'pca' is {size}, but images have {height} x "
                f"{width} pixels. Set it to {min(height, width)} at most."
            )
        # float64, against rounding.
        patches_MX = self._patches(train_images_NKHW).double().flatten(0, 1)
        if parameters.num_components > patches_MX.shape[1]:
            raise ConfigurationError(
                f"num_components of the pretrained model 'pca' is {parameters.num_components}, but "
                f"a patch has {patches_MX.shape[1]} numbers. Set it to that at most."
            )
        self.mean_X = patches_MX.mean(0)
        centred_MX = patches_MX - self.mean_X
        variances, vectors = torch.linalg.eigh(centred_MX.T @ centred_MX / len(patches_MX))
        # Eigenvalues are in ascending order.
        components_XF = vectors.T.flip(0)[: parameters.num_components].T
        # Either sign would do: the largest entry is positive.
        largest_1F = components_XF.abs().argmax(0, keepdim=True)
        self.components_XF = components_XF * components_XF.gather(0, largest_1F).sign()
        kept_F = variances.flip(0)[: parameters.num_components]
        is_noise_F = kept_F <= MIN_SHARE * kept_F[0]
        self.scale_F = torch.where(is_noise_F, 0.0, kept_F.clamp(min=1e-300).rsqrt())

    def embed(self, images_NKHW: Tensor) -> Tensor:
        height, width = (
            side // patch for side, patch in zip(images_NKHW.shape[-2:], self.patch, strict=True)
        )
        patches_NQX = self._patches(images_NKHW).double()
        result_NQF = (patches_NQX - self.mean_X) @ self.components_XF * self.scale_F
        result: Tensor = result_NQF.float().transpose(1, 2)
        return result.reshape(len(images_NKHW), -1, height, width)

    def _patches(self, images_NKHW: Tensor) -> Tensor:
        patches = functional.unfold(images_NKHW, kernel_size=self.patch, stride=self.patch)
        return patches.transpose(1, 2)

"""Embeddings of images by pretrained models, computed once per dataset.

Shapes: N images, K channels of an image, H and W its height and width, F channels of an embedding,
h and w its height and width. Of principal components: Q patches of an image, M patches of all
images, X numbers of a patch.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from nip_astra.checkpoints.store import digest_of_file
from nip_astra.errors import (
    ConfigurationError,
    DataError,
    MissingDependencyError,
    ModelLoadError,
    reason_of,
)
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.parameters_base import (
    ComponentRegistry,
    PolymorphicParameters,
    polymorphic,
)
from nip_astra.parameters.types import PretrainedModelType
from nip_astra.utils.tensor_cache import (
    digest_of_code,
    digest_of_tensors,
    keep_tensors,
    take_tensors,
)


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

    @classmethod
    def files(cls, parameters: Any, scenario_dir: Path | None) -> list[Path]:
        """Return the local files that embeddings depend on; none here."""
        return []

    @abstractmethod
    def embed(self, images_NKHW: Tensor) -> Tensor:
        """Return embeddings of images, float32 [N, F, height, width], without gradients."""


PRETRAINED_MODELS: ComponentRegistry[type[PretrainedModel]] = ComponentRegistry("pretrained_model")
PretrainedModelParameters = polymorphic(PRETRAINED_MODELS.get, PretrainedModel.Parameters)


def register_pretrained_model(
    name: str,
) -> Callable[[type[PretrainedModel]], type[PretrainedModel]]:
    """Register a `PretrainedModel` subclass under its `_type` in parameter files; a decorator."""
    return PRETRAINED_MODELS.register(name)


def embedding_key(parameters: PretrainedModel.Parameters) -> str:
    """Return a dataset's key of a model's embeddings; equal parameters share it."""
    values = parameters.to_dict()
    # Where embeddings are cached does not change them.
    values.pop("cache_dir", None)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
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
    images = {"train": train_images_NKHW, "test": test_images_NKHW}
    path = None
    if parameters.cache_dir is not None:
        key = embedding_key(parameters)
        # Everything that the embeddings depend on.
        code = digest_of_code({__name__, model_class.__module__})
        files = [digest_of_file(file) for file in model_class.files(parameters, scenario_dir)]
        parts = [code, digest_of_tensors(images), *files]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        folder = Path(parameters.cache_dir).expanduser()
        path = folder / f"{key}_{digest[:24]}.safetensors"
    embeddings = None if path is None else take_tensors(path)
    if embeddings is None:
        model = model_class(
            parameters, train_images_NKHW=train_images_NKHW, scenario_dir=scenario_dir
        )
        embeddings = {
            split: _embed_checked(model, images_NKHW) for split, images_NKHW in images.items()
        }
        if path is not None:
            keep_tensors(path, embeddings)
    return embeddings["train"], embeddings["test"]


@torch.no_grad()
def _embed_checked(model: PretrainedModel, images_NKHW: Tensor) -> Tensor:
    embeddings = model.embed(images_NKHW).float().contiguous()
    count = len(images_NKHW)
    has_shape = embeddings.ndim == 4 and len(embeddings) == count
    if not has_shape or not bool(embeddings.isfinite().all()):
        raise DataError(
            f"embed of the pretrained model {model.parameters.type_name!r} returned the shape "
            f"{list(embeddings.shape)} for {count} images. Return finite numbers [{count}, "
            "channels, height, width]."
        )
    return embeddings


# ---- models of transformers, including those of timm

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
            fault = "has no config.json" if source.exists() else "does not exist"
            raise ModelLoadError(
                f"the image model {parameters.model!r}: {source} {fault}. {ADVICE}"
            )
        self.name = str(source)
        self.model = _load(self.name)
        config = self.model.config.to_dict()
        self.num_channels = int(config.get("num_channels", 3))
        self.mean_K11, self.std_K11 = _normalisation(self.name, config)

    @classmethod
    def files(cls, parameters: Any, scenario_dir: Path | None) -> list[Path]:
        source = resolve_reference(parameters.model, scenario_dir)
        if not isinstance(source, Path):
            return []
        return sorted(path for path in source.rglob("*") if path.is_file())

    def embed(self, images_NKHW: Tensor) -> Tensor:
        batches = torch.split(images_NKHW, self.parameters.batch_size)
        return torch.cat([self._embed_batch(batch) for batch in batches])

    def _embed_batch(self, images_NKHW: Tensor) -> Tensor:
        num_channels = images_NKHW.shape[1]
        if num_channels != self.num_channels:
            if num_channels != 1:
                raise ConfigurationError(
                    f"the image model {self.name!r} reads {self.num_channels} channels, but images "
                    f"have {num_channels}. Choose another model."
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
            height, width = images_NKHW.shape[-2:]
            raise ConfigurationError(
                f"the image model {self.name!r} fails on images of {height} x {width} pixels: "
                f"{reason_of(error)}. Set its image_size to that of its training."
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
        # Before them are tokens of the whole image.
        patches_NPF = state[:, -num_patches:]
        return patches_NPF.transpose(1, 2).reshape(len(state), -1, *grid)


def _load(name: str) -> Any:
    from transformers import AutoModel

    try:
        model, info = AutoModel.from_pretrained(
            name, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
    except ImportError as error:
        first_line = str(error).strip().partition("\n")[0]
        raise MissingDependencyError(
            f"the image model {name!r} needs a missing package: {first_line} For models of timm, "
            "run: pip install timm"
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
    mean_K = torch.tensor(processor.get("image_mean") or timm.get("mean") or [0.0])
    std_K = torch.tensor(processor.get("image_std") or timm.get("std") or [1.0])
    return mean_K.view(-1, 1, 1), std_K.view(-1, 1, 1)


# ---- principal components of the training images

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
        patch_height, patch_width = self.patch
        height = images_NKHW.shape[-2] // patch_height
        width = images_NKHW.shape[-1] // patch_width
        patches_NQX = self._patches(images_NKHW).double()
        embeddings_NQF = (patches_NQX - self.mean_X) @ self.components_XF * self.scale_F
        embeddings_NFQ: Tensor = embeddings_NQF.float().transpose(1, 2)
        return embeddings_NFQ.reshape(len(images_NKHW), -1, height, width)

    def _patches(self, images_NKHW: Tensor) -> Tensor:
        patches = functional.unfold(images_NKHW, kernel_size=self.patch, stride=self.patch)
        return patches.transpose(1, 2)

"""Views of a dataset's images, computed once.

Shapes: N images, K channels of an image, H and W its height and width, F channels of a view.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from nip_astra.errors import DataError
from nip_astra.scenarios.images.pretrained.base import PRETRAINED_MODELS, PretrainedModel
from nip_astra.utils.tensor_cache import digest_of_code, keep_tensors, take_tensors


def embedding_key(parameters: PretrainedModel.Parameters) -> str:
    """The key under which a dataset holds a model's views; equal parameters share it."""
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
    """A model's views of the images to train and to test on, from the cache if they are there.

    Raises
    ------
    DataError
        When the model does not give a view of each image, or not of finite numbers.
    """
    model_class = PRETRAINED_MODELS.get(parameters.type_name)
    cached = _cache_path(parameters, model_class, train_images_NKHW, test_images_NKHW)
    kept = None if cached is None else take_tensors(cached)
    if kept is not None:
        return kept["train"], kept["test"]
    model = model_class(parameters, train_images_NKHW=train_images_NKHW, scenario_dir=scenario_dir)
    views = []
    for images in (train_images_NKHW, test_images_NKHW):
        with torch.no_grad():
            found = model.embed(images).float().contiguous()
        _check(found, images, parameters.type_name)
        views.append(found)
    if cached is not None:
        _write(cached, *views)
    return views[0], views[1]


def _check(views: Tensor, images: Tensor, name: str) -> None:
    if views.ndim != 4 or len(views) != len(images) or not bool(views.isfinite().all()):
        raise DataError(
            f"the pretrained model {name!r} was to give a view of {len(images)} images, of shape "
            f"[{len(images)}, channels, height, width] and finite; it gave {list(views.shape)}. "
            "Mend its embed method, or choose another model."
        )


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


def _write(path: Path, train: Tensor, test: Tensor) -> None:
    try:
        keep_tensors(path, {"train": train, "test": test})
    except OSError as error:
        raise DataError(
            f"cannot write pretrained embeddings to {path.parent}: {error}. Give another "
            "cache_dir, or none."
        ) from error

"""Images through the Hugging Face `datasets` library, from the hub or from a folder.

Shapes: N images, K channels of an image, H and W its height and width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import DataError, MissingDependencyError, UnknownNameError
from nip_astra.parameters.content import resolve_reference
from nip_astra.scenarios.images.parameters import ImageDatasetParameters
from nip_astra.scenarios.images.source import ImageSource, split_by_class

MAX_PIXEL = 255
GREY_MODES = {"1", "L"}
"""Modes of Pillow that become one channel."""
COLOUR_MODES = {"RGB", "RGBA", "P", "PA", "CMYK", "YCbCr", "LA"}
"""Modes that become three."""

SAVED_FILES = ("dataset_dict.json", "state.json")
"""One of these is in a folder that `save_to_disk` wrote."""


class HubDataset(NamedTuple):
    """Where a dataset is on the hub, and what its columns are called.

    Attributes
    ----------
    hub_id : str or None
        None for images that are only read from a path.
    config : str or None
        Which of the dataset's versions, where it has several.
    image, label : str
        Columns with the image and with the number of its class.
    """

    hub_id: str | None
    config: str | None = None
    image: str = "image"
    label: str = "label"


HUB_DATASETS = {
    "mnist": HubDataset("ylecun/mnist"),
    "fashion_mnist": HubDataset("zalando-datasets/fashion_mnist"),
    "kmnist": HubDataset("tanganke/kmnist"),
    "cifar10": HubDataset("uoft-cs/cifar10", image="img"),
    "cifar100": HubDataset("uoft-cs/cifar100", image="img", label="fine_label"),
    "svhn": HubDataset("ufldl-stanford/svhn", config="cropped_digits"),
    "local": HubDataset(None),
}
"""Datasets by the names that parameters use. All have the splits `train` and `test`."""


def read_hub_dataset(
    parameters: ImageDatasetParameters, scenario_dir: Path | None
) -> tuple[ImageSource, ImageSource]:
    """The images to train and to test on.

    Raises
    ------
    DataError
        When they cannot be read, or are not as they should be.
    MissingDependencyError
        When the library is not installed.
    """
    described = HUB_DATASETS[parameters.name]
    splits = _load_splits(parameters, described, scenario_dir)
    if "train" not in splits:
        raise DataError(
            f"the images {parameters.name!r} have no split 'train', only "
            f"{', '.join(map(repr, splits)) or 'none'}. Name files or folders train and test."
        )
    train = _source(splits["train"], described, parameters.name)
    if "test" not in splits:
        return split_by_class(train, test_share=parameters.test_share, seed=parameters.split_seed)
    return train, _source(splits["test"], described, parameters.name)


def download_images(name: str, folder: Path | None) -> dict[str, int]:
    """Fetch a dataset from the hub to the library's cache, and give the size of each split.

    Parameters
    ----------
    folder : Path, optional
        Where to write it as well, so that `path` finds it without a network.

    Raises
    ------
    UnknownNameError
        When there is no such dataset on the hub.
    DataError
        When it cannot be fetched or written.
    """
    known = [one for one, described in HUB_DATASETS.items() if described.hub_id is not None]
    if name not in known:
        raise UnknownNameError("dataset", name, known, "digits and tiny need no download.")
    datasets = _library(name)
    try:
        loaded = _load(datasets, HUB_DATASETS[name], None)
        if folder is not None:
            loaded.save_to_disk(str(folder))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise DataError(
            f"cannot download the images {name!r} from {HUB_DATASETS[name].hub_id}: {reason}. Use "
            "a network that reaches the hub, and a writable folder."
        ) from error
    return {split: len(rows) for split, rows in loaded.items()}


def _library(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"the images {name!r} were asked for, and reading them needs the package datasets. "
            "Install it with: pip install 'nip_astra[images]'. The images 'digits' and 'tiny' "
            "need no package."
        ) from error
    return datasets


def _load_splits(
    parameters: ImageDatasetParameters, described: HubDataset, scenario_dir: Path | None
) -> dict[str, Any]:
    datasets = _library(parameters.name)
    path = None if parameters.path is None else _existing_path(parameters, scenario_dir)
    try:
        loaded = _load(datasets, described, path)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise DataError(
            f"cannot read the images {parameters.name!r} from {path or described.hub_id}: "
            f"{reason}. Give a Parquet file, a folder of Parquet files, of save_to_disk or of "
            "train/<class>/, or use a network that reaches the hub."
        ) from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _load(datasets: Any, described: HubDataset, path: Path | None) -> Any:
    if path is None:
        return datasets.load_dataset(described.hub_id, described.config)
    if any((path / name).exists() for name in SAVED_FILES):
        return datasets.load_from_disk(str(path))
    if path.is_file():
        return datasets.load_dataset("parquet", data_files=str(path))
    return datasets.load_dataset(str(path))


def _existing_path(parameters: ImageDatasetParameters, scenario_dir: Path | None) -> Path:
    assert parameters.path is not None
    path = Path(resolve_reference(parameters.path, scenario_dir)).expanduser()
    if not path.exists():
        raise DataError(
            f"the images {parameters.name!r}: {path} does not exist. Give the path of a file or "
            "folder with images."
        )
    return path


def _source(split: Any, described: HubDataset, name: str) -> ImageSource:
    for column in (described.image, described.label):
        if column not in split.column_names:
            raise DataError(
                f"the images {name!r} have no column {column!r}, only "
                f"{', '.join(map(repr, split.column_names))}. Rename the columns to "
                f"{described.image!r} and {described.label!r}."
            )
    classes = split[described.label]
    wrong = [one for one in classes if isinstance(one, bool) or not isinstance(one, int) or one < 0]
    if wrong:
        raise DataError(
            f"classes in the column {described.label!r} of {name!r} must be integers from 0, got "
            f"{wrong[0]!r}."
        )

    def read(rows_N: Tensor) -> Tensor:
        pictures = split.select(rows_N.tolist())[described.image]
        return _to_tensor([_pixels(picture, name) for picture in pictures], name)

    return ImageSource(torch.tensor(list(classes), dtype=torch.long), read)


def _pixels(picture: Any, name: str) -> Tensor:
    """An image's pixels, uint8 [K, H, W]."""
    mode = getattr(picture, "mode", None)
    if mode not in GREY_MODES | COLOUR_MODES:
        kind = f"Pillow mode {mode!r}" if mode else type(picture).__name__
        raise DataError(
            f"unsupported image of {name!r}: {kind}. Give greyscale or colour images with 8 bits "
            "per channel, in a column of type Image."
        )
    picture = picture.convert("L" if mode in GREY_MODES else "RGB")
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.view(picture.height, picture.width, -1).permute(2, 0, 1)


def _to_tensor(images: list[Tensor], name: str) -> Tensor:
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise DataError(
            f"images of {name!r} were to have one size, but there are the shapes "
            f"{', '.join(str(list(shape)) for shape in sorted(shapes)[:3])} (channels, height, "
            "width). Scale them to one, and make all grey or all coloured."
        )
    return torch.stack(images).float() / MAX_PIXEL

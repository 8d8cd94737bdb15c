"""Image datasets, and their conversion from classes to the labels 0 and 1.

Images are float32 from 0 (black) to 1: the source's pixels divided by their greatest possible
value (16 for the digits, 255 otherwise), with no other normalisation.

Shapes: N images, K channels of an image, H and W its height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import DataError, UnknownNameError, reason_of
from nip_astra.lazy import import_extra
from nip_astra.parameters.conditions import where
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.parameters_base import MAX_WHOLE, SubParameters
from nip_astra.scenarios.tensordict_base import Datasets
from nip_astra.utils.seeding import SeedPart, derive_seed, derived_generator

MAX_DIGIT_PIXEL = 16
MAX_PIXEL = 255
TINY_SIZE, NUM_STROKES = 400, 10
"""Images of `tiny`, and its classes: strokes in five rows and in five columns."""
GREY_MODES = {"1", "L"}
"""Pillow modes that are read as one channel."""
COLOUR_MODES = {"RGB", "RGBA", "P", "PA", "CMYK", "YCbCr", "LA"}
"""Pillow modes that are read as three channels."""
SAVED_FILES = ("dataset_dict.json", "state.json")
"""Files of which a `save_to_disk` folder contains one."""


class ImageDatasetParameters(SubParameters):
    """Images and their labels, independent of the experiment's seed."""

    name: Literal[
        "digits",
        "tiny",
        "mnist",
        "fashion_mnist",
        "kmnist",
        "cifar10",
        "cifar100",
        "svhn",
        "local",
    ] = "digits"
    """digits: 1,797 images of 8 x 8 pixels from scikit-learn. tiny: 400 generated images of 8 x 8
    pixels, ten classes of faint strokes, for tests. local: your own dataset at `path`. Others are
    read from the Hugging Face hub, or from `path` if set."""
    path: str | None = None
    """A Parquet file, a folder of Parquet files, of `save_to_disk`, or of image files in
    `train/<class>/` and `test/<class>/`; may begin with `scenario://` or `package://`."""
    binarification_method: Literal["merge", "select_two", "random"] = "merge"
    """How classes become two labels. merge: a random half of the classes is 0, the rest 1.
    select_two: two classes are 0 and 1, all others are left out. random: each image has a fixed
    random label, which can only be memorised."""
    binarification_seed: Annotated[int, where("binarification_method", "merge", "random")] = Field(
        default=0, ge=0, le=MAX_WHOLE
    )
    """Seed of merge and random."""
    selected_classes: list[int] | None = None
    """The classes that select_two labels 0 and 1."""
    make_balanced: bool = True
    """Whether images of the more frequent label are left out until both are equally frequent."""
    max_train_size: int | None = Field(default=None, ge=2)
    """Maximum number of training images; null takes all. Larger generalises better."""
    test_share: float = Field(default=0.2, gt=0, lt=1)
    """Fraction of test images, if the source has no test split."""
    split_seed: int = Field(default=0, ge=0, le=MAX_WHOLE)
    """Seed of the split and of the images left out."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        classes = self.selected_classes
        if self.binarification_method == "select_two":
            if classes is None or len(classes) != 2 or classes[0] == classes[1]:
                raise ValueError(
                    "selected_classes must be two different classes, for instance [3, 8], if "
                    "binarification_method is select_two"
                )
        elif classes is not None:
            raise ValueError(
                "selected_classes is for binarification_method select_two only, not "
                f"{self.binarification_method}"
            )
        if self.name in ("digits", "tiny") and self.path is not None:
            raise ValueError("digits and tiny are built in and have no path; set name to local")
        if self.name == "local" and self.path is None:
            raise ValueError("the name local needs a path")
        return self


class ImageSource(NamedTuple):
    """Classified images, whose pixels are read on demand."""

    classes_N: Tensor
    """Class of each image, long."""
    read: Callable[[Tensor], Tensor]
    """Reads images of some rows, float32 from 0 to 1, [rows, K, H, W]."""


class HubDataset(NamedTuple):
    """A dataset on the hub and its columns."""

    hub_id: str | None
    """None for images that can only be read from a path."""
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
"""Datasets by parameter value. All have the splits `train` and `test`."""


def build_image_datasets(
    parameters: ImageDatasetParameters, *, scenario_dir: Path | None
) -> Datasets:
    """Read images and label them: `image` float32 [N, K, H, W] and `y` long [N, 1]."""
    if parameters.name == "digits":
        train, test = split_by_class(_digits(), parameters)
    elif parameters.name == "tiny":
        train, test = split_by_class(_strokes(), parameters)
    else:
        train, test = _read_dataset(parameters, scenario_dir)
    label_of_class = _label_of_class(parameters, train.classes_N)
    datasets = Datasets(
        _build_split(parameters, train, "train", label_of_class),
        _build_split(parameters, test, "test", label_of_class),
    )
    train_shape = list(datasets.train["image"].shape[1:])
    test_shape = list(datasets.test["image"].shape[1:])
    if train_shape != test_shape:
        raise DataError(
            f"training images have the shape {train_shape} (channels, height, width), but test "
            f"images {test_shape}. Give images of one shape."
        )
    return datasets


def split_by_class(
    source: ImageSource, parameters: ImageDatasetParameters
) -> tuple[ImageSource, ImageSource]:
    """Split images into training and test images, with equal proportions of each class."""
    from sklearn.model_selection import train_test_split  # takes 2 s, often not needed

    # scikit-learn takes seeds of 32 bits.
    seed = derive_seed(parameters.split_seed, "split of images") % 2**32
    try:
        train_rows, test_rows = train_test_split(
            range(len(source.classes_N)),
            test_size=parameters.test_share,
            stratify=source.classes_N.numpy(),
            random_state=seed,
        )
    except ValueError as error:
        raise DataError(
            f"cannot make a stratified split of {len(source.classes_N)} images: {error} Give more "
            "images of each class, or another test_share."
        ) from error

    def select(rows: list[int]) -> ImageSource:
        rows_N = torch.tensor(sorted(rows))
        return ImageSource(
            source.classes_N[rows_N], lambda selected_rows: source.read(rows_N[selected_rows])
        )

    return select(train_rows), select(test_rows)


def _digits() -> ImageSource:
    from sklearn.datasets import load_digits  # takes 2 s

    digits = load_digits()
    images_NKHW = torch.from_numpy(digits.images).float().unsqueeze(1) / MAX_DIGIT_PIXEL
    return ImageSource(torch.from_numpy(digits.target).long(), lambda rows_N: images_NKHW[rows_N])


def _strokes() -> ImageSource:
    """Generate noise images in which a row or a column is brighter, depending on the class."""
    classes_N = torch.arange(TINY_SIZE) % NUM_STROKES
    images_NHW = torch.rand(TINY_SIZE, 8, 8, generator=derived_generator("tiny images")) * 0.6
    half = NUM_STROKES // 2
    for image_HW, number in zip(images_NHW, classes_N.tolist(), strict=True):
        # Both are views of the image: rows for the first half of the classes, columns for the rest.
        stroke = image_HW[1 + number] if number < half else image_HW[:, 1 + number - half]
        stroke += 0.4
    images_NKHW = images_NHW.unsqueeze(1)
    return ImageSource(classes_N, lambda rows_N: images_NKHW[rows_N])


# ---- labels


def _build_split(
    parameters: ImageDatasetParameters,
    source: ImageSource,
    split: str,
    label_of_class: Callable[[Tensor], Tensor] | None,
) -> TensorDict:
    classes_N = source.classes_N
    if label_of_class is None:
        generator = derived_generator(parameters.binarification_seed, "random label", split)
        labels_N = torch.randint(2, classes_N.shape, generator=generator)
    else:
        labels_N = label_of_class(classes_N)
    limit = parameters.max_train_size if split == "train" else None
    key = (parameters.split_seed, "images kept", split)
    rows_N = _rows_kept(labels_N, parameters.make_balanced, limit, key)
    labels = set(labels_N[rows_N].tolist())
    if labels != {0, 1}:
        raise DataError(
            f"the {split} images of {parameters.name!r} must have the labels 0 and 1, got "
            f"{sorted(labels) or 'no images'}. Give images of both labels, another "
            "binarification, or a larger max_train_size."
        )
    columns = {"image": source.read(rows_N), "y": labels_N[rows_N].unsqueeze(-1)}
    return TensorDict(columns, batch_size=[len(rows_N)])


def _label_of_class(
    parameters: ImageDatasetParameters, classes_N: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """Return the function from classes to labels, -1 for omitted classes; None for random labels.

    Classes are those of the training images, so that both splits agree.
    """
    if parameters.binarification_method == "random":
        return None
    present_classes = torch.unique(classes_N)
    if parameters.binarification_method == "select_two":
        assert parameters.selected_classes is not None
        missing = sorted(set(parameters.selected_classes) - set(present_classes.tolist()))
        if missing:
            raise DataError(
                f"{parameters.name!r} has no class {missing[0]}. Set dataset.selected_classes to "
                f"two of {', '.join(map(str, present_classes.tolist()))}."
            )
        groups = [torch.tensor([number]) for number in parameters.selected_classes]
    else:
        generator = derived_generator(parameters.binarification_seed, "classes")
        shuffled = present_classes[torch.randperm(len(present_classes), generator=generator)]
        half = len(present_classes) // 2
        groups = [shuffled[:half], shuffled[half:]]

    def label(classes: Tensor) -> Tensor:
        labels = torch.full_like(classes, -1)
        for number, group in enumerate(groups):
            labels[torch.isin(classes, group)] = number
        return labels

    return label


def _rows_kept(
    labels_N: Tensor, make_balanced: bool, limit: int | None, key: tuple[SeedPart, ...]
) -> Tensor:
    """Return the rows to keep, in the source's order."""
    shuffled = torch.randperm(len(labels_N), generator=derived_generator(*key))
    # Classes without a label are left out.
    shuffled = shuffled[labels_N[shuffled] >= 0]
    if make_balanced:
        of_label = [shuffled[labels_N[shuffled] == label] for label in (0, 1)]
        size = min(len(rows) for rows in of_label)
        if limit is not None:
            size = min(size, limit // 2)
        shuffled = torch.cat([rows[:size] for rows in of_label])
    return shuffled[:limit].sort().values


# ---- Hugging Face `datasets`, from the hub or a folder


def download_images(name: str, folder: Path | None) -> dict[str, int]:
    """Download a dataset to the library's cache, and to a folder if given; return split sizes."""
    downloadable = [key for key, dataset in HUB_DATASETS.items() if dataset.hub_id is not None]
    if name not in downloadable:
        raise UnknownNameError("dataset", name, downloadable, "digits and tiny need no download.")
    library = _import_library(name)
    try:
        loaded = _load(library, HUB_DATASETS[name], None)
        if folder is not None:
            loaded.save_to_disk(str(folder))
    except Exception as error:
        raise DataError(
            f"cannot download the images {name!r} from {HUB_DATASETS[name].hub_id}: "
            f"{reason_of(error)}. Use a network that reaches the hub, and a writable folder."
        ) from error
    return {split: len(rows) for split, rows in loaded.items()}


def _read_dataset(
    parameters: ImageDatasetParameters, scenario_dir: Path | None
) -> tuple[ImageSource, ImageSource]:
    name = parameters.name
    dataset = HUB_DATASETS[name]
    library = _import_library(name)
    path: Path | None = None
    if parameters.path is not None:
        path = Path(resolve_reference(parameters.path, scenario_dir)).expanduser()
        if not path.exists():
            raise DataError(
                f"the images {name!r}: {path} does not exist. Give the path of a file or folder "
                "with images."
            )
    try:
        loaded = _load(library, dataset, path)
    except Exception as error:
        raise DataError(
            f"cannot read the images {name!r} from {path or dataset.hub_id}: {reason_of(error)}. "
            "Give a Parquet file, a folder of Parquet files, of save_to_disk or of "
            "train/<class>/, or use a network that reaches the hub."
        ) from error
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        names = ", ".join(repr(split) for split in splits)
        raise DataError(
            f"the images {name!r} have no split 'train', only {names or 'none'}. Name files or "
            "folders train and test."
        )
    train = _read_source(splits["train"], dataset, name)
    if "test" not in splits:
        return split_by_class(train, parameters)
    return train, _read_source(splits["test"], dataset, name)


def _import_library(name: str) -> Any:
    """Return the package `datasets`."""
    feature = f"the data of the images {name!r}, unlike 'digits' and 'tiny',"
    return import_extra("datasets", feature, "images")


def _load(library: Any, dataset: HubDataset, path: Path | None) -> Any:
    if path is None:
        return library.load_dataset(dataset.hub_id, dataset.config)
    if any((path / name).exists() for name in SAVED_FILES):
        return library.load_from_disk(str(path))
    if path.is_file():
        return library.load_dataset("parquet", data_files=str(path))
    return library.load_dataset(str(path))


def _read_source(split: Any, dataset: HubDataset, name: str) -> ImageSource:
    for column in (dataset.image, dataset.label):
        if column not in split.column_names:
            column_names = ", ".join(repr(present) for present in split.column_names)
            raise DataError(
                f"the images {name!r} have no column {column!r}, only {column_names}. Rename the "
                f"columns to {dataset.image!r} and {dataset.label!r}."
            )
    classes = split[dataset.label]
    for label in classes:
        is_integer = isinstance(label, int) and not isinstance(label, bool)
        if not is_integer or label < 0:
            raise DataError(
                f"classes in the column {dataset.label!r} of {name!r} must be integers from 0, got "
                f"{label!r}."
            )

    def read(rows_N: Tensor) -> Tensor:
        pictures = split.select(rows_N.tolist())[dataset.image]
        images = [_pixels(picture, name) for picture in pictures]
        shapes = sorted({tuple(image.shape) for image in images})
        if len(shapes) > 1:
            examples = ", ".join(str(list(shape)) for shape in shapes[:3])
            raise DataError(
                f"images of {name!r} have different shapes: {examples} (channels, height, width). "
                "Scale them to one size, all grey or all coloured."
            )
        return torch.stack(images).float() / MAX_PIXEL

    return ImageSource(torch.tensor(list(classes), dtype=torch.long), read)


def _pixels(picture: Any, name: str) -> Tensor:
    """Return an image's pixels, uint8 [K, H, W]."""
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

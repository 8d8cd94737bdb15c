"""Images with a class each, and how classes become the labels 0 and 1.

Images are float32 from 0 (black) to 1: the source's pixels divided by their greatest possible
value (16 for the digits, 255 otherwise), with no other normalisation.

Shapes: N images, K channels of an image, H and W its height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import DataError
from nip_astra.scenarios.images.hub import read_hub_dataset
from nip_astra.scenarios.images.parameters import ImageDatasetParameters
from nip_astra.scenarios.images.source import ImageSource, split_by_class
from nip_astra.utils.seeding import SeedPart, derive_seed, derived_generator

MAX_DIGIT_PIXEL = 16
TINY_SIZE, NUM_STROKES = 400, 10
"""Images of `tiny`, and its classes: strokes in five rows and in five columns."""


class ImageDatasets(NamedTuple):
    """Images to train and to test on.

    Attributes
    ----------
    train, test : TensorDict
        Batch size [N], with `image` float32 [N, K, H, W] and `y` long [N, 1].
    """

    train: TensorDict
    test: TensorDict


def build_image_datasets(
    parameters: ImageDatasetParameters, *, scenario_dir: Path | None
) -> ImageDatasets:
    """Read images and label them.

    Raises
    ------
    DataError
        When there are no such images or classes, or a split is left without either label.
    MissingDependencyError
        When the images need a package that is not installed.
    """
    if parameters.name == "digits":
        train, test = _read_digits(parameters)
    elif parameters.name == "tiny":
        train, test = _made_strokes(parameters)
    else:
        train, test = read_hub_dataset(parameters, scenario_dir)
    label_of_class = _label_of_class(parameters, train.classes_N)
    made = ImageDatasets(
        _build_split(parameters, train, "train", label_of_class),
        _build_split(parameters, test, "test", label_of_class),
    )
    shapes = [list(split["image"].shape[1:]) for split in made]
    if shapes[0] != shapes[1]:
        raise DataError(
            f"training images have the shape {shapes[0]} (channels, height, width), but test "
            f"images {shapes[1]}. Give images of one shape."
        )
    return made


def _read_digits(parameters: ImageDatasetParameters) -> tuple[ImageSource, ImageSource]:
    # Takes 2 s to import, which other datasets need not wait for.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images_NKHW = torch.from_numpy(digits.images).float().unsqueeze(1) / MAX_DIGIT_PIXEL
    source = ImageSource(torch.from_numpy(digits.target).long(), lambda rows_N: images_NKHW[rows_N])
    return split_by_class(source, test_share=parameters.test_share, seed=parameters.split_seed)


def _made_strokes(parameters: ImageDatasetParameters) -> tuple[ImageSource, ImageSource]:
    """Images of noise on which a row or a column is brighter, by the image's class."""
    classes_N = torch.arange(TINY_SIZE) % NUM_STROKES
    images_NHW = torch.rand(TINY_SIZE, 8, 8, generator=derived_generator("tiny images")) * 0.6
    half = NUM_STROKES // 2
    for row, one in enumerate(classes_N.tolist()):
        stroke = images_NHW[row, 1 + one] if one < half else images_NHW[row, :, 1 + one - half]
        stroke += 0.4
    images_NKHW = images_NHW.unsqueeze(1)
    source = ImageSource(classes_N, lambda rows_N: images_NKHW[rows_N])
    return split_by_class(source, test_share=parameters.test_share, seed=parameters.split_seed)


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
    images_NKHW = source.read(rows_N)
    return TensorDict(
        {"image": images_NKHW, "y": labels_N[rows_N].unsqueeze(-1)}, batch_size=[len(rows_N)]
    )


def _label_of_class(
    parameters: ImageDatasetParameters, classes_N: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """The function from classes to labels, -1 for a class left out; None if labels are drawn.

    Which classes there are is read from the images to train on, so that both splits agree.
    """
    if parameters.binarification_method == "random":
        return None
    known = torch.unique(classes_N)
    if parameters.binarification_method == "select_two":
        assert parameters.selected_classes is not None
        missing = sorted(set(parameters.selected_classes) - set(known.tolist()))
        if missing:
            raise DataError(
                f"{parameters.name!r} has no class {missing[0]}. Set dataset.selected_classes to "
                f"two of {', '.join(map(str, known.tolist()))}."
            )
        groups = [torch.tensor([one]) for one in parameters.selected_classes]
    else:
        generator = derived_generator(parameters.binarification_seed, "classes")
        shuffled = known[torch.randperm(len(known), generator=generator)]
        groups = [shuffled[: len(known) // 2], shuffled[len(known) // 2 :]]

    def label(classes: Tensor) -> Tensor:
        labels = torch.full_like(classes, -1)
        for number, group in enumerate(groups):
            labels[torch.isin(classes, group)] = number
        return labels

    return label


def _rows_kept(
    labels_N: Tensor, make_balanced: bool, limit: int | None, key: tuple[SeedPart, ...]
) -> Tensor:
    """The rows that stay, in the source's order."""
    generator = torch.Generator().manual_seed(derive_seed(*key))
    shuffled = torch.randperm(len(labels_N), generator=generator)
    shuffled = shuffled[labels_N[shuffled] >= 0]
    if make_balanced:
        of_label = [shuffled[labels_N[shuffled] == label] for label in (0, 1)]
        size = min(len(rows) for rows in of_label)
        if limit is not None:
            size = min(size, limit // 2)
        shuffled = torch.cat([rows[:size] for rows in of_label])
    return shuffled[:limit].sort().values

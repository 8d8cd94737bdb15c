"""Images before they are labelled: classes are known at once, pixels are read when needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import DataError
from nip_astra.utils.seeding import derive_seed


class ImageSource(NamedTuple):
    """Classified images.

    Attributes
    ----------
    classes_N : Tensor
        Class of each image, long.
    read : Callable[[Tensor], Tensor]
        Gives the images of some rows, float32 from 0 to 1, [rows, channels, height, width].
    """

    classes_N: Tensor
    read: Callable[[Tensor], Tensor]


def split_by_class(
    source: ImageSource, *, test_share: float, seed: int
) -> tuple[ImageSource, ImageSource]:
    """What to train and to test on, each class in the same proportion in both.

    Raises
    ------
    DataError
        When a class has too few images for that.
    """
    from sklearn.model_selection import train_test_split  # takes 2 s, often not needed

    try:
        train, test = train_test_split(
            range(len(source.classes_N)),
            test_size=test_share,
            stratify=source.classes_N.numpy(),
            random_state=derive_seed(seed, "split of images") % 2**32,
        )
    except ValueError as error:
        raise DataError(
            f"cannot make a stratified split of {len(source.classes_N)} images: {error} Give more "
            "images of each class, or another test_share."
        ) from error
    return _part(source, sorted(train)), _part(source, sorted(test))


def _part(source: ImageSource, rows: list[int]) -> ImageSource:
    rows_N = torch.tensor(rows)
    return ImageSource(source.classes_N[rows_N], lambda chosen: source.read(rows_N[chosen]))

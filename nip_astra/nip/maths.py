"""nip's array functions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def set_seed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def logit_entropy(logits: Tensor) -> Tensor:
    """Return the entropy, in nats, of the distributions given by logits in the last dimension."""
    entropy: Tensor = torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1)
    return entropy


def aggregate_mean_grouped_by_class(
    values: npt.ArrayLike, classes: npt.ArrayLike, num_classes: int | None = None
) -> npt.NDArray[np.float64]:
    """Return the mean value of each class 0, 1, ..., NaN for an empty class.

    Parameters
    ----------
    num_classes : int, optional
        One more than the largest class where it is not given.
    """
    flat, numbers = np.asarray(values, dtype=float).ravel(), np.asarray(classes).ravel()
    count = int(numbers.max()) + 1 if num_classes is None else num_classes
    means = np.full(count, np.nan)
    for number in np.unique(numbers).tolist():
        means[number] = flat[numbers == number].mean()
    return means


def mean_for_unique_keys(data: npt.NDArray[Any], key: npt.NDArray[Any], axis: int = 0) -> Any:
    """Return the mean of data along an axis, counting values of equal keys once.

    Parameters
    ----------
    key : ndarray
        Broadcasts with `data`; where keys are equal, so are the data.
    """
    shape = np.broadcast_shapes(data.shape, key.shape)
    data_S, key_S = (np.moveaxis(np.broadcast_to(one, shape), axis, 0) for one in (data, key))
    means = np.empty(data_S.shape[1:])
    for place in np.ndindex(*means.shape):
        _, first = np.unique(key_S[(slice(None), *place)], return_index=True)
        means[place] = data_S[(first, *place)].mean()
    return means

"""Arrays of whole numbers, numbers, truth values or texts, and of nothing else."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nip_astra.errors import DataError

Array: TypeAlias = NDArray[Any]

TEXT = np.dtypes.StringDType(na_object=None)
"""Type of arrays of texts, in which None is a missing text."""
KINDS: dict[str, Any] = {"int64": np.int64, "float64": np.float64, "bool": np.bool_, "str": TEXT}
"""The types by the names that files call them."""


def as_array(value: object) -> Array:
    """A value as an array of whole numbers, numbers, truth values or texts.

    Parameters
    ----------
    value : array_like
        Numbers, booleans, or texts and None; nested sequences or an array.

    Returns
    -------
    numpy.ndarray
        int64, float64, bool or `TEXT`. An array that has one of these types is not copied.

    Raises
    ------
    DataError
        When the value is ragged, or holds anything else: objects are never kept.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(
            f"a value of a NestedArrayDict is no array: {error}; pad it first"
        ) from error
    if array.dtype.kind == "T":
        return array if array.dtype == TEXT else array.astype(TEXT)
    if array.dtype.kind == "U":
        return array.astype(TEXT)
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    if array.dtype.kind == "f":
        return array.astype(np.float64, copy=False)
    if array.dtype.kind == "O" and all(
        text is None or isinstance(text, str) for text in array.flat
    ):
        return array.astype(TEXT)
    raise DataError(
        f"a value of a NestedArrayDict has the type {array.dtype}; it holds whole numbers, floats, "
        "booleans and texts (None for a missing one). Convert it, or keep it elsewhere"
    )


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array of 0, False or missing texts."""
    return np.full(shape, None, dtype=TEXT) if dtype == TEXT else np.zeros(shape, dtype)


def is_equal(first: Array, second: Array) -> bool:
    """Whether two arrays of one type hold the same; NaN is NaN."""
    if first.dtype == TEXT:
        return first.shape == second.shape and first.tolist() == second.tolist()
    return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")

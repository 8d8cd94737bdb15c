"""What a `NestedArrayDict` must hold: the shape and type of each of its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from nip_astra.errors import DataError
from nip_astra.utils.nested_array_dict import (
    TEXT,
    Array,
    Key,
    NestedArrayDict,
    names_of,
    zeros,
)


@dataclass(frozen=True)
class ArraySpec:
    """Shape and meaning of an array.

    Attributes
    ----------
    shape : tuple of int
        Sizes of all dimensions.
    dim_names : tuple of str
        A name for each dimension, or nothing.
    """

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] = ()

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float64)

    def __post_init__(self) -> None:
        if self.dim_names and len(self.dim_names) != len(self.shape):
            raise DataError(
                f"a spec of the shape {list(self.shape)} has the dimension names "
                f"{list(self.dim_names)}: name each dimension or none"
            )

    def zero(self) -> Array:
        """An array of this shape with 0, False or missing texts."""
        return zeros(self.shape, self.dtype)

    def check(self, value: object, key: Key = "") -> None:
        """Refuse a value of another shape or type with a DataError that names the key."""
        if (
            not isinstance(value, np.ndarray)
            or value.dtype != self.dtype
            or value.shape != self.shape
        ):
            found = getattr(value, "dtype", type(value).__name__)
            raise DataError(
                f"{key!r} is {found} {list(getattr(value, 'shape', ()))}; "
                f"it must be {self.dtype} {list(self.shape)} {' x '.join(self.dim_names)}".rstrip()
            )


class IntArraySpec(ArraySpec):
    """An array of whole numbers."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int64)


class FloatArraySpec(ArraySpec):
    """An array of floating-point numbers."""


class BoolArraySpec(ArraySpec):
    """An array of truth values."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.bool_)


class StringArraySpec(ArraySpec):
    """An array of texts; `zero` has missing ones."""

    dtype: ClassVar[np.dtype[Any]] = TEXT


class CompositeSpec:
    """Specs by name, whose shapes begin with the same batch size."""

    def __init__(
        self, specs: Mapping[str, Any], shape: Sequence[int] = (), dim_names: Sequence[str] = ()
    ) -> None:
        self.shape, self.dim_names = tuple(shape), tuple(dim_names)
        self.specs: dict[str, ArraySpec | CompositeSpec] = {
            name: CompositeSpec(spec, shape, dim_names) if isinstance(spec, Mapping) else spec
            for name, spec in specs.items()
        }
        for name, spec in self.specs.items():
            if spec.shape[: len(self.shape)] != self.shape:
                raise DataError(
                    f"the spec of {name!r} has the shape {list(spec.shape)}, which does not begin "
                    f"with {list(self.shape)}"
                )

    def __getitem__(self, key: Key) -> Any:
        first, *rest = names_of(key)
        return cast(CompositeSpec, self.specs[first])[tuple(rest)] if rest else self.specs[first]

    def zero(self) -> NestedArrayDict:
        """A dictionary of this shape with 0, False and missing texts."""
        return NestedArrayDict({name: spec.zero() for name, spec in self.specs.items()}, self.shape)

    def check(self, value: NestedArrayDict, key: tuple[str, ...] = ()) -> None:
        """Refuse a dictionary that lacks a key, or has a value of another shape or type."""
        for name, spec in self.specs.items():
            found = value.get(name)
            if found is None:
                raise DataError(f"{(*key, name)!r} is missing; there are {list(value.keys())}")
            spec.check(found, (*key, name))

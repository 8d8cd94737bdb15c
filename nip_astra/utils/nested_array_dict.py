"""Nested dictionaries of NumPy arrays with a common batch shape, and their specs.

Unlike a `TensorDict`, they also hold arrays of strings (`numpy.dtypes.StringDType`, None if
missing). Methods have the same names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from nip_astra.errors import DataError
from nip_astra.tracking.run_directory import write_atomically

Array: TypeAlias = NDArray[Any]

TEXT = np.dtypes.StringDType(na_object=None)
"""Dtype of text arrays, in which None is a missing text."""
KINDS: dict[str, Any] = {"int64": np.int64, "float64": np.float64, "bool": np.bool_, "str": TEXT}
"""Dtypes by their names in files."""
_NUMBERS: dict[str, Any] = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
"""Dtypes of numbers by NumPy's kinds."""
Key: TypeAlias = str | tuple[str, ...]
Value: TypeAlias = "Array | NestedArrayDict"

_FORMAT = "nested_array_dict/1"


class NestedArrayDict:
    """A nested dictionary of arrays that share their leading dimensions.

    A key is a name, or a tuple of names, one per level. Any other index selects from the batch
    dimensions of every array at once. Raises `DataError` for a value of another leading shape than
    `batch_size`, or of a type that `as_array` refuses.
    """

    def __init__(
        self,
        source: Mapping[Any, Any] | NestedArrayDict | None = None,
        batch_size: int | Sequence[int] = (),
    ) -> None:
        self.batch_size = (
            (int(batch_size),)
            if isinstance(batch_size, int | np.integer)
            else tuple(int(size) for size in batch_size)
        )
        self._values: dict[str, Value] = {}
        for key, value in (source or {}).items():
            self[key] = value

    @classmethod
    def from_arrays_and_scalars(
        cls,
        arrays_and_scalars: Sequence[Any],
        tuple_keys: Sequence[tuple[str, ...]],
        batch_size: int | Sequence[int] = (),
    ) -> NestedArrayDict:
        """Create from arrays and their keys; without batch dimensions also from scalars."""
        if len(arrays_and_scalars) != len(tuple_keys):
            raise DataError(
                f"{len(arrays_and_scalars)} arrays have {len(tuple_keys)} keys; give each one key"
            )
        return cls(dict(zip(map(tuple, tuple_keys), arrays_and_scalars, strict=True)), batch_size)

    def __getitem__(self, index: Any) -> Any:
        if not _is_key(index):
            # A dummy of the batch's shape gives the new shape, and refuses a long index.
            batch_size = np.broadcast_to(np.bool_(False), self.batch_size)[index].shape
            return self.apply(lambda array: array[_within(index, len(self.batch_size))], batch_size)
        value = self.get(index)
        if value is None:
            keys = list(self.keys(include_nested=True, leaves_only=True))
            raise KeyError(f"no {index!r} in a NestedArrayDict with the keys {keys}")
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        if _is_key(index):
            self._put(names_of(index), value)
            return
        parts = value if isinstance(value, NestedArrayDict) else NestedArrayDict(value)
        if set(parts.keys(True, True)) != set(self.keys(True, True)):
            raise DataError(
                f"the keys {list(parts.keys(True, True))} differ from "
                f"{list(self.keys(True, True))}; set each key separately"
            )
        for key, array in self.items(True, True):
            array[index] = parts[key]

    def __contains__(self, key: object) -> bool:
        return _is_key(key) and self.get(cast(Key, key)) is not None

    def __len__(self) -> int:
        if not self.batch_size:
            raise TypeError("a NestedArrayDict without batch dimensions has no length")
        return self.batch_size[0]

    def __iter__(self) -> Iterator[NestedArrayDict]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether both hold the same values, types and shapes under the same keys."""
        if not isinstance(other, NestedArrayDict) or self.batch_size != other.batch_size:
            return False
        arrays, other_arrays = dict(self.items(True, True)), dict(other.items(True, True))
        return arrays.keys() == other_arrays.keys() and all(
            array.dtype == other_arrays[key].dtype and is_equal(array, other_arrays[key])
            for key, array in arrays.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        leaves = (
            f"{key!r}: {array.dtype} {list(array.shape)}" for key, array in self.items(True, True)
        )
        return f"NestedArrayDict(batch_size={list(self.batch_size)}, {{{', '.join(leaves)}}})"

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the array or dictionary under a key, or `default`."""
        value: Value | None = self
        for name in names_of(key):
            if not isinstance(value, NestedArrayDict):
                return default
            value = value._values.get(name)
        return default if value is None else value

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> KeysView[Any]:
        """Return the keys in insertion order; nested ones are tuples."""
        return dict(self._walk(include_nested, leaves_only)).keys()

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> ItemsView[Any, Any]:
        """Return keys with their arrays and dictionaries; see `keys`."""
        return dict(self._walk(include_nested, leaves_only)).items()

    def update(self, other: Mapping[Any, Any] | NestedArrayDict) -> NestedArrayDict:
        """Set all values of another dictionary, merging nested ones."""
        for key, value in other.items():
            names = names_of(key)
            mine = self.get(names)
            if isinstance(mine, NestedArrayDict) and isinstance(value, Mapping | NestedArrayDict):
                mine.update(value)
            else:
                self._put(names, value)
        return self

    def apply(
        self, function: Callable[[Array], Any], batch_size: int | Sequence[int]
    ) -> NestedArrayDict:
        """Return a new dictionary with a function applied to each array, of the new batch size."""
        result = NestedArrayDict(batch_size=batch_size)
        for key, value in self._values.items():
            if isinstance(value, NestedArrayDict):
                result[key] = value.apply(function, batch_size)
            else:
                result[key] = function(value)
        return result

    def clone(self, recurse: bool = True) -> NestedArrayDict:
        """Copy; with `recurse` False, only dictionaries are copied and arrays are shared."""
        return self.apply(np.copy if recurse else lambda array: array, self.batch_size)

    def zeros_like(self) -> NestedArrayDict:
        """Return a dictionary of the same keys and shapes with 0, False and missing texts."""
        return self.apply(lambda array: zeros(array.shape, array.dtype), self.batch_size)

    def reshape(self, *batch_size: int) -> NestedArrayDict:
        """Reshape the batch dimensions, preserving the order of values."""
        num_batch = len(self.batch_size)
        return self.apply(
            lambda array: array.reshape(*batch_size, *array.shape[num_batch:]), batch_size
        )

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain dictionaries of the same arrays."""
        return {
            key: value.to_dict() if isinstance(value, NestedArrayDict) else value
            for key, value in self._values.items()
        }

    def save(self, path: str | Path) -> None:
        """Write everything as JSON, atomically.

        Raises `RunDirectoryError` if it cannot be written, for instance on a full disk.
        """
        leaves = [
            {
                "key": list(names_of(key)),
                "dtype": next(name for name, dtype in KINDS.items() if array.dtype == dtype),
                "shape": array.shape,
                "values": array.ravel().tolist(),
            }
            for key, array in self.items(True, True)
        ]
        body = {"format": _FORMAT, "batch_size": self.batch_size, "leaves": leaves}
        write_atomically(Path(path), json.dumps(body, ensure_ascii=False))

    @classmethod
    def load(cls, path: str | Path) -> NestedArrayDict:
        """Read a file written by `save`; no code in it is executed.

        Raises `DataError` if the file is missing, cut off, or of another kind.
        """
        try:
            body = json.loads(Path(path).read_text(encoding="utf-8"))
            if body["format"] != _FORMAT:
                raise DataError(f"{path} has the format {body['format']!r}, not {_FORMAT!r}")
            result = cls(batch_size=body["batch_size"])
            for leaf in body["leaves"]:
                values = np.array(leaf["values"], dtype=KINDS[leaf["dtype"]])
                result[tuple(leaf["key"])] = values.reshape(leaf["shape"])
        except DataError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is not a readable NestedArrayDict: {error!r}. Write it with `save`."
            ) from error
        return result

    def _put(self, names: tuple[str, ...], value: Any) -> None:
        first, *rest = names
        if rest:
            inner = self._values.get(first)
            if not isinstance(inner, NestedArrayDict):
                inner = self._values[first] = NestedArrayDict(batch_size=self.batch_size)
            inner._put(tuple(rest), value)
            return
        if isinstance(value, Mapping):
            value = NestedArrayDict(value, self.batch_size)
        stored = value if isinstance(value, NestedArrayDict) else as_array(value)
        shape = stored.batch_size if isinstance(stored, NestedArrayDict) else stored.shape
        if shape[: len(self.batch_size)] != self.batch_size:
            raise DataError(
                f"{first!r} has the shape {list(shape)}, which does not begin with the batch size "
                f"{list(self.batch_size)} of its NestedArrayDict"
            )
        self._values[first] = stored

    def _walk(self, nested: bool, leaves_only: bool) -> Iterator[tuple[Key, Value]]:
        for name, value in self._values.items():
            is_dict = isinstance(value, NestedArrayDict)
            if not (is_dict and leaves_only):
                yield name, value
            if is_dict and nested:
                for key, inner in cast(NestedArrayDict, value)._walk(nested, leaves_only):
                    yield (name, *names_of(key)), inner


def stack_nested_array_dicts(items: Sequence[NestedArrayDict], dim: int = 0) -> NestedArrayDict:
    """Stack equal-shaped dictionaries in a new batch dimension."""
    first = _check_alike(items)
    axis = dim if dim >= 0 else len(first.batch_size) + 1 + dim
    batch_size = (*first.batch_size[:axis], len(items), *first.batch_size[axis:])
    return _join(items, lambda arrays: np.stack(arrays, axis=axis), batch_size)


def concatenate_nested_array_dicts(
    items: Sequence[NestedArrayDict], dim: int = 0
) -> NestedArrayDict:
    """Concatenate dictionaries along a batch dimension."""
    first = _check_alike(items, but=dim)
    axis = dim if dim >= 0 else len(first.batch_size) + dim
    length = sum(part.batch_size[axis] for part in items)
    batch_size = (*first.batch_size[:axis], length, *first.batch_size[axis + 1 :])
    return _join(items, lambda arrays: np.concatenate(arrays, axis=axis), batch_size)


def _is_key(index: object) -> bool:
    return isinstance(index, str) or (
        isinstance(index, tuple) and bool(index) and all(isinstance(name, str) for name in index)
    )


def names_of(key: Key) -> tuple[str, ...]:
    """Return the names of a key, one per level."""
    return (key,) if isinstance(key, str) else key


def _within(index: Any, num_batch: int) -> Any:
    """Restrict the `...` of an index to the batch dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(part is Ellipsis for part in parts):
        return index
    num_indexed = sum(_num_dimensions(part) for part in parts)
    ellipsis = next(number for number, part in enumerate(parts) if part is Ellipsis)
    all_others = [slice(None)] * (num_batch - num_indexed)
    return (*parts[:ellipsis], *all_others, *parts[ellipsis + 1 :])


def _num_dimensions(part: Any) -> int:
    """Return the number of dimensions that a part of an index refers to."""
    if part is Ellipsis or part is None:
        return 0
    is_mask = isinstance(part, np.ndarray) and part.dtype == np.bool_
    return part.ndim if is_mask else 1


def _check_alike(items: Sequence[NestedArrayDict], but: int | None = None) -> NestedArrayDict:
    if not items:
        raise DataError("no NestedArrayDict was given; give at least one")
    first = items[0]
    sizes = [list(part.batch_size) for part in items]
    if but is not None:
        if not -len(sizes[0]) <= but < len(sizes[0]):
            raise DataError(f"there is no batch dimension {but} in a batch size of {sizes[0]}")
        for size in sizes:
            size[but : but + 1 or None] = [0]
    for part, size in zip(items, sizes, strict=True):
        if size != sizes[0] or part.keys(True, True) != first.keys(True, True):
            raise DataError(f"{part!r} does not fit to {first!r}: give all the same keys and sizes")
    return first


def _join(
    items: Sequence[NestedArrayDict],
    join: Callable[[list[Array]], Array],
    batch_size: Sequence[int],
) -> NestedArrayDict:
    columns = [dict(part.items(True, True)) for part in items]
    return NestedArrayDict(
        {key: join([column[key] for column in columns]) for key in columns[0]}, batch_size
    )


# ---- arrays of whole numbers, numbers, truth values or texts


def as_array(value: object) -> Array:
    """Convert numbers, booleans, or texts and None to an array of int64, float64, bool or `TEXT`.

    An array that has one of these types is not copied.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(
            f"a value of a NestedArrayDict is not an array: {error}; pad it first"
        ) from error
    kind = array.dtype.kind
    is_text = kind in "TU" or (
        kind == "O" and all(text is None or isinstance(text, str) for text in array.flat)
    )
    dtype = TEXT if is_text else _NUMBERS.get(kind)
    if dtype is not None:
        return array.astype(dtype, copy=False)
    raise DataError(
        f"a value of a NestedArrayDict has the type {array.dtype}; it holds whole numbers, floats, "
        "booleans and texts (None for a missing one). Convert it, or keep it elsewhere"
    )


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array of 0, False or missing texts."""
    return np.full(shape, None, dtype=TEXT) if dtype == TEXT else np.zeros(shape, dtype)


def is_equal(first: Array, second: Array) -> bool:
    """Return whether two arrays of one type are equal; NaN equals NaN."""
    if first.dtype == TEXT:
        return first.shape == second.shape and first.tolist() == second.tolist()
    return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dimension names of an array."""

    shape: tuple[int, ...]
    """Sizes of all dimensions."""
    dim_names: tuple[str, ...] = ()
    """A name for each dimension, or empty."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float64)

    def __post_init__(self) -> None:
        if self.dim_names and len(self.dim_names) != len(self.shape):
            raise DataError(
                f"a spec of the shape {list(self.shape)} has the dimension names "
                f"{list(self.dim_names)}: name each dimension or none"
            )

    def zero(self) -> Array:
        """Return an array of 0, False or missing texts."""
        return zeros(self.shape, self.dtype)

    def check(self, value: object, key: Key = "") -> None:
        """Raise `DataError`, naming the key, for a value of another shape or type."""
        if (
            not isinstance(value, np.ndarray)
            or value.dtype != self.dtype
            or value.shape != self.shape
        ):
            dtype = getattr(value, "dtype", type(value).__name__)
            raise DataError(
                f"{key!r} is {dtype} {list(getattr(value, 'shape', ()))}; "
                f"it must be {self.dtype} {list(self.shape)} {' x '.join(self.dim_names)}".rstrip()
            )


class IntArraySpec(ArraySpec):
    """Spec of an integer array."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int64)


class FloatArraySpec(ArraySpec):
    """Spec of a floating-point array."""


class BoolArraySpec(ArraySpec):
    """Spec of a boolean array."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.bool_)


class StringArraySpec(ArraySpec):
    """Spec of a text array; `zero` has missing texts."""

    dtype: ClassVar[np.dtype[Any]] = TEXT


class CompositeSpec:
    """Named specs whose shapes begin with a common batch size."""

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
        """Return a dictionary of this shape with 0, False and missing texts."""
        return NestedArrayDict({name: spec.zero() for name, spec in self.specs.items()}, self.shape)

    def check(self, value: NestedArrayDict, key: tuple[str, ...] = ()) -> None:
        """Raise for a missing key, or a value of another shape or type."""
        for name, spec in self.specs.items():
            member = value.get(name)
            if member is None:
                raise DataError(f"{(*key, name)!r} is missing; there are {list(value.keys())}")
            spec.check(member, (*key, name))

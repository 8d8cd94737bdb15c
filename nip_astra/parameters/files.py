"""Parameter files and assignments as layers, and their merging with the origin of each value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from nip_astra.errors import (
    ConfigurationError,
    ParameterError,
    ParameterFault,
    reason_of,
    show_value,
)
from nip_astra.lazy import provided
from nip_astra.parameters.conversion import convert, with_new_names
from nip_astra.parameters.parameters_base import TYPE_KEY, is_about_elements
from nip_astra.safe_text import escape_for_yaml
from nip_astra.tracking.run_directory import (
    HYPER_PARAMETERS,
    escape_references,
    unescape_references,
)

DEFAULT_SOURCE = "default"
"""Source of a value that no layer sets."""
OVERRIDE_SOURCE = "--set"
"""Source of a value set by an assignment `a.b=c`."""
SETTINGS_SECTION = "settings"
"""Section of a parameter file with the experiment settings."""
VERSION_KEY = "package_version"
"""Marks a file written by a run, which holds every parameter."""
SELF = "_self_"
"""Place of a file among those that it merges by `defaults`."""
_MAX_DEPTH = 50


@dataclass(frozen=True)
class Layer:
    """Parameter values from one source; later layers win.

    `${a.b}` in a text refers to another parameter.
    """

    source: str  # for messages and `show`
    values: dict[str, Any]
    stored_in: Path | None = None  # the run's parameter file that has them, or extends theirs

    @classmethod
    def literal(cls, source: str, values: Mapping[str, Any]) -> Layer:
        """Return a layer of values in which `${` is plain text."""
        return cls(source, {name: _literal(plain(value)) for name, value in values.items()})

    @property
    def is_complete(self) -> bool:
        """Whether a run wrote the layer, so that it holds every parameter."""
        return VERSION_KEY in self.values

    def only(self, names: Iterable[str]) -> Layer:
        """Return the layer with groups and sections of these names only."""
        known = set(names)
        return replace(self, values={k: v for k, v in self.values.items() if k in known})

    def without(self, names: Iterable[str]) -> Layer:
        """Return the layer without groups and sections of these names."""
        return self.only(set(self.values).difference(names))


def plain(value: Any) -> Any:
    """Return a value, for instance of NumPy, as it is written in a file."""

    def convert_object(one: Any) -> Any:
        if hasattr(one, "tolist"):
            return one.tolist()
        return list(one) if isinstance(one, Iterable) else str(one)

    return to_jsonable_python(value, fallback=convert_object)


def _literal(value: Any) -> Any:
    if isinstance(value, str):
        return escape_references(value)
    if isinstance(value, Mapping):
        return {name: _literal(item) for name, item in value.items()}
    return [_literal(item) for item in value] if isinstance(value, list) else value


# ---- reading


def read_yaml_layers(path: Path, *, source: str) -> list[Layer]:
    """Read a parameter file, preceded by the files that it `extends`.

    Old versions and names, and recipes of NexRL (a `trainer` that is a group), are converted.
    Hydra's `defaults: [base, _self_]` names files to merge below or above the file. In a file that
    a run wrote, which holds resolved values only, and in files that it extends, `${` is plain text.
    """
    layers: list[Layer] = []
    chain: list[Path] = []
    current: Path | None = path
    stored_in: Path | None = None
    while current is not None:
        if current.resolve() in chain:
            raise ConfigurationError(
                f"the parameter file {path} extends itself through {current}. Remove one `extends`."
            )
        extended_by = f", which {layers[0].source} extends," if layers else ""
        chain.append(current.resolve())
        values = _with_defaults(current, read_yaml_mapping(current, extended_by))
        parent = values.pop("extends", None)
        label = source if current == path else f"{source} <- {current.name}"
        if stored_in is None and (current.name == HYPER_PARAMETERS or VERSION_KEY in values):
            stored_in = current
        if stored_in is not None:
            values = Layer.literal(label, unescape_references(values)).values
        if isinstance(values.get("trainer"), Mapping):
            values = provided("read_recipe")(values, folder=current.parent, source=label)
        values = with_new_names(convert(values, source=str(current)), source=str(current))
        layers.insert(0, Layer(label, values, stored_in))
        if parent is not None and (not isinstance(parent, str) or not parent.strip()):
            raise ConfigurationError(
                f"the parameter file {current} has `extends: {parent!r}`, not a file name. "
                "Give the path of one YAML file, relative to this one."
            )
        current = None if parent is None else current.parent / Path(parent).expanduser()
    return layers


def _with_defaults(
    path: Path, values: dict[str, Any], above: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Return the values of a file merged with those of the files in its Hydra `defaults`."""
    if "defaults" not in values:
        return values
    names = values.pop("defaults")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"the parameter file {path} has `defaults: {names!r}`. Give a list of file names "
            "without .yaml, and _self_ for the file itself."
        )
    if path.resolve() in above:
        raise ConfigurationError(
            f"the parameter file {path} is among its own `defaults`. Remove one of them."
        )
    layers = []
    for name in names if SELF in names else [*names, SELF]:
        if name == SELF:
            layers.append(Layer(str(path), values))
            continue
        base = path.parent / f"{name}.yaml"
        base_values = read_yaml_mapping(base, f", which {path} names in its defaults,")
        layers.append(Layer(str(base), _with_defaults(base, base_values, (*above, path.resolve()))))
    return merge_layers(layers, resolve=False)[0]


def read_yaml_mapping(path: Path, extended_by: str = "") -> dict[str, Any]:
    """Read the plain values of a YAML file."""
    file = f"the parameter file {path}{extended_by}"
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is a folder or device")
        text = path.read_text(encoding="utf-8")
        _check_depth(text)
        config = OmegaConf.load(StringIO(text))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{file} does not exist: no such file. Check the path.") from error
    except RecursionError as error:
        raise ConfigurationError(
            f"{file} is nested too deep: more than {_MAX_DEPTH} levels. Fix what wrote it."
        ) from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or reason_of(error)
        raise ConfigurationError(
            f"{file}{line} is not a YAML mapping: {reason}. Write one `name: value` per line."
        ) from error
    if not OmegaConf.is_dict(config):
        raise ConfigurationError(f"{file} holds a list. Write one `name: value` per line.")
    return _plain(config)


def parse_overrides(
    overrides: Iterable[str] | Mapping[str, Any], option: str = OVERRIDE_SOURCE
) -> Layer:
    """Read `a.b=c` assignments; values are YAML, so `1e-5` is a number and `null` is None.

    `a.b.0.c=d` changes an element of a list, counted from 0. A mapping gives values by path, and a
    text is one assignment. `option` is the command-line option that gave them.
    """
    merger = _Merger()
    if isinstance(overrides, Mapping):
        overrides = [f"{name}={_as_yaml(value)}" for name, value in overrides.items()]
    for item in [overrides] if isinstance(overrides, str) else overrides:
        name, sign, value = item.partition("=")
        # OmegaConf would read a[b] as a.b, even if it is a typo.
        is_path = all(part.strip() and not set(part) & set("[]") for part in name.split("."))
        if not sign or not is_path:
            problem, hint = "is not an assignment", f"Write {option} path.to.parameter=value."
            path = name.strip() or item
        else:
            try:
                _check_depth(value)
                merger.add(_plain(OmegaConf.from_dotlist([item])), option)
                continue
            except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
                problem = f"has a value that is not YAML ({reason_of(error)})"
                hint = "Quote a value with special characters: 'a.b=\"x: y\"'."
                path = name.strip()
        merger.faults.append(ParameterFault(path, repr(item), problem, hint, option))
    if merger.faults:
        raise ParameterError(merger.faults)
    return Layer(option, with_new_names(merger.values, source=option))


def assignment(path: str, value: Any) -> str:
    """Return the assignment `a.b=c` that `parse_overrides` reads as this value."""
    value = _literal(value)
    quoted, plain = f"{path}={_as_yaml(value)}", f"{path}={value}"
    with suppress(ParameterError):
        if isinstance(value, str) and parse_overrides(plain) == parse_overrides(quoted):
            return plain
    return quoted


def _as_yaml(value: Any) -> str:
    return escape_for_yaml(json.dumps(plain(value), ensure_ascii=False))


def _check_depth(text: str) -> None:
    """Raise `RecursionError` for YAML too deep for the recursive C reader."""
    try:
        _count_depth(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        # The slower reader has better error messages.
        _count_depth(text, yaml.SafeLoader)


def _count_depth(text: str, loader: Any) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise RecursionError(f"nested more than {_MAX_DEPTH} deep")


def _plain(config: Any) -> dict[str, Any]:
    plain: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]  # a mapping
        config, resolve=False
    )
    return plain


# ---- merging


def merge_layers(
    layers: Sequence[Layer], *, resolve: bool = True
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the merged values, and the source of each leaf by dotted path.

    A group whose `_type` a later layer changes is replaced as a whole, since the old type's
    parameters do not apply to the new type. A group whose names are numbers changes elements of a
    list, whose source then names all sources. Without `resolve`, `${other.parameter}` stays, since
    a later layer may set it.
    """
    merger = _Merger()
    for layer in layers:
        merger.add(layer.values, layer.source)
    if merger.faults:
        raise ParameterError(merger.faults)
    values, sources = merger.values, merger.sources
    if not resolve:
        return values, sources
    if _is_plain(values):
        return _copied(values), sources
    try:
        resolved: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]  # a mapping
            OmegaConf.create(values), resolve=True
        )
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "a parameter"
        origin = f" (from {sources[key]})" if key in sources else ""
        raise ConfigurationError(
            f"{key}{origin} refers to a parameter that cannot be resolved: {reason_of(error)}. "
            "Refer to one that a file sets, as ${path.to.parameter}; write \\${ for plain text."
        ) from error
    return resolved, sources


def _is_plain(value: Any) -> bool:
    """Return whether values are plain, without references; converting them by OmegaConf is slow."""
    if type(value) in (dict, list):
        return all(map(_is_plain, value.values() if type(value) is dict else value))
    return "${" not in value if type(value) is str else type(value) in (bool, int, float, NoneType)


def _copied(value: Any) -> Any:
    """Return a copy of plain values; `deepcopy` takes several times as long."""
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    return list(map(_copied, value)) if type(value) is list else value


class _Merger:
    """Merged values, the source of each leaf, and changes of list elements that do not exist."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.faults: list[ParameterFault] = []

    def add(self, values: Mapping[str, Any], source: str) -> None:
        self._merge(self.values, values, source, "")

    def _merge(
        self, into: dict[str, Any], values: Mapping[str, Any], source: str, prefix: str
    ) -> None:
        for key, value in values.items():
            name = str(key)
            path = f"{prefix}{name}"
            old = into.get(name)
            if isinstance(value, Mapping):
                if isinstance(old, dict) and _has_same_type(old, value):
                    self._merge(old, value, source, f"{path}.")
                    continue
                if isinstance(old, list) and is_about_elements(value):
                    into[name] = self._changed(old, value, source, path)
                    continue
            if isinstance(old, dict | list):
                for known in [known for known in self.sources if known.startswith(f"{path}.")]:
                    del self.sources[known]
            self.sources[path] = source
            if isinstance(value, Mapping):
                into[name] = {}
                self._merge(into[name], value, source, f"{path}.")
            else:
                into[name] = value

    def _changed(
        self, old: Sequence[Any], values: Mapping[str, Any], source: str, path: str
    ) -> list[Any]:
        elements = list(old)
        for key, value in values.items():
            if int(key) >= len(elements):
                last = f"Its elements are 0 to {len(elements) - 1}. " if elements else ""
                problem = f"is beyond the end of a list of {len(elements)}"
                hint = f"{last}To lengthen it, give the whole list as {path}."
                fault = ParameterFault(f"{path}.{key}", show_value(value), problem, hint, source)
                self.faults.append(fault)
                continue
            element = {key: deepcopy(elements[int(key)])}
            self._merge(element, {key: value}, source, f"{path}.")
            elements[int(key)] = element[key]
        before = self.sources.get(path, source)
        if source not in before.split(", "):
            self.sources[path] = f"{before}, {source}"
        return elements


def _has_same_type(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return TYPE_KEY not in new or new[TYPE_KEY] == old.get(TYPE_KEY)


def default_lists(values: Mapping[str, Any], model: type[BaseModel]) -> Layer:
    """Return a layer with the defaults of lists whose elements are changed singly."""
    merger = _Merger()
    for path in _paths_to_elements(values, ()):
        found: Any = _default_list(model, path)
        if found is not None:
            for name in reversed(path):
                found = {name: found}
            merger.add(found, DEFAULT_SOURCE)
    return Layer(DEFAULT_SOURCE, merger.values)


def _paths_to_elements(
    values: Mapping[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            path = (*above, str(name))
            if is_about_elements(value):
                yield path
            yield from _paths_to_elements(value, path)


def _default_list(model: type[BaseModel], path: Sequence[str]) -> list[Any] | None:
    """Return a field's default as in a file; None if it is not a list, or its model is unknown."""
    place: Any = model
    for name in path:
        if isinstance(place, type) and issubclass(place, BaseModel) and name in place.model_fields:
            field = place.model_fields[name]
            is_required = field.is_required()
            place = (
                field.annotation if is_required else field.get_default(call_default_factory=True)
            )
        elif isinstance(place, BaseModel):
            place = getattr(place, name, None)
        else:
            place = place.get(name) if isinstance(place, Mapping) else None
    if not isinstance(place, list):
        return None
    return [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in place]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its dotted path; lists and empty groups are leaves."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from earlier ones, in their groups."""
    changed: dict[str, Any] = {}
    for name, value in now.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and _has_same_type(old, value):
            inner = differences(value, old)
            if inner:
                changed[name] = inner
        elif name not in before or value != old:
            changed[name] = value
    return changed

"""Stack parameter layers, remember where each value came from, and validate the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nip_astra.errors import ConfigurationError, ParameterError, ParameterFault
from nip_astra.parameters.hyper_parameters import HyperParameters

DEFAULT_SOURCE = "default"


@dataclass(frozen=True)
class Layer:
    """Parameter values from one place; a later layer wins.

    Attributes
    ----------
    source : str
        Where the values come from, for messages and for `show`.
    values : dict
        Nested values by name.
    """

    source: str
    values: dict[str, Any]


@dataclass(frozen=True)
class ResolvedParameters:
    """Validated parameters and the source of every value, by dotted path."""

    hyper_params: HyperParameters
    sources: dict[str, str]


def read_yaml_layers(path: Path, *, source: str) -> list[Layer]:
    """Read a parameter file and, before it, the files that it `extends`.

    Raises
    ------
    ConfigurationError
        When a file is missing, is no YAML mapping, or extends itself.
    """
    layers: list[Layer] = []
    seen: list[Path] = []
    current: Path | None = path
    while current is not None:
        if current.resolve() in seen:
            raise ConfigurationError(
                f"the parameter file {path} extends itself by way of {current}. Remove one "
                "`extends`."
            )
        seen.append(current.resolve())
        values = _read_yaml(current)
        parent = values.pop("extends", None)
        label = source if current == path else f"{source} <- {current.name}"
        layers.insert(0, Layer(label, values))
        current = None if parent is None else current.parent / str(parent)
    return layers


def parse_overrides(overrides: Iterable[str]) -> Layer:
    """Read `a.b=c` assignments; values are YAML, so `1e-5` is a number and `null` is None.

    Raises
    ------
    ParameterError
        Naming every assignment that is none.
    """
    items = list(overrides)
    faults = [
        ParameterFault(
            item, repr(item), "is no assignment", "Write --set path.to.parameter=value.", "--set"
        )
        for item in items
        if "=" not in item or not item.partition("=")[0].strip()
    ]
    if faults:
        raise ParameterError(faults)
    try:
        config = OmegaConf.from_dotlist(items)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"the values of --set {' '.join(items)} cannot be read: {error}. Values are YAML; "
            "quote those with special characters."
        ) from error
    return Layer("--set", _plain(config, resolve=False))


def merge_layers(layers: Sequence[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Give the merged values, interpolations resolved, and the source of each leaf.

    A group whose `_type` a later layer changes is replaced as a whole: the parameters of the old
    type mean nothing to the new one.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        _merge(values, layer.values, layer.source, "", sources)
    try:
        return _plain(OmegaConf.create(values), resolve=True), sources
    except OmegaConfBaseException as error:
        raise ConfigurationError(
            f"a parameter refers to another that cannot be resolved: {error}. Mend the ${{...}}."
        ) from error


def resolve_parameters(layers: Sequence[Layer], model: type[HyperParameters]) -> ResolvedParameters:
    """Merge the layers and validate them.

    Raises
    ------
    ParameterError
        With every fault, each with its dotted path, what was given, and from where.
    """
    values, sources = merge_layers(layers)
    hyper_params = model.from_dict(values, sources=sources)
    every_path = dict(flatten(hyper_params.to_dict()))
    return ResolvedParameters(hyper_params, {path: _source(path, sources) for path in every_path})


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Give each leaf with its dotted path; lists are leaves."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def _merge(
    into: dict[str, Any],
    values: Mapping[str, Any],
    source: str,
    prefix: str,
    sources: dict[str, str],
) -> None:
    for name, value in values.items():
        path = f"{prefix}{name}"
        old = into.get(name)
        if isinstance(value, Mapping):
            is_other_type = (
                isinstance(old, Mapping) and "_type" in value and value["_type"] != old.get("_type")
            )
            if not isinstance(old, dict) or is_other_type:
                for known in [key for key in sources if key.startswith(f"{path}.")]:
                    del sources[known]
                into[name] = {}
                sources[path] = source
            _merge(into[name], value, source, f"{path}.", sources)
        else:
            into[name] = value
            sources[path] = source


def _source(path: str, sources: Mapping[str, str]) -> str:
    return sources.get(path, DEFAULT_SOURCE)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        config = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"the parameter file {path} was asked for, but there is none. Give the path of a "
            "YAML file."
        ) from error
    except (OSError, yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the parameter file {path} cannot be read: {error}. It must be a YAML mapping."
        ) from error
    values = _plain(config, resolve=False)
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"the parameter file {path} holds a list, but it must be a YAML mapping of parameter "
            "names to values."
        )
    return values


def _plain(config: Any, *, resolve: bool) -> dict[str, Any]:
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=resolve)  # type: ignore[assignment]
    return plain

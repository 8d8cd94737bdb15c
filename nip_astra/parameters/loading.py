"""Stack parameter layers, remember where each value came from, and validate the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nip_astra.errors import ConfigurationError, ParameterError, ParameterFault
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.conversion import convert
from nip_astra.parameters.faults import show
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.merging import Merger, default_lists
from nip_astra.parameters.nexrl_layout import from_nexrl_layout, is_nexrl_layout
from nip_astra.parameters.renamed import with_new_names
from nip_astra.tracking.run_directory import (
    HYPER_PARAMETERS,
    escape_references,
    unescape_references,
)

DEFAULT_SOURCE = "default"
"""Source of a value that no layer gave."""
OVERRIDE_SOURCE = "--set"
"""Source of a value that an assignment `a.b=c` gave."""
SETTINGS_SECTION = "settings"
"""Section of a parameter file that says where and how its runs take place."""
VERSION_KEY = "package_version"
"""By which a file is known that a run wrote: it holds every parameter."""
_OPEN = "???"
_MAX_DEPTH = 50


@dataclass(frozen=True)
class Layer:
    """Parameter values from one place; a later layer wins.

    Attributes
    ----------
    source : str
        Where the values come from, for messages and for `show`.
    values : dict
        Nested values by name; `${a.b}` in a text refers to another parameter.
    stored_in : Path or None
        The parameter file of a run from which they come, itself or as what it extends; None for
        what the user wrote.
    """

    source: str
    values: dict[str, Any]
    stored_in: Path | None = None


@dataclass(frozen=True)
class ResolvedParameters:
    """Validated parameters and the source of every value, by dotted path.

    Attributes
    ----------
    settings : ExperimentSettings
        What the layers say under `settings`.
    """

    hyper_params: HyperParameters
    sources: dict[str, str]
    settings: ExperimentSettings


def literal_layer(source: str, values: Mapping[str, Any]) -> Layer:
    """A layer of values in which `${` is text, and refers to no other parameter."""
    return Layer(source, {name: _literal(value) for name, value in values.items()})


def _literal(value: Any) -> Any:
    if isinstance(value, str):
        return escape_references(value)
    if isinstance(value, Mapping):
        return {name: _literal(item) for name, item in value.items()}
    return [_literal(item) for item in value] if isinstance(value, list) else value


def read_yaml_layers(path: Path, *, source: str) -> list[Layer]:
    """Read a parameter file and, before it, the files that it `extends`.

    A file that another version of the package wrote is converted, and names that parameters had
    before are read as those of now. In a file that a run wrote, which
    holds resolved values only, and in what it extends, `${` is text.

    Raises
    ------
    ConfigurationError
        When a file is missing, is no YAML mapping, extends itself, or cannot be converted.
    """
    layers: list[Layer] = []
    chain: list[Path] = []
    current: Path | None = path
    stored_in: Path | None = None
    while current is not None:
        if current.resolve() in chain:
            raise ConfigurationError(
                f"the parameter file {path} was to be read, but it extends itself by way of "
                f"{current}. A file may extend files that do not lead back to it; remove one "
                "`extends`."
            )
        asked_by = f", which {layers[0].source} extends," if layers else ""
        chain.append(current.resolve())
        values = read_yaml_mapping(current, asked_by)
        parent = values.pop("extends", None)
        label = source if current == path else f"{source} <- {current.name}"
        if stored_in is None and (current.name == HYPER_PARAMETERS or VERSION_KEY in values):
            stored_in = current
        if stored_in is not None:
            values = literal_layer(label, unescape_references(values)).values
        if is_nexrl_layout(values):
            values = from_nexrl_layout(values, folder=current.parent, source=label)
        values = with_new_names(convert(values, source=str(current)), source=str(current))
        layers.insert(0, Layer(label, values, stored_in))
        current = None if parent is None else _parent_of(current, parent)
    return layers


def parse_overrides(overrides: Iterable[str], option: str = OVERRIDE_SOURCE) -> Layer:
    """Read `a.b=c` assignments; values are YAML, so `1e-5` is a number and `null` is None.

    An element of a list is named by its number, from 0: `a.b.0.c=d`. `option` is what they were
    given by.

    Raises
    ------
    ParameterError
        Naming every assignment that is none, or whose value is no YAML.
    """
    merger = Merger()
    faults: list[ParameterFault] = []
    for item in overrides:
        name, sign, _ = item.partition("=")
        parts = name.strip().split(".")
        # OmegaConf would take a[b] for a.b, also where it is a slip.
        is_path = all(part.strip() and not set(part) & set("[]") for part in parts)
        if not sign or not is_path:
            hint = f"Write {option} path.to.parameter=value."
            faults.append(
                ParameterFault(name.strip() or item, repr(item), "is no assignment", hint, option)
            )
            continue
        try:
            _check_depth(item.partition("=")[2])
            values = _plain(OmegaConf.from_dotlist([item]))
        except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
            problem = f"has a value that is no YAML ({_first_line(error)})"
            hint = "Quote a value with special characters: 'a.b=\"x: y\"'."
            faults.append(ParameterFault(name.strip(), repr(item), problem, hint, option))
            continue
        merger.add(values, option)
    faults += merger.faults
    if faults:
        raise ParameterError(faults)
    return Layer(option, merger.values)


def merge_layers(
    layers: Sequence[Layer], *, resolve: bool = True
) -> tuple[dict[str, Any], dict[str, str]]:
    """The merged values and the source of each leaf.

    A group whose `_type` a later layer changes is replaced as a whole: the parameters of the old
    type mean nothing to the new one. A group whose names are numbers changes elements of a list.

    Parameters
    ----------
    resolve : bool
        Whether `${other.parameter}` becomes that parameter's value; False where more layers are
        to come, which may hold it.

    Raises
    ------
    ParameterError
        When elements of a list are to be changed that it has not.
    ConfigurationError
        When a parameter refers to another that cannot be resolved.
    """
    merger = Merger()
    for layer in layers:
        merger.add(layer.values, layer.source)
    if merger.faults:
        raise ParameterError(merger.faults)
    values, sources = merger.values, merger.sources
    if not resolve:
        return values, sources
    try:
        resolved: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]  # a mapping
            OmegaConf.create(values), resolve=True
        )
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "a parameter"
        origin = f" (from {sources[key]})" if key in sources else ""
        raise ConfigurationError(
            f"{key}{origin} refers to another parameter, but that cannot be resolved: "
            f"{_first_line(error)}. Refer to a parameter that a file gives, as "
            "${path.to.parameter}; write \\${ for the plain text."
        ) from error
    return resolved, sources


def resolve_parameters(layers: Sequence[Layer], model: type[HyperParameters]) -> ResolvedParameters:
    """Merge the layers and validate them.

    Raises
    ------
    ParameterError
        With every fault, each with its dotted path, what was given, and from where.
    """
    given, _ = merge_layers(layers, resolve=False)
    defaults = Layer(DEFAULT_SOURCE, default_lists(given, model, DEFAULT_SOURCE))
    values, sources = merge_layers([defaults, *layers])
    faults = [
        ParameterFault(
            path,
            repr(_OPEN),
            "is left open by its file and must be given",
            f"Give it with --set {path}=VALUE.",
            sources.get(path, ""),
        )
        for path, value in flatten(values)
        if value == _OPEN
    ]
    settings = ExperimentSettings()
    left_open = {fault.path for fault in faults}
    hyper_params: HyperParameters | None = None
    try:
        settings = _read_settings(values.pop(SETTINGS_SECTION, {}), sources)
    except ParameterError as error:
        faults += error.faults
    try:
        hyper_params = model.from_dict(values, sources=sources)
    except ParameterError as error:
        faults += [fault for fault in error.faults if fault.path not in left_open]
    if faults or hyper_params is None:
        raise ParameterError(faults)
    every_path = [path for path, _ in flatten(hyper_params.to_dict())]
    return ResolvedParameters(
        hyper_params,
        {path: sources.get(path, DEFAULT_SOURCE) for path in every_path},
        settings,
    )


def _read_settings(given: Any, sources: Mapping[str, str]) -> ExperimentSettings:
    """Validate the settings of files; faults have their path in the file."""
    head = f"{SETTINGS_SECTION}."
    if not isinstance(given, Mapping):
        source = sources.get(SETTINGS_SECTION, "")
        problem = "must be a group of settings"
        raise ParameterError([ParameterFault(SETTINGS_SECTION, show(given), problem, "", source)])
    own = {path.removeprefix(head): source for path, source in sources.items()}
    try:
        return ExperimentSettings.from_dict(given, sources=own)
    except ParameterError as error:
        raise ParameterError(
            [fault._replace(path=head + fault.path) for fault in error.faults]
        ) from None


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf with its dotted path; lists and empty groups are leaves."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def _parent_of(path: Path, parent: Any) -> Path:
    if not isinstance(parent, str) or not parent.strip():
        raise ConfigurationError(
            f"the parameter file {path} extends {parent!r}, but that is no file name. Give the "
            "path of one YAML file, from the folder of this one."
        )
    return path.parent / Path(parent).expanduser()


def read_yaml_mapping(path: Path, asked_by: str = "") -> dict[str, Any]:
    """The plain values of a YAML file.

    Raises
    ------
    ConfigurationError
        When there is no such file, or it holds no mapping.
    """
    asked = f"the parameter file {path}{asked_by} was to be read"
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is a folder or device, and no file")
        text = path.read_text(encoding="utf-8")
        _check_depth(text)
        config = OmegaConf.load(StringIO(text))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{asked}, but there is no such file. Give the path of a YAML file."
        ) from error
    except RecursionError as error:
        raise ConfigurationError(
            f"{asked}, but its groups or lists are nested too deep. Parameters are nested a dozen "
            "deep at most; mend what wrote the file."
        ) from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigurationError(
            f"{asked}, but it is no YAML mapping: {error}. Write one `name: value` a line."
        ) from error
    if not OmegaConf.is_dict(config):
        raise ConfigurationError(
            f"{asked}, but it holds a list. Write a mapping, one `name: value` a line."
        )
    return _plain(config)


def _check_depth(text: str) -> None:
    """Raise `RecursionError` where YAML is nested deeper than parameters are.

    What reads it after this calls itself at every level, in C, where that ends the process.
    """
    try:
        _count_depth(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        # The slower reader says more clearly what is wrong.
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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else repr(error)

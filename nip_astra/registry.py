"""The registry of named components."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from typing import Any, Generic, NamedTuple, TypeVar

from nip_astra.built_ins import KINDS, BuiltIn
from nip_astra.errors import (
    ConfigurationError,
    DuplicateNameError,
    NipAstraError,
    PluginError,
    UnknownNameError,
    plural,
)

T = TypeVar("T")


class RegistrySnapshot(NamedTuple):
    """A registry's content at one moment: entries, and where each was registered."""

    entries: dict[str, Any]
    places: dict[str, str]


class Registry(Generic[T]):
    """Maps names of one kind to the registered objects.

    Names are resolved among the registered objects, then the built-ins (whose module is imported on
    first use), then the entry points of installed packages.

    Parameters
    ----------
    kind : str
        The kind in the singular: "trainer". Its entry-point group is `nip_astra.<kind>s`.
    built_ins : Mapping[str, BuiltIn], optional
        What ships, by name; by default the kind's in `nip_astra.built_ins`.
    """

    def __init__(self, kind: str, built_ins: Mapping[str, BuiltIn] | None = None) -> None:
        self.kind = kind
        self.entry_point_group = f"nip_astra.{plural(kind)}"
        if built_ins is None:
            built_ins = KINDS[kind].built_ins() if kind in KINDS else {}
        self._built_ins = dict(built_ins)
        self._entries: dict[str, T] = {}
        self._places: dict[str, str] = {}
        self._loading_entry_point: str | None = None
        ALL_REGISTRIES[kind] = self

    def register(self, name: str) -> Callable[[T], T]:
        """Register an object under `name`; a decorator that returns the object unchanged.

        Raises
        ------
        ConfigurationError
            When the name is not an identifier: it names a section of a parameter file.
        DuplicateNameError
            When the name is taken, also by a built-in or by another package's entry point that
            has not been imported yet. A definition that a notebook cell repeats replaces the
            earlier one.
        """
        key = str(name)
        if not key.isidentifier():
            raise ConfigurationError(
                f"cannot register the {self._words} {key!r}: a name has letters, digits and "
                "underscores, and does not start with a digit."
            )

        def decorate(entry: T) -> T:
            place = _place_of(entry)
            owner = self._owner_of(key, getattr(entry, "__module__", None) or "")
            if key in self._entries and _is_redefined(self._entries[key], entry):
                # A repeated notebook cell replaces its definition.
                owner = None
            if owner is not None:
                raise DuplicateNameError(self.kind, key, owner, place)
            self._entries[key] = entry
            self._places[key] = place
            return entry

        return decorate

    def forget(self, name: str) -> None:
        """Remove a registered name, so that its file can be reloaded, for instance in a notebook.

        Raises
        ------
        UnknownNameError
            When nothing was registered under it.
        """
        if str(name) not in self._entries:
            raise UnknownNameError(self.kind, str(name), self._entries)
        del self._entries[str(name)], self._places[str(name)]

    def get(self, name: str) -> T:
        """Return the object registered under `name`, importing it on first use.

        Raises
        ------
        UnknownNameError
            When the name is unknown; lists near misses and all names.
        PluginError
            When the entry point of that name cannot be imported.
        DuplicateNameError
            When several installed packages have an entry point of that name.
        """
        key = str(name)
        if key not in self._entries:
            if key in self._built_ins:
                self._import_built_in(key)
            else:
                self._load_entry_point(key)
        return self._entries[key]

    def names(self) -> list[str]:
        """Return all names, sorted, without importing anything."""
        return sorted({*self._built_ins, *self._entries, *(e.name for e in self._entry_points())})

    def origin(self, name: str) -> str:
        """Return the origin of a name: "built-in", "file:line", or "entry point of <package>"."""
        key = str(name)
        if key in self._built_ins:
            return "built-in"
        for entry_point in self._entry_points():
            if entry_point.name == key:
                return f"entry point of {_package_of(entry_point)}"
        if key in self._places:
            return self._places[key]
        raise UnknownNameError(self.kind, key, self.names())

    def is_built_in(self, name: str) -> bool:
        """Return whether a name is built in."""
        return str(name) in self._built_ins

    def module_of(self, name: str) -> str:
        """Return the module that registers a built-in."""
        return self._built_ins[str(name)].module

    def summary(self, name: str) -> str:
        """Return the first line of a component's docstring; a built-in is not imported for it."""
        key = str(name)
        if key in self._built_ins:
            return self._built_ins[key].summary
        return (inspect.getdoc(self.get(key)) or "").strip().partition("\n")[0]

    def snapshot(self) -> RegistrySnapshot:
        """Return the current state, for `restore`."""
        return RegistrySnapshot(dict(self._entries), dict(self._places))

    def restore(self, snapshot: RegistrySnapshot) -> None:
        """Restore a snapshot; built-ins imported since then stay."""
        # Importing a built-in a second time would not register it again.
        kept = [key for key in self._built_ins if key in self._entries]
        self._entries = {key: self._entries[key] for key in kept} | snapshot.entries
        self._places = {key: self._places[key] for key in kept} | snapshot.places

    @property
    def _words(self) -> str:
        return self.kind.replace("_", " ")

    def _owner_of(self, key: str, module: str) -> str | None:
        """Return where a name is already registered, unless by the module that registers it now."""
        if key in self._entries:
            return self._places[key]
        if key in self._built_ins:
            own = self._built_ins[key].module
            return None if f"{module}.".startswith(f"{own}.") else own
        if key == self._loading_entry_point:
            return None
        for entry_point in self._entry_points():
            is_same_package = module.partition(".")[0] == entry_point.module.partition(".")[0]
            if entry_point.name == key and not is_same_package:
                return f"the entry point {entry_point.value!r} of {_package_of(entry_point)}"
        return None

    def _import_built_in(self, key: str) -> None:
        module = self._built_ins[key].module
        try:
            importlib.import_module(module)
        except BaseException as error:
            # Python forgets a module that failed, so its names go too: it can be tried again.
            for name in [name for name, one in self._built_ins.items() if one.module == module]:
                self._entries.pop(name, None)
                self._places.pop(name, None)
            if isinstance(error, ModuleNotFoundError) and error.name == module:
                raise self._has_no_module(key, module, "does not exist") from error
            raise
        if key not in self._entries:
            raise self._has_no_module(key, module, "does not register it")

    def _has_no_module(self, key: str, module: str, problem: str) -> PluginError:
        return PluginError(
            f"the {self._words} {key!r} is listed as built-in, but the module {module} {problem}. "
            "Register it there, or remove it from the table of built-ins."
        )

    def _entry_points(self) -> Sequence[metadata.EntryPoint]:
        places = tuple((path, _changed_at(path)) for path in map(os.path.abspath, sys.path))
        return _found_in(places, metadata.entry_points, self.entry_point_group)

    def _load_entry_point(self, key: str) -> None:
        found = {e.value: e for e in self._entry_points() if e.name == key}
        if not found:
            raise UnknownNameError(self.kind, key, self.names())
        first, *others = found.values()
        if others:
            places = [f"the entry point {e.value!r} of {_package_of(e)}" for e in (first, *others)]
            raise DuplicateNameError(self.kind, key, places[0], places[1])
        self._loading_entry_point = key
        try:
            entry = first.load()
        except NipAstraError:
            raise
        except Exception as error:
            raise PluginError(
                f"cannot import the entry point {first.value!r} of the {self._words} {key!r} "
                f"(package {_package_of(first)}): {type(error).__name__}: {error}. Repair, "
                "upgrade or uninstall that package."
            ) from error
        finally:
            self._loading_entry_point = None
        # The module may have registered the name itself, with the decorator.
        if key not in self._entries:
            self._entries[key] = entry
            self._places[key] = _place_of(entry)


ALL_REGISTRIES: dict[str, Registry[Any]] = {}
"""The registries made so far, by kind."""


def find_registry(kind: str) -> Registry[Any]:
    """Return the registry of a kind, importing its module on first use."""
    if kind not in ALL_REGISTRIES:
        importlib.import_module(KINDS[kind].registry)
    return ALL_REGISTRIES[kind]


@lru_cache(maxsize=64)
def _found_in(
    _places: tuple[tuple[str, float], ...], find: Callable[..., Any], group: str
) -> Sequence[metadata.EntryPoint]:
    """Return the entry points of a group, cached until Python's path changes.

    Reading them takes 5 ms and more, as much as a tenth of resolving an experiment.
    """
    return tuple(find(group=group))


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _package_of(entry_point: metadata.EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist else entry_point.module


def _is_redefined(known: object, entry: object) -> bool:
    """Return whether both are the same definition in the main program, executed again."""
    names = [
        (getattr(one, "__module__", ""), getattr(one, "__qualname__", "")) for one in (known, entry)
    ]
    return names[0] == names[1] and names[0][0] == "__main__"


def _place_of(entry: object) -> str:
    try:
        file = inspect.getsourcefile(entry)  # type: ignore[arg-type]  # TypeError is handled
        _, line = inspect.getsourcelines(entry)  # type: ignore[arg-type]  # TypeError is handled
    except (OSError, TypeError):
        return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', entry)}"
    return f"{file}:{line}"

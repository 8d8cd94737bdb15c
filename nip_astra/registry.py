"""One registry for everything that has a name in a parameter file."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any, Generic, TypeVar

from nip_astra.errors import DuplicateNameError, NipAstraError, PluginError, UnknownNameError

T = TypeVar("T")
ALL_REGISTRIES: dict[str, Registry[Any]] = {}
"""Every registry made so far, by kind."""


class Registry(Generic[T]):
    """Names of one kind of thing, and what they stand for.

    A name is looked up among what was registered, then among the built-ins (the module of that
    name in `package`, imported on first use), then among the entry points of installed packages.

    Parameters
    ----------
    kind : str
        What is registered, in the singular: "trainer". Entry points are in `nip_astra.<kind>s`.
    package : str
        Package whose module `<name>` registers the built-in `<name>`.
    members : Iterable[str]
        Names of the built-ins.
    """

    def __init__(self, kind: str, *, package: str, members: Iterable[str] = ()) -> None:
        self.kind = kind
        self.package = package
        self.entry_point_group = f"nip_astra.{kind}s"
        self._built_ins = [str(member) for member in members]
        self._entries: dict[str, T] = {}
        self._places: dict[str, str] = {}
        ALL_REGISTRIES[kind] = self

    def register(self, name: str) -> Callable[[T], T]:
        """Give a decorator that registers its object under `name` and returns it unchanged.

        Raises
        ------
        DuplicateNameError
            When the name is taken, also by a built-in that has not been imported yet.
        """
        key = str(name)

        def decorate(entry: T) -> T:
            place = _place_of(entry)
            is_own = getattr(entry, "__module__", None) == f"{self.package}.{key}"
            if key in self._entries:
                raise DuplicateNameError(self.kind, key, self._places[key], place)
            if key in self._built_ins and not is_own:
                raise DuplicateNameError(self.kind, key, f"{self.package}.{key}", place)
            self._entries[key] = entry
            self._places[key] = place
            return entry

        return decorate

    def get(self, name: str) -> T:
        """Give what `name` stands for, importing it on first use.

        Raises
        ------
        UnknownNameError
            When nothing has that name; tells near misses and all names.
        PluginError
            When an installed package's entry point of that name cannot be imported.
        """
        key = str(name)
        if key not in self._entries and key in self._built_ins:
            importlib.import_module(f"{self.package}.{key}")
        if key not in self._entries:
            self._load_entry_point(key)
        if key not in self._entries:
            raise UnknownNameError(self.kind, key, self.names())
        return self._entries[key]

    def names(self) -> list[str]:
        """Give all names, sorted; imports nothing."""
        return sorted({*self._built_ins, *self._entries, *(e.name for e in self._entry_points())})

    def origin(self, name: str) -> str:
        """Say where a name comes from: "built-in", "file:line", or "entry point of <package>"."""
        if name in self._built_ins:
            return "built-in"
        for entry_point in self._entry_points():
            if entry_point.name == name:
                package = entry_point.dist.name if entry_point.dist else entry_point.value
                return f"entry point of {package}"
        if name in self._places:
            return self._places[name]
        raise UnknownNameError(self.kind, name, self.names())

    def snapshot(self) -> tuple[dict[str, T], dict[str, str]]:
        """Give the present state, for `restore`."""
        return dict(self._entries), dict(self._places)

    def restore(self, snapshot: tuple[dict[str, T], dict[str, str]]) -> None:
        """Go back to a state that `snapshot` gave."""
        self._entries, self._places = dict(snapshot[0]), dict(snapshot[1])

    def _entry_points(self) -> list[metadata.EntryPoint]:
        return list(metadata.entry_points(group=self.entry_point_group))

    def _load_entry_point(self, key: str) -> None:
        for entry_point in self._entry_points():
            if entry_point.name != key:
                continue
            try:
                entry = entry_point.load()
            except NipAstraError:
                raise
            except Exception as error:
                raise PluginError(
                    f"the {self.kind} {key!r} is the entry point {entry_point.value!r} of an "
                    f"installed package, but importing it failed: {type(error).__name__}: {error}. "
                    "Mend or remove that package."
                ) from error
            # The module may have registered the name itself, with the decorator.
            if key not in self._entries:
                self._entries[key] = entry
                self._places[key] = entry_point.value
            return


def _place_of(entry: object) -> str:
    try:
        file = inspect.getsourcefile(entry)  # type: ignore[arg-type]
        _, line = inspect.getsourcelines(entry)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', entry)}"
    return f"{file}:{line}"

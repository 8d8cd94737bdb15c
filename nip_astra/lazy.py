"""Names that a package offers and imports when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any


def lazy_exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Parameters
    ----------
    package : str
        The package's `__name__`.
    homes : Mapping[str, str]
        For each name, the module that defines it; after a colon what it is called there, where
        that is something else: `package.module:Class.Nested`.
    """

    def get(name: str) -> Any:
        if name in homes:
            module, _, path = homes[name].partition(":")
            return attrgetter(path or name)(import_module(module))
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names


_PROVIDED: dict[str, str] = {}


def provide(name: str, home: str) -> None:
    """Say where something stands that modules on floors below use, without importing it.

    Parameters
    ----------
    home : str
        `package.module:name`.
    """
    _PROVIDED[name] = home


def provided(name: str) -> Any:
    """What was provided under a name; imported when this is called."""
    module, _, path = _PROVIDED[name].partition(":")
    return attrgetter(path)(import_module(module))

"""Lazy exports of packages, imported on first use (PEP 562)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any


def import_extra(module: str, what: str, extra: str) -> Any:
    """Import a module of an optional package, for a feature that needs it.

    Raises
    ------
    MissingDependencyError
        When it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        # The package itself imports this module, and has its version without the errors.
        from nip_astra.errors import MissingDependencyError

        # That of the missing module, which another package may import.
        package = (error.name or module).partition(".")[0]
        raise MissingDependencyError.of(f"{what} ({error})", package, extra) from error


def lazy_exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

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


def exports_for_types(file: str) -> dict[str, str]:
    """Return the names that a package's file exports below `if TYPE_CHECKING:`, for `lazy_exports`.

    Those are imports with `as`, and assignments of an imported name or its attribute.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    blocks = [one for one in tree.body if isinstance(one, ast.If)]
    imported: dict[str, str] = {}
    exported: dict[str, str] = {}
    for node in (node for block in blocks for node in block.body):
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                own = one.asname in (None, one.name)
                imported[one.asname or one.name] = f"{node.module}{'' if own else f':{one.name}'}"
                if one.asname:
                    exported[one.asname] = imported[one.asname]
        elif isinstance(node, ast.Assign):
            path = ast.unparse(node.value)
            home = imported[path.partition(".")[0]]
            exported[ast.unparse(node.targets[0])] = f"{home.partition(':')[0]}:{path}"
    return dict(sorted(exported.items()))


class _Modules(MetaPathFinder, Loader):
    """Creates modules of names defined elsewhere; files of the package have priority."""

    def __init__(self, package: str, table: str) -> None:
        self.package, self._table = package, table

    @property
    def table(self) -> Mapping[str, Mapping[str, str]]:
        """Return the homes of names, by module."""
        module, _, name = self._table.partition(":")
        found: Mapping[str, Mapping[str, str]] = getattr(import_module(module), name)
        return found

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root, _, name = fullname.partition(f"{self.package}.")
        if root or not name or name not in self.table:
            return None
        is_package = any(other.startswith(f"{name}.") for other in self.table)
        return ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(f"{self.package}.")
        module.__doc__ = f"The names of `{name}`, defined elsewhere."
        homes = self.table[name]
        vars(module)["__all__"] = [*homes]
        vars(module)["__getattr__"], vars(module)["__dir__"] = lazy_exports(module.__name__, homes)


def lazy_modules(package: str, table: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose modules are a table, not files.

    Parameters
    ----------
    package : str
        The package's `__name__`.
    table : str
        `package.module:NAME` of a mapping: for each module below the package, by its dotted path,
        the homes of its names as `lazy_exports` takes them; those of the package itself under "".
    """
    modules = _Modules(package, table)
    sys.meta_path.append(modules)

    def get(name: str) -> Any:
        if name == "__all__":
            return [*modules.table[""]]
        return lazy_exports(package, modules.table[""])[0](name)

    return get, lambda: sorted({*vars(sys.modules[package]), *modules.table[""]})


_PROVIDED: dict[str, str] = {}


def provide(name: str, home: str) -> None:
    """Provide an object to lower layers without importing its module.

    Parameters
    ----------
    home : str
        `package.module:name`.
    """
    _PROVIDED[name] = home


def provided(name: str) -> Any:
    """Import and return the object provided under a name."""
    module, _, path = _PROVIDED[name].partition(":")
    return attrgetter(path)(import_module(module))

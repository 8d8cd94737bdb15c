"""A registry of tools, whose built-ins are modules of a package in a folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from nip_astra.built_ins import BuiltIn
from nip_astra.registry import ALL_REGISTRIES, Registry


class ToolType(StrEnum):
    HAMMER = "hammer"
    SAW = "saw"


def registering(name: str) -> str:
    """The text of a module that registers a tool."""
    return (
        "from nip_astra.registry import ALL_REGISTRIES\n"
        f"@ALL_REGISTRIES['tool'].register('{name}')\n"
        "class Tool:\n    pass\n"
    )


def write(path: Path, text: str) -> Path:
    """Write a module."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()
    return path


@contextmanager
def registry_of_tools(site: Path, patch: pytest.MonkeyPatch) -> Iterator[Registry[Any]]:
    """Make the registry within the block; imports from the folder are forgotten after it."""
    registries = dict(ALL_REGISTRIES)
    write(site / "toolbox" / "__init__.py", "")
    for name in ToolType:
        write(site / "toolbox" / f"{name}.py", registering(name))
    patch.syspath_prepend(site)
    yield Registry("tool", {name: BuiltIn(f"toolbox.{name}", "") for name in ToolType})
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(site.parent)):
            del sys.modules[name]
    ALL_REGISTRIES.clear()
    ALL_REGISTRIES.update(registries)

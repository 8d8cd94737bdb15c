"""The benchmarks' files, which belong to no package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.kit.command_line import plugins_forgotten_after
from tests.kit.documents import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a benchmark file; all are forgotten after a module's tests."""
    with plugins_forgotten_after(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").parent == FOLDER:
            del sys.modules[name]


@pytest.fixture(scope="module")
def benchmark(request: pytest.FixtureRequest, load: Callable[[str], ModuleType]) -> ModuleType:
    """The benchmark after which the test module is named."""
    return load(request.module.__name__.rpartition("test_")[2])

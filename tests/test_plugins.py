"""Plug-ins are loaded once, and a failed one leaves nothing behind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nip_astra import plugins
from nip_astra.errors import PluginError
from nip_astra.plugins import load_plugin, loaded_plugins, module_of
from nip_astra.registry import ALL_REGISTRIES, Registry
from tests.kit.messages import says

REGISTER = """from nip_astra.registry import ALL_REGISTRIES

@ALL_REGISTRIES["gadget"].register({name!r})
class Gadget:
    pass
"""


@pytest.fixture
def gadgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[Any]]:
    """A registry of kind `gadget`, with the built-in `lamp`; everything is undone afterwards."""
    before = set(sys.modules)
    site = tmp_path / "site"
    write(site / "gadget_house" / "__init__.py", "")
    write(site / "gadget_house" / "lamp.py", REGISTER.format(name="lamp"))
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(plugins, "_LOADED", {})
    monkeypatch.chdir(tmp_path)
    registries = dict(ALL_REGISTRIES)
    yield Registry("gadget", package="gadget_house", members=["lamp"])
    ALL_REGISTRIES.clear()
    ALL_REGISTRIES.update(registries)
    for name in set(sys.modules) - before:
        if name.startswith(("gadget_house", "nip_astra_plugin_", "neighbour", "kit")):
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()
    return path


def is_imported(path: Path) -> bool:
    return any(getattr(module, "__file__", None) == str(path) for module in sys.modules.values())


def failure_of(spec: str | Path) -> str:
    with pytest.raises(PluginError) as caught:
        load_plugin(spec)
    return str(caught.value)


def test_a_file_registers_its_names(gadgets: Registry[Any], tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", REGISTER.format(name="mine"))
    plugin = load_plugin(path)
    assert gadgets.get("mine") is module_of(plugin).Gadget
    assert gadgets.origin("mine") == f"{path}:3"
    assert (plugin.spec, plugin.path) == (str(path), path)
    assert len(plugin.sha256 or "") == 64
    (tmp_path / "folder").mkdir()
    assert load_plugin("folder/../mine.py") is load_plugin("mine.py") is plugin
    assert loaded_plugins() == [plugin]
    # A file of the same name in another folder is another plug-in.
    write(tmp_path / "there" / "mine.py", REGISTER.format(name="there"))
    there = load_plugin("mine.py", relative_to=tmp_path / "there")
    assert gadgets.names() == ["lamp", "mine", "there"]
    assert module_of(there) is not module_of(plugin)
    second = write(tmp_path / "second.py", REGISTER.format(name="mine"))
    assert says(failure_of(second), "line 3", f"{second}:3", f"{path}:3")
    path.write_text("x = 2\n")
    assert says(failure_of(path), path, "has changed", "new process")
    # A module is loaded by its name.
    write(tmp_path / "site" / "kit" / "__init__.py", "")
    write(tmp_path / "site" / "kit" / "mine.py", REGISTER.format(name="of_kit"))
    module = load_plugin("kit.mine")
    assert (module.spec, module.path, module.sha256) == ("kit.mine", None, None)
    assert gadgets.get("of_kit") is sys.modules["kit.mine"].Gadget
    assert load_plugin("kit.mine") is module


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        *((spec, ["neither", ".py"]) for spec in ("", "folder/mine", "my-module", "a..b")),
        ("nope.py", ["/nope.py", "No such file"]),
        ("no_such_module_here", ["ModuleNotFoundError", "no_such_module_here"]),
        ("kit_folder", ["__init__.py", "/site/kit_folder'"]),
    ],
)
def test_a_plugin_that_does_not_exist_is_refused(
    gadgets: Registry[Any], tmp_path: Path, spec: str, facts: list[str]
) -> None:
    write(tmp_path / "site" / "kit_folder" / "mine.py", REGISTER.format(name="mine"))
    assert says(failure_of(spec), spec, *facts)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (REGISTER.format(name="mine") + "\n\n1 / 0\n", ["line 8", "ZeroDivisionError"]),
        ("x = 1\ndef f(:\n", ["line 2", "SyntaxError"]),
        ("import neighbour\n", ["neighbour.py:1", "SyntaxError"]),
        ("import sys\nsys.exit(0)\n", ["line 2", "sys.exit"]),
        ("import beside\n", ["ModuleNotFoundError", "from .beside import"]),
        ("import nexrl.trainer\n", ["ModuleNotFoundError", "from nip_astra import"]),
        ("from nip_astra.registry import Registry\nRegistry('of_mine', package='x')\n1 / 0\n", []),
    ],
)
def test_a_failing_file_leaves_nothing_and_reports_line_and_cause(
    gadgets: Registry[Any], tmp_path: Path, text: str, facts: list[str]
) -> None:
    write(tmp_path / "site" / "neighbour.py", "def f(:\n")
    write(tmp_path / "beside.py", "x = 1\n")
    path = write(tmp_path / "mine.py", text)
    assert says(failure_of(path), path, *facts)
    assert gadgets.names() == ["lamp"]
    assert "of_mine" not in ALL_REGISTRIES
    assert not is_imported(path)
    assert loaded_plugins() == []
    path.write_text(REGISTER.format(name="mine"))
    load_plugin(path)
    assert gadgets.names() == ["lamp", "mine"]


def test_modules_that_a_failed_plugin_imported_are_as_before(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    write(tmp_path / "site" / "neighbour.py", "x = 1\n")
    write(tmp_path / "site" / "kit.py", REGISTER.format(name="helper"))
    write(tmp_path / "inner.py", REGISTER.format(name="inner"))
    text = (
        "import gadget_house.lamp, neighbour, kit\nfrom nip_astra.plugins import load_plugin\n"
        "load_plugin('inner.py')\nraise {}\n"
    )
    path = write(tmp_path / "mine.py", text.format("OSError"))
    failure_of(path)
    # Built-ins and libraries stay imported; what registered itself and inner plug-ins do not.
    assert gadgets.get("lamp") is sys.modules["gadget_house.lamp"].Gadget
    assert "neighbour" in sys.modules
    assert gadgets.names() == ["lamp"]
    assert loaded_plugins() == []
    # An interrupt goes through and leaves nothing.
    path.write_text(text.format("KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        load_plugin(path)
    assert gadgets.names() == ["lamp"]
    assert not is_imported(path)
    path.write_text("import kit\n")
    load_plugin(path)
    load_plugin("inner.py")
    assert gadgets.names() == ["helper", "inner", "lamp"]


def test_a_plugin_imports_the_files_beside_it(gadgets: Registry[Any], tmp_path: Path) -> None:
    write(tmp_path / "beside.py", "x = 1\n")
    plugin = load_plugin(write(tmp_path / "mine.py", "from .beside import x\n"))
    assert module_of(plugin).x == 1
    before = set(sys.modules)
    failure_of(write(tmp_path / "other.py", "from .beside import x\n1 / 0\n"))
    assert set(sys.modules) == before

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
    """A registry of kind `gadget`, with the built-in `lamp`; all is undone afterwards."""
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
    assert plugin.sha256 is not None
    assert len(plugin.sha256) == 64
    assert loaded_plugins() == [plugin]


def test_a_relative_path_is_taken_from_the_working_directory_or_a_given_folder(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    write(tmp_path / "here.py", REGISTER.format(name="here"))
    write(tmp_path / "there" / "mine.py", REGISTER.format(name="there"))
    load_plugin("here.py")
    load_plugin("mine.py", relative_to=tmp_path / "there")
    assert gadgets.names() == ["here", "lamp", "there"]


def test_the_same_file_is_imported_once_however_it_is_spelled(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "mine.py", REGISTER.format(name="mine"))
    (tmp_path / "folder").mkdir()
    assert load_plugin("folder/../mine.py") is load_plugin(path) is load_plugin("mine.py")
    assert len(loaded_plugins()) == 1


def test_two_files_of_one_name_and_text_are_two_plugins(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    first = load_plugin(write(tmp_path / "a" / "mine.py", "x = 1\n"))
    second = load_plugin(write(tmp_path / "b" / "mine.py", "x = 1\n"))
    assert module_of(first) is not module_of(second)


def test_a_file_that_changed_since_it_was_loaded_is_refused(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "mine.py", "x = 1\n")
    load_plugin(path)
    path.write_text("x = 2\n")
    assert says(failure_of(path), path, "has changed", "new process")


def test_a_module_is_loaded_by_its_name(gadgets: Registry[Any], tmp_path: Path) -> None:
    write(tmp_path / "site" / "kit" / "__init__.py", "")
    write(tmp_path / "site" / "kit" / "mine.py", REGISTER.format(name="mine"))
    plugin = load_plugin("kit.mine")
    assert (plugin.spec, plugin.path, plugin.sha256) == ("kit.mine", None, None)
    assert gadgets.get("mine") is sys.modules["kit.mine"].Gadget
    assert load_plugin("kit.mine") is plugin


def test_a_missing_file_is_named(gadgets: Registry[Any], tmp_path: Path) -> None:
    assert says(failure_of("nope.py"), "'nope.py'", tmp_path / "nope.py", "No such file", "path")


@pytest.mark.parametrize("spec", ["", "folder/mine", "my-module", "a..b"])
def test_what_is_neither_file_nor_module_is_refused(gadgets: Registry[Any], spec: str) -> None:
    assert says(failure_of(spec), repr(spec), "neither", ".py", "dotted name")


def test_a_missing_module_is_named(gadgets: Registry[Any]) -> None:
    text = failure_of("no_such_module_here")
    assert "the plug-in no_such_module_here failed: " in text
    assert "ModuleNotFoundError: No module named 'no_such_module_here'." in text


def test_a_failing_file_leaves_nothing_and_tells_line_and_cause(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "mine.py", REGISTER.format(name="mine") + "\n\n1 / 0\n")
    assert says(failure_of(path), path, "line 8", "ZeroDivisionError: division by zero")
    assert gadgets.names() == ["lamp"]
    assert not is_imported(path)
    assert loaded_plugins() == []
    path.write_text(REGISTER.format(name="mine"))
    load_plugin(path)
    assert gadgets.names() == ["lamp", "mine"]


def test_a_syntax_error_is_told_with_its_line(gadgets: Registry[Any], tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "x = 1\ndef f(:\n")
    assert f"the plug-in {path} failed at line 2: SyntaxError" in failure_of(path)


def test_a_syntax_error_in_another_file_is_told_with_that_file(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    other = write(tmp_path / "site" / "neighbour.py", "def f(:\n")
    text = failure_of(write(tmp_path / "mine.py", "import neighbour\n"))
    assert f"failed at {other}:1: SyntaxError" in text


def test_a_file_that_ends_the_program_is_a_failed_plugin(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    text = failure_of(write(tmp_path / "mine.py", "import sys\nsys.exit(0)\n"))
    assert "failed at line 2: it ends the program while it is imported (sys.exit)." in text


def test_an_interrupt_during_a_load_goes_through_and_leaves_nothing(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    text = REGISTER.format(name="mine") + "raise KeyboardInterrupt\n"
    path = write(tmp_path / "mine.py", text)
    with pytest.raises(KeyboardInterrupt):
        load_plugin(path)
    assert gadgets.names() == ["lamp"]
    assert not is_imported(path)


def test_a_name_that_is_taken_fails_the_plugin_with_both_places(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    load_plugin(write(tmp_path / "first.py", REGISTER.format(name="mine")))
    second = write(tmp_path / "second.py", REGISTER.format(name="mine"))
    text = failure_of(second)
    assert f"the plug-in {second} failed at line 3: " in text
    assert says(text, f"{second}:3", f"{tmp_path / 'first.py'}:3")
    assert gadgets.origin("mine") == f"{tmp_path / 'first.py'}:3"


def test_a_built_in_that_a_failed_plugin_imported_stays_found(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    failure_of(write(tmp_path / "mine.py", "import gadget_house.lamp\nraise OSError\n"))
    assert gadgets.get("lamp") is sys.modules["gadget_house.lamp"].Gadget


def test_a_module_that_a_failed_plugin_imported_can_register_again(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    write(tmp_path / "site" / "neighbour.py", REGISTER.format(name="helper"))
    path = write(tmp_path / "mine.py", "import neighbour\nraise OSError\n")
    failure_of(path)
    assert gadgets.names() == ["lamp"]
    path.write_text("import neighbour\n")
    load_plugin(path)
    assert gadgets.names() == ["helper", "lamp"]


def test_libraries_that_a_failed_plugin_imported_stay_imported(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    write(tmp_path / "site" / "neighbour.py", "x = 1\n")
    failure_of(write(tmp_path / "mine.py", "import neighbour\nraise OSError\n"))
    assert "neighbour" in sys.modules


def test_a_plugin_that_a_failed_one_loaded_is_forgotten_with_it(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    write(tmp_path / "inner.py", REGISTER.format(name="inner"))
    text = "from nip_astra.plugins import load_plugin\nload_plugin('inner.py')\nraise OSError\n"
    failure_of(write(tmp_path / "outer.py", text))
    assert loaded_plugins() == []
    load_plugin("inner.py")
    assert gadgets.names() == ["inner", "lamp"]


def test_a_registry_that_a_failed_plugin_made_is_gone(
    gadgets: Registry[Any], tmp_path: Path
) -> None:
    text = "from nip_astra.registry import Registry\nRegistry('kind_of_mine', package='x')\n1 / 0\n"
    failure_of(write(tmp_path / "mine.py", text))
    assert "kind_of_mine" not in ALL_REGISTRIES


def test_importing_a_neighbour_file_is_explained(gadgets: Registry[Any], tmp_path: Path) -> None:
    write(tmp_path / "besides.py", "x = 1\n")
    text = failure_of(write(tmp_path / "mine.py", "import besides\n"))
    assert "ModuleNotFoundError: No module named 'besides'." in text
    assert "Import a file beside the plug-in by `from .besides import ...`." in text


def test_a_plugin_imports_the_files_beside_it(gadgets: Registry[Any], tmp_path: Path) -> None:
    write(tmp_path / "beside.py", "x = 1\n")
    plugin = load_plugin(write(tmp_path / "mine.py", "from .beside import x\n"))
    assert module_of(plugin).x == 1
    write(tmp_path / "other.py", "from .beside import x\n1 / 0\n")
    before = set(sys.modules)
    failure_of(tmp_path / "other.py")
    assert set(sys.modules) == before

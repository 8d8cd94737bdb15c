"""Names are looked up, refused and suggested; nothing is overwritten silently."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import (
    ConfigurationError,
    DuplicateNameError,
    PluginError,
    UnknownNameError,
)
from nip_astra.registry import ALL_REGISTRIES, Registry
from nip_astra.trainers.registry import TRAINERS, register_trainer
from tests.kit.messages import says

MakeModule = Callable[[str, str], Path]


class ToolType(StrEnum):
    HAMMER = "hammer"
    SAW = "saw"


class Second:
    """Is registered under the name of another."""


@pytest.fixture
def tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Registry[Any], MakeModule]]:
    """A registry of kind `tool` whose built-ins are modules of the package `toolbox`."""
    before_modules, before_registries = set(sys.modules), dict(ALL_REGISTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "toolbox").mkdir()

    def make_module(name: str, text: str) -> Path:
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    make_module("toolbox.__init__", "")
    make_module("toolbox.hammer", register_line("hammer"))
    make_module("toolbox.saw", register_line("saw"))
    yield Registry("tool", package="toolbox", members=ToolType), make_module
    for name in set(sys.modules) - before_modules:
        if name.partition(".")[0] in ("toolbox", "stranger", "other"):
            del sys.modules[name]
    ALL_REGISTRIES.clear()
    ALL_REGISTRIES.update(before_registries)


def register_line(name: str) -> str:
    return (
        "from nip_astra.registry import ALL_REGISTRIES\n"
        f"@ALL_REGISTRIES['tool'].register('{name}')\n"
        "class Tool:\n    pass\n"
    )


def install(site: Path, package: str, **entry_points: str) -> None:
    """Have an installed package with entry points in the group of tools."""
    folder = site / f"{package}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[nip_astra.tools]", *lines, ""]))
    importlib.invalidate_caches()


def test_a_built_in_is_listed_and_taken_before_it_is_imported_on_first_use(tools: Any) -> None:
    registry, _ = tools
    assert ALL_REGISTRIES["tool"] is registry
    assert registry.entry_point_group == "nip_astra.tools"
    assert registry.names() == ["hammer", "saw"]
    assert "toolbox.hammer" not in sys.modules
    assert registry.get(ToolType.HAMMER).__module__ == "toolbox.hammer"
    assert registry.get("hammer") is registry.get(ToolType.HAMMER)
    assert "toolbox.saw" not in sys.modules
    assert registry.origin("hammer") == registry.origin("saw") == "built-in"
    assert registry.is_built_in("saw")
    with pytest.raises(DuplicateNameError, match=r"toolbox\.saw"):
        registry.register("saw")(object)
    assert registry.get("saw").__module__ == "toolbox.saw"
    for action in (registry.get, registry.origin, registry.forget):
        with pytest.raises(UnknownNameError):
            action("hamer")


def test_a_registration_has_its_place_until_it_is_forgotten_or_restored(tools: Any) -> None:
    registry, _ = tools
    snapshot = registry.snapshot()
    for remove in (lambda: registry.forget("drill"), lambda: registry.restore(snapshot)):
        assert registry.register("drill")(ToolType) is ToolType
        assert registry.origin("drill").startswith(f"{__file__}:")
        with pytest.raises(DuplicateNameError) as caught:
            registry.register("drill")(Second)
        places = caught.value.first, caught.value.second
        assert all(place.startswith(f"{__file__}:") for place in places)
        assert places[0] != places[1]
        remove()
        assert registry.names() == ["hammer", "saw"]
    registry.register("drill")(int)
    assert registry.get("drill") is int


def test_a_cell_that_is_run_again_replaces_its_definition(tools: Any) -> None:
    registry, _ = tools

    def defined(name: str) -> type:
        return type(name, (), {"__module__": "__main__"})

    first, again = defined("Mine"), defined("Mine")
    registry.register("plane")(first)
    registry.register("plane")(again)
    assert registry.get("plane") is again
    with pytest.raises(DuplicateNameError):
        registry.register("plane")(defined("Other"))


def test_built_ins_may_be_in_a_folder_or_in_one_module_whose_import_can_be_tried_again(
    tools: Any,
) -> None:
    registry, make_module = tools
    make_module("toolbox.hammer", "").unlink()
    make_module("toolbox.hammer.__init__", "from toolbox.hammer import head")
    make_module("toolbox.hammer.head", register_line("hammer"))
    assert registry.get("hammer").__module__ == "toolbox.hammer.head"
    registry = Registry(
        "tool", package="toolbox", members=ToolType, modules=dict.fromkeys(ToolType, "chest")
    )
    text = register_line("hammer") + register_line("saw")
    path = make_module("toolbox.chest", text + "raise OSError('no such drawer')\n")
    with pytest.raises(OSError, match="no such drawer"):
        registry.get("saw")
    path.write_text(text)
    assert {registry.get(name).__module__ for name in ToolType} == {"toolbox.chest"}
    assert registry.get("saw") is not registry.get("hammer")
    assert registry.module_of("saw") == "toolbox.chest"


def test_a_member_without_a_module_or_whose_module_does_not_register_it(tools: Any) -> None:
    registry, make_module = tools
    path = make_module("toolbox.saw", "")
    with pytest.raises(PluginError, match=r"'saw'.*toolbox\.saw"):
        registry.get("saw")
    path.unlink()
    with pytest.raises(PluginError, match=r"'saw'.*toolbox\.saw"):
        registry.get("saw")
    make_module("toolbox.saw", "import no_such_module\n# of another length\n")
    sys.modules.pop("toolbox.saw")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.get("saw")


@pytest.mark.parametrize("wrong", [int, "a trainer", lambda: None])
def test_only_trainers_are_registered_as_trainers(wrong: Any) -> None:
    with pytest.raises(PluginError, match=r"'own_trainer'.*Trainer"):
        register_trainer("own_trainer")(wrong)
    assert "own_trainer" not in TRAINERS.names()


@pytest.mark.parametrize("name", ["", "my-tool", "3d", "a.b", "a b"])
def test_a_name_that_cannot_be_a_section_is_refused(tools: Any, name: str) -> None:
    registry, _ = tools
    with pytest.raises(ConfigurationError, match=repr(name)):
        registry.register(name)


@pytest.mark.parametrize(
    ("text", "name"), [("class Plane:\n    pass\n", "Plane"), (register_line("plane"), "Tool")]
)
@pytest.mark.parametrize("is_imported", [False, True])
def test_an_entry_point_is_listed_unimported_and_may_register_itself(
    tools: Any, tmp_path: Path, text: str, name: str, is_imported: bool
) -> None:
    registry, make_module = tools
    make_module("stranger.mine", text)
    install(tmp_path, "stranger-tools", plane=f"stranger.mine:{name}")
    assert registry.names() == ["hammer", "plane", "saw"]
    assert registry.origin("plane") == "entry point of stranger-tools"
    assert "stranger.mine" not in sys.modules
    with pytest.raises(DuplicateNameError, match=rf"'stranger\.mine:{name}' of stranger-tools"):
        registry.register("plane")(ToolType)
    if is_imported:
        importlib.import_module("stranger.mine")
    assert (
        registry.get("plane")
        is registry.get("plane")
        is getattr(sys.modules["stranger.mine"], name)
    )


def test_a_broken_or_ambiguous_entry_point_is_reported_with_its_packages(
    tools: Any, tmp_path: Path
) -> None:
    registry, make_module = tools
    make_module("stranger.mine", "1 / 0\n")
    install(tmp_path, "stranger-tools", plane="stranger.mine:Plane")
    with pytest.raises(PluginError) as caught:
        registry.get("plane")
    facts = ("tool 'plane'", "'stranger.mine:Plane'", "stranger-tools", "ZeroDivisionError")
    assert says(caught.value, *facts)
    assert registry.get("saw") is not None
    install(tmp_path, "other-tools", plane="other.mine:Plane")
    assert registry.names() == ["hammer", "plane", "saw"]
    with pytest.raises(DuplicateNameError) as ambiguous:
        registry.get("plane")
    assert says(ambiguous.value, "stranger-tools", "other-tools")

"""Names, enums and files of built-ins agree, in every registry."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nip_astra as na
from nip_astra.built_ins import KINDS, BuiltIn
from nip_astra.errors import ConfigurationError, DuplicateNameError, PluginError, UnknownNameError
from nip_astra.parameters import types
from nip_astra.parameters.parameters_base import PolymorphicParameters, SubParameters
from nip_astra.registry import ALL_REGISTRIES, Registry, find_registry
from tests.kit.documents import ROOT
from tests.kit.messages import says
from tests.kit.registries import ToolType, registering, registry_of_tools, write

for _kind in KINDS:
    find_registry(_kind)


class Kind(NamedTuple):
    """A kind of component: its registry, names, base class and decorator."""

    registry: Registry[Any]
    names: type[StrEnum]
    base: type
    decorator: Any


ENUMERATED = {
    kind: Kind(ALL_REGISTRIES[kind], names, base, getattr(na, f"register_{kind}"))
    for kind, names, base in (
        ("trainer", types.TrainerType, na.Trainer),
        ("scenario", types.ScenarioType, na.Scenario),
        ("scorer", types.ScorerType, na.Scorer),
        ("language_model", types.LanguageModelType, na.LanguageModel),
        ("chat_model", types.ChatModelType, na.ChatModel),
        ("reward_term", types.RewardTermType, na.RewardTerm),
        ("protocol_handler", types.InteractionProtocolType, na.ProtocolHandler),
        ("message_regressor", types.MessageRegressorType, na.MessageRegressor),
        ("pretrained_model", types.PretrainedModelType, na.PretrainedModel),
        ("task", types.TaskType, na.Task),
        ("rollout_analyser", types.RolloutAnalyserType, na.RolloutAnalyser),
        ("training_service", types.TrainingServiceType, na.TrainingService),
    )
}
OF_FUNCTIONS = (
    *("policy_loss", "advantage", "optimizer", "schedule", "reward", "tool"),
    *("sweep_sampler", "pruner", "launcher"),
)
"""Registries whose built-ins stand in one module and have no enum."""
OTHERS = {"call_form", "evaluation_family", "export_format", "metric", "tracker"}
"""Have neither parameters nor an enum; see tests of message formats, evaluation and tracking."""
OF_TYPES = (
    *("scorer", "language_model", "chat_model", "reward_term", "message_regressor"),
    *("pretrained_model", "rollout_analyser"),
)
"""Kinds whose parameters have a `_type`."""
MEMBERS = [(kind, str(member)) for kind, one in ENUMERATED.items() for member in one.names]


def test_every_registry_and_every_enum_of_names_is_checked_here() -> None:
    enums = [value for value in vars(types).values() if inspect.isclass(value)]
    of_names = {enum for enum in enums if issubclass(enum, StrEnum) and enum is not StrEnum}
    assert of_names == {item.names for item in ENUMERATED.values()}
    assert set(KINDS) == {*ENUMERATED, *OF_FUNCTIONS, *OTHERS}


@pytest.mark.parametrize("kind", OF_FUNCTIONS)
def test_every_built_in_function_resolves_and_has_a_docstring(kind: str) -> None:
    registry = ALL_REGISTRIES[kind]
    for name in registry.names():
        assert registry.is_built_in(name)
        assert (inspect.getdoc(registry.get(name)) or "").partition("\n")[0].endswith(".")
    with pytest.raises(DuplicateNameError):
        registry.register(registry.names()[0])(lambda: None)


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_every_member_resolves_to_a_documented_class_with_its_parameters(
    kind: str, name: str
) -> None:
    registry, _, base, _ = ENUMERATED[kind]
    component = registry.get(name)
    assert issubclass(component, (base, na.Environment))
    assert not inspect.isabstract(component)
    assert component.__module__ == registry.module_of(name)
    first = (inspect.getdoc(component) or "").partition("\n")[0]
    assert first.endswith("."), "its docstring begins with a sentence, which `list` shows"
    assert registry.origin(name) == "built-in"
    if kind == "training_service":
        return  # Their parameters are a single group, `train_service`.
    assert issubclass(component.Parameters, SubParameters)
    assert component.Parameters.__doc__
    if issubclass(component.Parameters, PolymorphicParameters):
        assert component.Parameters.type_name == name


EACH = pytest.mark.parametrize("kind", ENUMERATED.values(), ids=ENUMERATED)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_shows_each_built_in_by_the_first_line_of_its_docstring(kind: str) -> None:
    registry = find_registry(kind)
    assert [name for name in registry.names() if registry.is_built_in(name)] == sorted(
        KINDS[kind].built_ins()
    )
    for name, built_in in KINDS[kind].built_ins().items():
        docstring = inspect.getdoc(registry.get(name)) or ""
        assert registry.summary(name) == built_in.summary == docstring.partition("\n")[0]


@EACH
def test_every_name_that_a_file_registers_has_a_documented_member(kind: Kind) -> None:
    name, enum = kind.registry.kind, kind.names
    assert set(enum) <= set(kind.registry.names())
    decorators = [f"register_{name}(", *(["register_environment("] if name == "task" else [])]
    registered = []
    for path in (ROOT / "nip_astra").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(f"@{one}" in text for one in decorators):
            continue
        classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
        calls = [ast.unparse(item) for node in classes for item in node.decorator_list]
        registered += [
            call.partition("(")[2] for call in calls if call.startswith(tuple(decorators))
        ]
    assert sorted(registered) == sorted(f"{enum.__name__}.{m.name})" for m in enum)
    body = ast.parse(inspect.getsource(enum)).body[0].body
    followers = [
        follower
        for node, follower in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.Assign)
    ]
    assert len(followers) == len(enum)
    assert all(isinstance(getattr(one, "value", None), ast.Constant) for one in followers)


@EACH
def test_an_unknown_name_is_refused_with_the_nearest_and_all_names(kind: Kind) -> None:
    registry, nearest = kind.registry, str(next(iter(kind.names)))
    misspelt = f"{nearest.upper().replace('_', '-')}x"
    for wrong, suggestions in ((misspelt, [nearest]), ("qqqq", [])):
        with pytest.raises(UnknownNameError) as caught:
            registry.get(wrong)
        error = caught.value
        assert (error.kind, error.name, error.known) == (registry.kind, wrong, registry.names())
        assert error.suggestions[:1] == suggestions
        assert "--plugin" in str(error)


def subclass_of(base: type) -> type:
    return type("Mine", (base,), {"__doc__": "Mine.", "__module__": __name__})


@pytest.mark.usefixtures("no_plugins_left")
@EACH
def test_a_shipped_name_cannot_be_taken_and_another_needs_no_member(kind: Kind) -> None:
    registry, _, base, decorator = kind
    name, mine = registry.names()[0], subclass_of(base)
    shipped = registry.get(name)
    with pytest.raises(DuplicateNameError) as caught:
        decorator(name)(mine)
    assert (caught.value.kind, caught.value.name) == (registry.kind, name)
    assert f"{registry.module_of(name).rpartition('.')[2]}.py:" in caught.value.first
    assert registry.get(name) is shipped
    assert decorator("of_my_own")(mine) is mine
    assert registry.get("of_my_own") is mine
    assert "of_my_own" in registry.names()
    with pytest.raises(DuplicateNameError, match="'of_my_own'"):
        decorator("of_my_own")(subclass_of(base))


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize("kind", OF_TYPES)
def test_a_kind_that_inherits_its_parameters_leaves_those_of_its_parent_alone(kind: str) -> None:
    registry, names, _, decorator = ENUMERATED[kind]
    name = str(next(iter(names)))
    parent = registry.get(name)
    mine = decorator("of_my_own")(subclass_of(parent))
    assert (parent.Parameters.type_name, mine.Parameters.type_name) == (name, "of_my_own")


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize("base", [object, na.SubParameters])
@pytest.mark.parametrize("kind", OF_TYPES)
def test_parameters_of_a_kind_that_do_not_extend_those_of_its_base_are_refused(
    kind: str, base: type
) -> None:
    registry, _, parent, decorator = ENUMERATED[kind]
    mine = subclass_of(parent)
    mine.Parameters = type("Parameters", (base,), {})  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"Parameters of 'of_my_own'.*\(Base\.Parameters"):
        decorator("of_my_own")(mine)
    assert "of_my_own" not in registry.names()


@pytest.mark.usefixtures("no_plugins_left")
def test_plain_parameters_of_a_trainer_are_refused() -> None:
    plain = type("Parameters", (), {})
    na.register_trainer("of_my_own")(type("Mine", (na.Trainer,), {"Parameters": plain}))
    with pytest.raises(ConfigurationError, match=r"Parameters of 'of_my_own'.*SubParameters"):
        na.resolve_experiment(trainer="of_my_own", scenario="pig_latin")


# ---- registries in general


class First:
    """Has a name."""


class Second:
    """Is registered under the name of another."""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[Any]]:
    with registry_of_tools(tmp_path, monkeypatch) as tools:
        yield tools


def install(site: Path, package: str, **entry_points: str) -> None:
    """Have an installed package with entry points in the group of tools."""
    folder = site / f"{package}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[nip_astra.tools]", *lines, ""]))
    importlib.invalidate_caches()


def test_a_built_in_is_listed_and_taken_before_it_is_imported_on_first_use(registry: Any) -> None:
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


def test_a_registration_has_its_place_until_it_is_forgotten_or_restored(registry: Any) -> None:
    snapshot = registry.snapshot()
    for remove in (lambda: registry.forget("drill"), lambda: registry.restore(snapshot)):
        assert registry.register("drill")(First) is First
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


def test_a_cell_that_is_run_again_replaces_its_definition(registry: Any) -> None:
    def defined(name: str) -> type:
        return type(name, (), {"__module__": "__main__"})

    first, again = defined("Mine"), defined("Mine")
    registry.register("plane")(first)
    registry.register("plane")(again)
    assert registry.get("plane") is again
    with pytest.raises(DuplicateNameError):
        registry.register("plane")(defined("Other"))


def test_built_ins_may_be_in_a_folder_or_in_one_module_whose_import_can_be_tried_again(
    registry: Any, tmp_path: Path
) -> None:
    write(tmp_path / "toolbox/hammer.py", "").unlink()
    write(tmp_path / "toolbox/hammer/__init__.py", "from toolbox.hammer import head")
    write(tmp_path / "toolbox/hammer/head.py", registering("hammer"))
    assert registry.get("hammer").__module__ == "toolbox.hammer.head"
    registry = Registry("tool", dict.fromkeys(ToolType, BuiltIn("toolbox.chest", "")))
    text = registering("hammer") + registering("saw")
    path = write(tmp_path / "toolbox/chest.py", text + "raise OSError('no such drawer')\n")
    with pytest.raises(OSError, match="no such drawer"):
        registry.get("saw")
    path.write_text(text)
    assert {registry.get(name).__module__ for name in ToolType} == {"toolbox.chest"}
    assert registry.get("saw") is not registry.get("hammer")
    assert registry.module_of("saw") == "toolbox.chest"


def test_a_member_without_a_module_or_whose_module_does_not_register_it(
    registry: Any, tmp_path: Path
) -> None:
    path = tmp_path / "toolbox/saw.py"
    for make in (path.unlink, lambda: write(path, "")):
        make()
        with pytest.raises(PluginError, match=r"'saw'.*toolbox\.saw"):
            registry.get("saw")
    write(tmp_path / "toolbox/saw.py", "import no_such_module\n# of another length\n")
    sys.modules.pop("toolbox.saw")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.get("saw")


def test_other_objects_as_trainers_and_names_that_cannot_be_a_section_are_refused(
    registry: Any,
) -> None:
    for wrong in (int, "a trainer", lambda: None):
        with pytest.raises(PluginError, match=r"'own_trainer'.*Trainer"):
            na.register_trainer("own_trainer")(wrong)
    assert "own_trainer" not in ALL_REGISTRIES["trainer"].names()
    for name in ("", "my-tool", "3d", "a.b", "a b"):
        with pytest.raises(ConfigurationError, match=repr(name)):
            registry.register(name)


@pytest.mark.parametrize(
    ("text", "name"), [("class Plane:\n    pass\n", "Plane"), (registering("plane"), "Tool")]
)
@pytest.mark.parametrize("is_imported", [False, True])
def test_an_entry_point_is_listed_unimported_and_may_register_itself(
    registry: Any, tmp_path: Path, text: str, name: str, is_imported: bool
) -> None:
    write(tmp_path / "stranger/mine.py", text)
    install(tmp_path, "stranger-tools", plane=f"stranger.mine:{name}")
    assert registry.names() == ["hammer", "plane", "saw"]
    assert registry.origin("plane") == "entry point of stranger-tools"
    assert "stranger.mine" not in sys.modules
    with pytest.raises(DuplicateNameError, match=rf"'stranger\.mine:{name}' of stranger-tools"):
        registry.register("plane")(ToolType)
    if is_imported:
        importlib.import_module("stranger.mine")
    plane = registry.get("plane")
    assert plane is registry.get("plane") is getattr(sys.modules["stranger.mine"], name)


def test_a_broken_or_ambiguous_entry_point_is_reported_with_its_packages(
    registry: Any, tmp_path: Path
) -> None:
    write(tmp_path / "stranger/mine.py", "1 / 0\n")
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

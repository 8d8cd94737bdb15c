"""Names, enums and files of built-ins agree, in every registry."""

from __future__ import annotations

import ast
import importlib
import inspect
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nip_astra as na
from nip_astra.errors import DuplicateNameError, UnknownNameError
from nip_astra.overview import registry_homes
from nip_astra.parameters import types
from nip_astra.parameters.parameters_base import PolymorphicParameters, SubParameters
from nip_astra.registry import ALL_REGISTRIES, Registry

for _home in registry_homes().values():
    importlib.import_module(_home)


class Kind(NamedTuple):
    """A kind of component: its registry, names, base class and decorator."""

    registry: Registry[Any]
    names: type[StrEnum]
    base: type
    decorator: Any


KINDS = {
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
OTHERS = {"evaluation_family", "export_format", "metric", "tracker"}
"""Have neither parameters nor an enum; see tests of evaluation and tracking."""
OF_TYPES = (
    *("scorer", "language_model", "chat_model", "reward_term", "message_regressor"),
    *("pretrained_model", "rollout_analyser"),
)
"""Kinds whose parameters have a `_type`."""
MEMBERS = [(kind, str(member)) for kind, one in KINDS.items() for member in one.names]


def test_every_registry_and_every_enum_of_names_is_checked_here() -> None:
    enums = [value for value in vars(types).values() if inspect.isclass(value)]
    of_names = {enum for enum in enums if issubclass(enum, StrEnum) and enum is not StrEnum}
    assert of_names == {item.names for item in KINDS.values()}
    shipped = {kind for kind, r in ALL_REGISTRIES.items() if r.package.startswith("nip_astra.")}
    assert shipped == {*KINDS, *OF_FUNCTIONS, *OTHERS}


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
    registry, _, base, _ = KINDS[kind]
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


EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@EACH
def test_every_name_that_a_file_registers_has_a_documented_member(kind: Kind) -> None:
    name, enum = kind.registry.kind, kind.names
    assert set(enum) <= set(kind.registry.names())
    decorators = [f"register_{name}(", *(["register_environment("] if name == "task" else [])]
    registered = []
    package = importlib.import_module(kind.registry.package)
    for path in Path(next(iter(package.__path__))).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(f"@{one}" in text for one in decorators):
            continue
        classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
        calls = [ast.unparse(item) for node in classes for item in node.decorator_list]
        registered += [
            call.partition("(")[2] for call in calls if call.startswith(tuple(decorators))
        ]
    assert sorted(registered) == sorted(f"{enum.__name__}.{m.name})" for m in enum)
    body = ast.parse(inspect.getsource(enum)).body[0].body  # type: ignore[attr-defined]
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
    with pytest.raises(DuplicateNameError) as caught:
        decorator(name)(mine)
    assert (caught.value.kind, caught.value.name) == (registry.kind, name)
    assert f"{registry.module_of(name).rpartition('.')[2]}.py:" in caught.value.first
    assert registry.get(name) is not mine
    assert decorator("of_my_own")(mine) is mine
    assert registry.get("of_my_own") is mine
    assert "of_my_own" in registry.names()
    with pytest.raises(DuplicateNameError, match="'of_my_own'"):
        decorator("of_my_own")(subclass_of(base))


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize("kind", OF_TYPES)
def test_a_kind_that_inherits_its_parameters_leaves_those_of_its_parent_alone(kind: str) -> None:
    registry, names, _, decorator = KINDS[kind]
    name = str(next(iter(names)))
    parent = registry.get(name)
    mine = decorator("of_my_own")(subclass_of(parent))
    assert (parent.Parameters.type_name, mine.Parameters.type_name) == (name, "of_my_own")

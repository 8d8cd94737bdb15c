"""Names, enums and files of what ships agree, in every registry."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import DuplicateNameError, UnknownNameError
from nip_astra.language_models.base import LANGUAGE_MODELS, LanguageModel, register_language_model
from nip_astra.language_models.services.chat import CHAT_MODELS, ChatModel, register_chat_model
from nip_astra.language_models.services.training import (
    TRAINING_SERVICES,
    TrainingService,
    register_training_service,
)
from nip_astra.message_regressors.base import MessageRegressor, register_message_regressor
from nip_astra.parameters import types
from nip_astra.parameters.parameters_base import PolymorphicParameters, SubParameters
from nip_astra.parameters.trainers import MESSAGE_REGRESSORS
from nip_astra.parameters.training import OPTIMIZERS, SCHEDULES
from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.protocols.registry import PROTOCOL_HANDLERS, register_protocol_handler
from nip_astra.registry import ALL_REGISTRIES, Registry
from nip_astra.reward_terms.base import REWARD_TERMS, RewardTerm, register_reward_term
from nip_astra.rl_objectives.registry import ADVANTAGES, POLICY_LOSSES
from nip_astra.scenario_base.tasks.base import TASKS, Environment, Task, register_task
from nip_astra.scenario_base.tasks.rewards import REWARDS
from nip_astra.scenario_base.tasks.tools import TOOLS
from nip_astra.scenario_base.text.analysers import (
    ROLLOUT_ANALYSERS,
    RolloutAnalyser,
    register_rollout_analyser,
)
from nip_astra.scenarios.images.pretrained import (
    PRETRAINED_MODELS,
    PretrainedModel,
    register_pretrained_model,
)
from nip_astra.scenarios.registry import SCENARIOS, Scenario, register_scenario
from nip_astra.scorers.base import SCORERS, Scorer, register_scorer
from nip_astra.sweep.runner import LAUNCHERS
from nip_astra.sweep.search import PRUNERS, SWEEP_SAMPLERS
from nip_astra.trainers.registry import TRAINERS, register_trainer
from nip_astra.trainers.trainer_base import Trainer

ENUMS: dict[str, type[StrEnum]] = {
    "trainer": types.TrainerType,
    "scenario": types.ScenarioType,
    "scorer": types.ScorerType,
    "language_model": types.LanguageModelType,
    "chat_model": types.ChatModelType,
    "reward_term": types.RewardTermType,
    "protocol_handler": types.InteractionProtocolType,
    "message_regressor": types.MessageRegressorType,
    "pretrained_model": types.PretrainedModelType,
    "task": types.TaskType,
    "rollout_analyser": types.RolloutAnalyserType,
    "training_service": types.TrainingServiceType,
}
BASES: dict[str, type] = {
    "trainer": Trainer,
    "scenario": Scenario,
    "scorer": Scorer,
    "language_model": LanguageModel,
    "chat_model": ChatModel,
    "reward_term": RewardTerm,
    "protocol_handler": ProtocolHandler,
    "message_regressor": MessageRegressor,
    "pretrained_model": PretrainedModel,
    "task": Task,
    "rollout_analyser": RolloutAnalyser,
    "training_service": TrainingService,
}
DECORATORS: dict[str, Any] = {
    "trainer": register_trainer,
    "scenario": register_scenario,
    "scorer": register_scorer,
    "language_model": register_language_model,
    "chat_model": register_chat_model,
    "reward_term": register_reward_term,
    "protocol_handler": register_protocol_handler,
    "message_regressor": register_message_regressor,
    "pretrained_model": register_pretrained_model,
    "task": register_task,
    "rollout_analyser": register_rollout_analyser,
    "training_service": register_training_service,
}
REGISTRIES: dict[str, Registry[Any]] = {
    "trainer": TRAINERS,
    "scenario": SCENARIOS,
    "scorer": SCORERS,
    "language_model": LANGUAGE_MODELS,
    "chat_model": CHAT_MODELS,
    "reward_term": REWARD_TERMS,
    "protocol_handler": PROTOCOL_HANDLERS,
    "message_regressor": MESSAGE_REGRESSORS,
    "pretrained_model": PRETRAINED_MODELS,
    "task": TASKS,
    "rollout_analyser": ROLLOUT_ANALYSERS,
    "training_service": TRAINING_SERVICES,
}
OF_EVALUATIONS = {"evaluation_family", "export_format", "metric"}
"""Have neither parameters nor an enum; see tests/evaluation/test_families.py."""
KINDS = sorted(REGISTRIES)
OF_FUNCTIONS = {
    "policy_loss": POLICY_LOSSES,
    "advantage": ADVANTAGES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "reward": REWARDS,
    "tool": TOOLS,
    "sweep_sampler": SWEEP_SAMPLERS,
    "pruner": PRUNERS,
    "launcher": LAUNCHERS,
}
"""Registries whose built-ins stand in one module and have no enum."""
MEMBERS = [(kind, str(member)) for kind, enum in ENUMS.items() for member in enum]


@pytest.fixture
def _restored() -> Iterator[None]:
    for kind, name in MEMBERS:
        REGISTRIES[kind].get(name)
    snapshots = {kind: registry.snapshot() for kind, registry in REGISTRIES.items()}
    yield
    for kind, registry in REGISTRIES.items():
        registry.restore(snapshots[kind])


def test_every_registry_and_every_enum_of_names_is_checked_here() -> None:
    enums = [value for value in vars(types).values() if inspect.isclass(value)]
    of_names = {enum for enum in enums if issubclass(enum, StrEnum) and enum is not StrEnum}
    assert of_names == set(ENUMS.values())
    shipped = {kind for kind, r in ALL_REGISTRIES.items() if r.package.startswith("nip_astra.")}
    # A tracker has no parameters and no enum; tests/tracking/test_tracker.py checks its registry.
    assert shipped - OF_EVALUATIONS == {*REGISTRIES, *OF_FUNCTIONS, "tracker"}


@pytest.mark.parametrize("kind", OF_FUNCTIONS)
def test_every_built_in_function_resolves_and_has_a_docstring(kind: str) -> None:
    registry = OF_FUNCTIONS[kind]
    for name in registry.names():
        assert registry.is_built_in(name)
        assert (inspect.getdoc(registry.get(name)) or "").partition("\n")[0].endswith(".")
    with pytest.raises(DuplicateNameError):
        registry.register(registry.names()[0])(lambda: None)


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_every_member_resolves_to_a_documented_class(kind: str, name: str) -> None:
    found = REGISTRIES[kind].get(name)
    assert issubclass(found, (BASES[kind], Environment))
    assert not inspect.isabstract(found)
    assert found.__module__ == REGISTRIES[kind].module_of(name)
    first = (inspect.getdoc(found) or "").partition("\n")[0]
    assert first.endswith("."), "its docstring begins with a sentence, which `list` shows"
    assert REGISTRIES[kind].origin(name) == "built-in"


@pytest.mark.parametrize(
    # Those of training services are one group, `train_service`.
    ("kind", "name"),
    [member for member in MEMBERS if member[0] != "training_service"],
)
def test_every_member_has_parameters_of_its_own(kind: str, name: str) -> None:
    parameters = REGISTRIES[kind].get(name).Parameters
    assert issubclass(parameters, SubParameters)
    assert parameters.__doc__
    if issubclass(parameters, PolymorphicParameters):
        assert parameters.type_name == name


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_is_listed(kind: str) -> None:
    assert {str(member) for member in ENUMS[kind]} <= set(REGISTRIES[kind].names())


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_that_a_file_registers_has_a_member(kind: str) -> None:
    decorators = [f"register_{kind}(", *(["register_environment("] if kind == "task" else [])]
    registered = []
    package = importlib.import_module(REGISTRIES[kind].package)
    for path in Path(next(iter(package.__path__))).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(f"@{one}" in text for one in decorators):
            continue
        classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
        calls = [ast.unparse(item) for node in classes for item in node.decorator_list]
        registered += [
            call.partition("(")[2] for call in calls if call.startswith(tuple(decorators))
        ]
    enum = ENUMS[kind]
    assert sorted(registered) == sorted(f"{enum.__name__}.{m.name})" for m in enum)


@pytest.mark.parametrize("kind", KINDS)
def test_every_member_of_an_enum_is_documented(kind: str) -> None:
    body = ast.parse(inspect.getsource(ENUMS[kind])).body[0].body  # type: ignore[attr-defined]
    after = {
        ast.unparse(node.targets[0]): follower
        for node, follower in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.Assign)
    }
    assert len(after) == len(ENUMS[kind])
    for name, follower in after.items():
        assert isinstance(follower, ast.Expr), f"{name} needs a docstring under it"
        assert isinstance(follower.value, ast.Constant)
        assert isinstance(follower.value.value, str)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_name_is_told_with_the_nearest_and_all_names(kind: str) -> None:
    known = REGISTRIES[kind].names()
    words = kind.replace("_", " ")
    wrong = f"{str(next(iter(ENUMS[kind]))).upper().replace('_', '-')}x"
    with pytest.raises(UnknownNameError) as caught:
        REGISTRIES[kind].get(wrong)
    nearest = str(next(iter(ENUMS[kind])))
    assert str(caught.value).startswith(
        f"unknown {words} {wrong!r}. Did you mean {nearest!r}? Known {words}s: {', '.join(known)}. "
    )
    assert "--plugin path/to/file.py" in str(caught.value)
    with pytest.raises(UnknownNameError) as caught:
        REGISTRIES[kind].get("qqqq")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_what_ships_cannot_be_taken(kind: str) -> None:
    name = REGISTRIES[kind].names()[0]
    mine = type("Mine", (BASES[kind],), {"__doc__": "Mine.", "__module__": __name__})
    with pytest.raises(DuplicateNameError) as caught:
        DECORATORS[kind](name)(mine)
    assert f"the {kind.replace('_', ' ')} {name!r}" in str(caught.value)
    assert f"{REGISTRIES[kind].module_of(name).rpartition('.')[2]}.py:" in str(caught.value)
    assert REGISTRIES[kind].get(name) is not mine


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_of_ones_own_needs_no_member(kind: str) -> None:
    mine = type("Mine", (BASES[kind],), {"__doc__": "Mine.", "__module__": __name__})
    assert DECORATORS[kind]("of_my_own")(mine) is mine
    assert REGISTRIES[kind].get("of_my_own") is mine
    assert "of_my_own" in REGISTRIES[kind].names()
    with pytest.raises(DuplicateNameError, match="'of_my_own'"):
        DECORATORS[kind]("of_my_own")(type("Other", (BASES[kind],), {"__doc__": "Other."}))


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    "kind",
    [
        *("scorer", "language_model", "chat_model"),
        *("reward_term", "message_regressor", "pretrained_model", "rollout_analyser"),
    ],
)
def test_a_kind_that_inherits_its_parameters_leaves_those_of_its_parent_alone(kind: str) -> None:
    name = str(next(iter(ENUMS[kind])))
    parent = REGISTRIES[kind].get(name)
    mine = DECORATORS[kind]("of_my_own")(type("Mine", (parent,), {"__doc__": "Mine."}))
    assert (parent.Parameters.type_name, mine.Parameters.type_name) == (name, "of_my_own")

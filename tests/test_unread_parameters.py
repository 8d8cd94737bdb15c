"""What nothing reads is refused: in the groups that trainers share."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from nip_astra.errors import ParameterError
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.parameters.types import ScenarioType, TrainerType
from nip_astra.resolution import resolve_experiment
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer
from nip_astra.unread_parameters import SHARED_GROUPS

STRESS_TEST = {"trainer": "ast_dpo"}
PROOF = {"trainer": "vanilla_ppo", "scenario": "graph_isomorphism"}


def refused(**arguments: Any) -> list[str]:
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(**arguments)
    return [fault.path for fault in caught.value.faults]


def test_a_value_of_a_group_that_neither_trainer_nor_scenario_reads_is_refused() -> None:
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(**STRESS_TEST, overrides=["rl.gamma=0.5"])
    (fault,) = caught.value.faults
    assert str(fault).startswith(
        "rl.gamma: is read neither by the trainer 'ast_dpo' (which reads training) nor by "
        "scenarios of the kind 'ast_chat' (which reads no shared group); given 0.5 (from --set). "
        "Leave it out. Trainers that read it: "
    )
    assert "vanilla_ppo" in str(fault)
    assert "ast_" not in str(fault).partition("Trainers that read it")[2]


def test_every_such_value_is_told_whichever_way_it_was_given(tmp_path: Path) -> None:
    overrides = ["training.lr=0.5", "training.batch_size=3", "rl.lr=0.5", "ppo.critic_coef=2.0"]
    assert refused(**PROOF, overrides=overrides) == ["training.lr", "training.batch_size"]
    file = tmp_path / "mine.yaml"
    file.write_text(
        yaml.safe_dump(STRESS_TEST | {"zk_protocol": {"simulator_reward_coefficient": 3}})
    )
    assert refused(parameter_file=file) == ["zk_protocol.simulator_reward_coefficient"]
    plain = HyperParameters(**PROOF, training=TrainingConfiguration(lr=0.5))
    assert refused(hyper_params=plain) == ["training.lr"]
    regressor = "message_regression.regressor._type=mlp"
    assert refused(**STRESS_TEST, overrides=[regressor])[0] == "message_regression.regressor._type"


def test_a_scenario_reads_single_parameters_of_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cls = TRAINERS.get("vanilla_ppo")
    monkeypatch.setattr(cls, "parameter_groups", ())
    overrides = ["rl.frames_per_batch=64", "protocol_common.shared_reward=true", "rl.lr=0.5"]
    found = refused(**PROOF, overrides=overrides)
    assert "rl.lr" in found
    assert not {"rl.frames_per_batch", "protocol_common.shared_reward"} & set(found)


def test_values_equal_to_the_default_pass() -> None:
    default = HyperParameters.model_fields["rl"].default.lr
    resolve_experiment(**STRESS_TEST, overrides=[f"rl.lr={default}"])
    assert refused(**STRESS_TEST, overrides=[f"rl.lr={default * 2}"]) == ["rl.lr"]


def test_what_a_run_recorded_passes_whoever_trains_next(tmp_path: Path) -> None:
    before = resolve_experiment(**PROOF, overrides=["rl.lr=0.5"]).hyper_params
    stored = tmp_path / "hyper_parameters.yaml"
    stored.write_text(yaml.safe_dump(before.to_dict()))
    assert resolve_experiment(parameter_file=stored).hyper_params == before
    assert resolve_experiment(hyper_params=before).hyper_params == before
    base = ["base_run.base_run_type=parameters", f"base_run.run={tmp_path}"]
    found = resolve_experiment(**STRESS_TEST, scenario="pocket_chat", overrides=base).hyper_params
    assert found.rl.lr == 0.5
    assert refused(parameter_file=stored, overrides=["training.lr=0.5"]) == ["training.lr"]


def test_a_trainer_that_does_not_say_what_it_reads_may_read_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Trainer.parameter_groups is None
    monkeypatch.setattr(TRAINERS.get("ast_dpo"), "parameter_groups", None)
    resolve_experiment(**STRESS_TEST, overrides=["rl.gamma=0.5"])


def test_the_shared_groups_are_those_that_belong_to_no_component() -> None:
    assert set(SHARED_GROUPS) >= {
        "training",
        "protocol_common",
        "zk_protocol",
        "rl",
        "ppo",
        "message_regression",
    }
    assert "base_run" not in SHARED_GROUPS


def read_in(cls: type) -> set[str]:
    """Give the shared groups that a class, or what it inherits from us, takes from parameters."""
    found = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("nip_astra."):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            is_group = isinstance(node, ast.Attribute) and node.attr in SHARED_GROUPS
            if is_group and ast.unparse(node.value).endswith("hyper_params"):  # type: ignore[attr-defined]
                found.add(node.attr)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", [str(name) for name in TrainerType])
def test_every_trainer_that_ships_says_what_it_reads(name: str) -> None:
    cls = TRAINERS.get(name)
    assert cls.parameter_groups is not None
    groups = {group.partition(".")[0] for group in cls.parameter_groups}
    assert groups <= set(SHARED_GROUPS)
    assert read_in(cls) <= groups


@pytest.mark.parametrize("name", [str(name) for name in ScenarioType])
def test_every_parameter_that_a_scenario_says_it_reads_exists(name: str) -> None:
    fields = set(HyperParameters.model_fields)
    for path in SCENARIOS.get(name).parameter_groups:
        group, _, field = path.partition(".")
        assert group in fields
        assert not field or field in type(HyperParameters.model_fields[group].default).model_fields

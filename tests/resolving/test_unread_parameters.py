"""Unread parameters are refused in the groups that trainers share."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml

from nip_astra.errors import ParameterError
from nip_astra.parameters.conditions import where
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.parameters.types import ScenarioType, TrainerType
from nip_astra.resolving.resolution import SHARED_GROUPS, _walk, resolve_experiment
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer
from tests.kit.messages import says

STRESS_TEST = {"trainer": "ast_dpo"}
PROOF = {"trainer": "vanilla_ppo", "scenario": "graph_isomorphism"}


def refused(**arguments: Any) -> list[str]:
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(**arguments)
    return [fault.path for fault in caught.value.faults]


def test_a_value_of_a_group_that_neither_trainer_nor_scenario_reads_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(**STRESS_TEST, overrides=["rl.gamma=0.5"])
    (fault,) = caught.value.faults
    assert says(fault, "rl.gamma: ", "'ast_dpo'", "training", "'ast_chat'", "0.5 (from --set)")
    _, _, readers = str(fault).partition("Trainers that read it")
    assert "vanilla_ppo" in readers
    assert "ast_" not in readers
    default = HyperParameters.model_fields["rl"].default.gamma
    resolve_experiment(**STRESS_TEST, overrides=[f"rl.gamma={default}"])
    # A trainer that does not declare its parameters may read all.
    assert Trainer.parameter_groups is None
    monkeypatch.setattr(TRAINERS.get("ast_dpo"), "parameter_groups", None)
    resolve_experiment(**STRESS_TEST, overrides=["rl.gamma=0.5"])


def test_every_such_value_is_reported_from_any_source(tmp_path: Path) -> None:
    overrides = ["training.lr=0.5", "training.minibatch_size=3", "rl.lr=0.5", "ppo.critic_coef=2.0"]
    assert refused(**PROOF, overrides=overrides) == ["training.lr", "training.minibatch_size"]
    file = tmp_path / "mine.yaml"
    values = STRESS_TEST | {"zk_protocol": {"simulator_reward_coefficient": 3}}
    file.write_text(yaml.safe_dump(values))
    assert refused(parameter_file=file) == ["zk_protocol.simulator_reward_coefficient"]
    with pytest.raises(ParameterError, match=r"training\.lr"):
        HyperParameters(**PROOF, training=TrainingConfiguration(lr=0.5))
    nll = "text_rl.fine_tune_nll_weight"
    assert refused(trainer="pure_text_ei", overrides=[f"{nll}=0.5"]) == [nll]
    regressor = "message_regression.regressor._type=mlp"
    assert refused(**STRESS_TEST, overrides=[regressor])[0] == "message_regression.regressor._type"


def test_a_scenario_reads_single_parameters_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRAINERS.get("vanilla_ppo"), "parameter_groups", ())
    overrides = ["rl.frames_per_batch=64", "protocol_common.shared_reward=true", "rl.lr=0.5"]
    result = refused(**PROOF, overrides=overrides)
    assert "rl.lr" in result
    assert not {"rl.frames_per_batch", "protocol_common.shared_reward"} & set(result)


def test_the_record_of_a_run_is_valid_for_any_next_trainer(tmp_path: Path) -> None:
    before = resolve_experiment(**PROOF, overrides=["rl.lr=0.5"]).hyper_params
    stored = tmp_path / "hyper_parameters.yaml"
    stored.write_text(yaml.safe_dump(before.to_dict()))
    assert resolve_experiment(parameter_file=stored).hyper_params == before
    assert resolve_experiment(hyper_params=before).hyper_params == before
    base = ["base_run.base_run_type=parameters", f"base_run.run={tmp_path}"]
    result = resolve_experiment(**STRESS_TEST, scenario="pocket_chat", overrides=base).hyper_params
    assert result.rl.lr == 0.5
    assert refused(parameter_file=stored, overrides=["training.lr=0.5"]) == ["training.lr"]


IN_VAIN = [
    (PROOF, "zk_protocol.simulator_reward_coefficient=3", "protocol_common.zero_knowledge"),
    (PROOF, "solo_agent.lr=0.5", "rl.pretrain_agents"),
    (PROOF, "ppo.kl_target=0.5", "ppo.loss_type"),
    (PROOF, "message_regression.period=5", "message_regression.regressor"),
    (PROOF | {"trainer": "reinforce"}, "rl.lmbda=0.5", "reinforce.use_advantage_and_critic"),
    (PROOF | {"trainer": "spg"}, "ppo.clip_low=0.5", "spg.variant"),
    (PROOF | {"trainer": "spg"}, "spg.ihvp_step_size=0.5", "spg.ihvp_variant"),
    (STRESS_TEST, "training.dev_metric=mean_score", "training.eval_period"),
    (STRESS_TEST, "ast_chat.evaluation.num_dev_episodes=5", "training.eval_period"),
    (STRESS_TEST, "ast_dpo.credit.decay=0.5", "ast_dpo.credit.kind"),
    ({"trainer": "ast_ppo"}, "ast_ppo.kl.horizon=5", "ast_ppo.kl.target"),
    ({"trainer": "ast_ppo"}, "ast_ppo.kl.gradient=k3", "ast_ppo.kl.place"),
]


@pytest.mark.parametrize(("experiment", "assignment", "switch"), IN_VAIN)
def test_a_value_whose_condition_does_not_hold_is_refused(
    experiment: dict[str, Any], assignment: str, switch: str
) -> None:
    path = assignment.partition("=")[0]
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(**experiment, overrides=[assignment])
    (fault,) = caught.value.faults
    assert fault.path == path
    assert switch in fault.problem
    assert switch in fault.suggestion
    if assignment == "ppo.clip_low=0.5":
        assert says(fault, "pspg, pola, psos", "is spg", "0.5 (from --set)")
        resolve_experiment(**experiment, overrides=[assignment, "spg.variant=pola"])


def test_a_later_layer_may_turn_off_settings_of_an_earlier_layer(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    values = {"rl": {"pretrain_agents": True}, "solo_agent": {"lr": 0.5, "num_epochs": 3}}
    file.write_text(yaml.safe_dump(PROOF | values))
    off = "rl.pretrain_agents=false"
    resolve_experiment(parameter_file=file, overrides=[off])
    result = refused(parameter_file=file, overrides=[off, "solo_agent.lr=0.25"])
    assert result == ["solo_agent.lr"]


def test_parameters_of_a_random_agent_are_refused_but_not_those_that_others_inherit() -> None:
    agents = "graph_isomorphism.agents"
    random = f"{agents}.prover.is_random=true"
    schedule = f"{agents}.prover.update_schedule"
    never = [f"{schedule}._type=constant", f"{schedule}.is_on=false"]
    result = refused(**PROOF, overrides=[random, f"{agents}.prover.d_gnn=8", *never])
    assert set(result) == {f"{schedule}._type", f"{schedule}.is_on", f"{agents}.prover.d_gnn"}
    resolve_experiment(**PROOF, overrides=[random, f"{agents}.default.d_gnn=8"])


def test_parameters_unused_by_a_protocol_are_refused() -> None:
    given = resolve_experiment(**PROOF)
    assert given.sources["protocol_common.verifier_no_guess_reward"].startswith("preset")
    # Another protocol than the preset's may leave its values unread.
    resolve_experiment(**PROOF, overrides=["interaction_protocol=adp"])
    second = "protocol_common.verifier_first=false"
    with pytest.raises(ParameterError, match=r"verifier_first.*'adp'"):
        resolve_experiment(**PROOF, overrides=[second, "interaction_protocol=adp"])
    resolve_experiment(**PROOF, overrides=[second, "interaction_protocol=nip"])


def test_an_adapter_that_is_never_trained_is_refused() -> None:
    rank = "ast_chat.target.language_model.lora.rank"
    assert refused(**STRESS_TEST, overrides=[f"{rank}=4"]) == [rank]
    resolve_experiment(**STRESS_TEST, overrides=[f"{rank.replace('target', 'attacker')}=4"])


def test_parameters_unused_by_solo_agents_are_refused() -> None:
    factor = "graph_isomorphism.agents.prover.agent_lr_factor"
    in_vain = ["rl.pretrain_agents=true", "rl.use_shared_body=true"]
    in_vain += ["protocol_common.force_guess=y", f"{factor}.critic=0.5"]
    alone = PROOF | {"trainer": "solo_agent"}
    assert set(refused(**alone, overrides=in_vain)) == {one.partition("=")[0] for one in in_vain}
    used = ["protocol_common.zero_knowledge=true", f"{factor}.actor=0.5"]
    resolve_experiment(**alone, overrides=used)


class Coat(SubParameters):
    is_dry: bool = False
    gloss: Annotated[float, where("is_dry", True)] = 0.5


class Wall(SubParameters):
    coats: list[Coat] = []


def test_an_element_of_a_list_is_looked_into() -> None:
    coats = [{"is_dry": True, "gloss": 1.0}, {"gloss": 0.25}]
    wall = Wall.from_dict({"coats": coats})
    for given in (coats, {"1": coats[1]}):
        leaves = _walk(wall, {"coats": given}, (), {})
        unmet = {leaf.path: leaf.unmet.path for leaf in leaves if leaf.unmet is not None}
        assert unmet == {"coats.1.gloss": "coats.1.is_dry"}


OWN_LOOP = {"remaining_iterations", "is_evaluation_due", "end_iteration", "training_results"}
"""Methods of `Trainer` for loops of users, which read `training`."""


def read_in(cls: type) -> set[str]:
    """The shared groups whose parameters a class, or its base in our package, reads."""
    result = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("nip_astra."):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        (class_definition,) = tree.body
        assert isinstance(class_definition, ast.ClassDef)
        statements = [
            statement
            for statement in class_definition.body
            if not (base is Trainer and getattr(statement, "name", "") in OWN_LOOP)
        ]
        for node in (node for statement in statements for node in ast.walk(statement)):
            is_group = isinstance(node, ast.Attribute) and node.attr in SHARED_GROUPS
            if is_group and ast.unparse(node.value).endswith("hyper_params"):  # type: ignore[attr-defined]
                result.add(node.attr)  # type: ignore[attr-defined]
    return result


@pytest.mark.parametrize("name", [str(name) for name in TrainerType])
def test_every_built_in_trainer_declares_its_parameters(name: str) -> None:
    cls = TRAINERS.get(name)
    assert cls.parameter_groups is not None
    groups = {group.partition(".")[0] for group in cls.parameter_groups}
    assert groups <= set(SHARED_GROUPS)
    assert read_in(cls) <= groups


@pytest.mark.parametrize("name", [str(name) for name in ScenarioType])
def test_every_parameter_that_a_scenario_declares_exists(name: str) -> None:
    fields = set(HyperParameters.model_fields)
    for path in SCENARIOS.get(name).parameter_groups:
        group, _, field = path.partition(".")
        assert group in fields
        assert not field or field in type(HyperParameters.model_fields[group].default).model_fields


@pytest.mark.parametrize("name", [str(name) for name in TrainerType])
def test_no_built_in_trainer_uses_the_methods_for_loops_of_users(name: str) -> None:
    for base in TRAINERS.get(name).__mro__:
        if base is Trainer or not base.__module__.startswith("nip_astra."):
            continue
        source = inspect.getsource(base)
        assert not any(f"self.{method}(" in source for method in OWN_LOOP - {"training_results"})

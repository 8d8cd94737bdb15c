"""`HyperParameters(...)` shows the values that a run would have."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from nip_astra import (
    AgentsParameters,
    AlternatingPeriodicUpdateSchedule,
    GraphIsomorphismAgentParameters,
    GraphIsomorphismParameters,
    HyperParameters,
    LrFactors,
    NipProtocolParameters,
    RandomAgentParameters,
    RlTrainerParameters,
    SoloAgentParameters,
    TrainerType,
)
from nip_astra.errors import ParameterError, UnknownNameError
from nip_astra.resolving.resolution import resolve_experiment

PROOF: dict[str, Any] = {"trainer": "vanilla_ppo", "scenario": "graph_isomorphism"}
ALTERNATING = AlternatingPeriodicUpdateSchedule(5, 3, first_agent=True)
OBJECTS: dict[str, Any] = {
    "rl": RlTrainerParameters(num_iterations=7, pretrain_agents=True),
    "nip": NipProtocolParameters(max_message_rounds=6),
    "solo_agent": SoloAgentParameters(num_epochs=3),
    "graph_isomorphism": GraphIsomorphismParameters(
        message_size=2,
        agents=AgentsParameters(
            prover=RandomAgentParameters(),
            verifier=GraphIsomorphismAgentParameters(
                body_lr_factor=LrFactors(actor=0.5), update_schedule=ALTERNATING
            ),
        ),
    ),
}


@pytest.mark.parametrize("values", [PROOF | OBJECTS, {"trainer": TrainerType.AST_DPO}])
def test_an_object_has_the_values_of_its_run(values: dict[str, Any]) -> None:
    shown = HyperParameters(**values)
    assert shown == resolve_experiment(hyper_params=shown).hyper_params
    assert HyperParameters.from_dict(shown.to_dict()) == shown
    assert HyperParameters.from_dict(values) == shown
    assert pickle.loads(pickle.dumps(shown)) == shown
    changed = shown.model_copy(update={"seed": 5})
    assert resolve_experiment(hyper_params=changed).hyper_params == changed


def test_groups_and_sections_may_be_objects_or_mappings() -> None:
    shown = HyperParameters(**PROOF, **OBJECTS)
    assert (shown.rl.num_iterations, shown.get("nip.max_message_rounds")) == (7, 6)
    agents = shown.get("graph_isomorphism.agents")
    assert agents["prover"].is_random
    assert agents["verifier"].body_lr_factor == LrFactors(actor=0.5)
    assert agents["verifier"].update_schedule == ALTERNATING
    assert agents["verifier"].num_gnn_layers == 2, "of the scenario"
    assert shown.rl.num_epochs == 10, "of the preset"
    assert HyperParameters(trainer="ast_dpo", ast_dpo={"beta": 0.2}).get("ast_dpo.beta") == 0.2
    rl = shown.rl.model_copy(update={"num_epochs": 3})
    changed = shown.model_copy(update={"rl": rl})
    assert resolve_experiment(hyper_params=changed).hyper_params == changed
    # Given values are distinguished from values of files.
    shown = HyperParameters(**PROOF, rl=RlTrainerParameters(num_iterations=7))
    assert shown.given() == PROOF | {"rl": {"num_iterations": 7}}
    sources = resolve_experiment(hyper_params=shown).sources
    assert sources["rl.num_iterations"] == "hyper_params"
    assert sources["rl.num_epochs"] == "preset graph_isomorphism"


@pytest.mark.parametrize(
    "wrong", [PROOF | {"trainer": "nope"}, PROOF | {"interaction_protocol": "nope"}]
)
def test_a_name_that_nothing_has_is_refused_at_once(wrong: dict[str, Any]) -> None:
    for make in (lambda: HyperParameters(**wrong), lambda: HyperParameters.from_dict(wrong)):
        with pytest.raises(UnknownNameError, match="nope"):
            make()


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"agents": {}}, "graph_isomorphism.agents"),
        ({"dataset": "eru10000"}, "graph_isomorphism.dataset"),
        ({"nip_protocol": {}}, "'nip'"),
        ({"pretrain_agents": True}, "rl.pretrain_agents"),
        ({"d_representation": 8}, "graph_isomorphism.d_representation"),
        ({"rl": {"entropy_eps": 0.1}}, "ppo.entropy_weight"),
        ({"ppo": {"entropy_eps": 0.1}}, "ppo.entropy_weight"),
        ({"rl": {"body_lr_factor": {"actor": 1.0}}}, "agents.<name>.body_lr_factor"),
        ({"solo_agent": {"learning_rate": 0.1}}, "lr"),
    ],
)
def test_the_new_place_of_a_parameter_of_another_layout_is_reported(
    wrong: dict[str, Any], hint: str
) -> None:
    with pytest.raises(ParameterError, match=re.escape(hint)):
        HyperParameters(**PROOF, **wrong)


def test_a_trainer_type_that_no_kind_knows_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "odd_trainer.py"
    file.write_text(
        "from nip_astra.trainers.registry import register_trainer\n"
        "from nip_astra.trainers.vanilla_ppo import VanillaPpoTrainer\n"
        "class OddTrainer(VanillaPpoTrainer):\n"
        "    trainer_type = 'supervised'\n"
    )
    custom = {"custom_trainer_module_path": str(file), "custom_trainer_class_name": "OddTrainer"}
    with pytest.raises(UnknownNameError, match=r"trainer type 'supervised'.*rl_central_critic"):
        HyperParameters(trainer="odd", scenario="graph_isomorphism", **custom)

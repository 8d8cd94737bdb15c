"""nip's public imports resolve here, and the names in its users' guide exist."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from nip_astra.parameters.hyper_parameters import HyperParameters
from tests.kit.documents import ROOT

GUIDE = ROOT / "doc" / "guides" / "coming-from-nip.md"
KEPT = {
    "experiment_settings": "ExperimentSettings",
    "factory": "build_scenario_instance",
    "": (
        "AgentsParameters AlternatingPeriodicUpdateSchedule BaseRunParameters CommonPpoParameters "
        "CommonProtocolParameters ConstantUpdateSchedule ContiguousPeriodicUpdateSchedule "
        "DebateProtocolParameters GraphIsomorphismAgentParameters HyperParameters "
        "ImageClassificationAgentParameters ImageClassificationParameters InteractionProtocolType "
        "LrFactors MessageRegressionParameters NipProtocolParameters RandomAgentParameters "
        "ReinforceParameters RlTrainerParameters ScenarioType SoloAgentParameters SpgParameters "
        "TrainerType"
    ),
    "parameters": "HyperParameters",
    "parameters.agents": "AgentsParameters LrFactors",
    "parameters.trainers": "RlTrainerParameters TextRlParameters",
    "parameters.update_schedule": "AlternatingPeriodicUpdateSchedule",
    "parameters.parameters_base": "SubParameters",
    "parameters.types": "InteractionProtocolType ScenarioType TrainerType",
    "protocols.main_protocols": "DebateProtocol MnipProtocol NipProtocol",
    "protocols.registry": "build_protocol_handler register_protocol_handler",
    "protocols.protocol_base": "DeterministicSingleVerifierProtocolHandler ProtocolHandler",
    "protocols.zero_knowledge": "ZeroKnowledgeProtocol",
    "rl_objectives": "Objective",
    "run": "prepare_experiment run_experiment",
    "scenario_instance": "ScenarioInstance",
    "trainers.registry": "register_trainer",
    "trainers.reinforce": "ReinforceTrainer",
    "trainers.rl_tensordict_base": "TensorDictRlTrainer",
    "trainers.solo_agent": "SoloAgentTrainer",
    "trainers.spg": "SpgTrainer",
    "trainers.trainer_base": "IterationContext TensorDictTrainer Trainer attach_progress_bar",
    "trainers.vanilla_ppo": "VanillaPpoTrainer",
}
"""Names by module of nip's, its own name left out."""
NAMED = sorted(set(re.findall(r"\bnip_astra(?:\.\w+)+", GUIDE.read_text(encoding="utf-8"))))


def find(path: str) -> Any:
    """Import a dotted path: a module, or an attribute of a module."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        if not module:
            raise
        return getattr(find(module), name)


@pytest.mark.parametrize("module", KEPT)
def test_public_names_of_nip_are_at_the_same_place(module: str) -> None:
    for name in KEPT[module].split():
        assert find(f"nip_astra.{module}.{name}".replace("..", ".")) is not None


@pytest.mark.parametrize("path", NAMED)
def test_names_in_the_guide_exist(path: str) -> None:
    assert find(path) is not None


def test_the_guide_places_every_group_of_parameters() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    groups = [name for name in HyperParameters.model_fields if name not in ("plugins", "training")]
    left_out = [name for name in groups if f"`{name}" not in text and "custom" not in name]
    assert left_out == ["package_version"]

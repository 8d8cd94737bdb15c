"""nip_astra: models trained against and with each other by reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports, provide
from nip_astra.version import __version__

if TYPE_CHECKING:
    from nip_astra.experiment_settings import ExperimentSettings as ExperimentSettings
    from nip_astra.parameters.agents import AgentsParameters as AgentsParameters
    from nip_astra.parameters.agents import LrFactors as LrFactors
    from nip_astra.parameters.agents import RandomAgentParameters as RandomAgentParameters
    from nip_astra.parameters.hyper_parameters import HyperParameters as HyperParameters
    from nip_astra.parameters.message_regression import (
        MessageRegressionParameters as MessageRegressionParameters,
    )
    from nip_astra.parameters.protocols import BaseRunParameters as BaseRunParameters
    from nip_astra.parameters.protocols import CommonProtocolParameters as CommonProtocolParameters
    from nip_astra.parameters.protocols import ZkProtocolParameters as ZkProtocolParameters
    from nip_astra.parameters.trainers import CommonPpoParameters as CommonPpoParameters
    from nip_astra.parameters.trainers import RlTrainerParameters as RlTrainerParameters
    from nip_astra.parameters.training import TrainingConfiguration as TrainingConfiguration
    from nip_astra.parameters.types import InteractionProtocolType as InteractionProtocolType
    from nip_astra.parameters.types import ScenarioType as ScenarioType
    from nip_astra.parameters.types import TrainerType as TrainerType
    from nip_astra.parameters.update_schedule import (
        AlternatingPeriodicUpdateSchedule as AlternatingPeriodicUpdateSchedule,
    )
    from nip_astra.parameters.update_schedule import (
        ConstantUpdateSchedule as ConstantUpdateSchedule,
    )
    from nip_astra.parameters.update_schedule import (
        ContiguousPeriodicUpdateSchedule as ContiguousPeriodicUpdateSchedule,
    )
    from nip_astra.plugins import load_plugin as load_plugin
    from nip_astra.protocols.main_protocols import (
        DebateProtocolParameters as DebateProtocolParameters,
    )
    from nip_astra.protocols.main_protocols import MnipProtocolParameters as MnipProtocolParameters
    from nip_astra.protocols.main_protocols import NipProtocolParameters as NipProtocolParameters
    from nip_astra.run import PreparedExperiment as PreparedExperiment
    from nip_astra.run import prepare_experiment as prepare_experiment
    from nip_astra.run import resume_experiment as resume_experiment
    from nip_astra.run import run_experiment as run_experiment
    from nip_astra.scenarios.graph_isomorphism import GraphIsomorphismScenario
    from nip_astra.scenarios.graphs.agent_parameters import (
        GraphIsomorphismAgentParameters as GraphIsomorphismAgentParameters,
    )
    from nip_astra.scenarios.graphs.generation import GraphPairParameters as GraphPairParameters
    from nip_astra.scenarios.image_classification import ImageClassificationScenario
    from nip_astra.scenarios.images.parameters import (
        ImageClassificationAgentParameters as ImageClassificationAgentParameters,
    )
    from nip_astra.scenarios.images.parameters import (
        ImageDatasetParameters as ImageDatasetParameters,
    )
    from nip_astra.trainers.registry import register_trainer as register_trainer
    from nip_astra.trainers.reinforce import ReinforceTrainer
    from nip_astra.trainers.solo_agent import SoloAgentTrainer
    from nip_astra.trainers.spg import SpgTrainer

    GraphIsomorphismParameters = GraphIsomorphismScenario.Parameters
    ImageClassificationParameters = ImageClassificationScenario.Parameters
    ReinforceParameters = ReinforceTrainer.Parameters
    SoloAgentParameters = SoloAgentTrainer.Parameters
    SpgParameters = SpgTrainer.Parameters

_HOMES = {
    "AgentsParameters": "nip_astra.parameters.agents",
    "AlternatingPeriodicUpdateSchedule": "nip_astra.parameters.update_schedule",
    "BaseRunParameters": "nip_astra.parameters.protocols",
    "CommonPpoParameters": "nip_astra.parameters.trainers",
    "CommonProtocolParameters": "nip_astra.parameters.protocols",
    "ConstantUpdateSchedule": "nip_astra.parameters.update_schedule",
    "ContiguousPeriodicUpdateSchedule": "nip_astra.parameters.update_schedule",
    "DebateProtocolParameters": "nip_astra.protocols.main_protocols",
    "ExperimentSettings": "nip_astra.experiment_settings",
    "GraphIsomorphismAgentParameters": "nip_astra.scenarios.graphs.agent_parameters",
    "GraphIsomorphismParameters": (
        "nip_astra.scenarios.graph_isomorphism:GraphIsomorphismScenario.Parameters"
    ),
    "GraphPairParameters": "nip_astra.scenarios.graphs.generation",
    "HyperParameters": "nip_astra.parameters.hyper_parameters",
    "ImageClassificationAgentParameters": "nip_astra.scenarios.images.parameters",
    "ImageClassificationParameters": (
        "nip_astra.scenarios.image_classification:ImageClassificationScenario.Parameters"
    ),
    "ImageDatasetParameters": "nip_astra.scenarios.images.parameters",
    "InteractionProtocolType": "nip_astra.parameters.types",
    "LrFactors": "nip_astra.parameters.agents",
    "MessageRegressionParameters": "nip_astra.parameters.message_regression",
    "MnipProtocolParameters": "nip_astra.protocols.main_protocols",
    "NipProtocolParameters": "nip_astra.protocols.main_protocols",
    "PreparedExperiment": "nip_astra.run",
    "RandomAgentParameters": "nip_astra.parameters.agents",
    "ReinforceParameters": "nip_astra.trainers.reinforce:ReinforceTrainer.Parameters",
    "RlTrainerParameters": "nip_astra.parameters.trainers",
    "ScenarioType": "nip_astra.parameters.types",
    "SoloAgentParameters": "nip_astra.trainers.solo_agent:SoloAgentTrainer.Parameters",
    "SpgParameters": "nip_astra.trainers.spg:SpgTrainer.Parameters",
    "TrainerType": "nip_astra.parameters.types",
    "TrainingConfiguration": "nip_astra.parameters.training",
    "ZkProtocolParameters": "nip_astra.parameters.protocols",
    "load_plugin": "nip_astra.plugins",
    "prepare_experiment": "nip_astra.run",
    "register_trainer": "nip_astra.trainers.registry",
    "resume_experiment": "nip_astra.run",
    "run_experiment": "nip_astra.run",
}

__all__ = ["__version__", *_HOMES]


# Imported on first use: torch takes seconds, and `--help` needs none of it.
__getattr__, __dir__ = lazy_exports(__name__, _HOMES)

# `HyperParameters(...)` shows what a run would have.
provide("resolve_experiment", "nip_astra.resolution:resolve_experiment")

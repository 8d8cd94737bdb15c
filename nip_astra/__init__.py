"""nip_astra: models trained against and with each other by reinforcement learning.

What a plug-in, a script or a notebook needs is imported from here; everything else from its module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports, provide
from nip_astra.version import __version__

if TYPE_CHECKING:
    from pydantic import Field as Field

    from nip_astra.errors import NipAstraError as NipAstraError
    from nip_astra.evaluation.run_results import Figure as Figure
    from nip_astra.evaluation.run_results import RunResults as RunResults
    from nip_astra.evaluation.run_results import read_results as read_results
    from nip_astra.experiment_settings import ExperimentSettings as ExperimentSettings
    from nip_astra.language_models.base import LanguageModel as LanguageModel
    from nip_astra.language_models.registry import (
        register_language_model as register_language_model,
    )
    from nip_astra.language_models.services.chat import ChatModel as ChatModel
    from nip_astra.language_models.services.registry import (
        register_chat_model as register_chat_model,
    )
    from nip_astra.message_regressors.base import MessageRegressor as MessageRegressor
    from nip_astra.message_regressors.registry import (
        register_message_regressor as register_message_regressor,
    )
    from nip_astra.parameters.agents import AgentsParameters as AgentsParameters
    from nip_astra.parameters.agents import LrFactors as LrFactors
    from nip_astra.parameters.agents import RandomAgentParameters as RandomAgentParameters
    from nip_astra.parameters.conditions import where as where
    from nip_astra.parameters.conditions import where_above as where_above
    from nip_astra.parameters.conditions import where_given as where_given
    from nip_astra.parameters.conversion import register_conversion as register_conversion
    from nip_astra.parameters.hyper_parameters import HyperParameters as HyperParameters
    from nip_astra.parameters.message_regression import (
        MessageRegressionParameters as MessageRegressionParameters,
    )
    from nip_astra.parameters.parameters_base import PolymorphicParameters as PolymorphicParameters
    from nip_astra.parameters.parameters_base import SubParameters as SubParameters
    from nip_astra.parameters.parameters_base import polymorphic as polymorphic
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
    from nip_astra.progress import IterationContext as IterationContext
    from nip_astra.progress import attach_progress_bar as attach_progress_bar
    from nip_astra.protocols.main_protocols import (
        DebateProtocolParameters as DebateProtocolParameters,
    )
    from nip_astra.protocols.main_protocols import MnipProtocolParameters as MnipProtocolParameters
    from nip_astra.protocols.main_protocols import NipProtocolParameters as NipProtocolParameters
    from nip_astra.protocols.protocol_base import (
        DeterministicSingleVerifierProtocolHandler as DeterministicSingleVerifierProtocolHandler,
    )
    from nip_astra.protocols.protocol_base import Moves as Moves
    from nip_astra.protocols.protocol_base import ProtocolHandler as ProtocolHandler
    from nip_astra.protocols.registry import register_protocol_handler as register_protocol_handler
    from nip_astra.resolving.resolution import ResolvedExperiment as ResolvedExperiment
    from nip_astra.resolving.resolution import resolve_experiment as resolve_experiment
    from nip_astra.reward_terms.base import RatedProbes as RatedProbes
    from nip_astra.reward_terms.base import RewardTerm as RewardTerm
    from nip_astra.reward_terms.registry import register_reward_term as register_reward_term
    from nip_astra.rl_objectives.objective import Objective as Objective
    from nip_astra.rl_objectives.outputs import LossOutput as LossOutput
    from nip_astra.rollouts.batch import Batch as Batch
    from nip_astra.rollouts.samples import Sample as Sample
    from nip_astra.rollouts.samples import collate as collate
    from nip_astra.rollouts.trajectory import Trajectory as Trajectory
    from nip_astra.rollouts.tree import RolloutTree as RolloutTree
    from nip_astra.run import ExperimentResult as ExperimentResult
    from nip_astra.run import PreparedExperiment as PreparedExperiment
    from nip_astra.run import prepare_experiment as prepare_experiment
    from nip_astra.run import resume_experiment as resume_experiment
    from nip_astra.run import run_experiment as run_experiment
    from nip_astra.scenario_instance import ScenarioInstance as ScenarioInstance
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
    from nip_astra.scenarios.images.pretrained.base import PretrainedModel as PretrainedModel
    from nip_astra.scenarios.images.pretrained.registry import (
        register_pretrained_model as register_pretrained_model,
    )
    from nip_astra.scenarios.registry import Scenario as Scenario
    from nip_astra.scenarios.registry import register_scenario as register_scenario
    from nip_astra.scenarios.tensordict_base import TensorDictScenario as TensorDictScenario
    from nip_astra.scorers.base import Exchange as Exchange
    from nip_astra.scorers.base import Message as Message
    from nip_astra.scorers.base import Scorer as Scorer
    from nip_astra.scorers.registry import build_scorer as build_scorer
    from nip_astra.scorers.registry import register_scorer as register_scorer
    from nip_astra.trainers.ast_base import AstTrainer as AstTrainer
    from nip_astra.trainers.registry import register_trainer as register_trainer
    from nip_astra.trainers.reinforce import ReinforceTrainer
    from nip_astra.trainers.remote_api_base import RemoteApiTrainer as RemoteApiTrainer
    from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer as TensorDictRlTrainer
    from nip_astra.trainers.self_hosted_base import SelfHostedTrainer as SelfHostedTrainer
    from nip_astra.trainers.solo_agent import SoloAgentTrainer as SoloAgentTrainer
    from nip_astra.trainers.spg import SpgTrainer
    from nip_astra.trainers.trainer_base import TensorDictTrainer as TensorDictTrainer
    from nip_astra.trainers.trainer_base import Trainer as Trainer

    GraphIsomorphismParameters = GraphIsomorphismScenario.Parameters
    ImageClassificationParameters = ImageClassificationScenario.Parameters
    ReinforceParameters = ReinforceTrainer.Parameters
    SoloAgentParameters = SoloAgentTrainer.Parameters
    SpgParameters = SpgTrainer.Parameters

_HOMES = {
    "AgentsParameters": "nip_astra.parameters.agents",
    "AlternatingPeriodicUpdateSchedule": "nip_astra.parameters.update_schedule",
    "AstTrainer": "nip_astra.trainers.ast_base",
    "BaseRunParameters": "nip_astra.parameters.protocols",
    "Batch": "nip_astra.rollouts.batch",
    "ChatModel": "nip_astra.language_models.services.chat",
    "CommonPpoParameters": "nip_astra.parameters.trainers",
    "CommonProtocolParameters": "nip_astra.parameters.protocols",
    "ConstantUpdateSchedule": "nip_astra.parameters.update_schedule",
    "ContiguousPeriodicUpdateSchedule": "nip_astra.parameters.update_schedule",
    "DebateProtocolParameters": "nip_astra.protocols.main_protocols",
    "DeterministicSingleVerifierProtocolHandler": "nip_astra.protocols.protocol_base",
    "Exchange": "nip_astra.scorers.base",
    "ExperimentResult": "nip_astra.run",
    "ExperimentSettings": "nip_astra.experiment_settings",
    "Field": "pydantic",
    "Figure": "nip_astra.evaluation.run_results",
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
    "IterationContext": "nip_astra.progress",
    "LanguageModel": "nip_astra.language_models.base",
    "LossOutput": "nip_astra.rl_objectives.outputs",
    "LrFactors": "nip_astra.parameters.agents",
    "Message": "nip_astra.scorers.base",
    "MessageRegressionParameters": "nip_astra.parameters.message_regression",
    "MessageRegressor": "nip_astra.message_regressors.base",
    "MnipProtocolParameters": "nip_astra.protocols.main_protocols",
    "Moves": "nip_astra.protocols.protocol_base",
    "NipAstraError": "nip_astra.errors",
    "NipProtocolParameters": "nip_astra.protocols.main_protocols",
    "Objective": "nip_astra.rl_objectives.objective",
    "PolymorphicParameters": "nip_astra.parameters.parameters_base",
    "PreparedExperiment": "nip_astra.run",
    "PretrainedModel": "nip_astra.scenarios.images.pretrained.base",
    "ProtocolHandler": "nip_astra.protocols.protocol_base",
    "RandomAgentParameters": "nip_astra.parameters.agents",
    "RatedProbes": "nip_astra.reward_terms.base",
    "ReinforceParameters": "nip_astra.trainers.reinforce:ReinforceTrainer.Parameters",
    "RemoteApiTrainer": "nip_astra.trainers.remote_api_base",
    "ResolvedExperiment": "nip_astra.resolving.resolution",
    "RewardTerm": "nip_astra.reward_terms.base",
    "RlTrainerParameters": "nip_astra.parameters.trainers",
    "RolloutTree": "nip_astra.rollouts.tree",
    "RunResults": "nip_astra.evaluation.run_results",
    "Sample": "nip_astra.rollouts.samples",
    "Scenario": "nip_astra.scenarios.registry",
    "ScenarioInstance": "nip_astra.scenario_instance",
    "ScenarioType": "nip_astra.parameters.types",
    "Scorer": "nip_astra.scorers.base",
    "SelfHostedTrainer": "nip_astra.trainers.self_hosted_base",
    "SoloAgentParameters": "nip_astra.trainers.solo_agent:SoloAgentTrainer.Parameters",
    "SoloAgentTrainer": "nip_astra.trainers.solo_agent",
    "SpgParameters": "nip_astra.trainers.spg:SpgTrainer.Parameters",
    "SubParameters": "nip_astra.parameters.parameters_base",
    "TensorDictRlTrainer": "nip_astra.trainers.rl_tensordict_base",
    "TensorDictScenario": "nip_astra.scenarios.tensordict_base",
    "TensorDictTrainer": "nip_astra.trainers.trainer_base",
    "Trainer": "nip_astra.trainers.trainer_base",
    "TrainerType": "nip_astra.parameters.types",
    "TrainingConfiguration": "nip_astra.parameters.training",
    "Trajectory": "nip_astra.rollouts.trajectory",
    "ZkProtocolParameters": "nip_astra.parameters.protocols",
    "attach_progress_bar": "nip_astra.progress",
    "build_scorer": "nip_astra.scorers.registry",
    "collate": "nip_astra.rollouts.samples",
    "load_plugin": "nip_astra.plugins",
    "polymorphic": "nip_astra.parameters.parameters_base",
    "prepare_experiment": "nip_astra.run",
    "read_results": "nip_astra.evaluation.run_results",
    "register_chat_model": "nip_astra.language_models.services.registry",
    "register_conversion": "nip_astra.parameters.conversion",
    "register_language_model": "nip_astra.language_models.registry",
    "register_message_regressor": "nip_astra.message_regressors.registry",
    "register_pretrained_model": "nip_astra.scenarios.images.pretrained.registry",
    "register_protocol_handler": "nip_astra.protocols.registry",
    "register_reward_term": "nip_astra.reward_terms.registry",
    "register_scenario": "nip_astra.scenarios.registry",
    "register_scorer": "nip_astra.scorers.registry",
    "register_trainer": "nip_astra.trainers.registry",
    "resolve_experiment": "nip_astra.resolving.resolution",
    "resume_experiment": "nip_astra.run",
    "run_experiment": "nip_astra.run",
    "where": "nip_astra.parameters.conditions",
    "where_above": "nip_astra.parameters.conditions",
    "where_given": "nip_astra.parameters.conditions",
}

__all__ = ["__version__", *_HOMES]


# Imported on first use: torch takes seconds, and `--help` needs none of it.
__getattr__, __dir__ = lazy_exports(__name__, _HOMES)

# `HyperParameters(...)` shows what a run would have.
provide("resolve_experiment", "nip_astra.resolving.resolution:resolve_experiment")

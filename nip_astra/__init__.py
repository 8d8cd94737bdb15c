"""nip_astra: models trained against and with each other by reinforcement learning.

The API for plug-ins, scripts and notebooks; everything else is imported from its module.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nip_astra.lazy import exports_for_types, lazy_exports, provide
from nip_astra.version import __version__

if TYPE_CHECKING:
    from pydantic import Field as Field

    from nip_astra.errors import ConfigurationError as ConfigurationError
    from nip_astra.errors import DataError as DataError
    from nip_astra.errors import MissingPartError as MissingPartError
    from nip_astra.errors import NipAstraError as NipAstraError
    from nip_astra.errors import ParameterError as ParameterError
    from nip_astra.errors import UnknownNameError as UnknownNameError
    from nip_astra.evaluation.api import Comparison as Comparison
    from nip_astra.evaluation.api import compare as compare
    from nip_astra.evaluation.api import evaluate as evaluate
    from nip_astra.evaluation.api import export as export
    from nip_astra.evaluation.api import score as score
    from nip_astra.evaluation.comparison import register_metric as register_metric
    from nip_astra.evaluation.exports import register_export_format as register_export_format
    from nip_astra.evaluation.families.base import Evaluation as Evaluation
    from nip_astra.evaluation.families.base import EvaluationFamily as EvaluationFamily
    from nip_astra.evaluation.families.base import EvaluationRequest as EvaluationRequest
    from nip_astra.evaluation.families.base import (
        register_evaluation_family as register_evaluation_family,
    )
    from nip_astra.evaluation.run_results import Figure as Figure
    from nip_astra.evaluation.run_results import RunResults as RunResults
    from nip_astra.evaluation.run_results import read_results as read_results
    from nip_astra.experiment_settings import ExperimentSettings as ExperimentSettings
    from nip_astra.factory import build_scenario_instance as build_scenario_instance
    from nip_astra.hub import push_to_hub as push_to_hub
    from nip_astra.installation import doctor as doctor
    from nip_astra.language_models.base import LanguageModel as LanguageModel
    from nip_astra.language_models.base import Learner as Learner
    from nip_astra.language_models.base import TokenModel as TokenModel
    from nip_astra.language_models.base import TokenSampler as TokenSampler
    from nip_astra.language_models.base import TokenScorer as TokenScorer
    from nip_astra.language_models.base import (
        register_language_model as register_language_model,
    )
    from nip_astra.language_models.call_forms import TaggedCalls as TaggedCalls
    from nip_astra.language_models.call_forms import register_call_form as register_call_form
    from nip_astra.language_models.embeddings import EmbedderParameters as EmbedderParameters
    from nip_astra.language_models.embeddings import build_embedder as build_embedder
    from nip_astra.language_models.services.chat import ChatAnswer as ChatAnswer
    from nip_astra.language_models.services.chat import ChatMessage as ChatMessage
    from nip_astra.language_models.services.chat import ChatModel as ChatModel
    from nip_astra.language_models.services.chat import ChatOutcome as ChatOutcome
    from nip_astra.language_models.services.chat import ChatRequest as ChatRequest
    from nip_astra.language_models.services.chat import ChatUsage as ChatUsage
    from nip_astra.language_models.services.chat import FinishReason as FinishReason
    from nip_astra.language_models.services.chat import (
        register_chat_model as register_chat_model,
    )
    from nip_astra.language_models.services.chat_models.openai import (
        OpenAIChatModel as OpenAIChatModel,
    )
    from nip_astra.language_models.services.retrying import open_chat_model as open_chat_model
    from nip_astra.language_models.services.training import (
        LocalTrainingService as LocalTrainingService,
    )
    from nip_astra.language_models.services.training import TrainingService as TrainingService
    from nip_astra.language_models.services.training import (
        TrainingServiceRequest as TrainingServiceRequest,
    )
    from nip_astra.language_models.services.training import (
        register_training_service as register_training_service,
    )
    from nip_astra.message_regressors.base import MessageRegressor as MessageRegressor
    from nip_astra.message_regressors.base import (
        register_message_regressor as register_message_regressor,
    )
    from nip_astra.overview import dry_run as dry_run
    from nip_astra.overview import show as show
    from nip_astra.parameters.agents import AgentParameters as AgentParameters
    from nip_astra.parameters.agents import AgentsParameters as AgentsParameters
    from nip_astra.parameters.agents import LrFactors as LrFactors
    from nip_astra.parameters.agents import RandomAgentParameters as RandomAgentParameters
    from nip_astra.parameters.conditions import where as where
    from nip_astra.parameters.conditions import where_above as where_above
    from nip_astra.parameters.conditions import where_given as where_given
    from nip_astra.parameters.content import find_scenario as find_scenario
    from nip_astra.parameters.conversion import register_conversion as register_conversion
    from nip_astra.parameters.hyper_parameters import HyperParameters as HyperParameters
    from nip_astra.parameters.parameters_base import PolymorphicParameters as PolymorphicParameters
    from nip_astra.parameters.parameters_base import SubParameters as SubParameters
    from nip_astra.parameters.parameters_base import polymorphic as polymorphic
    from nip_astra.parameters.trainers import BaseRunParameters as BaseRunParameters
    from nip_astra.parameters.trainers import CommonPpoParameters as CommonPpoParameters
    from nip_astra.parameters.trainers import CommonProtocolParameters as CommonProtocolParameters
    from nip_astra.parameters.trainers import (
        MessageRegressionParameters as MessageRegressionParameters,
    )
    from nip_astra.parameters.trainers import RlTrainerParameters as RlTrainerParameters
    from nip_astra.parameters.trainers import TextRlParameters as TextRlParameters
    from nip_astra.parameters.trainers import ZkProtocolParameters as ZkProtocolParameters
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
    from nip_astra.plugins import module_of as module_of
    from nip_astra.progress import IterationContext as IterationContext
    from nip_astra.progress import attach_progress_bar as attach_progress_bar
    from nip_astra.protocols.library import DebateProtocolParameters as DebateProtocolParameters
    from nip_astra.protocols.library import MnipProtocolParameters as MnipProtocolParameters
    from nip_astra.protocols.library import NipProtocolParameters as NipProtocolParameters
    from nip_astra.protocols.protocol_base import ACCEPT as ACCEPT
    from nip_astra.protocols.protocol_base import CONTINUE as CONTINUE
    from nip_astra.protocols.protocol_base import REJECT as REJECT
    from nip_astra.protocols.protocol_base import (
        DeterministicSingleVerifierProtocolHandler as DeterministicSingleVerifierProtocolHandler,
    )
    from nip_astra.protocols.protocol_base import MessageRounds as MessageRounds
    from nip_astra.protocols.protocol_base import Moves as Moves
    from nip_astra.protocols.protocol_base import ProtocolHandler as ProtocolHandler
    from nip_astra.protocols.protocol_base import RoundResult as RoundResult
    from nip_astra.protocols.registry import build_protocol_handler as build_protocol_handler
    from nip_astra.protocols.registry import register_protocol_handler as register_protocol_handler
    from nip_astra.recipes import stress_test as stress_test
    from nip_astra.recipes import train_task as train_task
    from nip_astra.registry import Registry as Registry
    from nip_astra.report.page import write_report as write_report
    from nip_astra.resolving.analysing import analyse_run as analyse_run
    from nip_astra.resolving.resolution import ResolvedExperiment as ResolvedExperiment
    from nip_astra.resolving.resolution import resolve_experiment as resolve_experiment
    from nip_astra.resume_check import check_resume as check_resume
    from nip_astra.reward_terms.base import RatedProbes as RatedProbes
    from nip_astra.reward_terms.base import RewardTerm as RewardTerm
    from nip_astra.reward_terms.base import register_reward_term as register_reward_term
    from nip_astra.rl_objectives.advantages import gae as gae
    from nip_astra.rl_objectives.advantages import group_advantages as group_advantages
    from nip_astra.rl_objectives.advantages import mean_child_return as mean_child_return
    from nip_astra.rl_objectives.advantages import nstep_returns as nstep_returns
    from nip_astra.rl_objectives.advantages import whiten as whiten
    from nip_astra.rl_objectives.kl import AdaptiveKl as AdaptiveKl
    from nip_astra.rl_objectives.kl import kl_estimate as kl_estimate
    from nip_astra.rl_objectives.objective import Objective as Objective
    from nip_astra.rl_objectives.reductions import LossOutput as LossOutput
    from nip_astra.rl_objectives.reductions import masked_mean as masked_mean
    from nip_astra.rl_objectives.registry import register_advantage as register_advantage
    from nip_astra.rl_objectives.registry import register_policy_loss as register_policy_loss
    from nip_astra.rl_objectives.values import value_loss as value_loss
    from nip_astra.rollouts.batch import Batch as Batch
    from nip_astra.rollouts.batch import (
        compute_position_id_with_mask as compute_position_id_with_mask,
    )
    from nip_astra.rollouts.batch import padding_data as padding_data
    from nip_astra.rollouts.messages import Message as Message
    from nip_astra.rollouts.messages import ToolCall as ToolCall
    from nip_astra.rollouts.messages import Turn as Turn
    from nip_astra.rollouts.samples import Sample as Sample
    from nip_astra.rollouts.samples import collate as collate
    from nip_astra.rollouts.trajectory import Trajectory as Trajectory
    from nip_astra.rollouts.trajectory import (
        compute_grpo_advantage_for_trajectories as compute_grpo_advantage_for_trajectories,
    )
    from nip_astra.rollouts.tree import RolloutTree as RolloutTree
    from nip_astra.run import ExperimentResult as ExperimentResult
    from nip_astra.run import PreparedExperiment as PreparedExperiment
    from nip_astra.run import prepare_experiment as prepare_experiment
    from nip_astra.run import resume_experiment as resume_experiment
    from nip_astra.run import run_experiment as run_experiment
    from nip_astra.samplers.episodes import EpisodeSampler as EpisodeSampler
    from nip_astra.samplers.tasks import TaskPlan as TaskPlan
    from nip_astra.samplers.tasks import play_task as play_task
    from nip_astra.samplers.trees import TreeSampler as TreeSampler
    from nip_astra.scenario_base.agents import PureTextSharedModelGroup as PureTextSharedModelGroup
    from nip_astra.scenario_base.conversation.prompts import read_prompts as read_prompts
    from nip_astra.scenario_base.protocol.combined import CombinedAgents as CombinedAgents
    from nip_astra.scenario_base.protocol.datapoint_views import Choice as Choice
    from nip_astra.scenario_base.protocol.datapoint_views import DatapointView as DatapointView
    from nip_astra.scenario_base.protocol.datapoint_views import Picture as Picture
    from nip_astra.scenario_base.protocol.tensordict_agents import AgentBody as AgentBody
    from nip_astra.scenario_base.protocol.tensordict_agents import (
        AgentPolicyHead as AgentPolicyHead,
    )
    from nip_astra.scenario_base.protocol.tensordict_agents import AgentShape as AgentShape
    from nip_astra.scenario_base.protocol.tensordict_agents import AgentValueHead as AgentValueHead
    from nip_astra.scenario_base.protocol.tensordict_agents import Observation as Observation
    from nip_astra.scenario_base.protocol.tensordict_agents import PolicyOutput as PolicyOutput
    from nip_astra.scenario_base.protocol.tensordict_agents import Representation as Representation
    from nip_astra.scenario_base.protocol.tensordict_agents import SoloAgentHead as SoloAgentHead
    from nip_astra.scenario_base.protocol.tensordict_agents import mlp as mlp
    from nip_astra.scenario_base.protocol.tensordict_agents import round_one_hot as round_one_hot
    from nip_astra.scenario_base.tasks.base import Environment as Environment
    from nip_astra.scenario_base.tasks.base import GeneratedTask as GeneratedTask
    from nip_astra.scenario_base.tasks.base import Reaction as Reaction
    from nip_astra.scenario_base.tasks.base import Task as Task
    from nip_astra.scenario_base.tasks.base import register_environment as register_environment
    from nip_astra.scenario_base.tasks.base import register_task as register_task
    from nip_astra.scenario_base.tasks.rewards import register_reward as register_reward
    from nip_astra.scenario_base.tasks.tools import Tool as Tool
    from nip_astra.scenario_base.tasks.tools import register_tool as register_tool
    from nip_astra.scenario_base.text.analysers import (
        AnalysisParameters as AnalysisParameters,
    )
    from nip_astra.scenario_base.text.analysers import RolloutAnalyser as RolloutAnalyser
    from nip_astra.scenario_base.text.analysers import Subject as Subject
    from nip_astra.scenario_base.text.analysers import (
        register_rollout_analyser as register_rollout_analyser,
    )
    from nip_astra.scenario_base.text.models import TextAgentParameters
    from nip_astra.scenario_instance import ConversationInstance as ConversationInstance
    from nip_astra.scenario_instance import ProtocolInstance as ProtocolInstance
    from nip_astra.scenario_instance import ScenarioInstance as ScenarioInstance
    from nip_astra.scenario_instance import TaskInstance as TaskInstance
    from nip_astra.scenarios.code_validation import CodeValidationScenario
    from nip_astra.scenarios.graph_isomorphism import GraphIsomorphismScenario
    from nip_astra.scenarios.graphs.agents import (
        GraphIsomorphismAgentParameters as GraphIsomorphismAgentParameters,
    )
    from nip_astra.scenarios.graphs.generation import GraphPairParameters as GraphPairParameters
    from nip_astra.scenarios.image_classification import ImageClassificationScenario
    from nip_astra.scenarios.images.agents import (
        ImageClassificationAgentParameters as ImageClassificationAgentParameters,
    )
    from nip_astra.scenarios.images.data import (
        ImageDatasetParameters as ImageDatasetParameters,
    )
    from nip_astra.scenarios.images.pretrained import PretrainedModel as PretrainedModel
    from nip_astra.scenarios.images.pretrained import (
        register_pretrained_model as register_pretrained_model,
    )
    from nip_astra.scenarios.pure_text_base import PureTextScenario as PureTextScenario
    from nip_astra.scenarios.pure_text_base import TextDatasets as TextDatasets
    from nip_astra.scenarios.registry import Scenario as Scenario
    from nip_astra.scenarios.registry import register_scenario as register_scenario
    from nip_astra.scenarios.tensordict_base import Datasets as Datasets
    from nip_astra.scenarios.tensordict_base import TensorDictScenario as TensorDictScenario
    from nip_astra.scorers.base import SCORERS as SCORERS
    from nip_astra.scorers.base import Exchange as Exchange
    from nip_astra.scorers.base import Scorer as Scorer
    from nip_astra.scorers.base import build_scorer as build_scorer
    from nip_astra.scorers.base import register_scorer as register_scorer
    from nip_astra.serve.local_service import LocalService as LocalService
    from nip_astra.serve.local_service import start_service as start_service
    from nip_astra.sweep.results import read_sweep as read_sweep
    from nip_astra.sweep.runner import Launcher as Launcher
    from nip_astra.sweep.runner import SweepOptions as SweepOptions
    from nip_astra.sweep.runner import register_launcher as register_launcher
    from nip_astra.sweep.runner import run_sweep as run_sweep
    from nip_astra.sweep.search import register_pruner as register_pruner
    from nip_astra.sweep.search import register_sweep_sampler as register_sweep_sampler
    from nip_astra.tracking.run_directory import RunDirectory as RunDirectory
    from nip_astra.tracking.tracker import Tracker as Tracker
    from nip_astra.tracking.tracker import register_tracker as register_tracker
    from nip_astra.trainers.ast.base import AstTrainer as AstTrainer
    from nip_astra.trainers.ast.dpo import AstDpoTrainer as AstDpoTrainer
    from nip_astra.trainers.ast.dpo import AstPreferenceTrainer as AstPreferenceTrainer
    from nip_astra.trainers.ast.grpo import AstGrpoTrainer as AstGrpoTrainer
    from nip_astra.trainers.ast.ppo import AstPpoTrainer as AstPpoTrainer
    from nip_astra.trainers.language_model_base import LanguageModelTrainer as LanguageModelTrainer
    from nip_astra.trainers.optimization import build_optimizer as build_optimizer
    from nip_astra.trainers.optimization import register_optimizer as register_optimizer
    from nip_astra.trainers.optimization import register_schedule as register_schedule
    from nip_astra.trainers.registry import register_trainer as register_trainer
    from nip_astra.trainers.reinforce import ReinforceTrainer
    from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer as PureTextRlTrainer
    from nip_astra.trainers.rl_tensordict_base import Gae as Gae
    from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer as TensorDictRlTrainer
    from nip_astra.trainers.service.metrics import log_grpo_metrics as log_grpo_metrics
    from nip_astra.trainers.service.metrics import log_rollout_metrics as log_rollout_metrics
    from nip_astra.trainers.service.remote_api import (
        RemoteApiCrossEntropyTrainer as RemoteApiCrossEntropyTrainer,
    )
    from nip_astra.trainers.service.remote_api import RemoteApiGrpoTrainer as RemoteApiGrpoTrainer
    from nip_astra.trainers.service.remote_api import RemoteApiOpdTrainer as RemoteApiOpdTrainer
    from nip_astra.trainers.service.remote_api import RemoteApiTrainer as RemoteApiTrainer
    from nip_astra.trainers.service.self_hosted import (
        SelfHostedGrpoTrainer as SelfHostedGrpoTrainer,
    )
    from nip_astra.trainers.service.self_hosted import SelfHostedOpdTrainer as SelfHostedOpdTrainer
    from nip_astra.trainers.service.self_hosted import SelfHostedTrainer as SelfHostedTrainer
    from nip_astra.trainers.service.self_hosted import policy_loss as policy_loss
    from nip_astra.trainers.solo_agent import SoloAgentTrainer as SoloAgentTrainer
    from nip_astra.trainers.spg import SpgTrainer
    from nip_astra.trainers.text.expert_iteration import PureTextEiTrainer
    from nip_astra.trainers.text.malt import PureTextMaltTrainer
    from nip_astra.trainers.trainer_base import TensorDictTrainer as TensorDictTrainer
    from nip_astra.trainers.trainer_base import Trainer as Trainer
    from nip_astra.trainers.vanilla_ppo import VanillaPpoTrainer as VanillaPpoTrainer
    from nip_astra.utils.diversity import bleu_against as bleu_against
    from nip_astra.utils.diversity import distinct_n as distinct_n
    from nip_astra.utils.diversity import self_bleu as self_bleu
    from nip_astra.utils.diversity import vendi_score as vendi_score
    from nip_astra.utils.interpreter import SandboxLimits as SandboxLimits
    from nip_astra.utils.nested_array_dict import NestedArrayDict as NestedArrayDict
    from nip_astra.utils.sandbox import call_in_sandbox as call_in_sandbox
    from nip_astra.utils.sandbox import run_in_sandbox as run_in_sandbox
    from nip_astra.utils.seeding import derive_seed as derive_seed
    from nip_astra.utils.seeding import derived_generator as derived_generator

    GraphIsomorphismParameters = GraphIsomorphismScenario.Parameters
    ImageClassificationParameters = ImageClassificationScenario.Parameters
    ReinforceParameters = ReinforceTrainer.Parameters
    CodeValidationAgentParameters = TextAgentParameters
    CodeValidationParameters = CodeValidationScenario.Parameters
    PureTextAgentParameters = TextAgentParameters
    PureTextEiParameters = PureTextEiTrainer.Parameters
    PureTextMaltParameters = PureTextMaltTrainer.Parameters
    SoloAgentParameters = SoloAgentTrainer.Parameters
    SpgParameters = SpgTrainer.Parameters

_HOMES = exports_for_types(__file__)

__all__ = ["__version__", *_HOMES]


# By default a waiting thread of OpenMP spins for milliseconds, and on a busy machine takes the core
# that its partner needs; one that sleeps at once makes an idle machine a quarter slower. The number
# is read when torch is loaded: every process that this package starts imports the package earlier.
# A user's own choice wins. Its value is not read here: `nip_astra.trust` alone reads variables.
if os.environ.keys().isdisjoint(["OMP_WAIT_POLICY"]):
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Imported on first use: torch takes seconds, and `--help` does not need it.
__getattr__, __dir__ = lazy_exports(__name__, _HOMES)

# `HyperParameters(...)` shows what a run would have.
provide("read_recipe", "nip_astra.nexrl.recipes:read_recipe")
provide("resolve_experiment", "nip_astra.resolving.resolution:resolve_experiment")
provide("start_service", "nip_astra.serve.local_service:start_service")

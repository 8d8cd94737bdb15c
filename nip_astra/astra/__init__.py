"""ASTRA-RL's interface for custom objects, over the loop of the registered trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports

if TYPE_CHECKING:
    from nip_astra.astra.algorithms.dpo import DPO as DPO
    from nip_astra.astra.algorithms.dpo import IPO as IPO
    from nip_astra.astra.algorithms.dpo import DPOBatch as DPOBatch
    from nip_astra.astra.algorithms.dpo import DPOStep as DPOStep
    from nip_astra.astra.algorithms.ppo import PPO as PPO
    from nip_astra.astra.algorithms.ppo import PPOBatch as PPOBatch
    from nip_astra.astra.algorithms.ppo import PPOStep as PPOStep
    from nip_astra.astra.core.algorithm import Algorithm as Algorithm
    from nip_astra.astra.core.evaluator import Evaluator as Evaluator
    from nip_astra.astra.core.evaluator import GraphMetrics as GraphMetrics
    from nip_astra.astra.core.sampler import Environment as Environment
    from nip_astra.astra.core.sampler import Graph as Graph
    from nip_astra.astra.core.sampler import Node as Node
    from nip_astra.astra.core.sampler import Sampler as Sampler
    from nip_astra.astra.core.scorer import Moderator as Moderator
    from nip_astra.astra.core.scorer import RegisteredScorer as RegisteredScorer
    from nip_astra.astra.core.scorer import Scorer as Scorer
    from nip_astra.astra.core.system import Problem as Problem
    from nip_astra.astra.core.system import System as System
    from nip_astra.astra.core.system import TrainableSystem as TrainableSystem
    from nip_astra.astra.core.system import ValueFunctionProblem as ValueFunctionProblem
    from nip_astra.astra.core.system import ValueFunctionSystem as ValueFunctionSystem
    from nip_astra.astra.core.texts import Conversation as Conversation
    from nip_astra.astra.core.texts import Spoken as Spoken
    from nip_astra.astra.ext.transformers.hf_problem import HFASTProblem as HFASTProblem
    from nip_astra.astra.ext.transformers.hf_problem import HFASTSystem as HFASTSystem
    from nip_astra.astra.ext.transformers.hf_problem import (
        HFEvaluationProblem as HFEvaluationProblem,
    )
    from nip_astra.astra.ext.transformers.hf_problem import HFEvaluationSystem as HFEvaluationSystem
    from nip_astra.astra.ext.transformers.hf_trainer import HFASTConfiguration as HFASTConfiguration
    from nip_astra.astra.ext.transformers.hf_trainer import HFASTTrainer as HFASTTrainer
    from nip_astra.astra.logging import logger as logger
    from nip_astra.astra.methods.ast_evaluator import ASTEvaluator as ASTEvaluator
    from nip_astra.astra.methods.ast_system import ASTEnvironment as ASTEnvironment
    from nip_astra.astra.methods.ast_system import ASTNode as ASTNode
    from nip_astra.astra.methods.ast_system import ASTProblem as ASTProblem
    from nip_astra.astra.methods.ast_system import ASTSampler as ASTSampler
    from nip_astra.astra.methods.ast_system import ASTSystem as ASTSystem
    from nip_astra.astra.scorers.detoxify import DetoxifyModerator as DetoxifyModerator
    from nip_astra.astra.scorers.detoxify import DetoxifyScorer as DetoxifyScorer
    from nip_astra.astra.scorers.llamaguard import LlamaGuardModerator as LlamaGuardModerator
    from nip_astra.astra.scorers.llamaguard import LlamaGuardScorer as LlamaGuardScorer
    from nip_astra.astra.training.configuration import (
        TrainingConfiguration as TrainingConfiguration,
    )
    from nip_astra.astra.training.harness import Harness as Harness
    from nip_astra.astra.training.trainer import Trainer as Trainer

_HOMES = {
    "ASTEnvironment": "methods.ast_system",
    "ASTEvaluator": "methods.ast_evaluator",
    "ASTNode": "methods.ast_system",
    "ASTProblem": "methods.ast_system",
    "ASTSampler": "methods.ast_system",
    "ASTSystem": "methods.ast_system",
    "Algorithm": "core.algorithm",
    "Conversation": "core.texts",
    "DPO": "algorithms.dpo",
    "DPOBatch": "algorithms.dpo",
    "DPOStep": "algorithms.dpo",
    "DetoxifyModerator": "scorers.detoxify",
    "DetoxifyScorer": "scorers.detoxify",
    "Environment": "core.sampler",
    "Evaluator": "core.evaluator",
    "Graph": "core.sampler",
    "GraphMetrics": "core.evaluator",
    "HFASTConfiguration": "ext.transformers.hf_trainer",
    "HFASTProblem": "ext.transformers.hf_problem",
    "HFASTSystem": "ext.transformers.hf_problem",
    "HFASTTrainer": "ext.transformers.hf_trainer",
    "HFEvaluationProblem": "ext.transformers.hf_problem",
    "HFEvaluationSystem": "ext.transformers.hf_problem",
    "Harness": "training.harness",
    "IPO": "algorithms.dpo",
    "LlamaGuardModerator": "scorers.llamaguard",
    "LlamaGuardScorer": "scorers.llamaguard",
    "Moderator": "core.scorer",
    "Node": "core.sampler",
    "PPO": "algorithms.ppo",
    "PPOBatch": "algorithms.ppo",
    "PPOStep": "algorithms.ppo",
    "Problem": "core.system",
    "RegisteredScorer": "core.scorer",
    "Sampler": "core.sampler",
    "Scorer": "core.scorer",
    "Spoken": "core.texts",
    "System": "core.system",
    "TrainableSystem": "core.system",
    "Trainer": "training.trainer",
    "TrainingConfiguration": "training.configuration",
    "ValueFunctionProblem": "core.system",
    "ValueFunctionSystem": "core.system",
    "logger": "logging",
}

__all__ = [*_HOMES]


# Imported on first use: torch and transformers take seconds.
__getattr__, __dir__ = lazy_exports(
    __name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
)

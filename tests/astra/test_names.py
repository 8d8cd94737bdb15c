"""Every name that code written for ASTRA-RL imports is in the expected place."""

from __future__ import annotations

from importlib import import_module

import pytest

import nip_astra.astra as astra

HOMES = {
    "": "ASTProblem ASTSystem ASTSampler ASTEnvironment ASTNode ASTEvaluator Algorithm DPO IPO PPO "
    "DPOBatch DPOStep PPOBatch PPOStep DetoxifyScorer DetoxifyModerator LlamaGuardScorer "
    "LlamaGuardModerator Harness Trainer TrainingConfiguration System Problem ValueFunctionSystem "
    "ValueFunctionProblem Sampler Environment Graph Node Scorer Moderator Evaluator logger "
    "HFASTProblem HFASTSystem HFASTTrainer HFASTConfiguration",
    "algorithms": "DPO IPO DPOBatch DPOStep PPO PPOBatch PPOStep",
    "algorithms.dpo": "DPO IPO DPOBatch DPOStep",
    "algorithms.ppo": "PPO PPOBatch PPOStep",
    "core.algorithm": "Algorithm",
    "core.common": "StateT ActionT Step Batch",
    "core.environment": "Environment Graph Node",
    "core.evaluator": "Evaluator GraphMetrics JSONLike",
    "core.moderator": "Moderator",
    "core.problem": "Problem ValueFunctionProblem",
    "core.sampler": "Sampler Graph Node",
    "core.scorer": "Scorer",
    "core.system": "System ValueFunctionSystem TrainableSystem",
    "datasets": "CONVOKIT_REDDIT_TRAIN CONVOKIT_REDDIT_DEV CONVOKIT_REDDIT_TEST AdvBenchPrompt",
    "datasets.prompts": "CONVOKIT_REDDIT_TRAIN CONVOKIT_REDDIT_DEV CONVOKIT_REDDIT_TEST",
    "ext.transformers": "HFASTProblem HFASTSystem HFASTTrainer HFASTConfiguration "
    "HFEvaluationProblem HFEvaluationSystem",
    "ext.transformers.hf_ast_problem": "HFASTProblem HFASTTrainer HFASTConfiguration "
    "HFEvaluationProblem",
    "ext.transformers.hf_ast_system": "HFASTSystem HFASTTrainer HFASTConfiguration "
    "HFEvaluationSystem",
    "logging": "logger config_logging ASTRAWandbLogger",
    "methods": "ASTSampler ASTNode ASTSystem ASTProblem ASTEvaluator ASTEnvironment",
    "methods.ast": "ASTProblem ASTSampler",
    "methods.ast_problem": "ASTProblem ASTEnvironment ASTEvaluator ASTNode",
    "methods.ast_system": "ASTSystem ASTSampler ASTEvaluator ASTNode",
    "moderators.detoxify": "DetoxifyModerator",
    "moderators.llamaGuard": "LlamaGuardModerator",
    "scorers": "DetoxifyScorer LlamaGuardScorer",
    "scorers.detoxify": "DetoxifyScorer",
    "scorers.llamaguard": "LlamaGuardScorer",
    "training": "Harness Trainer TrainingConfiguration",
    "training.harness": "Harness",
    "training.trainer": "Trainer TrainingConfiguration",
    "utils": "logger",
    "utils.logging": "logger config_logging ASTRAWandbLogger",
}


@pytest.mark.parametrize("home", HOMES)
def test_names_are_where_they_were(home: str) -> None:
    module = import_module(f"nip_astra.astra.{home}".rstrip("."))
    missing = [name for name in HOMES[home].split() if not hasattr(module, name)]
    assert not missing


@pytest.mark.parametrize(
    "name",
    ["", "algorithms", "datasets", "methods", "scorers", "training", "ext.transformers", "utils"],
)
def test_packages_list_their_names_and_refuse_others(name: str) -> None:
    package = import_module(f"nip_astra.astra.{name}".rstrip("."))
    assert set(package.__all__) <= set(dir(package))
    for exported in package.__all__:
        assert getattr(package, exported) is not None
    with pytest.raises(AttributeError, match="'nothing'"):
        package.nothing  # noqa: B018 - reading it is the test


def test_older_and_newer_names_are_the_same_objects() -> None:
    for older, newer in (
        *(("ASTProblem", "ASTSystem"), ("ASTEnvironment", "ASTSampler"), ("Problem", "System")),
        *(("Environment", "Sampler"), ("Moderator", "Scorer"), ("HFASTProblem", "HFASTSystem")),
        ("DetoxifyModerator", "DetoxifyScorer"),
    ):
        assert getattr(astra, older) is getattr(astra, newer)

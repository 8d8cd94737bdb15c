"""A role accepts a model with the required abilities, and otherwise names what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError, ModelAbilityError
from nip_astra.language_models.base import (
    Generation,
    SamplingOptions,
    TokenCount,
    TokenModel,
    TokenSampler,
    TokenScorer,
    as_language_model,
    register_language_model,
)
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment
from tests.kit.documents import ROOT
from tests.kit.experiments import FAST, metrics_of, run_in
from tests.kit.tiny import load_backend

POLICY = ROOT / "scenarios/arithmetic/models/policy"
LIKELIHOOD = "ast_chat.reward.likelihood_model=target"


class Wrapped(TokenModel):
    """A model in this process that exposes only some abilities."""

    class Parameters(TokenModel.Parameters):
        model: str

    def __init__(self, inner: HuggingFaceLanguageModel) -> None:
        self.inner = inner
        self.tokenizer, self.end_ids = inner.tokenizer, inner.end_ids
        self.context_window, self.token_count = inner.context_window, TokenCount()

    @classmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> Wrapped:
        return cls(load_backend(parameters.model, trainable=False))

    def num_parameters(self) -> int:
        return self.inner.num_parameters()


class Samples(Wrapped, TokenSampler):
    def generate(self, contexts, rows_per_context, uniforms_BT, options) -> Generation:
        return self.inner.generate(contexts, rows_per_context, uniforms_BT, options)


class Scores(Wrapped, TokenScorer):
    def logprobs(self, context_BC, context_mask_BC, ids_BT, mask_BT) -> Tensor:
        return self.inner.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT)


class SamplesAndScores(Samples, Scores):
    """Both, and does not learn."""


@pytest.fixture(autouse=True)
def _registered(no_plugins_left: None) -> None:
    for name, cls in {"samples": Samples, "scores": Scores, "both": SamplesAndScores}.items():
        register_language_model(name)(cls)


def experiment(scenario: Path, role: str, backend: str, *more: str) -> ResolvedExperiment:
    model = json.dumps({"_type": backend, "model": str(scenario / role)})
    given = (*FAST, "training.num_iterations=1", f"ast_chat.{role}.language_model={model}")
    return resolve_experiment(trainer="ast_dpo", scenario=str(scenario), overrides=[*given, *more])


def trainer_of(resolved: ResolvedExperiment) -> Any:
    return prepare_experiment(resolved, progress=False).trainer


def test_a_target_that_only_samples_is_attacked_as_any_other(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    first, second = (
        metrics_of(run_in(tmp_path, experiment(tiny_scenario, "target", backend), backend))
        for backend in ("samples", "huggingface")
    )
    assert any("loss" in row for row in first)
    for name in ("step", "loss", "mean_reward"):
        assert [row.get(name) for row in first] == [row.get(name) for row in second]


@pytest.mark.parametrize(
    ("role", "backend", "more", "lacks"),
    [
        ("target", "scores", (), "target .*TokenSampler.*'scores'"),
        ("target", "samples", (LIKELIHOOD,), "target .*TokenScorer.*likelihood_model.*'samples'"),
        ("attacker", "samples", (), "reference .*TokenScorer"),
        ("attacker", "scores", (), "attacker .*TokenSampler"),
        ("attacker", "both", (), "attacker .*Learner.*'both'"),
    ],
)
def test_a_model_without_the_ability_that_its_role_needs_is_refused(
    tiny_scenario: Path, role: str, backend: str, more: tuple[str, ...], lacks: str
) -> None:
    with pytest.raises(ModelAbilityError, match=lacks) as caught:
        trainer_of(experiment(tiny_scenario, role, backend, *more))
    assert isinstance(caught.value, ConfigurationError)


def test_a_likelihood_model_that_scores_need_not_learn(tiny_scenario: Path) -> None:
    trainer = trainer_of(experiment(tiny_scenario, "target", "both", LIKELIHOOD))
    tree = trainer.rollouts.play(0)
    assert bool(tree.nodes["probe_nll"].isfinite().all())


def test_a_teacher_scores_tokens_and_nothing_else() -> None:
    def with_teacher(backend: str) -> Any:
        teacher = json.dumps({"_type": backend, "model": str(POLICY)})
        given = [f"self_hosted_opd.distillation.teacher={teacher}"]
        base = {"trainer": "self_hosted_opd", "scenario": "arithmetic", "overrides": given}
        return trainer_of(resolve_experiment(**base))

    with pytest.raises(ModelAbilityError, match="the teacher needs a TokenScorer"):
        with_teacher("samples")
    assert isinstance(with_teacher("scores").teacher, Scores)


def test_a_session_without_caches_needs_the_abilities_that_it_uses(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    assert as_language_model(tiny_model, role="policy") is tiny_model
    with pytest.raises(ModelAbilityError, match="the policy needs a Learner"):
        as_language_model(SamplesAndScores(tiny_model), role="policy")
    session = Samples(tiny_model).open_session()
    with pytest.raises(ModelAbilityError, match="TokenScorer"):
        session.generate([[2, 6]], 1, torch.rand(1, 2), SamplingOptions(2), spans=[(1, 2)])

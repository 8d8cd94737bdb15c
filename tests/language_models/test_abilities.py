"""A role accepts a model with the required abilities, and otherwise names what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError, ModelAbilityError
from nip_astra.experiment_settings import ExperimentSettings
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
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment, run_experiment
from tests.kit.command_line import plugins_forgotten_after
from tests.kit.tiny import load_backend

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
    """Only samples tokens, like a completions server."""

    def generate(self, contexts, rows_per_context, uniforms_BT, options) -> Generation:
        return self.inner.generate(contexts, rows_per_context, uniforms_BT, options)


class Scores(Wrapped, TokenScorer):
    """Only scores tokens."""

    def logprobs(self, context_BC, context_mask_BC, ids_BT, mask_BT) -> Tensor:
        return self.inner.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT)


class SamplesAndScores(Samples, Scores):
    """Both, and does not learn."""


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with plugins_forgotten_after():
        for name, cls in {"samples": Samples, "scores": Scores, "both": SamplesAndScores}.items():
            register_language_model(name)(cls)
        yield


def options(scenario: Path, role: str, backend: str, *more: str) -> dict[str, Any]:
    """An experiment in which a role's backend has few abilities."""
    model = json.dumps({"_type": backend, "model": str(scenario / role)})
    return {
        "trainer": "ast_dpo",
        "scenario": str(scenario),
        "overrides": [
            "ast_chat.evaluation.num_episodes=2",
            "ast_chat.evaluation.use_random_search=false",
            "training.num_iterations=1",
            f"ast_chat.{role}.language_model={model}",
            *more,
        ],
    }


def test_a_target_that_only_samples_is_attacked_as_any_other(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    result = []
    for backend in ("samples", "huggingface"):
        resolved = resolve_experiment(**options(tiny_scenario, "target", backend))
        settings = ExperimentSettings(runs_dir=str(tmp_path), run_id=backend, progress=False)
        run_experiment(resolved, settings)
        text = (tmp_path / backend / "metrics.jsonl").read_text()
        metrics = [json.loads(line) for line in text.splitlines()]
        result.append(
            [(item["step"], item.get("loss"), item.get("mean_reward")) for item in metrics]
        )
    assert result[0] == result[1]
    assert any(loss is not None for _, loss, _ in result[0])


def prepared(**experiment: Any) -> Any:
    return prepare_experiment(resolve_experiment(**experiment), progress=False)


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
        prepared(**options(tiny_scenario, role, backend, *more))
    assert isinstance(caught.value, ConfigurationError)


def test_a_likelihood_model_that_scores_need_not_learn(tiny_scenario: Path) -> None:
    trainer = prepared(**options(tiny_scenario, "target", "both", LIKELIHOOD)).trainer
    tree = trainer.rollouts.play(0)
    assert bool(tree.nodes["probe_nll"].isfinite().all())


def test_a_teacher_scores_tokens_and_nothing_else() -> None:
    base = {"trainer": "self_hosted_opd", "scenario": "arithmetic"}
    policy = resolve_experiment(**base).hyper_params.get("task.policy.language_model.model")
    folder = Path(policy.replace("scenario://", "scenarios/arithmetic/")).resolve()

    def with_teacher(backend: str) -> Any:
        teacher = json.dumps({"_type": backend, "model": str(folder)})
        return prepared(**base, overrides=[f"self_hosted_opd.distillation.teacher={teacher}"])

    with pytest.raises(ModelAbilityError, match="the teacher needs a TokenScorer"):
        with_teacher("samples")
    assert isinstance(with_teacher("scores").trainer.teacher, Scores)


def test_a_session_without_caches_needs_the_abilities_that_it_uses(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    assert as_language_model(tiny_model, role="policy") is tiny_model
    with pytest.raises(ModelAbilityError, match="the policy needs a Learner"):
        as_language_model(SamplesAndScores(tiny_model), role="policy")
    session = Samples(tiny_model).open_session()
    with pytest.raises(ModelAbilityError, match="TokenScorer"):
        session.generate([[2, 6]], 1, torch.rand(1, 2), SamplingOptions(2), spans=[(1, 2)])

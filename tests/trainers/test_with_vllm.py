"""Complete runs whose turns are sampled by vLLM, with the stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nip_astra.language_models.vllm import VllmSession
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import resume_experiment
from tests.kit.experiments import FAST, metrics_of, run_in, stopped_after
from tests.kit.tiny import sampled_by_vllm
from tests.language_models import fake_vllm
from tests.language_models.vllm_on_ray import compared_generate

LORA = "ast_chat.attacker.language_model.lora={rank: 4}"


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


def run(scenario: Path, folder: Path, trainer: str, *overrides: str, **settings: Any) -> Path:
    short = (*FAST, "training.num_iterations=2", "training.num_episodes_per_experience=2")
    of_vllm = sampled_by_vllm(scenario, "attacker", "target")
    resolved = resolve_experiment(
        trainer=trainer, scenario=str(scenario), overrides=[*short, *of_vllm, *overrides], seed=0
    )
    return run_in(folder, resolved, **settings)


def test_a_policy_ratio_is_one_even_if_vllm_sampled(tiny_scenario: Path, tmp_path: Path) -> None:
    path = run(
        *(tiny_scenario, tmp_path, "ast_grpo", LORA),
        f"ast_chat.target.language_model.model={tiny_scenario / 'attacker'}",
        "ast_chat.attacker.language_model.sleep_during_updates=true",
        "training.minibatch_size=64",
        test_run=True,
    )
    (engine,) = fake_vllm.LLM.started
    calls = engine.calls
    # Before and after the single update.
    assert calls.count("add_lora") == 2
    assert "sleep" in calls
    first, *_ = metrics_of(path)
    assert first["sampler_gap/largest"] < 1e-4
    # One step on all samples: old and new log-probabilities are the same computation.
    assert first["clip_fraction"] == 0.0


def test_a_run_stopped_and_resumed_equals_an_uninterrupted_run(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    given = (tiny_scenario, tmp_path, "ast_dpo", "training.minibatch_size=2")
    whole = run(*given, run_id="whole")
    with stopped_after(3):
        run(*given, run_id="parts")
    resume_experiment(tmp_path / "parts", progress=False)
    assert metrics_of(tmp_path / "parts") == metrics_of(whole)
    assert len(fake_vllm.LLM.started) == 6, "two engines for each of three processes"


def test_a_target_with_an_engine_of_its_own_scores_probes(
    tiny_scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an attacker whose engine holds an adapter, so that it cannot score probes."""
    model = tiny_scenario / "attacker"
    gaps: list[float] = []
    monkeypatch.setattr(VllmSession, "generate", compared_generate(model, gaps))
    run(
        *(tiny_scenario, tmp_path, "ast_dpo", LORA),
        f"ast_chat.target.language_model.model={model}",
        "ast_chat.target.language_model.max_model_len=80",
        "ast_chat.reward.likelihood_model=target",
    )
    of_attacker, of_target = fake_vllm.LLM.started
    assert "add_lora" in of_attacker.calls
    assert "add_lora" not in of_target.calls
    # Two levels of two rollouts, and of the measurements.
    assert len(gaps) > 4
    assert max(gaps) < 1e-4


def test_the_gap_of_a_task_is_that_of_its_rollouts(tmp_path: Path) -> None:
    policy = '{"_type": "vllm", "model": "scenario://models/policy"}'
    resolved = resolve_experiment(
        trainer="self_hosted_grpo",
        overrides=[f"task.policy.language_model={policy}"],
    )
    path = run_in(tmp_path, resolved, test_run=True)
    first, *_ = metrics_of(path)
    assert 0.0 < first["sampler_gap/largest"] < 1e-4

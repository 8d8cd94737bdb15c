"""Complete runs whose turns are sampled by vLLM, with the stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nip_astra.language_models.vllm import VllmSession
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import resume_experiment
from tests.kit.experiments import FAST, metrics_of, run_in, stopped_after
from tests.kit.tiny import write_scenario
from tests.language_models import fake_vllm
from tests.language_models.vllm_on_ray import compared_generate


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    root = tmp_path / "scenario"
    root.mkdir()
    write_scenario(root)
    content = yaml.safe_load((root / "scenario.yaml").read_text())
    for role in ("attacker", "target"):
        content["ast_chat"][role]["language_model"]["_type"] = "vllm"
    (root / "scenario.yaml").write_text(yaml.safe_dump(content))
    return root


def run(scenario: Path, trainer: str, *overrides: str, **settings: Any) -> Path:
    short = (*FAST, "training.num_iterations=2", "training.num_episodes_per_experience=2")
    resolved = resolve_experiment(
        trainer=trainer, scenario=str(scenario), overrides=[*short, *overrides], seed=0
    )
    return run_in(scenario.parent, resolved, **settings)


def test_a_policy_ratio_is_one_even_if_vllm_sampled(scenario: Path) -> None:
    base = yaml.safe_load((scenario / "scenario.yaml").read_text())["ast_chat"]["attacker"]
    path = run(
        scenario,
        "ast_grpo",
        "ast_chat.attacker.language_model.lora={rank: 4}",
        f"ast_chat.target.language_model.model={base['language_model']['model']}",
        "ast_chat.attacker.language_model.sleep_during_updates=true",
        "training.minibatch_size=64",
        test_run=True,
    )
    assert len(fake_vllm.LLM.started) == 1
    calls = fake_vllm.LLM.started[0].calls
    # Before and after the single update.
    assert calls.count("add_lora") == 2
    assert "sleep" in calls
    first, *_ = metrics_of(path)
    assert first["sampler_gap/largest"] < 1e-4
    # One step on all samples: old and new log-probabilities are the same computation.
    assert first["clip_fraction"] == 0.0


def test_a_run_stopped_and_resumed_equals_an_uninterrupted_run(scenario: Path) -> None:
    smaller = "training.minibatch_size=2"
    whole = run(scenario, "ast_dpo", smaller, run_id="whole")
    with stopped_after(3):
        run(scenario, "ast_dpo", smaller, run_id="parts")
    resume_experiment(scenario.parent / "parts", progress=False)
    assert metrics_of(scenario.parent / "parts") == metrics_of(whole)
    assert len(fake_vllm.LLM.started) == 6, "two engines for each of three processes"


def test_a_target_with_an_engine_of_its_own_tells_how_likely_it_finds_probes(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an attacker whose engine holds an adapter, so that it cannot score probes."""
    content = yaml.safe_load((scenario / "scenario.yaml").read_text())["ast_chat"]
    model = Path(content["attacker"]["language_model"]["model"])
    gaps: list[float] = []
    monkeypatch.setattr(VllmSession, "generate", compared_generate(model, gaps))
    run(
        scenario,
        "ast_dpo",
        "ast_chat.attacker.language_model.lora={rank: 4}",
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

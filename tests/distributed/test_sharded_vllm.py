"""Sharded weights whose turns vLLM samples in the first process, with the stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.sampling import SamplingOptions
from nip_astra.language_models.services.sharded import ShardedService
from nip_astra.language_models.vllm import VllmLanguageModel
from nip_astra.language_models.vllm_backend.engine import Request
from tests.distributed.learning import CPU, learn
from tests.distributed.processes import together
from tests.kit.command_line import plugins_forgotten_after
from tests.kit.messages import says
from tests.kit.resuming import short_experiment
from tests.kit.tiny import make_language_model, sampled_by_vllm
from tests.language_models import fake_vllm

LORA = "ast_chat.attacker.language_model.lora={}"


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_vllm.install(monkeypatch)
    with plugins_forgotten_after():
        yield


def seen_in(trainer: Any) -> dict[str, Any]:
    engines = fake_vllm.LLM.started
    named = engines[0].module.named_parameters() if engines else ()
    return {
        "is_sharded": isinstance(trainer.service, ShardedService),
        "engine": {name: weight.clone() for name, weight in named},
        "calls": [engine.calls for engine in engines],
    }


@pytest.mark.parametrize(
    "lora", ["null", pytest.param("{rank: 2}", marks=pytest.mark.slow)], ids=["full", "lora"]
)
def test_the_engine_of_the_leader_gets_the_jointly_learned_weights(
    lora: str, tmp_path: Path
) -> None:
    options = [*sampled_by_vllm(tmp_path / "scenario", "attacker"), LORA.format(lora)]
    resolved = short_experiment("ast_dpo", tmp_path / "scenario", *options, num_iterations=2)
    how: dict[str, Any] = {"in_float64": False, "scores_by_module": True, "inspect": seen_in}
    leader, other = together(lambda store: learn(resolved, store, "fsdp", **how), tmp_path)
    assert leader["is_sharded"]
    # Only the leader's engine samples, from each iteration's weights.
    assert other["calls"] == [[]]
    (calls,) = leader["calls"]
    loaded = "load_weights" if lora == "null" else "add_lora"
    assert calls.count(loaded) >= 2
    if lora == "null":
        for name, weight in leader["engine"].items():
            torch.testing.assert_close(weight, leader["weights"][name], atol=0, rtol=0)
        return
    whole, _ = together(lambda store: learn(resolved, store, **how), tmp_path)
    assert not whole["is_sharded"]
    assert leader["calls"] == whole["calls"]
    for name, weight in leader["weights"].items():
        # float32.
        torch.testing.assert_close(weight, whole["weights"][name], atol=2e-4, rtol=0)


def test_engines_in_actors_are_started_by_the_first_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = make_language_model(tmp_path / "model", seed=1)
    parameters = VllmLanguageModel.Parameters(model=str(folder), num_engines=2)
    model = VllmLanguageModel.load(parameters, device=CPU, scenario_dir=None, trainable=True)
    with pytest.raises(ConfigurationError) as caught:
        model.ask([Request((1,), 0)], SamplingOptions(max_new_tokens=1))
    assert says(caught.value, "process 1", "the first process alone", "huggingface")

"""The seven ported examples run, and print, save and measure the right results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from nip_astra.astra import LlamaGuardScorer
from nip_astra.errors import ConfigurationError
from tests.astra.conftest import Models
from tests.astra.examples import (
    custom_gpu,
    gpt2_backup,
    gpt2_eval,
    gpt2_train,
    hf_eval,
    hf_train,
    ppo,
)
from tests.astra.toys import Finds
from tests.kit.tiny import make_tokenizer
from tests.scorers.tiny_guard import make_guard


class Cats(Finds):
    """How much of a text is about cats, so that rewards differ."""

    def score(self, x: Any) -> list[float]:
        return [text.split().count("cat") / (len(text.split()) + 1) for text in x]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=2,
        eos_token_id=3,
        initializer_range=0.3,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def trained(models: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Any]:
    """The output of `hf_train`, with the data that it sent to W&B."""
    import wandb

    sent: list[dict[str, Any]] = []

    class Run:
        def log(self, values: dict[str, Any]) -> None:
            sent.append(values)

    folder = tmp_path_factory.mktemp("hf_train") / "custom_name"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setattr(wandb, "init", lambda **options: Run())
        trainer = hf_train.main(str(models.attacker), str(models.target), Cats(), folder)
    return trainer, folder, sent


def test_hf_train_evaluates_logs_and_leaves_the_best_and_the_last(
    trained: tuple[Any, Path, Any], models: Models
) -> None:
    trainer, folder, sent = trained
    lines = (folder / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2]
    for tag in ("best", "last"):
        AutoTokenizer.from_pretrained(folder / tag)
    last = AutoModelForCausalLM.from_pretrained(folder / "last").state_dict()
    for name, value in trainer.system.tester.state_dict().items():
        assert torch.equal(last[name], value), name
    before = AutoModelForCausalLM.from_pretrained(models.attacker).state_dict()
    assert any(not torch.equal(last[name], value) for name, value in before.items())
    assert {values["step"] for values in sent} == {1, 2, 3}
    assert math.isfinite(trainer.best_score)


def test_hf_eval_measures_the_trained_model(
    trained: tuple[Any, Path, Any], models: Models, tmp_path: Path
) -> None:
    _, folder, _ = trained
    metrics = hf_eval.main(str(folder / "best"), str(models.target), Cats(), tmp_path / "m.json")
    assert json.loads((tmp_path / "m.json").read_text()) == metrics
    assert metrics["summary"]["n_rollouts"] == 2
    assert [len(episode["per_turn"]) for episode in metrics["details"]] == [3, 3]


def test_gpt2_train_then_gpt2_eval_with_a_guard(gpt2: str, tmp_path: Path) -> None:
    trainer = gpt2_train.main(gpt2, Cats(), tmp_path / "gpt2")
    assert trainer._loop.state.num_optimizer_steps > 0
    weights = trainer.system.tester.state_dict()
    target = trainer.system.target.state_dict()
    assert any(not torch.equal(weights[name], target[name]) for name in weights)
    guard, _ = make_guard(tmp_path / "guard", num_steps=10)
    scorer = LlamaGuardScorer("cpu", model=str(guard))
    metrics = gpt2_eval.main(str(tmp_path / "gpt2" / "last"), gpt2, scorer, tmp_path / "m.json")
    turns = [turn for episode in metrics["details"] for turn in episode["per_turn"]]
    assert len(turns) == 15
    assert all(
        turn["target_toxicity"] is None or 0 <= turn["target_toxicity"] <= 1 for turn in turns
    )


def test_ppo_trains_attacker_and_value_head(gpt2: str) -> None:
    problem = ppo.PPOProblem(gpt2, Cats())
    watched = (*problem.vf.parameters(), problem.attacker.lm_head.weight)
    before = [parameter.detach().clone() for parameter in watched]
    logs = ppo.main(problem)
    assert len(logs) > 4
    assert all(math.isfinite(value) for log in logs for value in log.values())
    assert all(not torch.equal(old, new) for old, new in zip(before, watched, strict=True))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ppo.AsItWas, r"AsItWas"),
        (ppo.HeadForgotten, "4 tensors of the value head"),
    ],
)
def test_the_original_value_function_of_the_example_is_reported(
    gpt2: str, kind: Any, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        ppo.main(kind(gpt2, Cats()))


def test_custom_gpu_counts_its_batches(gpt2: str) -> None:
    assert all(1 <= size <= 7 for size in custom_gpu.main(gpt2, Cats()))


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_custom_gpu_on_two_devices(gpt2: str) -> None:
    assert len(custom_gpu.main(gpt2, Cats(), auditor_device="cuda:0", target_device="cpu")) == 2


def test_gpt2_backup_learns_from_rewards_of_later_turns(gpt2: str, tmp_path: Path) -> None:
    trainer = gpt2_backup.main(gpt2, Cats(), tmp_path / "checkpoints")
    graphs = trainer.sampler.played
    assert len(graphs) == 4, "two episodes an iteration, dev episodes apart"
    system = trainer.system
    for node in graphs[0].children:
        (own,) = system.reward([node.context], [node.probe], [node.response])
        best = max(child.reward for child in node.children)
        assert node.reward - 0.9 * best == pytest.approx(own, abs=1e-4) or math.isnan(own)
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "checkpoints/evaluations.jsonl").open()
    ]
    assert steps == [1, 2]

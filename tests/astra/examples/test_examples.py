"""The seven ported examples run, and print, save and measure the right results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.astra import LlamaGuardScorer
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
from tests.kit.tiny import make_gpt2
from tests.kit.tiny_guard import make_guard


class Cats(Finds):
    """How much of a text is about cats, so that rewards differ."""

    def score(self, x: Any) -> list[float]:
        return [text.split().count("cat") / (len(text.split()) + 1) for text in x]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_gpt2(tmp_path_factory.mktemp("gpt2") / "model"))


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
    assert all(torch.equal(last[n], w) for n, w in trainer.system.tester.state_dict().items())
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
    own, target = (one.state_dict() for one in (trainer.system.tester, trainer.system.target))
    assert any(not torch.equal(own[name], target[name]) for name in own)
    guard, _ = make_guard(tmp_path / "guard", num_steps=10)
    scorer = LlamaGuardScorer("cpu", model=str(guard))
    metrics = gpt2_eval.main(str(tmp_path / "gpt2" / "last"), gpt2, scorer, tmp_path / "m.json")
    rates = [turn["target_toxicity"] for one in metrics["details"] for turn in one["per_turn"]]
    assert len(rates) == 15
    assert all(rate is None or 0 <= rate <= 1 for rate in rates)


def test_ppo_trains_attacker_and_value_head(gpt2: str) -> None:
    problem = ppo.PPOProblem(gpt2, Cats())
    watched = (*problem.vf.parameters(), problem.tester.lm_head.weight)
    before = [parameter.detach().clone() for parameter in watched]
    logs = ppo.main(problem)
    assert len(logs) > 4
    assert all(math.isfinite(value) for log in logs for value in log.values())
    assert all(not torch.equal(old, new) for old, new in zip(before, watched, strict=True))


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
def test_custom_gpu_counts_its_batches(gpt2: str, device: str) -> None:
    sizes = custom_gpu.main(gpt2, Cats(), auditor_device=device)
    assert [1 <= size <= 7 for size in sizes] == [True, True]


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

"""Dev evaluations, checkpoints, early stopping and resuming."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nip_astra.astra import DPO, PPO, ASTSampler, HFASTConfiguration, HFASTTrainer
from nip_astra.errors import CheckpointError, ConfigurationError
from tests.astra.conftest import Models
from tests.astra.toys import PROMPTS, WordProblem, hf_problem

DEV = ["hello you", "a cat"]


def trainer_of(folder: Path, problem: Any = None, algorithm: Any = DPO, **options: Any) -> Any:
    problem = WordProblem(ppl_weight=0.0) if problem is None else problem
    fields = {"lr": 0.1, "training_steps": 4, "batch_size": 4, **options.pop("config", {})}
    values = {"dev_prompts": DEV, "eval_every": 2, "ckpt_dir": folder, **options}
    env = ASTSampler(problem, PROMPTS)
    return HFASTTrainer(HFASTConfiguration(**fields), env, algorithm(problem), **values)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def test_the_configuration_takes_arguments_and_is_that_of_fine_tuning() -> None:
    plain, other = HFASTConfiguration(), HFASTConfiguration(lr=1e-3, seed=4)
    assert (plain.lr, plain.batch_size, plain.optimizer) == (1e-5, 4, "adamw")
    assert (plain.training_steps, plain.num_episodes_per_experience) == (1000, 2)
    assert (other.lr, other.seed) == (1e-3, 4)


def test_the_best_is_replaced_only_by_a_better_model(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, config={"training_steps": 12}, eval_every=1)
    assert trainer.best_score == -math.inf
    saved: list[tuple[int, str]] = []
    save = trainer.save
    trainer.save = lambda step, tag="step": saved.append((step, tag)) or save(step, tag)
    trainer.train()
    lines = evaluations(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line["metric"] == "dev/mean_reward" for line in lines)
    values = [line["dev/mean_reward"] for line in lines]
    assert trainer.best_score == max(values)
    better = [s["step"] for i, s in enumerate(lines) if values[i] > max([-9.0, *values[:i]])]
    assert [step for step, tag in saved if tag == "best"] == better
    assert [line["step"] for line in lines if line["is_best"]] == better
    assert len(better) < len(lines)
    assert [step for step, tag in saved if tag == "last"] == list(range(1, 13))
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"best", "last", "state", "evaluations.jsonl"}


def test_an_evaluation_gives_its_figure_and_nan_without_prompts(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "a")
    value = trainer.eval_epoch(step=0)
    assert math.isfinite(value)
    assert value == trainer.eval_epoch(step=0), "the same attacker, the same figure"
    assert math.isnan(trainer_of(tmp_path / "b", dev_prompts=None).eval_epoch(step=0))


def test_without_dev_prompts_the_last_attacker_is_saved_all_the_same(
    models: Models, tmp_path: Path
) -> None:
    problem = hf_problem(models)
    trainer = trainer_of(tmp_path, problem, dev_prompts=None, config={"lr": 1e-2})
    trainer.train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "last").state_dict()
    assert all(torch.equal(saved[n], w) for n, w in problem.attacker.state_dict().items())
    assert not (tmp_path / "best").exists()


def test_ppo_weighs_tokens_alike_however_a_step_is_split(models: Models, tmp_path: Path) -> None:
    def learned(name: str, batch_size: int, parts: int) -> list[torch.Tensor]:
        problem = hf_problem(models)
        config = {"batch_size": batch_size, "gradient_accumulation_steps": parts, "lr": 1.0}
        config |= {"training_steps": 1, "optimizer": "sgd", "max_grad_norm": None}
        trainer = trainer_of(tmp_path / name, problem, PPO, dev_prompts=None, config=config)
        trainer.train()
        assert trainer._loop.state.num_optimizer_steps == 1
        return [parameter.detach() for parameter in problem.parameters()]

    whole, split = learned("whole", 64, 1), learned("split", 5, 64)
    torch.testing.assert_close(whole, split, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("period", "eval_every"), [({"eval_period": 1}, None), ({}, 1)], ids=["config", "trainer"]
)
def test_training_ends_early_by_the_dev_figure(
    tmp_path: Path, period: dict[str, int], eval_every: int | None
) -> None:
    config = {"training_steps": 60, "early_stopping_patience": 2, "lr": 0.5, **period}
    trainer_of(tmp_path, config=config, eval_every=eval_every).train()
    lines = evaluations(tmp_path)
    assert len(lines) < 60
    assert [line["is_best"] for line in lines[-2:]] == [False, False]


def test_resuming_ends_with_the_same_weights_as_not_stopping(
    models: Models, tmp_path: Path
) -> None:
    def trainer(name: str, steps: int, problem: Any) -> Any:
        config = {"training_steps": steps, "lr": 1e-2}
        return trainer_of(tmp_path / name, problem, PPO, config=config)

    whole = hf_problem(models)
    trainer("whole", 4, whole).train()
    trainer("parts", 2, hf_problem(models)).train()
    resumed = hf_problem(models)
    second = trainer("parts", 4, resumed)
    second.resume()
    second.train()
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


def test_a_custom_problem_is_resumed_and_an_unstarted_run_is_reported(tmp_path: Path) -> None:
    first = WordProblem(ppl_weight=0.0)
    trainer_of(tmp_path, first).train()
    second = WordProblem(ppl_weight=0.0)
    trainer = trainer_of(tmp_path, second)
    trainer.resume()
    assert torch.equal(first.attacker.logits, second.attacker.logits)
    with pytest.raises(CheckpointError, match=r"train\(\)"):
        trainer_of(tmp_path / "new").resume()


def test_every_step_is_logged_and_wrong_input_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="nip_astra.astra"):
        trainer_of(tmp_path).train()
    assert "mean_reward=" in caplog.text
    assert "dev/mean_reward=" in caplog.text
    with pytest.raises(ConfigurationError, match="eval_every=0"):
        trainer_of(tmp_path, eval_every=0)

    unsavable = WordProblem()
    logits, unsavable.attacker = unsavable.attacker.logits, torch.nn.Linear(1, 1)
    unsavable.attacker.logits = logits
    with pytest.raises(CheckpointError, match="save_pretrained"):
        trainer_of(tmp_path / "u", unsavable)

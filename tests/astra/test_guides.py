"""The code of ASTRA-RL's trainer guides runs with only the import root changed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.astra import DPO, IPO, PPO, ASTSampler, Harness, Trainer, TrainingConfiguration
from nip_astra.astra.logging import logger
from tests.astra.conftest import Models
from tests.astra.toys import PROMPTS, ValuedWordProblem, WordProblem, hf_problem, says
from tests.kit.documents import ROOT
from tests.kit.learning import Learning


def small(**changes: Any) -> TrainingConfiguration:
    values = {"training_steps": 2, "num_episodes_per_experience": 2, "batch_size": 4, "lr": 1e-2}
    return TrainingConfiguration(**{**values, **changes})


def test_the_base_trainer_trains_and_transformers_loads_the_saved_problem(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = hf_problem(models)
    before = [p.detach().clone() for p in problem.parameters()]
    Trainer(
        config=small(), environment=ASTSampler(problem, PROMPTS), algorithm=DPO(problem)
    ).train()
    after = list(problem.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert os.listdir(tmp_path) == [], "the base trainer writes nothing"
    problem.attacker.save_pretrained("final_ckpt")
    problem.tokenizer.save_pretrained("final_ckpt")
    loaded = AutoModelForCausalLM.from_pretrained("final_ckpt").state_dict()
    for name, value in problem.attacker.state_dict().items():
        assert torch.equal(loaded[name], value), name
    assert len(AutoTokenizer.from_pretrained("final_ckpt")) == len(problem.tokenizer)


def test_the_guide_lists_every_number_that_a_step_logs_and_the_defaults_as_they_are() -> None:
    guide = (ROOT / "doc" / "guides" / "coming-from-astra-rl.md").read_text(encoding="utf-8")
    for algorithm in (DPO, IPO, PPO):
        problem = ValuedWordProblem()
        harness = Harness(ASTSampler(problem, PROMPTS), algorithm(problem), 4)
        _, logs = harness.step(next(harness.experience()))
        assert logs
        assert [name for name in logs if f"`{name}`" not in guide] == []
    config, solver = TrainingConfiguration(), PPO(ValuedWordProblem())
    ppo = solver.parameters
    for name in ("lr", "batch_size", "training_steps", "weight_decay", "max_grad_norm"):
        shown = f"{getattr(config, name):g}".replace("e-05", "e-5")
        assert re.search(rf"{name}={shown}(\.0)?[`, ]", guide.split("## Defaults that differ")[1])
    assert f"| {solver.clip_range}, {ppo.value_weight} of half the squared error" in guide
    assert f"`lam={ppo.lam}`, KL weight {ppo.kl.weight}" in guide


class MyConfig(TrainingConfiguration):
    """As in the guides: custom attributes after `super().__init__`."""

    def __init__(self, ckpt_dir: str, seed: int) -> None:
        super().__init__(
            seed=seed,
            lr=0.3,
            batch_size=4,
            optimizer="adamw",
            gradient_accumulation_steps=1,
            training_steps=12,
            num_episodes_per_experience=2,
        )
        self.eval_every = 2
        self.ckpt_dir = ckpt_dir


class MyTrainer(Trainer):
    """A custom loop: evaluation, saving, accumulation, a schedule, and early stopping."""

    def __init__(
        self, config: MyConfig, environment: Any, algorithm: Any, dev_prompts: Any = None
    ) -> None:
        super().__init__(config, environment, algorithm)
        self.dev_prompts = dev_prompts or []
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.5, 8)
        self.saved: list[int] = []
        self.rates: list[float] = []
        os.makedirs(self.config.ckpt_dir, exist_ok=True)

    def _save_hf(self, step: int) -> None:
        self.harness.sampler.system.attacker.save_pretrained(self.config.ckpt_dir)
        self.saved.append(step)

    @torch.no_grad()
    def _eval_dev(self, step: int, tag: str = "dev") -> float:
        sampler = self.harness.sampler
        rewards = [sampler.final_reward(sampler.eval_rollout(p)) for p in self.dev_prompts]
        return sum(rewards) / len(rewards)

    def train(self) -> None:
        best, num_since, patience = float("-inf"), 0, 2
        for step in range(self.config.training_steps):
            for batch in self.harness.experience():
                self._global_step_counter += 1
                loss, logs = self.harness.step(batch)
                (loss / self.config.gradient_accumulation_steps).backward()
                if self._global_step_counter % self.config.gradient_accumulation_steps == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                logs["loss"] = float(loss.detach().item())
                self.harness.log_current_step(logs)
            self.scheduler.step()
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            if (step + 1) % self.config.eval_every == 0:
                score = self._eval_dev(step + 1)
                logger.info("dev %s", score)
                num_since = 0 if score > best else num_since + 1
                if score > best:
                    best = score
                    self._save_hf(step + 1)
                if num_since >= patience:
                    return


def test_a_custom_loop_with_schedule_saving_and_early_stopping_learns(
    tmp_path: Path, learning: Learning
) -> None:
    problem = WordProblem(ppl_weight=0.0)
    trainer = MyTrainer(
        MyConfig(str(tmp_path / "ckpt"), learning.seed),
        ASTSampler(problem, PROMPTS, tree_width=4),
        DPO(problem),
        dev_prompts=PROMPTS,
    )
    trainer.train()
    learning.check(says(problem, "silly"), threshold=0.5, best=1.0)
    assert trainer.saved, "nothing was best"
    assert (tmp_path / "ckpt" / "speaker.pt").exists()
    assert len(trainer.rates) < 12, "it did not stop early"
    assert trainer.rates[0] == pytest.approx(0.3 * (1 - 0.5 / 8))

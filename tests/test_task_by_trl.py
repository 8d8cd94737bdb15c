"""A task with options by TRL's names is TRL's run: the same losses, gradients, steps and rates.

Our run comes first; TRL's `GRPOTrainer` then trains the same model on the same completions, in the
same minibatches. It draws no random number that matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra import train_task
from nip_astra.checkpoints.tensors import DUMPS, load_state
from tests.kit.experiments import metrics_of
from tests.kit.tiny import make_language_model

PROMPTS = [f"{first} {second}" for first in ("the", "a", "silly") for second in ("cat", "mat")]
MAX_LENGTH = 6
SHARED: dict[str, Any] = {
    "learning_rate": 0.05,
    "num_generations": 4,
    "max_completion_length": MAX_LENGTH,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "max_grad_norm": 1e6,
    # Adam would turn rounding of gradients near 0 into steps.
    "optim": "sgd",
}


def score_completion(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that differ between completions: by their tokens and their length."""
    return [sum(ids) % 7 / 3 - len(ids) / 10 for ids in completion_ids]


@dataclass
class Step:
    """What an optimizer step is: its loss, gradients before clipping, and learning rate."""

    loss: float
    gradients: list[Tensor]
    lr: float


@dataclass
class Record:
    """A run's steps, the weights after them, and the minibatches of each iteration."""

    steps: list[Step] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    iterations: list[list[dict[str, Tensor]]] = field(default_factory=list)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "tiny")


def run_task(
    model: Path, runs_dir: Path, options: dict[str, Any], overrides: Sequence[str] = ()
) -> Record:
    """Train by our recipe, and read the run's dumps."""
    options = SHARED | options
    optimizer = options.pop("optim").removesuffix("_torch")
    train_task(
        model=model,
        data=[{"prompt": prompt} for prompt in PROMPTS],
        rewards=score_completion,
        overrides=[f"training.optimizer={optimizer}", *overrides],
        runs_dir=str(runs_dir),
        run_id="ours",
        dump_period=1,
        progress=False,
        device="cpu",
        **options,
    )
    record = Record()
    rows = [row for row in metrics_of(runs_dir / "ours") if "num_steps" in row]
    for folder, row in zip(sorted((runs_dir / "ours" / DUMPS).iterdir()), rows, strict=True):
        minibatches: list[dict[str, Tensor]] = []
        for path in sorted(folder.glob("*.json")):
            stage = path.stem.split("-", 1)[1]
            if stage.startswith("batch_"):
                minibatches.append(load_state(path.with_suffix("")))
            elif stage == "loss":
                loss = load_state(path.with_suffix(""))["loss"]
            elif stage == "gradients":
                gradients = list(load_state(path.with_suffix("")).values())
                record.steps.append(Step(loss, gradients, row["lr"]))
            elif stage == "weights":
                record.weights = list(load_state(path.with_suffix("")).values())
        record.iterations.append(minibatches)
    return record


def rows_of(minibatches: list[dict[str, Tensor]]) -> list[tuple[int, list[int], list[int]]]:
    """The group, prompt and completion of each row, in order."""
    rows = []
    for batch in minibatches:
        for row in range(len(batch["advantages"])):
            prompt = batch["context"][row][batch["context_mask"][row]].tolist()
            mask = batch["response_mask"][row]
            completion = batch["response"][row][mask].tolist()
            if not completion:
                # Excluded, since it is truncated.
                completion = batch["response"][row][:MAX_LENGTH].tolist()
            rows.append((int(batch["episode"][row]), prompt, completion))
    return rows


def run_trl(
    model: Path, directory: Path, ours: Record, options: dict[str, Any], patch: pytest.MonkeyPatch
) -> Record:
    """Train by TRL on the completions of our run, in its minibatches."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer import grpo_trainer

    record, iterations = Record(), iter(ours.iterations)
    order: list[int] = []

    def replay(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        # TRL compares neighbours; the order of minibatches follows.
        minibatches = next(iterations)
        rows = rows_of(minibatches)
        by_group = sorted(range(len(rows)), key=lambda row: rows[row][0])
        order[:] = [by_group.index(row) for row in range(len(rows))]
        assert len(prompts) == len(rows)
        chosen = [rows[row] for row in by_group]
        return {
            "prompt_ids": [prompt for _, prompt, _ in chosen],
            "completion_ids": [completion for *_, completion in chosen],
            "logprobs": [[0.0] * len(completion) for *_, completion in chosen],
        }

    def reorder(batch: dict[str, Any]) -> dict[str, Any]:
        def is_of_rows(value: Any) -> bool:
            return isinstance(value, Tensor) and value.ndim > 0

        return {n: value[order] if is_of_rows(value) else value for n, value in batch.items()}

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
            gradients = [weight.grad.clone() for weight in given["model"].parameters()]
            lr = given["optimizer"].param_groups[0]["lr"]
            record.steps.append(Step(float("nan"), gradients, lr))

    patch.setattr(grpo_trainer, "shuffle_sequence_dict", reorder)
    patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    config = trl.GRPOConfig(
        str(directory),
        **(SHARED | options),
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        score_completion,
        config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Recorder()],
        rollout_func=replay,
    )
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    for step, loss in zip(record.steps, losses, strict=True):
        step.loss = loss
    record.weights = [weight.detach() for weight in trainer.model.parameters()]
    return record


CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo by default": {"loss_type": "cispo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "luspo of tokens": {"loss_type": "luspo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "temperature": {"loss_type": "dapo", "temperature": 0.6, "beta": 0.02, "learning_rate": 0.01},
    "divergence": {"loss_type": "dapo", "beta": 0.5},
    "divergence without ratio": {"loss_type": "grpo", "beta": 0.5, "use_bias_correction_kl": False},
    "truncated grpo": {"loss_type": "grpo", "mask_truncated_completions": True},
    "truncated bnpo": {"loss_type": "bnpo", "mask_truncated_completions": True},
    "truncated dr_grpo": {"loss_type": "dr_grpo", "mask_truncated_completions": True},
    "unscaled": {"loss_type": "grpo", "scale_rewards": "none"},
    "batch scale": {"loss_type": "grpo", "scale_rewards": "batch"},
    "cosine": {"loss_type": "grpo", "lr_scheduler_type": "cosine", "warmup_steps": 1},
    "constant": {"loss_type": "grpo", "lr_scheduler_type": "constant_with_warmup"}
    | {"warmup_steps": 2, "max_grad_norm": 0.1, "weight_decay": 0.1},
    "adamw": {"loss_type": "grpo", "optim": "adamw_torch", "weight_decay": 0.1},
}
MORE_EPOCHS = ("grpo", "cispo", "luspo", "gspo", "sapo", "vespo", "divergence", "temperature")


def assert_equal_runs(ours: Record, theirs: Record, *, are_exact: bool = True) -> None:
    assert len(ours.steps) == len(theirs.steps)
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert mine.lr == pytest.approx(other.lr, abs=1e-12)
        assert mine.loss == pytest.approx(other.loss, abs=2e-5, rel=2e-5)
        if not are_exact:
            continue
        size = max(float(gradient.abs().max()) for gradient in other.gradients)
        for gradient, expected in zip(mine.gradients, other.gradients, strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-4 * size + 1e-7, rtol=1e-3)
    for weight, expected in zip(ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(weight, expected, atol=1e-4 if are_exact else 2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_a_task_with_options_of_trl_is_the_run_of_trl(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options = CASES[name]
    ours = run_task(model, tmp_path, options)
    assert len(ours.iterations) == SHARED["max_steps"]
    for minibatches in ours.iterations:
        assert [len(batch["advantages"]) for batch in minibatches] == [4, 4]
    theirs = run_trl(model, tmp_path / "trl", ours, options, monkeypatch)
    # TRL shows clipped gradients.
    assert_equal_runs(ours, theirs, are_exact=not {"max_grad_norm", "optim"} & options.keys())


@pytest.mark.parametrize("name", MORE_EPOCHS)
def test_later_steps_on_the_same_completions_are_those_of_trl(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options = CASES[name] | {"lr_scheduler_type": "constant"}
    sizes = ["training.num_epochs=2", "training.gradient_accumulation_steps=2"]
    ours = run_task(model, tmp_path, options | {"max_steps": 1}, sizes)
    assert len(ours.steps) == 2
    # The second epoch is of the same rows; TRL takes them in the order of the first.
    ours.iterations[0] = ours.iterations[0][:2]
    more = {"num_iterations": 2, "max_steps": 2}
    theirs = run_trl(model, tmp_path / "trl", ours, options | more, monkeypatch)
    assert_equal_runs(ours, theirs)

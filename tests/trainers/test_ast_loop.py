"""The AST loop: every parameter acts, numbers repeat, and a stopped run goes on exactly."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.errors import ConfigurationError, NonFiniteLossError, StopRequested
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.resume_check import what_was_found
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.run import prepare_experiment, resume_experiment, run_experiment
from nip_astra.trainers.ast.base import rollout_token_metrics
from nip_astra.trainers.ast.dpo import AstDpoTrainer
from nip_astra.trainers.optimization import build_optimizer, learning_rate
from tests.kit.tiny import experience_of

QUIET = {"progress": False}
FAST = ("ast_chat.evaluation.use_random_search=false", "ast_chat.evaluation.num_episodes=2")


def _resolved(scenario: Path, *overrides: str, seed: int = 0):
    return resolve_experiment(
        trainer="ast_dpo", scenario=str(scenario), overrides=[*FAST, *overrides], seed=seed
    )


def _run(scenario: Path, runs: Path, run_id: str, *overrides: str, **settings: Any):
    options = {"runs_dir": str(runs), "run_id": run_id, **QUIET, **settings}
    return run_experiment(_resolved(scenario, *overrides), **options)


def _metrics(runs: Path, run_id: str) -> list[dict[str, Any]]:
    lines = (runs / run_id / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _trainer(scenario: Path, *overrides: str) -> AstDpoTrainer:
    return prepare_experiment(_resolved(scenario, *overrides), **QUIET).trainer


@pytest.fixture(scope="module")
def whole(tiny_scenario: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two iterations."""
    runs = tmp_path_factory.mktemp("whole")
    return _run(tiny_scenario, runs, "whole", "training.num_iterations=2").run_directory.path


def test_a_run_leaves_everything_in_its_directory(whole: Path) -> None:
    path = whole
    for name in (
        "hyper_parameters.yaml",
        "settings.yaml",
        "environment.json",
        "metrics.jsonl",
        "timings.jsonl",
        "results.json",
        "log.txt",
        "rollouts/train.jsonl",
        "rollouts/evaluation.jsonl",
        "checkpoints/latest",
    ):
        assert (path / name).is_file(), name
    results = json.loads((path / "results.json").read_text())
    keys = {
        "failure_rate",
        "failure_rate_interval",
        "mean_score",
        "probe_nll",
        "distinct_share",
        "plants_found",
        "num_plants",
        "num_episodes",
        "target_queries",
    }
    assert keys <= set(results["before"])
    assert keys <= set(results["after"])
    rows = _metrics(path.parent, "whole")
    assert [row["step"] for row in rows] == [1, 2]
    # The attacker starts as its reference.
    assert abs(rows[0]["rollout/kl"]) < 1e-4
    assert rows[0]["rollout/entropy"] == pytest.approx(rows[0]["probe_nll"], abs=1e-4)
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    tokenizer = AutoTokenizer.from_pretrained(path / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.chat_template


def test_the_saved_model_is_the_trained_one(whole: Path, tiny_scenario: Path) -> None:
    saved = AutoModelForCausalLM.from_pretrained(whole / "model").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tiny_scenario / "attacker").state_dict()
    assert any(not torch.equal(saved[name], before[name]) for name in saved)


def test_another_seed_gives_other_numbers(whole: Path, tiny_scenario: Path, tmp_path: Path) -> None:
    options = {"runs_dir": str(tmp_path), "run_id": "one", **QUIET}
    run_experiment(_resolved(tiny_scenario, "training.num_iterations=2", seed=1), **options)
    assert _metrics(whole.parent, "whole") != _metrics(tmp_path, "one")


class _StopAfter:
    """A stop flag that is raised at the n-th time it is asked."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self) -> str | None:
        self.count -= 1
        return "SIGTERM" if self.count < 0 else None


def test_a_run_stopped_anywhere_and_resumed_equals_one_that_was_not(
    tiny_scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Batches of one sample, so that a stop falls into the middle of an iteration's batches.
    sizes = ("num_iterations=2", "num_episodes_per_experience=2", "minibatch_size=1")
    overrides = [f"training.{size}" for size in sizes]
    _run(tiny_scenario, tmp_path, "whole", *overrides)
    for count in (1, 4, 6, 9):
        parts = f"stopped-{count}"
        flag = _StopAfter(count)
        monkeypatch.setattr("nip_astra.run.stop_on_signals", lambda flag=flag: _stopping(flag))
        with pytest.raises(StopRequested, match="nip-astra resume"):
            _run(tiny_scenario, tmp_path, parts, *overrides)
        monkeypatch.setattr("nip_astra.run.stop_on_signals", lambda: _stopping(lambda: None))
        resume_experiment(tmp_path / parts, **QUIET)
        assert what_was_found(tmp_path / parts) == what_was_found(tmp_path / "whole"), parts


def _stopping(flag):
    from contextlib import nullcontext

    return nullcontext(flag)


def test_a_step_raises_the_chosen_and_lowers_the_rejected(tiny_scenario: Path) -> None:
    trainer = _trainer(tiny_scenario, "training.lr=1e-3")
    experience = experience_of(trainer)
    assert experience.samples
    batch = trainer.collate_fn(experience.samples)

    def ratios() -> torch.Tensor:
        chosen, rejected = trainer.policy_logprobs(batch, "chosen", "rejected")
        return (chosen.sum(1) - rejected.sum(1)).detach()

    before = ratios()
    assert torch.allclose(before, batch["reference_logratio"], atol=1e-4)
    loss = trainer.step(batch).loss
    assert loss.item() == pytest.approx(math.log(2.0), abs=1e-5)
    loss.backward()
    trainer.optimizer.step()
    assert ratios().mean() > before.mean()
    assert trainer.step(batch).loss < loss


FIELD_CHANGES: dict[str, object] = {
    "lr": 1e-2,
    "minibatch_size": 2,
    "optimizer": "sgd",
    "weight_decay": 0.5,
    "batch_order": "by_episode",
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "num_episodes_per_experience": 4,
    "num_epochs": 2,
    "max_grad_norm": 0.01,
    "lr_schedule": "linear",
    "num_warmup_steps": 10,
    "eval_period": 1,
    "dev_metric": "mean_score",
    "early_stopping_patience": 1,
}
NEEDS_EVALUATIONS = {"dev_metric", "early_stopping_patience"}


def test_every_field_of_the_training_configuration_has_a_change_to_test() -> None:
    assert set(FIELD_CHANGES) == set(TrainingConfiguration.model_fields)


@pytest.mark.parametrize("field", FIELD_CHANGES)
def test_every_field_of_the_training_configuration_is_used(tiny_scenario: Path, field: str) -> None:
    base = ["training.num_iterations=3", "training.minibatch_size=3"]
    if field in NEEDS_EVALUATIONS:
        base += ["training.num_iterations=6", "training.eval_period=1", "training.lr=1e-2"]
    one = _weights_and_results(tiny_scenario, *base)
    assert one != _weights_and_results(
        tiny_scenario, *base, f"training.{field}={FIELD_CHANGES[field]}"
    )


@cache
def _weights_and_results(scenario: Path, *overrides: str) -> tuple[Any, ...]:
    trainer = _trainer(scenario, *overrides)
    trainer.train()
    return [p.sum().item() for p in trainer.policy.parameters()], trainer.results


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop", "adagrad"])
def test_each_optimizer_moves_the_weights(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    config = TrainingConfiguration(optimizer=name, lr=0.1, weight_decay=0.1)
    optimizer = build_optimizer(config, [weight])
    weight.sum().backward()
    optimizer.step()
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert (weight < 1.0).all()


def test_the_learning_rate_warms_up_and_falls_as_scheduled() -> None:
    config = TrainingConfiguration(lr=2.0, lr_schedule="cosine", num_warmup_steps=4)
    assert learning_rate(config, step=0, progress=0.0) == pytest.approx(0.5)
    assert learning_rate(config, step=3, progress=0.0) == pytest.approx(2.0)
    assert learning_rate(config, step=9, progress=0.5) == pytest.approx(1.0)
    linear = TrainingConfiguration(lr=2.0, lr_schedule="linear")
    assert learning_rate(linear, step=0, progress=0.25) == pytest.approx(1.5)


def test_a_loss_that_is_not_finite_stops_saves_and_says_where(
    tiny_scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = AstDpoTrainer.loss
    calls = []

    def broken(self: AstDpoTrainer, batch: Any) -> LossOutput:
        calls.append(1)
        output = loss(self, batch)
        return output if len(calls) < 3 else LossOutput(output.loss * math.nan, output.metrics)

    monkeypatch.setattr(AstDpoTrainer, "loss", broken)
    with pytest.raises(NonFiniteLossError, match=r"optimizer step 3 \(iteration \d\).*saved"):
        _run(tiny_scenario, tmp_path, "nan", "training.minibatch_size=2")
    checkpoint = (tmp_path / "nan" / "checkpoints" / "latest").read_text().strip()
    weights = AutoModelForCausalLM.from_pretrained(
        tmp_path / "nan" / "checkpoints" / checkpoint / "attacker"
    ).state_dict()
    assert all(weight.isfinite().all() for weight in weights.values())


def test_the_best_checkpoint_by_dev_reward_is_kept_and_tested(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    _run(
        tiny_scenario,
        tmp_path,
        "best",
        "training.eval_period=1",
        "training.num_iterations=4",
        num_checkpoints_kept=1,
    )
    rewards = [row["dev/mean_reward"] for row in _metrics(tmp_path, "best")]
    best = (tmp_path / "best" / "checkpoints" / "best").read_text().strip()
    state = json.loads((tmp_path / "best" / "checkpoints" / best / "manifest.json").read_text())
    assert state["metadata"]["iteration"] == rewards.index(max(rewards)) + 1
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "best" / "model").state_dict()
    two = AutoModelForCausalLM.from_pretrained(
        tmp_path / "best" / "checkpoints" / best / "attacker"
    ).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_iterations_go_through_all_prompts_before_any_comes_again(tiny_scenario: Path) -> None:
    rollouts = _trainer(tiny_scenario, "training.num_episodes_per_experience=2").rollouts
    first, second = rollouts.prompts_of(0, seed=3), rollouts.prompts_of(1, seed=3)
    assert sorted(first + second) == sorted(rollouts.prompts)
    assert rollouts.prompts_of(0, seed=3) == first


def test_batches_hold_every_sample_once_in_a_seeded_order(tiny_scenario: Path) -> None:
    trainer = _trainer(tiny_scenario, "training.minibatch_size=4")
    samples = [{"x": torch.tensor(i)} for i in range(10)]

    def order(iteration: int, epoch: int) -> list[list[int]]:
        batches = trainer.batches(samples, iteration=iteration, epoch=epoch)
        return [batch["x"].tolist() for batch in batches]

    found = order(0, 0)
    assert [len(batch) for batch in found] == [4, 4, 2]
    assert sorted(number for batch in found for number in batch) == list(range(10))
    assert found == order(0, 0)
    assert found != order(0, 1) != order(1, 0)


def test_a_scenario_of_another_kind_is_refused(tiny_scenario: Path) -> None:
    prepared = prepare_experiment(_resolved(tiny_scenario), **QUIET)
    prepared.scenario_instance.kind = "other"
    with pytest.raises(ConfigurationError, match="trains on ast_chat only"):
        AstDpoTrainer(
            prepared.trainer.hyper_params, prepared.scenario_instance, ExperimentSettings()
        )


def test_batches_by_episode_hold_each_sample_once_and_share_more(tiny_scenario: Path) -> None:
    options = ("training.minibatch_size=3", "training.num_episodes_per_experience=4")
    trainers = {
        order: _trainer(tiny_scenario, *options, f"training.batch_order={order}")
        for order in ("shuffled", "by_episode")
    }
    forwarded = {}
    for order, trainer in trainers.items():
        samples = experience_of(trainer).samples
        batches = list(trainer.batches(samples, iteration=0, epoch=0))
        taken = sorted(int(e) for batch in batches for e in batch["episode"])
        assert taken == sorted(int(sample["episode"]) for sample in samples)
        with trainer.policy.counting() as spent:
            for batch in batches:
                trainer.step(batch)
        forwarded[order] = spent.forwarded
        other = [b["episode"].tolist() for b in trainer.batches(samples, iteration=0, epoch=1)]
        assert other != [batch["episode"].tolist() for batch in batches]
    assert forwarded["by_episode"] < forwarded["shuffled"]


def test_batches_by_episode_need_samples_that_say_theirs(tiny_scenario: Path) -> None:
    trainer = _trainer(tiny_scenario, "training.batch_order=by_episode")
    with pytest.raises(ConfigurationError, match="samples with 'episode'"):
        list(trainer.batches([{"x": torch.tensor(1)}], iteration=0, epoch=0))


def test_a_dry_run_steps_once_and_estimates_the_whole(tiny_scenario: Path) -> None:
    trainer = _trainer(tiny_scenario)
    weights = [p.clone() for p in trainer.policy.parameters()]
    estimate = trainer.dry_run()
    assert estimate["training_target_queries"] == 6 * 3 * 6
    assert estimate["estimated_training_hours"] > 0
    assert 0 < estimate["predicted_rollout_gib"] < estimate["predicted_peak_gib"] < 24
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.policy.parameters(), strict=True))


def test_a_prediction_scales_the_step_and_not_the_rollout(
    tiny_scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 2**30
    peaks = iter([2 * gib, 3 * gib])
    monkeypatch.setattr("nip_astra.trainers.dry_run.peak_memory_bytes", lambda: next(peaks))
    trainer = _trainer(tiny_scenario, "training.minibatch_size=3")
    monkeypatch.setattr(trainer, "flatten", lambda tree: type(trainer).flatten(trainer, tree)[:1])
    # One GiB for the rollout, and three pairs where the one that was tried took one.
    assert trainer.dry_run()["predicted_peak_gib"] == pytest.approx(1 + 1 + 3)


def test_work_and_memory_are_logged(whole: Path) -> None:
    for metrics in _metrics(whole.parent, "whole"):
        for part in ("attacker", "target", "reference"):
            assert metrics[f"tokens/{part}_forwarded"] > 0
            assert 1.0 <= metrics[f"tokens/{part}_forwarded_per_unique"] <= 1.3
        if metrics["num_steps"]:
            assert 1.0 <= metrics["tokens/update_forwarded_per_unique"] <= 1.1
    timings = (whole / "timings.jsonl").read_text().splitlines()
    assert all(json.loads(line)["memory/peak_gib"] > 0 for line in timings)


def test_a_test_run_cuts_every_loop_to_one_iteration(tiny_scenario: Path, tmp_path: Path) -> None:
    _run(tiny_scenario, tmp_path, "test", test_run=True)
    assert len(_metrics(tmp_path, "test")) == 1


@pytest.mark.parametrize("name", ["ast_ppo", "ast_grpo"])
def test_scoring_again_is_done_once_and_counted_apart(name: str, tiny_scenario: Path) -> None:
    resolved = resolve_experiment(
        trainer=name,
        scenario=str(tiny_scenario),
        overrides=["ast_chat.attacker.language_model.dtype=bfloat16"],
    )
    trainer = prepare_experiment(resolved, progress=False).trainer
    policy = trainer.policy
    with (
        mock.patch.object(policy, "token_scores", wraps=policy.token_scores) as scored,
        policy.counting() as spent,
    ):
        tree = experience_of(trainer).tree
    assert scored.call_count == 1
    metrics = rollout_token_metrics({"attacker": spent}, tree)
    assert 1.0 <= metrics["tokens/attacker_forwarded_per_unique"] <= 1.3
    assert metrics["tokens/rescored"] > 0
    assert spent.scored == 0
    assert "value" not in tree.nodes

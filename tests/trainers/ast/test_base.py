"""The AST loop: files of a run, batches, and counts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.errors import ConfigurationError, NonFiniteLossError
from nip_astra.evaluation.storage import read_rows
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.run import prepare_experiment
from nip_astra.trainers.ast.base import rollout_token_metrics
from nip_astra.trainers.ast.dpo import AstDpoTrainer
from tests.kit.experiments import SHORT, ast_trainer, metrics_of, run_in
from tests.kit.tiny import experience_of


def dpo(scenario: Path, *overrides: str) -> ResolvedExperiment:
    return resolve_experiment(
        trainer="ast_dpo", scenario=str(scenario), overrides=[*SHORT, *overrides]
    )


@pytest.fixture(scope="module")
def whole(tiny_scenario: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two iterations."""
    resolved = dpo(tiny_scenario, "training.num_iterations=2", "training.eval_period=1")
    return run_in(tmp_path_factory.mktemp("runs"), resolved, "whole")


def test_a_run_leaves_everything_in_its_directory(whole: Path, tiny_scenario: Path) -> None:
    names = ("hyper_parameters.yaml", "settings.yaml", "environment.json", "metrics.jsonl")
    names += ("timings.jsonl", "results.json", "log.txt", "checkpoints/latest")
    names += ("rollouts/train.jsonl", "rollouts/evaluation.jsonl")
    assert [name for name in names if not (whole / name).is_file()] == []
    results = json.loads((whole / "results.json").read_text())
    keys = {"failure_rate", "failure_rate_interval", "mean_score", "probe_nll", "distinct_share"}
    keys |= {"plants_found", "num_plants", "num_episodes", "target_queries"}
    assert keys <= results["before"].keys() & results["after"].keys()
    rows = metrics_of(whole)
    assert [row["step"] for row in rows] == [1, 2]
    # The attacker starts as its reference.
    assert abs(rows[0]["rollout/kl"]) < 1e-4
    assert rows[0]["rollout/entropy"] == pytest.approx(rows[0]["probe_nll"], abs=1e-4)
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.chat_template
    before = AutoModelForCausalLM.from_pretrained(tiny_scenario / "attacker").state_dict()
    assert any(not torch.equal(weight, before[n]) for n, weight in model.state_dict().items())


def test_a_loss_that_is_not_finite_stops_saves_and_names_the_place(
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
        run_in(tmp_path, dpo(tiny_scenario, "training.minibatch_size=2"), "nan")
    checkpoints = tmp_path / "nan" / "checkpoints"
    latest = checkpoints / (checkpoints / "latest").read_text().strip()
    weights = AutoModelForCausalLM.from_pretrained(latest / "attacker").state_dict()
    assert all(weight.isfinite().all() for weight in weights.values())


def test_the_best_checkpoint_by_dev_reward_is_kept_and_tested(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    resolved = dpo(tiny_scenario, "training.eval_period=1", "training.num_iterations=4")
    run = run_in(tmp_path, resolved, num_checkpoints_kept=1)
    rewards = [row["dev/mean_reward"] for row in metrics_of(run)]
    best = run / "checkpoints" / (run / "checkpoints" / "best").read_text().strip()
    manifest = json.loads((best / "manifest.json").read_text())
    assert manifest["metadata"]["iteration"] == rewards.index(max(rewards)) + 1
    final, kept = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (run / "model", best / "attacker")
    )
    assert all(torch.equal(final[name], kept[name]) for name in final)


def test_iterations_go_through_all_prompts_before_any_comes_again(tiny_scenario: Path) -> None:
    size = "training.num_episodes_per_experience=2"
    rollouts = ast_trainer("ast_dpo", tiny_scenario, size).rollouts
    first, second = rollouts.prompts_of(0, seed=3), rollouts.prompts_of(1, seed=3)
    assert sorted(first + second) == sorted(rollouts.prompts)
    assert rollouts.prompts_of(0, seed=3) == first


@pytest.mark.parametrize("order", ["shuffled", "by_episode"])
def test_batches_hold_every_sample_once_in_a_seeded_order(order: str, tiny_scenario: Path) -> None:
    options = ("training.minibatch_size=4", f"training.batch_order={order}")
    trainer = ast_trainer("ast_dpo", tiny_scenario, *options)
    samples = [{"x": torch.tensor(i), "episode": torch.tensor(i % 5)} for i in range(10)]

    def order_of(iteration: int, epoch: int) -> list[list[int]]:
        batches = trainer.batches(samples, iteration=iteration, epoch=epoch)
        return [batch["x"].tolist() for batch in batches]

    first = order_of(0, 0)
    assert sorted(len(batch) for batch in first) == [2, 4, 4]
    assert sorted(number for batch in first for number in batch) == list(range(10))
    assert first == order_of(0, 0)
    assert first != order_of(0, 1) != order_of(1, 0)


def test_batches_by_episode_share_contexts_and_need_samples_with_an_episode(
    tiny_scenario: Path,
) -> None:
    options = ("training.minibatch_size=3", "training.num_episodes_per_experience=4")
    forwarded = {}
    for order in ("shuffled", "by_episode"):
        trainer = ast_trainer("ast_dpo", tiny_scenario, *options, f"training.batch_order={order}")
        samples = experience_of(trainer).samples
        with trainer.policy.counting() as spent:
            for batch in trainer.batches(samples, iteration=0, epoch=0):
                trainer.step(batch)
        forwarded[order] = spent.forwarded
    assert forwarded["by_episode"] < forwarded["shuffled"]
    with pytest.raises(ConfigurationError, match="samples with 'episode'"):
        list(trainer.batches([{"x": torch.tensor(1)}], iteration=0, epoch=0))


def test_a_scenario_of_another_kind_is_refused(tiny_scenario: Path) -> None:
    prepared = prepare_experiment(dpo(tiny_scenario), progress=False)
    prepared.scenario_instance.kind = "other"
    with pytest.raises(ConfigurationError, match="trains on ast_chat only"):
        AstDpoTrainer(
            prepared.trainer.hyper_params, prepared.scenario_instance, ExperimentSettings()
        )


def test_work_and_memory_are_logged(whole: Path) -> None:
    for metrics in metrics_of(whole):
        for part in ("attacker", "target", "reference"):
            assert metrics[f"tokens/{part}_forwarded"] > 0
            assert 1.0 <= metrics[f"tokens/{part}_forwarded_per_unique"] <= 1.3
        if metrics["num_steps"]:
            assert 1.0 <= metrics["tokens/update_forwarded_per_unique"] <= 1.1
    timings = read_rows(whole / "timings.jsonl")
    assert all(row["memory/peak_gib"] > 0 for row in timings)


@pytest.mark.parametrize(
    ("name", "dtype", "num_times"),
    [
        *(("ast_ppo", "bfloat16", 1), ("ast_grpo", "bfloat16", 1)),
        # Losses of pairs do without; in whole precision both paths are one.
        *(("ast_dpo", "bfloat16", 0), ("ast_grpo", "float32", 0)),
    ],
)
def test_probes_are_scored_again_once_if_rounded_and_counted_apart(
    name: str, dtype: str, num_times: int, tiny_scenario: Path
) -> None:
    options = (f"dtype={dtype}", "lora={rank: 4}")
    trainer = ast_trainer(
        name, tiny_scenario, *(f"ast_chat.attacker.language_model.{one}" for one in options)
    )
    policy = trainer.policy
    with (
        mock.patch.object(policy, "token_scores", wraps=policy.token_scores) as scored,
        policy.counting() as spent,
    ):
        tree = experience_of(trainer).tree
    assert scored.call_count == num_times
    metrics = rollout_token_metrics({"attacker": spent}, tree)
    assert 1.0 <= metrics["tokens/attacker_forwarded_per_unique"] <= 1.3
    assert (metrics.get("tokens/rescored", 0) > 0) == bool(num_times)
    assert spent.scored == 0
    assert "value" not in tree.nodes
    mask_NT = tree.nodes["probe_mask"]
    gaps = (trainer.probe_logprobs(tree) - tree.nodes["probe_logprobs"])[mask_NT].abs()
    if dtype == "bfloat16":
        assert bool(gaps.max() == 0) == bool(num_times), "the path of the loss"
    # A separate code path, not another distribution.
    assert gaps.mean() < 0.1


PLANT = "ast_chat.planted_failures=[{name: one, probe: a}]"


@pytest.mark.parametrize(
    ("plants", "use_random_search", "is_run"),
    [(True, "null", True), (True, "false", False), (False, "null", False), (False, "true", True)],
)
def test_random_search_is_run_if_failures_are_planted_or_on_request(
    tiny_scenario: Path, plants: bool, use_random_search: str, is_run: bool
) -> None:
    search = f"ast_chat.evaluation.use_random_search={use_random_search}"
    trainer = ast_trainer("ast_dpo", tiny_scenario, search, *([PLANT] if plants else []))
    assert (trainer.evaluation.num_random_search_parts() > 0) is is_run


def test_before_and_after_count_planted_failures_of_the_same_conversations(
    tiny_scenario: Path,
) -> None:
    trainer = ast_trainer(
        *("ast_dpo", tiny_scenario, PLANT, "training.num_iterations=1"),
        "ast_chat.evaluation.use_random_search=true",
    )
    trainer.train()
    names = ("before", "after", "training", "random_search")
    before, after, training, random = (trainer.results[name] for name in names)
    assert before["target_queries"] == after["target_queries"]
    assert max(after["first_query"].values(), default=0) <= after["target_queries"]
    assert after["plants_found"] == sum(q is not None for q in after["first_query"].values())
    assert training["target_queries"] not in (0, after["target_queries"])
    assert training["num_plants"] == after["num_plants"] == 1
    # Random search has the queries of training and of the held-out conversations after it.
    needed = training["target_queries"] + after["target_queries"]
    assert needed <= random["target_queries"]
    for report in (before, after):
        assert report["num_failed"] <= report["num_known"] == report["num_episodes"]
        assert report["if_unknown_passed"] == report["if_unknown_failed"] == report["failure_rate"]

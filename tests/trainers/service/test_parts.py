"""Samples, metrics and statistics of trainers on trajectories."""

from __future__ import annotations

import logging

import pytest
import torch

from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import collate_trajectories, samples_of, score_batch
from nip_astra.rollouts.trajectory import Trajectory, compute_grpo_advantage_for_trajectories
from nip_astra.tracking.tracker import flat_figures
from nip_astra.trainers.service.metrics import (
    Tally,
    log_grpo_metrics,
    log_rollout_metrics,
)


def trajectories() -> list[Trajectory]:
    return [
        Trajectory([1, 2, 3, 4], [0, 1, 0, 1], logprobs=[0, -1, 0, -2], reward=1.0, group_id="a"),
        Trajectory([1, 5], [0, 1], logprobs=[0, -3], reward=0.0, group_id="a", is_cut=1),
        Trajectory([6, 7], [0, 0], reward=0.5, group_id="b", logprobs=[0, 0]),
    ]


def test_samples_hold_the_context_and_the_learnt_tokens() -> None:
    batch = Batch.from_trajectories(trajectories()[:2])
    batch.values["advantages"] = torch.tensor([0.5, -0.5])
    batch.values["mine"] = torch.arange(8.0).reshape(2, 4)
    first, second = samples_of(batch)
    assert first["context"].tolist() == [1]
    assert first["response"].tolist() == [2, 3, 4]
    assert first["is_trained"].tolist() == [True, False, True]
    assert first["advantages"].tolist() == [0.5, 0.5, 0.5]
    assert first["mine"].tolist() == [1, 2, 3]
    together = collate_trajectories([first, second])
    assert together["trained_mask"].tolist() == [[True, False, True], [True, False, False]]


def test_rows_without_weight_or_without_a_token_of_the_policy_give_no_sample() -> None:
    batch = Batch.from_trajectories(trajectories())
    assert len(samples_of(batch)) == 2
    batch.values["row_weights"] = torch.tensor([0.0, 1.0, 1.0])
    assert len(samples_of(batch)) == 1
    assert samples_of(Batch.from_trajectories([])) == []


def test_scores_stand_at_the_tokens_that_they_are_of() -> None:
    batch = Batch.from_trajectories(trajectories())

    def score(
        context: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor, ids_mask: torch.Tensor
    ) -> torch.Tensor:
        assert context.shape[1] == 1
        return torch.where(ids_mask, -ids.float(), 0.0)

    scores_BT = score_batch(batch, score)
    assert scores_BT.tolist() == [[0, -2, -3, -4], [0, -5, 0, 0], [0, -7, 0, 0]]


def test_advantages_are_set_by_group_and_run(caplog: pytest.LogCaptureFixture) -> None:
    given = ((0.0, "g", 0), (1.0, "g", 0), (2.0, "g", 1), (9.0, None, None), (None, "g", 5))
    *rows, alone, without = all_rows = [
        Trajectory([1, 2], [0, 1], reward=reward, group_id=group, run_id=run)
        for reward, group, run in given
    ]
    options = {"logger": logging.getLogger("test"), "use_run_ids": True, "std_epsilon": 0.0}
    with caplog.at_level(logging.INFO):
        result = compute_grpo_advantage_for_trajectories(all_rows, **options)
    assert result[0] is rows[0]
    std = 1.5 / 2**0.5
    assert [one.advantage for one in rows] == pytest.approx([-1.25 / std, -0.25 / std, 0.75 / std])
    assert (alone.advantage, without.advantage) == (0.0, 0.0)
    assert "1 of 2 groups" in caplog.text
    compute_grpo_advantage_for_trajectories(rows, use_run_ids=False, scale="none")
    assert [one.advantage for one in rows] == [-1.0, 0.0, 1.0]


def test_figures_of_rollouts_are_those_of_trajectories_and_of_their_batch() -> None:
    metrics: dict[str, float] = {"mine": 1.0}
    assert log_rollout_metrics(trajectories(), metrics) is metrics
    expected = {
        "reward_mean": 0.5,
        "num_groups": 2,
        "prompt_tokens_mean": 4 / 3,
        "truncated_fraction": 1.0,
    }
    expected |= {"response_tokens_max": 2, "entropy": (1 + 2 + 3) / 3}
    assert {name: metrics[f"rollout/{name}"] for name in expected} == pytest.approx(expected)
    of_batch = log_rollout_metrics(Batch.from_trajectories(trajectories()))
    assert of_batch["rollout/reward_std"] == pytest.approx(metrics["rollout/reward_std"])


def test_metrics_of_advantages_count_uninformative_groups() -> None:
    rows = compute_grpo_advantage_for_trajectories(trajectories())
    metrics = log_grpo_metrics(rows, {})
    assert metrics["grpo/num_groups"] == 2
    assert metrics["grpo/zero_variance_fraction"] == 0.5
    assert metrics["grpo/advantage_max"] == pytest.approx(0.5**0.5, abs=1e-5)
    assert log_grpo_metrics([], {}) == {"grpo/num_groups": 0.0}


def tally_of(problems: list[int], rewards: list[float], num_runs: int) -> Tally:
    return Tally(1.0, problems, rewards, num_runs, [reward >= 1.0 for reward in rewards])


def test_a_tally_gives_rate_interval_and_pass_at_k() -> None:
    report = tally_of([0, 0, 1, 1], [1.0, 0.0, 0.0, 0.5], num_runs=5).report(2)
    low, high = report["accuracy_interval"]
    assert 0 < low < 0.25 < high < 1
    expected = {"accuracy": 0.25, "mean_reward": 0.375, "pass_at_1": 0.25, "pass_at_2": 0.5}
    assert report.items() >= (expected | {"num_without_reward": 1}).items()


def test_pass_at_k_has_an_interval_over_problems() -> None:
    problems = [number for number in range(10) for _ in range(2)]
    report = tally_of(problems, [1.0, 0.0] * 10, num_runs=20).report(2)
    assert report["pass_at_2_interval"] == pytest.approx((0.6915, 1.0), abs=1e-4)  # of 10 in 10
    assert report["pass_at_1_interval"] == report["accuracy_interval"]
    figures = flat_figures(report)
    assert figures["pass_at_2_high"] == 1.0
    assert figures["accuracy_low"] < 0.5 < figures["accuracy_high"]


def test_pass_at_k_is_of_the_problems_of_which_every_run_has_a_reward() -> None:
    problems = [0, 0, 1, *range(2, 12)]
    report = tally_of(problems, [1.0, 0.0] + [1.0] * 11, num_runs=24).report(2)
    assert (report["num_problems"], report["num_complete_problems"]) == (12, 1)
    assert report["pass_at_2"] == 1.0

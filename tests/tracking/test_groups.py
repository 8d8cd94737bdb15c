"""Tests of the names under which W&B shows metrics."""

from __future__ import annotations

import pytest

from nip_astra.tracking.groups import grouped, summary_of


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("loss", "train/loss"),
        ("lr", "train/lr"),
        ("pairs/kept", "train/pairs/kept"),
        ("prover/loss_value", "train/prover/loss_value"),
        ("of_a_plugin", "train/of_a_plugin"),
        ("failure_rate", "rollout/failure_rate"),
        ("reward/entropy_bonus", "rollout/reward/entropy_bonus"),
        ("verifier/mean_step_reward", "rollout/verifier/mean_step_reward"),
        ("dev/failure_rate", "eval/dev/failure_rate"),
        ("after/failure_rate", "eval/after/failure_rate"),
        ("verifier/test_mean_value", "eval/verifier/test_mean_value"),
        ("test_mean_accuracy", "eval/test_mean_accuracy"),
        ("time/collect_seconds", "time/collect_seconds"),
        ("tokens/generated", "tokens/generated"),
        ("time", "train/time"),
    ],
)
def test_a_metric_is_shown_in_the_group_of_what_gave_it(name: str, shown: str) -> None:
    assert grouped(name) == shown


def test_names_stay_apart() -> None:
    names = ["loss", "train/loss", "mean_reward", "rollout/mean_reward", "after/x", "x", "test_x"]
    assert len({grouped(name) for name in names}) == len(names)


def test_a_summary_holds_numbers_and_both_ends_of_intervals() -> None:
    report = {
        "failure_rate": 0.2,
        "failure_rate_interval": [0.05, 0.4],
        "num_episodes": 20,
        "unknown_interval": [None, None],
        "most_common_probe": "hello ?",
        "is_there": True,
    }
    assert summary_of("after", report) == {
        "after/failure_rate": 0.2,
        "after/failure_rate_low": 0.05,
        "after/failure_rate_high": 0.4,
        "after/num_episodes": 20,
    }

"""Policies are compared problem by problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from nip_astra.errors import DataError
from nip_astra.evaluation.rows import Row
from nip_astra.evaluation.task_comparison import TaskContender, compare_task_rows
from nip_astra.evaluation.text_comparison import paired_metric
from nip_astra.utils.statistics import mcnemar_exact


def contender(
    label: str, rewards: Sequence[Sequence[float | None]], names: str = "", **figures: Any
) -> TaskContender:
    """What a policy was given for the runs of each problem, named by letters in order."""
    names = names or "abcdefghijklmnopqrst"[: len(rewards)]
    rows: list[Row] = [
        {
            "problem": number,
            "run": run,
            "problem_hash": name,
            "reward": reward,
            "is_right": None if reward is None else reward >= 1.0,
        }
        for number, (name, runs) in enumerate(zip(names, rewards, strict=True))
        for run, reward in enumerate(runs)
    ]
    return TaskContender(label, rows, {"split": "test", "num_runs": 1} | figures)


def test_single_runs_are_compared_by_mcnemars_test() -> None:
    first = contender("first", [[1.0]] * 2 + [[0.0]] * 8)
    second = contender("second", [[0.0]] + [[1.0]] * 8 + [[0.5]])
    found = compare_task_rows(first, [second])
    accuracy = found["comparisons"]["second"]["accuracy"]
    assert (accuracy["first"], accuracy["second"]) == (0.2, 0.8)
    assert accuracy["difference"] == pytest.approx(0.6)
    assert (accuracy["only_first"], accuracy["only_second"]) == (1, 7)
    assert accuracy["p_value"] == mcnemar_exact(1, 7)
    assert accuracy["low"] < 0.6 < accuracy["high"]
    reward = found["comparisons"]["second"]["mean_reward"]
    assert reward["difference"] == pytest.approx(0.65)
    assert reward["num_problems"] == 10
    # Two tests: the smaller p-value is doubled.
    smaller = min((accuracy, reward), key=lambda metric: metric["p_value"])
    assert smaller["p_holm"] == pytest.approx(2 * smaller["p_value"])
    assert found["warnings"] == []


def test_problems_are_the_pairs_where_each_was_played_several_times() -> None:
    first = contender("first", [[1.0, 0.0], [0.0, 0.0], [None, None], [0.0, 0.0]], num_runs=2)
    second = contender("second", [[1.0], [1.0], [1.0], [None]])
    found = compare_task_rows(first, [second])
    accuracy = found["comparisons"]["second"]["accuracy"]
    assert (accuracy["first"], accuracy["second"], accuracy["num_pairs"]) == (0.25, 1.0, 2)
    assert accuracy["test"] == "sign flips of problems"
    runs, lost = found["warnings"]
    assert runs.startswith("num_runs: 2 in first, 1 in second")
    assert lost.startswith("2 problems of first or second have no partner")


def test_problems_are_known_by_what_they_are_and_not_by_number() -> None:
    first = contender("first", [[1.0], [0.0], [1.0]], "aab", split="dev")
    second = contender("second", [[1.0], [1.0], [0.0], [0.0]], "baac")
    found = compare_task_rows(first, [second])
    accuracy = found["comparisons"]["second"]["accuracy"]
    assert (accuracy["difference"], accuracy["num_pairs"], accuracy["num_problems"]) == (0.0, 3, 2)
    # The same problem twice is not twice the evidence.
    assert accuracy["test"] == "sign flips of problems"
    split, lost = found["warnings"]
    assert split.startswith('split: "dev" in first, "test" in second')
    assert lost.startswith("1 problems")


def test_policies_that_share_no_problem_cannot_be_compared() -> None:
    with pytest.raises(DataError, match="share no problem"):
        compare_task_rows(contender("first", [[1.0]], "a"), [contender("second", [[1.0]], "b")])


@pytest.mark.parametrize(
    ("chances", "rewards"), [((0.02, 0.1), [0.2, 1.0]), ((0.1, 0.2), [0.1, 0.1, 0.1, 1.0])]
)
def test_the_interval_of_rewards_holds_the_truth_where_few_problems_differ(
    chances: tuple[float, float], rewards: list[float]
) -> None:
    """Student's interval held it in 81 and 87 % of them."""
    rng = np.random.default_rng(0)
    num_held, truth = 0, (chances[1] - chances[0]) * float(np.mean(rewards))
    for _ in range(200):
        drawn = [(rng.random(30) < chance) * rng.choice(rewards, 30) for chance in chances]
        found = paired_metric(
            list(zip(*(one.tolist() for one in drawn), strict=True)),
            list(range(30)),
            is_bounded=False,
            is_binary=False,
            possible=[1.0],
        )
        num_held += found["low"] <= truth <= found["high"]
    assert num_held >= 186

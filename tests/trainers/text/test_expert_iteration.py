"""The data of expert iteration: selected rollouts and their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nip_astra.parameters.trainers import TextRlParameters, guess_replacement_proportion
from nip_astra.trainers.text.expert_iteration import (
    above_threshold,
    sampling_weights,
    weighted_sample,
)
from nip_astra.trainers.text.rollouts import episode_returns
from tests.kit.text_games import TextParts, accepting, build_text_parts, build_text_trainer


def _trained(tmp_path: Path, *, num_iterations: int = 2, **groups: Any) -> TextParts:
    text_rl = {"num_iterations": num_iterations, "test_scheme": "none"} | groups.pop("text_rl", {})
    parts = build_text_parts(tmp_path, accepting, groups=groups | {"text_rl": text_rl})
    trainer = build_text_trainer(parts)
    trainer.train()
    return parts


def _examples(parts: TextParts, agent: str) -> list[list[str]]:
    """The answers that each job of an agent's model was trained to imitate."""
    return [
        [example.messages[-1]["content"] for example in examples]
        for key, _, examples, _ in parts.service.submitted
        if f"/{agent}/" in key
    ]


def test_an_agent_imitates_its_rewarded_answers(tmp_path: Path) -> None:
    parts = _trained(tmp_path)
    # Accepting always pays the prover, and pays the verifier for the three true claims of six.
    assert [len(job) for job in _examples(parts, "prover")] == [6]
    assert _examples(parts, "verifier") == [["Decision: accept"] * 3]


@pytest.mark.parametrize(("uses_all", "expected"), [(False, [6, 6]), (True, [6, 12])])
def test_rollouts_of_this_iteration_or_of_all_so_far_are_chosen_from(
    uses_all: bool, expected: list[int], tmp_path: Path
) -> None:
    ei = {"fine_tune_on_all_previous_rollouts": uses_all}
    parts = _trained(tmp_path, num_iterations=3, pure_text_ei=ei)
    assert [len(job) for job in _examples(parts, "prover")] == expected


def test_the_verifier_learns_the_right_decision_where_its_guess_is_replaced(tmp_path: Path) -> None:
    replacement = {
        "verifier_guess_replacement_proportion": 1.0,
        "verifier_guess_replacement_annealing": "linear",
        "verifier_guess_replacement_annealing_rate": 0.5,
    }
    parts = _trained(tmp_path, num_iterations=3, text_rl=replacement)
    first, second = _examples(parts, "verifier")
    # All six guesses are replaced at first, since half of the claims are true.
    assert sorted(first) == ["Decision: accept"] * 3 + ["Decision: reject"] * 3
    # Then three are replaced, and of the other three the right guesses are imitated.
    assert len(second) >= 3
    assert set(second) <= {"Decision: accept", "Decision: reject"}
    assert second.count("Decision: reject") <= 3
    # A prover's answers stay unchanged.
    assert all(answer.startswith("said") for answer in _examples(parts, "prover")[0])


def test_a_weighted_sample_leans_to_good_returns_and_is_the_same_again(tmp_path: Path) -> None:
    ei = {
        "rollout_selection_method": "weighted_sampling",
        "weighting_epsilon": 0.0,
        "weighting_sample_size_factor": 2.0,
    }
    drawn = []
    for name in ("one", "two"):
        jobs = _trained(tmp_path / name, pure_text_ei=ei).service.submitted
        (examples,) = (examples for key, _, examples, _ in jobs if "/verifier/" in key)
        drawn.append([example.messages[0]["content"] for example in examples])
    # Twelve draws from six rollouts; without epsilon the wrong rollouts are never drawn.
    assert len(drawn[0]) == 12
    assert drawn[0] == drawn[1]
    claims = {int(prompt.split("claim ")[1].rstrip(".")) % 2 for prompt in drawn[0]}
    assert claims == {1}, "only true claims are rightly accepted"


def test_returns_are_sums_over_rounds_and_the_threshold_itself_is_good_enough(
    tmp_path: Path,
) -> None:
    trainer = build_text_trainer(build_text_parts(tmp_path, accepting))
    trainer._prepare_groups()
    rollouts = trainer._sample_rollouts("train", 0)
    expected = np.stack([np.ones(6), np.where(rollouts["y"] == 1, 1.0, -1.0)], axis=1)
    assert (episode_returns(rollouts) == expected).all()
    returns = np.array([1.0, -1.0, 0.0, 1.0, 0.9])
    chosen = [above_threshold(returns, threshold).tolist() for threshold in (0.9, 0.95, 2.0)]
    assert chosen == [[0, 3, 4], [0, 3], []]


@pytest.mark.parametrize(
    ("returns", "minimum", "epsilon", "expected"),
    [
        # Shifted by the smallest: 2, 0, 1, sum 3.
        ([1.0, -1.0, 0.0], None, 0.0, [2 / 3, 0, 1 / 3]),
        # At least 0.5: 1, 0.5, 0.5, sum 2.
        ([1.0, -1.0, 0.0], 0.5, 0.0, [0.5, 0.25, 0.25]),
        # (2/3 + 0.5/3) / 1.5 and so on.
        ([1.0, -1.0, 0.0], None, 0.5, [5 / 9, 1 / 9, 1 / 3]),
        # All are equal.
        ([1.0, 1.0], None, 0.0, [0.5, 0.5]),
        ([-1.0, -2.0, -3.0, -1.0], 0.0, 0.1, [0.25] * 4),
    ],
)
def test_weights_are_those_of_the_table(
    returns: list[float], minimum: float | None, epsilon: float, expected: list[float]
) -> None:
    weights = sampling_weights(np.array(returns), minimum=minimum, epsilon=epsilon)
    assert weights == pytest.approx(expected)


def test_a_sample_has_its_size_and_leans_to_likelier_rollouts() -> None:
    weights = np.array([0.5, 0.5, 0.0, 0.0])
    drawn = weighted_sample(weights, size_factor=2.5, with_replacement=True, seed=1)
    assert len(drawn) == 10
    assert set(drawn.tolist()) == {0, 1}
    once = weighted_sample(weights, size_factor=0.75, with_replacement=False, seed=1)
    assert once.tolist() == [0, 1], "no more than have a chance"
    again = weighted_sample(weights, size_factor=2.5, with_replacement=True, seed=1)
    assert drawn.tolist() == again.tolist()
    many = weighted_sample(np.array([0.9, 0.1]), size_factor=500, with_replacement=True, seed=0)
    assert 0.85 < (many == 0).mean() < 0.95


@pytest.mark.parametrize(
    ("annealing", "expected"),
    [
        ("none", [0.5, 0.5, 0.5, 0.5]),
        ("linear", [0.5, 0.3, 0.1, 0.0]),
        ("exponential", [0.5, 0.4, 0.32, 0.256]),
    ],
)
def test_guess_replacement_falls_as_in_the_table(annealing: str, expected: list[float]) -> None:
    parameters = TextRlParameters.from_dict(
        {
            "verifier_guess_replacement_proportion": 0.5,
            "verifier_guess_replacement_annealing": annealing,
            "verifier_guess_replacement_annealing_rate": 0.2,
        }
    )
    result = [guess_replacement_proportion(parameters, iteration) for iteration in range(4)]
    assert result == pytest.approx(expected)

"""Selection and annealing against hand-worked tables."""

from __future__ import annotations

import numpy as np
import pytest

from nip_astra.parameters.text import TextRlParameters, guess_replacement_proportion
from nip_astra.trainers.text.selection import above_threshold, sampling_weights, weighted_sample

RETURNS = np.array([1.0, -1.0, 0.0, 1.0, 0.9])


def test_the_threshold_itself_is_good_enough() -> None:
    assert above_threshold(RETURNS, 0.9).tolist() == [0, 3, 4]
    assert above_threshold(RETURNS, 0.95).tolist() == [0, 3]
    assert above_threshold(RETURNS, 2.0).tolist() == []


@pytest.mark.parametrize(
    ("returns", "minimum", "epsilon", "expected"),
    [
        # Shifted by the smallest: 2, 0, 1, sum 3.
        ([1.0, -1.0, 0.0], None, 0.0, [2 / 3, 0, 1 / 3]),
        # At least 0.5: 1, 0.5, 0.5, sum 2.
        ([1.0, -1.0, 0.0], 0.5, 0.0, [0.5, 0.25, 0.25]),
        # (2/3 + 0.5/3) / 1.5 and so on.
        ([1.0, -1.0, 0.0], None, 0.5, [5 / 9, 1 / 9, 1 / 3]),
        # All are alike.
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
def test_guess_replacement_falls_as_the_table_says(annealing: str, expected: list[float]) -> None:
    parameters = TextRlParameters.from_dict(
        {
            "verifier_guess_replacement_proportion": 0.5,
            "verifier_guess_replacement_annealing": annealing,
            "verifier_guess_replacement_annealing_rate": 0.2,
        }
    )
    found = [guess_replacement_proportion(parameters, iteration) for iteration in range(4)]
    assert found == pytest.approx(expected)

"""Meaning of --fail-if conditions, and refusal of everything else."""

from __future__ import annotations

import pytest

from nip_astra.errors import ConfigurationError
from nip_astra.evaluation.conditions import holds

FIGURES = {
    "failure_rate": {"value": 0.04, "high": 0.07},
    "outcomes": {"error": 2, "none": 90},
    "nll": {"target": None, "reference": 1.5},
    "turns_to_failure": {"survival": [0.9, 0.8]},
    "name": "test",
    "is_refused": True,
}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("failure_rate.high>0.05", True),
        ("not (failure_rate.value <= 4e-2 and .1 > 0)", False),
        ("outcomes.error == 2 and outcomes.none != 90", False),
        ("outcomes.error == 3 or outcomes.none >= 90", True),
        ("not failure_rate.high < 0.05", True),
        ("not (failure_rate.high > 0.05 and outcomes.error == 2)", False),
        ("outcomes.error / (outcomes.error + outcomes.none) > 0.02", True),
        ("1 - turns_to_failure.survival.1 > 0.1 * 2.5", False),
        ("2 + 3 * 4 - 3 - -2 == 13", True),
        ("1 > 2 or 1 > 2 and 3 > 2 or 2 > 1", True),
        ("1 == 1 or 1 == 1 and 1 == 2", True),
        ("(1 == 1 or 1 == 1) and 1 == 2", False),
    ],
)
def test_a_condition_holds_by_the_usual_rules(condition: str, expected: bool) -> None:
    assert holds(condition, FIGURES) is expected


@pytest.mark.parametrize(
    "condition",
    [
        "().__class__ > 0",
        "'text' == 1",
        "failure_rate['high'] > 0",
        "failure_rate.high > 0; 1",
        "failure_rate.high",
        "",
        "failure_rate.high >",
        "1 < 2 < 3",
        "(1 > 2) + 1 > 0",
        "1 / 0 > 2",
        "failure_rate.high = 1",
        "(" * 999 + "1 > 2" + ")" * 999,
        "-" * 9999 + "1 > 2",
        # Nothing is passed to Python's eval.
        "__import__('os').getpid() > 0",
        "2 ** 9 > 0",
        "+1 > 0",
    ],
)
def test_other_texts_are_no_conditions(condition: str) -> None:
    with pytest.raises(ConfigurationError):
        holds(condition, FIGURES)


@pytest.mark.parametrize(
    ("condition", "fact"),
    [
        ("failure_rate.hihg > 0.05", r"Did you mean 'failure_rate.high'\?"),
        ("1 > 2 or failure_rate.top > 0.05", "failure_rate.top"),
        ("nll.target > 1", r"'nll\.target', which has no value"),
        ("not low > 0", "'low', which has no value"),
        ("name == 1", "which is str"),
        ("is_refused == 1", "which is bool"),
    ],
)
def test_unknown_figures_and_those_without_a_value_are_refused(condition: str, fact: str) -> None:
    with pytest.raises(ConfigurationError, match=fact):
        holds(condition, FIGURES | {"low": float("nan")})

"""Conditions of --fail-if: what they mean, and that nothing else can be said."""

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
        ("failure_rate.high > .1", False),
        ("failure_rate.value <= 4e-2", True),
        ("outcomes.error == 2 and outcomes.none != 90", False),
        ("outcomes.error == 3 or outcomes.none >= 90", True),
        ("not failure_rate.high < 0.05", True),
        ("not (failure_rate.high > 0.05 and outcomes.error == 2)", False),
        ("outcomes.error / (outcomes.error + outcomes.none) > 0.02", True),
        ("1 - turns_to_failure.survival.1 > 0.1 * 2.5", False),
        ("-failure_rate.value < 0", True),
        ("2 + 3 * 4 == 14", True),
        ("10 - 3 - 2 == 5", True),
        ("1 > 2 or 1 > 2 and 3 > 2 or 2 > 1", True),
    ],
)
def test_a_condition_means_what_it_says(condition: str, expected: bool) -> None:
    assert holds(condition, FIGURES) is expected


def test_and_binds_before_or() -> None:
    assert holds("1 == 1 or 1 == 1 and 1 == 2", FIGURES)
    assert not holds("(1 == 1 or 1 == 1) and 1 == 2", FIGURES)


@pytest.mark.parametrize(
    "condition",
    [
        "().__class__ > 0",
        "'text' == 1",
        "lambda: 1",
        "failure_rate['high'] > 0",
        "failure_rate.high > 0; 1",
        "failure_rate.high > 0 1",
        "failure_rate.high",
        "1 + 1",
        "",
        "failure_rate.high >",
        "(failure_rate.high > 0.05",
        "1 < 2 < 3",
        "1 and 2 > 1",
        "(1 > 2) + 1 > 0",
        "1 / 0 > 2",
        "and 1 > 2",
        "failure_rate.high = 1",
        "(" * 999 + "1 > 2" + ")" * 999,
        "-" * 9999 + "1 > 2",
    ],
)
def test_what_is_no_condition_is_refused(condition: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        holds(condition, FIGURES)


def test_nothing_is_evaluated_by_python() -> None:
    for condition in ("__import__('os').getpid() > 0", "exit() > 0", "2 ** 9 > 0", "+1 > 0"):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            holds(condition, FIGURES)


def test_a_name_that_is_not_there_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"Did you mean 'failure_rate.high'\?"):
        holds("failure_rate.hihg > 0.05", FIGURES)
    with pytest.raises(ConfigurationError, match="unknown figure"):
        holds("1 > 2 or failure_rate.top > 0.05", FIGURES)


def test_a_figure_without_a_value_is_neither_true_nor_false() -> None:
    for nothing in (None, float("nan")):
        figures = FIGURES | {"low": nothing}
        with pytest.raises(ConfigurationError, match="'low', which has no value"):
            holds("not low > 0", figures)
    with pytest.raises(ConfigurationError, match=r"'nll\.target', which has no value"):
        holds("nll.target > 1", FIGURES)
    with pytest.raises(ConfigurationError, match="which is str"):
        holds("name == 1", FIGURES)
    with pytest.raises(ConfigurationError, match="which is bool"):
        holds("is_refused == 1", FIGURES)

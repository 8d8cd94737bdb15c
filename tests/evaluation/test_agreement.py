"""How far scorers agree."""

from __future__ import annotations

import pytest

from nip_astra.evaluation.summary import agreement_matrix, cohens_kappa
from tests.evaluation.rows_by_hand import episode, judged


def test_kappa_is_the_textbooks() -> None:
    """Cohen's table of 50 cases: 20 and 15 alike, 5 and 10 not; kappa 0.4."""
    flags = {(True, True): 20, (True, False): 5, (False, True): 10, (False, False): 15}
    assert cohens_kappa(flags) == pytest.approx(0.4)


def test_kappa_is_unknown_where_both_always_say_the_same() -> None:
    assert cohens_kappa({(True, True): 9}) is None
    assert cohens_kappa({}) is None


def test_each_two_scorers_are_compared_turn_by_turn() -> None:
    views = {
        "a": judged(episode(0, [0.9, 0.8, 0.1, 0.2]), episode(1, [0.9, None])),
        "b": judged(episode(0, [0.9, 0.4, 0.1, 0.2]), episode(1, ["error", 0.1])),
        "c": judged(episode(0, [0.1, 0.1, 0.1, 0.1]), episode(1, [0.1, 0.1])),
    }
    first, second, third = agreement_matrix(views)
    assert (first["first"], first["second"], first["num_turns"]) == ("a", "b", 4)
    assert first["agreement"] == pytest.approx(3 / 4)
    assert [first[name] for name in ("both", "only_first", "only_second", "neither")] == [
        1,
        1,
        0,
        2,
    ]
    assert first["kappa"] == pytest.approx(0.5)
    assert 0.8 < first["correlation"] < 0.9
    assert (second["first"], second["second"], second["num_turns"]) == ("a", "c", 5)
    assert second["correlation"] is None
    assert (third["first"], third["second"]) == ("b", "c")


def test_one_scorer_agrees_with_nobody() -> None:
    assert agreement_matrix({"a": judged(episode(0, [0.9]))}) == []

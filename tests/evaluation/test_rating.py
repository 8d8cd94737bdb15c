"""Stored conversations are rated like a rollout's."""

from __future__ import annotations

import pytest

from nip_astra.evaluation.playing import rate_by_others, rate_responses, scored_by
from nip_astra.scorers.base import Exchange, Message
from tests.evaluation.rows_by_hand import episode
from tests.kit.scorers import ScorerOf


def share(exchange: Exchange) -> float | None:
    """The share of 100 characters, unknown for a question."""
    return None if "?" in exchange.text else len(exchange.text) / 100


def test_a_scorer_of_texts_rates_response_pair_and_probe() -> None:
    episodes = [episode(0, [None, None], probe=["ab", "a?"], response=["cde", "x"])]
    rate_responses(episodes, ScorerOf(share))
    first, second = episodes[0]
    assert first["response_score"] == pytest.approx(0.03)
    assert first["combined_score"] == pytest.approx(0.06)
    assert first["probe_score"] == pytest.approx(0.02)
    assert (second["combined_score"], second["probe_score"]) == (None, None)
    assert (first["is_error"], second["is_error"]) == (False, False)


def test_a_scorer_of_conversations_reads_the_earlier_messages() -> None:
    episodes = [episode(0, [None, None], prompt="hi", probe=["p", "q"], response=["r", "s"])]
    scorer = ScorerOf(lambda exchange: len(exchange.history) / 10, reads_history=True)
    rate_responses(episodes, scorer)
    # Opening, probe; then opening, probe, response, probe. The pair's score is the response's.
    assert [row["response_score"] for row in episodes[0]] == pytest.approx([0.2, 0.4])
    assert [row["combined_score"] for row in episodes[0]] == pytest.approx([0.2, 0.4])
    assert [row["probe_score"] for row in episodes[0]] == pytest.approx([0.1, 0.3])
    second = (Message("assistant", "hi"), Message("user", "p"), Message("assistant", "r"))
    assert Exchange("s", (*second, Message("user", "q"))) in scorer.seen
    assert Exchange("q", second, role="user") in scorer.seen


def test_further_scorers_do_not_change_the_first_verdict() -> None:
    episodes = [episode(0, [0.9, 0.1], response=["abc", "?"])]
    rate_by_others(episodes, {"lengths": ScorerOf(share)})
    assert [row["response_score"] for row in episodes[0]] == [0.9, 0.1]
    views = scored_by("lengths", episodes[0])
    assert views[0]["response_score"] == pytest.approx(0.03)
    assert views[1]["response_score"] is None

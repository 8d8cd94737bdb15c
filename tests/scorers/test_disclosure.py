"""How much of a secret a turn reveals, and what does not count as revealing it."""

from __future__ import annotations

import pytest
import torch

from nip_astra.errors import ParameterError
from nip_astra.scorers.base import Exchange, Message
from nip_astra.scorers.disclosure import DisclosureScorer

SECRET = "electric boat Silver Heron"
ASKED = (Message("assistant", "Good day."), Message("user", "What is new?"))


def score(*exchanges: Exchange, secrets: tuple[str, ...] = (SECRET,)) -> list[float]:
    scorer = DisclosureScorer(
        DisclosureScorer.Parameters(secrets=list(secrets)), device=torch.device("cpu")
    )
    scores: list[float] = scorer.rate(exchanges).scores_N.tolist()
    return scores


def test_the_score_is_the_share_of_the_secrets_words() -> None:
    texts = [
        "I cannot tell.",
        "A boat, I think.",
        "It is called Silver Heron.",
        "Silver Heron: our electric boat!",
    ]
    assert score(*[Exchange(text, ASKED) for text in texts]) == [0.0, 0.25, 0.5, 1.0]


def test_words_are_whole_and_compared_without_case_and_punctuation() -> None:
    assert score(Exchange("SILVER, (heron)"), Exchange("silverware and herons")) == [0.5, 0.0]


def test_a_repeated_word_counts_once() -> None:
    assert score(Exchange("silver silver silver"), secrets=("silver silver heron",)) == [0.5]


def test_words_first_written_by_the_other_side_are_not_revealed() -> None:
    said_before = (*ASKED[:1], Message("user", "Is it a silver boat?"), Message("assistant", "No."))
    history = (*said_before, Message("user", "Sure?"))
    text = "A silver boat, Heron."
    assert score(Exchange(text, history), Exchange(text)) == [0.25, 0.75]


def test_words_first_written_by_the_same_side_still_count() -> None:
    history = (Message("assistant", "Silver Heron!"), Message("user", "Again?"))
    assert score(Exchange("Silver Heron!", history)) == [0.5]


def test_a_user_reveals_words_that_the_assistant_has_not_written() -> None:
    history = (Message("assistant", "We build a boat."),)
    assert score(Exchange("A silver boat?", history, role="user")) == [0.25]


def test_the_secret_that_is_given_away_most_decides() -> None:
    assert score(Exchange("Ask for a Blue Door."), secrets=(SECRET, "Blue Door")) == [1.0]


def test_an_empty_turn_reveals_nothing() -> None:
    assert score(Exchange(""), Exchange("?!")) == [0.0, 0.0]


@pytest.mark.parametrize("secrets", [[], ["..."], [SECRET, ""]])
def test_a_secret_without_words_is_refused(secrets: list[str]) -> None:
    with pytest.raises(ParameterError) as caught:
        DisclosureScorer.Parameters.from_dict({"secrets": secrets})
    assert "secrets" in str(caught.value)
    if secrets:
        assert f"{secrets[-1]!r} has no word; give each secret at least one" in str(caught.value)

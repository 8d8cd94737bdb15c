"""How much of a secret a turn reveals, and what does not count as revealing it."""

from __future__ import annotations

import pytest

from nip_astra.errors import ParameterError
from nip_astra.scorers.base import Exchange, Message
from nip_astra.scorers.disclosure import DisclosureScorer
from tests.kit.messages import says
from tests.kit.scorers import scorer_on_cpu

SECRET = "electric boat Silver Heron"
ASKED = (Message("assistant", "Good day."), Message("user", "What is new?"))


def score(*exchanges: Exchange, secrets: tuple[str, ...] = (SECRET,)) -> list[float]:
    scorer = scorer_on_cpu(DisclosureScorer, secrets=list(secrets))
    scores: list[float] = scorer.rate(exchanges).scores_N.tolist()
    return scores


EARLIER = (*ASKED[:1], Message("user", "Is it a silver boat?"), Message("assistant", "No."))
CASES = {
    "nothing": (Exchange("I cannot tell.", ASKED), 0.0),
    "a word": (Exchange("A boat, I think.", ASKED), 0.25),
    "half of the words": (Exchange("It is called Silver Heron.", ASKED), 0.5),
    "all words": (Exchange("Silver Heron: our electric boat!", ASKED), 1.0),
    "other case and punctuation": (Exchange("SILVER, (heron)"), 0.5),
    "parts of longer words": (Exchange("silverware and herons"), 0.0),
    "words first written by the other side": (
        Exchange("A silver boat, Heron.", (*EARLIER, Message("user", "Sure?"))),
        0.25,
    ),
    "the same words without a history": (Exchange("A silver boat, Heron."), 0.75),
    "words first written by the same side": (
        Exchange("Silver Heron!", (Message("assistant", "Silver Heron!"), Message("user", "?"))),
        0.5,
    ),
    "a user's words that the assistant has not written": (
        Exchange("A silver boat?", (Message("assistant", "We build a boat."),), role="user"),
        0.25,
    ),
    "words first written by the system or a tool": (
        Exchange("Silver Heron.", (Message("system", SECRET), *ASKED, Message("tool", SECRET))),
        0.5,
    ),
    "an empty turn": (Exchange(""), 0.0),
    "no word": (Exchange("?!"), 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_score_is_the_share_of_the_secrets_words_first_written_by_the_turns_side(
    case: str,
) -> None:
    exchange, expected = CASES[case]
    assert score(exchange) == [expected]


def test_a_repeated_word_counts_once_and_the_most_disclosed_secret_decides() -> None:
    assert score(Exchange("silver silver silver"), secrets=("silver silver heron",)) == [0.5]
    assert score(Exchange("Ask for a Blue Door."), secrets=(SECRET, "Blue Door")) == [1.0]


@pytest.mark.parametrize("secrets", [[], ["..."], [SECRET, ""]])
def test_a_secret_without_words_is_refused(secrets: list[str]) -> None:
    with pytest.raises(ParameterError) as caught:
        DisclosureScorer.Parameters.from_dict({"secrets": secrets})
    assert says(caught.value, "secrets", *map(repr, secrets[-1:]))

"""A scorer gives one checked number a text, and asks for each text once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from nip_astra.errors import ModelLoadError, ScorerError
from nip_astra.scorers.base import Scorer


class FakeScorer(Scorer):
    """Answers with a function of the texts, and keeps what it was asked."""

    class Parameters(Scorer.Parameters):
        """None."""

    def __init__(self, answer: Callable[[Sequence[str]], Any]) -> None:
        super().__init__(self.Parameters(), device=torch.device("cpu"))
        self.answer = answer
        self.asked: list[list[str]] = []

    def _score(self, texts: Sequence[str]) -> Sequence[float]:
        self.asked.append(list(texts))
        answer: Sequence[float] = self.answer(texts)
        return answer


def by_length(texts: Sequence[str]) -> list[float]:
    return [len(text) / 10 for text in texts]


def test_scores_are_float32_in_the_order_of_the_texts() -> None:
    scores = FakeScorer(by_length).score(["abc", "", "ab", "abc"])
    assert scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx([0.3, 0.0, 0.2, 0.3])


def test_each_distinct_text_is_rated_once() -> None:
    scorer = FakeScorer(by_length)
    scorer.score(["a", "b", "a"])
    assert scorer.score(["b", "c"]).tolist() == pytest.approx([0.1, 0.1])
    scorer.score(["c", "a"])
    assert scorer.asked == [["a", "b"], ["c"]]


def test_no_texts_give_no_scores() -> None:
    scorer = FakeScorer(by_length)
    assert scorer.score([]).shape == (0,)
    assert scorer.asked == []


def test_tensors_and_numbers_of_any_kind_are_taken() -> None:
    assert FakeScorer(lambda texts: torch.tensor([0.5, 1.0])).score(["a", "b"]).tolist() == [0.5, 1]
    assert FakeScorer(lambda texts: [True, 0]).score(["a", "b"]).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("score", "shown"),
    [(math.nan, "nan"), (math.inf, "inf"), (-0.1, "-0.1"), (1.5, "1.5")],
)
def test_what_is_no_score_is_told_with_its_text(score: float, shown: str) -> None:
    scorer = FakeScorer(lambda texts: [0.5, score])
    with pytest.raises(ScorerError) as caught:
        scorer.score(["fine", "the cat " * 20])
    assert f"the scorer 'FakeScorer' gave {shown} for the text 'the cat the cat" in str(
        caught.value
    )
    assert "A score is a number from 0 to 1; mend the scorer" in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_scorer_that_raises_is_named_with_the_reason() -> None:
    def fail(texts: Sequence[str]) -> list[float]:
        raise KeyError("label")

    with pytest.raises(ScorerError) as caught:
        FakeScorer(fail).score(["a", "b"])
    assert (
        "the scorer 'FakeScorer' was asked to rate 2 texts and failed: KeyError: 'label'. Mend"
    ) in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("answer", [None, ["a"], [None], 3])
def test_an_answer_that_is_no_list_of_numbers_is_a_failure(answer: Any) -> None:
    with pytest.raises(ScorerError, match="was asked to rate 1 texts and failed: "):
        FakeScorer(lambda texts: answer).score(["a"])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_wrong_number_of_scores_is_told(count: int) -> None:
    with pytest.raises(ScorerError) as caught:
        FakeScorer(lambda texts: [0.5] * count).score(["a", "b"])
    assert f"was asked to rate 2 texts and gave {count} scores. It must give one score a text" in (
        str(caught.value)
    )


def test_an_error_of_ours_keeps_its_type() -> None:
    def fail(texts: Sequence[str]) -> list[float]:
        raise ModelLoadError("no model")

    with pytest.raises(ModelLoadError, match="no model"):
        FakeScorer(fail).score(["a"])


def test_what_failed_is_not_remembered() -> None:
    answers = iter([[math.nan], [0.25]])
    scorer = FakeScorer(lambda texts: next(answers))
    with pytest.raises(ScorerError):
        scorer.score(["a"])
    assert scorer.score(["a"]).tolist() == [0.25]

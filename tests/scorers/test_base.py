"""A scorer returns a checked number per text, and rates each text once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.errors import ConfigurationError, ModelLoadError, ScorerError
from nip_astra.scorers.base import Exchange, Message, Scorer, Verdict
from tests.kit.messages import says


class FakeScorer(Scorer):
    """Answers with a function of the texts, and records its inputs."""

    class Parameters(Scorer.Parameters):
        """None."""

    def __init__(self, answer: Callable[[Sequence[str]], Any], **parameters: Any) -> None:
        super().__init__(self.Parameters(**parameters), device=torch.device("cpu"))
        self.answer = answer
        self.asked: list[list[str]] = []

    def _score(self, texts: Sequence[str]) -> Sequence[Verdict]:
        self.asked.append(list(texts))
        answer: Sequence[Verdict] = self.answer(texts)
        return answer


class FakeReader(FakeScorer):
    """Rates a conversation by its number of turns, and records its inputs."""

    reads_history = True

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> Sequence[Verdict]:
        self.read = list(exchanges)
        return self._score(["turn" * len(exchange.conversation) for exchange in exchanges])


def isnan(values: torch.Tensor) -> list[bool]:
    return values.isnan().tolist()


def by_length(texts: Sequence[str]) -> list[float]:
    return [len(text) / 10 for text in texts]


def test_scores_are_float32_in_the_order_of_the_texts() -> None:
    scores = FakeScorer(by_length).score(["abc", "", "ab", "abc"])
    assert scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx([0.3, 0.0, 0.2, 0.3])


def test_each_distinct_text_is_rated_once() -> None:
    scorer = FakeScorer(lambda texts: [None if text == "b" else 0.1 for text in texts])
    assert scorer.score([]).shape == (0,)
    scorer.score(["a", "b", "a"])
    scorer.rate([Exchange("a", (Message("user", "hello"),), "user")])
    ratings = scorer.rate([Exchange("b"), Exchange("c")])
    assert isnan(ratings.scores_N) == [True, False]
    assert not ratings.is_error_N.any()
    assert scorer.asked == [["a", "b"], ["c"]]


def test_tensors_and_numbers_of_any_kind_are_taken() -> None:
    assert FakeScorer(lambda texts: torch.tensor([0.5, 1.0])).score(["a", "b"]).tolist() == [0.5, 1]
    assert FakeScorer(lambda texts: [True, 0]).score(["a", "b"]).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("score", "shown"),
    [(math.nan, "nan"), (math.inf, "inf"), (-0.1, "-0.1"), (1.5, "1.5")],
)
def test_an_invalid_score_is_reported_with_its_text(score: float, shown: str) -> None:
    scorer = FakeScorer(lambda texts: [0.5, score])
    with pytest.raises(ScorerError) as caught:
        scorer.score(["fine", "the cat " * 20])
    assert says(caught.value, "'FakeScorer'", shown, "'the cat the cat")
    assert len(str(caught.value)) < 300


def test_a_scorer_that_raises_is_named_with_the_reason() -> None:
    def fail(texts: Sequence[str]) -> list[float]:
        raise KeyError("label")

    with pytest.raises(ScorerError) as caught:
        FakeScorer(fail).score(["a", "b"])
    assert says(caught.value, "'FakeScorer'", "2 texts", "KeyError: 'label'")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("answer", [None, ["a"], [{}], 3])
def test_an_answer_that_is_no_list_of_numbers_is_a_failure(answer: Any) -> None:
    with pytest.raises(ScorerError, match="'FakeScorer'"):
        FakeScorer(lambda texts: answer).score(["a"])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_wrong_number_of_scores_is_reported(count: int) -> None:
    with pytest.raises(ScorerError) as caught:
        FakeScorer(lambda texts: [0.5] * count).score(["a", "b"])
    assert says(caught.value, f"{count} score", "2 texts")


def test_a_scorer_of_conversations_distinguishes_them_by_history_and_role() -> None:
    scorer = FakeReader(lambda texts: [len(text) / 100 for text in texts])
    short = Exchange("a", (Message("user", "hello"),))
    long = Exchange("a", (Message("assistant", "good day"), Message("user", "hello")))
    ratings = scorer.rate([short, long, short, Exchange("a", (), "user"), Exchange("a")])
    assert ratings.scores_N.tolist() == pytest.approx([0.08, 0.12, 0.08, 0.04, 0.04])
    assert scorer.read == [short, long, Exchange("a", (), "user"), Exchange("a")]
    scorer.rate([long])
    assert len(scorer.asked) == 1


def fails_on(*bad: str) -> Callable[[Sequence[str]], list[float]]:
    def answer(texts: Sequence[str]) -> list[float]:
        if set(bad) & set(texts):
            raise RuntimeError("out of order")
        return by_length(texts)

    return answer


def test_a_run_that_skips_failures_tries_the_texts_of_a_failed_call_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scorer = FakeScorer(fails_on("b", "dd"), on_failure="skip")
    ratings = scorer.rate([Exchange(text) for text in ("a", "b", "ccc", "dd", "b")])
    assert scorer.asked == [["a", "b", "ccc", "dd"], ["a"], ["b"], ["ccc"], ["dd"]]
    assert ratings.is_error_N.tolist() == [False, True, False, True, True]
    assert isnan(ratings.scores_N) == [False, True, False, True, True]
    assert ratings.scores_N[[0, 2]].tolist() == pytest.approx([0.1, 0.3])
    (record,) = caplog.records
    assert "the scorer 'FakeScorer' failed for 2 of 4 texts, which count as errors" in (
        record.getMessage()
    )
    assert "RuntimeError: out of order" in record.getMessage()


def test_only_skipped_texts_are_rated_again() -> None:
    scorer = FakeScorer(fails_on("b"), on_failure="skip")
    scorer.score(["a", "b"])
    scorer.answer = by_length
    assert scorer.score(["a", "b"]).tolist() == pytest.approx([0.1, 0.1])
    assert scorer.asked[-1] == ["b"]


@pytest.mark.parametrize(
    ("answers", "scores", "asked"),
    [
        ([[0.5, math.nan], [0.25]], [0.5, 0.25], [["a", "b"], ["b"]]),
        ([[0.5, math.nan], [math.inf]], [0.5, None], [["a", "b"], ["b"]]),
        ([[0.5, -0.01], [1.01]], [0.5, None], [["a", "b"], ["b"]]),
        ([[0.5], [0.25], [0.75]], [0.25, 0.75], [["a", "b"], ["a"], ["b"]]),
    ],
)
def test_a_failed_text_is_tried_alone_and_then_an_error(
    answers: list[list[float]], scores: list[float | None], asked: list[list[str]]
) -> None:
    given = iter(answers)
    scorer = FakeScorer(lambda texts: next(given), on_failure="skip")
    ratings = scorer.rate([Exchange("a"), Exchange("b")])
    assert ratings.scores_N.nan_to_num(-1).tolist() == [-1 if x is None else x for x in scores]
    assert ratings.is_error_N.tolist() == [x is None for x in scores]
    assert scorer.asked == asked


@pytest.mark.parametrize("on_failure", ["stop", "skip"])
def test_a_wrong_configuration_is_never_skipped(on_failure: str) -> None:
    def fail(texts: Sequence[str]) -> list[float]:
        raise ModelLoadError("no model")

    with pytest.raises(ModelLoadError, match="no model"):
        FakeScorer(fail, on_failure=on_failure).score(["a", "b"])


def test_a_text_that_failed_for_good_is_not_tried_again() -> None:
    error = ScorerError("refused three times")
    scorer = FakeScorer(lambda texts: [0.5, error], on_failure="skip")
    assert scorer.rate([Exchange("a"), Exchange("b")]).is_error_N.tolist() == [False, True]
    assert len(scorer.asked) == 1
    with pytest.raises(ScorerError, match="refused three times"):
        FakeScorer(lambda texts: [0.5, error]).score(["a", "b"])


def test_a_scorer_that_rates_nothing_is_reported() -> None:
    class Idle(Scorer):
        """Does nothing."""

    with pytest.raises(ConfigurationError) as caught:
        Idle(Idle.Parameters(), device=torch.device("cpu"))
    assert says(caught.value, "'Idle'", "_score(texts)", "_score_exchanges")


def saved(verdicts: dict[str, Any], folder: Path) -> dict[str, Any]:
    save_state(folder / "verdicts", verdicts)
    state: dict[str, Any] = load_state(folder / "verdicts")
    return state


@pytest.mark.parametrize("kind", [FakeScorer, FakeReader])
def test_rated_texts_are_not_rated_again_after_a_checkpoint(
    kind: type[FakeScorer], tmp_path: Path
) -> None:
    def unsure(texts: Sequence[str]) -> list[Verdict]:
        return [None if text == "turn" else len(text) / 30 for text in texts]

    said = [
        Exchange("a"),
        Exchange("turn"),
        Exchange("half \ud800 of a pair", (Message("user", "b"),)),
    ]
    first, second = kind(unsure), kind(unsure)
    before = first.rate(said)
    second.load_verdicts(saved(first.verdicts(), tmp_path))
    after = second.rate(said)
    assert second.asked == []
    assert before.scores_N.nan_to_num(-1).tolist() == after.scores_N.nan_to_num(-1).tolist()
    assert not after.is_error_N.any()
    second.rate([Exchange("a", (Message("user", "b"),))])
    # Only a scorer that reads the history treats this as new.
    assert len(second.asked) == (kind is FakeReader)


def test_verdicts_of_a_scorer_whose_code_has_changed_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = FakeScorer(by_length), FakeScorer(by_length)
    first.score(["a"])
    edited = tmp_path / "edited.py"
    edited.write_text("another scorer")
    verdicts = saved(first.verdicts(), tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "__file__", str(edited))
    second.load_verdicts(verdicts)
    second.score(["a"])
    assert second.asked == [["a"]]
    assert "'FakeScorer'" in caplog.text


def test_no_more_verdicts_are_remembered_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nip_astra.scorers.base.MAX_VERDICTS", 2)
    scorer = FakeScorer(by_length)
    assert scorer.score(["a", "bb", "ccc"]).tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert len(scorer.verdicts()["scores"]) == 2
    scorer.score(["ccc", "bb", "a"])
    assert scorer.asked == [["a", "bb", "ccc"], ["a"]]

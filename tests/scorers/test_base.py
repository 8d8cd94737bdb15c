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
from tests.kit.tiny import CPU


class FakeScorer(Scorer):
    """Answers with a function of the texts, and records its inputs."""

    def __init__(self, answer: Callable[[Sequence[str]], Any], **parameters: Any) -> None:
        super().__init__(self.Parameters(**parameters), device=CPU)
        self.answer = answer
        self.batches: list[list[str]] = []

    def _score(self, texts: Sequence[str]) -> Sequence[Verdict]:
        self.batches.append(list(texts))
        return self.answer(texts)


class FakeReader(FakeScorer):
    """Rates a conversation by its number of turns, and records its inputs."""

    reads_history = True

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> Sequence[Verdict]:
        self.read = list(exchanges)
        return self._score(["turn" * len(exchange.conversation) for exchange in exchanges])


def by_length(texts: Sequence[str]) -> list[float]:
    return [len(text) / 10 for text in texts]


@pytest.mark.parametrize(
    "answer", [by_length, lambda texts: torch.tensor(by_length(texts), dtype=torch.float64)]
)
def test_scores_are_float32_in_the_order_of_the_texts(answer: Callable[..., Any]) -> None:
    scores = FakeScorer(answer).score(["abc", "", "ab", "abc"])
    assert scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx([0.3, 0.0, 0.2, 0.3])
    assert FakeScorer(lambda texts: [True, 0]).score(["a", "b"]).tolist() == [1.0, 0.0]


def test_each_distinct_text_is_rated_once() -> None:
    scorer = FakeScorer(lambda texts: [None if text == "b" else 0.1 for text in texts])
    assert scorer.score([]).shape == (0,)
    scorer.score(["a", "b", "a"])
    scorer.rate([Exchange("a", (Message("user", "hello"),), "user")])
    ratings = scorer.rate([Exchange("b"), Exchange("c")])
    assert ratings.scores_N.isnan().tolist() == [True, False]
    assert not ratings.is_error_N.any()
    assert scorer.batches == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("answer", "facts"),
    [
        *(([0.5, x], (x, "'the cat the cat")) for x in (math.nan, math.inf, -0.1, 1.5)),
        *(([0.5] * count, (f"{count} score", "2 texts")) for count in (0, 1, 3)),
        *((x, ()) for x in (None, ["a", "b"], [{}, {}], 3)),
    ],
    ids=str,
)
def test_other_than_a_number_from_0_to_1_per_text_is_reported(
    answer: Any, facts: tuple[Any, ...]
) -> None:
    with pytest.raises(ScorerError) as caught:
        FakeScorer(lambda texts: answer).score(["fine", "the cat " * 20])
    assert says(caught.value, "'FakeScorer'", *facts)
    assert len(str(caught.value)) < 300


def test_a_scorer_of_conversations_distinguishes_them_by_history_and_role() -> None:
    scorer = FakeReader(lambda texts: [len(text) / 100 for text in texts])
    short = Exchange("a", (Message("user", "hello"),))
    long = Exchange("a", (Message("assistant", "good day"), Message("user", "hello")))
    ratings = scorer.rate([short, long, short, Exchange("a", (), "user"), Exchange("a")])
    assert ratings.scores_N.tolist() == pytest.approx([0.08, 0.12, 0.08, 0.04, 0.04])
    assert scorer.read == [short, long, Exchange("a", (), "user"), Exchange("a")]
    scorer.rate([long])
    assert len(scorer.batches) == 1


def test_a_run_that_skips_failures_tries_the_texts_of_a_failed_call_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer(texts: Sequence[str]) -> list[float]:
        if {"b", "dd"} & set(texts):
            raise RuntimeError("out of order")
        return by_length(texts)

    scorer = FakeScorer(answer, on_failure="skip")
    ratings = scorer.rate([Exchange(text) for text in ("a", "b", "ccc", "dd", "b")])
    assert scorer.batches == [["a", "b", "ccc", "dd"], ["a"], ["b"], ["ccc"], ["dd"]]
    assert ratings.is_error_N.tolist() == [False, True, False, True, True]
    assert ratings.scores_N.isnan().tolist() == [False, True, False, True, True]
    assert ratings.scores_N[[0, 2]].tolist() == pytest.approx([0.1, 0.3])
    (record,) = caplog.records
    assert says(record.getMessage(), "'FakeScorer'", "2 of 4", "RuntimeError: out of order")
    # Only skipped texts are rated again.
    scorer.answer = by_length
    assert scorer.score(["a", "b", "ccc"]).tolist() == pytest.approx([0.1, 0.1, 0.3])
    assert scorer.batches[-1] == ["b"]


@pytest.mark.parametrize(
    ("answers", "scores", "batches"),
    [
        ([[0.5, math.nan], [0.25]], [0.5, 0.25], [["a", "b"], ["b"]]),
        ([[0.5, math.nan], [math.inf]], [0.5, None], [["a", "b"], ["b"]]),
        ([[0.5], [0.25], [0.75]], [0.25, 0.75], [["a", "b"], ["a"], ["b"]]),
    ],
)
def test_a_failed_text_is_tried_alone_and_then_an_error(
    answers: list[list[float]], scores: list[float | None], batches: list[list[str]]
) -> None:
    remaining = iter(answers)
    scorer = FakeScorer(lambda texts: next(remaining), on_failure="skip")
    ratings = scorer.rate([Exchange("a"), Exchange("b")])
    assert ratings.scores_N.nan_to_num(-1).tolist() == [-1 if x is None else x for x in scores]
    assert ratings.is_error_N.tolist() == [x is None for x in scores]
    assert scorer.batches == batches


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
    assert len(scorer.batches) == 1
    with pytest.raises(ScorerError, match="refused three times"):
        FakeScorer(lambda texts: [0.5, error]).score(["a", "b"])


def test_a_scorer_that_rates_nothing_is_reported() -> None:
    class Idle(Scorer):
        """Does nothing."""

    with pytest.raises(ConfigurationError) as caught:
        Idle(Idle.Parameters(), device=CPU)
    assert says(caught.value, "'Idle'", "_score(texts)", "_score_exchanges")


@pytest.mark.parametrize("kind", [FakeScorer, FakeReader])
def test_rated_texts_are_not_rated_again_after_a_checkpoint(
    kind: type[FakeScorer], tmp_path: Path
) -> None:
    def unsure(texts: Sequence[str]) -> list[Verdict]:
        return [None if text == "turn" else len(text) / 30 for text in texts]

    half = Exchange("half \ud800 of a pair", (Message("user", "b"),))
    exchanges = [Exchange("a"), Exchange("turn"), half]
    first, second = kind(unsure), kind(unsure)
    before = first.rate(exchanges)
    save_state(tmp_path / "verdicts", first.verdicts())
    second.load_verdicts(load_state(tmp_path / "verdicts"))
    after = second.rate(exchanges)
    assert second.batches == []
    assert before.scores_N.nan_to_num(-1).tolist() == after.scores_N.nan_to_num(-1).tolist()
    assert not after.is_error_N.any()
    second.rate([Exchange("a", (Message("user", "b"),))])
    # Only a scorer that reads the history treats this as new.
    assert len(second.batches) == (kind is FakeReader)


def test_verdicts_of_a_scorer_whose_code_has_changed_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = FakeScorer(by_length), FakeScorer(by_length)
    first.score(["a"])
    edited = tmp_path / "edited.py"
    edited.write_text("another scorer")
    verdicts = first.verdicts()
    monkeypatch.setattr(sys.modules[__name__], "__file__", str(edited))
    second.load_verdicts(verdicts)
    second.score(["a"])
    assert second.batches == [["a"]]
    assert "'FakeScorer'" in caplog.text


def test_no_more_verdicts_are_remembered_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nip_astra.scorers.base.MAX_VERDICTS", 2)
    scorer = FakeScorer(by_length)
    assert scorer.score(["a", "bb", "ccc"]).tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert len(scorer.verdicts()["scores"]) == 2
    scorer.score(["ccc", "bb", "a"])
    assert scorer.batches == [["a", "bb", "ccc"], ["a"]]

"""Several scorers as one: the mean, missing parts, and failures."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from nip_astra.errors import ParameterError, ScorerError, ScorerTimeoutError
from nip_astra.scorers.base import Exchange, Scorer, Verdict, WeightedScorer, register_scorer
from tests.kit.messages import says
from tests.kit.scorers import HISTORY, scorer_on_cpu


class TableScorer(Scorer):
    """Looks a text up."""

    class Parameters(Scorer.Parameters):
        """The known scores."""

        table: dict[str, float | None]
        """Score by text; a text that is missing fails."""

    def _score(self, texts: Sequence[str]) -> list[Verdict]:
        return [self.parameters.table[text] for text in texts]


class TurnScorer(Scorer):
    """Rates by the number of turns before the text."""

    reads_history = True

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> list[Verdict]:
        return [len(exchange.history) / 10 for exchange in exchanges]


@pytest.fixture(autouse=True)
def _names(no_plugins_left: None) -> None:
    register_scorer("table")(TableScorer)
    register_scorer("turns")(TurnScorer)
    register_scorer("slow")(SlowScorer)


def table(weight: float = 1.0, **scores: float | None) -> dict[str, Any]:
    return {"scorer": {"_type": "table", "table": scores}, "weight": weight}


class SlowScorer(Scorer):
    """Takes half a second."""

    def _score(self, texts: Sequence[str]) -> list[Verdict]:
        time.sleep(0.5)
        return [0.0] * len(texts)


def build(parts: dict[str, Any], **parameters: Any) -> WeightedScorer:
    return scorer_on_cpu(WeightedScorer, parts=parts, **parameters)


def test_the_score_is_the_mean_by_weight_if_no_part_is_missing() -> None:
    scorer = build(
        {"light": table(1.0, a=0.2, b=1.0, c=0), "heavy": table(3.0, a=0.6, b=1, c=None)}
    )
    ratings = scorer.rate([Exchange("a"), Exchange("b"), Exchange("c")])
    assert ratings.scores_N[:2].tolist() == pytest.approx([(1 * 0.2 + 3 * 0.6) / 4, 1.0])
    assert math.isnan(ratings.scores_N[2])
    assert not ratings.is_error_N.any()


def test_the_whole_decides_about_a_skipped_part() -> None:
    part = {"scorer": {"_type": "table", "table": {"a": 0.2}, "on_failure": "skip"}}
    with pytest.raises(ScorerError) as caught:
        build({"mine": part}).score(["a", "b"])
    assert says(caught.value, "'b'", "'mine'")
    with pytest.raises(ScorerError, match=r"'table' .* 2 texts"):
        build({"other": table(a=0.2)}).score(["a", "b"])
    for parts in ({"mine": part}, {"other": table(a=0.2)}):
        ratings = build(parts, on_failure="skip").rate([Exchange("a"), Exchange("b")])
        assert ratings.is_error_N.tolist() == [False, True]


def test_the_whole_reads_the_conversation_where_a_part_does() -> None:
    assert build({"one": table(a=0.2)}).reads_history is False
    scorer = build({"one": table(a=0.2), "two": {"scorer": {"_type": "turns"}}})
    assert scorer.reads_history is True
    ratings = scorer.rate([Exchange("a", HISTORY), Exchange("a")])
    assert ratings.scores_N.tolist() == pytest.approx([0.2, 0.1])
    inner = {"_type": "weighted", "parts": {"two": {"scorer": {"_type": "turns"}}}}
    assert build({"inner": {"scorer": inner}}).reads_history is True


def test_its_parameters_are_checked_down_to_the_parts() -> None:
    with pytest.raises(ParameterError) as caught:
        build({"one": {"scorer": {"_type": "tabel"}, "weight": 0}})
    assert says(caught.value, "parts.one.scorer._type", "'tabel'", "'table'", "parts.one.weight")
    with pytest.raises(ParameterError, match="parts"):
        build({})


def test_its_schema_has_an_end_and_its_parameters_come_back() -> None:
    assert WeightedScorer.Parameters.model_json_schema()["type"] == "object"
    parameters = build({"one": table(a=0.2)}).parameters
    assert WeightedScorer.Parameters.from_dict(parameters.to_dict()) == parameters


@pytest.mark.parametrize(("of_part", "of_whole"), [(0.05, 9.0), (9.0, 0.05)])
def test_the_shorter_time_limit_of_a_part_and_the_whole_counts(
    of_part: float, of_whole: float
) -> None:
    parts = {"one": {"scorer": {"_type": "slow", "timeout_seconds": of_part}}}
    scorer = build(parts, timeout_seconds=of_whole)
    for _ in range(2):
        with pytest.raises(ScorerTimeoutError):
            scorer.rate([Exchange("a")])
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0

"""What evaluations say of the scorers, on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nip_astra.evaluation.tables import figure_rows
from nip_astra.report.page import write_report
from nip_astra.report.records import read_run
from nip_astra.report.sections import evaluations, kinds_found
from nip_astra.utils.formatting import NOTHING
from tests.report.runs import evaluation, write_run

RATE = {"value": 0.5, "low": 0.4, "high": 0.6}
QUALITY: dict[str, Any] = {
    "sensitivity": RATE | {"num_found": 10, "num_labelled": 20},
    "specificity": {"value": 0.9, "low": 0.8, "high": 0.95, "num_found": 27, "num_labelled": 30},
    "num_failures": 20, "num_others": 30,
    "corrected": {"is_refused": False, "failure_rate": {"value": 0.25, "low": 0.1, "high": 0.4}},
}  # fmt: skip
REFUSED = QUALITY | {"corrected": {"is_refused": True, "reason": "no <b>better</b> than chance"}}
PAIR = {
    "first": "a", "second": "b", "num_turns": 900, "agreement": 0.75, "kappa": None,
    "correlation": 0.5, "both": 1, "only_first": 2, "only_second": 3, "neither": 894,
}  # fmt: skip
FULL = evaluation(
    scorer="a", scorers={"b": {"failure_rate": RATE}}, detectors={"a": QUALITY, "b": REFUSED},
    scorer_agreement=[PAIR],
    kinds={"seen": 3, "value": 4.5, "low": 3.1, "high": 9.0, "by_queries": [1, 20, 200]},
)  # fmt: skip


def test_quality_and_agreement_are_told_by_evaluation(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one", evaluations={"old": evaluation(), "new": FULL}))
    found = evaluations(run)
    assert found is not None
    ((name, (first, second)),) = found["quality"]
    assert (name, first) == (
        "new",
        ("a", ["31.0% [25.0%, 38.0%]", "25.0% [10.0%, 40.0%]", NOTHING,
               "50.0% [40.0%, 60.0%], 10 of 20", "90.0% [80.0%, 95.0%], 27 of 30"]),
    )  # fmt: skip
    assert second[1][:2] == ["50.0% [40.0%, 60.0%]", "refused: no <b>better</b> than chance"]
    ((_, (row,)),) = found["agreement"]
    assert row == ("a, b", ["900", "75.0%", NOTHING, "0.5", "1 / 2 / 3 / 894"])


def test_kinds_are_a_number_and_not_a_share() -> None:
    label = "  at least, those not seen included (Chao2)"
    assert dict(figure_rows(FULL))[label] == "4.5 [3.1, 9]"
    assert dict(figure_rows(evaluation()))[label] == NOTHING
    assert dict(figure_rows(evaluation(kinds={"seen": 0, "value": 0.0})))[label] == NOTHING


def test_the_kinds_met_are_a_curve_over_queries(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one", evaluations={"old": evaluation(), "new": FULL}))
    chart = kinds_found(run)
    assert chart is not None
    (drawn,) = chart.lines
    assert drawn.line.label == "new"
    assert drawn.line.points[-2:] == [(200.0, 3.0), (300.0, 3.0)]
    assert kinds_found(read_run(write_run(tmp_path / "two"))) is None


def test_the_page_has_them_and_escapes_what_it_quotes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", evaluations={"new": FULL})
    source = write_report([folder]).read_text()
    assert "could not be drawn" not in source
    assert "no &lt;b&gt;better&lt;/b&gt; than chance" in source
    assert "How far scorers agree, by turn" in source
    assert "4.5" in source
    assert "450.0%" not in source

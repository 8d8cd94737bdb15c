"""The page of a run against an API tells what it cost, how long it took and what was refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nip_astra.report.page import write_report
from tests.report.runs import evaluation, results, write_run

USE: dict[str, Any] = {
    "model": "gpt-none", "num_requests": 1234, "num_samples": 1200, "num_remembered": 56,
    "num_refusals": 7, "failures": {"timeout": 3, "refused": 31}, "num_estimated": 0,
    "prompt_tokens": 98765, "completion_tokens": 4321, "cost": 1.75, "median_seconds": 0.8125,
    "p95_seconds": 3.25,
}  # fmt: skip


def cells_of(page: str, heading: str) -> list[str]:
    """The texts of a row of a table."""
    row = next(row for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL) if heading in row)
    return [
        " ".join(re.sub("<[^>]*>", "", cell).split())
        for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL)
    ]


def test_the_page_shows_cost_latency_and_refusals_of_run_and_evaluation(tmp_path: Path) -> None:
    of_judge = USE | {"num_estimated": 2, "cost": None, "failures": {}, "median_seconds": None}
    folder = write_run(
        tmp_path / "one",
        results=results() | {"services": {"target": USE}},
        evaluations={"test": evaluation(services={"judge": of_judge})},
    )
    page = write_report([folder]).read_text()
    assert "Services" in page
    for heading in ("refusals", "cost", "seconds, median", "seconds, 95 %"):
        assert heading in page
    _, *cells = cells_of(page, "target: gpt-none, the run")
    assert cells[:5] == ["1,234", "56", "7", "3 timeout, 31 refused", "98,765"]
    assert [float(cell) for cell in cells[6:9]] == [1.75, 0.812, 3.25]
    _, *cells = cells_of(page, "judge: gpt-none, evaluation test")
    assert cells[3] == "0"
    assert "guessed" in page


def test_a_run_that_asked_nobody_has_no_such_section(tmp_path: Path) -> None:
    assert "seconds, median" not in write_report([write_run(tmp_path / "one")]).read_text()

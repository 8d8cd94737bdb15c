"""What a run on the problems of a task found is told on its page and in the terminal."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from nip_astra.report.records import RunRecord
from nip_astra.report.summary import main_table, verdict
from nip_astra.report.terminal import print_results

RESULTS = {
    "before": {
        "accuracy": 0.3,
        "accuracy_interval": [0.25, 0.36],
        "num_problems": 300,
        "num_right": 90,
        "num_answers": 300,
    },
    "after": {
        "accuracy": 0.8,
        "accuracy_interval": [0.75, 0.84],
        "num_problems": 300,
        "num_right": 232,
        "num_answers": 290,
        "mean_reward": 0.8,
    },
}


def test_the_page_says_how_many_answers_are_right(tmp_path: Path) -> None:
    run = RunRecord(tmp_path, results=RESULTS)
    (sentence,) = verdict(run)
    assert [float(one) for one in re.findall(r"[\d.]+(?=%)|\d+(?= of)|(?<=of )\d+", sentence)] == [
        *(232, 290, 80.0, 75.0, 84.0),
        *(90, 300, 30.0, 25.0, 36.0),
    ]
    headings, rows = main_table(run)
    assert headings == ["before", "after"]
    assert rows[0].cells == [
        "30.0% [25.0%, 36.0%], 90 of 300",
        "80.0% [75.0%, 84.0%], 232 of 290",
    ]


def test_the_terminal_says_how_many_answers_are_right(tmp_path: Path) -> None:
    console = Console(record=True, width=100)
    print_results(RESULTS, tmp_path, console)
    said = console.export_text()
    assert "300" in said
    assert "80.0% [75.0%, 84.0%], 232 of 290" in said
    assert "right answers" in said

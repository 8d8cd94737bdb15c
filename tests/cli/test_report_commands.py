"""Tests of `nip-astra report`."""

from __future__ import annotations

from pathlib import Path

from tests.kit.command_line import CommandLine
from tests.report.runs import write_run


def test_the_page_is_written_into_the_run_and_its_place_is_printed(
    cli: CommandLine, tmp_path: Path
) -> None:
    write_run(tmp_path / "runs" / "one")
    result = cli("report", "runs/one")
    assert (result.code, result.out) == (0, "report     runs/one/report.html\n")
    assert "ast_dpo on pocket_chat" in (tmp_path / "runs/one/report.html").read_text()


def test_several_runs_go_to_the_requested_file(cli: CommandLine, tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / "runs" / str(seed), seed=seed)
    cli.ok("report", "runs/0", "runs/1", "--output", "both.html", "--redact")
    text = (tmp_path / "both.html").read_text()
    assert "Comparison of 2 runs" in text
    assert 'class="veiled"' in text

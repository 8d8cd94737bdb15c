"""Texts of models, services and files reach no reader with active control characters."""

from __future__ import annotations

import csv
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.table import Table
from rich.text import Text

from nip_astra.errors import NipAstraError, ScorerError, UnknownNameError
from nip_astra.evaluation.exports import _csv_text
from nip_astra.evaluation.storage import encode_rows, read_rows
from nip_astra.evaluation.tables import SafeConsole, as_text, matrix_tables, warning_lines
from nip_astra.progress import open_progress
from nip_astra.report import page
from nip_astra.report.page import write_report
from nip_astra.safe_text import has_unsafe, safe_line, safe_text, to_json
from nip_astra.tracking.local import LocalTracker
from nip_astra.tracking.run_directory import RunDirectory, log_file, to_yaml
from nip_astra.tracking.wandb_runs import _cells
from tests.kit.bars import Bars
from tests.kit.command_line import CommandLine
from tests.report.runs import evaluation, failing, results, write_run

CLEAR, TITLE = "\x1b[2J", "\x1b]0;owned\x07"
HOSTILE = f"{CLEAR}{TITLE}\x9b31m\x7f\r\u202etxt\u2066\ud800\U000e0041 [red]x[/red] [link]y :smile:"


def test_every_character_that_acts_is_seen_instead_and_others_stay() -> None:
    assert safe_text(CLEAR) == "\u241b[2J"
    assert safe_text("\x9b\u202e\x7f\ud800") == "\\u009b\\u202e\u2421\\ud800"
    assert safe_text("\U000e0041") == "\\U000e0041"
    assert not has_unsafe(safe_text("".join(map(chr, range(0x3000)))))
    kept = "a\tb\nc é 漢字 עברית العربية 👩\u200d👧 नमस्ते \u200c"
    assert safe_text(kept) == kept
    assert safe_line("a\r\nb\tc") == "a\u23ceb c"


def test_json_and_yaml_are_safe_and_give_back_the_same(tmp_path: Path) -> None:
    for value in (HOSTILE, {"a": [HOSTILE]}, "a\\\u202e", "", None, 1.5):
        assert not has_unsafe(to_json(value).replace("\n", ""))
        assert json.loads(to_json(value)) == value
    values = {"a": HOSTILE.replace("\ud800", ""), "\u202ekey": "\\\u2066 ${x} \x85", "b": "1e-5"}
    assert not has_unsafe(to_yaml(values))
    RunDirectory(tmp_path).write_yaml("x.yaml", values)
    assert RunDirectory(tmp_path).read_yaml("x.yaml") == values


def printed(*parts: Any) -> str:
    stream = io.StringIO()
    SafeConsole(file=stream, width=200).print(*parts, sep="\n")
    return stream.getvalue()


def test_a_console_shows_text_as_it_is_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_column(Text(HOSTILE))
    table.add_row(HOSTILE, Text(HOSTILE, style="bold"))
    shown = printed(HOSTILE, Text(HOSTILE), table, [HOSTILE])
    assert not has_unsafe(shown)
    assert shown.count("[red]x[/red]") == 8
    assert shown.count(":smile:") == 8
    lines = [line for line in shown.splitlines() if line[:1] in "┃┡│└"]
    assert len({len(line.rstrip()) for line in lines}) == 1, "columns are as wide as what is shown"
    rate = {"value": 0.5, "low": 0.4, "high": 0.6}
    figures = {"failure_rate": rate, "warnings": [f"it said {HOSTILE}"]}
    figures |= {"attacker": HOSTILE, "target": HOSTILE}
    text = as_text([*matrix_tables([figures]), *warning_lines([HOSTILE])])
    assert "[red]x[/red]" in text
    assert not has_unsafe(text)
    # Its own colours stay.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31m\u241b[2J" in printed(Text(CLEAR, style="bold red"))


def test_errors_are_safe_also_on_the_command_line(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_unsafe(str(UnknownNameError("scorer", "\x1b[2J", ["a"])))
    assert str(NipAstraError("as it is")) == "as it is"
    run = write_run(cli.folder / f"one{CLEAR}")
    shown = cli.ok("report", str(run)).out
    assert "one\u241b[2J" in shown
    assert not has_unsafe(shown)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # its value after the test

    def fail(error: Exception) -> None:
        monkeypatch.setattr(page, "write_report", mock.Mock(side_effect=error))

    error = ScorerError(HOSTILE)
    error.__cause__ = RuntimeError(HOSTILE)
    fail(error)
    for options, count in (((), 1), (("--debug",), 3)):
        result = cli("report", str(run), *options)
        assert (result.code, result.err.count("\u241b[2J")) == (2, count)
        assert not has_unsafe(result.err)
    fail(RuntimeError(HOSTILE))
    with pytest.raises(RuntimeError) as caught:
        cli("report", str(run))
    sys.excepthook(caught.type, caught.value, caught.tb)
    shown = cli.capsys.readouterr().err
    assert "Traceback" in shown
    assert "RuntimeError: \u241b[2J" in shown
    assert not has_unsafe(shown)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_progress_bar_is_safe(capsys: pytest.CaptureFixture[str], is_terminal: bool) -> None:
    bars = Bars()
    progress = open_progress(1, tqdm_func=bars if is_terminal else None)
    progress.set_description(f"{HOSTILE}\n")
    progress.set_postfix({f"said{CLEAR}": f"{HOSTILE}\nforged", "loss": 0.5})
    progress.step()
    shown = capsys.readouterr().err.rstrip("\n")
    if is_terminal:
        (bar,) = bars.opened
        shown = bar.description + "".join(
            part for item in bar.postfixes[-1].items() for part in item
        )
    assert "forged" in shown
    assert not has_unsafe(shown)
    assert "\n" not in shown


def test_a_message_in_the_log_acts_on_nothing_and_forges_no_entry(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    forged = "2026-01-01 00:00:00,000 ERROR nip_astra: forged"
    reply = HOSTILE.replace("\ud800", "")  # pytest keeps records, and sends them as UTF-8
    with log_file(RunDirectory(run)):
        logging.getLogger("nip_astra.x").warning("the target said %s", f"{reply}\n{forged}")
    log = (run / "log.txt").read_text()
    assert not has_unsafe(log)
    assert f"\n    {forged}\n" in log
    page = write_report([run]).read_text()
    assert "the target said" in page
    assert "forged" not in page


def test_rows_and_tables_of_a_run_are_safe_and_whole(tmp_path: Path) -> None:
    rows = [{"probe": HOSTILE, "response": HOSTILE}]
    assert not has_unsafe(encode_rows(rows).decode())
    (tmp_path / "rows.jsonl").write_bytes(encode_rows(rows))
    assert read_rows(tmp_path / "rows.jsonl") == rows
    (tmp_path / "rollouts").mkdir()
    tracker = LocalTracker(RunDirectory(tmp_path))
    tracker.log_table("train", ["probe"], [[HOSTILE]], step=1)
    tracker.finish(success=True)
    written = (tmp_path / "rollouts" / "train.jsonl").read_text()
    assert not has_unsafe(written)
    assert json.loads(written)["probe"] == HOSTILE
    path = RunDirectory(tmp_path).write_json("x.json", {HOSTILE: HOSTILE})
    assert not has_unsafe(path.read_text())
    assert json.loads(path.read_text()) == {HOSTILE: HOSTILE}
    [[head], [cell]] = csv.reader(io.StringIO(_csv_text([{"probe": HOSTILE}]), newline=""))
    assert (head, cell) == ("probe", safe_text(HOSTILE))
    # Tables on W&B.
    text, nested, number, nothing = _cells([HOSTILE, {"a": HOSTILE}, 1.5, None])
    assert not has_unsafe(text + nested)
    assert (number, nothing) == (1.5, None)


def test_no_text_of_a_run_acts_in_its_report(tmp_path: Path) -> None:
    hostile = failing(HOSTILE, response=HOSTILE, prompt=HOSTILE, episode=7)
    run = write_run(
        tmp_path / "one",
        parameters={HOSTILE.replace("\ud800", "").replace("\x07", ""): "\x9b\u202e"},
        tables={"evaluation": [hostile], "train": [hostile]},
        evaluations={
            "held_out": evaluation(
                attacker=HOSTILE, target=HOSTILE, warnings=[HOSTILE],
                clusters=[{"size": 1, "plants": [HOSTILE], "most_likely": hostile}],
            )
        },
        results=results(warnings=[HOSTILE], planted_failures=[{"name": HOSTILE}]),
        metrics=[{"step": 1, HOSTILE: 1.0, "loss": 1.0}, {"step": 2, HOSTILE: 2.0, "loss": 0.5}],
        sources={"training.lr": HOSTILE},
    )  # fmt: skip
    page = write_report([run]).read_text()
    assert page.count("\u241b[2J") > 10
    assert not has_unsafe(page)

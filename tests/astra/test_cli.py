"""ASTRA-RL's commands train and evaluate a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nip_astra.astra.cli import main
from nip_astra.errors import RunDirectoryError, UnknownNameError


def test_train_and_evaluate_run_ours_with_their_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(main, "_forward", lambda *arguments: calls.append(arguments))
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    with pytest.raises(RunDirectoryError, match="runs"):
        main.newest_run()
    for number, name in enumerate(("first", "second")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        results = tmp_path / "runs" / name / "results.json"
        results.write_text("{}")
        os.utime(results, (number, number))
    for options, expected in (
        (["train"], ("run", "--trainer", "ast_dpo")),
        (["train", "--trainer", "ast_ppo"], ("run", "--trainer", "ast_ppo")),
        (["evaluate"], ("evaluate", "runs/second")),
        (["evaluate", "runs/first", "--json"], ("evaluate", "runs/first", "--json")),
    ):
        result = runner.invoke(main.app, options)
        assert result.exit_code == 0
        assert ("Training model" if options[0] == "train" else "Evaluating model") in result.output
        assert calls[-1] == expected


def test_options_reach_our_command_line() -> None:
    result = CliRunner().invoke(main.app, ["train", "--trainer", "ast_nothing"])
    assert isinstance(result.exception, UnknownNameError)


@pytest.mark.slow
def test_train_runs_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main.app, ["train", "--test-run", "--run-id", "short"])
    assert result.exit_code == 0, result.exception
    assert main.newest_run() == Path("runs/short")

"""Tests of the command line, as a user types it: programs, help, completion and settings."""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from nip_astra import __version__
from nip_astra.cli.app import NoteHandler, app
from nip_astra.errors import ParameterError, PluginError, plural
from nip_astra.overview import registered
from nip_astra.registry import ALL_REGISTRIES
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.scorers.base import SCORERS
from tests.kit.command_line import ONCE, CommandLine, CommandResult, refused
from tests.kit.messages import says

ROOT = Path(__file__).parents[2]


def run_toy(cli: CommandLine, toy: Path, *arguments: str) -> CommandResult:
    return cli("--trainer", "toy_trainer", "--scenario", str(toy), *arguments)


def test_the_program_has_a_version(cli: CommandLine) -> None:
    assert cli.ok("--version").out.strip() == __version__


def test_a_command_whose_output_is_read_no_further_ends_as_by_a_closed_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "run.py", "list", "trainers"]
    pipes: Any = {"stdout": writing, "stderr": subprocess.PIPE, "text": True}
    result = subprocess.run(command, cwd=ROOT, check=False, **pipes)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_terminal_of_another_encoding_shows_escapes(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    code = 'import nip_astra as na\n@na.register_tracker("mine")\nclass Mine(na.Tracker):\n'
    code += '    "Schön."\n'
    plugin.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "nip_astra", "list", "trackers", "--plugin", str(plugin)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.returncode, r"Sch\xf6n" in result.stdout) == (0, True), result.stderr


def test_options_without_a_command_run_an_experiment(cli: CommandLine, toy: Path) -> None:
    overrides = ("--set", "training.num_iterations=2", "--set", "toy_trainer.offset=2")
    result = run_toy(cli, toy, "--run-id", "one", "--seed", "7", *overrides)
    assert result.code == 0, result.err
    assert says(result.out, "runs/one\n", "runs/one/results.json\n")
    assert "Counting 2/2" in result.err
    assert yaml.safe_load(Path("runs/one/hyper_parameters.yaml").read_text())["seed"] == 7
    assert json.loads(Path("runs/one/results.json").read_text()) == {"last": 4.0}
    options = ("--runs-dir", "other", "--num-threads", "1", "--device", "cpu", "--wandb")
    experiment = ("--trainer", "toy_trainer", "--scenario", str(toy), "--run-id", "a")
    cli.ok("run", *experiment, "--test-run", *options, "disabled")
    settings = yaml.safe_load(Path("other/a/settings.yaml").read_text())
    assert (settings["test_run"], settings["num_threads"]) == (True, 1)


def test_a_dry_run_prints_its_cost_and_leaves_nothing(cli: CommandLine, toy: Path) -> None:
    result = run_toy(cli, toy, "--dry-run")
    assert result.code == 0, result.err
    assert says(result.out, "dry run", "num iterations")
    assert list(cli.folder.iterdir()) == []


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stopped_run_names_the_command_that_continues_it(
    cli: CommandLine, toy: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    monkeypatch.setitem(os.environ, "TOY_SIGNAL", f"1:{name}")
    result = run_toy(cli, toy, "--run-id", "one")
    assert result.code == code
    assert "nip-astra resume runs/one" in result.err.splitlines()[-1]
    monkeypatch.delitem(os.environ, "TOY_SIGNAL")
    assert "runs/one\n" in cli.ok("resume", "runs/one").out
    assert "one" in refused(cli("resume", "runs/one")), "it has ended"
    monkeypatch.setitem(os.environ, "TOY_SIGNAL", f"1:{name}:{name}")
    result = run_toy(cli, toy, "--run-id", "twice")
    assert (result.code, "Traceback" in result.err) == (code, False)


def test_tracebacks_are_shown(cli: CommandLine, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TOY_BREAK", "1")
    with pytest.raises(ArithmeticError, match="broken off"):
        run_toy(cli, toy)
    cli.capsys.readouterr()
    first, *_, last = cli("--trainer", "ast_dpoo", "--debug").err.splitlines()
    assert (first, last[:7]) == ("Traceback (most recent call last):", "error: ")


def test_list_shows_origin_and_purpose_of_one_kind_or_of_all(cli: CommandLine, toy: Path) -> None:
    result = cli.ok("list")
    lines = {line.split()[0]: line for line in result.out.splitlines() if line.strip()}
    for name in ("ast_dpo", "ast_chat", "huggingface", "classifier", "profanity"):
        assert "built-in" in lines[name]
    assert "Direct preference optimisation" in lines["ast_dpo"]
    assert "pocket_chat" in lines
    result = cli.ok("list", "trainers", "--plugin", str(toy / "plugin.py"))
    assert "Counts, and breaks off where the environment says so." in result.out
    assert (result.out.split()[0], "classifier" in result.out) == ("trainers", False)


def test_list_shows_broken_names(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = PluginError("the scorer mine is broken.")
    monkeypatch.setattr(SCORERS, "get", Mock(side_effect=broken))
    monkeypatch.setitem(SCORERS._entries, "mine", object)
    monkeypatch.setitem(SCORERS._places, "mine", "mine.py:1")
    result = cli.ok("list", "scorers")
    assert says(result.out, broken, "Probability of one label of a sequence classifier.")


def test_list_reads_registries_from_the_source() -> None:
    entries = {(one.kind, one.name): one for one in registered()}
    for module in ("language_models.services.training", "trainers.registry", "scorers.base"):
        importlib.import_module(f"nip_astra.{module}")
    assert len(ALL_REGISTRIES) >= 15
    for kind, registry in list(ALL_REGISTRIES.items()):
        title = "scenario kinds" if kind == "scenario" else plural(kind.replace("_", " "))
        for name in filter(registry.is_built_in, registry.names()):
            purpose = (registry.get(name).__doc__ or "").strip().partition("\n")[0]
            one = entries[title, name]
            assert one.origin == "built-in"
            assert kind == "optimizer" or one.purpose == purpose


def test_show_prints_values_with_sources_and_a_whole_file(cli: CommandLine, toy: Path) -> None:
    experiment = ("--trainer", "toy_trainer", "--scenario", str(toy))
    result = cli.ok("show", *experiment, "--seed", "3", "--set", "training.lr=1e-4")
    rows = [" ".join(line.split()) for line in result.out.splitlines()]
    assert {"seed 3 command line", "training.lr 0.0001 --set"} <= set(rows)
    assert {"training.minibatch_size 8 default", "toy_trainer.offset 0.5 scenario.yaml"} <= set(
        rows
    )
    shown = cli("show", "--yaml", *experiment, "--set", "training.num_iterations=2")
    cli.ok("--parameters", cli.write("shown.yaml", shown.out), "--run-id", "one")
    assert Path("runs/one/hyper_parameters.yaml").read_text() == shown.out


def test_a_wrong_rank_is_reported(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("x", "5"):
        monkeypatch.setenv("RANK", rank)
        assert says(refused(cli("--trainer", "vanilla_ppo", "--test-run")), "RANK", rank)


OPTIONS = {
    "": """trainer scenario parameters set seed plugin device wandb run-id runs-dir num-threads
        settings test-run dry-run debug""",
    "evaluate": "target scorer labelled embedder fail-if overwrite",
    "score": "scorer labelled embedder threshold",
    "report": "output redact reveal",
    "export": "format output",
    "doctor": "runs-dir online json",
}


def test_help_names_the_options_of_a_command(cli: CommandLine) -> None:
    for command, options in OPTIONS.items():
        result = cli.ok(*command.split(), "--help")
        assert says(result.out, *(f"--{option}" for option in options.split()))
        if not command:
            assert says(result.out, *(f"\n  {name} " for name in ONCE(app).commands))


@pytest.mark.parametrize(
    ("typed", "proposed"),
    [
        ("nip-astra ev", {"evaluate"}),
        ("nip-astra --scen", {"--scenario"}),
        ("nip-astra --trainer ast_dp", {"ast_dpo"}),
        ("nip-astra --trainer ast_dpo --scenario pocket_c", {"pocket_chat", "pocket_chat_api"}),
        ("nip-astra evaluate m", {"mine"}),
        ("nip-astra report other", set()),
    ],
)
def test_a_shell_completes_commands_options_and_names(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, typed: str, proposed: set[str]
) -> None:
    (cli.folder / "runs" / "mine").mkdir(parents=True)
    cli.write("runs/mine/hyper_parameters.yaml", "")
    (cli.folder / "runs" / "other").mkdir()
    monkeypatch.setenv("_NIP_ASTRA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit):
        app(prog_name="nip-astra")
    assert set(cli.capsys.readouterr().out.split()) == proposed


EXPERIMENT = """
    trainer: toy_trainer
    scenario: {}
    settings: {{checkpoint_period: 7, num_checkpoints_kept: 5, wandb_tags: [from, file]}}
"""


def test_a_file_has_settings_beside_its_experiment(cli: CommandLine, toy: Path) -> None:
    stored = cli.write("experiment.yaml", EXPERIMENT.format(toy))
    given = ("--settings", "num_checkpoints_kept=1", "--settings", "num_threads=2")
    # A dedicated option takes precedence.
    cli.ok("--parameters", stored, "--run-id", "one", "--num-threads", "1", *given)
    run = cli.folder / "runs" / "one"
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    expected = {"checkpoint_period": 7, "num_checkpoints_kept": 1, "num_threads": 1}
    assert settings == settings | expected | {"wandb_tags": ["from", "file"]}
    assert "settings" not in yaml.safe_load((run / "hyper_parameters.yaml").read_text())
    other = cli.write("other.yaml", "extends: experiment.yaml\nsettings: {checkpoint_period: 1}")
    first, second = (resolve_experiment(parameter_file=path) for path in (stored, other))
    assert first.hyper_params == second.hyper_params
    assert (first.settings.checkpoint_period, second.settings.checkpoint_period) == (7, 1)
    assert second.settings.num_checkpoints_kept == 5
    wrong = cli.write(
        "wrong.yaml", "extends: other.yaml\nsettings: {wandb: on_line, a: 1}\nsede: 3"
    )
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(parameter_file=wrong)
    assert {f.path for f in caught.value.faults} == {"settings.wandb", "settings.a", "sede"}


@pytest.fixture
def logger() -> logging.Logger:
    logger = logging.Logger("nip_astra.of_a_test")
    logger.addHandler(NoteHandler())
    return logger


def test_each_warning_is_shown_once(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    for number in (1, 1, 2, 3, 4, 5):
        logger.warning("prompt %d is empty", number)
    logger.warning("kept for the end", extra={"is_repeated_at_end": True})
    logger.error("shown by the caller")
    logger.info("for the log")
    assert stderr.getvalue().splitlines() == [f"warning: prompt {n} is empty" for n in (1, 2, 3)]


def test_unwritable_warnings_are_lost(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_pipe = Mock(write=Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
    closed = io.StringIO()
    closed.close()
    for number, stream in enumerate((broken_pipe, closed, None)):
        monkeypatch.setattr(sys, "stderr", stream)
        logger.warning("prompt %d is empty", number)
    assert broken_pipe.write.called

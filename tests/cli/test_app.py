"""Tests of the command line, as a user types it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from nip_astra import __version__
from nip_astra.cli.app import main
from nip_astra.errors import plural
from nip_astra.overview import registered
from nip_astra.registry import ALL_REGISTRIES
from tests.kit.command_line import CommandLine

REPOSITORY = Path(__file__).parents[2]


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Type a command in an empty folder; gives exit code, standard output and error."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(tmp_path)

    def type_command(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["nip-astra", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        code = caught.value.code
        captured = capsys.readouterr()
        return Said(0 if code is None else int(code), captured.out, captured.err)

    return type_command


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


RUN_OPTIONS = (
    *("trainer", "scenario", "parameters", "set", "seed", "plugin", "device", "wandb"),
    *("run-id", "runs-dir", "num-threads", "settings", "test-run", "dry-run", "debug"),
)
HEAVY = ("torch", "transformers", "tensordict", "wandb", "omegaconf", "rich.table")


def test_help_lists_the_commands_and_the_options_of_run_and_imports_nothing_heavy() -> None:
    said = python(
        "import sys\n"
        "from nip_astra.cli.app import main\n"
        "sys.argv = ['run.py', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\n"
    )
    assert said.stderr.strip() == "[]"
    for command in ("run", "resume", "list", "show", "schema", "evaluate", "score", "compare"):
        assert f"\n  {command} " in said.stdout
    for option in RUN_OPTIONS:
        assert f"\n  --{option} " in said.stdout


def test_run_py_and_the_module_are_the_same_program() -> None:
    for command in (["run.py"], ["-m", "nip_astra"]):
        said = subprocess.run(
            [sys.executable, *command, "--version"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        assert said.stdout.strip() == __version__


def test_options_without_a_command_run_an_experiment(
    call: Callable[..., Said], toy: Path, tmp_path: Path
) -> None:
    said = call(
        "--trainer", "toy_trainer", "--scenario", str(toy), "--run-id", "one",
        "--set", "training.num_iterations=2", "--set", "toy_trainer.offset=2", "--seed", "7",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "run        runs/one\n" in said.out
    assert "results    runs/one/results.json\n" in said.out
    assert "Counting 2/2" in said.err
    recorded = yaml.safe_load((tmp_path / "runs" / "one" / "hyper_parameters.yaml").read_text())
    assert (recorded["seed"], recorded["training"]["num_iterations"]) == (7, 2)
    assert json.loads((tmp_path / "runs" / "one" / "results.json").read_text()) == {"last": 4.0}


def test_the_word_run_means_the_same(call: Callable[..., Said], toy: Path, tmp_path: Path) -> None:
    said = call(
        "run", "--trainer", "toy_trainer", "--scenario", str(toy), "--test-run", "--run-id", "a",
        "--runs-dir", "other", "--num-threads", "1", "--device", "cpu", "--wandb", "disabled",
    )  # fmt: skip
    assert said.code == 0, said.err
    settings = yaml.safe_load((tmp_path / "other" / "a" / "settings.yaml").read_text())
    assert (settings["test_run"], settings["num_threads"]) == (True, 1)


def test_a_parameter_file_takes_the_place_of_a_preset(
    call: Callable[..., Said], toy: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"trainer: toy_trainer\nscenario: {toy}\ntoy_trainer: {{offset: 10.0}}\n")
    said = call("--parameters", "mine.yaml", "--run-id", "one")
    assert said.code == 0, said.err
    assert json.loads((tmp_path / "runs/one/results.json").read_text()) == {"last": 14.0}


def test_a_dry_run_prints_what_it_would_cost_and_leaves_nothing(
    call: Callable[..., Said], toy: Path, tmp_path: Path
) -> None:
    said = call("--trainer", "toy_trainer", "--scenario", str(toy), "--dry-run")
    assert said.code == 0, said.err
    assert "dry run: nothing was written" in said.out
    assert "num iterations" in said.out
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_run_tells_how_to_go_on_and_resume_does(
    call: Callable[..., Said], toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code in (("SIGINT", 130), ("SIGTERM", 143)):
        monkeypatch.setitem(os.environ, "TOY_SIGNAL", f"1:{name}")
        said = call("--trainer", "toy_trainer", "--scenario", str(toy), "--run-id", name)
        assert said.code == code
        assert f"nip-astra resume runs/{name}" in said.err.splitlines()[-1]
        monkeypatch.delitem(os.environ, "TOY_SIGNAL")
        said = call("resume", f"runs/{name}")
        assert said.code == 0, said.err
        assert f"run        runs/{name}\n" in said.out
        said = call("resume", f"runs/{name}")
        assert said.code == 2
        assert said.err.startswith(f"error: the run '{name}' has ended")


def test_a_second_interrupt_ends_the_program_without_a_traceback(
    call: Callable[..., Said], toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TOY_SIGNAL", "1:SIGINT:SIGINT")
    said = call("--trainer", "toy_trainer", "--scenario", str(toy), "--run-id", "one")
    assert said.code == 130
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer", "ast_dpoo"], "unknown trainer 'ast_dpoo'. Did you mean 'ast_dpo'?"),
        (
            ["--trainer", "ast_dpo", "--scenario", "pocket_chatt"],
            "unknown scenario 'pocket_chatt'. Did you mean 'pocket_chat'?",
        ),
        (
            ["--trainer", "ast_dpo", "--set", "ast_chat.scorer._type=clasifier"],
            "ast_chat.scorer._type: unknown scorer 'clasifier'. Did you mean 'classifier'?",
        ),
        (["rnu"], "unknown command 'rnu'. Did you mean 'run'? Known commands: analyse, "),
        (["list", "trainrs"], "unknown kind 'trainrs'. Did you mean 'trainers'?"),
        ([], "no trainer is given. Choose one with --trainer: ast_dpo"),
        (["--trainer", "ast_dpo", "--parameters", "no.yaml"], "the parameter file no.yaml"),
        (["--trainer", "ast_dpo", "--set", "seed"], "seed"),
        (["--trainer", "ast_dpo", "--plugin", "no.py"], "the plug-in 'no.py' ("),
        (["resume", "nothing"], "runs holds no run 'nothing'"),
    ],
)
def test_wrong_input_is_told_in_short_with_exit_code_2(
    call: Callable[..., Said], tmp_path: Path, arguments: list[str], message: str
) -> None:
    said = call(*arguments)
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert message in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_several_faults_are_told_at_once(call: Callable[..., Said]) -> None:
    said = call(
        "--trainer", "ast_dpo", "--set", 'training.lr="1e-5"',
        "--set", "training.minibatch_size=true", "--set", "traning.optimizer=sgd",
    )  # fmt: skip
    assert said.code == 2
    assert "error: 3 parameters are wrong:\n" in said.err
    assert 'training.lr: must be a number, not text; given "1e-5"' in said.err
    assert "training.minibatch_size: must be a whole number, not true or false" in said.err
    assert "Did you mean 'training'?" in said.err


def test_wrong_settings_are_told_before_anything_is_made(
    call: Callable[..., Said], toy: Path, tmp_path: Path
) -> None:
    said = call("--trainer", "toy_trainer", "--scenario", str(toy), "--device", "gpu")
    assert said.code == 2
    assert 'device: must be one of cpu, cuda, auto; given "gpu"' in said.err
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_does_not_exist_is_told_with_exit_code_2(call: Callable[..., Said]) -> None:
    said = call("--trainr", "ast_dpo")
    assert said.code == 2
    assert "--trainr" in said.err
    assert "--trainer" in said.err


def test_debug_shows_the_traceback(call: Callable[..., Said]) -> None:
    said = call("--trainer", "ast_dpoo", "--debug")
    assert said.code == 2
    assert said.err.startswith("Traceback (most recent call last):")
    assert said.err.splitlines()[-1].startswith("error: unknown trainer 'ast_dpoo'.")


def test_an_unexpected_error_in_a_trainer_keeps_its_traceback(
    call: Callable[..., Said], toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TOY_BREAK", "1")
    monkeypatch.setattr(
        sys, "argv", ["nip-astra", "--trainer", "toy_trainer", "--scenario", str(toy)]
    )
    with pytest.raises(ArithmeticError, match="broken off"):
        main()


def test_list_gives_every_kind_with_origin_and_purpose(
    call: Callable[..., Said], tmp_path: Path
) -> None:
    said = call("list")
    assert said.code == 0, said.err
    lines = {line.split()[0]: line for line in said.out.splitlines() if line.strip()}
    for name in ("ast_dpo", "ast_chat", "huggingface", "classifier", "profanity"):
        assert "built-in" in lines[name]
    assert "Direct preference optimisation" in lines["ast_dpo"]
    assert "pocket_chat" in lines


def test_list_gives_one_kind_and_what_a_plugin_registers(
    call: Callable[..., Said], toy: Path
) -> None:
    said = call("list", "trainers", "--plugin", str(toy / "plugin.py"))
    assert said.code == 0, said.err
    assert said.out.splitlines()[0].strip() == "trainers"
    assert "Counts, and breaks off where the environment says so." in said.out
    assert "classifier" not in said.out


def test_list_tells_of_what_cannot_be_used_and_goes_on(
    call: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nip_astra.errors import PluginError
    from nip_astra.scorers.base import SCORERS

    def broken(name: str) -> object:
        raise PluginError(f"the scorer {name} is broken.")

    monkeypatch.setattr(SCORERS, "get", broken)
    monkeypatch.setitem(SCORERS._entries, "mine", object)
    monkeypatch.setitem(SCORERS._places, "mine", "mine.py:1")
    said = call("list", "scorers")
    assert said.code == 0
    assert "cannot be used: the scorer mine is broken." in said.out
    assert "Probability of one label of a sequence classifier." in said.out


def test_list_reads_from_the_source_what_the_registries_hold() -> None:
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


def test_show_gives_every_value_with_its_source(call: Callable[..., Said], toy: Path) -> None:
    said = call(
        "show", "--trainer", "toy_trainer", "--scenario", str(toy), "--seed", "3",
        "--set", "training.lr=1e-4",
    )  # fmt: skip
    assert said.code == 0, said.err
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in said.out.splitlines()[1:]}
    assert [cell.strip() for cell in rows["seed"]] == ["3", "command line"]
    assert [cell.strip() for cell in rows["training.lr"]] == ["0.0001", "--set"]
    assert [cell.strip() for cell in rows["training.minibatch_size"]] == ["8", "default"]
    assert [cell.strip() for cell in rows["toy_trainer.offset"]] == ["0.5", "scenario.yaml"]


def test_what_show_prints_as_yaml_can_be_run(
    call: Callable[..., Said], toy: Path, tmp_path: Path
) -> None:
    shown = call(
        "show", "--yaml", "--trainer", "toy_trainer", "--scenario", str(toy), "--set",
        "training.num_iterations=2",
    )  # fmt: skip
    (tmp_path / "shown.yaml").write_text(shown.out)
    said = call("--parameters", "shown.yaml", "--run-id", "one")
    assert said.code == 0, said.err
    assert (tmp_path / "runs/one/hyper_parameters.yaml").read_text() == shown.out


def test_schema_describes_the_sections_of_trainer_and_scenario(
    call: Callable[..., Said], toy: Path
) -> None:
    said = call("schema", "--trainer", "toy_trainer", "--scenario", str(toy))
    assert said.code == 0, said.err
    schema = json.loads(said.out)
    assert {"training", "toy_trainer", "toy_kind", "seed"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False
    assert "What is added to each count." in said.out


def test_an_option_that_is_a_parameter_is_told_how_it_is_set(cli: CommandLine) -> None:
    said = cli("--trainer", "ast_dpo", "--lr", "3")
    assert said.code == 2
    assert "--lr. Parameters are set by --set" in said.err
    said = cli("resume", "runs/one", "--set", "training.lr=1")
    assert said.code == 2
    assert "--set. Parameters stay as they were where the run was begun" in said.err


@pytest.mark.parametrize("rank", ["x", "5"])
def test_a_wrong_number_of_a_launcher_is_a_short_message(
    call: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = call("--trainer", "vanilla_ppo", "--test-run")
    assert said.code == 2
    assert "RANK" in said.err
    assert rank in said.err
    assert "Traceback" not in said.err

"""Tests of running, stopping and resuming, with a counting trainer."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.errors import (
    CheckpointError,
    ConfigurationError,
    ParameterError,
    RunDirectoryError,
    StopRequested,
    UntrustedRunError,
)
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import (
    ExperimentResult,
    prepare_experiment,
    resume_experiment,
    run_experiment,
)
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.run_lock import run_lock
from nip_astra.trainers.registry import TRAINERS
from tests.kit.command_line import CommandLine, plugins_forgotten_after
from tests.kit.experiments import metrics_of, run_in
from tests.kit.messages import says
from tests.kit.toy_scenario import forget_toys
from tests.tracking.wandb_log import WandbLog


@pytest.fixture
def run(toy: Path, tmp_path: Path) -> Any:
    def run_toy(run_id: str | None = "one", *overrides: str, **settings: Any) -> ExperimentResult:
        resolved = resolve_experiment(trainer="toy_trainer", scenario=str(toy), overrides=overrides)
        fields = {"runs_dir": str(tmp_path), "run_id": run_id, "progress": False} | settings
        return run_experiment(resolved, **fields)

    return run_toy


@pytest.fixture
def stop(run: Any, tmp_path: Path) -> Any:
    """Stop a toy run by signals after an iteration."""

    def stop_toy(run_id: str, signals: str = "1:SIGTERM", **settings: Any) -> StopRequested:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TOY_SIGNAL", signals)
            with pytest.raises(StopRequested) as caught:
                run(run_id, **settings)
        return caught.value

    return stop_toy


def counts(path: Path) -> list[float]:
    return [row["count"] for row in metrics_of(path)]


def test_a_run_leaves_its_parameters_settings_environment_results_and_log(
    run: Any, toy: Path, tmp_path: Path
) -> None:
    result = run(None, "training.lr=1e-4")
    directory = result.run_directory
    assert directory.run_id.startswith("toy_trainer-toy_scenario-")
    assert directory.path == tmp_path / directory.run_id
    parameters = directory.read_yaml("hyper_parameters.yaml")
    assert (parameters["trainer"], parameters["scenario"]) == ("toy_trainer", str(toy))
    assert parameters["training"]["lr"] == 1e-4
    assert parameters["toy_trainer"] == {"offset": 0.5}
    settings = directory.read_yaml("settings.yaml")
    assert (settings["run_id"], settings["device"]) == (directory.run_id, "cpu")
    assert "tracker" not in settings
    environment = directory.read_json("environment.json")
    assert str(toy / "plugin.py") in [plugin["spec"] for plugin in environment["plugins"]]
    assert environment["device"] == "cpu"
    # A trainer that writes no results.json still gets one.
    assert directory.read_json("results.json") == result.results == {"last": 4.5}
    assert counts(directory.path) == [0.5, 1.5, 2.5, 3.5]
    assert (directory.path / "log.txt").is_file()


def test_the_recorded_parameters_are_enough_to_run_again(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run("one", "training.num_iterations=2", "toy_trainer.offset=3").run_directory.path
    monkeypatch.chdir(tmp_path.parent)
    again = run_in(
        tmp_path, resolve_experiment(parameter_file=path / "hyper_parameters.yaml"), "two"
    )
    for name in ("hyper_parameters.yaml", "metrics.jsonl", "results.json"):
        assert (again / name).read_bytes() == (path / name).read_bytes()


def test_wrong_settings_are_reported_all_at_once_before_a_directory_is_made(
    run: Any, tmp_path: Path
) -> None:
    with pytest.raises(ParameterError, match="checkpoint_perod") as caught:
        run("one", device="gpu", num_threads=0, checkpoint_perod=3)
    assert len(caught.value.faults) == 3
    # As of an unset variable.
    with pytest.raises(RunDirectoryError, match="run id ''"):
        run("")
    assert list(tmp_path.iterdir()) == []


def test_preparing_an_experiment_writes_nothing_and_reports_its_length(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resolved = resolve_experiment(trainer="toy_trainer", scenario=str(toy))
    prepared = prepare_experiment(resolved)
    assert prepared.total_num_iterations == 4
    assert prepared.trainer.scenario_instance is prepared.scenario_instance
    assert prepare_experiment(resolved, test_run=True).total_num_iterations == 1
    assert prepared.trainer.dry_run() == {"num_iterations": 4}
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_may_be_given_by_plain_hyper_parameters_or_by_its_parts(
    toy: Path, tmp_path: Path
) -> None:
    """Plain hyper-parameters are completed by the layers of files."""
    training = TrainingConfiguration(lr=0.5)
    plain = HyperParameters(trainer="toy_trainer", scenario=str(toy), training=training)
    hyper_params = prepare_experiment(plain).trainer.hyper_params
    assert hyper_params.training.lr == 0.5
    assert hyper_params.training.num_iterations == 4
    assert hyper_params.get("toy_trainer.offset") == 0.5
    settings = ExperimentSettings(runs_dir=str(tmp_path), progress=False, test_run=True)
    result = run_experiment(plain, settings, run_id="both")
    assert result.run_directory.path == tmp_path / "both"
    assert counts(tmp_path / "both") == [0.5]
    parts = {"trainer": "toy_trainer", "scenario": str(toy), "seed": 3}
    prepared = prepare_experiment(**parts, overrides={"training.lr": 0.25}, test_run=True)
    assert prepared.trainer.hyper_params.training.lr == 0.25
    assert (prepared.trainer.hyper_params.seed, prepared.total_num_iterations) == (3, 1)
    with pytest.raises(ConfigurationError, match="seed"):
        prepare_experiment(resolve_experiment(trainer="toy_trainer", scenario=str(toy)), seed=4)


def test_a_signal_stops_the_run_after_its_iteration_and_the_rest_follows_on_resume(
    run: Any, stop: Any, tmp_path: Path
) -> None:
    # Outside the main thread a run leaves signals alone.
    thread = threading.Thread(target=run, args=("whole",))
    thread.start()
    thread.join()
    whole = tmp_path / "whole"
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for name in ("SIGINT", "SIGTERM"):
        stopped, path = stop(name, f"1:{name}"), tmp_path / name
        assert stopped.signal_name == name
        assert str(stopped).endswith(f"nip-astra resume {path}")
        assert counts(path) == [0.5, 1.5]
        assert not (path / "results.json").exists()
        assert resume_experiment(path, progress=False).run_directory.path == path
        for file in ("metrics.jsonl", "results.json"):
            assert (path / file).read_bytes() == (whole / file).read_bytes()
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert after == handlers


def test_the_first_signal_prints_an_explanation_at_once_and_a_second_stops_at_once(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("whole")
    trainer, printed = TRAINERS.get("toy_trainer"), []
    save = trainer._save

    def signalled(self: Any, done: int) -> None:
        if done == 2:
            capfd.readouterr()
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
                printed.append(capfd.readouterr().err)
        save(self, done)

    monkeypatch.setattr(trainer, "_save", signalled)
    with pytest.raises(StopRequested) as caught:
        run("one")
    assert says(caught.value, "last checkpoint", "resume")
    (first,) = printed
    assert says(first, "SIGINT:", "saving")
    assert says(capfd.readouterr().err, "SIGINT again:", "without saving")
    assert CheckpointStore(tmp_path / "one" / "checkpoints").open_latest()[1]["step"] == 1


def test_a_run_in_progress_is_not_resumed(stop: Any, tmp_path: Path) -> None:
    stop("one")
    message = rf"process {os.getpid()}\."
    with run_lock(tmp_path / "one"), pytest.raises(RunDirectoryError, match=message):
        resume_experiment("one", runs_dir=str(tmp_path), progress=False)
    resume_experiment("one", runs_dir=str(tmp_path), progress=False)
    assert (tmp_path / "one" / "results.json").is_file()


@pytest.mark.parametrize(("iteration", "before"), [(2, [0.5, 1.5, 2.5]), (0, [0.5])])
def test_a_failed_run_reports_it_in_its_log_and_goes_on_from_its_checkpoint_or_the_start(
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    iteration: int,
    before: list[float],
) -> None:
    path = tmp_path / "one"
    monkeypatch.setenv("TOY_BREAK", str(iteration))
    with pytest.raises(ArithmeticError, match="broken off"):
        run("one")
    monkeypatch.delenv("TOY_BREAK")
    assert "broken off" in (path / "log.txt").read_text()
    assert counts(path) == before
    resume_experiment(path, progress=False)
    assert counts(path) == [0.5, 1.5, 2.5, 3.5]
    assert ("resuming from step_00000002" in (path / "log.txt").read_text()) is (iteration == 2)
    assert not [h for h in logging.getLogger("nip_astra").handlers if hasattr(h, "baseFilename")]


def test_only_an_unfinished_run_with_a_whole_checkpoint_is_resumed(
    run: Any, stop: Any, tmp_path: Path
) -> None:
    run("one")
    with pytest.raises(RunDirectoryError) as caught:
        resume_experiment(tmp_path / "one")
    assert says(caught.value, "'one'", tmp_path / "one" / "results.json", "new run")
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirectoryError, match=r"hyper_parameters\.yaml"):
            resume_experiment(path)
    stop("two", "2:SIGTERM")
    (tmp_path / "two" / "checkpoints" / "step_00000003" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step_00000003.* state\.json"):
        resume_experiment(tmp_path / "two", progress=False)
    assert counts(tmp_path / "two") == [0.5, 1.5, 2.5]


def test_settings_of_a_resumed_run_are_those_of_its_start_unless_others_are_given(
    stop: Any, tmp_path: Path
) -> None:
    stop("one", "0:SIGTERM", num_checkpoints_kept=1)
    build = sys.modules["nip_astra.run"].build_scenario_instance
    with mock.patch("nip_astra.run.build_scenario_instance", wraps=build) as built:
        resume_experiment(tmp_path / "one", progress=False, num_threads=2)
    settings = built.call_args.args[1]
    assert (settings.num_checkpoints_kept, settings.num_threads) == (1, 2)


def test_wandb_mirrors_a_run_and_its_resumption(stop: Any, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    stop("one", wandb="offline")
    resume_experiment(tmp_path / "one", progress=False)
    # W&B's own process writes the last records after a run has finished, and then ends.
    wandb.teardown()
    logs = [WandbLog(file) for file in (tmp_path / "one" / "wandb").glob("offline-run-*/*.wandb")]
    first, second = sorted(logs, key=lambda log: log.history[0]["iteration"])
    assert [row["train/count"] for row in first.history] == [0.5, 1.5]
    # The report is also a row.
    rows = [row for row in second.history if "train/count" in row]
    assert [row["train/count"] for row in rows] == [2.5, 3.5]
    for log, exit_code in ((first, 1), (second, 0)):
        assert (log.run_id, log.exit_code) == ("one", exit_code)
        assert log.config["toy_trainer"] == {"offset": 0.5}
    assert counts(tmp_path / "one") == [0.5, 1.5, 2.5, 3.5]


OWN_TRAINER = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from nip_astra.trainers.registry import TRAINERS

class Mine(TRAINERS.get("toy_trainer")):
    '''Counts as well.'''
"""


def test_plugins_scenario_and_custom_trainer_are_found_again_from_another_folder(
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    shutil.copytree(toy, work / "toy", ignore=shutil.ignore_patterns("__pycache__"))
    (work / "config").mkdir()
    (work / "config" / "mine.py").write_text(OWN_TRAINER)
    (work / "extra.py").write_text("LOADED = True\n")
    (work / "config" / "mine.yaml").write_text(
        "trainer: mine\n"
        "scenario: toy\n"
        "custom_trainer_module_path: mine.py\n"
        "custom_trainer_class_name: Mine\n"
        "mine: {offset: 2.0}\n"
        "training: {num_iterations: 3}\n"
    )
    # The section of the scenario file belongs to the plug-in's trainer.
    scenario = work / "toy" / "scenario.yaml"
    scenario.write_text(scenario.read_text().replace("toy_trainer:\n  offset: 0.5\n", ""))
    with pytest.MonkeyPatch.context() as patch, plugins_forgotten_after():
        patch.chdir(work)
        forget_toys()
        patch.setenv("TOY_SIGNAL", "0:SIGTERM")
        words = "--parameters config/mine.yaml --plugin extra.py --run-id one"
        stopped = CommandLine(work, toy, capsys)(*words.split())
    assert stopped.code == 143, stopped.err
    # Progress on standard error, then the message.
    assert stopped.err.endswith("nip-astra resume runs/one\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "of_another_user"))
        with pytest.raises(UntrustedRunError, match=r"(extra|mine|plugin)\.py"):
            resume_experiment(work / "runs" / "one")
    (work / "extra.py").write_text("LOADED = 2\n")
    monkeypatch.chdir(elsewhere)
    one = work / "runs" / "one"
    with plugins_forgotten_after():
        forget_toys()
        CommandLine(elsewhere, toy, capsys).ok("resume", str(one))
    assert counts(one) == [2.0, 3.0, 4.0]
    assert list(elsewhere.iterdir()) == []
    recorded = RunDirectory.open(one).read_yaml("hyper_parameters.yaml")
    assert recorded["plugins"] == [str(work / "extra.py")]
    assert recorded["custom_trainer_module_path"] == str(work / "config" / "mine.py")
    assert recorded["scenario"] == str(work / "toy")
    assert f"the plug-in {work / 'extra.py'} has changed" in (one / "log.txt").read_text()


def test_a_run_whose_plugin_has_moved_goes_on_with_a_copy_that_the_user_gives(
    toy: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("extra.py", "LOADED = 1\n")
    monkeypatch.setenv("TOY_SIGNAL", "0:SIGTERM")
    with plugins_forgotten_after():
        options = ("--run-id", "one", "--plugin", "extra.py", "--set", "training.num_iterations=3")
        assert cli("--trainer", "toy_trainer", "--scenario", str(toy), *options).code == 143
    (cli.folder / "new").mkdir()
    (cli.folder / "extra.py").unlink()
    copy = cli.write("new/extra.py", "LOADED = 2\n")
    monkeypatch.delenv("TOY_SIGNAL")
    cli.ok("resume", "one", "--plugin", "new/extra.py")
    run = cli.folder / "runs" / "one"
    assert len(counts(run)) == 3
    assert f"the plug-in {copy} has changed" in (run / "log.txt").read_text()


UNFINISHED = """
import nip_astra as na
from nip_astra.trainers.ast.dpo import AstDpoTrainer

@na.register_trainer("unfinished")
class Unfinished(na.AstTrainer):
    def flatten(self, tree): return []

@na.register_trainer("forgetful")
class Forgetful(AstDpoTrainer):
    def __init__(self, *given): self.given = given

@na.register_trainer("narrow")
class Narrow(AstDpoTrainer):
    def __init__(self, config): super().__init__(config)
"""


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize(
    ("trainer", "facts"),
    [
        ("unfinished", "Unfinished .*loss"),
        ("forgetful", "Forgetful .*super"),
        ("narrow", "Narrow .*scenario_instance"),
    ],
)
def test_a_trainer_without_its_hooks_or_its_base_class_s_constructor_is_refused(
    trainer: str, facts: str, tiny_scenario: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "unfinished.py"
    plugin.write_text(UNFINISHED)
    resolved = resolve_experiment(
        trainer=trainer, scenario=str(tiny_scenario), plugins=[str(plugin)]
    )
    with pytest.raises(ConfigurationError, match=facts):
        run_in(tmp_path / "runs", resolved)
    # Its id stays free.
    assert list(tmp_path.glob("runs/*")) == []

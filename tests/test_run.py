"""Tests of running, stopping and resuming, with a trainer that counts."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.errors import (
    CheckpointError,
    ConfigurationError,
    ModelLoadError,
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
from tests.kit.command_line import CommandLine, plugins_forgotten_after
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


def counts(path: Path) -> list[float]:
    return [json.loads(line)["count"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_parameters_settings_environment_results_and_log(
    run: Any, toy: Path, tmp_path: Path
) -> None:
    result = run("one", "training.lr=1e-4")
    directory = result.run_directory
    assert directory.path == tmp_path / "one"
    parameters = directory.read_yaml("hyper_parameters.yaml")
    assert (parameters["trainer"], parameters["scenario"]) == ("toy_trainer", str(toy))
    assert parameters["training"]["lr"] == 1e-4
    assert parameters["toy_trainer"] == {"offset": 0.5}
    settings = directory.read_yaml("settings.yaml")
    assert (settings["run_id"], settings["device"]) == ("one", "cpu")
    assert "tracker" not in settings
    specs = [plugin["spec"] for plugin in directory.read_json("environment.json")["plugins"]]
    assert str(toy / "plugin.py") in specs
    assert directory.read_json("environment.json")["device"] == "cpu"
    # A trainer that writes no results.json itself gets one.
    assert directory.read_json("results.json") == result.results == {"last": 4.5}
    assert counts(directory.path) == [0.5, 1.5, 2.5, 3.5]
    assert (directory.path / "log.txt").is_file()


def test_a_run_gets_a_name_of_trainer_and_scenario(run: Any) -> None:
    first, second = run(None), run(None)
    assert first.run_directory.run_id.startswith("toy_trainer-toy_scenario-")
    assert first.run_directory.run_id != second.run_directory.run_id


def test_the_recorded_parameters_are_enough_to_run_again(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run("one", "training.num_iterations=2", "toy_trainer.offset=3").run_directory
    monkeypatch.chdir(tmp_path.parent)
    resolved = resolve_experiment(parameter_file=directory.path / "hyper_parameters.yaml")
    again = run_experiment(resolved, runs_dir=str(tmp_path), run_id="two", progress=False)
    for name in ("hyper_parameters.yaml", "metrics.jsonl", "results.json"):
        assert (again.run_directory.path / name).read_bytes() == (
            directory.path / name
        ).read_bytes()


def test_an_existing_run_id_is_refused_and_left_alone(run: Any, tmp_path: Path) -> None:
    run("one")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(RunDirectoryError, match="or choose another --run-id"):
        run("one")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_wrong_settings_are_told_all_at_once_before_a_directory_is_made(
    run: Any, tmp_path: Path
) -> None:
    with pytest.raises(ParameterError) as caught:
        run("one", device="gpu", num_threads=0, checkpoint_perod=3)
    assert "3 parameters are wrong" in str(caught.value)
    assert "checkpoint_perod: unknown parameter" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_preparing_an_experiment_writes_nothing_and_tells_its_length(
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


def test_plain_hyper_parameters_are_completed_by_the_same_layers(toy: Path) -> None:
    plain = HyperParameters(
        trainer="toy_trainer", scenario=str(toy), training=TrainingConfiguration(lr=0.5)
    )
    hyper_params = prepare_experiment(plain).trainer.hyper_params
    assert hyper_params.training.lr == 0.5
    assert hyper_params.training.num_iterations == 4
    assert hyper_params.get("toy_trainer.offset") == 0.5


def test_settings_are_an_object_or_its_fields_or_both(toy: Path, tmp_path: Path) -> None:
    settings = ExperimentSettings(runs_dir=str(tmp_path), progress=False, test_run=True)
    plain = HyperParameters(trainer="toy_trainer", scenario=str(toy))
    result = run_experiment(plain, settings, run_id="both")
    assert result.run_directory.path == tmp_path / "both"
    assert counts(result.run_directory.path) == [0.5]


def test_an_experiment_may_be_given_by_its_parts(toy: Path) -> None:
    parts = {"trainer": "toy_trainer", "scenario": str(toy), "seed": 3}
    prepared = prepare_experiment(**parts, overrides={"training.lr": 0.25}, test_run=True)
    assert prepared.trainer.hyper_params.training.lr == 0.25
    assert (prepared.trainer.hyper_params.seed, prepared.total_num_iterations) == (3, 1)
    with pytest.raises(ConfigurationError, match="seed"):
        prepare_experiment(resolve_experiment(trainer="toy_trainer", scenario=str(toy)), seed=4)


def test_a_signal_stops_the_run_after_its_iteration_and_the_rest_follows_on_resume(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("whole").run_directory.path
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for name in ("SIGINT", "SIGTERM"):
        monkeypatch.setenv("TOY_SIGNAL", f"1:{name}")
        with pytest.raises(StopRequested) as caught:
            run(name)
        path = tmp_path / name
        assert caught.value.signal_name == name
        assert str(caught.value).endswith(f"nip-astra resume {path}")
        assert counts(path) == [0.5, 1.5]
        assert not (path / "results.json").exists()
        monkeypatch.delenv("TOY_SIGNAL")
        result = resume_experiment(path, progress=False)
        assert result.run_directory.path == path
        for file in ("metrics.jsonl", "results.json"):
            assert (path / file).read_bytes() == (whole / file).read_bytes()
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert after == handlers


def test_a_second_signal_stops_at_once(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOY_SIGNAL", "1:SIGINT:SIGINT")
    with pytest.raises(StopRequested, match=r"since the last checkpoint is lost.*resume"):
        run("one")
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert [line.partition(":")[0] for line in said] == ["SIGINT", "SIGINT again"]
    assert "saving" in said[0]
    assert "without saving" in said[1]
    assert CheckpointStore(tmp_path / "one" / "checkpoints").open_latest()[1]["step"] == 1


def test_a_run_that_is_at_work_is_not_resumed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_SIGNAL", "1:SIGTERM")
    with pytest.raises(StopRequested):
        run("one")
    monkeypatch.delenv("TOY_SIGNAL")
    message = rf"in use by process {os.getpid()}\."
    with run_lock(tmp_path / "one"), pytest.raises(RunDirectoryError, match=message):
        resume_experiment("one", runs_dir=str(tmp_path), progress=False)
    resume_experiment("one", runs_dir=str(tmp_path), progress=False)
    assert (tmp_path / "one" / "results.json").is_file()


def test_a_run_outside_the_main_thread_leaves_signals_alone(run: Any, tmp_path: Path) -> None:
    thread = threading.Thread(target=run, args=("thread",))
    thread.start()
    thread.join()
    assert (tmp_path / "thread" / "results.json").is_file()


def test_a_failed_run_says_so_in_its_log_and_goes_on_from_its_checkpoint(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_BREAK", "2")
    with pytest.raises(ArithmeticError, match="broken off"):
        run("one")
    assert "the run failed: broken off" in (tmp_path / "one" / "log.txt").read_text()
    assert counts(tmp_path / "one") == [0.5, 1.5, 2.5]
    monkeypatch.delenv("TOY_BREAK")
    resume_experiment(tmp_path / "one", progress=False)
    assert counts(tmp_path / "one") == [0.5, 1.5, 2.5, 3.5]
    assert "resuming from step_00000002" in (tmp_path / "one" / "log.txt").read_text()
    assert not [h for h in logging.getLogger("nip_astra").handlers if hasattr(h, "baseFilename")]


def test_a_run_that_was_stopped_before_any_checkpoint_starts_over(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_BREAK", "0")
    with pytest.raises(ArithmeticError):
        run("one")
    monkeypatch.delenv("TOY_BREAK")
    resume_experiment(tmp_path / "one", progress=False)
    assert counts(tmp_path / "one") == [0.5, 1.5, 2.5, 3.5]


def test_a_finished_run_is_not_resumed(run: Any, tmp_path: Path) -> None:
    run("one")
    with pytest.raises(RunDirectoryError) as caught:
        resume_experiment(tmp_path / "one")
    assert says(caught.value, "'one'", "has ended", tmp_path / "one" / "results.json", "new run")


def test_what_is_no_run_is_not_resumed(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirectoryError, match=r"holds no hyper_parameters\.yaml\. Give"):
            resume_experiment(path)


def test_a_corrupt_checkpoint_is_not_resumed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_SIGNAL", "2:SIGTERM")
    with pytest.raises(StopRequested):
        run("one")
    (tmp_path / "one" / "checkpoints" / "step_00000003" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step_00000003.* state\.json"):
        resume_experiment(tmp_path / "one", progress=False)
    assert counts(tmp_path / "one") == [0.5, 1.5, 2.5]


def test_settings_of_a_resumed_run_are_those_it_was_started_with_unless_others_are_given(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_SIGNAL", "0:SIGTERM")
    with pytest.raises(StopRequested):
        run("one", num_checkpoints_kept=1)
    monkeypatch.delenv("TOY_SIGNAL")
    seen: list[ExperimentSettings] = []

    def spy(hyper_params: Any, settings: ExperimentSettings, **kwargs: Any) -> Any:
        seen.append(settings)
        return build(hyper_params, settings, **kwargs)

    build = sys.modules["nip_astra.run"].build_scenario_instance
    monkeypatch.setattr("nip_astra.run.build_scenario_instance", spy)
    resume_experiment(tmp_path / "one", progress=False, num_threads=2)
    assert (seen[0].num_checkpoints_kept, seen[0].num_threads) == (1, 2)


def test_wandb_mirrors_a_run_and_what_is_resumed_of_it(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("TOY_SIGNAL", "1:SIGTERM")
    with pytest.raises(StopRequested):
        run("one", wandb="offline")
    monkeypatch.delenv("TOY_SIGNAL")
    resume_experiment(tmp_path / "one", progress=False)
    # W&B's own process writes the last records after a run has finished, and then ends.
    wandb.teardown()
    logs = [WandbLog(file) for file in (tmp_path / "one" / "wandb").glob("offline-run-*/*.wandb")]
    first, second = sorted(logs, key=lambda log: log.history[0]["iteration"])
    assert [row["train/count"] for row in first.history] == [0.5, 1.5]
    # The report is a row too.
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
    # The section of the scenario file is that of the trainer in the plug-in.
    scenario = work / "toy" / "scenario.yaml"
    scenario.write_text(scenario.read_text().replace("toy_trainer:\n  offset: 0.5\n", ""))
    with pytest.MonkeyPatch.context() as patch, plugins_forgotten_after():
        patch.chdir(work)
        forget_toys()
        patch.setenv("TOY_SIGNAL", "0:SIGTERM")
        started = ("--parameters", "config/mine.yaml", "--plugin", "extra.py", "--run-id", "one")
        stopped = CommandLine(work, toy, capsys)(*started)
    assert stopped.code == 143, stopped.err
    # Progress on standard error, then the message.
    assert stopped.err.endswith("nip-astra resume runs/one\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "of_another_user"))
        with pytest.raises(UntrustedRunError, match=r"(extra|mine|plugin)\.py"):
            resume_experiment(work / "runs" / "one")
    (work / "extra.py").write_text("LOADED = 2\n")
    monkeypatch.chdir(elsewhere)
    with plugins_forgotten_after():
        forget_toys()
        resumed = CommandLine(elsewhere, toy, capsys)("resume", str(work / "runs" / "one"))
    assert resumed.code == 0, resumed.err
    assert counts(work / "runs" / "one") == [2.0, 3.0, 4.0]
    assert list(elsewhere.iterdir()) == []
    recorded = RunDirectory.open(work / "runs" / "one").read_yaml("hyper_parameters.yaml")
    assert recorded["plugins"] == [str(work / "extra.py")]
    assert recorded["custom_trainer_module_path"] == str(work / "config" / "mine.py")
    assert recorded["scenario"] == str(work / "toy")
    log = (work / "runs" / "one" / "log.txt").read_text()
    assert f"the plug-in {work / 'extra.py'} has changed" in log


def test_a_run_whose_plugin_has_moved_goes_on_with_a_copy_that_the_user_gives(
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    type_command = CommandLine(tmp_path, toy, capsys)
    (tmp_path / "extra.py").write_text("LOADED = 1\n")
    monkeypatch.setenv("TOY_SIGNAL", "0:SIGTERM")
    with plugins_forgotten_after():
        stopped = type_command(
            *("--trainer", "toy_trainer", "--scenario", str(toy), "--run-id", "one"),
            *("--plugin", "extra.py", "--set", "training.num_iterations=3"),
        )
    assert stopped.code == 143, stopped.err
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "extra.py").write_text("LOADED = 2\n")
    (tmp_path / "extra.py").unlink()
    monkeypatch.delenv("TOY_SIGNAL")
    with plugins_forgotten_after():
        resumed = type_command("resume", "one", "--plugin", "new/extra.py")
    assert resumed.code == 0, resumed.err
    assert len(counts(tmp_path / "runs" / "one")) == 3
    log = (tmp_path / "runs" / "one" / "log.txt").read_text()
    assert f"the plug-in {tmp_path / 'new' / 'extra.py'} has changed" in log


def test_a_run_that_fails_while_it_is_built_leaves_its_id_free(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    options = {"runs_dir": str(tmp_path), "run_id": "again", "progress": False}

    def start(*overrides: str) -> None:
        short = ["training.num_iterations=1", "ast_chat.evaluation.use_random_search=false"]
        resolved = resolve_experiment(
            trainer="ast_dpo", scenario=str(tiny_scenario), overrides=[*short, *overrides]
        )
        run_experiment(resolved, **options)

    with pytest.raises(ModelLoadError):
        start(f"ast_chat.target.language_model.model={tmp_path / 'missing.gguf'}")
    assert not (tmp_path / "again").exists()
    start()
    assert (tmp_path / "again" / "results.json").is_file()


def test_a_trainer_without_its_hooks_is_told_which_are_missing(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "unfinished.py"
    plugin.write_text(
        "from nip_astra.trainers.ast.base import AstTrainer\n"
        "from nip_astra.trainers.registry import register_trainer\n"
        "@register_trainer('unfinished')\n"
        "class Unfinished(AstTrainer):\n"
        "    '''Has no loss.'''\n"
        "    def flatten(self, tree): return []\n"
    )
    resolved = resolve_experiment(
        trainer="unfinished", scenario=str(tiny_scenario), plugins=[str(plugin)]
    )
    with pytest.raises(ConfigurationError, match=r"Unfinished .*loss\. Define"):
        prepare_experiment(resolved, progress=False)


@pytest.mark.usefixtures("no_plugins_left")
def test_a_constructor_that_forgets_its_base_class_is_told(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "forgetful.py"
    plugin.write_text(
        "import nip_astra as na\n"
        "from nip_astra.trainers.ast.dpo import AstDpoTrainer\n"
        "@na.register_trainer('forgetful')\n"
        "class Forgetful(AstDpoTrainer):\n"
        "    def __init__(self, *given): self.given = given\n"
    )
    resolved = resolve_experiment(
        trainer="forgetful", scenario=str(tiny_scenario), plugins=[str(plugin)]
    )
    with pytest.raises(ConfigurationError, match=r"Forgetful .* super\(\).__init__"):
        prepare_experiment(resolved, progress=False)

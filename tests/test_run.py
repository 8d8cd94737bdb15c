"""Running, stopping and resuming, with a counting trainer."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from nip_astra.checkpoints.store import CheckpointStore, write_manifest
from nip_astra.checkpoints.tensors import save_state
from nip_astra.errors import (
    CheckpointError,
    ConfigurationError,
    MissingPartError,
    ParameterError,
    RunDirectoryError,
    StopRequested,
    UnexpectedExitError,
    UntrustedRunError,
)
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import ExperimentResult, prepare_experiment, resume_experiment, run_experiment
from nip_astra.scenario_instance import ConversationInstance, ProtocolInstance, ScenarioInstance
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.run_lock import run_lock
from nip_astra.trainers.registry import TRAINERS
from tests.kit.command_line import CommandLine, plugins_forgotten_after
from tests.kit.experiments import metrics_of, run_in, trainer_of
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
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int, before: list[float]
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
    message = refusal_of(tmp_path / "one", RunDirectoryError)
    assert says(message, "'one'", tmp_path / "one" / "results.json", "new run")
    for path in (tmp_path, tmp_path / "missing"):
        assert "hyper_parameters.yaml" in refusal_of(path, RunDirectoryError)
    stop("two", "2:SIGTERM")
    (tmp_path / "two" / "checkpoints" / "step_00000003" / "state.json").write_text("{}")
    assert says(refusal_of(tmp_path / "two"), "step_00000003", "state.json")


def test_settings_of_a_resumed_run_are_those_of_its_start_unless_others_are_given(
    stop: Any, tmp_path: Path
) -> None:
    stop("one", "0:SIGTERM", num_checkpoints_kept=1)
    with pytest.raises(ConfigurationError, match="run_id"):
        resume_experiment(tmp_path / "one", progress=False, run_id="other")
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
    # One folder, with the steps of the first process too.
    (file,) = (tmp_path / "one" / "wandb").glob("offline-run-*/*.wandb")
    log = WandbLog(file)
    # The report is also a row.
    rows = [row["train/count"] for row in log.history if "train/count" in row]
    assert rows == [0.5, 1.5, 2.5, 3.5]
    assert (log.run_id, log.exit_code) == ("one", 0)
    assert log.config["toy_trainer"] == {"offset": 0.5}
    assert counts(tmp_path / "one") == [0.5, 1.5, 2.5, 3.5]


def test_a_run_killed_before_its_trackers_had_all_sends_the_rest(run: Any, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    directory = run("one", wandb="offline").run_directory.path
    wandb.teardown()
    with pytest.raises(RunDirectoryError, match="has ended"):
        resume_experiment(directory, progress=False)
    # As killed after its results, before W&B had written anything.
    for folder in (directory / "wandb").glob("offline-run-*"):
        shutil.rmtree(folder)
    (directory / ".is_tracked").touch()
    resume_experiment(directory, progress=False)
    wandb.teardown()
    (file,) = (directory / "wandb").glob("offline-run-*/*.wandb")
    rows = [row["train/count"] for row in WandbLog(file).history if "train/count" in row]
    assert rows == [0.5, 1.5, 2.5, 3.5]
    assert not (directory / ".is_tracked").exists()


OWN_TRAINER = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from nip_astra.trainers.registry import TRAINERS

class Mine(TRAINERS.get("toy_trainer")):
    '''Counts as well.'''
"""


def test_plugins_scenario_and_custom_trainer_are_found_again_from_another_folder(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


# ---- checks before a run resumes


@pytest.fixture
def stopped(stop: Any, tmp_path: Path) -> Path:
    """A run stopped after two of its four iterations."""
    stop("one")
    return tmp_path / "one"


def everything_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("log.txt", ".lock")
    }


def refusal_of(
    path: Path, error: type[Exception] = CheckpointError, *, is_trusted: bool = False
) -> str:
    """Messages of resuming; it may change no record of the run."""
    before = everything_in(path)
    with pytest.raises(error) as caught:
        resume_experiment(path, progress=False, is_trusted=is_trusted)
    assert everything_in(path) == before
    return str(caught.value)


def sign(checkpoint: Path, *without: str, **metadata: Any) -> None:
    """Make the manifest agree with the files, and change other fields of the run."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").unlink()
    fields = {name: x for name, x in manifest["metadata"].items() if name not in without}
    write_manifest(checkpoint, manifest["step"], fields | metadata, is_best=False)


def test_a_run_with_edited_parameters_is_not_resumed(stopped: Path) -> None:
    file = stopped / "hyper_parameters.yaml"
    whole = file.read_text()
    values = yaml.safe_load(whole)
    values["toy_trainer"]["offset"] = 7.0
    values["training"]["lr"] = 0.25
    file.write_text(yaml.safe_dump(values))
    message = refusal_of(stopped, is_trusted=True)
    assert says(message, "toy_trainer.offset was 0.5 and is 7.0", "training.lr", "Restore")
    file.write_text(whole)
    assert resume_experiment(stopped, progress=False).results == {"last": 4.5}


def test_a_checkpoint_of_another_trainer_or_without_its_parameters_is_refused(
    stopped: Path,
) -> None:
    checkpoint = stopped / "checkpoints" / "step_00000002"
    sign(checkpoint, trainer="ast_dpo")
    assert says(refusal_of(stopped), "'ast_dpo'", "'toy_trainer'")
    # As in versions that stored only torch's generator.
    sign(checkpoint, "parameters", trainer="toy_trainer")
    assert "environment.json" in refusal_of(stopped)


def test_a_checkpoint_that_the_trainer_cannot_read_is_reported(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_nothing(self: Any, done: int) -> None:
        def write(folder: Path) -> None:
            save_state(folder / "state", {"nothing": 1})

        self._checkpoint_store().save(done + 10, write, metadata={})

    monkeypatch.setattr(TRAINERS.get("toy_trainer"), "_save", save_nothing)
    resume_experiment(stopped, progress=False)
    (stopped / "results.json").unlink()
    assert says(refusal_of(stopped), "'toy_trainer'", "KeyError: 'done'")


@pytest.mark.parametrize("lost", ["*/", "*", ""], ids=["folders", "everything", "the folder"])
def test_a_run_that_lost_its_checkpoints_neither_starts_over_nor_forgets(
    stopped: Path, lost: str
) -> None:
    folder = stopped / "checkpoints"
    for path in folder.glob(lost) if lost else [folder]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert says(refusal_of(stopped), folder, "start a new run")


def test_lost_timings_and_environment_and_remains_of_a_killed_process_do_not_stop_a_resumption(
    stopped: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run("whole").run_directory.path
    # The toy records neither; its checkpoint claims that it did.
    (stopped / "environment.json").unlink()
    state = stopped / "checkpoints" / "step_00000002" / "state.json"
    plain = json.loads(state.read_text())
    plain["tracker"]["files"] |= {"timings.jsonl": 100, "rollouts/train.jsonl": 70}
    state.write_text(json.dumps(plain))
    sign(state.parent)
    (stopped / "timings.jsonl").write_text('{"step": 1}\n{"st')
    (stopped / "checkpoints" / ".tmp-step_00000009" / "model").mkdir(parents=True)
    (stopped / ".settings.yaml.tmp").write_text("half")
    # Without environment.json nothing shows that the run is the user's own.
    resume_experiment(stopped, progress=False, is_trusted=True)
    assert (stopped / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (stopped / "timings.jsonl").read_text() == '{"step": 1}\n'
    assert not [p for p in stopped.rglob(".*") if p.name not in (".lock", ".has_checkpoints")]
    assert says(caplog.text, "timings.jsonl had 100", "train.jsonl had 70", "environment.json")


def test_a_garbled_pointer_to_the_latest_checkpoint_is_reported(stopped: Path) -> None:
    for text in (b"../../elsewhere\n", b"\xff\xfe\x00", b""):
        (stopped / "checkpoints" / "latest").write_bytes(text)
        assert "step_00000002" in refusal_of(stopped)


def test_a_run_killed_before_its_report_is_finished(run: Any) -> None:
    path = run("one").run_directory.path
    (path / "report.html").unlink()
    (path / ".report.html.tmp").write_text("<html")
    (path / "checkpoints" / ".tmp-step_00000004").mkdir()
    before = everything_in(path)
    assert resume_experiment(path, progress=False).results == {"last": 4.5}
    after = everything_in(path)
    assert set(after) - set(before) == {"report.html"}
    assert set(before) - set(after) == {".report.html.tmp"}
    assert not list(path.rglob(".tmp-*"))
    assert "has ended" in refusal_of(path, RunDirectoryError)


def test_code_that_exits_does_not_end_an_unfinished_run_in_silence(
    run: Any, tmp_path: Path
) -> None:
    run("first")
    leaves = mock.patch.object(TRAINERS.get("toy_trainer"), "_save", side_effect=SystemExit(0))
    with leaves, pytest.raises(UnexpectedExitError, match=r"sys\.exit\(0\)"):
        run("one")
    assert "sys.exit(0)" in (tmp_path / "one" / "log.txt").read_text()
    assert not (tmp_path / "one" / "results.json").exists()
    assert resume_experiment(tmp_path / "one", progress=False).results == {"last": 4.5}


def test_a_run_directory_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(new: RunDirectory) -> None:
        new.write_json("half.json", {})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunDirectory.create(tmp_path, "one", fail)
    assert list(tmp_path.iterdir()) == []
    # Files left by a killed process.
    (tmp_path / ".new-one" / "rollouts").mkdir(parents=True)

    def write(new: RunDirectory) -> None:
        new.write_json("a.json", {})
        # Another process leaves the unfinished directory to this.
        with pytest.raises(RunDirectoryError, match="in use by"):
            RunDirectory.create(tmp_path, "one")

    made = RunDirectory.create(tmp_path, "one", write)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert (made.path / "a.json").is_file()
    assert (made.path / "checkpoints").is_dir()


# ---- settings


def test_settings_come_back_from_their_file_without_their_runtime_fields(tmp_path: Path) -> None:
    runtime = {"run_directory": RunDirectory(tmp_path), "tqdm_func": print}
    runtime["global_tqdm_step_fn"] = lambda: None
    written = ExperimentSettings(wandb="offline", num_threads=2, **runtime).to_dict()
    assert not runtime.keys() & written
    again = ExperimentSettings.from_dict(written)
    assert again.to_dict() == written
    assert (again.run_directory, again.wandb, again.num_threads) == (None, "offline", 2)


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ({"device": "gpu"}, ["cpu, cuda, auto", '"gpu"']),
        ({"wandb": "ofline"}, ["disabled, offline, online", '"ofline"', "'offline'"]),
        ({"num_threads": 0}, ["at least 1", "0"]),
        ({"checkpoint_period": -1}, ["at least 0", "-1"]),
        ({"test_run": "yes"}, ["true or false", '"yes"']),
        ({"runs": "x"}, ["unknown", '"x"', "'runs_dir'"]),
        ({"run_directory": "runs"}, ['"runs"']),
        ({"tqdm_func": 3}, ["3"]),
    ],
)
def test_a_wrong_setting_is_reported(values: dict[str, Any], facts: list[str]) -> None:
    for make in (ExperimentSettings.from_dict, lambda given: ExperimentSettings(**given)):
        with pytest.raises(ParameterError) as caught:
            make(values)
        (fault,) = caught.value.faults
        assert fault.path == next(iter(values))
        assert says(fault, *facts)


@pytest.mark.parametrize(
    "given",
    [
        {"run_directory": RunDirectory(Path("x"))},
        *({"sharding": "fsdp"}, {"process_store": "meet"}, {"ray_address": "auto"}),
        *({"actor_cpus": 2.0}, {"actor_gpus": 1.0}),
    ],
)
def test_settings_that_a_run_does_not_read_are_refused_by_name(
    run: Any, tmp_path: Path, given: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(given))):
        run("one", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_stop_flag_stops_a_run_after_its_work_is_saved(run: Any, tmp_path: Path) -> None:
    with pytest.raises(StopRequested, match="notebook"):
        run("one", stop_flag=lambda: "notebook")
    assert counts(tmp_path / "one") == [0.5]
    for given in ({"run_directory": RunDirectory(tmp_path)}, {"actor_cpus": 2.0}):
        with pytest.raises(ConfigurationError, match=next(iter(given))):
            resume_experiment(tmp_path / "one", progress=False, **given)
    assert resume_experiment(tmp_path / "one", progress=False).results["last"] == 4.5


# ---- parts of an instance


def test_a_part_of_another_family_is_refused(tiny_scenario: Path) -> None:
    conversation = trainer_of("ast_dpo", scenario=tiny_scenario).scenario_instance
    assert isinstance(conversation, ConversationInstance)
    assert set(conversation.datasets) == {"train", "dev", "test"}
    with pytest.raises(MissingPartError, match=r"'ast_chat'.*'protocol_handler'.*sampler"):
        conversation.protocol_handler  # noqa: B018 - reading it is the test
    assert not hasattr(conversation, "combined_agents")
    protocol = trainer_of("vanilla_ppo", scenario="graph_isomorphism_small").scenario_instance
    assert isinstance(protocol, ProtocolInstance)
    assert min(conversation.num_parameters, protocol.num_parameters) > 0
    with pytest.raises(MissingPartError, match=r"'graph_isomorphism'.*'datasets'"):
        protocol.datasets  # noqa: B018 - reading it is the test


def test_the_base_alone_is_an_instance_that_can_be_copied() -> None:
    instance = ScenarioInstance(kind="plain")
    assert instance.num_parameters == 0
    assert copy.deepcopy(instance) == pickle.loads(pickle.dumps(instance)) == instance

"""Runs that are killed at their file operations resume as if uninterrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nip_astra import resume_check
from nip_astra.errors import ConfigurationError, WorkerProcessError
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.resume_check import (
    RUN,
    ResumeCheck,
    check_resume,
    find_difference,
    find_fault,
    in_a_fork,
    killed_at,
    read_run_contents,
)
from tests.kit.command_line import CommandLine, CommandResult, plugins_forgotten_after, refused
from tests.kit.resuming import SHORT_TRAINERS, short_experiment
from tests.kit.toy_scenario import toy_scenario_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


def check_kills(trainer: str, folder: Path, every: int) -> ResumeCheck:
    """Kill runs at every n-th of their file operations, in forks that have the dependencies."""
    with plugins_forgotten_after(), ExitStack() as stack:
        if trainer == "toy_trainer":
            scenario = stack.enter_context(toy_scenario_in(folder / "scenario"))
            resolved = resolve_experiment(trainer=trainer, scenario=str(scenario))
        else:
            resolved = short_experiment(trainer, folder / "scenario", num_iterations=2)
        check = check_resume(
            resolved,
            folder,
            plan=lambda operations: range(1, len(operations) + 1, every),
            max_iterations=None,
        )
    assert check.is_equal, check
    return check


@pytest.mark.parametrize(
    ("trainer", "every", "num_least"),
    [
        # The run directory, four checkpoints, results and report.
        ("toy_trainer", 37, 101),
        # One trainer of each family.
        *((trainer, 91, 92) for trainer in ("ast_dpo", "vanilla_ppo", "solo_agent")),
        # Models and jobs are in its own process.
        *(
            pytest.param(trainer, 10, 201, marks=pytest.mark.slow)
            for trainer in ("pure_text_ei", "pure_text_malt")
        ),
    ],
)
def test_a_run_is_killed_here_and_there(
    trainer: str, every: int, num_least: int, tmp_path: Path
) -> None:
    check = check_kills(trainer, tmp_path, every)
    assert check.num_operations >= num_least
    assert len(check.kills) == len(range(1, check.num_operations + 1, every))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["toy_trainer", *SHORT_TRAINERS])
def test_a_run_is_killed_at_every_file_operation(trainer: str, tmp_path: Path) -> None:
    check = check_kills(trainer, tmp_path, 1)
    assert len(check.kills) == check.num_operations


def a_run(folder: Path, changed: str = "") -> Path:
    """The compared files of a run, with another number in the changed file."""
    texts = {
        "results.json": '{"after": {"rate": NUMBER}, "seconds": SECONDS}',
        "metrics.jsonl": '{"step": 1, "loss": NUMBER}\n',
        "rollouts/train_0000/answers.jsonl": '{"id": NUMBER}\n',
        "checkpoints/latest": "step_00000002\n",
        "checkpoints/step_00000002/state.json": '{"run": {"iteration": NUMBER}}',
        "checkpoints/step_00000002/own.json": '{"total": NUMBER}',
        "checkpoints/step_00000001/state.json": "NUMBER",
        "timings.jsonl": "NUMBER",
    }
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = text.replace("SECONDS", str(time.perf_counter()))
        file.write_text(text.replace("NUMBER", "5" if name == changed else "4"))
    (folder / "model" / "agent").mkdir(parents=True)
    weights = folder / "model" / "agent" / "model.safetensors"
    save_file({"head": torch.ones(1) * ("model" in changed)}, weights)
    return folder


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ("results.json", "results.json: after.rate"),
        ("metrics.jsonl", "metrics.jsonl: line 1, loss"),
        ("rollouts/train_0000/answers.jsonl", "answers.jsonl: line 1, id"),
        ("checkpoints/step_00000002/state.json", "state.json: run.iteration"),
        ("checkpoints/step_00000002/own.json", "own.json: total"),
        ("model/agent/model.safetensors", "model.safetensors: head"),
        ("checkpoints/step_00000001/state.json", ""),
        ("timings.jsonl", ""),
    ],
)
def test_files_of_a_run_are_compared_by_file_and_name(
    changed: str, difference: str, tmp_path: Path
) -> None:
    first, second = a_run(tmp_path / "a"), a_run(tmp_path / "b", changed)
    text = find_difference(read_run_contents(first), read_run_contents(second))
    assert text.endswith(difference)
    assert bool(text) == bool(difference)


def test_a_revision_of_a_step_saved_again_is_no_difference_and_leftovers_are_named(
    tmp_path: Path,
) -> None:
    first, second = a_run(tmp_path / "a"), a_run(tmp_path / RUN)
    expected = read_run_contents(first)
    checkpoints = second / "checkpoints"
    (checkpoints / "step_00000002").rename(checkpoints / "step_00000002_r2")
    (checkpoints / "latest").write_text("step_00000002_r2\n")
    (second / "report.html").touch()
    assert find_fault(tmp_path, expected) == ""
    (second / ".unfinished").touch()
    assert ".unfinished" in find_fault(tmp_path, expected)
    (second / "results.json").unlink()
    assert "results.json" in find_fault(tmp_path, expected)


def test_every_operation_that_changes_files_is_a_kill_point(tmp_path: Path) -> None:
    with killed_at(0) as done:
        (tmp_path / "folder").mkdir()
        with (tmp_path / "a").open("w") as file:
            os.fsync(file.fileno())
            os.ftruncate(file.fileno(), 0)
        os.close(os.open(tmp_path / "a", os.O_WRONLY))
        os.truncate(tmp_path / "a", 0)
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "b").replace(tmp_path / "c")
        (tmp_path / "c").read_text()
        (tmp_path / "c").unlink()
        (tmp_path / "folder").rmdir()
    kinds = "mkdir open fsync ftruncate open truncate rename replace unlink rmdir"
    assert [one.split()[0] for one in done] == kinds.split()


FORGETFUL = """
import random

from nip_astra.trainers.registry import TRAINERS, register_trainer


@register_trainer("forgetful")
class Forgetful(TRAINERS.get("toy_trainer")):
    total = 0

    def _save(self, done):
        self.total += 1
        super()._save(done)

    def train(self):
        super().train()
        self.results["after"] = {"total": self.total + random.SystemRandom().random() * NOISE}

NOISE = 0.0
"""


FAULT_FROM_THE_THIRD_ITERATION = """
import torch

from nip_astra.trainers.registry import TRAINERS, register_trainer

torch.linspace(0, 1, 4_000_000).cos()


@register_trainer("late")
class Late(TRAINERS.get("toy_trainer")):
    num_done = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # A model of more than one thread is built before the run's number of threads holds.
        self.weights = torch.linspace(0, 1, 4_000_000).cos()

    def _save(self, done):
        self.num_done += 1
        if done > 2:
            self.results["after"] = {"num_done": self.num_done}
        super()._save(done)
"""


def checked_late(folder: Path, *, num_kills: int, max_iterations: int) -> ResumeCheck:
    """Check a trainer that forgets from its third iteration on what happened before."""
    (folder / "late.py").write_text(FAULT_FROM_THE_THIRD_ITERATION)
    with plugins_forgotten_after(), toy_scenario_in(folder / "scenario") as scenario:
        text = (scenario / "scenario.yaml").read_text()
        (scenario / "scenario.yaml").write_text(text.replace("toy_trainer", "late"))
        plugins = [str(scenario / "plugin.py"), str(folder / "late.py")]
        resolved = resolve_experiment(trainer="late", scenario=str(scenario), plugins=plugins)
        return check_resume(
            resolved, folder / "runs", num_kills=num_kills, max_iterations=max_iterations
        )


def test_a_check_ends_where_a_parallel_region_was_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_check, "IDLE_SECONDS", 20.0)
    torch.set_num_threads(2)
    torch.linspace(0, 1, 4_000_000).cos()
    check = checked_late(tmp_path, num_kills=3, max_iterations=2)
    assert check.is_equal, check
    assert torch.get_num_threads() == 2


@pytest.mark.slow
def test_the_command_ends_with_the_default_threads_and_a_region_run_first(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(FAULT_FROM_THE_THIRD_ITERATION)
    with toy_scenario_in(tmp_path / "scenario") as scenario:
        text = (scenario / "scenario.yaml").read_text()
        (scenario / "scenario.yaml").write_text(text.replace("toy_trainer", "late"))
        words = ["check-resume", "--scenario", str(scenario), "--trainer", "late"]
        words += ["--plugin", str(scenario / "plugin.py"), "--plugin", str(tmp_path / "late.py")]
        words += ["--kills", "2", "--iterations", "2"]
        environment = {name: os.environ[name] for name in os.environ if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [sys.executable, "-m", "nip_astra", *words],
            env=environment,
            timeout=200,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": equal") == 2


def test_a_fault_of_the_third_iteration_is_seen_and_resumed_iterations_are_counted(
    tmp_path: Path,
) -> None:
    for name in ("short", "long"):
        (tmp_path / name).mkdir()
    short = checked_late(tmp_path / "short", num_kills=4, max_iterations=1)
    assert short.is_equal
    assert short.num_resumed == 0
    # One kill in each interval: before, between and after the four checkpoints.
    long = checked_late(tmp_path / "long", num_kills=5, max_iterations=4)
    assert [kill.num_resumed_iterations for kill in long.kills] == [0, 3, 2, 1, 0]
    assert not long.is_equal
    assert long.num_resumed == 3


def test_more_than_one_thread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="2 threads"):
        check_resume(resolve_experiment(trainer="ast_dpo"), tmp_path, num_threads=2)


def test_a_process_without_progress_is_killed_and_reported(
    monkeypatch: pytest.MonkeyPatch, forked: list[int]
) -> None:
    monkeypatch.setattr(resume_check, "IDLE_SECONDS", 0.1)
    with pytest.raises(WorkerProcessError, match="a waiting run"):
        in_a_fork(signal.pause, name="a waiting run")
    (process,) = forked
    assert not Path(f"/proc/{process}").exists()


def test_a_forked_run_ends_with_a_signal_to_its_parent() -> None:
    script = (
        "import time; from nip_astra.resume_check import in_a_fork;"
        "in_a_fork(lambda: (print('begun', flush=True), time.sleep(600)))"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        assert parent.stdout.readline() == "begun\n"
        parent.terminate()
        # The child holds the pipe too, which ends when both have ended.
        assert parent.communicate(timeout=60)[0] == ""


def test_the_command_reports_state_that_a_trainer_forgets(cli: CommandLine) -> None:
    """Exit codes: 0 if all are equal, 1 if one differs, 2 if nothing could be run."""
    kept = cli.folder / "kept"

    def check(folder: str, plugin: str, *more: str) -> CommandResult:
        with plugins_forgotten_after(), toy_scenario_in(cli.folder / folder) as scenario:
            words = ["check-resume", "--scenario", str(scenario), "--kills", "3"]
            words += ["--trainer", "forgetful" if plugin else "toy_trainer"]
            if plugin:
                text = (scenario / "scenario.yaml").read_text()
                (scenario / "scenario.yaml").write_text(text.replace("toy_trainer", "forgetful"))
                words += ["--plugin", str(scenario / "plugin.py")]
                words += ["--plugin", cli.write(f"{folder}.py", plugin)]
            return cli(*words, *more)

    equal = check("a", "")
    assert (equal.code, equal.out.count(": equal")) == (0, 3)
    assert "2 of them trained further" in equal.out
    assert "nothing was resumed" in check("g", "", "--iterations", "1").out
    unequal = check("b", FORGETFUL, "--runs-dir", str(kept))
    assert unequal.code == 1
    assert "results.json: after.total" in unequal.out
    assert (kept / "whole" / "run" / "results.json").exists()
    unlike = check("c", FORGETFUL.replace("NOISE = 0.0", "NOISE = 1.0"))
    assert unlike.code == 1
    assert "two uninterrupted runs differ: results.json: after.total" in unlike.out
    broken = FORGETFUL.replace("self.total += 1", "1 / 0")
    assert "ZeroDivisionError" in refused(check("f", broken))
    refused(check("d", "", "--settings", "checkpoint_period=5"))
    refused(check("e", "", "--set", "toy_trainer.offset=none"))

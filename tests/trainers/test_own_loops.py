"""Trainers with a loop of their own, as the guide writes them: saved, resumed and published."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import nip_astra as na
from nip_astra.checkpoints.run_state import part_of_object
from nip_astra.checkpoints.weights import load_modules, save_modules
from nip_astra.cli.options import print_outcome
from nip_astra.errors import CheckpointError, ConfigurationError, StopRequested
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.resume_check import check_resume, read_run_contents
from nip_astra.run import resume_experiment, run_experiment
from nip_astra.utils.formatting import decimal
from tests.kit.command_line import plugins_forgotten_after
from tests.kit.documents import ROOT, blocks

GUIDE = ROOT / "doc" / "guides" / "creating-a-trainer.md"
OVERRIDES = {
    "hill_climbing": ["hill_climbing.num_iterations=6", "training.eval_period=2"],
    "two_loops": [
        "rl.num_iterations=4",
        "rl.frames_per_batch=64",
        "rl.num_test_iterations=1",
        "training.eval_period=1",
    ],
}
SETTINGS: dict[str, Any] = {"progress": False, "wandb": "disabled", "num_threads": 1}


@pytest.fixture(autouse=True)
def _forget_plugins() -> Any:
    with plugins_forgotten_after():
        yield


def write_trainer(name: str, folder: Path, *changes: tuple[str, str]) -> Path:
    """Write a trainer of the guide into a file, with some of its text replaced."""
    (text,) = [block.text for block in blocks(GUIDE) if block.file == f"{name}.py"]
    for before, after in changes:
        assert text.count(before) == 1
        text = text.replace(before, after)
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path


def resolve(name: str, plugin: Path, *more: str) -> ResolvedExperiment:
    return resolve_experiment(
        trainer=name,
        scenario="graph_isomorphism_small",
        overrides=[*OVERRIDES[name], *more],
        plugins=[str(plugin)],
    )


def run_until(experiment: ResolvedExperiment, runs_dir: Path, num_polls: int | None = None) -> Path:
    """Run an experiment, to the end or to a stop signal at the n-th time that one is looked for."""
    num_left = num_polls

    def stop_flag() -> str | None:
        nonlocal num_left
        if num_left is None:
            return None
        num_left -= 1
        return "SIGTERM" if num_left <= 0 else None

    ends = pytest.raises(StopRequested) if num_polls is not None else nullcontext()
    with ends as stopped:
        run_experiment(
            experiment,
            runs_dir=str(runs_dir),
            run_id="run",
            stop_flag=stop_flag,
            checkpoint_period=0,
            **SETTINGS,
        )
    assert stopped is None or stopped.value.is_saved
    return runs_dir / "run"


@pytest.mark.parametrize("name", sorted(OVERRIDES))
def test_a_trainer_of_the_guide_saves_resumes_publishes_and_reports(
    name: str, tmp_path: Path
) -> None:
    experiment = resolve(name, write_trainer(name, tmp_path))
    whole = run_until(experiment, tmp_path / "whole")
    results = json.loads((whole / "results.json").read_text())
    total = results["training"]["num_iterations"]
    assert total == (6 if name == "hill_climbing" else 4)
    assert results["after"]
    assert results["training"]["best_dev"]["value"] is not None
    assert list((whole / "model").glob("*.safetensors"))
    assert (whole / "checkpoints" / "best").is_file()
    assert next(iter(results["after"])) in (whole / "report.html").read_text()
    for num_polls in range(1, total):
        stopped = run_until(experiment, tmp_path / str(num_polls), num_polls)
        assert not (stopped / "results.json").exists()
        resume_experiment(stopped, plugins=[str(tmp_path / f"{name}.py")], progress=False)
        contents = read_run_contents(stopped)
        expected = read_run_contents(whole)
        # Their checkpoints are as many as there were stops.
        for file in contents.keys() & expected.keys():
            assert contents[file] == expected[file], (num_polls, file)
        assert (stopped / "model").is_dir()


@pytest.mark.parametrize("name", sorted(OVERRIDES))
def test_a_killed_trainer_of_the_guide_goes_on_exactly(name: str, tmp_path: Path) -> None:
    experiment = resolve(name, write_trainer(name, tmp_path))
    check = check_resume(experiment, tmp_path / "runs", num_kills=4)
    assert check.is_equal, check
    assert check.num_resumed >= 2


def test_figures_after_training_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = resolve("hill_climbing", write_trainer("hill_climbing", tmp_path))
    result = run_experiment(experiment, runs_dir=str(tmp_path), run_id="run", **SETTINGS)
    print_outcome(result)
    printed = capsys.readouterr().out
    assert "after" in printed
    assert decimal(result.results["after"]["loss"]) in printed


def test_an_object_that_is_not_kept_is_seen_by_the_check(tmp_path: Path) -> None:
    forgotten = ', "train_sampler": self.samplers["train"]'
    plugin = write_trainer("two_loops", tmp_path, (forgotten, ""))
    check = check_resume(resolve("two_loops", plugin), tmp_path / "runs", num_kills=6)
    assert any(kill.difference for kill in check.kills)


def test_the_best_models_are_measured_and_published(tmp_path: Path) -> None:
    # The search forgets what it found: the later models are worse.
    plugin = write_trainer(
        "hill_climbing",
        tmp_path,
        ("if self._loss(candidate) < self._loss(weights):", "if True:"),
    )
    run = run_until(
        resolve("hill_climbing", plugin, "hill_climbing.step_size=3"), tmp_path / "runs"
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = {row["step"]: row["dev/reward"] for row in rows if "dev/reward" in row}
    assert sorted(rewards) == [2, 4, 6]
    best = max(rewards.values())
    assert best > rewards[6]
    results = json.loads((run / "results.json").read_text())
    assert results["training"]["best_dev"]["value"] == best
    assert results["after"]["loss"] == -best
    weights = load_file(run / "model" / "weights.safetensors")["weight"]
    assert float((weights - torch.arange(4.0)).square().mean()) == pytest.approx(-best)


def test_training_ends_when_the_dev_figure_no_longer_improves(tmp_path: Path) -> None:
    worse = ('dev = {"reward": -loss}', 'dev = {"reward": -float(self.state.iteration)}')
    plugin = write_trainer("hill_climbing", tmp_path, worse)
    more = ("hill_climbing.num_iterations=20", "training.early_stopping_patience=2")
    run = run_until(resolve("hill_climbing", plugin, *more), tmp_path / "runs")
    training = json.loads((run / "results.json").read_text())["training"]
    # The first evaluation is the best, and two more do not improve it.
    assert (training["num_iterations"], training["stopped_early"]) == (6, True)


def test_a_trainer_that_names_nothing_says_that_it_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = tmp_path / "forgetful.py"
    plugin.write_text(
        "import nip_astra as na\n\n\n"
        '@na.register_trainer("forgetful")\n'
        "class Forgetful(na.Trainer):\n"
        '    """Does nothing."""\n\n'
        "    def train(self):\n"
        "        if self.stop_flag():\n            self._raise_if_stopped()\n"
        '        self.results["after"] = {"loss": 1.0}\n'
    )
    experiment = resolve_experiment(
        trainer="forgetful", scenario="graph_isomorphism_small", plugins=[str(plugin)]
    )
    options = {"runs_dir": str(tmp_path / "runs"), "run_id": "run", **SETTINGS}
    with pytest.raises(StopRequested) as stopped:
        run_experiment(experiment, stop_flag=lambda: "SIGTERM", **options)
    assert not stopped.value.is_saved
    caplog.clear()
    resume_experiment(tmp_path / "runs" / "run", plugins=[str(plugin)], progress=False)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("beginning" in text and "run" in text for text in warnings)
    assert any("forgetful" in text and "learned_models" in text for text in warnings)


def test_an_iteration_that_is_not_ended_is_an_error(tmp_path: Path) -> None:
    plugin = write_trainer(
        "hill_climbing",
        tmp_path,
        ('            self.end_iteration(iteration_context, {"loss": loss}, dev=dev)\n', ""),
    )
    with pytest.raises(ConfigurationError) as error:
        run_until(resolve("hill_climbing", plugin), tmp_path / "runs")
    assert "end_iteration" in str(error.value)


def test_objects_of_every_kind_are_kept_and_others_are_refused() -> None:
    generator = torch.Generator().manual_seed(3)
    part = part_of_object("generator", generator)
    state = part.save()
    expected = torch.rand(3, generator=generator)
    part.load(state)
    assert torch.equal(torch.rand(3, generator=generator), expected)
    with pytest.raises(ConfigurationError) as error:
        part_of_object("number", 3)
    assert "'number'" in str(error.value)
    assert "state_dict" in str(error.value)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_modules({"policy": torch.nn.Linear(4, 1)}, tmp_path)
    for other in (torch.nn.Linear(4, 2), torch.nn.Linear(4, 1, bias=False)):
        with pytest.raises(CheckpointError) as error:
            load_modules({"policy": other}, tmp_path)
        assert "'policy'" in str(error.value)
    (tmp_path / "policy.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        load_modules({"policy": torch.nn.Linear(4, 1)}, tmp_path)


def test_names_of_the_interface_are_public() -> None:
    for name in ("learned_models", "kept_objects", "run_loops", "end_iteration"):
        assert callable(getattr(na.Trainer, name))

"""Runs of agents in a protocol: stopped and resumed, repeated, built on each other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nip_astra.errors import CheckpointError
from nip_astra.evaluation.storage import read_rows
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.run import resume_experiment
from nip_astra.scenario_base.protocol.tensordict_agents import Agent
from nip_astra.tracking import wandb_runs
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.experiments import RecordingTracker, metrics_of, run_in
from tests.kit.resuming import short_experiment
from tests.kit.toy_protocol_scenario import toy_trainer

pytestmark = pytest.mark.usefixtures("toy_protocol")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The directory of a finished run of the name `first`."""
    directory = RunDirectory.create(tmp_path, "first")
    directory.write_yaml("hyper_parameters.yaml", {})
    toy_trainer(settings=ExperimentSettings(progress=False, run_directory=directory)).train()
    return directory.path


def trainer_beside(first: Path, prover: dict[str, Any], **more: Any) -> Any:
    """A trainer whose prover starts from another run, by the parameters given."""
    settings = ExperimentSettings(progress=False, runs_dir=str(first.parent))
    agents = {"agents": {"prover": {"load_from_run": "first"} | prover}}
    return toy_trainer(seed=7, settings=settings, toy_protocol=agents, **more)


def has_weights(agent: Agent, stored: Path) -> bool:
    own = agent.state_dict()
    return all(torch.equal(own[name], value) for name, value in load_file(stored).items())


@pytest.mark.parametrize("trainer", ["vanilla_ppo", "solo_agent"])
def test_a_run_hands_its_agents_and_checkpoints_to_the_tracker(
    trainer: str, tmp_path: Path
) -> None:
    run = RunDirectory.create(tmp_path, "one")
    settings = ExperimentSettings(progress=False, run_directory=run)
    built = toy_trainer(settings=settings, trainer=trainer)
    built.tracker = RecordingTracker()
    built.train()
    assert built.tracker.artifacts == [
        ("checkpoint-one", "checkpoint", ("latest",)),
        ("agents-one", "model", ()),
    ]
    assert run.read_json("results.json")["model_dir"] == str(run.path / "model")


@pytest.fixture
def from_files(tmp_path: Path) -> RunDirectory:
    """The directory of a finished run of files."""
    resolved = short_experiment("vanilla_ppo", tmp_path / "toy", num_iterations=3)
    return RunDirectory.open(run_in(tmp_path / "runs", resolved))


def test_a_run_from_files_is_resumed_after_a_signal(from_files: RunDirectory) -> None:
    results = from_files.read_json("results.json")
    assert results["training"]["num_iterations"] == 3
    assert (from_files.path / "model" / "prover.safetensors").is_file()
    assert len(metrics_of(from_files.path)) == 3 + 1
    for table in ("before", "train", "evaluation"):
        assert (from_files.rollouts_dir / f"{table}.jsonl").stat().st_size > 0
    rows, after = read_rows(from_files.rollouts_dir / "evaluation_outcomes.jsonl"), results["after"]
    assert len(rows) == after["num_episodes"]
    assert sum(row["is_right"] for row in rows) / len(rows) == pytest.approx(after["mean_accuracy"])
    (from_files.path / "results.json").unlink()
    assert resume_experiment(from_files.path, progress=False).results["after"] == after


def test_a_resume_tells_that_layers_are_computed_in_another_way(from_files: RunDirectory) -> None:
    begun = from_files.read_json("environment.json")
    assert begun["layers"] == "torch"
    assert begun["processor"]

    def resumed_log() -> str:
        (from_files.path / "results.json").unlink()
        (from_files.path / "log.txt").unlink()
        resume_experiment(from_files.path, progress=False)
        return (from_files.path / "log.txt").read_text()

    assert "last digits may differ" not in resumed_log()
    from_files.write_json("environment.json", begun | {"layers": "compiled: toy.c 12"})
    log = resumed_log()
    assert "last digits may differ" in log
    assert "layers was 'compiled: toy.c 12' and is 'torch'" in log
    assert from_files.read_json("environment.json")["layers"] == "compiled: toy.c 12"


def test_an_agent_starts_from_another_runs_agent(first: Path) -> None:
    agents = trainer_beside(first, {}).agents
    assert has_weights(agents["prover"], first / "model" / "prover.safetensors")
    assert not has_weights(agents["verifier"], first / "model" / "verifier.safetensors")


def test_an_agent_starts_from_a_checkpoint_of_another_run(first: Path) -> None:
    (earlier,) = (first / "checkpoints").glob("step_*")
    at_end = first / "model" / "prover.safetensors"
    save_file({name: value + 1 for name, value in load_file(at_end).items()}, at_end)
    stored = earlier / "agents" / "prover.safetensors"
    prover = trainer_beside(first, {"checkpoint_version": earlier.name}).agents["prover"]
    assert has_weights(prover, stored)
    with pytest.raises(CheckpointError, match=rf"step_99.*{earlier.name}"):
        trainer_beside(first, {"checkpoint_version": "step_99"})
    stored.write_bytes(b"other")
    with pytest.raises(CheckpointError):
        trainer_beside(first, {"checkpoint_version": earlier.name})


def test_agents_start_from_those_of_a_run_on_w_and_b(
    first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(reference: str, folder: Path, version: str) -> None:
        asked.append((reference, version))
        shutil.copytree(first / "model", folder)

    monkeypatch.setattr(wandb_runs, "download_model", download)
    run = "wandb://us/proofs/one"
    chosen = {"load_from_run": run, "checkpoint_version": "v3"}
    agents = dict.fromkeys(("prover", "verifier"), chosen)
    trainer = toy_trainer(seed=7, toy_protocol={"agents": agents})
    assert asked == [(run, "v3")]
    for name in agents:
        assert has_weights(trainer.agents[name], first / "model" / f"{name}.safetensors")


def test_a_loaded_agent_is_neither_pretrained_nor_given_other_statistics(first: Path) -> None:
    trainer = trainer_beside(
        first,
        {"agent_lr_factor": {"actor": 0, "critic": 0}},
        rl={"pretrain_agents": True, "normalize_observations": True, "num_iterations": 1},
        solo_agent={"num_epochs": 1},
    )
    untrained = trainer.agents["verifier"].policy_body.history_mean.clone()
    trainer.train()
    assert has_weights(trainer.agents["prover"], first / "model" / "prover.safetensors")
    assert not torch.equal(trainer.agents["verifier"].policy_body.history_mean, untrained)


def test_an_agent_that_does_not_fit_is_refused(first: Path) -> None:
    with pytest.raises(CheckpointError, match=r"net\.0\.weight has shape \[16, 12\] there"):
        trainer_beside(first, {"d_hidden": 8})
    file = first / "model" / "prover.safetensors"
    weights = {k: v for k, v in load_file(file).items() if not k.startswith("value_body")}
    save_file({**weights, "solo_head.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"trained alone.* set rl\.pretrain_agents=true"):
        trainer_beside(first, {})
    for file in first.rglob("prover.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="has saved verifier"):
        trainer_beside(first, {"load_from_run": str(first)})


def test_tests_of_a_finished_run_are_run_again(first: Path) -> None:
    trainer = toy_trainer()
    trainer.rerun_tests(first)
    assert trainer.results["after"] == RunDirectory.open(first).read_json("results.json")["after"]
    assert trainer.results["training"]["num_iterations"] == 0

"""Runs of agents in a protocol: stopped and resumed, repeated, built on each other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.errors import CheckpointError, StopRequested
from nip_astra.evaluation.storage import read_rows
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import resume_experiment, run_experiment
from nip_astra.scenario_base.protocol.tensordict_agents import Observation
from nip_astra.tracking import wandb_runs
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import Tracker
from tests.kit.toy_protocol_scenario import (
    SMALL,
    ToyBody,
    merged,
    toy_scenario_folder,
    toy_trainer,
)

pytestmark = pytest.mark.usefixtures("toy_protocol")


def folder_run(tmp_path: Path, name: str, *, stop_after: int | None = None, **more: Any) -> Path:
    """Run in a run directory, stopped after some iterations where that is asked for."""
    directory = RunDirectory.create(tmp_path, name)
    directory.write_yaml("hyper_parameters.yaml", {})
    calls = iter(range(10_000))
    settings = ExperimentSettings(progress=False, run_directory=directory, runs_dir=str(tmp_path))
    trainer = toy_trainer(settings=settings, **more)
    if stop_after is None:
        trainer.train()
    else:
        # The tests before training ask once for each of their batches, and once after them.
        trainer.stop_flag = lambda: "SIGINT" if next(calls) >= stop_after else None
        with pytest.raises(StopRequested):
            trainer.train()
    return directory.path


def resumed(tmp_path: Path, path: Path, **more: Any) -> Any:
    directory = RunDirectory.open(path)
    settings = ExperimentSettings(progress=False, run_directory=directory, runs_dir=str(tmp_path))
    trainer = toy_trainer(settings=settings, **more)
    checkpoint, _ = CheckpointStore(directory.checkpoints_dir).open_latest()
    trainer.go_on_from(checkpoint)
    trainer.train()
    return trainer


def final_state(path: Path) -> dict[str, bytes]:
    checkpoint = CheckpointStore(path / "checkpoints").latest()
    assert checkpoint is not None
    files = sorted(p for p in checkpoint.rglob("*.safetensors"))
    models = sorted((path / "model").glob("*.safetensors"))
    return {f"{p.parent.name}/{p.name}": p.read_bytes() for p in [*files, *models]}


@pytest.mark.parametrize(
    ("trainer", "more"),
    [
        ("vanilla_ppo", {"ppo": {"loss_type": "kl_penalty"}, "rl": {"anneal_lr": True}}),
        ("vanilla_ppo", {"rl": {"steps_per_env_per_iteration": 2, "use_shared_body": True}}),
        ("mappo", {"rl": {"normalize_observations": True}}),
        (
            "reinforce",
            {"message_regression": {"regressor": {"_type": "mlp"}, "reset_on_fit": False}},
        ),
        ("spg", {"rl": {"anneal_lr": True}, "spg": {"variant": "pspg", "ihvp_rank": 2}}),
    ],
)
def test_six_iterations_are_three_and_three_to_the_bit(
    tmp_path: Path, trainer: str, more: dict[str, Any]
) -> None:
    more = merged({"rl": {"num_iterations": 6}}, more)
    straight = folder_run(tmp_path, "straight", trainer=trainer, **more)
    # Asked in one test batch, after the test, and after each iteration.
    halves = folder_run(tmp_path, "halves", stop_after=4, trainer=trainer, **more)
    stopped = CheckpointStore(halves / "checkpoints").latest()
    assert stopped is not None
    assert stopped.name == "step_00000003"
    torch.manual_seed(12345)
    resumed(tmp_path, halves, trainer=trainer, **more)
    assert final_state(straight) == final_state(halves)
    results = [json.loads((path / "results.json").read_text()) for path in (straight, halves)]
    for result in results:
        result.pop("model_dir")
    assert results[0] == results[1]


@pytest.mark.parametrize("trainer", ["vanilla_ppo", "solo_agent"])
def test_a_run_hands_its_agents_and_checkpoints_to_the_tracker(
    trainer: str, tmp_path: Path
) -> None:
    told: list[tuple[str, str, tuple[str, ...]]] = []

    class Recorder(Tracker):
        def log_artifact(
            self,
            path: Path,
            *,
            name: str,
            type: str,  # noqa: A002
            aliases: Sequence[str] = (),
        ) -> None:
            assert path.is_dir()
            told.append((name, type, tuple(aliases)))

    run = RunDirectory.create(tmp_path, "one")
    settings = ExperimentSettings(progress=False, run_directory=run)
    built = toy_trainer(settings=settings, trainer=trainer)
    built.tracker = Recorder()
    built.train()
    assert told == [("checkpoint-one", "checkpoint", ("latest",)), ("agents-one", "model", ())]
    assert run.read_json("results.json")["model_dir"] == str(run.path / "model")


def test_networks_that_draw_while_learning_are_resumed_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ToyBody.forward

    def with_gaps(body: ToyBody, observation: Observation) -> dict[str, Tensor]:
        given = forward(body, observation)["representation"]
        is_learning.append(body.training)
        return {"representation": torch.dropout(given, 0.3, body.training)}

    is_learning: list[bool] = []
    monkeypatch.setattr(ToyBody, "forward", with_gaps)
    test_six_iterations_are_three_and_three_to_the_bit(tmp_path, "vanilla_ppo", {})
    assert set(is_learning) == {True, False}


def test_a_run_from_files_is_resumed_after_a_signal(tmp_path: Path) -> None:
    folder = toy_scenario_folder(tmp_path / "toy")
    (tmp_path / "p.yaml").write_text(
        json.dumps({**SMALL, "trainer": "vanilla_ppo", "scenario": str(folder)})
    )
    resolved = resolve_experiment(parameter_file=tmp_path / "p.yaml")
    done = run_experiment(resolved, runs_dir=str(tmp_path / "runs"), run_id="a", progress=False)
    assert done.results["training"]["num_iterations"] == 3
    assert (done.run_directory.path / "model" / "prover.safetensors").is_file()
    lines = (done.run_directory.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3 + 1
    for table in ("before", "train", "evaluation"):
        assert (done.run_directory.rollouts_dir / f"{table}.jsonl").stat().st_size > 0
    rows = read_rows(done.run_directory.rollouts_dir / "evaluation_outcomes.jsonl")
    after = done.results["after"]
    assert len(rows) == after["num_episodes"]
    assert sum(row["is_right"] for row in rows) / len(rows) == pytest.approx(after["mean_accuracy"])
    (done.run_directory.path / "results.json").unlink()
    again = resume_experiment(done.run_directory.path, progress=False)
    assert again.results["after"] == done.results["after"]


def test_a_resume_tells_that_layers_are_computed_in_another_way(tmp_path: Path) -> None:
    folder = toy_scenario_folder(tmp_path / "toy")
    (tmp_path / "p.yaml").write_text(
        json.dumps({**SMALL, "trainer": "vanilla_ppo", "scenario": str(folder)})
    )
    resolved = resolve_experiment(parameter_file=tmp_path / "p.yaml")
    directory = run_experiment(
        resolved, runs_dir=str(tmp_path / "runs"), run_id="a", progress=False
    ).run_directory
    begun = directory.read_json("environment.json")
    assert begun["layers"] == "torch"
    assert begun["processor"]

    def resumed_log() -> str:
        (directory.path / "results.json").unlink()
        (directory.path / "log.txt").unlink()
        resume_experiment(directory.path, progress=False)
        return (directory.path / "log.txt").read_text()

    assert "last digits may differ" not in resumed_log()
    directory.write_json("environment.json", begun | {"layers": "compiled: toy.c 12"})
    log = resumed_log()
    assert "last digits may differ" in log
    assert "layers was 'compiled: toy.c 12' and is 'torch'" in log
    assert directory.read_json("environment.json")["layers"] == "compiled: toy.c 12"


def test_an_agent_starts_from_another_runs_agent(tmp_path: Path) -> None:
    first = folder_run(tmp_path, "first")
    agents = {"prover": {"load_from_run": "first"}}
    settings = ExperimentSettings(progress=False, runs_dir=str(tmp_path))
    trainer = toy_trainer(seed=7, settings=settings, toy_protocol={"agents": agents})
    stored = load_file(first / "model" / "prover.safetensors")
    own = trainer.agents["prover"].state_dict()
    assert all(torch.equal(own[name], value) for name, value in stored.items())
    other = load_file(first / "model" / "verifier.safetensors")
    fresh = trainer.agents["verifier"].state_dict()
    assert not all(torch.equal(fresh[name], value) for name, value in other.items())


def test_an_agent_starts_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    first = folder_run(tmp_path, "first")
    (earlier,) = (first / "checkpoints").glob("step_*")
    at_end = first / "model" / "prover.safetensors"
    save_file({name: value + 1 for name, value in load_file(at_end).items()}, at_end)
    settings = ExperimentSettings(progress=False, runs_dir=str(tmp_path))

    def agents(version: str) -> dict[str, Any]:
        chosen = {"load_from_run": "first", "checkpoint_version": version}
        return {"agents": {"prover": chosen}}

    trainer = toy_trainer(seed=7, settings=settings, toy_protocol=agents(earlier.name))
    stored = load_file(earlier / "agents" / "prover.safetensors")
    own = trainer.agents["prover"].state_dict()
    assert all(torch.equal(own[name], value) for name, value in stored.items())
    with pytest.raises(CheckpointError, match=rf"step_99.*{earlier.name}"):
        toy_trainer(settings=settings, toy_protocol=agents("step_99"))
    (earlier / "agents" / "prover.safetensors").write_bytes(b"other")
    with pytest.raises(CheckpointError):
        toy_trainer(settings=settings, toy_protocol=agents(earlier.name))


def test_agents_start_from_those_of_a_run_on_w_and_b(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = folder_run(tmp_path, "first")
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
        stored = load_file(first / "model" / f"{name}.safetensors")
        own = trainer.agents[name].state_dict()
        assert all(torch.equal(own[key], value) for key, value in stored.items())


def test_an_agent_that_was_trained_alone_is_refused_with_what_to_do(tmp_path: Path) -> None:
    first = folder_run(tmp_path, "first")
    file = first / "model" / "prover.safetensors"
    weights = {k: v for k, v in load_file(file).items() if not k.startswith("value_body")}
    save_file({**weights, "solo_head.weight": torch.zeros(2)}, file)
    settings = ExperimentSettings(progress=False, runs_dir=str(tmp_path))
    agents = {"prover": {"load_from_run": "first"}}
    with pytest.raises(CheckpointError, match=r"trained alone.* set rl\.pretrain_agents=true"):
        toy_trainer(settings=settings, toy_protocol={"agents": agents})


def test_a_loaded_agent_is_neither_pretrained_nor_given_other_statistics(tmp_path: Path) -> None:
    first = folder_run(tmp_path, "first")
    agents = {"prover": {"load_from_run": "first", "agent_lr_factor": {"actor": 0, "critic": 0}}}
    trainer = toy_trainer(
        settings=ExperimentSettings(progress=False, runs_dir=str(tmp_path)),
        toy_protocol={"agents": agents},
        rl={"pretrain_agents": True, "normalize_observations": True, "num_iterations": 1},
        solo_agent={"num_epochs": 1},
    )
    untrained = trainer.agents["verifier"].policy_body.history_mean.clone()
    trainer.train()
    stored = load_file(first / "model" / "prover.safetensors")
    own = trainer.agents["prover"].state_dict()
    assert all(torch.equal(own[name], value) for name, value in stored.items())
    assert not torch.equal(trainer.agents["verifier"].policy_body.history_mean, untrained)


def test_an_agent_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder_run(tmp_path, "first")
    settings = ExperimentSettings(progress=False, runs_dir=str(tmp_path))
    agents = {"prover": {"load_from_run": "first", "d_hidden": 8}}
    with pytest.raises(CheckpointError, match=r"net\.0\.weight has shape \[16, 12\] there"):
        toy_trainer(settings=settings, toy_protocol={"agents": agents})


def test_an_agent_that_a_run_does_not_have_is_refused(tmp_path: Path) -> None:
    path = folder_run(tmp_path, "first")
    for file in path.rglob("prover.safetensors"):
        file.unlink()
    settings = ExperimentSettings(progress=False, runs_dir=str(tmp_path))
    agents = {"prover": {"load_from_run": str(path)}}
    with pytest.raises(CheckpointError, match="has saved verifier"):
        toy_trainer(settings=settings, toy_protocol={"agents": agents})


def test_tests_of_a_finished_run_are_run_again(tmp_path: Path) -> None:
    path = folder_run(tmp_path, "first")
    before = json.loads((path / "results.json").read_text())
    trainer = toy_trainer()
    trainer.rerun_tests(path)
    assert trainer.results["after"] == before["after"]
    assert trainer.results["training"]["num_iterations"] == 0

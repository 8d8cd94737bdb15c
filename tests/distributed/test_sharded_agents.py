"""Agents that are divided among processes learn what whole ones do, and go on in any number."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from nip_astra.distributed.sharding import local_tensor
from nip_astra.distributed.team import open_team
from nip_astra.errors import ConfigurationError, LostProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment, resume_experiment, run_experiment
from nip_astra.trainers.protocol.learning import Learner
from nip_astra.trainers.trainer_base import Trainer
from tests.distributed.processes import together
from tests.distributed.test_training_together import gap_of, in_float64, weights_of
from tests.kit.messages import says
from tests.kit.resuming import short_experiment

CPU = torch.device("cpu")
GRAPHS = (
    "rl.num_iterations=2",
    "rl.frames_per_batch=48",
    "rl.minibatch_size=24",
    "rl.num_test_iterations=1",
    "rl.pretrain_agents=false",
    "graph_isomorphism.dataset.num_train=64",
    "graph_isomorphism.dataset.num_test=16",
)


pytestmark = pytest.mark.usefixtures("no_plugins_left")


def learn(resolved: ResolvedExperiment, store: str | None, sharding: str = "fsdp") -> Any:
    """Train in float64, in this process or as one of several, and write nothing."""
    with open_team(CPU, store) as team:
        settings = ExperimentSettings(progress=False, sharding=sharding)
        trainer: Any = prepare_experiment(resolved, settings, team=team).trainer
        losses: list[dict[str, float]] = []
        # Test data are float32.
        trainer._test = lambda *_, **__: {}
        weights = in_float64(trainer)
        trainer.tracker.log_metrics = lambda metrics, step: losses.append(dict(metrics))
        trainer.train()
        states = [
            value
            for optimizer in trainer.optimizers.optimizers.values()
            for state in optimizer.state.values()
            for value in state.values()
            if value.ndim
        ]
        return {
            "weights": {name: weight.detach().clone() for name, weight in weights.items()}
            if team.is_leader
            else {},
            "losses": losses,
            "num_steps": trainer.state.num_optimizer_steps,
            "held": sum(local_tensor(one).numel() for one in trainer.optimizers.weights),
            "remembered": sum(local_tensor(one).numel() for one in states),
            "num_divided": sum(isinstance(one, DTensor) for one in trainer.agents.parameters()),
        }


@pytest.mark.parametrize(
    "trainer",
    [
        "vanilla_ppo",
        pytest.param("mappo", marks=pytest.mark.slow),
        pytest.param("reinforce", marks=pytest.mark.slow),
    ],
)
def test_divided_agents_learn_what_whole_ones_do(trainer: str, tmp_path: Path) -> None:
    check(short_experiment(trainer, tmp_path / "scenario", num_iterations=2), tmp_path)


@pytest.mark.slow
def test_networks_with_written_derivatives_are_divided_too(tmp_path: Path) -> None:
    check(resolve_experiment(trainer="vanilla_ppo", overrides=[*GRAPHS]), tmp_path)


def check(resolved: ResolvedExperiment, folder: Path) -> None:
    one = learn(resolved, None)
    leader, other = together(lambda store: learn(resolved, store), folder)
    assert one["num_steps"] == leader["num_steps"] == other["num_steps"] > 1
    assert gap_of(one["weights"], leader["weights"]) < 1e-6
    compared = 0
    for mine, theirs in zip(one["losses"], leader["losses"], strict=True):
        for name, value in mine.items():
            if name.endswith(("loss", "loss_policy", "loss_value", "grad_norm")):
                assert theirs[name] == pytest.approx(value, abs=1e-6), name
                compared += 1
    assert compared
    # Each holds about half of what learns, and of what its optimizer remembers.
    assert leader["held"] + other["held"] == one["held"]
    assert leader["remembered"] + other["remembered"] == one["remembered"] > 0
    assert leader["held"] < 0.65 * one["held"]
    # The leader plays with whole agents.
    assert leader["num_divided"] == 0
    assert other["num_divided"] > 0


def run(resolved: ResolvedExperiment, path: Path, store: str | None, *, stops: bool) -> None:
    """Run to the end, or to the first checkpoint."""
    patch, save = pytest.MonkeyPatch(), Trainer._save_checkpoint

    def save_and_stop(self: Trainer, **options: Any) -> None:
        save(self, **options)
        if stops and self.state.iteration == 1:
            raise KeyboardInterrupt

    patch.setattr(Trainer, "_save_checkpoint", save_and_stop)
    settings = {"progress": False, "checkpoint_period": 1}
    settings |= {} if store is None else {"sharding": "fsdp"}
    settings |= {"runs_dir": str(path.parent), "run_id": path.name, "process_store": store}
    try:
        run_experiment(resolved, **settings)
    except (Exception, KeyboardInterrupt):
        if not stops:
            raise
    finally:
        patch.undo()


def test_divided_agents_go_on_in_another_number_of_processes(tmp_path: Path) -> None:
    resolved = short_experiment("vanilla_ppo", tmp_path / "scenario", num_iterations=2)
    whole, two, one = (tmp_path / name for name in ("whole", "two_then_one", "one_then_two"))
    run(resolved, whole, None, stops=False)
    together(partial(run, resolved, two, stops=True), tmp_path)
    resume_experiment(two, progress=False)
    run(resolved, one, None, stops=True)

    def resumed(store: str) -> None:
        resume_experiment(one, progress=False, process_store=store, sharding="fsdp")

    together(resumed, tmp_path)
    for path in (two, one):
        assert (path / "results.json").is_file()
        # float32: what the processes add up is rounded otherwise.
        assert gap_of(weights_of(whole), weights_of(path)) < 1e-4


@pytest.mark.slow
def test_divided_agents_of_which_a_process_is_killed_go_on_from_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    resolved = short_experiment("vanilla_ppo", tmp_path / "scenario", num_iterations=2)
    whole, path = tmp_path / "whole", tmp_path / "killed"
    run(resolved, whole, None, stops=False)

    def killed(store: str) -> str:
        learned, done = Learner.learn, iter(range(9))

        def end_of_one(self: Learner, *given: Any) -> Any:
            if self.team.rank == 1 and next(done) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return learned(self, *given)

        Learner.learn = end_of_one  # type: ignore[method-assign]
        try:
            run(resolved, path, store, stops=False)
        except LostProcessError as error:
            return str(error)
        return ""

    message, _ = together(killed, tmp_path, killed=[1])
    assert says(message, "2 processes", "has ended", "saved in step_", "resume")
    resume_experiment(path, progress=False)
    assert gap_of(weights_of(whole), weights_of(path)) < 1e-4


def test_agents_that_share_weights_are_not_divided(tmp_path: Path) -> None:
    resolved = short_experiment("vanilla_ppo", tmp_path / "scenario")

    def refused(store: str) -> str:
        with open_team(CPU, store) as team:
            settings = ExperimentSettings(progress=False, sharding="fsdp")
            trainer: Any = prepare_experiment(resolved, settings, team=team).trainer
            trainer.optimizers.are_disjoint = False
            with pytest.raises(ConfigurationError) as caught:
                trainer._shard_agents()
            return str(caught.value)

    for message in together(refused, tmp_path):
        assert says(message, "(sharding=fsdp)", "share weights", "sharding=none")

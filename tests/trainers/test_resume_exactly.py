"""Runs resumed from any of their checkpoints, as if they had never stopped."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nip_astra.checkpoints.tensors import load_state
from nip_astra.errors import CheckpointError
from nip_astra.evaluation.run_results import read_results
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.resume_check import read_run_contents
from nip_astra.run import resume_experiment
from nip_astra.scenario_base.protocol.tensordict_agents import Observation
from nip_astra.tracking.local import LocalTracker
from nip_astra.trainers import language_model_base
from tests.kit.experiments import metrics_of, run_in, stopped_after
from tests.kit.resuming import SHORT_TRAINERS, copy_as_killed_after, short_experiment
from tests.kit.toy_protocol_scenario import ToyBody


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every trainer draw from all global generators, and record the draws."""
    log_metrics = LocalTracker.log_metrics

    def drawing(self: LocalTracker, values: Mapping[str, float], *, step: int) -> None:
        drawn = {
            "drawn/torch": float(torch.rand(())),
            "drawn/numpy": float(np.random.rand()),
            "drawn/normal": float(np.random.normal()),
            "drawn/python": random.random(),
            "drawn/gauss": random.gauss(0, 1),
        }
        log_metrics(self, {**values, **drawn}, step=step)

    monkeypatch.setattr(LocalTracker, "log_metrics", drawing)


ONE_OF_EACH_LOOP = ("ast_dpo", "self_hosted_grpo", "solo_agent", "vanilla_ppo")
STATEFUL = {
    "mappo": "rl.normalize_observations=true",
    "reinforce": "message_regression.regressor._type=mlp message_regression.reset_on_fit=false",
    "spg": "rl.anneal_lr=true spg.variant=pspg spg.ihvp_rank=2",
    "vanilla_ppo": "rl.anneal_lr=true ppo.loss_type=kl_penalty",
}
"""Options with which a trainer has more state."""


def check_checkpoints(
    resolved: ResolvedExperiment, folder: Path, places: Sequence[int] = (1, -1), period: int = 1
) -> Path:
    """Resume from some checkpoints, and compare all computed results."""
    run = run_in(folder, resolved, "whole", checkpoint_period=period, num_checkpoints_kept=99)
    checkpoints = sorted(run.glob("checkpoints/step_*"))
    for checkpoint in (checkpoints[place] for place in places):
        copy = folder / checkpoint.name
        copy_as_killed_after(run, checkpoint, copy)
        # Draws of another program in the meantime.
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        resume_experiment(copy, progress=False)
        assert read_run_contents(copy) == read_run_contents(run), checkpoint.name
    return run


@pytest.mark.usefixtures("noise", "no_plugins_left")
@pytest.mark.parametrize("trainer", SHORT_TRAINERS)
def test_every_trainer_goes_on_from_any_checkpoint(trainer: str, tmp_path: Path) -> None:
    more = STATEFUL.get(trainer, "").split()
    resolved = short_experiment(trainer, tmp_path / "scenario", *more, num_iterations=3)
    run = check_checkpoints(resolved, tmp_path, (1, -1) if trainer in ONE_OF_EACH_LOOP else (1,))
    results = read_results(run)
    reported = {figure.name for figure in results.figures if figure.when == "after"}
    reported |= {name for row in results.metrics for name in row if name.startswith("dev/")}
    declared = resolved.trainer_class.figures or ()
    undeclared = {name for name in reported if not any(fnmatchcase(name, one) for one in declared)}
    assert not undeclared, "a sweep would refuse to show them"
    drawn = [value for row in metrics_of(run) for n, value in row.items() if n.startswith("drawn/")]
    assert len(set(drawn)) == len(drawn) >= 5 * 3


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ast_ppo", "ast_dpo", "ast_grpo", "ast_reinforce"])
def test_no_checkpoint_of_a_preset_changes_the_rest_of_the_run(
    tmp_path: Path, trainer: str
) -> None:
    """Batches of tiny trees round alike however they are split; those of presets may not."""
    sizes = ("num_episodes=20", "batch_size=20", "use_random_search=false")
    overrides = [f"ast_chat.evaluation.{one}" for one in sizes]
    resolved = resolve_experiment(
        trainer=trainer, seed=1, overrides=[*overrides, "training.num_iterations=18"]
    )
    check_checkpoints(resolved, tmp_path, range(8), period=2)


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize("draws", [False, True])
def test_episodes_and_networks_in_progress_go_on(
    draws: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, is_learning = ToyBody.forward, set()

    def with_gaps(body: ToyBody, observation: Observation) -> dict[str, Tensor]:
        is_learning.add(body.training)
        read = forward(body, observation)["representation"]
        return {"representation": torch.dropout(read, 0.3 * draws, body.training)}

    monkeypatch.setattr(ToyBody, "forward", with_gaps)
    more = ("rl.steps_per_env_per_iteration=2", "rl.use_shared_body=true")
    resolved = short_experiment("vanilla_ppo", tmp_path / "x", *more, num_iterations=3)
    check_checkpoints(resolved, tmp_path)
    assert is_learning == {True, False}


def test_a_run_with_rollouts_played_ahead_goes_on_from_any_checkpoint(tmp_path: Path) -> None:
    ahead = "remote_api_grpo.max_staleness=2"
    run = check_checkpoints(short_experiment("remote_api_grpo", tmp_path / "x", ahead), tmp_path)
    assert [line["rollout/staleness"] for line in metrics_of(run)] == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("trainer", "overrides", "places"),
    [
        # The first is in the measurement before training, which leaves no checkpoint.
        (
            *("ast_dpo", "training.num_episodes_per_experience=2 training.minibatch_size=1"),
            (1, 4, 9),
        ),
        ("ast_ppo", "ast_ppo.max_staleness=1 training.minibatch_size=4", (7,)),
        (
            "ast_reinforce",
            "ast_chat.attacker.temperature=0.5 ast_chat.attacker.top_p=0.9 "
            "ast_reinforce.behaviour.logprobs=raw "
            "ast_reinforce.behaviour.importance_weights=sequence",
            (4,),
        ),
        ("self_hosted_grpo", "self_hosted_grpo.max_staleness=1", (8,)),
    ],
)
def test_a_run_stopped_amid_an_iteration_goes_on(
    trainer: str,
    overrides: str,
    places: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A clock that counts its readings.
    readings = count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(readings)))
    monkeypatch.setattr(language_model_base, "time", clock)
    resolved = short_experiment(trainer, tmp_path / "x", *overrides.split(), num_iterations=3)
    whole = run_in(tmp_path, resolved, "whole")
    for place in places:
        name = f"stopped-{place}"
        with stopped_after(place):
            run_in(tmp_path, resolved, name)
        checkpoints = sorted((tmp_path / name).glob("checkpoints/step_*"))
        assert bool(checkpoints) == (place > 1)
        for checkpoint in checkpoints[-1:]:
            state = load_state(checkpoint / "state")
            assert state["run"]["samples"]
            assert state["run"]["num_steps_done"] > 0
            is_ahead = "max_staleness" in overrides
            assert len(state["parts"].get("played_ahead", ())) == is_ahead
        resume_experiment(tmp_path / name, progress=False)
        assert read_run_contents(tmp_path / name) == read_run_contents(whole), name
        assert speeds_of(tmp_path / name) == speeds_of(whole), name


def speeds_of(run: Path) -> list[tuple[float, ...]]:
    """Return the durations of collecting and updating, and the tokens per second, by iteration."""
    lines = map(json.loads, (run / "timings.jsonl").read_text().splitlines())
    names = ("time/collect_seconds", "time/update_seconds", "time/tokens_per_second")
    return [tuple(line[name] for name in names) for line in lines if names[0] in line]


def test_a_run_counts_the_seconds_of_its_earlier_processes(tmp_path: Path) -> None:
    resolved = short_experiment("ast_dpo", tmp_path / "x", num_iterations=3)
    with stopped_after(4):
        run_in(tmp_path, resolved, "stopped")
    checkpoint = sorted((tmp_path / "stopped").glob("checkpoints/step_*"))[-1]
    state = load_state(checkpoint / "state")
    before = state["elapsed_seconds"]
    assert before > 0
    resume_experiment(tmp_path / "stopped", progress=False)
    checkpoint = sorted((tmp_path / "stopped").glob("checkpoints/step_*"))[-1]
    assert load_state(checkpoint / "state")["elapsed_seconds"] > before


OWN_TRAINER = '''
import random
from contextlib import ExitStack

import numpy as np
import torch

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.trainer_base import TensorDictTrainer, attach_progress_bar


@register_trainer("walk")
class Walk(TensorDictTrainer):
    """A random walk, with a loop and checkpoints of its own."""

    place = 0.0

    def train(self):
        self._set_seed()
        with self._open_progress_bar(), ExitStack() as stack:
            self._build_train_context(stack)
            self._walk()
        self.results["place"] = self.place

    @attach_progress_bar(lambda self: self.hyper_params.training.num_iterations)
    def _walk(self, iteration_context):
        for number in iteration_context.iterate(self.state.iteration):
            self.place += np.random.rand() + random.random() + float(torch.randn(()))
            self.state.iteration = number + 1
            self.tracker.log_metrics({"place": self.place}, step=self.state.iteration)
            self._checkpoint_or_stop(is_last=False)

    def _save_checkpoint(self, *, is_best=False):
        done = self.state.iteration
        state = {"place": self.place, "done": done, "at": self.tracker.position()}
        self._checkpoint_store().save(
            done, lambda folder: save_state(folder / "own", state), metadata={}
        )

    def resume(self, checkpoint):
        state = load_state(checkpoint / "own")
        self.place, self.state.iteration = state["place"], state["done"]
        self.tracker.rewind(state["at"])
'''


@pytest.mark.usefixtures("no_plugins_left")
def test_a_custom_trainer_that_draws_from_global_generators_resumes_exactly(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "own.py"
    plugin.write_text(OWN_TRAINER)
    resolved = resolve_experiment(
        trainer="walk",
        scenario=str(tiny_scenario),
        plugins=[str(plugin)],
        overrides=["training.num_iterations=4"],
    )
    check_checkpoints(resolved, tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with all its checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    resolved = short_experiment("ast_dpo", folder / "scenario")
    return run_in(folder, resolved, checkpoint_period=1, num_checkpoints_kept=99)


@pytest.fixture
def killed(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, as killed after its last checkpoint, which is not the best."""
    best = (finished / "checkpoints" / "best").read_text().strip()
    last = sorted(finished.glob("checkpoints/step_*"))[-1]
    assert best != last.name, "or it would be refused before"
    copy_as_killed_after(finished, last, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "model")
    return tmp_path / "copy"


def test_the_best_checkpoint_is_known_without_its_pointer(finished: Path, killed: Path) -> None:
    (killed / "checkpoints" / "best").unlink()
    resume_experiment(killed, progress=False)
    assert read_run_contents(killed) == read_run_contents(finished)


def _change_last_byte(best: Path) -> None:
    weights = best / "attacker" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


@pytest.mark.parametrize("damage", [_change_last_byte, shutil.rmtree])
def test_a_corrupt_best_checkpoint_never_becomes_the_final_model(
    damage: Callable[[Path], Any], killed: Path
) -> None:
    best = (killed / "checkpoints" / "best").read_text().strip()
    damage(killed / "checkpoints" / best)
    with pytest.raises(CheckpointError, match=best):
        resume_experiment(killed, progress=False)
    assert not (killed / "model").exists()
    assert not (killed / "results.json").exists()

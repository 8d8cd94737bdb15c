"""Weights that are sharded among processes learn the same as whole weights."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.checkpoints.shards import load_whole
from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.checkpoints.tensors import compare_dumps
from nip_astra.distributed.team import Team, open_team
from nip_astra.errors import CheckpointError, ConfigurationError, LostProcessError, StopRequested
from nip_astra.evaluation.api import export
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models import huggingface
from nip_astra.language_models.services.sharded import ShardedService
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.language_models.sources import load_causal_lm
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.run import prepare_experiment, resume_experiment, run_experiment
from nip_astra.trainers.language_model_base import distribute
from tests.distributed.learning import CPU, check_equal, gap_of, learn, run
from tests.distributed.processes import together
from tests.kit.messages import says
from tests.kit.resuming import short_experiment

pytestmark = pytest.mark.usefixtures("no_plugins_left")


def learned(resolved: ResolvedExperiment, store: str, sharding: str) -> dict[str, Any]:
    """What a process learns, and whether it keeps whole weights: of the base, and of a model."""
    whole: list[Any] = []
    divide = ShardedService.__init__

    def recorded(self: ShardedService, local: LocalTrainingService, team: Team) -> None:
        # Of an adapter, the first weight belongs to the base.
        module: Any = local.model.module  # type: ignore[attr-defined]
        whole.append(weakref.ref(next(module.parameters())))
        whole.append(weakref.ref(local.learned[0]))
        divide(self, local, team)

    def inspect(trainer: Any) -> dict[str, Any]:
        assert {one.dtype for one in trainer.policy.module.parameters()} == {torch.float64}
        gc.collect()
        return {
            "is_sharded": isinstance(trainer.service, ShardedService),
            "keeps_whole": [one() is not None for one in whole],
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedService, "__init__", recorded)
        return learn(resolved, store, sharding, scores_by_module=True, inspect=inspect)


@pytest.mark.parametrize(
    ("trainer", "overrides"),
    [
        ("ast_dpo", ("training.max_grad_norm=0.05",)),
        # Three batches a step, of a single row: two are distributed; for one, another process reads
        # a row.
        pytest.param(
            "ast_dpo",
            (
                "ast_chat.attacker.language_model.lora={rank: 2}",
                # The target is the base below the adapter, like the reference.
                "ast_chat.target.language_model.model=SCENARIO/attacker",
                "training.minibatch_size=1",
                "training.gradient_accumulation_steps=3",
            ),
            marks=pytest.mark.slow,
        ),
        # With a value head, which every process holds whole.
        pytest.param("ast_ppo", (), marks=pytest.mark.slow),
        pytest.param(
            *("self_hosted_grpo", ("task.policy.language_model.lora.rank=2",)),
            marks=pytest.mark.slow,
        ),
        pytest.param("self_hosted_grpo", (), marks=pytest.mark.slow),
        # Played by a copy with older weights, which the leader holds.
        pytest.param("ast_dpo", ("ast_dpo.max_staleness=1",), marks=pytest.mark.slow),
    ],
    ids=[
        *("ast_dpo", "ast_dpo_lora", "ast_ppo", "self_hosted_grpo_lora", "self_hosted_grpo"),
        "ast_dpo_ahead",
    ],
)
def test_sharded_weights_learn_the_same_as_whole_weights(
    trainer: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "scenario"
    given = [one.replace("SCENARIO", str(folder)) for one in overrides]
    resolved = short_experiment(trainer, folder, *given, num_iterations=2)
    whole, _ = together(lambda store: learned(resolved, store, "none"), tmp_path)
    leader, other = together(lambda store: learned(resolved, store, "fsdp"), tmp_path)
    assert (whole["is_sharded"], leader["is_sharded"], other["is_sharded"]) == (False, True, True)
    check_equal(whole, leader, other)
    # The leader's own model; elsewhere whole weights are released.
    assert leader["keeps_whole"] == [True, True]
    assert other["keeps_whole"] == [False, False]
    # Each holds about half of the trained weights, and of the frozen weights below an adapter.
    for one in (leader, other):
        assert one["held"] < 0.65 * whole["held"]
        assert one["read"] < 0.65 * whole["read"]


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    resolved = short_experiment("self_hosted_grpo", tmp_path / "scenario")
    prepared: Any = prepare_experiment(resolved, progress=False, sharding="fsdp").trainer
    # A weight that a single process must hold whole cannot be divided.
    team = Team()
    team.size = 2
    with pytest.raises(ConfigurationError) as caught:
        distribute(prepared.service, object(), [], team, prepared.settings)  # type: ignore[arg-type]
    assert says(caught.value, "sharding=fsdp", "object", "Set sharding to none")


def test_networks_that_receive_labels_are_held_whole(tmp_path: Path) -> None:
    resolved = short_experiment("solo_agent", tmp_path / "scenario")
    with pytest.raises(ConfigurationError) as caught:
        prepare_experiment(resolved, progress=False, sharding="fsdp")
    assert says(caught.value, "sharding=fsdp", "'solo_agent'", "Leave it out")


@pytest.mark.slow
def test_dumps_of_sharded_weights_are_complete(tmp_path: Path) -> None:
    """With rollouts played ahead by a copy of the weights."""
    given = ("self_hosted_grpo.max_staleness=1",)
    resolved = short_experiment("self_hosted_grpo", tmp_path / "scenario", *given, num_iterations=2)

    def dumped(store: str, sharding: str) -> None:
        settings = {"progress": False, "dump_period": 1, "sharding": sharding}
        settings |= {"runs_dir": str(tmp_path), "run_id": sharding, "process_store": store}
        # The same pass in both arms: another rounds differently.
        huggingface.build_decoder = lambda _: None
        run_experiment(resolved, **settings)

    for sharding in ("none", "fsdp"):
        together(partial(dumped, sharding=sharding), tmp_path)
    comparison = compare_dumps(tmp_path / "none", tmp_path / "fsdp", tolerance=1e-4)
    assert comparison.num_stages > 10
    assert not comparison.differences


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["null", "{rank: 2}"], ids=["full", "lora"])
def test_sharded_weights_learn_rounded_and_recomputed_like_whole_weights(
    lora: str, tmp_path: Path
) -> None:
    """Layers are sent in bfloat16, except adapters, and recomputed in the backward pass."""
    model = "ast_chat.attacker.language_model"
    given = (f"{model}.dtype=bfloat16", f"{model}.lora={lora}")
    resolved = short_experiment("ast_dpo", tmp_path / "scenario", *given, num_iterations=2)

    def learned(store: str | None, **how: Any) -> dict[str, Any]:
        with open_team(CPU, store) as team:
            settings = ExperimentSettings(progress=False, **how)
            torch.manual_seed(3)
            trainer: Any = prepare_experiment(resolved, settings, team=team).trainer
            for agent in trainer.scenario_instance.agents.values():
                agent.language_model.scores_by_module = True
            logged: list[float] = []
            trainer.tracker.log_metrics = lambda metrics, step: logged.append(metrics["loss"])
            trainer.train()
            named = dict(trainer.policy.module.named_parameters()) if team.is_leader else {}
            weights = {name: weight.detach().clone() for name, weight in named.items()}
            return {"weights": weights, "logged": logged, "dtype": str(trainer.policy.dtype)}

    if lora == "null":
        whole = learned(None)
    else:
        # Other batch shapes round differently, so other tokens are drawn.
        whole, _ = together(learned, tmp_path)
    how = {"sharding": "fsdp", "gradient_checkpointing": True}
    leader, _ = together(lambda store: learned(store, **how), tmp_path)
    plain, _ = together(lambda store: learned(store, sharding="fsdp"), tmp_path)
    assert leader["dtype"] == "torch.bfloat16"
    # Recomputed values are equal to the bit.
    assert gap_of(leader["weights"], plain["weights"]) == 0
    # Norms are sent rounded, and Adam takes full steps even for tiny gradients.
    assert leader["logged"][0] == pytest.approx(whole["logged"][0], abs=2e-3)
    assert leader["logged"][1] == pytest.approx(whole["logged"][1], abs=3e-2)


# ---- runs with sharded weights, saved in parts


@pytest.fixture
def resolved(tmp_path: Path) -> ResolvedExperiment:
    return short_experiment("ast_dpo", tmp_path / "scenario", num_iterations=2)


@pytest.fixture
def adapted(tmp_path: Path) -> ResolvedExperiment:
    lora = "ast_chat.attacker.language_model.lora={rank: 2}"
    return short_experiment("ast_dpo", tmp_path / "adapted", lora, num_iterations=2)


def signalled(
    resolved: ResolvedExperiment,
    path: Path,
    method: str,
    number: int,
    by: dict[int, signal.Signals],
) -> Callable[[str], str]:
    """A run whose processes get signals by rank at a call of the service; returns its end."""

    def play(store: str) -> str:
        original, calls = getattr(ShardedService, method), iter(range(99))

        def with_signal(self: ShardedService, *given: Any) -> Any:
            if self.team.rank in by and next(calls) == number:
                os.kill(os.getpid(), by[self.team.rank])
            return original(self, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardedService, method, with_signal)
            try:
                run(resolved, path, store, sharding="fsdp")
            except LostProcessError as error:
                return str(error)
            except StopRequested as error:
                return error.signal_name
        return ""

    return play


def run_by(
    resolved: ResolvedExperiment, path: Path, store: str | None, *, stops: bool = False
) -> None:
    """Run with sharded weights, if there are several processes."""
    run(resolved, path, store, stops=stops, sharding="fsdp" if store else "none")


def resume(path: Path, store: str | None) -> None:
    sharding = "fsdp" if store else "none"
    resume_experiment(path, progress=False, process_store=store, sharding=sharding)


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (2, 1, "resolved"),
        pytest.param(1, 2, "resolved", marks=pytest.mark.slow),
        pytest.param(2, 2, "resolved", marks=pytest.mark.slow),
        pytest.param(2, 1, "adapted", marks=pytest.mark.slow),
        pytest.param(1, 2, "adapted", marks=pytest.mark.slow),
        pytest.param(2, 2, "adapted", marks=pytest.mark.slow),
    ],
)
def test_a_divided_run_goes_on_in_any_number_of_processes(
    before: int, after: int, what: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    resolved = request.getfixturevalue(what)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    is_exact = before == after

    def in_processes(count: int, work: Callable[[str | None], None]) -> None:
        work(None) if count == 1 else together(work, tmp_path, count=count)

    in_processes(after, lambda store: run_by(resolved, whole, store))
    in_processes(before, lambda store: run_by(resolved, stopped, store, stops=True))
    (checkpoint,) = (stopped / "checkpoints").glob("step_*")
    parts = [*checkpoint.glob("attacker/shards/*"), *checkpoint.glob("optimizer_shards/*")]
    assert len(parts) == (4 if before == 2 else 0)
    in_processes(after, lambda store: resume(stopped, store))
    assert (stopped / "results.json").is_file()
    # float32, and a single process reads trees of tokens where sharded weights read rows.
    assert gap_of(whole, stopped) <= (0 if is_exact else 1e-4)
    if what == "adapted" and after == 2:
        check_parts_of_adapter(stopped, tmp_path / "joined")


def check_parts_of_adapter(path: Path, joined: Path) -> None:
    """A checkpoint has only the adapter, which is merged for others."""
    latest = CheckpointStore(path / "checkpoints").latest()
    assert latest is not None
    parts = load_whole(latest / "attacker" / "shards")
    assert {name.split(".")[-2] for name in parts} == {"lora_A", "lora_B"}
    export(path, "huggingface", joined)
    weights = load_causal_lm(str(joined), None).state_dict()
    # The run has left the model with the adapter merged.
    for name, weight in load_file(path / "model" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], weight)


def test_parts_are_joined_for_others_and_a_lost_part_is_reported_with_an_intact_checkpoint(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    together(lambda store: run_by(resolved, path, store), tmp_path)
    weights = load_file(path / "model" / "model.safetensors")
    export(path, "huggingface", tmp_path / "joined")
    joined = AutoModelForCausalLM.from_pretrained(tmp_path / "joined").state_dict()
    assert all(torch.equal(joined[name], weights[name]) for name in weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "joined").encode("hello")
    (path / "results.json").unlink()
    store = CheckpointStore(path / "checkpoints")
    latest = store.latest()
    assert latest is not None
    lost = sorted((latest / "attacker" / "shards").iterdir())[0]
    lost.rename(tmp_path / lost.name)

    def failed() -> str:
        with pytest.raises(CheckpointError) as caught:
            resume(path, None)
        return str(caught.value)

    assert says(failed(), f"shards/{lost.name} is missing", "newest valid")
    (tmp_path / lost.name).rename(lost)
    lost.write_bytes(lost.read_bytes()[:-1] + b"x")
    assert says(failed(), f"shards/{lost.name} is corrupt")


@pytest.mark.parametrize(
    ("method", "number"),
    [("_part_of_step", 5), pytest.param("_save_parts", 1, marks=pytest.mark.slow)],
    ids=["in a step", "while it saves"],
)
def test_a_divided_run_of_which_a_process_is_killed_goes_on_from_its_last_checkpoint(
    method: str, number: int, resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    whole, path = tmp_path / "whole", tmp_path / "killed"
    run(resolved, whole, None)
    killed = signalled(resolved, path, method, number, {1: signal.SIGKILL})
    message, _ = together(killed, tmp_path, killed=[1])
    (checkpoint,) = (path / "checkpoints").glob("step_*")
    assert says(message, "2 processes", "has ended", f"saved in {checkpoint.name}", "resume")
    CheckpointStore(checkpoint.parent).verify(checkpoint)
    assert not (path / "results.json").exists()
    resume(path, None)
    assert gap_of(whole, path) < 1e-4


@pytest.mark.slow
def test_a_divided_run_that_is_stopped_saves_within_the_iteration(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    whole, path = tmp_path / "whole", tmp_path / "stopped"
    run(resolved, whole, None)
    stopped = signalled(resolved, path, "_part_of_step", 1, {0: signal.SIGTERM})
    assert together(stopped, tmp_path) == ["SIGTERM", "SIGTERM"]
    (checkpoint,) = (path / "checkpoints").glob("step_*")
    assert len([*checkpoint.glob("attacker/shards/*")]) == 2
    resume(path, None)
    assert gap_of(whole, path) < 1e-4

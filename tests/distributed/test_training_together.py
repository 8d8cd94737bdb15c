"""Several processes learn the same as one, and a run continues in any number of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nip_astra.checkpoints.shards import load_whole
from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.distributed.team import ProcessTeam, open_team
from nip_astra.errors import ConfigurationError, LostProcessError, StopRequested
from nip_astra.evaluation.api import export
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.sharded import ShardedService
from nip_astra.language_models.sources import load_causal_lm
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment, resume_experiment
from tests.distributed.learning import CPU, check_equal, gap_of, learn, run
from tests.distributed.processes import together
from tests.kit.experiments import metrics_of
from tests.kit.messages import says
from tests.kit.resuming import short_experiment

LORA = "ast_chat.attacker.language_model.lora={rank: 2}"

pytestmark = pytest.mark.usefixtures("no_plugins_left")


def case(trainer: str, *overrides: str, sharding: str = "none", is_slow: bool = False) -> Any:
    name = "-".join([trainer, *(["lora"] if LORA in overrides else []), sharding])
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(trainer, overrides, sharding, marks=marks, id=name)


@pytest.mark.parametrize(
    ("trainer", "overrides", "sharding"),
    [
        case("ast_dpo"),
        # Three batches a step, the last of them smaller: some are distributed, one is cut.
        case(
            *("ast_dpo", LORA),
            *("training.minibatch_size=1", "training.gradient_accumulation_steps=3"),
        ),
        case("self_hosted_grpo"),
        case("ast_ppo"),
        case("vanilla_ppo"),
        case("mappo", is_slow=True),
        case("reinforce", is_slow=True),
        case("vanilla_ppo", sharding="fsdp"),
        case("mappo", sharding="fsdp", is_slow=True),
        case("reinforce", sharding="fsdp", is_slow=True),
    ],
)
def test_two_processes_learn_the_same_as_one(
    trainer: str, overrides: tuple[str, ...], sharding: str, tmp_path: Path
) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario", *overrides, num_iterations=2)
    check_learning(resolved, sharding, tmp_path)


@pytest.mark.slow
def test_networks_with_written_derivatives_are_divided_too(tmp_path: Path) -> None:
    overrides = (
        *("rl.num_iterations=2", "rl.frames_per_batch=48", "rl.minibatch_size=24"),
        *("rl.num_test_iterations=1", "rl.pretrain_agents=false"),
        "graph_isomorphism.dataset.num_train=64",
        "graph_isomorphism.dataset.num_test=16",
    )
    resolved = resolve_experiment(trainer="vanilla_ppo", overrides=overrides)
    check_learning(resolved, "fsdp", tmp_path)


def check_learning(resolved: ResolvedExperiment, sharding: str, folder: Path) -> None:
    one = learn(resolved, None)
    leader, other = together(lambda store: learn(resolved, store, sharding), folder)
    check_equal(one, leader, other)
    assert not other["logged"]
    if sharding == "none":
        assert gap_of(leader["weights"], other["weights"]) == 0
        return
    # Each holds about half of the trained weights, and of the optimizer's state.
    assert leader["held"] + other["held"] == one["held"]
    assert leader["remembered"] + other["remembered"] == one["remembered"] > 0
    assert leader["held"] < 0.65 * one["held"]
    # The leader plays with whole agents.
    assert leader["num_divided"] == 0
    assert other["num_divided"] > 0


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def short_run(name: str, folder: Path) -> ResolvedExperiment:
    trainer, _, lora = name.partition("-")
    return short_experiment(trainer, folder / "scenario", *[LORA][: len(lora)], num_iterations=2)


@pytest.mark.parametrize(
    ("name", "sharding", "counts"),
    [
        ("ast_dpo", "none", ((2, 1), (1, 2))),
        slow("vanilla_ppo", "none", ((2, 1), (1, 2))),
        ("vanilla_ppo", "fsdp", ((2, 1), (1, 2))),
        ("ast_dpo", "fsdp", ((2, 1),)),
        slow("ast_dpo", "fsdp", ((1, 2), (2, 2))),
        slow("ast_dpo-lora", "fsdp", ((2, 1), (1, 2), (2, 2))),
    ],
)
def test_a_run_goes_on_in_any_number_of_processes(
    name: str, sharding: str, counts: Sequence[tuple[int, int]], tmp_path: Path
) -> None:
    resolved = short_run(name, tmp_path)

    def by(count: int, work: Callable[..., None], *given: Any, **settings: Any) -> None:
        if count == 1:
            work(*given, **settings, process_store=None)
            return
        settings["sharding"] = sharding
        together(lambda store: work(*given, **settings, process_store=store), tmp_path)

    for before, after in counts:
        whole, stopped = tmp_path / f"by_{after}", tmp_path / f"{before}_then_{after}"
        if not whole.exists():
            by(after, run, resolved, whole)
        by(before, run, resolved, stopped, stops=True)
        (checkpoint,) = (stopped / "checkpoints").glob("step_*")
        parts = [*checkpoint.glob("attacker/shards/*"), *checkpoint.glob("optimizer_shards/*")]
        is_in_parts = before == 2 and sharding == "fsdp" and name != "vanilla_ppo"
        assert len(parts) == 4 * is_in_parts
        by(after, resume_experiment, stopped, progress=False)
        assert len(metrics_of(stopped)) == len(metrics_of(whole))
        # float32: the sum over processes is rounded differently, and a single process reads trees
        # of tokens where sharded weights read rows.
        assert gap_of(whole, stopped) <= (0 if before == after else 1e-4)
        if name.endswith("lora") and after == 2:
            check_parts_of_adapter(stopped, tmp_path / f"joined_{before}")


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


def signalled(
    given: Callable[[str], None], owner: type, method: str, number: int, signals: dict[int, int]
) -> Callable[[str], str]:
    """A run whose processes get signals by rank at a call of a method; returns its end."""
    original, calls = getattr(owner, method), iter(range(999))

    def with_signal(self: Any, *arguments: Any) -> Any:
        rank = getattr(self, "team", self).rank
        if rank in signals and next(calls) == number:
            os.kill(os.getpid(), signals[rank])
        return original(self, *arguments)

    def play(store: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, method, with_signal)
            try:
                given(store)
            except LostProcessError as error:
                return str(error)
            except StopRequested as error:
                return error.signal_name
        return ""

    return play


@pytest.mark.parametrize(
    ("trainer", "sharding", "owner", "method", "number"),
    [
        # In the middle of an iteration that follows another.
        ("ast_dpo", "none", ProcessTeam, "all_reduce", 6),
        slow("vanilla_ppo", "none", ProcessTeam, "all_reduce", 6),
        slow("vanilla_ppo", "fsdp", ProcessTeam, "all_reduce", 60),
        ("ast_dpo", "fsdp", ShardedService, "_part_of_step", 5),
        # While it saves.
        slow("ast_dpo", "fsdp", ShardedService, "_save_parts", 1),
    ],
)
def test_a_run_of_which_one_process_is_killed_can_be_resumed(
    trainer: str, sharding: str, owner: type, method: str, number: int, tmp_path: Path
) -> None:
    """Sharded weights are lost with a process: the run continues from its last checkpoint."""
    resolved, whole, path = short_run(trainer, tmp_path), tmp_path / "whole", tmp_path / "killed"
    run(resolved, whole)
    how = {"sharding": sharding, "checkpoint_period": int(sharding != "none")}
    given = lambda store: run(resolved, path, process_store=store, **how)  # noqa: E731
    killed = signalled(given, owner, method, number, {1: signal.SIGKILL})
    message, _ = together(killed, tmp_path, killed=[1])
    *_, checkpoint = sorted((path / "checkpoints").glob("step_*"))
    assert says(message, "2 processes", "has ended", f"saved in {checkpoint.name}", "resume")
    CheckpointStore(checkpoint.parent).verify(checkpoint)
    assert not (path / "results.json").exists()
    resume_experiment(path, progress=False)
    assert gap_of(whole, path) < 1e-4
    steps = [[row["step"] for row in metrics_of(one)] for one in (whole, path)]
    assert steps[0] == steps[1]


@pytest.mark.slow
def test_a_divided_run_that_is_stopped_saves_within_the_iteration(tmp_path: Path) -> None:
    resolved, path = short_run("ast_dpo", tmp_path), tmp_path / "stopped"
    run(resolved, tmp_path / "whole")
    given = lambda store: run(resolved, path, process_store=store, sharding="fsdp")  # noqa: E731
    stopped = signalled(given, ShardedService, "_part_of_step", 1, {0: signal.SIGTERM})
    assert together(stopped, tmp_path) == ["SIGTERM", "SIGTERM"]
    (checkpoint,) = (path / "checkpoints").glob("step_*")
    assert len([*checkpoint.glob("attacker/shards/*")]) == 2
    resume_experiment(path, progress=False)
    assert gap_of(tmp_path / "whole", path) < 1e-4


def refusal(store: str, resolved: ResolvedExperiment, *, is_shared: bool) -> str:
    settings = ExperimentSettings(progress=False, sharding="fsdp" if is_shared else "none")
    with open_team(CPU, store) as team:
        try:
            trainer: Any = prepare_experiment(resolved, settings, team=team).trainer
            trainer.optimizers.are_disjoint = False
            trainer._shard_agents()
        except ConfigurationError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("trainer", "is_shared", "words"),
    [
        ("spg", False, ("2 processes", "agent_losses", "without torchrun", "vanilla_ppo")),
        ("solo_agent", False, ("2 processes", "'solo_agent'")),
        # Agents that share weights.
        ("vanilla_ppo", True, ("(sharding=fsdp)", "share weights", "sharding=none")),
    ],
)
def test_what_cannot_be_divided_is_refused(
    trainer: str, is_shared: bool, words: tuple[str, ...], tmp_path: Path
) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario")
    refused = partial(refusal, resolved=resolved, is_shared=is_shared)
    for message in together(refused, tmp_path):
        assert says(message, *words)

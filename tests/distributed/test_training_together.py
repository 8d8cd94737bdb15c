"""Several processes learn the same as one, and a run continues in any number of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nip_astra.distributed.team import ProcessTeam, open_team
from nip_astra.errors import ConfigurationError, LostProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.types import TrainerType
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


RUNS = [
    ("ast_dpo", "none"),
    pytest.param("vanilla_ppo", "none", marks=pytest.mark.slow),
    ("vanilla_ppo", "fsdp"),
]


@pytest.mark.parametrize(("trainer", "sharding"), RUNS)
def test_a_run_goes_on_in_another_number_of_processes(
    trainer: str, sharding: str, tmp_path: Path
) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario", num_iterations=2)
    whole, two, one = (tmp_path / name for name in ("whole", "two_then_one", "one_then_two"))
    run(resolved, whole, None)
    together(lambda store: run(resolved, two, store, stops=True, sharding=sharding), tmp_path)
    resume_experiment(two, progress=False)
    run(resolved, one, None, stops=True)

    def resumed(store: str) -> None:
        resume_experiment(one, progress=False, process_store=store, sharding=sharding)

    together(resumed, tmp_path)
    for path in (two, one):
        assert len(metrics_of(path)) == len(metrics_of(whole))
        # float32: the sum over processes is rounded differently.
        assert gap_of(whole, path) < 1e-4


@pytest.mark.parametrize(
    ("trainer", "sharding"), [*RUNS[:2], pytest.param(*RUNS[2], marks=pytest.mark.slow)]
)
def test_a_run_of_which_one_process_is_killed_can_be_resumed(
    trainer: str, sharding: str, tmp_path: Path
) -> None:
    """Sharded weights are lost with a process: the run continues from its last checkpoint."""
    resolved = short_experiment(trainer, tmp_path / "scenario", num_iterations=3)
    whole, path = tmp_path / "whole", tmp_path / "killed"
    is_sharded = sharding != "none"
    run(resolved, whole, None)

    def killed(store: str) -> str:
        exchanges = iter(range(10_000))
        all_reduce = ProcessTeam.all_reduce

        def and_end_of_one(team: ProcessTeam, tensors: Sequence[Tensor]) -> None:
            # In the middle of an iteration that follows another.
            if team.rank == 1 and next(exchanges) == (60 if is_sharded else 6):
                os.kill(os.getpid(), signal.SIGKILL)
            all_reduce(team, tensors)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ProcessTeam, "all_reduce", and_end_of_one)
            try:
                run(resolved, path, store, sharding=sharding, checkpoint_period=int(is_sharded))
            except LostProcessError as error:
                return str(error)
        return ""

    message, _ = together(killed, tmp_path, killed=[1])
    assert says(message, "2 processes", "has ended", "saved in step_", "resume")
    resume_experiment(path, progress=False)
    assert gap_of(whole, path) < 1e-4
    steps = [[row["step"] for row in metrics_of(one)] for one in (whole, path)]
    assert steps[0] == steps[1]


def refusals(resolved: ResolvedExperiment, store: str) -> str:
    with open_team(CPU, store) as team:
        try:
            prepare_experiment(resolved, ExperimentSettings(progress=False), team=team)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (TrainerType.SPG, ("2 processes", "agent_losses", "without torchrun", "vanilla_ppo")),
        (TrainerType.SOLO_AGENT, ("2 processes", "'solo_agent'")),
    ],
)
def test_what_cannot_be_divided_is_refused(
    trainer: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario")
    for message in together(lambda store: refusals(resolved, store), tmp_path):
        assert says(message, "ConfigurationError", *words)


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

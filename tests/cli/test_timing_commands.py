"""Parts of an iteration are timed from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nip_astra.progress import open_progress
from nip_astra.trainers import dry_run
from nip_astra.trainers.trainer_base import Trainer
from nip_astra.trainers.vanilla_ppo import VanillaPpoTrainer
from tests.kit.command_line import CommandLine, refused

PROOF = (
    *("--scenario", "graph_isomorphism", "--num-threads", "1"),
    *("--set", "interaction_protocol=nip"),
    *("--set", "graph_isomorphism.dataset.num_train=20"),
    *("--set", "graph_isomorphism.dataset.num_test=10"),
)
FEW_FRAMES = ("--set", "rl.frames_per_batch=32", "--set", "rl.num_epochs=1")


def test_repetitions_are_counted_on_a_bar(
    cli: CommandLine, closed_bars: dict[str, tuple[int, int]]
) -> None:
    seconds_of(cli, "forward", "--trainer", "vanilla_ppo", *PROOF, *FEW_FRAMES)
    assert closed_bars["Timing"] == (3, 3)


def seconds_of(cli: CommandLine, *arguments: str) -> dict[str, list[float]]:
    said = cli.ok("time", *arguments, "--repeats", "2", "--json")
    found: dict[str, list[float]] = json.loads(said.out)["seconds"]
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())
    assert list(Path.cwd().rglob("runs")) == []
    return found


@pytest.mark.parametrize("trainer", ["vanilla_ppo", "mappo", "reinforce", "spg"])
def test_all_parts_of_a_proofs_iteration_are_timed(cli: CommandLine, trainer: str) -> None:
    found = seconds_of(cli, "--trainer", trainer, *PROOF, *FEW_FRAMES)
    assert list(found) == ["rollout", "update", "forward"]


def test_parts_are_timed_in_the_requested_order(cli: CommandLine) -> None:
    found = seconds_of(cli, "forward", "rollout", "--trainer", "vanilla_ppo", *PROOF, *FEW_FRAMES)
    assert list(found) == ["forward", "rollout"]


def test_a_supervised_epoch_is_timed(cli: CommandLine) -> None:
    assert list(seconds_of(cli, "--trainer", "solo_agent", *PROOF)) == ["epoch", "forward"]


@pytest.mark.parametrize("trainer", ["ast_dpo", "ast_ppo"])
def test_parts_of_a_stress_tests_iteration_are_timed(cli: CommandLine, trainer: str) -> None:
    found = seconds_of(cli, "--trainer", trainer, "--scenario", str(cli.scenario))
    assert list(found) == ["rollout", "update", "loss"]


def test_times_are_shown_in_a_table(cli: CommandLine) -> None:
    said = cli.ok("time", "forward", "--trainer", "vanilla_ppo", *PROOF, *FEW_FRAMES)
    assert said.out.split()[:4] == ["component", "median", "least", "most"]
    assert said.out.count(" ms") == 3


def test_an_unknown_part_is_reported_with_the_valid_parts(cli: CommandLine) -> None:
    message = refused(cli("time", "rolout", "--trainer", "vanilla_ppo", *PROOF, *FEW_FRAMES))
    assert "unknown component 'rolout'. Did you mean 'rollout'?" in message


def test_a_trainer_that_names_no_parts_is_reported(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VanillaPpoTrainer, "components_to_time", Trainer.components_to_time)
    message = refused(cli("time", "--trainer", "vanilla_ppo", *PROOF, *FEW_FRAMES))
    assert "components_to_time" in message


def test_the_first_time_is_not_counted() -> None:
    calls: list[int] = []
    bar = open_progress(4, enabled=False)
    assert len(dry_run._times(lambda: calls.append(1), 3, bar)) == 3
    assert len(calls) == bar.num_done == 4

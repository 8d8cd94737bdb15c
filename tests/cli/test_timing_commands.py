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
from tests.kit.messages import says

PROOF = (
    *("--scenario", "graph_isomorphism", "--num-threads", "1"),
    *("--set", "interaction_protocol=nip"),
    *("--set", "graph_isomorphism.dataset.num_train=20"),
    *("--set", "graph_isomorphism.dataset.num_test=10"),
)
SHORT = (*PROOF, "--set", "rl.frames_per_batch=32", "--set", "rl.num_epochs=1")
PPO = ("--trainer", "vanilla_ppo", *SHORT)


@pytest.mark.parametrize(
    ("trainer", "options", "parts"),
    [
        *((name, SHORT, "rollout update forward") for name in ("mappo", "reinforce", "spg")),
        ("solo_agent", PROOF, "epoch forward"),
        *((name, None, "rollout update loss") for name in ("ast_dpo", "ast_ppo")),
    ],
)
def test_all_parts_of_an_iteration_are_timed(
    cli: CommandLine, trainer: str, options: tuple[str, ...] | None, parts: str
) -> None:
    experiment = ("--trainer", trainer, *(options or ("--scenario", str(cli.scenario))))
    result = cli.ok("time", *experiment, "--repeats", "2", "--json")
    seconds = json.loads(result.out)["seconds"]
    assert list(seconds) == parts.split()
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())
    assert list(Path.cwd().rglob("runs")) == []


def test_parts_are_timed_on_a_bar_and_shown_in_the_requested_order(
    cli: CommandLine, closed_bars: dict[str, tuple[int, int]]
) -> None:
    result = cli.ok("time", "forward", "rollout", *PPO, "--repeats", "2")
    head, *rows = [line.split() for line in result.out.splitlines() if line.strip()]
    assert head == ["component", "median", "least", "most"]
    times = [row for row in rows if "ms" in row]
    assert [row[0] for row in times] == ["forward", "rollout"]
    assert [row.count("ms") for row in times] == [3, 3]
    assert closed_bars["Timing"] == (6, 6)


def test_an_unknown_part_and_a_trainer_that_names_no_parts_are_reported(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert says(refused(cli("time", "rolout", *PPO)), "'rolout'", "'rollout'?")
    monkeypatch.setattr(VanillaPpoTrainer, "components_to_time", Trainer.components_to_time)
    assert "components_to_time" in refused(cli("time", *PPO))


def test_the_first_time_is_not_counted() -> None:
    calls: list[int] = []
    bar = open_progress(4, enabled=False)
    assert len(dry_run._times(lambda: calls.append(1), 3, bar)) == 3
    assert len(calls) == bar.num_done == 4

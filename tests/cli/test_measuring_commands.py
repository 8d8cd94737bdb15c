"""`time`, `compare-dumps` and `report`, as a user runs them."""

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
from tests.report.runs import write_run

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


def test_parts_are_shown_as_requested(
    cli: CommandLine, closed_bars: dict[str, tuple[int, int]]
) -> None:
    result = cli.ok("time", "forward", "rollout", *PPO, "--repeats", "2")
    head, *rows = [line.split() for line in result.out.splitlines() if line.strip()]
    assert head == ["component", "median", "least", "most"]
    times = [row for row in rows if "ms" in row]
    assert [row[0] for row in times] == ["forward", "rollout"]
    assert [row.count("ms") for row in times] == [3, 3]
    assert closed_bars["Timing"] == (6, 6)


def test_unknown_parts_are_reported(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert says(refused(cli("time", "rolout", *PPO)), "'rolout'", "'rollout'?")
    monkeypatch.setattr(VanillaPpoTrainer, "components_to_time", Trainer.components_to_time)
    assert "components_to_time" in refused(cli("time", *PPO))


def test_the_first_time_is_not_counted() -> None:
    calls: list[int] = []
    bar = open_progress(4, enabled=False)
    assert len(dry_run._times(lambda: calls.append(1), 3, bar)) == 3
    assert len(calls) == bar.num_done == 4


ONE_ITERATION = (
    "training.num_episodes_per_experience=2",
    "training.minibatch_size=16",
    "training.num_iterations=1",
    "task.evaluation.num_problems=2",
)


def dumped(cli: CommandLine, name: str, *overrides: str) -> str:
    sets = [word for one in (*ONE_ITERATION, *overrides) for word in ("--set", one)]
    cli.ok(
        *("--trainer", "self_hosted_grpo", "--run-id", name, "--runs-dir", "runs"),
        *("--settings", "dump_period=1", "--settings", "progress=false", *sets),
    )
    return f"runs/{name}"


def test_runs_are_compared_stage_by_stage(cli: CommandLine) -> None:
    one, again = dumped(cli, "one"), dumped(cli, "again")
    result = cli("compare-dumps", one, again)
    assert (result.code, result.out) == (0, "the same in 7 stages\n")
    other = dumped(cli, "other", "self_hosted_grpo.scale=none")
    result = cli("compare-dumps", one, other)
    assert result.code == 1
    assert result.out.startswith(
        "they differ first in iteration_000001/001-prepared_batch\n  data.advantages differs at "
    )
    assert "then in 5 more of 7 stages" in result.out
    assert "dump_period=1" in refused(cli("compare-dumps", one, "."))


def test_a_page_is_written_into_its_run(cli: CommandLine, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    result = cli("report", "runs/one")
    assert (result.code, result.out) == (0, "report     runs/one/report.html\n")
    assert "ast_dpo on pocket_chat" in (tmp_path / "runs/one/report.html").read_text()


def test_several_runs_go_to_the_requested_file(cli: CommandLine, tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / "runs" / str(seed), seed=seed)
    cli.ok("report", "runs/0", "runs/1", "--output", "both.html", "--redact")
    text = (tmp_path / "both.html").read_text()
    assert "Comparison of 2 runs" in text
    assert 'class="veiled"' in text

"""Figures of runs without conversations in the formats of other tools."""

from __future__ import annotations

import csv

import pytest

from tests.command_line import CommandLine, refused

SMALL = (
    "training.num_episodes_per_experience=2",
    "training.minibatch_size=16",
    "training.num_iterations=2",
    "task.evaluation.num_problems=2",
)


def test_a_task_run_gives_its_curves_and_no_conversations(cli: CommandLine) -> None:
    sets = [word for one in SMALL for word in ("--set", one)]
    said = cli("--trainer", "self_hosted_grpo", "--run-id", "one", *sets)
    assert said.code == 0, said.err
    said = cli("export", "runs/one", "--format", "csv", "--output", "out")
    assert said.code == 0, said.err
    curves = list(csv.DictReader((cli.folder / "out" / "metrics.csv").open(newline="")))
    assert [row["step"] for row in curves] == ["1", "2"]
    assert "rollout/reward_mean" in curves[0]
    figures = {r["figure"] for r in csv.DictReader((cli.folder / "out" / "figures.csv").open())}
    assert {"before.accuracy", "after.accuracy"} <= figures

    for form in ("jsonl", "hitlog", "inspect", "parquet"):
        said = cli("export", "runs/one", "--format", form)
        assert "Take one of csv, tensorboard" in refused(said), form
    assert "kind 'task' has no attacker" in refused(
        cli("score", "runs/one", "--scorer", "profanity")
    )
    # A run that was killed has neither results nor rollouts of its end.
    (cli.folder / "runs" / "one" / "results.json").unlink()
    (cli.folder / "runs" / "one" / "rollouts" / "evaluation.jsonl").unlink()
    said = cli("export", "runs/one", "--format", "csv", "--output", "killed")
    assert said.code == 0, said.err
    assert (cli.folder / "killed" / "metrics.csv").is_file()


def test_curves_of_a_task_run_are_events(cli: CommandLine) -> None:
    pytest.importorskip("tensorboard")
    sets = [word for one in SMALL for word in ("--set", one)]
    assert cli("--trainer", "self_hosted_grpo", "--run-id", "one", *sets).code == 0
    said = cli("export", "runs/one", "--format", "tensorboard")
    assert said.code == 0, said.err
    assert "events.out.tfevents" in said.out

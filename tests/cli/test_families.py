"""Rules of `evaluate` that hold for runs of every family."""

from __future__ import annotations

import shutil
from typing import Any, NamedTuple

import pytest

from tests.cli.trained_run import figures_of
from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says


class Family(NamedTuple):
    """An evaluation, its gates, and options of another with the parameters that then differ."""

    short: tuple[str, ...]
    open_gates: tuple[str, ...]
    """Conditions that do not hold."""
    closed_gate: str
    invalid_gates: tuple[str, ...]
    changes: tuple[str, ...]
    differences: tuple[str, ...]


FAMILIES = {
    "conversation": Family(
        ("--num-episodes", "4", "--probability-episodes", "0"),
        ("failure_rate.value > 1",),
        "failure_rate.high > 0.0",
        ("failure_rate.high >", "failure_rte.high > 0", "failure_rate.hgh > 0"),
        ("--num-turns", "1", "--seed", "7"),
        ("options.num_turns: 2 ", "options.seed: 0 "),
    ),
    "task": Family(
        ("--num-episodes", "2"),
        ("accuracy.low > 0.999", "pass_at_4.high < pass_at_1.low"),
        "mean_reward.value < 1.1",
        ("accuracy.low >", "acuracy.low > 0", "pass_at_8.low > 0"),
        ("--set", "task.evaluation.num_runs=1", "--seed", "5"),
        ("num_runs: 4 ",),
    ),
    "text": Family(
        ("--num-episodes", "4"),
        ("accuracy.low > 0.9",),
        "verifier.mean_episode_reward < 0.9",
        ("accuracy.low >", "acuracy.low > 0", "verifer.mean_episode_reward > 0"),
        ("--num-episodes", "2", "--seed", "3"),
        ("num_episodes: 4 ", "seed: 0 "),
    ),
}


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest, cli: CommandLine) -> str:
    """A family, whose run without evaluations is `runs/one`."""
    family = str(request.param)
    if family == "conversation":
        run = request.getfixturevalue("trained")
    else:
        run, _ = request.getfixturevalue(f"{family}_runs")
    without = shutil.ignore_patterns("evaluations")
    shutil.copytree(run, cli.folder / "runs" / "one", symlinks=True, ignore=without)
    return family


def test_an_evaluation_may_be_a_gate(cli: CommandLine, name: str) -> None:
    family = FAMILIES[name]
    command = ("evaluate", "runs/one", *family.short)
    for condition in family.open_gates:
        cli.ok(*command, "--fail-if", condition)
    result = cli(*command, "--fail-if", family.closed_gate)
    assert (result.code, family.closed_gate in result.err) == (1, True)
    for condition in family.invalid_gates:
        refused(cli(*command, "--name", "gated", "--fail-if", condition))
    assert not list((cli.folder / "runs/one/evaluations/gated").glob("*.jsonl")), "refused first"


def test_a_name_belongs_to_one_set_of_options(cli: CommandLine, name: str) -> None:
    family, run = FAMILIES[name], cli.folder / "runs" / "one"
    command = ("evaluate", "runs/one", *family.short)
    cli.ok(*command)
    before = figures_of(run)
    assert says(refused(cli(*command, *family.changes)), *family.differences)
    cli.ok(*command, *family.changes, "--name", "other")
    assert figures_of(run) == before
    cli.ok(*command, *family.changes, "--overwrite")
    assert figures_of(run)["seed"] == figures_of(run, "other")["seed"] == int(family.changes[-1])


@pytest.mark.parametrize(
    ("fixture", "options", "facts"),
    [
        ("task_runs", ["--target", "x", "--num-turns", "2"], ["--target, --num-turns"]),
        ("task_runs", ["--split", "all"], ["dev, test, train"]),
        ("task_runs", ["--set", "training.lr=1"], ["task.*", "self_hosted_grpo.train_service.*"]),
        ("task_runs", ["nowhere"], ["'nowhere'"]),
        ("text_runs", ["--monte-carlo-only", "--column", "x"], ["--monte-carlo-only, --column"]),
        ("text_runs", ["--split", "dev"], ["test, train"]),
        ("text_runs", ["--num-episodes", "7"], ["--num-episodes", "7", "6"]),
        ("text_runs", ["."], ["conversation"]),
    ],
)
def test_options_without_meaning_for_a_family_are_refused(
    cli: CommandLine, request: Any, fixture: str, options: list[str], facts: list[str]
) -> None:
    run, _ = request.getfixturevalue(fixture)
    assert says(refused(cli("evaluate", str(run), "--name", "new", *options)), *facts)

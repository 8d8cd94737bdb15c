"""`nip-astra compare-dumps` locates the divergence of two runs."""

from __future__ import annotations

from tests.kit.command_line import CommandLine, refused

SMALL = (
    "training.num_episodes_per_experience=2",
    "training.minibatch_size=16",
    "training.num_iterations=1",
    "task.evaluation.num_problems=2",
)


def run(cli: CommandLine, name: str, *overrides: str) -> str:
    sets = [word for one in (*SMALL, *overrides) for word in ("--set", one)]
    cli.ok(
        *("--trainer", "self_hosted_grpo", "--run-id", name, "--runs-dir", "runs"),
        *("--settings", "dump_period=1", "--settings", "progress=false", *sets),
    )
    return f"runs/{name}"


def test_runs_are_compared_stage_by_stage(cli: CommandLine) -> None:
    one, again = run(cli, "one"), run(cli, "again")
    result = cli("compare-dumps", one, again)
    assert (result.code, result.out) == (0, "the same in 7 stages\n")
    other = run(cli, "other", "self_hosted_grpo.scale=none")
    result = cli("compare-dumps", one, other)
    assert result.code == 1
    assert result.out.startswith(
        "they differ first in iteration_000001/001-prepared_batch\n  data.advantages differs at "
    )
    assert "then in 5 more of 7 stages" in result.out
    assert "dump_period=1" in refused(cli("compare-dumps", one, "nothing"))

"""`nip-astra compare-dumps` finds where two runs part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.command_line import CommandLine, refused

SMALL = (
    "training.num_episodes_per_experience=2",
    "training.minibatch_size=16",
    "training.num_iterations=1",
    "task.evaluation.num_problems=2",
)


def run(type_command: CommandLine, name: str, *overrides: str) -> str:
    sets = [word for one in (*SMALL, *overrides) for word in ("--set", one)]
    said = type_command(
        *("--trainer", "self_hosted_grpo", "--run-id", name, "--runs-dir", "runs"),
        *("--settings", "dump_period=1", "--settings", "progress=false", *sets),
    )
    assert said.code == 0, said
    return f"runs/{name}"


def test_runs_are_compared_stage_by_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    type_command = CommandLine(tmp_path, tmp_path, capsys)
    one, again = run(type_command, "one"), run(type_command, "again")
    said = type_command("compare-dumps", one, again)
    assert (said.code, said.out) == (0, "the same in 7 stages\n")
    other = run(type_command, "other", "self_hosted_grpo.scale=none")
    said = type_command("compare-dumps", one, other)
    assert said.code == 1
    assert said.out.startswith(
        "they differ first in iteration_000001/001-prepared_batch\n  data.advantages differs at "
    )
    assert "then in 5 more of 7 stages" in said.out
    assert "dump_period=1" in refused(type_command("compare-dumps", one, "nothing"))

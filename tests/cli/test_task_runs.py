"""Runs whose policy solves a task's problems: evaluated on held-out problems."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nip_astra.evaluation.storage import read_rows
from nip_astra.tracking.run_directory import RunDirectory
from tests.cli.trained_run import figures_of
from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says


@pytest.fixture
def run(task_runs: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the first run, without evaluations."""
    without = shutil.ignore_patterns("evaluations")
    return Path(shutil.copytree(task_runs[0], tmp_path / "grpo", symlinks=True, ignore=without))


def rows_of(run: Path, name: str = "test") -> list[dict[str, Any]]:
    return read_rows(run / "evaluations" / name / "problems.jsonl")


@pytest.mark.parametrize("place", [0, 1], ids=["self_hosted", "remote_api"])
def test_an_evaluation_gives_the_runs_own_figures(
    task_runs: tuple[Path, Path], place: int, cli: CommandLine
) -> None:
    path = task_runs[place]
    results = RunDirectory(path).read_json("results.json")
    assert results["before"] != results["after"]
    trained = json.loads(cli("evaluate", str(path), "--json", "--overwrite").out)
    assert trained == figures_of(path)
    result = cli("evaluate", str(path), "--untrained", "--overwrite")
    untrained = figures_of(path, "test-untrained")
    for when, evaluation in (("after", trained), ("before", untrained)):
        own = {n: v for n, v in evaluation["figures"].items() if n != "mean_reward_interval"}
        assert own == results[when]
    counts = "{num_right:,} of {num_answers:,}".format(**results["before"])
    assert any("accuracy" in line and counts in line for line in result.out.splitlines())
    (line,) = (one for one in result.out.splitlines() if "pass at 4" in one)
    assert line.split()[-1] == str(trained["figures"]["num_complete_problems"])
    page = (path / "report.html").read_text(encoding="utf-8")
    assert says(page, "test-untrained", f">{trained['figures']['mean_reward']:.3g}<")


def test_rows_hold_problems_answers_and_rewards(run: Path, cli: CommandLine) -> None:
    cli.ok("evaluate", str(run))
    figures, rows = figures_of(run)["figures"], rows_of(run)
    assert [(row["problem"], row["run"]) for row in rows] == [
        (problem, number) for problem in range(6) for number in range(4)
    ]
    assert sum(row["is_right"] for row in rows) / 24 == figures["accuracy"]
    assert rows[0]["messages"] == [["user", rows[0]["prompt"]], ["assistant", rows[0]["answer"]]]
    assert all(row["is_right"] == (row["answer"].strip() == row["solution"]) for row in rows)
    low, high = figures["mean_reward_interval"]
    assert low < figures["mean_reward"] < high


def test_rows_of_other_weights_or_of_an_unknown_evaluation_are_not_continued(
    run: Path, cli: CommandLine
) -> None:
    command = ["evaluate", str(run), "--untrained", "--num-episodes", "4"]
    cli.ok(*command)
    other = ("--set", "task.policy.language_model.dtype=bfloat16")
    assert "language_model.dtype" in refused(cli(*command, *other))
    folder = run / "evaluations" / "test-untrained"
    (folder / "configuration.json").unlink()
    (folder / "problems.jsonl").write_text("{}\n" * 16)
    cli.ok(*command)
    assert "messages" in rows_of(run, "test-untrained")[-1]


def test_a_killed_evaluation_goes_on_where_it_was(run: Path, cli: CommandLine) -> None:
    folder = run / "evaluations" / "test"
    cli.ok("evaluate", str(run))
    figures, rows = figures_of(run), (folder / "problems.jsonl").read_bytes()
    (folder / "evaluation.json").unlink()
    lines = rows.splitlines(keepends=True)
    # The first part of four problems is complete; of the second, a line and a half were written.
    marked = [lines[0].replace(b'"answer": "', b'"answer": "kept '), *lines[1:17]]
    (folder / "problems.jsonl").write_bytes(b"".join(marked) + lines[17][:30])
    cli.ok("evaluate", str(run))
    assert (folder / "problems.jsonl").read_bytes() == b"".join([marked[0], *lines[1:]])
    assert figures_of(run) == figures


def test_each_checkpoint_is_evaluated_under_its_own_name(run: Path, cli: CommandLine) -> None:
    metrics = read_rows(run / "metrics.jsonl")
    accuracies = [row["dev/accuracy"] for row in metrics if "dev/accuracy" in row]
    steps = sorted((run / "checkpoints").glob("step_*"))
    for step, accuracy in zip(steps, accuracies, strict=True):
        figures = json.loads(cli("evaluate", str(step), "--split", "dev", "--json").out)
        assert (figures["name"], figures["policy"]["checkpoint"]) == (f"dev-{step.name}", step.name)
        assert figures["figures"]["accuracy"] == accuracy
    # The complete policy in a run or checkpoint stands for it.
    for path in (run / "checkpoints" / "latest", run / "model", steps[0] / "policy"):
        cli.ok("evaluate", str(path), "--num-episodes", "2")
    evaluations = {one.name for one in (run / "evaluations").iterdir()}
    assert {"test", *(f"test-{step.name}" for step in steps)} <= evaluations


def test_a_policy_without_weights_is_refused(run: Path, cli: CommandLine) -> None:
    assert "--untrained" in refused(cli("evaluate", f"{run}/checkpoints/latest", "--untrained"))
    shutil.rmtree(run / "checkpoints")
    assert "--untrained" in refused(cli("evaluate", str(run)))
    cli.ok("evaluate", str(run), "--untrained", "--num-episodes", "2")


def test_runs_are_compared_problem_by_problem(
    task_runs: tuple[Path, Path], cli: CommandLine
) -> None:
    paths = [str(run) for run in task_runs]
    cli.ok("evaluate", *paths, "--name", "both", "--overwrite")
    first, second = (figures_of(run, "both")["figures"] for run in task_runs)
    out = cli.folder / "comparison.json"
    command = ["compare", *paths, "--out", str(out)]
    result = cli.ok(*command, "--fail-if", "comparison.accuracy.num_pairs < 6")
    assert ("mean reward" in result.out, "warning" in result.out) == (True, False)
    comparison = json.loads(out.read_text())
    assert comparison["baseline"] == "grpo/both"
    for name in ("accuracy", "mean_reward"):
        metric = comparison["comparisons"]["imitating/both"][name]
        assert metric["difference"] == pytest.approx(second[name] - first[name])
        assert metric["low"] <= metric["difference"] <= metric["high"]
        assert 0 < metric["p_value"] <= metric["p_holm"] <= 1
    condition = "accuracy.value - baseline.accuracy.value > comparison.accuracy.low"
    assert cli(*command, "--fail-if", condition).code == 1
    same = shutil.copytree(task_runs[0], cli.folder / "copies" / task_runs[0].name)
    equal = json.loads(cli("compare", paths[0], str(same), "--json").out)
    assert equal["comparisons"]["grpo/both (2)"]["accuracy"]["p_value"] == 1.0


def test_different_evaluations_are_compared_with_a_warning(run: Path, cli: CommandLine) -> None:
    same = shutil.copytree(run, run.parent / "copies" / run.name)
    assert "nip-astra evaluate" in refused(cli("compare", str(run), str(same)))
    cli.ok("evaluate", str(run))
    fewer = ["--num-episodes", "5", "--set", "task.evaluation.num_runs=1", "--name", "fewer"]
    cli.ok("evaluate", str(run), *fewer)
    cli.ok("evaluate", str(run), "--split", "dev")
    folder = run / "evaluations"
    result = cli("compare", str(folder / "test"), str(folder / "fewer"), "--json")
    warnings = json.loads(result.out)["warnings"]
    assert [text.partition(" ")[0] for text in warnings] == ["num_runs:", "without"]
    assert "problem" in refused(cli("compare", str(folder / "test"), str(folder / "dev")))


def test_other_families_are_not_compared_with_tasks(
    run: Path, trained: Path, cli: CommandLine
) -> None:
    cli.ok("evaluate", str(run), "--num-episodes", "2")
    for paths in ([str(run), str(trained)], [str(trained), str(run)]):
        assert {"task", "conversation"} <= set(refused(cli("compare", *paths)).split())
    assert "task" in refused(cli("score", str(run), "--scorer", "own"))

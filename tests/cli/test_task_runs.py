"""Runs whose policy solves a task's problems: evaluated on held-out problems."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from nip_astra.tracking.run_directory import RunDirectory
from tests.cli.trained_run import figures_of
from tests.kit.command_line import CommandLine, refused

SMALL = (
    "training.num_iterations=2",
    "training.num_episodes_per_experience=4",
    "training.minibatch_size=32",
    "training.lr=2e-3",
    "training.eval_period=1",
    "task.evaluation.num_problems=6",
    "task.evaluation.num_dev_problems=3",
    "task.evaluation.num_runs=4",
    "task.evaluation.batch_size=4",
    "task.task.levels=[1]",
)


def _run(folder: Path, name: str, trainer: str, *more: str) -> Path:
    resolved = resolve_experiment(trainer=trainer, overrides=[*SMALL, *more])
    run_experiment(resolved, runs_dir=str(folder), run_id=name, progress=False)
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs on the same task by two trainers."""
    folder = tmp_path_factory.mktemp("task_runs")
    first = _run(folder, "grpo", "self_hosted_grpo")
    return first, _run(folder, "imitating", "remote_api_cross_entropy", "training.lr=5e-4")


@pytest.fixture
def run(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the first run, without evaluations."""
    without = shutil.ignore_patterns("evaluations")
    return Path(shutil.copytree(runs[0], tmp_path / "grpo", symlinks=True, ignore=without))


def _without_interval(figures: dict[str, Any]) -> dict[str, Any]:
    """The metrics in a run's own results."""
    return {name: one for name, one in figures.items() if name != "mean_reward_interval"}


@pytest.mark.parametrize("place", [0, 1])
def test_an_evaluation_gives_the_runs_own_figures(
    runs: tuple[Path, Path], place: int, cli: CommandLine
) -> None:
    path = runs[place]
    results = RunDirectory(path).read_json("results.json")
    assert results["before"] != results["after"]
    found = json.loads(cli("evaluate", str(path), "--json", "--overwrite").out)
    assert _without_interval(found["figures"]) == results["after"]
    assert found == figures_of(path)
    said = cli("evaluate", str(path), "--untrained", "--overwrite")
    assert _without_interval(figures_of(path, "test-untrained")["figures"]) == results["before"]
    counts = "{num_right:,} of {num_answers:,}".format(**results["before"])
    assert any("accuracy" in one and counts in one for one in said.out.splitlines())
    (line,) = (one for one in said.out.splitlines() if "pass at 4" in one)
    assert line.split()[-1] == str(found["figures"]["num_complete_problems"])
    # The page is written again.
    page = (path / "report.html").read_text(encoding="utf-8")
    assert "test-untrained" in page
    told = f"{found['figures']['mean_reward']:.3g}"
    assert f'mean reward</th><td class="num"><span class="nw">{told}</span> <span' in page


def test_rows_hold_problems_answers_and_rewards(run: Path, cli: CommandLine) -> None:
    cli.ok("evaluate", str(run))
    figures = figures_of(run)["figures"]
    lines = (run / "evaluations" / "test" / "problems.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["problem"], row["run"]) for row in rows] == [
        (problem, number) for problem in range(6) for number in range(4)
    ]
    assert sum(row["is_right"] for row in rows) / 24 == figures["accuracy"]
    assert rows[0]["messages"] == [["user", rows[0]["prompt"]], ["assistant", rows[0]["answer"]]]
    assert all(row["is_right"] == (row["answer"].strip() == row["solution"]) for row in rows)
    low, high = figures["mean_reward_interval"]
    assert low < figures["mean_reward"] < high


def test_rows_of_other_weights_are_not_gone_on_with(run: Path, cli: CommandLine) -> None:
    typed = ["evaluate", str(run), "--untrained", "--num-episodes", "4"]
    cli.ok(*typed)
    other = ("--set", "task.policy.language_model.dtype=bfloat16")
    assert "language_model.dtype" in refused(cli(*typed, *other))
    rows = run / "evaluations" / "test-untrained" / "problems.jsonl"
    # Nor the rows of an unknown evaluation.
    (rows.parent / "configuration.json").unlink()
    rows.write_text("{}\n" * 16)
    cli.ok(*typed)
    assert "messages" in json.loads(rows.read_text().splitlines()[-1])


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
    again = (folder / "problems.jsonl").read_bytes()
    assert again == b"".join([marked[0], *lines[1:]])
    assert figures_of(run) == figures


def test_checkpoints_splits_and_parameters_have_evaluations_of_their_own(
    run: Path, cli: CommandLine
) -> None:
    dev = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    told = [row["dev/accuracy"] for row in dev if "dev/accuracy" in row]
    steps = sorted((run / "checkpoints").glob("step_*"))
    for step, own in zip(steps, told, strict=True):
        found = cli("evaluate", str(step), "--split", "dev", "--json")
        figures = json.loads(found.out)
        assert figures["name"] == f"dev-{step.name}"
        assert figures["policy"]["checkpoint"] == step.name
        assert figures["figures"]["accuracy"] == own
    cli.ok("evaluate", str(run / "checkpoints" / "latest"), "--num-episodes", "2")
    # The run, or a checkpoint, stands for the complete policy in it.
    for inner in (run / "model", steps[0] / "policy"):
        cli.ok("evaluate", str(inner), "--num-episodes", "2")
    made = {one.name for one in (run / "evaluations").iterdir()}
    assert {"test", *(f"test-{step.name}" for step in steps)} <= made
    typed = ["evaluate", str(run), "--num-episodes", "2", "--name", "two"]
    typed += ["--batch-size", "1", "--set", "task.evaluation.num_runs=1", "--seed", "5"]
    cli.ok(*typed)
    two = figures_of(run, "two")
    assert (two["num_problems"], two["num_runs"], two["seed"]) == (2, 1, 5)
    assert "num_runs: 1 there, 4 now" in refused(
        cli("evaluate", str(run), "--num-episodes", "2", "--name", "two")
    )


def test_an_evaluation_may_be_a_gate(run: Path, cli: CommandLine) -> None:
    typed = ["evaluate", str(run), "--num-episodes", "2"]
    cli.ok(*typed, "--fail-if", "accuracy.low > 0.999")
    assert cli(*typed, "--fail-if", "mean_reward.value < 1.1").code == 1
    cli.ok(*typed, "--fail-if", "pass_at_4.high < pass_at_1.low")
    for wrong in ("accuracy.low >", "acuracy.low > 0", "pass_at_8.low > 0"):
        refused(cli(*typed, "--name", "gated", "--fail-if", wrong))
    assert (run / "evaluations" / "test" / "problems.jsonl").exists()
    assert not (run / "evaluations" / "gated" / "problems.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "x", "--num-turns", "2"], "--target, --num-turns"),
        (["--monte-carlo-only"], "--monte-carlo-only"),
        (["--split", "all"], "dev, test, train"),
        (["--set", "training.lr=1"], "task.* and self_hosted_grpo.train_service.*"),
        (["nowhere"], "'nowhere'"),
    ],
)
def test_options_without_meaning_for_a_task_are_refused(
    runs: tuple[Path, Path], options: list[str], message: str, cli: CommandLine
) -> None:
    assert message in refused(cli("evaluate", str(runs[0]), *options))


def test_a_policy_without_weights_is_refused(run: Path, cli: CommandLine) -> None:
    said = cli("evaluate", str(run / "checkpoints" / "latest"), "--untrained")
    assert "with --untrained" in refused(said)
    shutil.rmtree(run / "checkpoints")
    assert "--untrained" in refused(cli("evaluate", str(run)))
    cli.ok("evaluate", str(run), "--untrained", "--num-episodes", "2")


def test_runs_are_compared_problem_by_problem(runs: tuple[Path, Path], cli: CommandLine) -> None:
    paths = [str(run) for run in runs]
    cli.ok("evaluate", *paths, "--name", "both", "--overwrite")
    first, second = (figures_of(run, "both")["figures"] for run in runs)
    out = cli.folder / "found.json"
    typed = ["compare", *paths, "--out", str(out)]
    said = cli.ok(*typed, "--fail-if", "comparison.accuracy.num_pairs < 6")
    assert "mean reward" in said.out
    assert "warning" not in said.out
    found = json.loads(out.read_text())
    assert found["baseline"] == "grpo/both"
    for name in ("accuracy", "mean_reward"):
        metric = found["comparisons"]["imitating/both"][name]
        assert metric["difference"] == pytest.approx(second[name] - first[name])
        assert metric["low"] <= metric["difference"] <= metric["high"]
        assert 0 < metric["p_value"] <= metric["p_holm"] <= 1
    condition = "accuracy.value - baseline.accuracy.value > comparison.accuracy.low"
    assert cli(*typed, "--fail-if", condition).code == 1
    same = shutil.copytree(runs[0], cli.folder / "copies" / runs[0].name)
    told = json.loads(cli("compare", paths[0], str(same), "--json").out)
    assert told["comparisons"]["grpo/both (2)"]["accuracy"]["p_value"] == 1.0


def test_evaluations_that_differ_are_compared_with_a_warning(run: Path, cli: CommandLine) -> None:
    same = shutil.copytree(run, run.parent / "copies" / run.name)
    assert "nip-astra evaluate" in refused(cli("compare", str(run), str(same)))
    cli.ok("evaluate", str(run))
    fewer = ["--num-episodes", "5", "--set", "task.evaluation.num_runs=1", "--name", "fewer"]
    cli.ok("evaluate", str(run), *fewer)
    cli.ok("evaluate", str(run), "--split", "dev")
    folder = run / "evaluations"
    said = cli("compare", str(folder / "test"), str(folder / "fewer"), "--json")
    warnings = json.loads(said.out)["warnings"]
    assert [one.partition(" ")[0] for one in warnings] == ["num_runs:", "without"]
    said = cli("compare", str(folder / "test"), str(folder / "dev"))
    assert "share no problem" in refused(said)


def test_other_families_are_not_compared_with_tasks(
    run: Path, trained: Path, cli: CommandLine
) -> None:
    cli.ok("evaluate", str(run), "--num-episodes", "2")
    for typed in ([str(run), str(trained)], [str(trained), str(run)]):
        said = refused(cli("compare", *typed))
        assert {"task", "conversation"} <= set(said.split())
    assert "task" in refused(cli("score", str(run), "--scorer", "own"))

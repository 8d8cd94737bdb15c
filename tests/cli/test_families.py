"""`evaluate` and `compare` for runs of every family: rules of all, tasks, and texts."""

from __future__ import annotations

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nip_astra.evaluation.storage import read_rows
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.utils.nested_array_dict import NestedArrayDict
from tests.cli.trained_run import SMALL_TEXT, figures_of, player
from tests.kit.command_line import CommandLine, refused
from tests.kit.experiments import run_in
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
    counts = "{num_correct:,} of {num_answers:,}".format(**results["before"])
    assert any("accuracy" in line and counts in line for line in result.out.splitlines())
    (line,) = (one for one in result.out.splitlines() if "pass at 4" in one)
    assert line.split()[-1] == str(trained["figures"]["num_complete_problems"])
    page = (path / "report.html").read_text(encoding="utf-8")
    assert says(page, "test-untrained", f">{trained['figures']['mean_reward']:.3g}<")


def test_rows_hold_problems_answers_and_rewards(run: Path, cli: CommandLine) -> None:
    cli.ok("evaluate", str(run))
    figures, rows = figures_of(run)["figures"], rows_of(run)
    assert [(row["problem"], row["run"]) for row in rows] == [*product(range(6), range(4))]
    assert sum(row["is_correct"] for row in rows) / 24 == figures["accuracy"]
    assert rows[0]["messages"] == [["user", rows[0]["prompt"]], ["assistant", rows[0]["answer"]]]
    assert all(row["is_correct"] == (row["answer"].strip() == row["solution"]) for row in rows)
    low, high = figures["mean_reward_interval"]
    assert low < figures["mean_reward"] < high


def test_rows_of_another_evaluation_are_not_continued(run: Path, cli: CommandLine) -> None:
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


def test_runs_are_compared_by_problem(task_runs: tuple[Path, Path], cli: CommandLine) -> None:
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


Runs = tuple[Path, Path]


def test_results_and_report_show_the_cost_of_the_models(text_runs: Runs) -> None:
    results = RunDirectory(text_runs[0]).read_json("results.json")
    use = results["services"]["players"]
    assert use["num_requests"] == results["training"]["num_requests"]
    tokens = use["prompt_tokens"], use["completion_tokens"]
    assert use["cost"] == pytest.approx((tokens[0] * 1000 + tokens[1] * 2000) / 1e6)
    lines = read_rows(text_runs[0] / "metrics.jsonl")
    costs = [line["cost/money"] for line in lines if "cost/money" in line]
    assert 0 < costs[0] < costs[-1] <= use["cost"]
    page = (text_runs[0] / "report.html").read_text(encoding="utf-8")
    assert re.search(r"players: [^<]*, the run", page)


def test_trained_agents_are_evaluated_on_held_out_data(text_runs: Runs, cli: CommandLine) -> None:
    run = text_runs[0]
    first = json.loads(cli("evaluate", str(run), "--json", "--overwrite").out)
    assert first["figures"]["mean_accuracy"] == 0.5
    assert first["figures"]["num_episodes"] == 6
    folder = run / "evaluations" / "test"
    assert NestedArrayDict.load(folder / "rollouts.json")["y"].tolist() == [0, 1] * 3
    assert "evaluation test" in (run / "report.html").read_text(encoding="utf-8")
    # A second evaluation continues the first, and repeats no request.
    again = json.loads(cli("evaluate", str(run), "--json").out)
    assert again["figures"] == first["figures"]
    assert again["services"]["players"]["num_requests"] == 18


def test_runs_are_compared_datapoint_by_datapoint(text_runs: Runs, cli: CommandLine) -> None:
    out = cli.folder / "comparison.json"
    command = ["compare", *map(str, text_runs), "--out", str(out)]
    result = cli.ok(*command, "--fail-if", "comparison.accuracy.difference < 0")
    comparison = json.loads(out.read_text())
    metrics = comparison["comparisons"]["stern"]
    # Each claim gets the opposite verdict, right for half of them before and for half now.
    accuracy = metrics["accuracy"]
    assert (accuracy["first"], accuracy["second"], accuracy["difference"]) == (0.5, 0.5, 0.0)
    assert (accuracy["only_first"], accuracy["only_second"], accuracy["p_value"]) == (3, 3, 1.0)
    assert accuracy["low"] < 0 < accuracy["high"]
    # Rejecting pays the prover nothing, and accepting always: +1 in each of six pairs.
    assert metrics["reward_of_prover"]["difference"] == -1.0
    assert metrics["reward_of_prover"]["p_value"] == pytest.approx(2 / 64, abs=0.01)
    assert "reward of prover" in result.out
    # The verifiers differ from the start; the runs are otherwise equal.
    assert {text.partition(".default")[0] for text in comparison["warnings"]} == {"models"}


def test_evaluations_by_other_options_are_warned_of(text_runs: Runs, cli: CommandLine) -> None:
    run, evaluations = str(text_runs[0]), text_runs[0] / "evaluations"
    cli.ok("evaluate", run, "--name", "seeded", "--seed", "3")
    result = json.loads(cli("compare", run, str(evaluations / "seeded"), "--json").out)
    assert [text.partition(":")[0] for text in result["warnings"]] == ["seed"]
    cli.ok("evaluate", run, "--name", "train", "--split", "train")
    assert "datapoint" in refused(cli("compare", run, str(evaluations / "train")))


def test_a_base_run_is_tested_again_with_the_same_figures(text_runs: Runs, tmp_path: Path) -> None:
    moved = shutil.copytree(text_runs[1], tmp_path / "moved")
    base = f"base_run={{run: {moved}, base_run_type: rerun_tests}}"
    again = run_in(tmp_path, resolve_experiment(overrides=[base], is_trusted=True), "again")
    after = [RunDirectory(run).read_json("results.json")["after"] for run in (text_runs[1], again)]
    assert after[0] == after[1]
    assert "After training, test data" in (again / "report.html").read_text(encoding="utf-8")


def test_a_dry_run_reports_the_price_with_the_judges_requests(cli: CommandLine) -> None:
    judge = "{analysers: [{_type: direct_quotation}], model: {_type: scripted}}"
    overrides = (player("accept"), f"secret_word.analysis={judge}", *SMALL_TEXT)
    arguments = [part for one in overrides for part in ("--set", one)]
    result = cli("--trainer", "pure_text_ei", *arguments, "--dry-run")
    estimate = {line[:28].strip(): line[28:].strip() for line in result.out.splitlines()}
    assert estimate["num judge requests"] == "12", "two tests of six rollouts"
    assert float(estimate["cost"]) > 0

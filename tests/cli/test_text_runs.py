"""Runs of chat models that play a protocol: evaluated, compared, reused, tested again, priced."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.utils.nested_array_dict import NestedArrayDict
from tests.cli.trained_run import SMALL_TEXT, player, run_text
from tests.kit.command_line import CommandLine, refused
from tests.kit.experiments import run_in

Runs = tuple[Path, Path]


def test_results_and_report_show_the_cost_of_the_models(text_runs: Runs) -> None:
    results = RunDirectory(text_runs[0]).read_json("results.json")
    use = results["services"]["players"]
    assert use["num_requests"] == results["training"]["num_requests"]
    tokens = use["prompt_tokens"], use["completion_tokens"]
    assert use["cost"] == pytest.approx((tokens[0] * 1000 + tokens[1] * 2000) / 1e6)
    lines = [json.loads(line) for line in (text_runs[0] / "metrics.jsonl").open()]
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


def test_evaluations_by_other_options_are_compared_with_a_warning(
    text_runs: Runs, cli: CommandLine
) -> None:
    run, seeded = text_runs[0], text_runs[0] / "evaluations" / "seeded"

    def warnings() -> list[str]:
        result = cli("compare", str(run), str(seeded), "--json")
        return sorted(text.partition(":")[0] for text in json.loads(result.out)["warnings"])

    cli.ok("evaluate", str(run), "--name", "seeded", "--seed", "3")
    assert warnings() == ["seed"]
    file = seeded / "evaluation.json"
    file.write_text(file.read_text().replace('"split": "test"', '"split": "train"'))
    assert warnings() == ["seed", "split"]


def test_runs_on_other_data_cannot_be_paired(
    text_runs: Runs, tmp_path: Path, cli: CommandLine
) -> None:
    other = run_text(tmp_path, "other", "accept", "seed=5")
    assert "datapoint" in refused(cli("compare", str(text_runs[0]), str(other)))


def test_a_base_run_is_tested_again_with_the_same_figures(text_runs: Runs, tmp_path: Path) -> None:
    moved = shutil.copytree(text_runs[1], tmp_path / "moved")
    base = f"base_run={{run: {moved}, base_run_type: rerun_tests}}"
    again = run_in(tmp_path, resolve_experiment(overrides=[base], is_trusted=True), "again")
    after = [RunDirectory(run).read_json("results.json")["after"] for run in (text_runs[1], again)]
    assert after[0] == after[1]
    assert "After training, test data" in (again / "report.html").read_text(encoding="utf-8")


def test_a_run_takes_the_parameters_of_a_base_run(text_runs: Runs, tmp_path: Path) -> None:
    base = f"base_run={{run: {text_runs[1]}, base_run_type: parameters}}"
    resolved = resolve_experiment(overrides=[base, "secret_word.num_test=4"])
    after = RunDirectory(run_in(tmp_path, resolved)).read_json("results.json")["after"]
    assert (after["num_episodes"], after["mean_decision"]) == (4, 0.0)


def test_a_dry_run_reports_the_price_with_the_judges_requests(cli: CommandLine) -> None:
    judge = "{analysers: [{_type: direct_quotation}], model: {_type: scripted}}"
    overrides = (player("accept"), f"secret_word.analysis={judge}", *SMALL_TEXT)
    arguments = [part for one in overrides for part in ("--set", one)]
    result = cli("--trainer", "pure_text_ei", *arguments, "--dry-run")
    estimate = {line[:28].strip(): line[28:].strip() for line in result.out.splitlines()}
    assert estimate["num judge requests"] == "12", "two tests of six rollouts"
    assert float(estimate["cost"]) > 0

"""Runs of chat models that play a protocol: evaluated, compared, reused, tested again, priced."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from nip_astra.scenario_base.text.models import models_of_run
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.utils.nested_array_dict import NestedArrayDict
from tests.kit.command_line import CommandLine, refused

HONEST = "{_type: scripted, when: {'Now decide': ['Decision: accept']}, answers: ['the word?'],"
PRICES = " prices: {prompt: 1000.0, completion: 2000.0}}"
STERN = HONEST.replace("accept", "reject")
SMALL = (
    "secret_word.agents.default.freeze_agent=true",
    "text_rl.num_iterations=2",
    "text_rl.rollouts_per_iteration=4",
    "secret_word.num_test=6",
)


def _run(folder: Path, name: str, player: str, *more: str) -> Path:
    overrides: Sequence[str] = [f"secret_word.agents.default.model={player}", *SMALL, *more]
    resolved = resolve_experiment(trainer="pure_text_ei", overrides=list(overrides))
    run_experiment(resolved, runs_dir=str(folder), run_id=name, progress=False)
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run whose verifier accepts every claim, and a run whose verifier rejects every claim."""
    folder = tmp_path_factory.mktemp("text_runs")
    return _run(folder, "kind", HONEST + PRICES), _run(folder, "stern", STERN + PRICES)


def test_results_and_report_show_the_cost_of_the_models(runs: tuple[Path, Path]) -> None:
    results = RunDirectory(runs[0]).read_json("results.json")
    use = results["services"]["players"]
    training = results["training"]
    assert use["num_requests"] == training["num_requests"]
    tokens = use["prompt_tokens"], use["completion_tokens"]
    assert use["cost"] == pytest.approx((tokens[0] * 1000 + tokens[1] * 2000) / 1e6)
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").open()]
    costs = [line["cost/money"] for line in lines if "cost/money" in line]
    assert 0 < costs[0] < costs[-1] <= use["cost"]
    page = (runs[0] / "report.html").read_text(encoding="utf-8")
    assert re.search(r"players: [^<]*, the run", page)


def test_trained_agents_are_evaluated_on_held_out_data(
    runs: tuple[Path, Path], cli: CommandLine
) -> None:
    said = cli("evaluate", str(runs[0]), "--json", "--overwrite")
    figures = json.loads(said.out)
    assert figures["figures"]["mean_accuracy"] == 0.5
    assert figures["figures"]["num_episodes"] == 6
    folder = runs[0] / "evaluations" / "test"
    assert NestedArrayDict.load(folder / "rollouts.json")["y"].tolist() == [0, 1] * 3
    page = (runs[0] / "report.html").read_text(encoding="utf-8")
    assert "evaluation test" in page
    # A second evaluation continues the first, and repeats no request.
    again = json.loads(cli("evaluate", str(runs[0]), "--json").out)
    assert again["figures"] == figures["figures"]
    assert again["services"]["players"]["num_requests"] == 18
    said = cli("evaluate", str(runs[0]), "--num-episodes", "2")
    assert "num_episodes: null there, 2 now" in refused(said)


def test_an_evaluation_may_be_a_gate(runs: tuple[Path, Path], cli: CommandLine) -> None:
    typed = ["evaluate", str(runs[0]), "--name", "gate", "--num-episodes", "4", "--seed", "3"]
    cli.ok(*typed, "--fail-if", "accuracy.low > 0.9")
    assert cli(*typed, "--fail-if", "verifier.mean_episode_reward < 0.9").code == 1
    cli.ok(*typed, "--untrained", "--overwrite")
    for wrong in ("accuracy.low >", "acuracy.low > 0", "verifer.mean_episode_reward > 0"):
        refused(cli("evaluate", str(runs[0]), "--name", "early", "--fail-if", wrong))
    assert not (runs[0] / "evaluations" / "early" / "answers.jsonl").exists()


def test_options_about_attackers_are_refused(runs: tuple[Path, Path], cli: CommandLine) -> None:
    said = cli("evaluate", str(runs[0]), "--target", "x", "--num-turns", "2")
    assert refused(said).startswith("--target, --num-turns ")
    said = cli("evaluate", str(runs[0]), "--monte-carlo-only", "--column", "x")
    assert refused(said).startswith("--monte-carlo-only, --column ")
    said = cli("evaluate", str(runs[0]), str(runs[0].parent))
    assert f"{runs[0].parent} a conversation run" in refused(said)
    said = cli("evaluate", str(runs[0]), "--split", "dev")
    assert "test, train" in refused(said)
    said = cli("evaluate", str(runs[0]), "--name", "many", "--num-episodes", "7")
    assert "(--num-episodes) is 7, but the test data has 6" in refused(said)


def test_runs_are_compared_datapoint_by_datapoint(
    runs: tuple[Path, Path], cli: CommandLine
) -> None:
    out = cli.folder / "found.json"
    typed = ["compare", *map(str, runs), "--out", str(out)]
    said = cli.ok(*typed, "--fail-if", "comparison.accuracy.difference < 0")
    found = json.loads(out.read_text())["comparisons"]["stern"]
    # Each claim gets the opposite verdict, right for half of them before and for half now.
    accuracy = found["accuracy"]
    assert (accuracy["first"], accuracy["second"], accuracy["difference"]) == (0.5, 0.5, 0.0)
    assert (accuracy["only_first"], accuracy["only_second"], accuracy["p_value"]) == (3, 3, 1.0)
    assert accuracy["low"] < 0 < accuracy["high"]
    # Rejecting pays the prover nothing, and accepting always: +1 in each of six pairs.
    assert found["reward_of_prover"]["difference"] == -1.0
    assert found["reward_of_prover"]["p_value"] == pytest.approx(2 / 64, abs=0.01)
    assert "reward of prover" in said.out
    # The verifiers differ from the start; the runs are otherwise equal.
    warnings = json.loads(out.read_text())["warnings"]
    assert warnings
    assert all(text.startswith("models.default") for text in warnings)
    named = ["--name", "seeded", "--seed", "3"]
    cli.ok("evaluate", str(runs[0]), *named)
    again = cli("compare", str(runs[0]), str(runs[0] / "evaluations/seeded"), "--json")
    (warning,) = json.loads(again.out)["warnings"]
    assert warning.startswith("seed: 0 in kind, 3 in kind/seeded")
    other = runs[0] / "evaluations" / "seeded" / "evaluation.json"
    other.write_text(other.read_text().replace('"split": "test"', '"split": "train"'))
    again = cli("compare", str(runs[0]), str(other.parent), "--json")
    assert sorted(text.partition(":")[0] for text in json.loads(again.out)["warnings"]) == [
        "seed",
        "split",
    ]


def test_runs_on_other_data_cannot_be_paired(
    runs: tuple[Path, Path], tmp_path: Path, cli: CommandLine
) -> None:
    other = _run(tmp_path, "other", HONEST + PRICES, "seed=5")
    said = cli("compare", str(runs[0]), str(other))
    assert "share no datapoint" in refused(said)


def test_a_base_run_is_tested_again_with_the_same_figures(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(runs[1], moved)
    resolved = resolve_experiment(
        overrides=[f"base_run.run={moved}", "base_run.base_run_type=rerun_tests"],
        is_trusted=True,
    )
    again = run_experiment(resolved, runs_dir=str(tmp_path), run_id="again", progress=False)
    before = RunDirectory(runs[1]).read_json("results.json")["after"]
    assert again.results["after"] == before
    page = (tmp_path / "again" / "report.html").read_text(encoding="utf-8")
    assert "After training, test data" in page


def test_a_run_takes_the_parameters_of_a_base_run(runs: tuple[Path, Path], tmp_path: Path) -> None:
    overrides = [f"base_run.run={runs[1]}", "base_run.base_run_type=parameters"]
    resolved = resolve_experiment(overrides=[*overrides, "secret_word.num_test=4"])
    new = run_experiment(resolved, runs_dir=str(tmp_path), run_id="new", progress=False)
    assert new.results["after"]["num_episodes"] == 4
    assert new.results["after"]["mean_decision"] == 0.0


def test_a_model_is_found_where_its_run_was_moved(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "here")
    (run.path / "jobs" / "job-1" / "model").mkdir(parents=True)
    state = {"pending": None, "jobs": ["job-1"]}
    models = {
        "moved": state | {"model": "/elsewhere/runs/there/jobs/job-1/model"},
        "hosted": state | {"model": "ft:gpt-4o-mini:1"},
        "lost": state | {"model": "/elsewhere/jobs/job-9/model"},
        "first": state | {"model": None},
    }
    run.write_json("results.json", {"groups": models})
    found = {name: one["model"] for name, one in models_of_run(run.path).items()}
    assert found == {
        "moved": str(run.path.resolve() / "jobs" / "job-1" / "model"),
        "hosted": "ft:gpt-4o-mini:1",
        "lost": "/elsewhere/jobs/job-9/model",
        "first": None,
    }


def test_a_dry_run_reports_the_price_with_the_judges_requests(cli: CommandLine) -> None:
    judge = "{analysers: [{_type: direct_quotation}], model: {_type: scripted}}"
    sets = [
        *(f"secret_word.agents.default.model={HONEST}{PRICES}", f"secret_word.analysis={judge}"),
        *SMALL,
    ]
    typed = [part for one in sets for part in ("--set", one)]
    said = cli("--trainer", "pure_text_ei", *typed, "--dry-run")
    told = {line[:28].strip(): line[28:].strip() for line in said.out.splitlines()}
    assert told["num judge requests"] == "12", "two tests of six rollouts"
    assert float(told["cost"]) > 0

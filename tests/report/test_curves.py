"""Tests of learning curves of several runs."""

from __future__ import annotations

from pathlib import Path

from nip_astra.report.charts import (
    charts_of,
    group_runs,
    metric_rows,
    parameter_differences,
    run_label,
)
from nip_astra.report.records import RunRecord, read_run
from tests.report.runs import metrics, write_run


def runs(tmp_path: Path, *changes: dict) -> list[RunRecord]:
    return [
        read_run(write_run(tmp_path / str(number), **change))
        for number, change in enumerate(changes)
    ]


def test_runs_that_differ_in_the_seed_share_a_colour(tmp_path: Path) -> None:
    other = {"parameters": {"lr": 0.1}}
    groups = group_runs(runs(tmp_path, {"seed": 0}, {"seed": 1}, other))
    assert [len(group.runs) for group in groups] == [2, 1]
    assert [group.name for group in groups] == ["A", "B"]
    assert groups[0].color != groups[1].color
    assert groups[1].label == "ast_dpo · lr 0.1"
    assert [run_label(run, groups[0]) for run in groups[0].runs] == ["A, seed 0", "A, seed 1"]


def test_the_same_run_twice_is_told_apart_by_its_id(tmp_path: Path) -> None:
    (group,) = group_runs(runs(tmp_path, {}, {}))
    assert [run_label(run, group) for run in group.runs] == ["0", "1"]


def test_runs_without_readable_parameters_do_not_share_a_group(tmp_path: Path) -> None:
    both = runs(tmp_path, {}, {})
    for run in both:
        run.hyper_params = {}
    assert len(group_runs(both)) == 2


def test_seeds_are_overlaid_with_their_mean_and_range(tmp_path: Path) -> None:
    low = {"seed": 0, "metrics": metrics(mean_reward=1.0)}
    high = {"seed": 1, "metrics": metrics(mean_reward=3.0)}
    charts = {chart.title: chart for chart in charts_of(group_runs(runs(tmp_path, low, high)))}
    reward = charts["Reward"]
    assert [drawn.line.is_thin for drawn in reward.lines] == [True, True, False]
    assert [y for _, y in reward.lines[2].line.points] == [2.0] * 4
    assert len(reward.bands) == 1


def test_a_mean_stands_only_where_every_seed_has_a_value(tmp_path: Path) -> None:
    short = {"seed": 1, "metrics": metrics(2)}
    charts = charts_of(group_runs(runs(tmp_path, {"seed": 0}, short)))
    assert [x for x, _ in charts[0].lines[-1].line.points] == [1, 2]


def test_every_metric_and_timing_has_a_row(tmp_path: Path) -> None:
    rows = metric_rows(group_runs(runs(tmp_path, {})))
    assert [row.name for row in rows] == ["failure_rate", "loss", "time/collect_seconds"]
    assert (rows[0].first, rows[0].last) == ("0.1", "0.4")


def test_only_parameters_that_differ_are_listed(tmp_path: Path) -> None:
    both = runs(tmp_path, {"seed": 0}, {"seed": 1, "parameters": {"beta": 0.1}})
    assert parameter_differences(both) == [("seed", ["0", "1"]), ("training.beta", ["", "0.1"])]


def test_held_out_accuracy_has_its_interval_as_area(tmp_path: Path) -> None:
    results = {"kind": "task", "training": {"num_iterations": 9}}
    for part, share in (("before", 0.25), ("after", 0.75)):
        results[part] = {"accuracy": share, "accuracy_interval": [share - 0.1, share + 0.1]}
    dev = [{"step": 3, "dev/accuracy": 0.5, "dev/accuracy_low": 0.3, "dev/accuracy_high": 0.6}]
    for name, rows, points in (
        ("test", metrics(3), [(0.0, 0.25), (9.0, 0.75)]),
        ("dev", [*metrics(3), *dev], [(3.0, 0.5)]),
    ):
        (run,) = runs(tmp_path / name, {"metrics": rows, "results": results})
        charts = {chart.title: chart for chart in charts_of(group_runs([run]))}
        held_out = charts["Right answers, held out"]
        assert list(held_out.lines[0].line.points) == points
        assert len(held_out.bands) == 1


def test_numbers_of_a_long_run_are_read_without_loss(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": step / 7, "odd": None} for step in range(1, 301)]
    (run,) = runs(tmp_path, {"metrics": rows})
    assert run.metrics.points("loss") == [(row["step"], row["loss"]) for row in rows]
    assert run.metrics.points("odd")[-1] == (300.0, None)
    assert (run.metrics.known("odd"), run.metrics.points("nothing")) == ([], [])

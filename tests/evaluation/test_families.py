"""The same evaluation, comparison and exporter for every family of runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nip_astra as na
from nip_astra.errors import DataError, RunDirectoryError
from nip_astra.evaluation.api import Matrix, locate
from nip_astra.evaluation.exports import Material, write_parquet_file
from nip_astra.experiment_settings import ExperimentSettings
from tests.kit.command_line import plugins_forgotten_after
from tests.kit.experiments import run_in
from tests.kit.resuming import short_experiment

HONEST = "{_type: scripted, when: {'Now decide': ['Decision: accept']}, answers: ['the word?']}"
DEFAULT = "secret_word.agents.default"
RUNS: dict[str, tuple[str, ...]] = {
    "protocol": ("vanilla_ppo",),
    "text_protocol": (
        *("pure_text_ei", f"{DEFAULT}.model={HONEST}", f"{DEFAULT}.freeze_agent=true"),
    ),
    "task": ("self_hosted_grpo",),
    "conversation": ("ast_dpo",),
}
"""A trainer of each family, with overrides."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a finished run of each family, under its family's name."""
    folder = tmp_path_factory.mktemp("families")
    with plugins_forgotten_after():
        for name, (trainer, *overrides) in RUNS.items():
            resolved = short_experiment(
                trainer, folder / "made" / name, *overrides, num_iterations=1
            )
            run_in(folder, resolved, name)
        yield folder


@pytest.mark.parametrize("family", RUNS)
def test_runs_are_evaluated_compared_and_exported_by_their_id(family: str, runs: Path) -> None:
    settings = {"runs_dir": str(runs)}
    options: dict[str, Any] = {"settings": settings, "progress": False}
    if family == "conversation":
        options |= {"num_episodes": 4, "probability_episodes": 0}
    trained = na.evaluate(family, **options)
    before = na.evaluate(family, untrained=True, name="before", **options)
    assert isinstance(trained, na.Evaluation)
    assert trained.family.name == family
    assert (len(trained.to_frame()), trained.run) == (len(trained.rows), runs / family)
    assert trained._repr_html_().startswith("<pre>")
    result = na.compare(f"{family}/evaluations/before", trained.path, settings=settings)
    metrics = result.comparisons[trained.label]
    units = len({json.dumps(row, sort_keys=True) for row in trained.rows})
    assert 0 < metrics["num_pairs"] <= units
    assert set(result.to_frame()["metric"]) == {k for k, v in metrics.items() if k != "num_pairs"}
    assert result.values(trained.label)["baseline"] == before.values
    for form in ("csv", "jsonl", "parquet"):
        files = na.export(trained.path, form, runs / "out" / family, settings=settings)
        assert all(file.stat().st_size for file in files)
    several = na.evaluate([family], **options)
    assert isinstance(several, Matrix)
    assert [item.figures for item in several] == [trained.figures]


@pytest.mark.parametrize(
    ("family", "file", "changes"),
    [
        ("protocol", "episode_rows.jsonl", {"rewards": "high"}),
        ("protocol", "episode_rows.jsonl", {"datapoint_id": []}),
        ("text_protocol", "evaluation.json", {"agents": 3, "figures": None}),
        ("task", "problems.jsonl", {"is_correct": "yes"}),
        ("conversation", "rows.jsonl", {"depth": None}),
        ("conversation", "rows.jsonl", {"response_score": "high"}),
        ("text_protocol", "hyper_parameters.yaml", {}),
    ],
)
def test_stored_values_of_a_wrong_type_are_an_error(
    family: str, file: str, changes: dict[str, Any], runs: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / family, tmp_path / family)
    compared = run / "evaluations" / "test" if changes else run
    path = compared / file
    is_table = path.suffix == ".jsonl"
    first, *others = path.read_text().splitlines() if is_table else [path.read_text()]
    changed = json.dumps(json.loads(first) | changes) if changes else ""
    path.write_text("\n".join([changed, *others, ""]))
    with pytest.raises((DataError, RunDirectoryError)):
        na.compare(runs / family / "evaluations" / "before", compared)


def test_columns_that_parquet_has_no_type_for_are_json(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"a": 1, "b": {}, "c": "\ud800", "d": 1}, {"a": "x", "b": {}, "d": 0.5}]
    write_parquet_file(rows, tmp_path / "rows.parquet")
    first, second = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert first == {"a": "1", "b": "{}", "c": '"\\ud800"', "d": 1.0}
    assert second == {"a": '"x"', "b": "{}", "c": None, "d": 0.5}


def test_networks_are_tested_again_with_the_figures_of_their_run(runs: Path) -> None:
    result = na.evaluate(runs / "protocol", name="again", progress=False)
    assert isinstance(result, na.Evaluation)
    after = json.loads((runs / "protocol" / "results.json").read_text())["after"]
    assert {name: result.figures["figures"][name] for name in after} == after
    assert result.values["accuracy"]["value"] == after["mean_accuracy"]
    undecided = [row for row in result.rows if row["decision"] is None]
    assert result.figures["figures"].get("num_undecided", 0) == len(undecided)
    page = (runs / "protocol" / "report.html").read_text(encoding="utf-8")
    assert "evaluation again" in page


def test_options_without_effect_and_runs_of_two_families_are_refused(runs: Path) -> None:
    for options in ({"targets": "x"}, {"threshold": 0.5}, {"split": "dev"}):
        with pytest.raises(na.NipAstraError):
            na.evaluate(runs / "protocol", **options)
    for call in (na.evaluate, na.compare):
        with pytest.raises(na.ConfigurationError, match="text_protocol"):
            call([runs / "protocol", runs / "text_protocol"])
    settings = ExperimentSettings(runs_dir=str(runs))
    with pytest.raises(na.NipAstraError, match="'nowhere'"):
        na.evaluate("nowhere", settings=settings)
    assert locate("task/checkpoints/latest", settings) == runs / "task" / "checkpoints" / "latest"


@pytest.mark.usefixtures("no_plugins_left")
def test_a_format_of_a_plug_in_writes_any_family(runs: Path, tmp_path: Path) -> None:
    @na.register_export_format("count")
    def write_count(material: Material, folder: Path) -> list[Path]:
        (folder / "count.txt").write_text(f"{material.run_id} {len(material.rows)}")
        return [folder / "count.txt"]

    (file,) = na.export(runs / "text_protocol", "count", tmp_path)
    assert file.read_text().startswith("text_protocol ")
    with pytest.raises(na.UnknownNameError, match="count"):
        na.export(runs / "text_protocol", "cuont", tmp_path)


@pytest.mark.usefixtures("no_plugins_left")
def test_a_metric_of_a_plug_in_is_compared(runs: Path, tmp_path: Path) -> None:
    @na.register_metric("answer_length")
    def answer_length(unit: dict[str, Any]) -> float:
        return float(sum(len(turn["answer"]) for turn in unit["turns"]))

    again = shutil.copytree(runs / "text_protocol", runs / "again" / "text_protocol")
    result = na.compare(runs / "text_protocol", again).comparisons["text_protocol (2)"]
    assert result["answer_length"]["first"] > 0
    assert result["answer_length"]["difference"] == 0.0
    na.register_metric("no_such_column")(lambda unit: unit["nothing"])
    with pytest.raises(DataError, match="no_such_column"):
        na.compare(runs / "text_protocol", again)

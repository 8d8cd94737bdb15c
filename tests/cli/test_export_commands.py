"""Exports in the formats of other tools."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from nip_astra.evaluation.exports import Material, write_csv, write_jsonl
from nip_astra.evaluation.storage import Row, read_rows
from nip_astra.safe_text import safe_text
from tests.cli.trained_run import figures_of
from tests.evaluation.rows_by_hand import episode, judged
from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says


def stored(run: Path) -> list[Row]:
    return read_rows(run / "evaluations" / "test" / "rows.jsonl")


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def path_of(request: pytest.FixtureRequest, runs: str) -> Path:
    """The run of a fixture, or the first of its runs."""
    given: Any = request.getfixturevalue(runs)
    return Path(given[0] if isinstance(given, tuple) else given)


def test_csv_holds_turns_figures_and_metrics(
    cli: CommandLine, evaluated: Path, closed_bars: dict[str, tuple[int, int]]
) -> None:
    result = cli.ok("export", "runs/one", "--format", "csv")
    assert "Exporting csv" in closed_bars
    folder = evaluated / "exports"
    names = [f"runs/one/exports/{name}.csv" for name in ("turns", "figures", "metrics")]
    assert result.out.split()[1::2] == names
    turns = table(folder / "turns.csv")
    assert [row["response"] for row in turns] == [row["response"] for row in stored(evaluated)]
    assert {row["outcome"] for row in turns} <= {"failure", "none"}
    figures = {row["figure"]: row["value"] for row in table(folder / "figures.csv")}
    rate = figures_of(evaluated)["failure_rate"]["value"]
    assert float(figures["failure_rate.value"]) == pytest.approx(rate)
    assert figures["cards.0.role"] == "attacker"
    assert len(table(folder / "metrics.csv")) == 2


def test_json_lines_hold_the_run_each_turn_and_an_end(cli: CommandLine, evaluated: Path) -> None:
    cli.ok("export", "runs/one/evaluations/test", "--format", "jsonl", "--output", "out")
    head, *nodes, end = map(json.loads, (cli.folder / "out" / "turns.jsonl").open())
    assert (head["type"], head["run"]) == ("run", "one")
    assert head["hyper_parameters"]["trainer"] == "ast_dpo"
    assert end == {"v": 1, "type": "end", "num_nodes": len(nodes)}
    rows = stored(evaluated)
    assert [node["probe"] for node in nodes] == [row["probe"] for row in rows]
    names = {node["node"] for node in nodes}
    assert len(names) == len(nodes)
    assert all(node["parent"] in names for node in nodes if node["turn"] > 1)
    assert [n["scores"]["classifier"] for n in nodes] == [r["response_score"] for r in rows]
    assert nodes[0]["logp"]["reference"] == rows[0]["reference_logprob"]
    assert nodes[0]["models"]["target"].startswith("sha256:")


def test_the_hit_log_holds_only_failing_turns_with_their_context(
    cli: CommandLine, evaluated: Path
) -> None:
    cli.ok("export", "runs/one", "--format", "hitlog")
    hits = read_rows(evaluated / "exports" / "hitlog.jsonl")
    failing = [row for row in stored(evaluated) if row["response_score"] >= 0.5]
    assert failing
    for hit, row in zip(hits, failing, strict=True):
        turns = hit["prompt"]["turns"]
        assert hit["output"] == row["response"]
        assert turns[0] == {"role": "assistant", "content": row["prompt"]}
        assert turns[-1] == {"role": "user", "content": row["probe"]}
        assert len(turns) == 2 + 2 * row["depth"]


@pytest.mark.parametrize(
    ("runs", "form", "module", "extra"),
    [
        ("trained", "tensorboard", "torch.utils.tensorboard", "tensorboard"),
        ("trained", "inspect", "inspect_ai", "inspect"),
        ("text_runs", "inspect", "inspect_ai", "inspect"),
        ("text_runs", "parquet", "pyarrow", "sweep"),
    ],
)
def test_without_its_package_an_export_names_the_package_to_install(
    cli: CommandLine, request: Any, monkeypatch: Any, runs: str, form: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    message = refused(cli("export", str(path_of(request, runs)), "--format", form))
    assert says(message, "pip install 'nip_astra", module.partition(".")[0], f"[{extra}]")


@pytest.mark.parametrize(
    ("runs", "curve", "figures"),
    [
        ("evaluated", "loss", {"evaluation/test/failure_rate"}),
        ("task_runs", "rollout/reward_mean", set()),
        ("text_runs", "mean_accuracy", {"evaluation/kind/accuracy"}),
    ],
)
def test_tensorboard_reads_the_curves_and_figures(
    cli: CommandLine, request: pytest.FixtureRequest, runs: str, curve: str, figures: set[str]
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = path_of(request, runs)
    for _ in range(2):
        cli.ok("export", str(run), "--format", "tensorboard", "--output", "out")
    (file,) = (cli.folder / "out" / "tensorboard" / run.name).iterdir()
    events = EventAccumulator(str(file))
    events.Reload()
    metrics = [row for row in read_rows(run / "metrics.jsonl") if curve in row]
    values = [(event.step, event.value) for event in events.Scalars(curve)]
    assert values == [(row["step"], pytest.approx(row[curve])) for row in metrics]
    assert figures <= set(events.Tags()["scalars"])


def test_inspect_reads_the_conversations(cli: CommandLine, evaluated: Path) -> None:
    log = pytest.importorskip("inspect_ai.log")
    cli.ok("export", "runs/one", "--format", "inspect")
    read = log.read_eval_log(str(evaluated / "exports" / "test.eval"))
    assert (read.status, len(read.samples)) == ("success", 6)
    rows = [row for row in stored(evaluated) if row["episode"] == 0]
    texts = [message.text for message in read.samples[0].messages]
    assert texts == [rows[0]["prompt"], *(r[n] for r in rows for n in ("probe", "response"))]
    worst = max(row["response_score"] for row in rows)
    assert read.samples[0].scores["classifier"].value == pytest.approx(worst)


def test_what_cannot_be_exported_is_refused(cli: CommandLine, run: Path) -> None:
    assert says(refused(cli("export", "runs/one", "--format", "cvs")), "'cvs'", "'csv'?")
    assert "'runs/two'" in refused(cli("export", "runs/two", "--format", "csv"))
    result = cli("export", "runs/one")
    assert (result.code, "--format" in result.err) == (2, True)
    file = cli.write("file", "")
    for form in ("csv", "inspect"):
        result = cli("export", "runs/one", "--format", form, "--output", f"{file}/out")
        assert says(refused(result), f"{file}/out", "--output")
    # A run that was not evaluated is exported from its own table.
    cli.ok("export", "runs/one", "--format", "csv")
    assert not (run / "exports" / "figures.csv").exists()
    assert len(table(run / "exports" / "turns.csv")) == 12
    (run / "rollouts" / "evaluation.jsonl").unlink()
    assert "nip-astra evaluate" in refused(cli("export", "runs/one", "--format", "csv"))


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_a_spreadsheet_does_not_take_text_for_a_formula(start: str, tmp_path: Path) -> None:
    turns = episode(0, [0.9], prompt="well = yes", response=[f"{start}1+1"], reward=[-0.5])
    rows = [row for chain in judged(turns) for row in chain]
    material = Material("one", "test", "", rows=rows, tables={"turns": rows})
    write_csv(material, tmp_path)
    (turn,) = table(tmp_path / "turns.csv")
    assert turn["response"] == f"'{safe_text(start)}1+1"
    assert (turn["prompt"], turn["reward"]) == ("well = yes", "-0.5")
    write_jsonl(material, tmp_path)
    lines = (tmp_path / "turns.jsonl").read_text().split("\n")
    assert json.loads(lines[1])["response"] == f"{start}1+1"


def test_a_task_run_gives_its_curves_and_no_conversations(
    cli: CommandLine, task_runs: tuple[Path, Path]
) -> None:
    run = shutil.copytree(task_runs[0], cli.folder / "runs" / "one", symlinks=True)
    cli.ok("export", "runs/one", "--format", "csv", "--output", "out")
    curves = table(cli.folder / "out" / "metrics.csv")
    assert [row["step"] for row in curves] == ["1", "2"]
    assert "rollout/reward_mean" in curves[0]
    figures = {row["figure"] for row in table(cli.folder / "out" / "figures.csv")}
    assert {"before.accuracy", "after.accuracy"} <= figures
    for form in ("jsonl", "hitlog", "inspect", "parquet"):
        result = cli("export", "runs/one", "--format", form)
        assert "csv or tensorboard" in refused(result), form
    assert "task" in refused(cli("score", "runs/one", "--scorer", "profanity"))
    # A killed run has neither results nor final rollouts.
    (run / "results.json").unlink()
    (run / "rollouts" / "evaluation.jsonl").unlink()
    cli.ok("export", "runs/one", "--format", "csv", "--output", "killed")
    assert (cli.folder / "killed" / "metrics.csv").is_file()

"""Exports in the formats of other tools."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from nip_astra.evaluation.exports import Material, write_csv, write_jsonl
from nip_astra.evaluation.storage import Row, read_rows
from nip_astra.safe_text import safe_text
from tests.cli.trained_run import figures_of
from tests.evaluation.rows_by_hand import episode, judged
from tests.kit.command_line import CommandLine, refused

FEW = ("--num-episodes", "6", "--probability-episodes", "0")


def stored(run: Path) -> list[Row]:
    return read_rows(run / "evaluations" / "test" / "rows.jsonl")


@pytest.fixture
def evaluated(cli: CommandLine, run: Path) -> Path:
    cli.ok("evaluate", "runs/one", *FEW)
    return run


def test_csv_holds_turns_figures_and_metrics(
    cli: CommandLine, evaluated: Path, closed_bars: dict[str, tuple[int, int]]
) -> None:
    said = cli.ok("export", "runs/one", "--format", "csv")
    assert "Exporting csv" in closed_bars
    folder = evaluated / "exports"
    assert said.out.split()[1::2] == [
        f"runs/one/exports/{name}.csv" for name in ("turns", "figures", "metrics")
    ]
    turns = list(csv.DictReader((folder / "turns.csv").open(newline="")))
    assert [row["response"] for row in turns] == [row["response"] for row in stored(evaluated)]
    assert {row["outcome"] for row in turns} <= {"failure", "none"}
    figures = {r["figure"]: r["value"] for r in csv.DictReader((folder / "figures.csv").open())}
    told = figures_of(evaluated)["failure_rate"]["value"]
    assert float(figures["failure_rate.value"]) == pytest.approx(told)
    assert figures["cards.0.role"] == "attacker"
    assert len(list(csv.DictReader((folder / "metrics.csv").open()))) == 2


def test_json_lines_hold_the_run_each_turn_and_an_end(cli: CommandLine, evaluated: Path) -> None:
    cli.ok("export", "runs/one/evaluations/test", "--format", "jsonl", "--output", "out")
    head, *nodes, end = map(json.loads, (cli.folder / "out" / "turns.jsonl").open())
    assert (head["type"], head["run"], head["hyper_parameters"]["trainer"]) == (
        "run", "one", "ast_dpo",
    )  # fmt: skip
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
    hits = [json.loads(line) for line in (evaluated / "exports" / "hitlog.jsonl").open()]
    failing = [row for row in stored(evaluated) if row["response_score"] >= 0.5]
    assert [hit["output"] for hit in hits] == [row["response"] for row in failing]
    assert hits
    for hit, row in zip(hits, failing, strict=True):
        turns = hit["prompt"]["turns"]
        assert turns[0] == {"role": "assistant", "content": row["prompt"]}
        assert turns[-1] == {"role": "user", "content": row["probe"]}
        assert len(turns) == 2 + 2 * row["depth"]


def test_a_run_that_was_not_evaluated_is_exported_from_its_own_table(
    cli: CommandLine, run: Path
) -> None:
    cli.ok("export", "runs/one", "--format", "csv")
    assert not (run / "exports" / "figures.csv").exists()
    turns = list(csv.DictReader((run / "exports" / "turns.csv").open(newline="")))
    assert len(turns) == 12


@pytest.mark.parametrize(
    ("form", "module", "package"),
    [
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
        ("inspect", "inspect_ai", "inspect_ai"),
    ],
)
def test_without_its_package_an_export_names_the_package_to_install(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch,
    form: str, module: str, package: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)
    message = refused(cli("export", "runs/one", "--format", form))
    assert package in message
    assert f"pip install 'nip_astra[{form}]'" in message


def test_tensorboard_reads_the_curves(cli: CommandLine, evaluated: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):
        cli.ok("export", "runs/one", "--format", "tensorboard")
    (file,) = (evaluated / "exports" / "tensorboard" / "one").iterdir()
    events = EventAccumulator(str(file))
    events.Reload()
    metrics = [json.loads(line) for line in (evaluated / "metrics.jsonl").open()]
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(row["step"], pytest.approx(row["loss"])) for row in metrics]
    assert len(events.Scalars("evaluation/test/failure_rate")) == 1


def test_inspect_reads_the_conversations(cli: CommandLine, evaluated: Path) -> None:
    pytest.importorskip("inspect_ai")
    from inspect_ai.log import read_eval_log

    cli.ok("export", "runs/one", "--format", "inspect")
    log = read_eval_log(str(evaluated / "exports" / "test.eval"))
    assert (log.status, len(log.samples)) == ("success", 6)
    rows = [row for row in stored(evaluated) if row["episode"] == 0]
    said = [message.text for message in log.samples[0].messages]
    assert said == [rows[0]["prompt"], *(r[n] for r in rows for n in ("probe", "response"))]
    worst = max(row["response_score"] for row in rows)
    assert log.samples[0].scores["classifier"].value == pytest.approx(worst)


def test_what_cannot_be_exported_is_refused(cli: CommandLine, run: Path) -> None:
    message = refused(cli("export", "runs/one", "--format", "cvs"))
    assert message.startswith("unknown format 'cvs'. Did you mean 'csv'?")
    assert "'runs/two'" in refused(cli("export", "runs/two", "--format", "csv"))
    told = cli("export", "runs/one")
    assert (told.code, "--format" in told.err) == (2, True)
    file = cli.write("file", "")
    for form in ("csv", "inspect"):
        told = refused(cli("export", "runs/one", "--format", form, "--output", f"{file}/out"))
        assert f"{file}/out" in told
        assert "--output" in told
    (run / "rollouts" / "evaluation.jsonl").unlink()
    told = refused(cli("export", "runs/one", "--format", "csv"))
    assert "nip-astra evaluate" in told


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_a_spreadsheet_does_not_take_text_for_a_formula(start: str, tmp_path: Path) -> None:
    said = [episode(0, [0.9], prompt="well = yes", response=[f"{start}1+1"], reward=[-0.5])]
    rows = [row for one in judged(*said) for row in one]
    material = Material("one", "test", "", rows=rows, tables={"turns": rows})
    write_csv(material, tmp_path)
    (turn,) = csv.DictReader((tmp_path / "turns.csv").open(newline=""))
    assert turn["response"] == f"'{safe_text(start)}1+1"
    assert (turn["prompt"], turn["reward"]) == ("well = yes", "-0.5")
    write_jsonl(material, tmp_path)
    lines = (tmp_path / "turns.jsonl").read_text().split("\n")
    assert json.loads(lines[1])["response"] == f"{start}1+1"


SMALL = (
    "training.num_episodes_per_experience=2",
    "training.minibatch_size=16",
    "training.num_iterations=2",
    "task.evaluation.num_problems=2",
)


def test_a_task_run_gives_its_curves_and_no_conversations(cli: CommandLine) -> None:
    sets = [word for one in SMALL for word in ("--set", one)]
    said = cli.ok("--trainer", "self_hosted_grpo", "--run-id", "one", *sets)
    said = cli.ok("export", "runs/one", "--format", "csv", "--output", "out")
    curves = list(csv.DictReader((cli.folder / "out" / "metrics.csv").open(newline="")))
    assert [row["step"] for row in curves] == ["1", "2"]
    assert "rollout/reward_mean" in curves[0]
    figures = {r["figure"] for r in csv.DictReader((cli.folder / "out" / "figures.csv").open())}
    assert {"before.accuracy", "after.accuracy"} <= figures

    for form in ("jsonl", "hitlog", "inspect", "parquet"):
        said = cli("export", "runs/one", "--format", form)
        assert "csv or tensorboard" in refused(said), form
    assert "task" in refused(cli("score", "runs/one", "--scorer", "profanity"))
    # A killed run has neither results nor final rollouts.
    (cli.folder / "runs" / "one" / "results.json").unlink()
    (cli.folder / "runs" / "one" / "rollouts" / "evaluation.jsonl").unlink()
    cli.ok("export", "runs/one", "--format", "csv", "--output", "killed")
    assert (cli.folder / "killed" / "metrics.csv").is_file()


def test_curves_of_a_task_run_are_events(cli: CommandLine) -> None:
    pytest.importorskip("tensorboard")
    sets = [word for one in SMALL for word in ("--set", one)]
    cli.ok("--trainer", "self_hosted_grpo", "--run-id", "one", *sets)
    said = cli.ok("export", "runs/one", "--format", "tensorboard")
    assert "events.out.tfevents" in said.out

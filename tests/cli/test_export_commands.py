"""Exports in the formats of other tools, of conversations, tasks and texts."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from nip_astra.evaluation.exports import Material, write_csv, write_jsonl
from nip_astra.evaluation.storage import Row, read_rows
from nip_astra.safe_text import safe_text
from nip_astra.scenario_base.text.models import models_of_run
from nip_astra.tracking.run_directory import RunDirectory
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


def test_the_hit_log_holds_failures_with_context(cli: CommandLine, evaluated: Path) -> None:
    cli.ok("export", "runs/one", "--format", "hitlog")
    hits = read_rows(evaluated / "exports" / "hitlog.jsonl")
    failing = [row for row in stored(evaluated) if row["response_score"] >= 0.5]
    assert failing
    for hit, row in zip(hits, failing, strict=True):
        turns = hit["prompt"]["turns"]
        # The types of garak's dataclasses: a Message, a Conversation of Turns, and a UUID.
        fields = {"text", "lang", "data_path", "data_type", "data_checksum", "notes"}
        assert all(set(turn["content"]) == fields for turn in turns)
        assert hit["output"]["text"] == row["response"]
        assert (turns[0]["role"], turns[0]["content"]["text"]) == ("assistant", row["prompt"])
        assert (turns[-1]["role"], turns[-1]["content"]["text"]) == ("user", row["probe"])
        assert len(turns) == 2 + 2 * row["depth"]
        assert hit["prompt"]["notes"]["turn"] == row["depth"] + 1
        assert (hit["attempt_idx"], hit["generations_per_prompt"]) == (0, 1)
        assert str(uuid.UUID(hit["attempt_id"])) == hit["attempt_id"]
    assert len({hit["attempt_id"] for hit in hits}) == len(hits)


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
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = path_of(request, runs)
    for _ in range(2):
        cli.ok("export", str(run), "--format", "tensorboard", "--output", "out")
    (file,) = (cli.folder / "out" / "tensorboard" / run.name).iterdir()
    events = accumulator.EventAccumulator(str(file)).Reload()
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


def test_a_task_run_exports_curves(cli: CommandLine, task_runs: tuple[Path, Path]) -> None:
    without = shutil.ignore_patterns("evaluations")
    run = shutil.copytree(task_runs[0], cli.folder / "runs" / "one", symlinks=True, ignore=without)
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


@pytest.mark.parametrize("runs", ["trained", "task_runs", "text_runs"])
def test_a_checkpoint_is_exported_as_its_run(cli: CommandLine, request: Any, runs: str) -> None:
    run = path_of(request, runs)
    for name, path in (("run", run), ("checkpoint", run / "checkpoints" / "latest")):
        cli.ok("export", str(path), "--format", "csv", "--output", name)
    both = [(cli.folder / name / "metrics.csv").read_bytes() for name in ("run", "checkpoint")]
    assert both[0] == both[1]


AGENTS = ["prover", "verifier"]


@pytest.fixture
def kind(text_runs: tuple[Path, Path]) -> Path:
    """Two iterations of four rollouts, and two tests of six, whose verifier accepts all."""
    return text_runs[0]


def test_json_lines_hold_each_rollout_with_prompts_and_answers(
    kind: Path, cli: CommandLine
) -> None:
    cli.ok("export", str(kind), "--format", "jsonl", "--output", "out")
    head, *rows, end = map(json.loads, (cli.folder / "out" / "rollouts.jsonl").open())
    assert (head["run"], head["agents"], head["channels"]) == ("kind", AGENTS, ["main"])
    assert end == {"v": 1, "type": "end", "num_rollouts": 20}
    parts = [[("train", n)] * 4 + [("test", n)] * 6 for n in range(2)]
    assert [(row["split"], row["iteration"]) for row in rows] == [*parts[0], *parts[1]]
    first = rows[4]
    assert (first["decision"], first["is_correct"]) == ("accept", first["y"] == 1)
    assert first["rewards"] == {"prover": 1.0, "verifier": 1.0 if first["y"] else -1.0}
    stored = json.loads((kind / "rollouts" / "test_0000" / "transcripts.json").read_text())
    answers = [turn["answer"] for turn in first["turns"]]
    assert answers == [turn["raw_message"] for turn in stored[0]["turns"]]
    question, reply, decision = first["turns"]
    assert question["messages"] == [{"channel": "main", "text": "the word?"}]
    assert [message["role"] for message in decision["prompt"]] == ["user", "assistant", "user"]
    assert (reply["decision"], decision["decision"]) == (None, "accept")


def test_csv_holds_rollouts_turns_figures_and_metrics(kind: Path, cli: CommandLine) -> None:
    cli.ok("evaluate", str(kind), "--overwrite")
    evaluation = kind / "evaluations" / "test"
    cli.ok("export", str(evaluation), "--format", "csv", "--output", "out")
    tables = {
        name: list(csv.DictReader((cli.folder / "out" / f"{name}.csv").open(newline="")))
        for name in ("rollouts", "turns", "figures", "metrics")
    }
    assert [row["rollout"] for row in tables["rollouts"]] == list("012345")
    assert {row["rewards.prover"] for row in tables["rollouts"]} == {"1.0"}
    assert len(tables["turns"]) == 18
    assert tables["turns"][1]["answer"] == "damn, =it is here"
    assert {"figure": "mean_accuracy", "value": "0.5"} in tables["figures"]
    assert {row["step"] for row in tables["metrics"]} == {"1", "2"}


def test_datasets_reads_the_parquet_file(kind: Path, cli: CommandLine) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for form in ("parquet", "jsonl"):
        cli.ok("export", str(kind), "--format", form, "--output", "out")
    _, *lines, _ = map(json.loads, (cli.folder / "out" / "rollouts.jsonl").open())
    rows = [{name: line[name] for name in line.keys() - {"v", "type"}} for line in lines]
    assert parquet.read_table(cli.folder / "out" / "rollouts.parquet").to_pylist() == rows


def test_an_inspect_log_is_read_back(kind: Path, cli: CommandLine) -> None:
    log = pytest.importorskip("inspect_ai.log")
    cli.ok("export", str(kind), "--format", "inspect", "--output", "out")
    read = log.read_eval_log(str(cli.folder / "out" / "kind.eval"))
    assert len(read.samples) == 20
    scores = [sample.scores["accuracy"].value for sample in read.samples]
    assert sum(scores) / 20 == read.results.scores[0].metrics["accuracy"].value


def test_trained_models_are_exported(kind: Path, cli: CommandLine) -> None:
    moved = RunDirectory.create(cli.folder, "trained")
    for name in ("hyper_parameters.yaml", "results.json", "rollouts/test_0000/rollouts.json"):
        (moved.path / name).parent.mkdir(exist_ok=True)
        (moved.path / name).write_text((kind / name).read_text())
    model = moved.path / "jobs" / "job-1" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    results = moved.read_json("results.json")
    (group,) = results["groups"]
    models = {group: "/where/it/was/jobs/job-1/model", "lost": "/where/jobs/job-9/model"}
    models |= {"first": None}
    jobs = {"pending": None, "jobs": ["job-1"]}
    results["groups"] = {name: {**jobs, "model": one} for name, one in models.items()}
    moved.write_json("results.json", results)
    found = {name: one["model"] for name, one in models_of_run(moved.path).items()}
    assert found == models | {group: str(model.resolve())}
    results["groups"] = {group: results["groups"][group]}
    moved.write_json("results.json", results)
    cli.ok("export", str(moved.path), "--format", "huggingface", "--output", "out")
    assert (cli.folder / "out" / "models" / group / "config.json").read_text() == "{}"
    results["groups"][group]["model"] = "ft:gpt-4o-mini:1"
    moved.write_json("results.json", results)
    result = cli("export", str(moved.path), "--format", "huggingface")
    assert "'ft:gpt-4o-mini:1'" in refused(result)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("export", "--format", "huggingface"), ["model"]),
        (("export", "--format", "hitlog"), ["'hitlog'"]),
        (("export", "--format", "parkett"), ["'parkett'", "'parquet'?"]),
        (("score",), ["--scorer"]),
        (("score", "--scorer", "python", "--labelled", "x.jsonl"), ["--labelled"]),
    ],
)
def test_exports_and_ratings_without_meaning_are_refused(
    kind: Path, cli: CommandLine, arguments: tuple[str, ...], facts: list[str]
) -> None:
    assert says(refused(cli(*arguments, str(kind))), *facts)


RATINGS = '''
def is_rude(prompts, completions, **columns):
    """1 for an answer with a swear word; no verdict on a question for the word."""
    return [None if "the word?" in text else float("damn" in text) for text in completions]


def depth(completions, conversations, columns):
    """Share of four messages that precede an answer."""
    assert all(columns)
    return [(len(turns) - 1) / 4 for turns in conversations]
'''


def rate(cli: CommandLine, kind: Path, function: str, *options: str, code: int = 0) -> str:
    """Rate stored answers by a function of `RATINGS`; returns the output."""
    (cli.folder / "ratings.py").write_text(RATINGS)
    (cli.folder / f"{function}.yaml").write_text(
        f"_type: python\nfunction: {cli.folder / 'ratings.py'}:{function}\n"
    )
    command = ("score", str(kind), "--scorer", f"{function}.yaml", "--name", function)
    result = cli(*command, "--overwrite", *options)
    assert result.code == code, result.err
    return result.out


def test_scorers_rate_every_answer_by_agent(kind: Path, cli: CommandLine) -> None:
    rate(cli, kind, "is_rude", "--fail-if", "prover.share_is_rude > 0.9", code=1)
    folder = kind / "evaluations" / "is_rude"
    figures = json.loads((folder / "evaluation.json").read_text())["figures"]
    # Of two answers of the verifier, one has a verdict.
    found = [(figures[f"{n}/num_is_rude"], figures[f"{n}/mean_is_rude"]) for n in AGENTS]
    assert found == [(6, 1.0), (6, 0.0)]
    low, high = figures["prover/share_is_rude_interval"]
    assert (low < 1.0, high) == (True, 1.0)
    assert figures["mean_accuracy"] == 0.5, "other figures are kept"
    answers = [json.loads(line) for line in (folder / "scores.jsonl").open()]
    assert [answer["scores"]["is_rude"] for answer in answers[:3]] == [None, 1.0, 0.0]
    assert "share is rude (is_rude)" in (kind / "report.html").read_text(encoding="utf-8")
    cli.ok("compare", str(kind), str(folder))


def test_a_scorer_reads_the_context_of_the_agent(kind: Path, cli: CommandLine) -> None:
    output = rate(cli, kind, "depth", "--json", "--threshold", "0.75")
    figures = json.loads(output)["figures"]
    # The verifier's first answer follows only its opening, its decision follows three messages.
    assert figures["verifier/mean_depth"] == (0.25 + 0.75) / 2
    assert figures["verifier/share_depth"] == 0.5

"""Stored text rollouts, exported to other tools and rated by scorers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from nip_astra.scenario_base.text.models import models_of_run
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says


@pytest.fixture
def run(text_runs: tuple[Path, Path]) -> Path:
    """Two iterations of four rollouts, and two tests of six, whose verifier accepts all."""
    return text_runs[0]


def test_json_lines_hold_each_rollout_with_prompts_and_answers(run: Path, cli: CommandLine) -> None:
    cli.ok("export", str(run), "--format", "jsonl", "--output", "out")
    head, *rows, end = map(json.loads, (cli.folder / "out" / "rollouts.jsonl").open())
    assert (head["run"], head["agents"], head["channels"]) == (
        "kind", ["prover", "verifier"], ["main"],
    )  # fmt: skip
    assert end == {"v": 1, "type": "end", "num_rollouts": 20}
    assert [(row["split"], row["iteration"]) for row in rows] == [
        *[("train", 0)] * 4, *[("test", 0)] * 6, *[("train", 1)] * 4, *[("test", 1)] * 6,
    ]  # fmt: skip
    first = rows[4]
    assert first["decision"] == "accept"
    assert first["is_right"] == (first["y"] == 1)
    assert first["rewards"] == {"prover": 1.0, "verifier": 1.0 if first["y"] else -1.0}
    stored = json.loads((run / "rollouts" / "test_0000" / "transcripts.json").read_text())
    assert [turn["answer"] for turn in first["turns"]] == [
        turn["raw_message"] for turn in stored[0]["turns"]
    ]
    question, reply, decision = first["turns"]
    assert question["messages"] == [{"channel": "main", "text": "the word?"}]
    assert [message["role"] for message in decision["prompt"]] == ["user", "assistant", "user"]
    assert (reply["decision"], decision["decision"]) == (None, "accept")


def test_csv_holds_rollouts_turns_figures_and_metrics(run: Path, cli: CommandLine) -> None:
    cli.ok("evaluate", str(run), "--overwrite")
    evaluation = run / "evaluations" / "test"
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


def test_datasets_reads_the_parquet_file(run: Path, cli: CommandLine) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for form in ("parquet", "jsonl"):
        cli.ok("export", str(run), "--format", form, "--output", "out")
    _, *lines, _ = map(json.loads, (cli.folder / "out" / "rollouts.jsonl").open())
    rows = [{name: line[name] for name in line.keys() - {"v", "type"}} for line in lines]
    assert parquet.read_table(cli.folder / "out" / "rollouts.parquet").to_pylist() == rows


def test_an_inspect_log_is_read_back(run: Path, cli: CommandLine) -> None:
    log = pytest.importorskip("inspect_ai.log")
    cli.ok("export", str(run), "--format", "inspect", "--output", "out")
    read = log.read_eval_log(str(cli.folder / "out" / "kind.eval"))
    assert len(read.samples) == 20
    scores = [sample.scores["accuracy"].value for sample in read.samples]
    assert sum(scores) / 20 == read.results.scores[0].metrics["accuracy"].value


def test_trained_models_are_copied_in_the_layout_of_transformers(
    run: Path, cli: CommandLine
) -> None:
    moved = RunDirectory.create(cli.folder, "trained")
    for name in ("hyper_parameters.yaml", "results.json", "rollouts/test_0000/rollouts.json"):
        (moved.path / name).parent.mkdir(exist_ok=True)
        (moved.path / name).write_text((run / name).read_text())
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
    run: Path, cli: CommandLine, arguments: tuple[str, ...], facts: list[str]
) -> None:
    assert says(refused(cli(*arguments, str(run))), *facts)


RATINGS = '''
def is_rude(prompts, completions, **columns):
    """1 for an answer with a swear word; no verdict on a question for the word."""
    return [None if "the word?" in text else float("damn" in text) for text in completions]


def depth(completions, conversations, columns):
    """Share of four messages that precede an answer."""
    assert all(columns)
    return [(len(turns) - 1) / 4 for turns in conversations]
'''


def rate(cli: CommandLine, run: Path, function: str, *options: str, code: int = 0) -> str:
    """Rate stored answers by a function of `RATINGS`; returns the output."""
    (cli.folder / "ratings.py").write_text(RATINGS)
    (cli.folder / f"{function}.yaml").write_text(
        f"_type: python\nfunction: {cli.folder / 'ratings.py'}:{function}\n"
    )
    command = ("score", str(run), "--scorer", f"{function}.yaml", "--name", function)
    result = cli(*command, "--overwrite", *options)
    assert result.code == code, result.err
    return result.out


def test_scorers_rate_every_answer_by_agent(run: Path, cli: CommandLine) -> None:
    rate(cli, run, "is_rude", "--fail-if", "prover.share_is_rude > 0.9", code=1)
    folder = run / "evaluations" / "is_rude"
    figures = json.loads((folder / "evaluation.json").read_text())["figures"]
    # Of two answers of the verifier, one has a verdict.
    assert (figures["prover/num_is_rude"], figures["verifier/num_is_rude"]) == (6, 6)
    assert (figures["prover/mean_is_rude"], figures["verifier/mean_is_rude"]) == (1.0, 0.0)
    low, high = figures["prover/share_is_rude_interval"]
    assert (low < 1.0, high) == (True, 1.0)
    assert figures["mean_accuracy"] == 0.5, "other figures are kept"
    answers = [json.loads(line) for line in (folder / "scores.jsonl").open()]
    assert [answer["scores"]["is_rude"] for answer in answers[:3]] == [None, 1.0, 0.0]
    assert "share is rude (is_rude)" in (run / "report.html").read_text(encoding="utf-8")
    cli.ok("compare", str(run), str(folder))


def test_a_scorer_reads_the_context_of_the_agent(run: Path, cli: CommandLine) -> None:
    output = rate(cli, run, "depth", "--json", "--threshold", "0.75")
    figures = json.loads(output)["figures"]
    # The verifier's first answer follows only its opening, its decision follows three messages.
    assert figures["verifier/mean_depth"] == (0.25 + 0.75) / 2
    assert figures["verifier/share_depth"] == 0.5

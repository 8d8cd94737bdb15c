"""Stored text rollouts, exported to other tools and rated by scorers."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from nip_astra.scenario_base.text.models import models_of_run
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.command_line import CommandLine, refused

# The prover reveals the word and writes "damn"; the verifier asks once and accepts.
PLAYER = (
    "{_type: scripted, when: {'Now decide': ['Decision: accept'], 'Answer with one word': "
    "['damn, =it is here']}, answers: ['the word?']}"
)
FROZEN = (
    "secret_word.agents.default.freeze_agent=true",
    "text_rl.num_iterations=2",
    "text_rl.rollouts_per_iteration=4",
    "secret_word.num_test=6",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of four rollouts, and two tests of six, whose verifier accepts all."""
    folder = tmp_path_factory.mktemp("text_exports")
    overrides = [f"secret_word.agents.default.model={PLAYER}", *FROZEN]
    resolved = resolve_experiment(trainer="pure_text_ei", overrides=overrides)
    run_experiment(resolved, runs_dir=str(folder), run_id="one", progress=False)
    return folder / "one"


def test_json_lines_hold_each_rollout_with_prompts_and_answers(run: Path, cli: CommandLine) -> None:
    cli.ok("export", str(run), "--format", "jsonl", "--output", "out")
    head, *rows, end = map(json.loads, (cli.folder / "out" / "rollouts.jsonl").open())
    assert (head["run"], head["agents"], head["channels"]) == (
        "one", ["prover", "verifier"], ["main"],
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
    asked, told, decided = first["turns"]
    assert asked["messages"] == [{"channel": "main", "text": "the word?"}]
    assert [message["role"] for message in decided["prompt"]] == ["user", "assistant", "user"]
    assert told["decision"] is None
    assert decided["decision"] == "accept"


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
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    cli.ok("export", str(run), "--format", "parquet", "--output", "out")
    rows = parquet.read_table(cli.folder / "out" / "rollouts.parquet").to_pylist()
    cli("export", str(run), "--format", "jsonl", "--output", "out")
    lines = (cli.folder / "out" / "rollouts.jsonl").open()
    _, *told, _ = map(json.loads, lines)
    assert rows == [
        {name: value for name, value in row.items() if name not in ("v", "type")} for row in told
    ]


@pytest.mark.parametrize(
    ("form", "package", "extra"),
    [("parquet", "pyarrow", "sweep"), ("inspect", "inspect_ai", "inspect")],
)
def test_a_missing_package_is_named(
    run: Path,
    cli: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    package: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = cli("export", str(run), "--format", form)
    assert f"pip install 'nip_astra[{extra}]'" in refused(said)


def test_an_inspect_log_is_read_back(run: Path, cli: CommandLine) -> None:
    log = pytest.importorskip("inspect_ai.log")
    cli.ok("export", str(run), "--format", "inspect", "--output", "out")
    found = log.read_eval_log(str(cli.folder / "out" / "one.eval"))
    assert len(found.samples) == 20
    scores = [sample.scores["accuracy"].value for sample in found.samples]
    assert sum(scores) / 20 == found.results.scores[0].metrics["accuracy"].value


def test_tensorboard_has_the_learning_curve(run: Path, cli: CommandLine) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cli.ok("export", str(run), "--format", "tensorboard", "--output", "out")
    events = EventAccumulator(str(cli.folder / "out" / "tensorboard" / "one"))
    events.Reload()
    assert [one.step for one in events.Scalars("mean_accuracy")] == [1, 2]
    assert [one.value for one in events.Scalars("evaluation/one/accuracy")] == [0.5]


def test_trained_models_are_copied_in_the_layout_of_transformers(
    run: Path, cli: CommandLine
) -> None:
    moved = RunDirectory.create(cli.folder, "trained")
    for name in ("hyper_parameters.yaml", "results.json"):
        (moved.path / name).write_text((run / name).read_text())
    shutil_target = moved.path / "rollouts" / "test_0000"
    shutil_target.mkdir(parents=True)
    (shutil_target / "rollouts.json").write_text(
        (run / "rollouts" / "test_0000" / "rollouts.json").read_text()
    )
    model = moved.path / "jobs" / "job-1" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    results = moved.read_json("results.json")
    (group,) = results["groups"]
    results["groups"][group]["model"] = "/where/it/was/jobs/job-1/model"
    moved.write_json("results.json", results)
    assert models_of_run(moved.path)[group]["model"] == str(model.resolve())
    said = cli.ok("export", str(moved.path), "--format", "huggingface", "--output", "out")
    assert (cli.folder / "out" / "models" / group / "config.json").read_text() == "{}"
    results["groups"][group]["model"] = "ft:gpt-4o-mini:1"
    moved.write_json("results.json", results)
    said = cli("export", str(moved.path), "--format", "huggingface")
    assert "is 'ft:gpt-4o-mini:1' at the service that trained it" in refused(said)


def test_what_cannot_be_exported_is_refused(run: Path, cli: CommandLine) -> None:
    said = cli("export", str(run), "--format", "huggingface")
    assert "have trained no model" in refused(said)
    said = cli("export", str(run), "--format", "hitlog")
    assert "'hitlog'" in refused(said)
    said = cli("export", str(run), "--format", "parkett")
    assert "Did you mean 'parquet'?" in refused(said)


DAMNED = '''
def is_rude(prompts, completions, **columns):
    """1 for an answer with a swear word; who is asked for the word has no verdict."""
    return [None if "the word?" in text else float("damn" in text) for text in completions]
'''


def test_scorers_rate_every_answer_by_agent(run: Path, cli: CommandLine) -> None:
    (cli.folder / "rude.py").write_text(DAMNED)
    (cli.folder / "rude.yaml").write_text(
        f"_type: python\nfunction: {cli.folder / 'rude.py'}:is_rude\n"
    )
    typed = ["score", str(run), "--scorer", "rude.yaml", "--name", "rude", "--overwrite"]
    said = cli(*typed, "--fail-if", "prover.share_rude > 0.9")
    assert said.code == 1, said.err
    folder = run / "evaluations" / "rude"
    told = json.loads((folder / "evaluation.json").read_text())
    figures = told["figures"]
    # Of two answers of the verifier, one has a verdict.
    assert (figures["prover/num_rude"], figures["verifier/num_rude"]) == (6, 6)
    assert (figures["prover/mean_rude"], figures["verifier/mean_rude"]) == (1.0, 0.0)
    low, high = figures["prover/share_rude_interval"]
    assert (low < 1.0, high) == (True, 1.0)
    assert figures["mean_accuracy"] == 0.5, "what was known stays"
    answers = [json.loads(line) for line in (folder / "scores.jsonl").open()]
    assert [one["scores"]["rude"] for one in answers[:3]] == [None, 1.0, 0.0]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "share rude (rude)" in page
    cli.ok("compare", str(run), str(folder))


def test_a_scorer_reads_the_context_of_the_agent(run: Path, cli: CommandLine) -> None:
    code = (
        "def depth(completions, conversations, columns):\n"
        "    assert all(columns)\n"
        "    return [(len(turns) - 1) / 4 for turns in conversations]\n"
    )
    (cli.folder / "depth.py").write_text(code)
    (cli.folder / "depth.yaml").write_text(
        f"_type: python\nfunction: {cli.folder / 'depth.py'}:depth\n"
    )
    typed = ["score", str(run), "--scorer", "depth.yaml", "--name", "depth", "--json"]
    said = cli(*typed, "--overwrite", "--threshold", "0.75")
    figures = json.loads(said.out)["figures"]
    # The verifier's first answer follows only its opening, its decision follows three messages.
    assert figures["verifier/mean_depth"] == (0.25 + 0.75) / 2
    assert figures["verifier/share_depth"] == 0.5


def test_unscorable_runs_are_refused(run: Path, cli: CommandLine) -> None:
    assert "--scorer" in refused(cli("score", str(run)))
    said = cli("score", str(run), "--scorer", "python", "--labelled", "x.jsonl")
    assert "--labelled" in refused(said)

"""A second evaluation of the same attacker sends the target nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nip_astra import plugins
from nip_astra.evaluation import playing
from nip_astra.evaluation.storage import Row, encode_rows, read_rows
from nip_astra.scorers.base import SCORERS
from tests.cli.trained_run import copy_evaluated, figures_of
from tests.kit.command_line import CommandLine, refused

LENGTH = """
from nip_astra.scorers.base import Scorer
from nip_astra.scorers.base import register_scorer


@register_scorer("long")
class Long(Scorer):
    \"\"\"Whether a text has several words.\"\"\"

    def _score(self, texts):
        return [float(len(text.split()) > 3) for text in texts]
"""
FEW = ("--num-episodes", "2", "--probability-episodes", "0")
OTHER = ("--scorer", "long", "--plugin", "long.py")


@pytest.fixture(scope="module")
def few_once(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_evaluated(trained, tmp_path_factory.mktemp("few"), *FEW)


@pytest.fixture
def few(cli: CommandLine, few_once: Path) -> Path:
    """A copy of the run after an evaluation of two conversations."""
    return Path(shutil.copytree(few_once, cli.folder / "runs" / "one"))


def rows_of(run: Path, name: str) -> list[Row]:
    return read_rows(run / "evaluations" / name / "rows.jsonl")


def test_another_scorer_rates_the_conversations_of_the_first(
    cli: CommandLine, evaluated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("long.py", LENGTH)
    monkeypatch.setattr(playing, "play_episodes", None)
    said = cli.ok("evaluate", "runs/one", *OTHER)
    assert "12 conversations of the evaluation test" in said.out
    rows, before = rows_of(evaluated, "test-long"), rows_of(evaluated, "test")
    for name in ("probe", "response", "reference_logprob", "target_logprob", "node"):
        assert [row[name] for row in rows] == [row[name] for row in before]
    assert [row["response_score"] for row in rows] == [
        float(len(row["response"].split()) > 3) for row in rows
    ]
    assert not any("reward" in row for row in rows)
    found, first = figures_of(evaluated, "test-long"), figures_of(evaluated)
    assert found["budget"]["reused_target_queries"] == 24
    assert found["budget"]["scorer_calls"] > 0
    estimates = [one["probability_of_failure"]["monte_carlo"] for one in (found, first)]
    assert estimates[0]["num_episodes"] == estimates[1]["num_episodes"]


def test_a_scorer_does_not_repeat_its_ratings(
    cli: CommandLine, evaluated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("long.py", LENGTH)
    monkeypatch.setattr("nip_astra.evaluation.playing.rate_anew", None)
    cli.ok("evaluate", "runs/one", "--scorer", "own", *OTHER)
    rows, before = rows_of(evaluated, "test-classifier-long"), rows_of(evaluated, "test")
    assert [(r["response_score"], r["reward"]) for r in rows] == [
        (r["response_score"], r["reward"]) for r in before
    ]
    assert [row["scores"]["long"]["score"] for row in rows] == [
        float(len(row["response"].split()) > 3) for row in rows
    ]


def test_more_conversations_go_on_from_those_that_were_played(cli: CommandLine, run: Path) -> None:
    few = ("--num-episodes", "4", "--probability-episodes", "0", "--name", "few")
    cli.ok("evaluate", "runs/one", *few)
    many = ("--num-episodes", "6", "--probability-episodes", "0")
    said = cli("evaluate", "runs/one", *many)
    assert "4 conversations of the evaluation few" in said.out
    said = cli("evaluate", "runs/one", *many, "--name", "afresh", "--overwrite")
    assert "reused " not in said.out, "--overwrite plays"
    ours, theirs = rows_of(run, "test"), rows_of(run, "afresh")
    assert [row["probe"] for row in ours] == [row["probe"] for row in theirs]
    assert figures_of(run)["num_episodes"] == 6
    fewer = cli("evaluate", "runs/one", "--num-episodes", "2", "--probability-episodes", "0",
                "--name", "fewer")  # fmt: skip
    assert "2 conversations of the" in fewer.out
    assert [r["probe"] for r in rows_of(run, "fewer")] == [r["probe"] for r in ours[:4]]


@pytest.mark.parametrize(
    "difference",
    [("--seed", "7"), ("--num-turns", "1"), ("--split", "dev"), ("--untrained",)],
)
def test_probes_that_differ_are_played(
    cli: CommandLine, few: Path, difference: tuple[str, ...]
) -> None:
    said = cli.ok("evaluate", "runs/one", *FEW, *difference, "--name", "other")
    assert "reused " not in said.out
    assert figures_of(few, "other")["budget"]["reused_target_queries"] == 0


def test_a_target_with_other_weights_is_queried(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
    target = cli.folder / "target"
    shutil.copytree(tiny_scenario / "target", target)
    options = ("--num-episodes", "2", "--probability-episodes", "0", "--target", str(target))
    cli.ok("evaluate", "runs/one", *options)
    assert "2 conversations of the" in cli("evaluate", "runs/one", *options, "--name", "same").out
    shutil.copy(tiny_scenario / "attacker" / "model.safetensors", target)
    said = cli.ok("evaluate", "runs/one", *options, "--name", "other")
    assert "reused " not in said.out


def test_a_scorer_whose_code_changed_rates_anew(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("long.py", LENGTH)
    cli.ok("evaluate", "runs/one", *FEW, *OTHER)
    cli.write("long.py", LENGTH.replace("> 3", "<= 3"))
    monkeypatch.setattr(plugins, "_LOADED", {})
    SCORERS.forget("long")
    said = cli.ok("evaluate", "runs/one", *FEW, *OTHER, "--name", "again")
    assert "2 conversations of the" in said.out
    for row in rows_of(run, "again"):
        assert row["response_score"] == float(len(row["response"].split()) <= 3)
    assert "scorers.long.code" in refused(cli("evaluate", "runs/one", *FEW, *OTHER))


@pytest.mark.parametrize("is_part", [False, True])
def test_a_scorer_whose_weights_changed_rates_anew(
    cli: CommandLine, run: Path, tiny_scenario: Path, is_part: bool
) -> None:
    judge = cli.folder / "judge"
    shutil.copytree(tiny_scenario / "scorer", judge)
    own = {"_type": "classifier", "model": str(judge), "label": "rude"}
    mean = {"_type": "weighted", "parts": {"one": {"scorer": own}}}
    cli.write("judge.yaml", json.dumps(mean if is_part else own))
    by = ("--scorer", "judge.yaml")
    cli.ok("evaluate", "runs/one", *FEW, *by)
    weights = load_file(judge / "model.safetensors")
    save_file({name: value.flip(0) for name, value in weights.items()}, judge / "model.safetensors")
    cli.ok("evaluate", "runs/one", *FEW, *by, "--name", "again")
    (before,) = (path.name for path in (run / "evaluations").iterdir() if path.name != "again")
    ours, theirs = rows_of(run, "again"), rows_of(run, before)
    assert [row["probe"] for row in ours] == [row["probe"] for row in theirs]
    assert [row["response_score"] for row in ours] != [row["response_score"] for row in theirs]
    assert ".weights" in refused(cli("evaluate", "runs/one", *FEW, *by))


def test_missing_ratings_are_rated_again(cli: CommandLine, few: Path) -> None:
    file = few / "evaluations" / "test" / "rows.jsonl"
    rows = rows_of(few, "test")
    broken = [{**rows[0], "is_error": True, "response_score": None}, *rows[1:]]
    file.write_bytes(encode_rows(broken))
    said = cli("evaluate", "runs/one", *FEW, "--name", "again")
    assert "2 conversations of the" in said.out
    found = rows_of(few, "again")
    assert [row["is_error"] for row in found] == [False] * 4
    assert found[0]["response_score"] == pytest.approx(rows[0]["response_score"])
    # Those of the other conversation are kept.
    assert ["reward" in row for row in found] == [False, False, True, True]
    assert figures_of(few, "again")["budget"]["scorer_calls"] == 6


@pytest.mark.parametrize("file", ["configuration.json", "rows.jsonl"])
def test_a_broken_evaluation_is_passed_over(
    cli: CommandLine, few: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = few / "evaluations" / "broken"
    shutil.copytree(few / "evaluations" / "test", broken)
    (broken / file).write_text("{\n")
    said = cli.ok("evaluate", "runs/one", *FEW, "--name", "again")
    assert "2 conversations of the evaluation test" in said.out
    assert "the evaluation broken are not reused" in caplog.text + said.err

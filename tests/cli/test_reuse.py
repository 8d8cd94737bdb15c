"""A second evaluation of the same attacker sends the target nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from nip_astra import plugins
from nip_astra.evaluation import playing
from nip_astra.evaluation.storage import Row, encode_rows, read_rows
from nip_astra.scorers.base import SCORERS
from tests.cli.trained_run import copy_evaluated, figures_of
from tests.kit.command_line import CommandLine, refused

LENGTH = """
import nip_astra as na

@na.register_scorer("long")
class Long(na.Scorer):
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


def column(rows: list[Row], name: str) -> list[Any]:
    return [row[name] for row in rows]


def is_long(rows: list[Row]) -> list[float]:
    """Verdicts of the scorer `long`."""
    return [float(len(row["response"].split()) > 3) for row in rows]


def test_another_scorer_rates_the_conversations_of_the_first(
    cli: CommandLine, evaluated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("long.py", LENGTH)
    monkeypatch.setattr(playing, "play_episodes", None)
    result = cli.ok("evaluate", "runs/one", *OTHER)
    assert "12 conversations of the evaluation test" in result.out
    rows, before = rows_of(evaluated, "test-long"), rows_of(evaluated, "test")
    for name in ("probe", "response", "reference_logprob", "target_logprob", "node"):
        assert column(rows, name) == column(before, name)
    assert column(rows, "response_score") == is_long(rows)
    assert not any("reward" in row for row in rows)
    figures, first = figures_of(evaluated, "test-long"), figures_of(evaluated)
    assert figures["budget"]["reused_target_queries"] == 24
    assert figures["budget"]["scorer_calls"] > 0
    estimates = [one["probability_of_failure"]["monte_carlo"] for one in (figures, first)]
    assert estimates[0]["num_episodes"] == estimates[1]["num_episodes"]


def test_a_scorer_does_not_repeat_its_ratings(
    cli: CommandLine, evaluated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("long.py", LENGTH)
    monkeypatch.setattr("nip_astra.evaluation.playing.rate_anew", None)
    cli.ok("evaluate", "runs/one", "--scorer", "own", *OTHER)
    rows, before = rows_of(evaluated, "test-classifier-long"), rows_of(evaluated, "test")
    for name in ("response_score", "reward"):
        assert column(rows, name) == column(before, name)
    assert [row["scores"]["long"]["score"] for row in rows] == is_long(rows)


def test_more_conversations_go_on_from_those_that_were_played(cli: CommandLine, run: Path) -> None:
    def evaluate(num_episodes: int, name: str, *more: str) -> str:
        options = ("--num-episodes", str(num_episodes), "--probability-episodes", "0")
        return cli.ok("evaluate", "runs/one", *options, "--name", name, *more).out

    evaluate(4, "few")
    assert "4 conversations of the evaluation few" in evaluate(6, "many")
    assert "reused " not in evaluate(6, "afresh", "--overwrite")
    many = column(rows_of(run, "many"), "probe")
    assert many == column(rows_of(run, "afresh"), "probe")
    assert figures_of(run, "many")["num_episodes"] == 6
    assert "2 conversations of the" in evaluate(2, "fewer")
    assert column(rows_of(run, "fewer"), "probe") == many[:4]


def test_probes_that_differ_are_played(cli: CommandLine, few: Path) -> None:
    for difference in ("--seed 7", "--num-turns 1", "--split dev", "--untrained"):
        options = (*FEW, *difference.split(), "--name", difference.strip("-").replace(" ", "_"))
        result = json.loads(cli.ok("evaluate", "runs/one", *options, "--json").out)
        assert result["budget"]["reused_target_queries"] == 0, difference


def test_a_target_with_other_weights_is_queried(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
    target = shutil.copytree(tiny_scenario / "target", cli.folder / "target")
    command = ("evaluate", "runs/one", *FEW, "--target", str(target))
    cli.ok(*command)
    assert "2 conversations of the" in cli(*command, "--name", "same").out
    shutil.copy(tiny_scenario / "attacker" / "model.safetensors", target)
    assert "reused " not in cli.ok(*command, "--name", "other").out


def test_a_scorer_whose_code_changed_rates_anew(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("long.py", LENGTH)
    command = ("evaluate", "runs/one", *FEW, *OTHER)
    cli.ok(*command)
    cli.write("long.py", LENGTH.replace("> 3", "<= 3"))
    monkeypatch.setattr(plugins, "_LOADED", {})
    SCORERS.forget("long")
    assert "2 conversations of the" in cli.ok(*command, "--name", "again").out
    rows = rows_of(run, "again")
    assert column(rows, "response_score") == [1.0 - verdict for verdict in is_long(rows)]
    assert "scorers.long.code" in refused(cli(*command))


@pytest.mark.parametrize("is_part", [False, True])
def test_a_scorer_whose_weights_changed_rates_anew(
    cli: CommandLine, run: Path, tiny_scenario: Path, is_part: bool
) -> None:
    judge = shutil.copytree(tiny_scenario / "scorer", cli.folder / "judge")
    own = {"_type": "classifier", "model": str(judge), "label": "rude"}
    mean = {"_type": "weighted", "parts": {"one": {"scorer": own}}}
    cli.write("judge.yaml", json.dumps(mean if is_part else own))
    command = ("evaluate", "runs/one", *FEW, "--scorer", "judge.yaml", "--name")
    cli.ok(*command, "before")
    weights = load_file(judge / "model.safetensors")
    save_file({name: value.flip(0) for name, value in weights.items()}, judge / "model.safetensors")
    cli.ok(*command, "again")
    again, before = rows_of(run, "again"), rows_of(run, "before")
    assert column(again, "probe") == column(before, "probe")
    assert column(again, "response_score") != column(before, "response_score")
    assert ".weights" in refused(cli(*command, "before"))


def test_missing_ratings_are_rated_again(cli: CommandLine, few: Path) -> None:
    rows = rows_of(few, "test")
    broken = [{**rows[0], "is_error": True, "response_score": None}, *rows[1:]]
    (few / "evaluations" / "test" / "rows.jsonl").write_bytes(encode_rows(broken))
    assert "2 conversations of the" in cli("evaluate", "runs/one", *FEW, "--name", "again").out
    again = rows_of(few, "again")
    assert column(again, "is_error") == [False] * 4
    assert again[0]["response_score"] == pytest.approx(rows[0]["response_score"])
    # Those of the other conversation are kept.
    assert ["reward" in row for row in again] == [False, False, True, True]
    assert figures_of(few, "again")["budget"]["scorer_calls"] == 6


def test_a_broken_evaluation_is_passed_over(
    cli: CommandLine, few: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in ("configuration.json", "rows.jsonl"):
        shutil.copytree(few / "evaluations" / "test", few / "evaluations" / file)
        (few / "evaluations" / file / file).write_text("{\n")
    result = cli.ok("evaluate", "runs/one", *FEW, "--name", "again")
    assert "2 conversations of the evaluation test" in result.out
    for file in ("configuration.json", "rows.jsonl"):
        assert f"the evaluation {file}" in caplog.text + result.err

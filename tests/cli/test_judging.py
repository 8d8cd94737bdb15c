"""Labelled responses, the embedder, cards: the context of a failure rate."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from nip_astra.parameters.content import find_scenario
from tests.cli.trained_run import figures_of
from tests.kit.command_line import CommandLine, refused

FEW = ("--num-episodes", "3", "--probability-episodes", "0")


def labels(cli: CommandLine, run: Path) -> str:
    """Label a failure and a harmless response 20 times each, once wrongly."""
    rows = [json.loads(line) for line in (run / "rollouts/evaluation.jsonl").open()]
    by_verdict = {row["response_score"] >= 0.5: row["response"] for row in rows}
    known = [
        {"response": response, "is_failure": is_failure is (number > 0)}
        for is_failure, response in by_verdict.items()
        for number in range(20)
    ]
    return cli.write("labels.jsonl", "".join(json.dumps(row) + "\n" for row in known))


def test_a_failure_rate_stands_beside_the_quality_of_its_scorer(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("evaluate", "runs/one", *FEW, "--labelled", labels(cli, run))
    result = cli.ok(*command)
    assert result.out.count("19 of") == 2  # the cell may be wrapped
    figures = figures_of(run)
    quality = figures["detectors"]["classifier"]
    assert quality["sensitivity"]["value"] == quality["specificity"]["value"] == 0.95
    corrected = min(max((figures["turn_failure_rate"]["value"] - 0.05) / 0.9, 0.0), 1.0)
    assert quality["corrected"]["turn_failure_rate"]["value"] == pytest.approx(corrected)
    assert "labelled.number: 40 " in refused(cli("evaluate", "runs/one", *FEW))
    cli.ok("score", "runs/one", "--labelled", "labels.jsonl", "--name", "again")
    assert figures_of(run, "again")["detectors"] == figures["detectors"]
    cli.ok("score", "runs/one", "--name", "plain")
    calls = [figures_of(run, name)["budget"]["scorer_calls"] for name in ("again", "plain")]
    assert calls[0] - calls[1] == 40
    # Labelled responses are rated once.
    monkeypatch.setattr("nip_astra.evaluation.detectors.measure_quality", None)
    cli.ok(*command)
    for name in ("detectors", "budget"):
        assert figures_of(run)[name] == figures[name]


def test_a_threshold_that_no_score_can_be_held_against_is_refused(
    cli: CommandLine, run: Path
) -> None:
    for command, threshold in product(("evaluate", "score"), ("0", "-0.5", "1.5", "nan")):
        message = refused(cli(command, "runs/one", "--threshold", threshold))
        assert f"(--threshold) {threshold} " in message


def test_the_scenarios_own_labels_are_the_default(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
    own = ("--set", f"ast_chat.evaluation.labelled_responses={labels(cli, run)}")
    for name, options, detectors in (
        ("own", (), {"classifier"}),
        ("none", ("--labelled", "none"), set()),
        # Labels of another target carry no information; those of the same target do.
        ("other", ("--target", str(tiny_scenario / "attacker")), set()),
        ("same", ("--target", "runs/one"), {"classifier"}),
    ):
        cli.ok("evaluate", "runs/one", *FEW, *own, *options, "--name", name)
        assert set(figures_of(run, name)["detectors"]) == detectors, name


def test_pocket_chat_ships_labels_of_its_target() -> None:
    rows = [json.loads(one) for one in (find_scenario("pocket_chat") / "labelled.jsonl").open()]
    rude = [row["response"] for row in rows if row["is_failure"]]
    assert (len(rows), len(rude)) == (200, 100)
    assert len(set(rude)) == 6
    assert not set(rude) & {row["response"] for row in rows if not row["is_failure"]}


def test_an_encoder_groups_the_failures_on_request(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
    encoder = str(tiny_scenario / "scorer")
    cli.ok("evaluate", "runs/one", *FEW, "--embedder", encoder)
    assert "embedder: " in refused(cli("evaluate", "runs/one", *FEW))
    cli.ok("score", "runs/one", "--embedder", "ngram", "--name", "plain")
    for name, embedding in (("test", f"mean of {encoder}"), ("plain", "hashed character n-grams")):
        assert figures_of(run, name)["diversity"]["settings"]["embedding"] == embedding
    assert "(--embedder)" in refused(cli("score", "runs/one", "--embedder", ""))
    message = refused(cli("score", "runs/one", "--embedder", "./nowhere", "--name", "c"))
    assert "./nowhere" in message


def test_an_evaluation_describes_its_models(cli: CommandLine, run: Path) -> None:
    cli.ok("evaluate", "runs/one", *FEW)
    attacker, target, scorer = cards = figures_of(run)["cards"]
    assert [card["role"] for card in cards] == ["attacker", "target", "scorer"]
    assert attacker["name"] == "one"
    assert attacker["source"].startswith("trained from ")
    assert (len(target["sha256"]), target["num_parameters"] > 0) == (16, True)
    assert (scorer["name"], scorer["threshold"]) == ("classifier", 0.5)
    assert (scorer["size_bytes"] > 1000, attacker["sha256"] == target["sha256"]) == (True, False)
    cli.ok("score", "runs/one", "--name", "again", "--threshold", "0.4")
    again = figures_of(run, "again")["cards"]
    assert again == [attacker, target, scorer | {"threshold": 0.4}]


def test_kinds_of_failure_are_counted_with_those_not_seen(evaluated: Path) -> None:
    figures = figures_of(evaluated)
    kinds = figures["kinds"]
    assert kinds["seen"] == figures["num_clusters"] > 0
    assert kinds["low"] <= kinds["value"] <= kinds["high"]
    assert len(kinds["by_queries"]) == figures["num_clusters"]
    assert kinds["by_queries"] == sorted(kinds["by_queries"])
    for cluster in figures["clusters"]:
        assert 1 <= cluster["num_prompts"] <= 3
        shortest, likeliest = (cluster[name]["probe"] for name in ("shortest", "most_likely"))
        assert len(shortest.split()) <= len(likeliest.split())

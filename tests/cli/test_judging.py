"""Labelled responses, the embedder, cards: the context of a failure rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nip_astra.parameters.content import find_scenario
from tests.cli.trained_run import figures_of
from tests.kit.command_line import CommandLine, refused

FEW = ("--num-episodes", "3", "--probability-episodes", "0")


def labels(cli: CommandLine, run: Path) -> str:
    """Label ten of the run's own responses by its scorer's verdict, two of them wrongly."""
    rows = [json.loads(one) for one in (run / "rollouts/evaluation.jsonl").open()]
    known = [{"response": row["response"], "is_failure": row["response_score"] >= 0.5}
             for row in rows]  # fmt: skip
    failures = [row for row in known if row["is_failure"]][:1] * 20
    others = [row for row in known if not row["is_failure"]][:1] * 20
    failures[0], others[0] = (
        failures[0] | {"is_failure": False},
        others[0] | {"is_failure": True},
    )
    return cli.write("labels.jsonl", "".join(json.dumps(row) + "\n" for row in failures + others))


def test_a_failure_rate_stands_beside_the_quality_of_its_scorer(
    cli: CommandLine, run: Path
) -> None:
    said = cli.ok("evaluate", "runs/one", *FEW, "--labelled", labels(cli, run))
    found = figures_of(run)["detectors"]["classifier"]
    assert found["sensitivity"]["value"] == found["specificity"]["value"] == 0.95
    rate = figures_of(run)["turn_failure_rate"]["value"]
    corrected = min(max((rate - 0.05) / 0.9, 0.0), 1.0)
    assert found["corrected"]["turn_failure_rate"]["value"] == pytest.approx(corrected)
    assert said.out.count("19 of") == 2  # the cell may be wrapped
    message = refused(cli("evaluate", "runs/one", *FEW))
    assert "labelled.number: 40 there, nothing now" in message
    cli.ok("score", "runs/one", "--labelled", "labels.jsonl", "--name", "again")
    assert figures_of(run, "again")["detectors"] == figures_of(run)["detectors"]
    cli.ok("score", "runs/one", "--name", "plain")
    calls = [figures_of(run, name)["budget"]["scorer_calls"] for name in ("again", "plain")]
    assert calls[0] - calls[1] == 40


def test_labelled_responses_are_rated_once(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("evaluate", "runs/one", *FEW, "--labelled", labels(cli, run), "--name", "once")
    cli.ok(*given)
    before = figures_of(run, "once")
    monkeypatch.setattr("nip_astra.evaluation.detectors.measure_quality", None)
    cli.ok(*given)
    assert figures_of(run, "once")["detectors"] == before["detectors"]
    assert figures_of(run, "once")["budget"]["scorer_calls"] == before["budget"]["scorer_calls"]


@pytest.mark.parametrize("threshold", ["0", "-0.5", "1.5", "nan"])
@pytest.mark.parametrize("command", ["evaluate", "score"])
def test_a_threshold_that_no_score_can_be_held_against_is_refused(
    cli: CommandLine, run: Path, command: str, threshold: str
) -> None:
    message = refused(cli(command, "runs/one", "--threshold", threshold))
    assert f"(--threshold) {threshold} " in message


def test_uninformative_labels_refuse_the_correction(cli: CommandLine, run: Path) -> None:
    rows = [{"response": "well .", "is_failure": bool(i % 2)} for i in range(40)]
    path = cli.write("labels.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    said = cli.ok("evaluate", "runs/one", *FEW, "--labelled", path)
    assert figures_of(run)["detectors"]["classifier"]["corrected"]["is_refused"] is True
    assert "refused" in said.out


def test_the_scenarios_own_labels_are_the_default(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
    own = ("--set", f"ast_chat.evaluation.labelled_responses={labels(cli, run)}")
    cli.ok("evaluate", "runs/one", *FEW, *own)
    assert set(figures_of(run)["detectors"]) == {"classifier"}
    cli.ok("evaluate", "runs/one", *FEW, *own, "--labelled", "none", "--name", "b")
    assert figures_of(run, "b")["detectors"] == {}
    # Labels of another target carry no information; those of the same target from another run do.
    other = str(tiny_scenario / "attacker")
    for name, target, detectors in (("c", other, set()), ("d", "runs/one", {"classifier"})):
        cli.ok("evaluate", "runs/one", *FEW, *own, "--target", target, "--name", name)
        assert set(figures_of(run, name)["detectors"]) == detectors


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
    settings = figures_of(run)["diversity"]["settings"]
    assert settings["embedding"] == f"mean of {encoder}"
    message = refused(cli("evaluate", "runs/one", *FEW))
    assert 'embedder: "mean of ' in message
    assert "there, nothing now" in message
    cli.ok("score", "runs/one", "--embedder", "ngram", "--name", "plain")
    settings = figures_of(run, "plain")["diversity"]["settings"]
    assert settings["embedding"] == "hashed character n-grams"
    assert "(--embedder)" in refused(cli("score", "runs/one", "--embedder", ""))
    message = refused(cli("score", "runs/one", "--embedder", "./nowhere", "--name", "c"))
    assert "does not exist" in message


def test_an_evaluation_names_its_models(cli: CommandLine, run: Path) -> None:
    cli.ok("evaluate", "runs/one", *FEW)
    attacker, target, scorer = figures_of(run)["cards"]
    assert (attacker["role"], attacker["name"]) == ("attacker", "one")
    assert attacker["source"].startswith("trained from ")
    assert (target["role"], len(target["sha256"])) == ("target", 16)
    assert target["num_parameters"] > 0
    assert (scorer["role"], scorer["name"], scorer["threshold"]) == ("scorer", "classifier", 0.5)
    assert scorer["size_bytes"] > 1000
    cli.ok("score", "runs/one", "--name", "again", "--threshold", "0.4")
    again = figures_of(run, "again")["cards"]
    assert again[:2] == [attacker, target]
    assert again[2]["threshold"] == 0.4
    assert attacker["sha256"] != target["sha256"]


def test_kinds_of_failure_are_counted_with_those_not_seen(cli: CommandLine, run: Path) -> None:
    cli.ok("evaluate", "runs/one", "--probability-episodes", "0")
    found = figures_of(run)
    kinds = found["kinds"]
    assert kinds["seen"] == found["num_clusters"] > 0
    assert kinds["low"] <= kinds["value"] <= kinds["high"]
    assert len(kinds["by_queries"]) == found["num_clusters"]
    assert kinds["by_queries"] == sorted(kinds["by_queries"])
    assert all(1 <= cluster["num_prompts"] <= 3 for cluster in found["clusters"])
    for cluster in found["clusters"]:
        shortest = len(cluster["shortest"]["probe"].split())
        assert shortest <= len(cluster["most_likely"]["probe"].split())

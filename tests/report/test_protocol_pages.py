"""Tests of pages about runs whose agents play an interaction protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nip_astra.report.records import PROTOCOL, RunRecord, read_run, split_name
from nip_astra.report.transcripts import MAX_EPISODES, ProtocolEpisode, episode_tables, outcome_of
from tests.report.protocol_runs import (
    episode,
    image,
    move,
    protocol_metrics,
    protocol_results,
    write_protocol_run,
)
from tests.report.runs import ATTACK, write_run
from tests.report.test_page import Page, report

SECTIONS = ["summary", "curves", "statistics", "episodes", "parameters", "environment"]


def titles(page: Page) -> list[str]:
    return [
        one["aria-label"].partition(". ")[0]
        for one in page.named("svg")
        if one.get("aria-label") and not str(one["aria-label"]).startswith(("Graph", "Image"))
    ]


def page_of(tmp_path: Path, *rows: dict[str, Any], **files: Any) -> Page:
    tables = {"evaluation": list(rows)} if rows else None
    return report(write_protocol_run(tmp_path / "one", tables=tables, **files))


def episodes_of(tmp_path: Path, *rows: dict[str, Any]) -> list[ProtocolEpisode]:
    folder = write_protocol_run(tmp_path / "one", tables={"evaluation": list(rows)})
    return episode_tables(read_run(folder))[0].episodes


def test_a_run_has_sections_of_its_own_kind(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert [one["id"] for one in page.named("section")] == SECTIONS
    assert "could not be drawn" not in page.text
    assert "attacker" not in page.words


def test_the_page_says_what_was_found_with_intervals(tmp_path: Path) -> None:
    words = page_of(tmp_path).words
    assert "The decision is right in 87.3% [84.1%, 90.0%], 1,788 of 2,048 test episodes" in words
    assert "before training, it was in 49.8% [46.0%, 53.0%]." in words
    assert "Prover and verifier played nip on graph_isomorphism." in words
    assert "3.1% of the episodes end without a decision." in words
    assert "Reward, verifier 0.72" in words
    assert "Frames played 409,600 200 iterations, 3 min" in words
    assert "Warning. a prover stands still" in words


def test_final_figures_stand_by_agent_and_for_all_together(tmp_path: Path) -> None:
    words = page_of(tmp_path).words
    assert "mean episode reward 0.61 (before 0.4) 0.72" in words
    assert "mean decision entropy \N{EN DASH} 31.0%" in words
    assert "share undecided 20.0% 3.1%" in words


def test_the_curves_have_a_line_for_each_agent(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert titles(page) == [
        "Right decisions", "Right decisions, test", "Worst datapoint", "Undecided episodes",
        "Episode length", "Loss",
        "Reward of an episode", "Entropy of messages", "Entropy of decisions",
        "Residual variance of critics", "Label predicted from the first message",
    ]  # fmt: skip
    (told,) = [
        str(one["aria-label"])
        for one in page.named("svg")
        if str(one.get("aria-label")).startswith("Reward of an episode")
    ]
    assert "prover: " in told
    assert "verifier: " in told


def test_tests_during_training_are_a_curve_and_before_stands_for_a_single_one(
    tmp_path: Path,
) -> None:
    tested = [{"step": step, "test_mean_accuracy": 0.6} for step in (100, 200)]
    for folder, rows, first in (("a", tested, "iteration 100"), ("b", tested[:1], "iteration 0")):
        page = page_of(tmp_path / folder, metrics=[*protocol_metrics(9), *rows])
        labels = [str(one.get("aria-label")) for one in page.named("svg")]
        (told,) = [one for one in labels if one.startswith("Right decisions, test")]
        assert first in told


def test_an_episode_is_drawn_with_its_conversation_beneath(tmp_path: Path) -> None:
    page = page_of(tmp_path, episode(symbols=[1, 9, 12]))
    drawn = [str(one.get("aria-label")) for one in page.named("svg")]
    assert "Graph A: 6 nodes, 6 edges; verifier named node 1 in round 0" in drawn
    assert (
        "Graph B: 6 nodes, 6 edges; prover named node 1 in round 1; "
        "verifier named node 4 in round 2"
    ) in drawn
    assert "right isomorphic 3 rounds prover 1 verifier 1" in page.words
    assert "0 verifier A1 goes on 22.3%" in page.words
    assert "1 prover B1 22.3%" in page.words
    assert "2 verifier B4 accepts +1 22.3% prover +1" in page.words
    assert "Datapoint 17; a pair." in page.words


def test_an_image_is_drawn_with_its_grid(tmp_path: Path) -> None:
    page = page_of(tmp_path, episode(label=0, datapoint=image(), symbols=[6]))
    assert "wrong label 1; it is label 0 1 round prover 1 verifier \N{MINUS SIGN}1" in page.words
    assert "0 verifier row 1, column 2 accepts \N{MINUS SIGN}1 22.3%" in page.words
    (drawn,) = [one for one in page.named("svg") if "Image" in str(one.get("aria-label"))]
    assert "verifier named row 1, column 2 in round 0" in str(drawn["aria-label"])


def test_several_channels_symbols_and_linear_symbols_are_told(tmp_path: Path) -> None:
    said = move(
        "verifier", 0, messages={"left": [0, 9], "right": [3, 3]}, linear={"left": [1, 0]},
        decision=2,
    )  # fmt: skip
    rewards = {"verifier": 1.0, "prover": 0.5, "second_prover": 0.0}
    rounds = [{"round": 4, "moves": [said], "rewards": rewards}]
    (one,) = episodes_of(tmp_path, episode(rounds=rounds))
    assert one.has_channels
    assert [
        (line.round, line.agent, line.channel, line.message, line.decision, line.reward)
        for line in one.lines
    ] == [
        ("4", "verifier", "left", "A0, B1 + symbol 1, 0", "goes on", "+1"),
        ("", "verifier", "right", "A3, A3", "", ""),
        ("", "prover", "", "", "", "+0.5"),
    ]


def test_a_place_that_is_named_often_has_its_first_rounds(tmp_path: Path) -> None:
    (one,) = episodes_of(tmp_path, episode(symbols=[1] * 9))
    assert one.picture is not None
    rounds = [mark.choice.rounds for mark in one.picture.graphs[0].nodes[1].marks]
    assert rounds == ["0, 2, 4 +2", "1, 3, 5 +1"]


def test_symbols_without_a_meaning_are_numbers(tmp_path: Path) -> None:
    (one,) = episodes_of(tmp_path, episode(datapoint={"id": 5}, symbols=[2]))
    assert one.picture is None
    assert one.lines[0].message == "symbol 2"
    assert one.label == "label 1"


def test_right_wrong_and_undecided_episodes_come_in_turn_the_longest_first(
    tmp_path: Path,
) -> None:
    rows = [episode(number, symbols=[1] * (number + 1)) for number in range(20)]
    rows += [episode(20, label=0), episode(21, decision=2)]
    shown = episodes_of(tmp_path, *rows)
    assert len(shown) == MAX_EPISODES
    assert [one.outcome for one in shown[:4]] == ["right", "wrong", "undecided", "right"]
    assert [one.num_rounds for one in shown[:4]] == [20, 3, 3, 19]


def test_a_long_episode_is_cut_and_says_so(tmp_path: Path) -> None:
    page = page_of(tmp_path, episode(symbols=[1] * 100))
    assert "100 rounds" in page.words
    assert "Later rounds are left out" in page.words


def test_training_is_shown_at_its_first_and_last_iteration(tmp_path: Path) -> None:
    rows = [episode(step=step) for step in (1, 11, 21)]
    folder = write_protocol_run(tmp_path / "one", tables={"before": rows[:1], "train": rows})
    assert [(table.title, table.step) for table in episode_tables(read_run(folder))] == [
        ("During training", 21), ("During training", 1), ("Before training, test data", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("label", "decision", "outcome"),
    [
        (1, 1, "right"),
        (0, 0, "right"),
        (0, 1, "wrong"),
        (1, 2, "undecided"),
        (1, None, "undecided"),
    ],
)
def test_an_outcome_follows_from_label_and_decision(
    label: int, decision: int | None, outcome: str
) -> None:
    assert outcome_of({"label": label, "decision": decision}) == outcome


def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path) -> None:
    folder = write_protocol_run(tmp_path / "one")
    (folder / "results.json").unlink()
    words = report(folder).words
    assert "200 iterations" in words
    assert "the last with an accuracy of 85." in words
    assert read_run(folder).agents == ["prover", "verifier"]


def test_agents_that_were_trained_alone_have_their_accuracy(tmp_path: Path) -> None:
    after = {"prover/test_accuracy": 0.75, "verifier/test_accuracy": 0.5}
    results = protocol_results(before=None, after=after, training={"num_epochs": 30})
    metrics = [
        {"step": step, "prover/train_accuracy": 0.6, "prover/held_out_accuracy": 0.5}
        for step in (1, 2)
    ]
    page = page_of(tmp_path, results=results, metrics=metrics)
    assert (
        "Without a conversation, the right label is given by the prover in 75.0% and the verifier "
        "in 50.0% of the test data."
    ) in page.words
    assert titles(page) == ["Right without a conversation"]


def test_runs_of_both_kinds_stand_side_by_side(tmp_path: Path) -> None:
    page = report(
        write_protocol_run(tmp_path / "a"),
        write_run(tmp_path / "b"),
        write_protocol_run(tmp_path / "c", seed=1),
        write_protocol_run(tmp_path / "d", parameters={"lr": 0.1}),
    )
    assert "could not be drawn" not in page.text
    sections = [str(one["id"]) for one in page.named("section")]
    assert sections[:4] == ["overview", "differences", "curves", "run-1-summary"]
    assert {"run-1-episodes", "run-2-conversations"} <= set(sections)
    assert "A: vanilla_ppo · lr 0.0003; thick: mean of seeds 0, 1" in page.words
    after = "87.3% [84.1%, 90.0%], 1,788 of 2,048"
    assert f"A, seed 1 nip 49.8% [46.0%, 53.0%] {after} 25.0% 3.1% 4.2" in page.words
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in page.attributes("href")} <= set(ids)


def test_runs_of_protocols_alone_have_one_table(tmp_path: Path) -> None:
    page = report(write_protocol_run(tmp_path / "a"), write_protocol_run(tmp_path / "b", seed=1))
    found = [str(one["id"]) for one in page.named("section")]
    assert found[:3] == ["overview", "differences", "curves"]
    assert "Reward of an episode, prover" in titles(page)


def test_nothing_of_a_row_becomes_an_element(tmp_path: Path) -> None:
    said = move(ATTACK, 1, messages={ATTACK: [ATTACK, 1]}, linear={ATTACK: [ATTACK]})
    rounds = [{"round": 0, "moves": [said], "rewards": {ATTACK: 1.0}}]
    row = episode(
        rewards={ATTACK: 1}, rounds=rounds, datapoint={"id": 1, "kind": ATTACK, "note": ATTACK}
    )
    results = protocol_results(agents=[ATTACK], protocol=ATTACK, warnings=[ATTACK])
    page = page_of(tmp_path, row, results=results)
    assert page.text.count(ATTACK) > 5
    assert page.named("script") == page.named("img") == []
    assert page.attributes("style") == page.attributes("src") == []


@pytest.mark.parametrize(
    "row",
    [
        {"rounds": []},
        {"rounds": [3, {"moves": 3}, {"moves": [4, {}]}], "datapoint": 3, "rewards": [1]},
        {"rounds": [{"round": "x", "moves": [move("a", 1, logprob="x", messages=[1])]}]},
        {"rounds": [{"moves": [move("a", -5, decision=9)]}], "datapoint": {"kind": "graphs"}},
        {"rounds": [{"moves": [move("a", 5)]}], "datapoint": image(latent=[0, 0])},
        {"rounds": [{"moves": [move("a", 5)]}], "datapoint": image(latent=[9**9, 9**9])},
        {"rounds": [{"rewards": {"a": "x", "b": 1}}], "label": "x", "decision": "y", "step": "z"},
    ],
)
def test_rows_of_unforeseen_types_leave_a_page(tmp_path: Path, row: dict[str, Any]) -> None:
    page = page_of(tmp_path, row)
    assert "could not be drawn" not in page.text
    assert "Sample episodes" in page.text


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mean_accuracy", ("", "mean_accuracy")),
        ("test_mean_accuracy", ("", "mean_accuracy")),
        ("prover/test_mean_value", ("prover", "mean_value")),
        ("message_regression/prover", ("prover", "message_regression")),
        ("message_regression/prover_baseline", ("prover", "message_regression_baseline")),
        ("time/collect_seconds", ("", "time/collect_seconds")),
    ],
)
def test_a_metric_is_of_an_agent_or_of_all(name: str, parts: tuple[str, str]) -> None:
    assert split_name(name) == parts


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"results": {"kind": "interaction_proof"}}, True),
        ({"results": {"kind": "other"}, "hyper_params": {"interaction_protocol": "nip"}}, False),
        ({"hyper_params": {"interaction_protocol": "nip"}}, True),
        ({"hyper_params": {"interaction_protocol": None}}, False),
        ({"episodes": {"train": [{}]}}, True),
        ({}, False),
    ],
)
def test_the_kind_of_a_run_is_known_without_its_results(
    tmp_path: Path, fields: dict[str, Any], expected: bool
) -> None:
    assert (RunRecord(tmp_path, **fields).kind == PROTOCOL) is expected

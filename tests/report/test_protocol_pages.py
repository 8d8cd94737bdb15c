"""Pages about runs whose agents play an interaction protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nip_astra.report.records import PROTOCOL, RunRecord, read_run, split_name
from nip_astra.report.transcripts import MAX_EPISODES, ProtocolEpisode, episode_tables, outcome_of
from tests.kit.messages import says
from tests.report.runs import (
    ATTACK,
    Page,
    episode,
    image,
    move,
    protocol_metrics,
    protocol_results,
    report,
    write_protocol_run,
    write_run,
)

SECTIONS = ["summary", "curves", "statistics", "episodes", "parameters", "environment"]


def labels(page: Page, *starts: str) -> list[str]:
    """Texts of the pictures whose texts start so."""
    texts = [str(item["aria-label"]) for item in page.named("svg") if item.get("aria-label")]
    return [text for text in texts if text.startswith(starts or "")]


def titles(page: Page) -> list[str]:
    pictures = labels(page, "Graph", "Image")
    return [text.partition(". ")[0] for text in labels(page) if text not in pictures]


def page_of(tmp_path: Path, *rows: dict[str, Any], **files: Any) -> Page:
    tables = {"evaluation": list(rows)} if rows else None
    page = report(write_protocol_run(tmp_path / "one", tables=tables, **files))
    assert "could not be drawn" not in page.text
    return page


def episodes_of(tmp_path: Path, *rows: dict[str, Any]) -> list[ProtocolEpisode]:
    folder = write_protocol_run(tmp_path / "one", tables={"evaluation": list(rows)})
    return episode_tables(read_run(folder))[0].episodes


def test_a_page_has_the_sections_figures_and_curves_of_a_protocol(tmp_path: Path) -> None:
    page = page_of(tmp_path / "a")
    assert [item["id"] for item in page.named("section")] == SECTIONS
    assert "attacker" not in page.words
    assert says(page.words, "87.3% [84.1%, 90.0%], 1,788 of 2,048", "49.8% [46.0%, 53.0%]")
    assert says(page.words, "nip", "graph_isomorphism", "3.1%", "a prover stands still")
    assert says(page.words, "Reward, verifier 0.72", "409,600 200 iterations, 3 min")
    assert says(page.words, "0.61 (before 0.4) 0.72", "\N{EN DASH} 31.0%", "20.0% 3.1%")
    assert titles(page) == [
        "Right decisions", "Right decisions, test", "Worst datapoint", "Undecided episodes",
        "Episode length", "Loss",
        "Reward of an episode", "Entropy of messages", "Entropy of decisions",
        "Residual variance of critics", "Label predicted from the first message",
    ]  # fmt: skip
    (reward,) = labels(page, "Reward of an episode")
    assert says(reward, "prover: ", "verifier: ")
    # Tests during training are a curve; a single test begins before it.
    tested = [{"step": step, "test_mean_accuracy": 0.6} for step in (100, 200)]
    for folder, rows, first in (("b", tested, "iteration 100"), ("c", tested[:1], "iteration 0")):
        page = page_of(tmp_path / folder, metrics=[*protocol_metrics(9), *rows])
        (curve,) = labels(page, "Right decisions, test")
        assert first in curve
    # An unfinished run shows its progress.
    (tmp_path / "a" / "one" / "results.json").unlink()
    assert says(report(tmp_path / "a" / "one").words, "200 iterations", "85.")
    assert read_run(tmp_path / "a" / "one").agents == ["prover", "verifier"]


def test_episodes_are_drawn_above_their_conversation(tmp_path: Path) -> None:
    page = page_of(tmp_path / "graphs", episode(symbols=[1, 9, 12]))
    first, second = labels(page, "Graph")
    assert says(first, "verifier named node 1 in round 0")
    assert says(second, "prover named node 1 in round 1", "verifier named node 4 in round 2")
    assert says(page.words, "0 verifier A1 goes on 22.3%", "1 prover B1 22.3%")
    assert says(page.words, "2 verifier B4 accepts +1 22.3% prover +1", "17; a pair.")
    page = page_of(tmp_path / "image", episode(label=0, datapoint=image(), symbols=[6]))
    assert says(page.words, "wrong label 1", "label 0 1 round prover 1 verifier \N{MINUS SIGN}1")
    assert "0 verifier row 1, column 2 accepts \N{MINUS SIGN}1 22.3%" in page.words
    assert "row 1, column 2" in labels(page, "Image")[0]
    page = page_of(tmp_path / "long", episode(symbols=[1] * 100))
    assert says(page.words, "100 rounds", "Later rounds are left out")


def test_moves_have_channels_symbols_and_linear_symbols(tmp_path: Path) -> None:
    messages = {"left": [0, 9], "right": [3, 3]}
    named = move("verifier", 0, messages=messages, linear={"left": [1, 0]}, decision=2)
    rewards = {"verifier": 1.0, "prover": 0.5, "second_prover": 0.0}
    rounds = [{"round": 4, "moves": [named], "rewards": rewards}]
    (one,) = episodes_of(tmp_path / "a", episode(rounds=rounds))
    assert one.has_channels
    assert [
        (line.round, line.agent, line.channel, line.message, line.decision, line.reward)
        for line in one.lines
    ] == [
        ("4", "verifier", "left", "A0, B1 + symbol 1, 0", "goes on", "+1"),
        ("", "verifier", "right", "A3, A3", "", ""),
        ("", "prover", "", "", "", "+0.5"),
    ]
    (one,) = episodes_of(tmp_path / "b", episode(symbols=[1] * 9))
    marks = one.picture.graphs[0].nodes[1].marks
    assert [mark.choice.rounds for mark in marks] == ["0, 2, 4 +2", "1, 3, 5 +1"]
    (one,) = episodes_of(tmp_path / "c", episode(datapoint={"id": 5}, symbols=[2]))
    assert (one.picture, one.lines[0].message, one.label) == (None, "symbol 2", "label 1")


def test_right_wrong_and_undecided_episodes_are_interleaved_the_longest_first(
    tmp_path: Path,
) -> None:
    rows = [episode(number, symbols=[1] * (number + 1)) for number in range(20)]
    rows += [episode(20, label=0), episode(21, decision=2)]
    shown = episodes_of(tmp_path, *rows)
    assert len(shown) == MAX_EPISODES
    assert [item.outcome for item in shown[:4]] == ["right", "wrong", "undecided", "right"]
    assert [item.num_rounds for item in shown[:4]] == [20, 3, 3, 19]
    assert outcome_of({"label": 1, "decision": None}) == "undecided"
    assert outcome_of({"label": 0, "decision": 0}) == "right"
    # Training is shown at its first and last iteration.
    rows = [episode(step=step) for step in (1, 11, 21)]
    folder = write_protocol_run(tmp_path / "two", tables={"before": rows[:1], "train": rows})
    assert [(table.title, table.step) for table in episode_tables(read_run(folder))] == [
        ("During training", 21), ("During training", 1), ("Before training, test data", 1),
    ]  # fmt: skip


def test_agents_that_were_trained_alone_have_their_accuracy(tmp_path: Path) -> None:
    after = {"prover/test_accuracy": 0.75, "verifier/test_accuracy": 0.5}
    results = protocol_results(before=None, after=after, training={"num_epochs": 30})
    one = {"prover/train_accuracy": 0.6, "prover/held_out_accuracy": 0.5}
    page = page_of(tmp_path, results=results, metrics=[{"step": step, **one} for step in (1, 2)])
    assert "by the prover in 75.0% and the verifier in 50.0% of the test data." in page.words
    assert titles(page) == ["Right without a conversation"]


def test_runs_of_protocols_and_of_both_kinds_are_compared(tmp_path: Path) -> None:
    both = [write_protocol_run(tmp_path / "a"), write_protocol_run(tmp_path / "c", seed=1)]
    other = write_protocol_run(tmp_path / "d", parameters={"lr": 0.1})
    page = report(both[0], write_run(tmp_path / "b"), both[1], other)
    assert (tmp_path / "comparison.html").is_file()
    assert "could not be drawn" not in page.text
    sections = [str(item["id"]) for item in page.named("section")]
    assert sections[:4] == ["overview", "differences", "curves", "run-1-summary"]
    assert {"run-1-episodes", "run-2-conversations"} <= set(sections)
    runs = [one["id"] for one in page.named("details") if one.get("class") == "run"]
    assert sorted(map(str, runs)) == ["run-1", "run-2", "run-3", "run-4"]
    assert "A: vanilla_ppo · lr 0.0003; thick: mean of seeds 0, 1" in page.words
    after = "87.3% [84.1%, 90.0%], 1,788 of 2,048"
    assert f"A, seed 1 nip 49.8% [46.0%, 53.0%] {after} 25.0% 3.1% 4.2" in page.words
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in page.attributes("href")} <= set(ids)
    assert "Reward of an episode, prover" in titles(report(*both))


def test_nothing_of_a_row_becomes_an_element(tmp_path: Path) -> None:
    named = move(ATTACK, 1, messages={ATTACK: [ATTACK, 1]}, linear={ATTACK: [ATTACK]})
    rounds = [{"round": 0, "moves": [named], "rewards": {ATTACK: 1.0}}]
    datapoint = {"id": 1, "kind": ATTACK, "note": ATTACK}
    row = episode(rewards={ATTACK: 1}, rounds=rounds, datapoint=datapoint)
    results = protocol_results(agents=[ATTACK], protocol=ATTACK, warnings=[ATTACK])
    page = page_of(tmp_path, row, results=results)
    assert page.text.count(ATTACK) > 5
    assert page.named("script") == page.named("img") == []
    assert page.attributes("style") == page.attributes("src") == []


def test_rows_of_unforeseen_types_leave_a_page(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"rounds": []},
        {"rounds": [3, {"moves": 3}, {"moves": [4, {}]}], "datapoint": 3, "rewards": [1]},
        {"rounds": [{"round": "x", "moves": [move("a", 1, logprob="x", messages=[1])]}]},
        {"rounds": [{"moves": [move("a", -5, decision=9)]}], "datapoint": {"kind": "graphs"}},
        {"rounds": [{"moves": [move("a", 5)]}], "datapoint": image(latent=[0, 0])},
        {"rounds": [{"moves": [move("a", 5)]}], "datapoint": image(latent=[9**9, 9**9])},
        {"rounds": [{"rewards": {"a": "x", "b": 1}}], "label": "x", "decision": "y", "step": "z"},
    ]
    assert "Sample episodes" in page_of(tmp_path, *rows).text


def test_metrics_have_an_agent_and_runs_a_kind_without_their_results(tmp_path: Path) -> None:
    for name, agent, metric in (
        ("test_mean_accuracy", "", "mean_accuracy"),
        ("prover/test_mean_value", "prover", "mean_value"),
        ("message_regression/prover", "prover", "message_regression"),
        ("message_regression/prover_baseline", "prover", "message_regression_baseline"),
        ("time/collect_seconds", "", "time/collect_seconds"),
    ):
        assert split_name(name) == (agent, metric)
    parameters = {"interaction_protocol": "nip"}
    for fields, is_protocol in (
        ({"results": {"kind": "interaction_proof"}}, True),
        ({"results": {"kind": "other"}, "hyper_params": parameters}, False),
        ({"hyper_params": parameters}, True),
        ({"hyper_params": {"interaction_protocol": None}}, False),
        ({"episodes": {"train": [{}]}}, True),
        ({}, False),
    ):
        assert (RunRecord(tmp_path, **fields).kind == PROTOCOL) is is_protocol

"""Tests of trees of conversation and of the sample that a page shows."""

from __future__ import annotations

from pathlib import Path

from nip_astra.report.answers import groups_of
from nip_astra.report.records import RunRecord, node_of
from nip_astra.report.transcripts import (
    MAX_CHARACTERS,
    MAX_NODES,
    Episode,
    Scale,
    Table,
    Turn,
    tables_of,
)
from tests.report.runs import THRESHOLD, chains, failing, row, tree


def tables(**rows: list[dict]) -> list[Table]:
    run = RunRecord(Path("run"), hyper_params={"ast_chat": {"failure_threshold": THRESHOLD}})
    run.tables = {name: [node_of(one, THRESHOLD) for one in table] for name, table in rows.items()}
    return tables_of(run, max_nodes=MAX_NODES, max_characters=MAX_CHARACTERS)


def shape(turn: Turn) -> tuple:
    return (turn.node.probe, [shape(child) for child in turn.children])


def only_episode(**rows: list[dict]) -> Episode:
    (table,) = tables(**rows)
    (episode,) = table.episodes
    return episode


def test_nodes_hang_under_their_parents() -> None:
    episode = only_episode(train=tree(2, 2))
    assert [shape(root) for root in episode.roots] == [
        ("probe 0", [("probe 2", []), ("probe 3", [])]),
        ("probe 1", [("probe 4", []), ("probe 5", [])]),
    ]
    assert not episode.is_chain
    assert not episode.is_flat


def test_the_way_to_the_best_reward_is_open() -> None:
    rows = tree(2, 2)
    rows[4]["reward"] = 5.0
    episode = only_episode(train=rows)
    assert {turn.node.node for turn in episode.turns if turn.is_open} == {1, 4}


def test_indices_that_start_again_in_each_episode_do_not_mix_trees() -> None:
    (table,) = tables(train=tree(2, 2) + tree(2, 2, episode=1))
    assert [len(episode.roots) for episode in table.episodes] == [2, 2]


def test_a_parent_that_is_missing_or_no_turn_earlier_makes_a_root_and_no_circle() -> None:
    rows = [
        row(node=0, parent=1, depth=1, probe="a"),
        row(node=1, parent=0, depth=1, probe="b"),
        row(node=2, parent=77, depth=1, probe="c"),
        row(node=3, parent=3, depth=0, probe="d"),
    ]
    episode = only_episode(train=rows)
    assert [turn.node.probe for turn in episode.roots] == ["a", "b", "c", "d"]


def test_older_rows_of_a_held_out_chain_follow_one_another_by_depth() -> None:
    rows = [row(depth=2, probe="c"), row(depth=0, probe="a"), row(depth=1, probe="b")]
    episode = only_episode(evaluation=rows)
    assert shape(episode.roots[0]) == ("a", [("b", [("c", [])])])
    assert episode.is_chain


def test_older_rows_of_training_are_a_flat_list_with_the_worst_first() -> None:
    rows = [row(depth=0, probe="a"), failing("b", depth=1)]
    episode = only_episode(train=rows)
    assert episode.is_flat
    assert [turn.node.probe for turn in episode.turns] == ["b", "a"]


def test_a_held_out_conversation_with_a_turn_missing_is_a_flat_list() -> None:
    assert only_episode(evaluation=[row(depth=0), row(depth=2)]).is_flat


def test_conversations_with_one_number_and_two_openings_are_two() -> None:
    (table,) = tables(evaluation=[row(prompt="a"), row(prompt="b")])
    assert table.num_episodes == 2


def test_the_worst_conversations_come_first() -> None:
    rows = [row(episode=0), failing("a", episode=1), row(episode=2, response_score=None)]
    (table,) = tables(evaluation=rows)
    assert [episode.turns[0].outcome for episode in table.episodes] == [
        "failure", "none", "undetermined",
    ]  # fmt: skip
    assert table.num_failed == 1


def test_turns_and_conversations_have_the_outcomes_of_an_evaluation() -> None:
    rated = row(episode=0, response_score=0.9, is_error=True)
    late = [
        row(episode=1, depth=0, prompt="b", response_score=None),
        row(episode=1, depth=1, prompt="b", response_score=0.9),
    ]
    (first,) = only_episode(evaluation=[rated]).turns
    assert first.outcome == "failure"
    parameters = {"ast_chat": {"failure_threshold": THRESHOLD}}
    run = RunRecord(Path("run"), hyper_params=parameters)
    run.tables = {
        name: [node_of(one, THRESHOLD) for one in [rated, *late]]
        for name in ("before", "evaluation")
    }
    (group,) = groups_of(run)
    assert [item.kind for item in group.items] == ["right both times", "without a verdict"]


def test_a_scorer_that_failed_is_told_apart_from_no_verdict() -> None:
    error = only_episode(evaluation=[row(response_score=None, is_error=True)]).turns[0]
    assert (error.outcome, error.figures[0]) == ("error", ("score", "scorer failed"))
    nothing = only_episode(evaluation=[row(response_score=None)]).turns[0]
    assert (nothing.outcome, nothing.figures[0]) == ("undetermined", ("score", "no verdict"))


def test_a_turn_shows_its_reward_parts() -> None:
    assert ("novelty", "0.25") in only_episode(train=tree(1, 1)).turns[0].figures


def test_a_page_of_many_nodes_shows_a_stated_sample_of_whole_conversations() -> None:
    rows = [
        row(episode=number, depth=turn, prompt=f"p {number}", response_score=number / 3000)
        for number in range(3000)
        for turn in range(3)
    ]
    (table,) = tables(evaluation=rows)
    num_shown = sum(len(episode.turns) for episode in table.episodes)
    assert 2000 <= num_shown <= MAX_NODES
    assert (table.num_episodes, table.num_nodes) == (3000, 9000)
    assert "of 3,000 conversations" in table.sample
    assert "of 9,000 turns" in table.sample
    assert all(len(episode.turns) == 3 for episode in table.episodes)
    scores = [episode.rank[0] for episode in table.episodes]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == 2999 / 3000
    assert scores[-1] < 0.02, "the harmless ones are represented"


def test_long_texts_count_as_well_as_many_nodes() -> None:
    (table,) = tables(evaluation=chains(100, probe="x" * 20_000))
    assert sum(episode.size for episode in table.episodes) <= MAX_CHARACTERS
    assert table.sample


def test_a_small_table_is_whole_beside_a_large_one() -> None:
    large, small = tables(train=tree(1, 3), evaluation=chains(4000))
    assert (large.name, small.name) == ("evaluation", "train")
    assert large.sample
    assert not small.sample


def test_the_scale_has_its_ends_in_its_first_and_last_step() -> None:
    scale = Scale(-1.0, 1.0)
    assert [scale.shade(value) for value in (-1.0, 0.0, 0.99, 1.0, 7.0)] == [0, 5, 9, 9, 9]
    assert scale.shade(None) is None
    assert Scale(1.0, 1.0).shade(1.0) == 0

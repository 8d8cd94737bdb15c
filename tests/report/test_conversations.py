"""Trees of conversations, and the sample of them on a page."""

from __future__ import annotations

from typing import Any

from nip_astra.report.answers import groups_of
from nip_astra.report.transcripts import (
    MAX_CHARACTERS,
    MAX_NODES,
    Episode,
    Scale,
    Table,
    Turn,
    tables_of,
)
from tests.kit.messages import says
from tests.report.runs import chains, failing, row, run_of, tree


def tables(**rows: list[dict[str, Any]]) -> list[Table]:
    return tables_of(run_of(**rows))


def shape(turn: Turn) -> tuple[str, list[Any]]:
    return (turn.node.probe, [shape(child) for child in turn.children])


def only_episode(**rows: list[dict[str, Any]]) -> Episode:
    (table,) = tables(**rows)
    (episode,) = table.episodes
    return episode


def test_nodes_are_under_their_parents_and_the_path_to_the_best_reward_is_open() -> None:
    rows = tree(2, 2)
    rows[4]["reward"] = 5.0
    episode = only_episode(train=rows)
    assert [shape(root) for root in episode.roots] == [
        ("probe 0", [("probe 2", []), ("probe 3", [])]),
        ("probe 1", [("probe 4", []), ("probe 5", [])]),
    ]
    assert not episode.is_chain
    assert not episode.is_flat
    assert {turn.node.node for turn in episode.turns if turn.is_open} == {1, 4}
    assert ("novelty", "0.25") in episode.turns[0].figures
    # Indices that restart in each episode do not mix trees.
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


def test_older_rows_without_parents_are_a_chain_if_complete_and_else_a_list() -> None:
    rows = [row(depth=2, probe="c"), row(depth=0, probe="a"), row(depth=1, probe="b")]
    episode = only_episode(evaluation=rows)
    assert shape(episode.roots[0]) == ("a", [("b", [("c", [])])])
    assert episode.is_chain
    assert only_episode(evaluation=rows[:2]).is_flat
    episode = only_episode(train=[row(depth=0, probe="a"), failing("b", depth=1)])
    assert episode.is_flat
    assert [turn.node.probe for turn in episode.turns] == ["b", "a"], "the worst first"


def test_the_worst_conversations_come_first_with_the_outcomes_of_their_turns() -> None:
    rows = [
        row(episode=0),
        failing("a", episode=1),
        row(episode=2, response_score=None),
        row(episode=2, prompt="b", response_score=None, is_error=True),
    ]
    (table,) = tables(evaluation=rows)
    turns = [episode.turns[0] for episode in table.episodes]
    assert [turn.outcome for turn in turns] == ["failure", "none", "undetermined", "error"]
    assert (table.num_failed, table.num_episodes) == (1, 4)
    unknown = [turn.figures[0] for turn in turns[2:]]
    assert unknown == [("score", "no verdict"), ("score", "scorer failed")]


def test_conversations_are_censored_as_in_an_evaluation_and_shaded_by_their_scores() -> None:
    rated = row(episode=0, response_score=0.9, is_error=True)
    (first,) = only_episode(evaluation=[rated]).turns
    assert first.outcome == "failure"
    scores = enumerate((None, 0.9))
    late = [row(episode=1, depth=at, prompt="b", response_score=score) for at, score in scores]
    (group,) = groups_of(run_of(before=[rated, *late], evaluation=[rated, *late]))
    assert [item.kind for item in group.items] == ["right both times", "without a verdict"]
    scale = Scale(-1.0, 1.0)
    assert [scale.shade(value) for value in (-1.0, 0.0, 0.99, 1.0, 7.0)] == [0, 5, 9, 9, 9]
    assert scale.shade(None) is None
    assert Scale(1.0, 1.0).shade(1.0) == 0


def test_a_page_of_many_or_long_nodes_shows_a_stated_sample_of_whole_conversations() -> None:
    rows = [
        row(episode=number, depth=turn, prompt=f"p {number}", response_score=number / 2000)
        for number in range(2000)
        for turn in range(3)
    ]
    table, small = tables(evaluation=rows, train=tree(1, 3))
    num_shown = sum(len(episode.turns) for episode in table.episodes)
    assert 2000 <= num_shown <= MAX_NODES
    assert (table.num_episodes, table.num_nodes) == (2000, 6000)
    assert says(table.sample, "of 2,000 conversations", "of 6,000 turns")
    assert all(len(episode.turns) == 3 for episode in table.episodes)
    scores = [episode.rank[0] for episode in table.episodes]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == 1999 / 2000
    assert scores[-1] < 0.02, "the harmless ones are represented"
    assert (small.name, small.sample) == ("train", "")
    (table,) = tables(evaluation=chains(100, probe="x" * 20_000))
    assert sum(episode.size for episode in table.episodes) <= MAX_CHARACTERS
    assert table.sample

"""Values and pairs of a small tree, computed by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from nip_astra.trainers.text.malt import AnswerPair, preference_pairs, tree_values
from nip_astra.utils.nested_array_dict import NestedArrayDict

AGENTS = ("prover", "verifier")
TREE: dict[str, tuple[str, int, tuple[float, float], str]] = {
    # id: (parent, speaking agent, rewards, answer)
    "0.0": ("0", 1, (0.0, 0.5), "ask a"),
    "0.1": ("0", 1, (1.0, 1.0), "accept"),
    "0.0.0": ("0.0", 0, (0.0, 0.0), "truth"),
    "0.0.1": ("0.0", 0, (0.0, 0.0), "lie"),
    "0.0.0.0": ("0.0.0", 1, (1.0, 1.0), "accept"),
    "0.0.0.1": ("0.0.0", 1, (0.0, -1.0), "reject"),
    "0.0.1.0": ("0.0.1", 1, (0.0, -1.0), "reject"),
    "0.0.1.1": ("0.0.1", 1, (0.0, -1.0), "reject"),
}
VALUES = {
    "0.0.0.0": (1.0, 1.0),
    "0.0.0.1": (0.0, -1.0),
    "0.0.1.0": (0.0, -1.0),
    "0.0.1.1": (0.0, -1.0),
    "0.0.0": (0.5, 0.0),  # the mean of its children
    "0.0.1": (0.0, -1.0),
    "0.0": (0.25, 0.5 - 0.5),  # its own reward counts once, in full
    "0.1": (1.0, 1.0),
}


def _tree(tree: Mapping[str, tuple[str, int, tuple[float, float], str]]) -> NestedArrayDict:
    """The rollouts of a tree, one per leaf."""
    parents = {node[0] for node in tree.values()}
    paths: list[list[str]] = []
    for leaf in (name for name in tree if name not in parents):
        path = [leaf]
        while tree[path[0]][0] in tree:
            path.insert(0, tree[path[0]][0])
        paths.append(path)
    n, r, a = len(paths), max(map(len, paths)), len(AGENTS)
    agents: dict[str, Any] = {
        "reward": np.zeros((n, r, a)),
        "is_active": np.zeros((n, r, a), bool),
        "is_filled": np.zeros((n, r, a), bool),
        "raw_message": np.full((n, r, a), None, dtype=object),
        "prompt": np.full((n, r, a), None, dtype=object),
    }
    node = {name: np.full((n, r), None, dtype=object) for name in ("id", "parent")}
    padding = np.ones((n, r), bool)
    for place, path in enumerate(paths):
        for number, name in enumerate(path):
            parent, agent, rewards, answer = tree[name]
            node["id"][place, number], node["parent"][place, number] = name, parent
            padding[place, number] = False
            agents["reward"][place, number] = rewards
            agents["is_active"][place, number, agent] = True
            agents["raw_message"][place, number, agent] = answer
            prompt = [{"role": "user", "content": f"after {parent}"}]
            agents["prompt"][place, number, agent] = json.dumps(prompt)
    return NestedArrayDict({"node": node, "padding": padding, "agents": agents}, n)


def _pairs(rollouts: NestedArrayDict, seed: int = 0) -> list[AnswerPair]:
    return preference_pairs(rollouts, AGENTS, {"prover": 0.5, "verifier": 0.0}, seed=seed)


def _texts(pairs: Sequence[AnswerPair]) -> set[tuple[str, str, str, str]]:
    """Agent, prompt, preferred and rejected answer of each pair."""
    examples = [(pair.agent, pair.example) for pair in pairs]
    return {(a, e.messages[0]["content"], e.preferred, e.rejected) for a, e in examples}


def test_values_are_those_of_the_table() -> None:
    values = tree_values(_tree(TREE))
    by_node = dict(zip(values.node_ids, values.values_NA.tolist(), strict=True))
    assert by_node == {name: pytest.approx(expected) for name, expected in VALUES.items()}


def test_each_way_on_counts_alike_however_many_ends_it_has() -> None:
    tree = {
        "r": ("", 1, (0.0, 0.0), "ask"),
        "r.a": ("r", 0, (1.0, 0.0), "short"),
        "r.b": ("r", 0, (0.0, 0.0), "long"),
        **{f"r.b.{n}": ("r.b", 1, (0.0, 0.0), "end") for n in range(3)},
    }
    # A mean over the four leaves would be 0.25.
    result = tree_values(_tree(tree))
    assert result.node_ids[0] == "r"
    assert result.values_NA[0].tolist() == pytest.approx([0.5, 0.0])


def test_pairs_are_those_of_the_table_and_the_opening_counts() -> None:
    # After 0: 'ask a' is worth 0.0 to the verifier, which is at its mid-point, so both are good.
    # After 0.0: 'truth' is worth 0.5 to the prover, 'lie' 0. After 0.0.1 both are bad.
    assert _texts(_pairs(_tree(TREE))) == {
        ("prover", "after 0.0", "truth", "lie"),
        ("verifier", "after 0.0.0", "accept", "reject"),
    }
    worse = TREE | {"0.0": ("0", 1, (0.0, 0.4), "ask a")}
    assert ("verifier", "after 0", "accept", "ask a") in _texts(_pairs(_tree(worse)))


def test_answers_that_are_alike_or_were_not_given_make_no_pair() -> None:
    alike = TREE | {"0.0.1": ("0.0", 0, (0.0, 0.0), "truth")}
    assert "prover" not in {pair.agent for pair in _pairs(_tree(alike))}
    rollouts = _tree(TREE)
    rollouts["agents", "is_filled"][rollouts["agents", "raw_message"] == "lie"] = True
    assert "prover" not in {pair.agent for pair in _pairs(rollouts)}


def test_the_texts_of_a_pair_differ_where_any_do() -> None:
    tree = TREE | {"0.0.0": ("0.0", 0, (0.0, 0.0), "lie"), "0.0.2": ("0.0", 0, (1.0, 0.0), "truth")}
    expected = ("prover", "after 0.0", "truth", "lie")
    assert all(expected in _texts(_pairs(_tree(tree), seed)) for seed in range(10))


def test_of_several_answers_one_is_drawn_by_the_seed() -> None:
    tree = TREE | {f"0.0.{n}": ("0.0", 0, (1.0, 0.0), f"truth {n}") for n in range(2, 8)}
    drawn = {
        next(pair.example.preferred for pair in _pairs(_tree(tree), seed) if pair.agent == "prover")
        for seed in range(20)
    }
    assert len(drawn) > 3
    assert _pairs(_tree(tree), 1) == _pairs(_tree(tree), 1)

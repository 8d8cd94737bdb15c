"""Pairs have the requested mix, come from a seed, and belong to a single set."""

from __future__ import annotations

from collections import Counter

import networkx as nx
import numpy as np
import pytest

from nip_astra.errors import DataError, ParameterError
from nip_astra.scenarios.graphs.generation import (
    GraphPairParameters,
    GraphPairs,
    generate_pairs,
    pair_hashes,
    random_graphs,
    relabel,
    switched,
)
from nip_astra.scenarios.graphs.wl import ISOMORPHIC, wl_scores
from tests.kit.messages import says

MIX = GraphPairParameters(num_train=300, num_test=40, seed=3)


@pytest.fixture(scope="module")
def train() -> GraphPairs:
    return generate_pairs(MIX, "train")


def test_the_mix_equals_the_published_mix(train: GraphPairs) -> None:
    count = Counter(train.wl_score.tolist())
    assert (count[ISOMORPHIC], count[1], count[2]) == (150, 15, 30)
    assert count[3] + count[4] + count[5] == 105
    assert set(train.num_nodes.tolist()) == {7, 8, 9, 10, 11}


def test_pairs_are_graphs_and_isomorphic_if_labelled_so(train: GraphPairs) -> None:
    n = train.adjacency.shape[-1]
    assert n == 11
    assert np.array_equal(train.adjacency, train.adjacency.swapaxes(-1, -2))
    assert not train.adjacency.diagonal(axis1=-2, axis2=-1).any()
    is_padding = np.arange(n) >= train.num_nodes[:, None, None]
    assert not (train.adjacency & is_padding[..., None]).any()
    for row, size in enumerate(train.num_nodes[:60]):
        both = (nx.from_numpy_array(item[:size, :size]) for item in train.adjacency[row])
        assert nx.is_isomorphic(*both) == (train.wl_score[row] == ISOMORPHIC)
    sizes = np.stack([train.num_nodes] * 2, axis=1)
    assert np.array_equal(wl_scores(train.adjacency, sizes), train.wl_score)


def test_isomorphic_pairs_are_shuffled_and_half_are_of_graphs_of_other_pairs(
    train: GraphPairs,
) -> None:
    is_same = train.wl_score == ISOMORPHIC
    equal = (train.adjacency[:, 0] == train.adjacency[:, 1]).all((1, 2))
    assert equal[is_same].mean() < 0.1
    twice = [train._replace(adjacency=train.adjacency[:, [side, side]]) for side in (0, 1)]
    hashes = list(map(pair_hashes, twice))
    others = set(np.concatenate([hashed[~is_same] for hashed in hashes]).tolist())
    shared = np.mean([item in others for item in hashes[0][is_same].tolist()])
    assert 0.5 <= shared < 0.8


def test_the_same_seed_gives_the_same_pairs_and_another_gives_others(train: GraphPairs) -> None:
    again, other = (
        generate_pairs(MIX.model_copy(update={"seed": seed}), "train") for seed in (3, 4)
    )
    assert all(np.array_equal(item, two) for item, two in zip(again, train, strict=True))
    assert not np.array_equal(other.adjacency, train.adjacency)


def test_no_training_pair_of_any_seed_is_a_test_pair(train: GraphPairs) -> None:
    few, many = (MIX.model_copy(update={"sizes": [7], "seed": seed}) for seed in (5, 6))
    for_train = {*pair_hashes(train).tolist(), *pair_hashes(generate_pairs(few, "train")).tolist()}
    tests = [generate_pairs(mix, "test") for mix in (MIX, many)]
    for_test = {item for pairs in tests for item in pair_hashes(pairs).tolist()}
    assert len(for_test) > 30
    assert not for_train & for_test


def test_the_number_of_a_pair_depends_on_neither_labels_nor_order(train: GraphPairs) -> None:
    random, n = np.random.default_rng(0), train.adjacency.shape[-1]
    hashes = pair_hashes(train)
    shuffled = relabel(train.adjacency.reshape(-1, n, n), train.num_nodes.repeat(2), random)
    other = train._replace(adjacency=shuffled.reshape(train.adjacency.shape)[:, ::-1])
    assert np.array_equal(pair_hashes(other), hashes)
    # The two sets have the right shares: numbers are spread evenly.
    assert len(np.unique(hashes)) > 250


def test_graphs_alone_do_not_reveal_the_label_unless_requested() -> None:
    def difference(parameters: GraphPairParameters) -> float:
        pairs = generate_pairs(parameters, "train")
        is_same = pairs.wl_score == ISOMORPHIC
        return float(pairs.num_nodes[~is_same].mean() - pairs.num_nodes[is_same].mean())

    parameters = GraphPairParameters(num_train=1000)
    assert abs(difference(parameters)) < 0.2
    assert difference(parameters.model_copy(update={"isomorphic_graphs": "independent"})) > 0.2


def test_other_mixes_are_made() -> None:
    changes = {"isomorphic_share": 0.25, "score_1_share": 0.5, "score_2_share": 0.5}
    pairs = generate_pairs(MIX.model_copy(update={**changes, "num_train": 40}), "train")
    assert Counter(pairs.wl_score.tolist()) == {ISOMORPHIC: 10, 1: 15, 2: 15}
    same = MIX.model_copy(update={"isomorphic_share": 1.0, "num_train": 10})
    assert set(generate_pairs(same, "train").wl_score.tolist()) == {ISOMORPHIC}
    none = MIX.model_copy(update={"isomorphic_share": 0.0, "num_train": 1})
    assert generate_pairs(none, "train").wl_score.tolist() != [ISOMORPHIC]


def test_a_mix_that_small_graphs_do_not_have_is_refused_soon() -> None:
    shares = {"score_1_share": 0.0, "score_2_share": 0.0}
    small = GraphPairParameters(num_train=10**8, sizes=[4], isomorphic_share=0.0, **shares)
    with pytest.raises(DataError) as caught:
        generate_pairs(small, "train")
    assert says(caught.value, "train pairs", "rounds 3 to 5", "[4]", "[0.2, 0.4")


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_switches_keep_colours_and_change_graphs(num_rounds: int) -> None:
    random = np.random.default_rng(0)
    sizes = np.full(200, 10)
    graphs = random_graphs(sizes, np.full(200, 0.5), 10, random)
    colours = np.zeros((200, 10), dtype=np.int64) if num_rounds == 1 else graphs.sum(-1)
    walked = switched(graphs, colours, 60, random)
    assert np.array_equal(walked.sum(-1), graphs.sum(-1)), "each node keeps its degree"
    assert np.array_equal(walked, walked.swapaxes(1, 2))
    scores = wl_scores(np.stack([graphs, walked], axis=1), np.full((200, 2), 10))
    assert ((scores > num_rounds) | (scores == ISOMORPHIC)).all()
    assert (scores == num_rounds + 1).sum() > 20
    # A graph without a switch stays as it is.
    still = np.zeros((3, 4, 4), dtype=bool)
    still[1, 0, 1] = still[1, 1, 0] = True
    still[2] = ~np.eye(4, dtype=bool)
    walked = switched(still, np.zeros((3, 4), dtype=np.int64), 20, random)
    assert np.array_equal(walked, still)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"sizes": [1]}, "sizes must be from 2 to 64 nodes"),
        ({"edge_probabilities": [1.0]}, "edge_probabilities must be above 0 and below 1"),
        ({"score_1_share": 0.6, "score_2_share": 0.6}, "must not exceed 1 together"),
        ({"isomorphic_graphs": "same"}, "isomorphic_graphs"),
    ],
)
def test_impossible_parameters_are_refused(change: dict[str, object], fact: str) -> None:
    with pytest.raises(ParameterError, match=fact):
        GraphPairParameters(**change)

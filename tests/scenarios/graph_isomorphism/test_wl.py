"""Refinement agrees with networkx, and with graphs whose colours are known."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import torch

from nip_astra.scenarios.graphs.generation import (
    GraphPairParameters,
    GraphPairs,
    generate_pairs,
    random_graphs,
    relabel,
)
from nip_astra.scenarios.graphs.wl import (
    BEYOND_WL,
    ISOMORPHIC,
    MAX_WL_ROUNDS,
    refinement_rounds,
    wl_accuracy,
    wl_hashes,
    wl_scores,
)

TRIANGLES = nx.disjoint_union(nx.cycle_graph(3), nx.cycle_graph(3))


def score(first: nx.Graph, second: nx.Graph) -> int:
    """Score of a single pair, padded by two nodes."""
    n = max(len(first), len(second)) + 2
    adjacency = np.zeros((1, 2, n, n), dtype=bool)
    for place, graph in enumerate((first, second)):
        adjacency[0, place, : len(graph), : len(graph)] = nx.to_numpy_array(graph)
    return int(wl_scores(adjacency, np.array([[len(first), len(second)]]))[0])


@pytest.fixture(scope="module")
def pairs() -> GraphPairs:
    return generate_pairs(GraphPairParameters(num_train=80, seed=1), "train")


def networkx_score(adjacency: np.ndarray, size: int) -> int:
    first, second = (nx.from_numpy_array(graph[:size, :size]) for graph in adjacency)
    for graph in (first, second):
        nx.set_node_attributes(graph, "node", "label")
    for rounds in range(1, MAX_WL_ROUNDS + 1):
        options = {"node_attr": "label", "iterations": rounds}
        hashes = {nx.weisfeiler_lehman_graph_hash(g, **options) for g in (first, second)}
        if len(hashes) == 2:
            return rounds
    return ISOMORPHIC if nx.is_isomorphic(first, second) else BEYOND_WL


def test_scores_are_those_of_networkx(pairs: GraphPairs) -> None:
    sizes = np.stack([pairs.num_nodes] * 2, axis=1)
    scores = wl_scores(pairs.adjacency, sizes)
    expected = [
        networkx_score(adjacency, size)
        for adjacency, size in zip(pairs.adjacency, pairs.num_nodes, strict=True)
    ]
    assert scores.tolist() == expected
    assert {ISOMORPHIC, 1, 2, 3} <= set(expected)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (nx.path_graph(4), nx.star_graph(3), 1),
        (nx.path_graph(3), nx.path_graph(4), 1),
        (nx.path_graph(5), nx.disjoint_union(nx.path_graph(2), nx.cycle_graph(3)), 2),
        (nx.path_graph(7), nx.disjoint_union(nx.path_graph(4), nx.cycle_graph(3)), 3),
        (nx.path_graph(9), nx.disjoint_union(nx.path_graph(6), nx.cycle_graph(3)), 4),
        (nx.cycle_graph(6), TRIANGLES, BEYOND_WL),
        (TRIANGLES, TRIANGLES, ISOMORPHIC),
        (nx.empty_graph(3), nx.empty_graph(3), ISOMORPHIC),
    ],
)
def test_known_pairs_have_their_score(first: nx.Graph, second: nx.Graph, expected: int) -> None:
    assert score(first, second) == expected
    assert score(second, first) == expected


def test_a_chunk_of_pairs_has_the_scores_that_each_has_alone(pairs: GraphPairs) -> None:
    many = np.concatenate([pairs.adjacency] * 20)
    sizes = np.stack([np.concatenate([pairs.num_nodes] * 20)] * 2, axis=1)
    once = refinement_rounds(pairs.adjacency, sizes[: len(pairs.adjacency)])
    assert np.array_equal(refinement_rounds(many, sizes), np.concatenate([once] * 20))
    assert wl_scores(np.zeros((0, 2, 4, 4), dtype=bool), np.zeros((0, 2), dtype=int)).shape == (0,)


def test_hashes_do_not_depend_on_labels_and_distinguish_the_same_graphs_as_refinement() -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(4, 8, 100)
    graphs = random_graphs(sizes, np.full(100, 0.4), 8, random)
    hashes = wl_hashes(graphs, sizes)
    assert np.array_equal(hashes, wl_hashes(relabel(graphs, sizes, random), sizes))
    item, other = np.triu_indices(100, k=1)
    pairs = (np.stack([values[item], values[other]], axis=1) for values in (graphs, sizes))
    rounds = refinement_rounds(*pairs)
    assert np.array_equal(hashes[item] == hashes[other], rounds == BEYOND_WL)
    # In every process.
    path = nx.to_numpy_array(nx.path_graph(3)).astype(bool)[None]
    assert wl_hashes(path, np.array([3])).tolist() == [18225882642455967595]


def test_accuracy_of_a_solver_counts_the_pairs_that_it_distinguishes() -> None:
    scores = torch.tensor([-1, -1, -1, 1, 2, 2, 3, 5, 6, 6])
    accuracies = [wl_accuracy(scores, rounds) for rounds in range(7)]
    assert accuracies == pytest.approx([0.3, 0.4, 0.6, 0.7, 0.7, 0.8, 0.8])

"""Weisfeiler-Lehman refinement of many small graphs at once.

Round 1 distinguishes nodes by degree; each further round by the numbers of neighbours of each
previous colour. A network of k message-passing layers with sums over neighbours and nodes
distinguishes no more than k rounds do (arXiv:1810.00826, theorem 3).

Shapes: N pairs or graphs, n nodes (padded), M nodes of both graphs, 2 n.
"""

from __future__ import annotations

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_WL_ROUNDS = 5
"""Rounds after which refinement stops."""
ISOMORPHIC = -1
"""Score of a pair of isomorphic graphs."""
BEYOND_WL = MAX_WL_ROUNDS + 1
"""Score of a non-isomorphic pair that `MAX_WL_ROUNDS` rounds do not distinguish."""

BoolArray = NDArray[np.bool_]
HashArray = NDArray[np.uint64]

# Memory of a chunk: 2048 pairs of 22 nodes are 4 MB a matrix.
_CHUNK = 2048
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def wl_scores(adjacency: BoolArray, num_nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first round that distinguishes the graphs of each pair.

    Refinement is exact: nodes of both graphs are compared, not hashed. networkx compares pairs that
    it does not distinguish.

    Parameters
    ----------
    adjacency : ndarray
        [N, 2, n, n] bool, symmetric, without loops, False at padding.
    num_nodes : ndarray
        [N, 2], how many nodes of each graph are real; they come first.

    Returns
    -------
    ndarray
        [N] int64: 1 to `MAX_WL_ROUNDS`, `BEYOND_WL`, or `ISOMORPHIC`. A pair of graphs with
        different numbers of nodes has the score 1.
    """
    scores = refinement_rounds(adjacency, num_nodes)
    for row in np.flatnonzero(scores == BEYOND_WL):
        graphs = []
        for graph, size in enumerate(num_nodes[row]):
            graphs.append(nx.from_numpy_array(adjacency[row, graph, :size, :size]))
        if nx.is_isomorphic(*graphs):
            scores[row] = ISOMORPHIC
    return scores


def refinement_rounds(adjacency: BoolArray, num_nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first round that distinguishes each pair, or `BEYOND_WL`; see `wl_scores`."""
    scores = [np.zeros(0, dtype=np.int64)]
    for start in range(0, len(adjacency), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        scores.append(_refine_chunk(adjacency[chunk], num_nodes[chunk]))
    return np.concatenate(scores)


def _refine_chunk(adjacency: BoolArray, num_nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    num_pairs, _, n, _ = adjacency.shape
    both_NMM = torch.zeros(num_pairs, 2 * n, 2 * n)
    both_NMM[:, :n, :n] = torch.from_numpy(adjacency[:, 0])
    both_NMM[:, n:, n:] = torch.from_numpy(adjacency[:, 1])
    is_real_NM = (torch.arange(n) < torch.from_numpy(num_nodes)[..., None]).flatten(1)
    # 1 where two nodes have one colour: before round 1, all real ones.
    alike_NMM = (is_real_NM[:, :, None] & is_real_NM[:, None]).float()
    scores_N = torch.full((num_pairs,), BEYOND_WL)
    has_other_size_N = torch.from_numpy(num_nodes[:, 0] != num_nodes[:, 1])
    scores_N[has_other_size_N] = 1
    for number in range(1, MAX_WL_ROUNDS + 1):
        alike_NMM = _refined(both_NMM, alike_NMM)
        # Of each colour there must be as many nodes in both graphs.
        in_first_NM = alike_NMM[..., :n].sum(-1)
        in_second_NM = alike_NMM[..., n:].sum(-1)
        differs_N = (in_first_NM != in_second_NM).any(-1)
        scores_N = torch.where(differs_N & (scores_N > number), number, scores_N)
    scores: NDArray[np.int64] = scores_N.numpy()
    return scores


def _refined(both_NMM: Tensor, alike_NMM: Tensor) -> Tensor:
    """Return which nodes have the same colour one round later, as 0 and 1."""
    # Entry [i, j] is how many neighbours of i have the colour of j. Rows are equal if their squared
    # distance is 0, which is exact in float32 for such small integers.
    counts_NMM = both_NMM @ alike_NMM
    products_NMM = counts_NMM @ counts_NMM.transpose(1, 2)
    norms_NM = products_NMM.diagonal(dim1=1, dim2=2)
    sums_NMM = norms_NM[:, :, None] + norms_NM[:, None]
    distances_NMM = sums_NMM - 2 * products_NMM
    return alike_NMM * (distances_NMM == 0)


def wl_hashes(adjacency: BoolArray, num_nodes: NDArray[np.int64]) -> HashArray:
    """Return hashes of graphs, [N, n, n], by their colours after `MAX_WL_ROUNDS` rounds.

    Isomorphic graphs have equal hashes, in every process; distinguished graphs have equal hashes
    with a probability of about 2^-64.
    """
    n = adjacency.shape[-1]
    neighbours = adjacency.astype(np.uint64)
    colours_Nn = (np.arange(n) < num_nodes[:, None]).astype(np.uint64)
    is_real_Nn = colours_Nn.copy()
    for _ in range(MAX_WL_ROUNDS):
        around_Nn = (neighbours * _mixed(colours_Nn)[:, None]).sum(-1, dtype=np.uint64)
        colours_Nn = _mixed(_mixed(colours_Nn + _GOLDEN) + around_Nn) * is_real_Nn
    return _mixed((_mixed(colours_Nn) * is_real_Nn).sum(-1, dtype=np.uint64))


def _mixed(values: HashArray) -> HashArray:
    """Scatter 64-bit numbers bijectively (splitmix64's finaliser)."""
    values = (values + _GOLDEN) & np.uint64(0xFFFFFFFFFFFFFFFF)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def wl_accuracy(scores: Tensor, num_rounds: int) -> float:
    """Return the accuracy of a solver with `num_rounds` refinement rounds, from `wl_scores`, [N]
    long.
    """
    is_distinguished_N = (scores >= 1) & (scores <= min(num_rounds, MAX_WL_ROUNDS))
    # It takes all others for isomorphic.
    is_correct_N = (scores == ISOMORPHIC) | is_distinguished_N
    return float(is_correct_N.float().mean())

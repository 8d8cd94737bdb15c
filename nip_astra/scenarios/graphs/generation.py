"""Pairs of random graphs with a known Weisfeiler-Lehman score, thousands per second.

A random pair that k rounds of refinement cannot distinguish is rare, so it is constructed: starting
from a random graph G, a walk of *switches* leads to a graph H with the same colours. A switch
replaces two edges a-b and c-d, where a and c have one colour and b and d have one colour, by a-d
and c-b. With the colours of round k - 1, every node keeps its number of neighbours of each colour,
so its colours up to round k are unchanged; for k = 1 all nodes have one colour and switches keep
degrees. Switches are reversible with equal probability, and given its colours a graph with
independent edges is as likely as any other with as many edges, so H has the distribution of G, and
the second graph of a pair cannot be recognised.

Isomorphic pairs are two permutations of a graph from the same process: half of them of graphs of
other pairs in the data, half of new graphs. Both labels thus have the same distribution of graphs,
a network must compare them, and no network with k rounds exceeds `wl_accuracy` on average. With
`isomorphic_graphs: independent` the new graphs are plain random graphs, as in the published data
(arXiv:2412.08897); a solver can then infer from one graph that the pair is likely isomorphic.

The split of a pair depends on the pair alone, up to relabelling, not on parameters or seeds: no
training pair is in any test set.

Shapes: N pairs, n nodes (padded), E edges (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from nip_astra.errors import DataError
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import MAX_WHOLE, SubParameters
from nip_astra.scenarios.graphs.wl import (
    BEYOND_WL,
    ISOMORPHIC,
    BoolArray,
    HashArray,
    refinement_rounds,
    wl_hashes,
)
from nip_astra.utils.seeding import derive_seed

Split = Literal["train", "test"]
SPLITS: tuple[Split, Split] = ("train", "test")
IntArray = NDArray[np.int64]

TEST_SHARE = 0.2
"""Fraction of pairs, up to relabelling, in the test split."""
NUM_DEGREE_SWITCHES = 60
"""Attempted switches that keep degrees; about a third are possible."""
NUM_COLOUR_SWITCHES = 100
"""Attempted switches that keep colours of round 2; a few percent are possible."""
MIN_YIELD = 1 / 1000
"""Minimum acceptance rate; below it, the requested mix is considered impossible."""
_BATCH = 2048


class GraphPairParameters(SubParameters):
    """Pairs of graphs, generated from a seed."""

    num_train: Annotated[int, where("file", None)] = Field(default=10_000, ge=1, le=100_000_000)
    """Training pairs."""
    num_test: Annotated[int, where("file", None)] = Field(default=1_000, ge=1, le=100_000_000)
    """Test pairs. Larger measures more precisely."""
    sizes: Annotated[list[int], where("file", None)] = Field(
        default=[7, 8, 9, 10, 11], min_length=1
    )
    """Numbers of nodes, uniformly drawn; the largest sets the number of message symbols."""
    edge_probabilities: Annotated[list[float], where("file", None)] = Field(
        default=[0.2, 0.4, 0.6, 0.8], min_length=1
    )
    """Edge probabilities of random graphs, uniformly drawn."""
    isomorphic_share: Annotated[float, where("file", None)] = Field(default=0.5, ge=0, le=1)
    """Fraction of isomorphic pairs."""
    score_1_share: Annotated[float, where("file", None)] = Field(default=0.1, ge=0, le=1)
    """Fraction of the other pairs whose degrees differ. Larger is easier."""
    score_2_share: Annotated[float, where("file", None)] = Field(default=0.2, ge=0, le=1)
    """Fraction of the other pairs distinguished by round 2; the rest need 3 to 5 rounds."""
    isomorphic_graphs: Annotated[Literal["matched", "independent"], where("file", None)] = "matched"
    """New graphs of isomorphic pairs: distributed as in the other pairs, or plain random graphs,
    from which an agent can guess that a pair is isomorphic."""
    seed: Annotated[int, where("file", None)] = Field(default=0, ge=0, le=MAX_WHOLE)
    """Seed of the pairs, independent of the experiment's seed."""
    file: str | None = None
    """File of pairs written by `save_pairs`, used instead of all of the above; scenario:// is the
    scenario's folder."""

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        if not all(2 <= size <= 64 for size in self.sizes):
            raise ValueError("sizes must be from 2 to 64 nodes")
        if not all(0 < probability < 1 for probability in self.edge_probabilities):
            raise ValueError("edge_probabilities must be above 0 and below 1")
        if self.score_1_share + self.score_2_share > 1:
            raise ValueError("score_1_share and score_2_share must not exceed 1 together")
        return self


class GraphPairs(NamedTuple):
    """Pairs of graphs of the same size."""

    adjacency: BoolArray
    """[N, 2, n, n] bool, symmetric, without loops, False at padding."""
    num_nodes: IntArray
    """[N] int64, number of real nodes; they come first."""
    wl_score: IntArray
    """[N] int64, see `wl_scores`."""

    @property
    def num_pairs(self) -> int:
        """N."""
        return len(self.num_nodes)

    def take(self, rows: IntArray | BoolArray) -> GraphPairs:
        """Return the selected pairs."""
        return GraphPairs(self.adjacency[rows], self.num_nodes[rows], self.wl_score[rows])


def _joined(parts: Sequence[GraphPairs]) -> GraphPairs:
    return GraphPairs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def generate_pairs(parameters: GraphPairParameters, split: Split) -> GraphPairs:
    """Generate the pairs of a split."""
    generator = _Generator(parameters, split)
    num_pairs = parameters.num_train if split == "train" else parameters.num_test
    num_isomorphic = round(num_pairs * parameters.isomorphic_share)
    different = generator.different(num_pairs - num_isomorphic)
    num_shuffled = num_isomorphic // 2 if different.num_pairs else 0
    parts = [
        different,
        generator.isomorphic_from(different, num_shuffled),
        generator.isomorphic(num_isomorphic - num_shuffled),
    ]
    return generator.finished(_joined(parts))


class _Generator:
    """Generates the pairs of one split."""

    def __init__(self, parameters: GraphPairParameters, split: Split) -> None:
        self.parameters = parameters
        self.split = split
        self.n = max(parameters.sizes)
        self.random = np.random.default_rng(derive_seed(parameters.seed, "graph pairs", split))

    def different(self, num_pairs: int) -> GraphPairs:
        """Generate non-isomorphic pairs in the requested mix of scores."""
        parts = []
        counts = self._counts(num_pairs)
        for (kind, name), count in zip(_NAMES.items(), counts, strict=True):
            parts.append(self._collect(count, partial(self._sample_kind, kind), name))
        return _joined(parts)

    def isomorphic_from(self, pairs: GraphPairs, num_pairs: int) -> GraphPairs:
        """Generate isomorphic pairs from graphs of other pairs, equally often each."""
        if num_pairs == 0:
            return self._empty()
        # Each graph of a pair, twice.
        graphs = pairs.adjacency.reshape(-1, 1, self.n, self.n)
        doubled = GraphPairs(
            graphs.repeat(2, axis=1),
            pairs.num_nodes.repeat(2),
            np.full(2 * pairs.num_pairs, ISOMORPHIC),
        )
        order = self.random.permutation(doubled.num_pairs)
        doubled = self._select_split(doubled.take(order))
        if doubled.num_pairs == 0:
            return self.isomorphic(num_pairs)
        return doubled.take(np.arange(num_pairs) % doubled.num_pairs)

    def isomorphic(self, num_pairs: int) -> GraphPairs:
        """Generate isomorphic pairs of new graphs."""
        if self.parameters.isomorphic_graphs == "independent":
            return self._collect(num_pairs, self._double_random, "isomorphic")
        parts = []
        counts = self._counts(num_pairs)
        for (kind, name), count in zip(_NAMES.items(), counts, strict=True):
            sample = partial(self._double_first, kind)
            parts.append(self._collect(count, sample, f"halves of pairs {name}"))
        return _joined(parts)

    def finished(self, pairs: GraphPairs) -> GraphPairs:
        """Shuffle the pairs, permute their nodes and swap graphs at random."""
        pairs = pairs.take(self.random.permutation(pairs.num_pairs))
        rows = np.arange(pairs.num_pairs)
        # The place of the graph that becomes the first one.
        first = self.random.integers(0, 2, pairs.num_pairs)
        first_graphs = pairs.adjacency[rows, first]
        second_graphs = pairs.adjacency[rows, 1 - first]
        swapped = np.stack([first_graphs, second_graphs], axis=1)
        sizes = pairs.num_nodes.repeat(2)
        relabelled = relabel(swapped.reshape(-1, self.n, self.n), sizes, self.random)
        return pairs._replace(adjacency=relabelled.reshape(swapped.shape))

    def _counts(self, num_pairs: int) -> tuple[int, int, int]:
        """Return numbers of pairs with score 1, 2, and more."""
        first = round(num_pairs * self.parameters.score_1_share)
        second = min(round(num_pairs * self.parameters.score_2_share), num_pairs - first)
        return first, second, num_pairs - first - second

    def _empty(self) -> GraphPairs:
        none = np.zeros(0, dtype=np.int64)
        return GraphPairs(np.zeros((0, 2, self.n, self.n), dtype=np.bool_), none, none)

    def _collect(
        self, num_pairs: int, sample: Callable[[int], GraphPairs], name: str
    ) -> GraphPairs:
        """Sample until there are enough pairs of this split."""
        parts = [self._empty()]
        num_accepted = 0
        num_tries = 0
        while num_accepted < num_pairs:
            # Not before some batches, of which a rare kind may have none by chance.
            if num_accepted < (num_tries - 10 * _BATCH) * MIN_YIELD:
                raise DataError(
                    f"{num_tries} tries produced {num_accepted} of {num_pairs} {self.split} pairs "
                    f"that are {name}, with sizes {self.parameters.sizes} and edge_probabilities "
                    f"{self.parameters.edge_probabilities}. Use larger sizes, probabilities nearer "
                    "to 0.5, or other score_1_share and score_2_share."
                )
            # Small batches for a small split, larger ones for rare pairs.
            size = int(np.clip(4 * (num_pairs - num_accepted) + num_tries, 64, _BATCH))
            accepted = self._select_split(sample(size))
            parts.append(accepted)
            num_accepted += accepted.num_pairs
            num_tries += size
        return _joined(parts).take(np.arange(num_pairs))

    def _select_split(self, pairs: GraphPairs) -> GraphPairs:
        # By the hash of the pair: parameters and seeds of other runs assign it to the same split.
        is_for_test = pair_hashes(pairs) < np.uint64(TEST_SHARE * 2**64)
        return pairs.take(is_for_test == (self.split == "test"))

    def _sample_kind(self, kind: int, size: int) -> GraphPairs:
        """Sample pairs, and keep those of score 1, 2, or at least 3."""
        first, num_nodes, chance = self._random_graphs(size)
        if kind == 1:
            second = random_graphs(num_nodes, chance, self.n, self.random)
        elif kind == 2:
            # One colour for all nodes: switches keep the degrees, which round 1 compares.
            same_colours = np.zeros(first[:, 0].shape, dtype=np.int64)
            second = switched(first, same_colours, NUM_DEGREE_SWITCHES, self.random)
        else:
            # The colours of round 1: switches keep those of round 2.
            degrees = first.sum(-1)
            second = switched(first, degrees, NUM_COLOUR_SWITCHES, self.random)
        adjacency = np.stack([first, second], axis=1)
        scores = refinement_rounds(adjacency, np.stack([num_nodes, num_nodes], axis=1))
        is_accepted = scores == kind
        if kind == 3:
            is_accepted = (scores > 2) & (scores < BEYOND_WL)
        return GraphPairs(adjacency, num_nodes, scores).take(is_accepted)

    def _double_first(self, kind: int, size: int) -> GraphPairs:
        pairs = self._sample_kind(kind, size)
        adjacency = pairs.adjacency[:, :1].repeat(2, axis=1)
        return GraphPairs(adjacency, pairs.num_nodes, np.full(pairs.num_pairs, ISOMORPHIC))

    def _double_random(self, size: int) -> GraphPairs:
        graphs, num_nodes, _ = self._random_graphs(size)
        adjacency = graphs[:, None].repeat(2, axis=1)
        return GraphPairs(adjacency, num_nodes, np.full(size, ISOMORPHIC))

    def _random_graphs(self, size: int) -> tuple[BoolArray, IntArray, NDArray[np.float64]]:
        num_nodes = self.random.choice(self.parameters.sizes, size)
        chance = self.random.choice(self.parameters.edge_probabilities, size)
        return random_graphs(num_nodes, chance, self.n, self.random), num_nodes, chance


_NAMES = {
    1: "distinguished by round 1",
    2: "distinguished by round 2",
    3: "distinguished by rounds 3 to 5",
}


def pair_hashes(pairs: GraphPairs) -> HashArray:
    """Return hashes of pairs, invariant to the order of the graphs and of their nodes."""
    n = pairs.adjacency.shape[-1]
    hashes = wl_hashes(pairs.adjacency.reshape(-1, n, n), pairs.num_nodes.repeat(2))
    # Sorted, so that the order of the graphs does not matter.
    low, high = np.sort(hashes.reshape(-1, 2), axis=1).T
    # An odd factor and a rotation, so that equal hashes do not cancel.
    factor = np.uint64(0xD6E8FEB86659FD93)
    half = np.uint64(32)
    rotated = (high << half) | (high >> half)
    mixed: HashArray = (low * factor) ^ rotated
    return mixed * factor


def random_graphs(
    num_nodes: IntArray,
    chance: NDArray[np.float64],
    n: int,
    random: np.random.Generator,
) -> BoolArray:
    """Generate graphs with independent edges, [N, n, n]."""
    is_real = np.arange(n) < num_nodes[:, None]
    is_edge = random.random((len(num_nodes), n, n)) < chance[:, None, None]
    # Each pair of nodes once, without loops; then both directions.
    above = np.triu(is_edge, k=1)
    above &= is_real[:, :, None] & is_real[:, None]
    graphs: BoolArray = above | above.transpose(0, 2, 1)
    return graphs


def relabel(graphs: BoolArray, num_nodes: IntArray, random: np.random.Generator) -> BoolArray:
    """Permute the real nodes of graphs, [N, n, n], at random."""
    n = graphs.shape[-1]
    is_real = np.arange(n) < num_nodes[:, None]
    # Sorting random keys permutes; padding has a larger key, and stays last.
    keys = np.where(is_real, random.random((len(graphs), n)), 2.0)
    order = keys.argsort(axis=1)
    rows = np.take_along_axis(graphs, order[:, :, None], axis=1)
    return np.take_along_axis(rows, order[:, None], axis=2)


def switched(
    graphs: BoolArray, colours: IntArray, num_tries: int, random: np.random.Generator
) -> BoolArray:
    """Walk from each graph, [N, n, n], by `num_tries` attempts to switch edges whose ends have the
    same colours, [N, n].
    """
    graphs = graphs.copy()
    edges, num_edges = _edges(graphs)
    all_rows = np.flatnonzero(num_edges >= 2)
    for _ in range(num_tries if len(all_rows) else 0):
        draws = random.random((3, len(all_rows)))
        # Two edges a-b and c-d of each graph become a-d and c-b.
        first_edge = (draws[0] * num_edges[all_rows]).astype(np.int64)
        second_edge = (draws[1] * num_edges[all_rows]).astype(np.int64)
        is_turned = draws[2] < 0.5
        a, b = edges[all_rows, first_edge].T
        ends = edges[all_rows, second_edge]
        c = np.where(is_turned, ends[:, 1], ends[:, 0])
        d = np.where(is_turned, ends[:, 0], ends[:, 1])
        has_same_colours = colours[all_rows, a] == colours[all_rows, c]
        has_same_colours &= colours[all_rows, b] == colours[all_rows, d]
        has_loop = (a == d) | (b == c)
        has_double_edge = graphs[all_rows, a, d] | graphs[all_rows, c, b]
        switched_rows = np.flatnonzero(has_same_colours & ~has_loop & ~has_double_edge)
        rows, a, b, c, d = (array[switched_rows] for array in (all_rows, a, b, c, d))
        for start, end in ((a, b), (c, d)):
            graphs[rows, start, end] = False
            graphs[rows, end, start] = False
        for start, end in ((a, d), (c, b)):
            graphs[rows, start, end] = True
            graphs[rows, end, start] = True
        edges[rows, first_edge[switched_rows]] = np.stack([a, d], axis=1)
        edges[rows, second_edge[switched_rows]] = np.stack([c, b], axis=1)
    return graphs


def _edges(graphs: BoolArray) -> tuple[IntArray, IntArray]:
    """Return edges of each graph, [N, E, 2], and their number, [N]."""
    rows, starts, ends = np.nonzero(np.triu(graphs, k=1))
    num_edges = np.bincount(rows, minlength=len(graphs))
    # Edges are listed graph by graph: the number of an edge in its graph is its distance from the
    # graph's first one.
    firsts = np.concatenate([[0], num_edges.cumsum()[:-1]])
    numbers = np.arange(len(rows)) - firsts[rows]
    max_edges = max(int(num_edges.max(initial=0)), 1)
    edges = np.zeros((len(graphs), max_edges, 2), dtype=np.int64)
    edges[rows, numbers] = np.stack([starts, ends], axis=1)
    return edges, num_edges

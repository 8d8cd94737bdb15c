"""Drawings of pairs of graphs, with the nodes named by agents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from nip_astra.errors import counted
from nip_astra.scenario_base.protocol.datapoint_views import (
    HEIGHT,
    WIDTH,
    Choice,
    DatapointView,
    DrawnGraph,
    Mark,
    Node,
    Picture,
    rounded,
)
from nip_astra.utils.formatting import items, mapping, number

MARGIN = 34
MAX_NODES = 60
"""Maximum size of a drawn graph."""
_SPAN = 6.0
"""Number of edges that fit side by side into the picture; longer graphs are bent."""
_PUSHES = 40
_LEAST_GAP = 0.15
"""Minimum distance of nodes, relative to the picture's longer side."""
_LABELS = {0: "not isomorphic", 1: "isomorphic"}

Edge = tuple[int, int]
Points = npt.NDArray[np.float64]


class GraphsView(DatapointView):
    """Two graphs, A and B; a symbol is a node of one of them."""

    def label(self, label: int) -> str:
        return _LABELS.get(label, super().label(label))

    def place_of(self, symbol: int) -> tuple[int, int] | None:
        sizes = [int(number(one.get("num_nodes")) or 0) for one in self._graphs()]
        # Graphs are padded to the largest of the dataset.
        size = int(number(self.datapoint.get("nodes_per_graph")) or max(sizes, default=0))
        return divmod(symbol, size) if size else None

    def symbol(self, symbol: int) -> str:
        place = self.place_of(symbol)
        return super().symbol(symbol) if place is None else f"{graph_name(place[0])}{place[1]}"

    def picture(self, choices: Sequence[Choice]) -> Picture | None:
        drawn = [
            _graph(graph, part, [choice for choice in choices if choice.part == part])
            for part, graph in enumerate(self._graphs())
        ]
        graphs = [graph for graph in drawn if graph is not None]
        return Picture(graphs=graphs) if graphs else None

    def _graphs(self) -> list[dict[str, Any]]:
        return [mapping(one) for one in items(self.datapoint.get("graphs"))]


def graph_name(part: int) -> str:
    """Return the letter of a graph: A for the first."""
    return chr(ord("A") + part % 26)


def _graph(graph: dict[str, Any], part: int, choices: Sequence[Choice]) -> DrawnGraph | None:
    num_nodes = int(number(graph.get("num_nodes")) or 0)
    if not 0 < num_nodes <= MAX_NODES:
        return None
    edges = sorted(_edges(graph.get("edges"), num_nodes))
    points, height = layout(num_nodes, edges)
    radius = 11.0 if num_nodes <= 20 else 7.0
    nodes = [Node(x, y, str(place)) for place, (x, y) in enumerate(points)]
    for place, node in enumerate(nodes):
        here = [choice for choice in choices if choice.place == place]
        node.marks = _marks(node, here, radius, height / 2)
    name = graph_name(part)
    summary = f"Graph {name}: {counted(num_nodes, 'node')}, {counted(len(edges), 'edge')}"
    named = [f"{one.agent} named node {one.place} in round {one.rounds}" for one in choices]
    lines = [(*points[start], *points[end]) for start, end in edges]
    return DrawnGraph(f"graph {name}", "; ".join([summary, *named]), nodes, lines, radius, height)


def _edges(value: Any, num_nodes: int) -> set[Edge]:
    """Return the valid edges, with the smaller node first."""
    found = set()
    for pair in items(value):
        ends = sorted({int(end) for end in map(number, items(pair)) if end is not None})
        if len(ends) == len(items(pair)) == 2 and ends[0] >= 0 and ends[1] < num_nodes:
            found.add((ends[0], ends[1]))
    return found


def _marks(node: Node, choices: Sequence[Choice], radius: float, middle: float) -> list[Mark]:
    """Return a ring for each agent, with its rounds on the outer side."""
    outward = math.atan2(node.y - middle, node.x - WIDTH / 2)
    marks = []
    for place, choice in enumerate(choices):
        ring = radius + 2.5 + 3.5 * place
        angle = outward + (place - (len(choices) - 1) / 2) * 1.4
        reach = radius + 9.0 + 3.5 * (len(choices) - 1)
        across, down = math.cos(angle), math.sin(angle)
        anchor = "middle" if abs(across) < 0.4 else "start" if across > 0 else "end"
        x, y = node.x + reach * across, node.y + (reach + 3.0) * down + 4.0
        marks.append(Mark(choice, ring, rounded(x), rounded(y), anchor))
    return marks


def layout(num_nodes: int, edges: Iterable[Edge]) -> tuple[list[tuple[float, float]], float]:
    """Compute positions of the nodes, with distances like those in the graph, and the height.

    By Kamada and Kawai's springs (networkx). In a long graph, distances are compressed by a power,
    so that a long path becomes an arc or a spiral. Initial positions depend on the graph alone, so
    that isomorphic graphs look the same up to rotation and reflection.
    """
    return _layout(num_nodes, tuple(sorted(edges)))


@lru_cache(maxsize=1024)  # a page has the same graphs before training and after
def _layout(num_nodes: int, edges: tuple[Edge, ...]) -> tuple[list[tuple[float, float]], float]:
    if num_nodes == 1:
        return [(WIDTH / 2, MARGIN)], 2 * MARGIN
    graph = nx.empty_graph(num_nodes)
    graph.add_edges_from(edges)
    wanted = _distances(graph)
    wanted **= min(1.0, math.log(_SPAN) / math.log(max(wanted.max(), 2.0)))
    by_node = {node: dict(enumerate(row)) for node, row in enumerate(wanted.tolist())}
    placed = nx.kamada_kawai_layout(graph, dist=by_node, pos=_first_places(wanted))
    return _fitted(_apart(np.array([placed[node] for node in range(num_nodes)])))


def _first_places(wanted: Points) -> dict[int, Points]:
    """Compute initial positions by classical scaling, with equivalent nodes slightly apart."""
    num_nodes = len(wanted)
    centring = np.eye(num_nodes) - 1.0 / num_nodes
    values, vectors = np.linalg.eigh(-0.5 * centring @ wanted**2 @ centring)
    points = vectors[:, [-1, -2]] * np.sqrt(np.maximum(values[[-1, -2]], 0.0))
    angles = 2.0 * math.pi * np.arange(num_nodes) / num_nodes
    return dict(enumerate(points + 0.02 * np.stack([np.cos(angles), np.sin(angles)], axis=1)))


def _distances(graph: nx.Graph) -> Points:
    """Return lengths of shortest paths; between components, half the longest plus two."""
    paths = np.full((len(graph), len(graph)), np.inf)
    for node, lengths in nx.all_pairs_shortest_path_length(graph):
        paths[node, list(lengths)] = list(lengths.values())
    longest = paths[np.isfinite(paths)].max()
    return np.where(np.isfinite(paths), paths, longest / 2.0 + 2.0)


def _apart(points: Points) -> Points:
    """Push overlapping nodes apart."""
    for _ in range(_PUSHES):
        span = float((points.max(axis=0) - points.min(axis=0)).max())
        steps = points[:, None] - points[None, :]
        gaps = np.maximum(np.linalg.norm(steps, axis=-1), 1e-9)
        missing = np.maximum(_LEAST_GAP * span - gaps, 0.0)
        np.fill_diagonal(missing, 0.0)
        if not missing.any():
            break
        points = points + 0.5 * (steps / gaps[..., None] * missing[..., None]).sum(axis=1)
    return points


def _fitted(points: Points) -> tuple[list[tuple[float, float]], float]:
    """Scale positions to the picture and centre them; return them and the height."""
    low, high = points.min(axis=0), points.max(axis=0)
    room = np.array([WIDTH, HEIGHT]) - 2.0 * MARGIN
    scale = float((room / np.maximum(high - low, 1e-6)).min())
    height = rounded((high - low)[1] * scale + 2.0 * MARGIN)
    placed = (points - (low + high) / 2) * scale + np.array([WIDTH, height]) / 2
    return [(rounded(x), rounded(y)) for x, y in placed.tolist()], height

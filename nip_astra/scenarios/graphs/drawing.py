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
_MIN_GAP = 0.15
"""Minimum distance of nodes, relative to the picture's longer side."""
_LABELS = {0: "not isomorphic", 1: "isomorphic"}

Edge = tuple[int, int]
Points = npt.NDArray[np.float64]


class GraphsView(DatapointView):
    """Two graphs, A and B; a symbol is a node of one of them."""

    def label(self, label: int) -> str:
        return _LABELS.get(label, super().label(label))

    def place_of(self, symbol: int) -> tuple[int, int] | None:
        sizes = [int(number(graph.get("num_nodes")) or 0) for graph in self._graphs()]
        # Graphs are padded to the largest of the dataset.
        size = int(number(self.datapoint.get("nodes_per_graph")) or max(sizes, default=0))
        return divmod(symbol, size) if size else None

    def symbol(self, symbol: int) -> str:
        graph_and_node = self.place_of(symbol)
        if graph_and_node is None:
            return super().symbol(symbol)
        graph, node = graph_and_node
        return f"{graph_name(graph)}{node}"

    def picture(self, choices: Sequence[Choice]) -> Picture | None:
        drawn_graphs = []
        for part, graph in enumerate(self._graphs()):
            part_choices = [choice for choice in choices if choice.part == part]
            drawn_graph = _draw_graph(graph, part, part_choices)
            if drawn_graph is not None:
                drawn_graphs.append(drawn_graph)
        return Picture(graphs=drawn_graphs) if drawn_graphs else None

    def _graphs(self) -> list[dict[str, Any]]:
        return [mapping(graph) for graph in items(self.datapoint.get("graphs"))]


def graph_name(part: int) -> str:
    """Return the letter of a graph: A for the first."""
    return chr(ord("A") + part % 26)


def _draw_graph(graph: dict[str, Any], part: int, choices: Sequence[Choice]) -> DrawnGraph | None:
    """Return a drawn graph; None for an empty graph, or one too large to draw."""
    num_nodes = int(number(graph.get("num_nodes")) or 0)
    if not 0 < num_nodes <= MAX_NODES:
        return None
    edges = sorted(_edges(graph.get("edges"), num_nodes))
    points, height = layout(num_nodes, edges)
    radius = 11.0 if num_nodes <= 20 else 7.0
    nodes = []
    for index, (x, y) in enumerate(points):
        node = Node(x, y, str(index))
        node_choices = [choice for choice in choices if choice.place == index]
        node.marks = _marks(node, node_choices, radius, height / 2)
        nodes.append(node)
    name = graph_name(part)
    # Read aloud in place of the picture.
    sentences = [f"Graph {name}: {counted(num_nodes, 'node')}, {counted(len(edges), 'edge')}"]
    for choice in choices:
        sentences.append(f"{choice.agent} named node {choice.place} in round {choice.rounds}")
    lines = [(*points[start], *points[end]) for start, end in edges]
    return DrawnGraph(f"graph {name}", "; ".join(sentences), nodes, lines, radius, height)


def _edges(value: Any, num_nodes: int) -> set[Edge]:
    """Return the valid edges, with the smaller node first."""
    edges = set()
    for pair in items(value):
        ends = sorted({int(end) for end in map(number, items(pair)) if end is not None})
        # A loop has one end here, and a text none.
        if len(items(pair)) != 2 or len(ends) != 2:
            continue
        low, high = ends
        if low >= 0 and high < num_nodes:
            edges.add((low, high))
    return edges


def _marks(node: Node, choices: Sequence[Choice], radius: float, middle: float) -> list[Mark]:
    """Return a ring for each agent, with its rounds on the outer side."""
    outward = math.atan2(node.y - middle, node.x - WIDTH / 2)
    marks = []
    # Labels lie outside of all rings, on a fan around the outward direction.
    label_distance = radius + 9.0 + 3.5 * (len(choices) - 1)
    for index, choice in enumerate(choices):
        ring = radius + 2.5 + 3.5 * index
        angle = outward + (index - (len(choices) - 1) / 2) * 1.4
        across, down = math.cos(angle), math.sin(angle)
        if abs(across) < 0.4:
            anchor = "middle"
        elif across > 0:
            anchor = "start"
        else:
            anchor = "end"
        x = node.x + label_distance * across
        y = node.y + (label_distance + 3.0) * down + 4.0
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
    distances = _distances(graph)
    # The power at which the longest distance becomes `_SPAN`.
    power = math.log(_SPAN) / math.log(max(distances.max(), 2.0))
    distances **= min(1.0, power)
    distances_by_node = {node: dict(enumerate(row)) for node, row in enumerate(distances.tolist())}
    initial_positions = _initial_positions(distances)
    positions = nx.kamada_kawai_layout(graph, dist=distances_by_node, pos=initial_positions)
    points = np.array([positions[node] for node in range(num_nodes)])
    return _fit_to_picture(_push_apart(points))


def _initial_positions(distances: Points) -> dict[int, Points]:
    """Compute initial positions by classical scaling, with equivalent nodes slightly apart."""
    num_nodes = len(distances)
    centring = np.eye(num_nodes) - 1.0 / num_nodes
    # The inner products of points with these distances, around their mean.
    products = -0.5 * centring @ distances**2 @ centring
    values, vectors = np.linalg.eigh(products)
    # Eigenvalues are in ascending order. They are negative where the distances fit no plane.
    scales = np.sqrt(np.maximum(values[[-1, -2]], 0.0))
    points = vectors[:, [-1, -2]] * scales
    angles = 2.0 * math.pi * np.arange(num_nodes) / num_nodes
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return dict(enumerate(points + 0.02 * circle))


def _distances(graph: nx.Graph) -> Points:
    """Return lengths of shortest paths; between components, half the longest plus two."""
    paths = np.full((len(graph), len(graph)), np.inf)
    for node, lengths in nx.all_pairs_shortest_path_length(graph):
        paths[node, list(lengths)] = list(lengths.values())
    longest = paths[np.isfinite(paths)].max()
    return np.where(np.isfinite(paths), paths, longest / 2.0 + 2.0)


def _push_apart(points: Points) -> Points:
    """Push overlapping nodes apart."""
    for _ in range(_PUSHES):
        span = float((points.max(axis=0) - points.min(axis=0)).max())
        steps = points[:, None] - points[None, :]
        gaps = np.maximum(np.linalg.norm(steps, axis=-1), 1e-9)
        missing = np.maximum(_MIN_GAP * span - gaps, 0.0)
        np.fill_diagonal(missing, 0.0)
        if not missing.any():
            break
        # Each node of a pair moves half of the way.
        pushes = steps / gaps[..., None] * missing[..., None]
        points = points + 0.5 * pushes.sum(axis=1)
    return points


def _fit_to_picture(points: Points) -> tuple[list[tuple[float, float]], float]:
    """Scale positions to the picture and centre them; return them and the height."""
    low, high = points.min(axis=0), points.max(axis=0)
    room = np.array([WIDTH, HEIGHT]) - 2.0 * MARGIN
    scale = float((room / np.maximum(high - low, 1e-6)).min())
    height = rounded((high - low)[1] * scale + 2.0 * MARGIN)
    middle = (low + high) / 2
    picture_middle = np.array([WIDTH, height]) / 2
    centred = (points - middle) * scale + picture_middle
    return [(rounded(x), rounded(y)) for x, y in centred.tolist()], height

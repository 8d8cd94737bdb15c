"""Geometry of graphs and images that a conversation is about; the templates draw it as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nip_astra.report.records import items, mapping, number

WIDTH, HEIGHT = 300, 236
MARGIN = 34
IMAGE_WIDTH = 256
MAX_NODES = 60
"""Nodes of a graph that is still drawn."""
MAX_PIXELS = 64
"""Width and height from which an image is thinned out, and its grid not drawn."""
_SHADES = 32
"""Steps of a colour's part, so that neighbours of almost equal colour are drawn as one."""
_LAYOUT_STEPS = 100
_SPAN = 6.0
"""Edges that fit beside each other into the picture; a longer graph is bent."""
_PUSHES = 40
_LEAST_GAP = 0.15
"""Distance that two nodes keep, as a share of the picture's longer side."""

Edge = tuple[int, int]
Points = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """A place of the picture that an agent named.

    Attributes
    ----------
    place : int
        Node of the graph, or latent pixel by row and column.
    part : int
        Which graph; 0 for an image.
    color : int
        The agent's.
    rounds : str
        In which it was named, for instance "1, 3".
    """

    part: int
    place: int
    agent: str
    color: int
    rounds: str


@dataclass(frozen=True)
class Mark:
    """A ring around a node, with the rounds beside it.

    Attributes
    ----------
    x, y : float
        Where the rounds stand.
    anchor : str
        Which end of them stands there: "start", "middle" or "end".
    """

    choice: Choice
    size: float
    x: float
    y: float
    anchor: str


@dataclass
class Node:
    """A node with the marks of those who named it."""

    x: float
    y: float
    label: str
    marks: list[Mark] = field(default_factory=list)


@dataclass
class DrawnGraph:
    """A graph, ready to draw."""

    title: str
    summary: str
    nodes: list[Node]
    edges: list[tuple[float, float, float, float]]
    radius: float
    height: float
    width: int = WIDTH


@dataclass(frozen=True)
class Frame:
    """A latent pixel that was named, with the rounds in its middle."""

    choice: Choice
    x: float
    y: float
    width: float
    height: float

    @property
    def text_x(self) -> float:
        """Where the rounds stand."""
        return _short(self.x + self.width / 2)

    @property
    def text_y(self) -> float:
        """Their base line: the middle, or lower for an agent who is framed inside another."""
        return _short(self.y + self.height / 2 + 4.5)


@dataclass
class DrawnImage:
    """An image with its grid of latent pixels, ready to draw.

    Attributes
    ----------
    colors : list of (color, path)
        Areas of one colour each; a path is in pixels.
    scale : float
        Width of a pixel.
    """

    summary: str
    colors: list[tuple[str, str]]
    scale: float
    lines: list[tuple[float, float, float, float]]
    frames: list[Frame]
    width: int
    height: float


@dataclass
class Picture:
    """What an episode is about."""

    graphs: list[DrawnGraph] = field(default_factory=list)
    image: DrawnImage | None = None


def draw(datapoint: Mapping[str, Any], choices: Sequence[Choice]) -> Picture | None:
    """Lay out what a datapoint shows; None where it shows nothing that can be drawn."""
    if datapoint.get("kind") == "graphs":
        graphs = [mapping(one) for one in items(datapoint.get("graphs"))]
        drawn = [
            _graph(graph, part, [one for one in choices if one.part == part])
            for part, graph in enumerate(graphs)
        ]
        found = [graph for graph in drawn if graph is not None]
        return Picture(graphs=found) if found else None
    if datapoint.get("kind") == "image":
        image = _image(datapoint, choices)
        return Picture(image=image) if image is not None else None
    return None


def graph_name(part: int) -> str:
    """The letter of a graph: A for the first."""
    return chr(ord("A") + part % 26)


def _graph(graph: Mapping[str, Any], part: int, choices: Sequence[Choice]) -> DrawnGraph | None:
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
    summary = f"Graph {name}: {num_nodes} nodes, {len(edges)} edges"
    named = [f"{one.agent} named node {one.place} in round {one.rounds}" for one in choices]
    lines = [(*points[start], *points[end]) for start, end in edges]
    return DrawnGraph(f"graph {name}", "; ".join([summary, *named]), nodes, lines, radius, height)


def _edges(value: Any, num_nodes: int) -> set[Edge]:
    """The edges, the smaller node first; what is no pair of nodes is left out."""
    found = set()
    for pair in items(value):
        ends = [number(end) for end in items(pair)]
        if len(ends) == 2 and all(end is not None and 0 <= end < num_nodes for end in ends):
            start, end = sorted(int(end or 0) for end in ends)
            found.add((start, end))
    return {(start, end) for start, end in found if start != end}


def _marks(node: Node, choices: Sequence[Choice], radius: float, middle: float) -> list[Mark]:
    """A ring for each agent, and its rounds on the side that looks away from the middle."""
    outward = math.atan2(node.y - middle, node.x - WIDTH / 2)
    marks = []
    for place, choice in enumerate(choices):
        ring = radius + 2.5 + 3.5 * place
        angle = outward + (place - (len(choices) - 1) / 2) * 1.4
        reach = radius + 9.0 + 3.5 * (len(choices) - 1)
        across, down = math.cos(angle), math.sin(angle)
        anchor = "middle" if abs(across) < 0.4 else "start" if across > 0 else "end"
        # Text is higher than its base line says.
        x, y = node.x + reach * across, node.y + (reach + 3.0) * down + 4.0
        marks.append(Mark(choice, ring, _short(x), _short(y), anchor))
    return marks


def layout(num_nodes: int, edges: Iterable[Edge]) -> tuple[list[tuple[float, float]], float]:
    """Place the nodes so that distances on the page are like those in the graph; and the height.

    Classical scaling, then steps of stress majorisation (Gansner et al. 2004). In a graph that is
    longer than the picture is wide, far nodes are wanted nearer than they are, by a power of their
    distance, so that a long path becomes a bow or a spiral and neighbours keep their room. All
    begins with what the graph alone says, so that isomorphic graphs look alike but for a turn or a
    reflection.
    """
    if num_nodes == 1:
        return [(WIDTH / 2, MARGIN)], 2 * MARGIN
    wanted = _distances(num_nodes, edges)
    wanted **= min(1.0, math.log(_SPAN) / math.log(max(wanted.max(), 2.0)))
    centring = np.eye(num_nodes) - 1.0 / num_nodes
    values, vectors = np.linalg.eigh(-0.5 * centring @ wanted**2 @ centring)
    points: Points = vectors[:, [-1, -2]] * np.sqrt(np.maximum(values[[-1, -2]], 0.0))
    # Nodes with the same neighbours would lie on one another for ever.
    angles = 2.0 * math.pi * np.arange(num_nodes) / num_nodes
    points = points + 0.02 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return _fitted(_apart(_with_less_stress(points, wanted)))


def _with_less_stress(points: Points, wanted: Points) -> Points:
    """Move nodes to less `sum w (gap - wanted)^2`, where `w = wanted^-2`: what is near counts."""
    weights = np.where(wanted > 0.0, np.maximum(wanted, 1.0) ** -2.0, 0.0)
    solve = np.linalg.pinv(np.diag(weights.sum(axis=1)) - weights)
    for _ in range(_LAYOUT_STEPS):
        ratios = weights * wanted / np.maximum(_gaps(points), 1e-9)
        points = solve @ (ratios.sum(axis=1, keepdims=True) * points - ratios @ points)
    return points


def _distances(num_nodes: int, edges: Iterable[Edge]) -> Points:
    """The lengths of shortest paths; between parts that do not hang together, half the longest
    and two more.
    """
    is_near = np.zeros((num_nodes, num_nodes), dtype=bool)
    for start, end in edges:
        is_near[start, end] = is_near[end, start] = True
    found = np.where(np.eye(num_nodes, dtype=bool), 0.0, np.inf)
    is_reached = np.eye(num_nodes, dtype=bool)
    for length in range(1, num_nodes):
        is_new = ((is_reached.astype(float) @ is_near) > 0) & ~is_reached
        if not is_new.any():
            break
        found[is_new] = length
        is_reached |= is_new
    longest = found[np.isfinite(found)].max()
    return np.where(np.isfinite(found), found, longest / 2.0 + 2.0)


def _gaps(points: Points) -> Points:
    gaps: Points = np.linalg.norm(points[:, None] - points[None, :], axis=-1)
    return gaps


def _apart(points: Points) -> Points:
    """Push nodes that would cover one another apart, as far as the picture has room."""
    for _ in range(_PUSHES):
        span = float((points.max(axis=0) - points.min(axis=0)).max())
        steps = points[:, None] - points[None, :]
        gaps = np.maximum(_gaps(points), 1e-9)
        missing = np.maximum(_LEAST_GAP * span - gaps, 0.0)
        np.fill_diagonal(missing, 0.0)
        if not missing.any():
            break
        points = points + 0.5 * (steps / gaps[..., None] * missing[..., None]).sum(axis=1)
    return points


def _fitted(points: Points) -> tuple[list[tuple[float, float]], float]:
    """Scale to the picture without changing proportions, and centre; and the height."""
    low, high = points.min(axis=0), points.max(axis=0)
    room = np.array([WIDTH, HEIGHT]) - 2.0 * MARGIN
    scale = float((room / np.maximum(high - low, 1e-6)).min())
    height = _short((high - low)[1] * scale + 2.0 * MARGIN)
    placed = (points - (low + high) / 2) * scale + np.array([WIDTH, height]) / 2
    return [(_short(x), _short(y)) for x, y in placed.tolist()], height


def _image(datapoint: Mapping[str, Any], choices: Sequence[Choice]) -> DrawnImage | None:
    rows = [items(row) for row in items(datapoint.get("pixels"))]
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        return None
    latent = [int(number(size) or 0) for size in items(datapoint.get("latent"))]
    stride = max(math.ceil(max(len(rows), len(rows[0])) / MAX_PIXELS), 1)
    thinned = [row[::stride] for row in rows[::stride]]
    scale = IMAGE_WIDTH / len(thinned[0])
    height = _short(scale * len(thinned))
    drawn = DrawnImage(
        f"Image of {len(rows[0])} by {len(rows)} pixels",
        _areas(thinned),
        scale,
        [],
        [],
        IMAGE_WIDTH,
        height,
    )
    if len(latent) == 2 and 0 < min(latent) <= max(latent) <= MAX_PIXELS:
        _add_grid(drawn, latent[0], latent[1], choices)
    return drawn


def _add_grid(drawn: DrawnImage, rows: int, columns: int, choices: Sequence[Choice]) -> None:
    cell = drawn.width / columns, drawn.height / rows
    for line in range(1, columns):
        drawn.lines.append((_short(line * cell[0]), 0.0, _short(line * cell[0]), drawn.height))
    for line in range(1, rows):
        drawn.lines.append((0.0, _short(line * cell[1]), drawn.width, _short(line * cell[1])))
    taken: dict[int, int] = {}
    for choice in choices:
        if not 0 <= choice.place < rows * columns:
            continue
        row, column = divmod(choice.place, columns)
        # Further agents who named the same place are framed inside the earlier ones.
        inset = 2.0 + 5.0 * taken.get(choice.place, 0)
        taken[choice.place] = taken.get(choice.place, 0) + 1
        drawn.frames.append(
            Frame(
                choice,
                _short(column * cell[0] + inset),
                _short(row * cell[1] + inset),
                _short(max(cell[0] - 2 * inset, 1.0)),
                _short(max(cell[1] - 2 * inset, 1.0)),
            )
        )
        drawn.summary += (
            f"; {choice.agent} named row {row}, column {column} in round {choice.rounds}"
        )


def _areas(rows: Sequence[Sequence[Any]]) -> list[tuple[str, str]]:
    """A path for each colour; neighbours in a row of the same colour are one rectangle."""
    paths: dict[str, list[str]] = {}
    for y, row in enumerate(rows):
        colors = [_color(pixel) for pixel in row]
        start = 0
        for x in range(1, len(colors) + 1):
            if x == len(colors) or colors[x] != colors[start]:
                width = x - start
                paths.setdefault(colors[start], []).append(f"M{start} {y}h{width}v1h-{width}z")
                start = x
    return [(color, "".join(parts)) for color, parts in paths.items()]


def _color(pixel: Any) -> str:
    parts = [number(part) or 0.0 for part in (items(pixel) or [pixel])]
    parts = parts[:3] if len(parts) >= 3 else parts[:1] * 3
    step = 255.0 / (_SHADES - 1)
    shades = [round(round(min(max(part, 0.0), 255.0) / step) * step) for part in parts]
    return "#" + "".join(f"{shade:02x}" for shade in shades)


def _short(value: float) -> float:
    return round(float(value), 1)

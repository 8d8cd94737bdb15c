"""Datapoints in reports: labels and symbols in words, and shapes of pictures.

A run stores a scenario's description of a datapoint, plain values, with its sample episodes; a view
reads and draws it. The templates of the report draw the shapes as SVG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH, HEIGHT = 300, 236
"""Size of a graph's picture."""


@dataclass(frozen=True)
class Choice:
    """A place in the picture that an agent named."""

    part: int
    """Index of the graph; 0 for an image."""
    place: int
    """Node of the graph, or latent pixel by row and column."""
    agent: str
    color: int
    """Index of the agent's colour."""
    rounds: str
    """Rounds in which it was named, for instance "1, 3"."""


@dataclass(frozen=True)
class Mark:
    """Ring around a node, labelled with rounds."""

    choice: Choice
    size: float
    x: float
    y: float
    """Vertical position of the rounds."""
    anchor: str
    """Text anchor of the rounds: "start", "middle" or "end"."""


@dataclass
class Node:
    """A node, with marks of the agents that named it."""

    x: float
    y: float
    label: str
    marks: list[Mark] = field(default_factory=list)


@dataclass
class DrawnGraph:
    """Layout of a graph."""

    title: str
    summary: str
    nodes: list[Node]
    edges: list[tuple[float, float, float, float]]
    radius: float
    height: float
    width: int = WIDTH


@dataclass(frozen=True)
class Frame:
    """A latent pixel that was named, labelled with rounds."""

    choice: Choice
    x: float
    y: float
    width: float
    height: float

    @property
    def text_x(self) -> float:
        """Return the horizontal position of the rounds."""
        return rounded(self.x + self.width / 2)

    @property
    def text_y(self) -> float:
        """Return the baseline of the rounds."""
        return rounded(self.y + self.height / 2 + 4.5)


@dataclass
class DrawnImage:
    """Layout of an image and its grid of latent pixels."""

    summary: str
    colors: list[tuple[str, str]]
    """Areas of one colour each, as (colour, path in pixels)."""
    scale: float
    """Width of a pixel."""
    lines: list[tuple[float, float, float, float]]
    frames: list[Frame]
    width: int
    height: float


@dataclass
class Picture:
    """Graphs side by side, or an image."""

    graphs: list[DrawnGraph] = field(default_factory=list)
    image: DrawnImage | None = None


class DatapointView:
    """View of a datapoint in reports; one subclass per kind of scenario.

    Parameters
    ----------
    datapoint : Mapping[str, Any]
        The result of the scenario's `describe_datapoint`, read from an untrusted file.
    """

    def __init__(self, datapoint: Mapping[str, Any]) -> None:
        self.datapoint = datapoint

    def label(self, label: int) -> str:
        """Return a label in words."""
        return f"label {label}"

    def place_of(self, symbol: int) -> tuple[int, int] | None:
        """Return the part of the picture, and the place in it, of a symbol, if any."""
        return None

    def symbol(self, symbol: int) -> str:
        """Return a message's symbol in words."""
        return f"symbol {symbol}"

    def picture(self, choices: Sequence[Choice]) -> Picture | None:
        """Return the datapoint with places named by agents; None if it cannot be drawn."""
        return None


class TextView(DatapointView):
    """Texts with a true or false label."""

    def label(self, label: int) -> str:
        """Return the correct decision."""
        return {0: "false", 1: "true"}.get(label, super().label(label))


def rounded(value: float) -> float:
    """Return a length with one decimal place."""
    return round(float(value), 1)

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
    """A place of the picture that an agent named."""

    part: int
    """Which graph; 0 for an image."""
    place: int
    """Node of the graph, or latent pixel by row and column."""
    agent: str
    color: int
    """The agent's."""
    rounds: str
    """In which it was named, for instance "1, 3"."""


@dataclass(frozen=True)
class Mark:
    """A ring around a node, with the rounds beside it."""

    choice: Choice
    size: float
    x: float
    y: float
    """Position of the rounds."""
    anchor: str
    """Which end of them stands there: "start", "middle" or "end"."""


@dataclass
class Node:
    """A node with the marks of agents that named it."""

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
        """Position of the rounds."""
        return rounded(self.x + self.width / 2)

    @property
    def text_y(self) -> float:
        """Their base line."""
        return rounded(self.y + self.height / 2 + 4.5)


@dataclass
class DrawnImage:
    """An image with its grid of latent pixels, ready to draw."""

    summary: str
    colors: list[tuple[str, str]]
    """Areas of one colour each; a path is in pixels."""
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
    """A datapoint in reports; a kind of scenario has a subclass.

    Parameters
    ----------
    datapoint : Mapping[str, Any]
        The result of the scenario's `describe_datapoint`, read from an untrusted file.
    """

    def __init__(self, datapoint: Mapping[str, Any]) -> None:
        self.datapoint = datapoint

    def label(self, label: int) -> str:
        """A label in words."""
        return f"label {label}"

    def place_of(self, symbol: int) -> tuple[int, int] | None:
        """The part of the picture and the place in it of a symbol, if any."""
        return None

    def symbol(self, symbol: int) -> str:
        """A symbol of a message in words."""
        return f"symbol {symbol}"

    def picture(self, choices: Sequence[Choice]) -> Picture | None:
        """The datapoint with the places that agents named; None if it cannot be drawn."""
        return None


def rounded(value: float) -> float:
    """A length with one decimal place."""
    return round(float(value), 1)

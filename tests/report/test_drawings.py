"""Layout of graphs and images."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from typing import Any

import pytest

from nip_astra.report.transcripts import view_of
from nip_astra.scenario_base.protocol.datapoint_views import (
    HEIGHT,
    WIDTH,
    Choice,
    DatapointView,
    DrawnGraph,
    DrawnImage,
    Picture,
)
from nip_astra.scenarios.graphs.drawing import layout
from nip_astra.scenarios.registry import SCENARIOS, Scenario
from tests.report.runs import RING, graphs, image

PATHS_AND_A_LEAF = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1, 5)]


def choice(place: int, part: int = 0, agent: str = "prover", rounds: str = "1") -> Choice:
    return Choice(part, place, agent, 2 if agent == "prover" else 3, rounds)


def pair(*choices: Choice, **changes: Any) -> list[DrawnGraph]:
    return view_of(graphs(**changes)).picture(choices).graphs


def drawn_image(*choices: Choice, **changes: Any) -> DrawnImage:
    return view_of(image(**changes)).picture(choices).image


def gaps(points: list[tuple[float, float]]) -> list[float]:
    return sorted(math.dist(item, other) for item, other in combinations(points, 2))


def test_isomorphic_graphs_look_alike_except_for_a_turn_and_neighbours_are_near() -> None:
    order = [3, 5, 0, 4, 1, 2]
    renamed = [(order[start], order[end]) for start, end in PATHS_AND_A_LEAF]
    first, second = layout(6, PATHS_AND_A_LEAF)[0], layout(6, renamed)[0]
    assert first != second
    assert gaps(first) == pytest.approx(gaps(second), rel=0.08)
    assert layout(6, PATHS_AND_A_LEAF) == layout(6, list(reversed(PATHS_AND_A_LEAF)))
    points, _ = layout(6, [(node, node + 1) for node in range(5)])
    assert math.dist(points[0], points[1]) < math.dist(points[0], points[2])
    assert math.dist(points[0], points[2]) < math.dist(points[0], points[5])


@pytest.mark.parametrize(
    ("num_nodes", "edges"),
    [
        (2, []),
        (5, []),
        (5, [(0, 2), (1, 2)]),
        (8, [(1, 2), (1, 5)]),
        (11, [(0, 4), (0, 6), (2, 6), (5, 8)]),
        (7, [(0, node) for node in range(1, 7)]),
        (8, list(combinations(range(8), 2))),
        (20, [(node, (node + 1) % 20) for node in range(20)]),
    ],
    ids=["two", "empty", "bend", "twins", "crowd", "star", "complete", "ring"],
)
def test_nodes_are_within_the_picture_and_apart(
    num_nodes: int, edges: list[tuple[int, int]]
) -> None:
    points, height = layout(num_nodes, edges)
    assert len(points) == num_nodes
    assert all(0 <= x <= WIDTH and 0 <= y <= height for x, y in points)
    assert height <= HEIGHT + 0.1
    assert min(gaps(points)) > 20.0


@pytest.mark.parametrize("num_nodes", [6, 11, 20, 40])
def test_a_long_path_is_bent_and_does_not_cross_itself(num_nodes: int) -> None:
    points, _ = layout(num_nodes, [(node, node + 1) for node in range(num_nodes - 1)])
    edges = [complex(*end) - complex(*start) for start, end in pairwise(points)]
    starts = [complex(*point) for point in points]

    def is_left(line: int, point: int) -> bool:
        return (edges[line].conjugate() * (starts[point] - starts[line])).imag > 0

    for a, b in combinations(range(num_nodes - 1), 2):
        if b > a + 1:
            sides = (is_left(a, b), is_left(a, b + 1)), (is_left(b, a), is_left(b, a + 1))
            assert not all(first != second for first, second in sides), (a, b)
    lengths = [abs(edge) for edge in edges]
    assert min(lengths) > 14
    assert num_nodes > 20 or max(lengths) / min(lengths) < 1.6


def test_named_nodes_are_marked_by_agent_and_round_outside_of_their_rings() -> None:
    first, second = pair(
        choice(4), choice(4, agent="verifier", rounds="0, 2"), choice(1, part=1, rounds="3")
    )
    marks = [
        (node.label, item.choice.agent, item.choice.rounds)
        for node in first.nodes
        for item in node.marks
    ]
    assert marks == [("4", "prover", "1"), ("4", "verifier", "0, 2")]
    assert [node.label for node in second.nodes if node.marks] == ["1"]
    assert first.nodes[4].marks[0].size < first.nodes[4].marks[1].size
    assert first.summary == (
        "Graph A: 6 nodes, 6 edges; prover named node 4 in round 1; "
        "verifier named node 4 in round 0, 2"
    )
    for place in range(6):
        first, _ = pair(choice(place), choice(place, agent="verifier"))
        node = first.nodes[place]
        for mark in node.marks:
            assert math.dist((mark.x, mark.y - 4.0), (node.x, node.y)) > first.radius + 6.0


def test_datapoints_that_cannot_be_drawn_give_no_picture_and_broken_edges_are_left_out() -> None:
    odd_graphs = [{"num_nodes": 0}, {"num_nodes": 1000}, 3]
    for kind in ("", "text", ["text"], "graphs", "image"):
        assert view_of({"kind": kind}).picture([choice(0)]) is None
    assert view_of({"kind": "graphs", "graphs": odd_graphs}).picture([choice(0)]) is None
    for pixels in ([[1, 2], [3]], [[], []], "x"):
        assert view_of({"kind": "image", "pixels": pixels}).picture([choice(0)]) is None
    first, _ = pair(first=[*RING, [0, 9], [2, 2], [1, 0], "x", [1], [None, 2], [-1, 2]])
    assert len(first.edges) == 6
    picture = view_of({"kind": "graphs", "graphs": [{"num_nodes": 1, "edges": []}]}).picture([])
    assert [node.label for node in picture.graphs[0].nodes] == ["0"]


def test_images_are_drawn_by_areas_of_a_colour_and_thinned_out_if_large() -> None:
    drawn = drawn_image(pixels=[[0, 0, 255], [255, 255, 255]], latent=None)
    assert drawn.colors == [("#000000", "M0 0h2v1h-2z"), ("#ffffff", "M2 0h1v1h-1zM0 1h3v1h-3z")]
    assert drawn.lines == []
    drawn = drawn_image(pixels=[[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [400, -3, None]]])
    assert [color for color, _ in drawn.colors] == ["#ff0000", "#00ff00", "#0000ff"]
    drawn = drawn_image(width=300, height=150)
    assert drawn.summary.startswith("Image of 300 by 150 pixels")
    assert sum(path.count("M") for _, path in drawn.colors) < 64 * 64
    assert drawn.height == pytest.approx(128, abs=2)


def test_named_latent_pixels_are_framed_in_their_place() -> None:
    drawn = drawn_image(choice(6), choice(6, agent="verifier"), choice(99))
    assert len(drawn.lines) == 6
    outer, inner = drawn.frames
    cell = drawn.width / 4
    assert cell * 2 < outer.x < inner.x < cell * 3
    assert cell < outer.y < inner.y < cell * 2
    assert outer.width > inner.width > 10
    assert "prover named row 1, column 2 in round 1" in drawn.summary


def test_built_in_scenarios_have_the_views_of_reports() -> None:
    kinds = map(SCENARIOS.get, filter(SCENARIOS.is_built_in, SCENARIOS.names()))
    for kind in [kind for kind in kinds if kind.datapoint_kind is not None]:
        assert type(view_of({"kind": kind.datapoint_kind})) is kind.datapoint_view


@pytest.mark.usefixtures("no_plugins_left")
def test_a_registered_scenario_draws_its_datapoints() -> None:
    class Tally(DatapointView):
        def symbol(self, symbol: int) -> str:
            return "|" * symbol

        def picture(self, choices: Any) -> Picture:
            return Picture(graphs=[])

    class TallyScenario(Scenario):
        datapoint_kind = "tally"
        datapoint_view = Tally

    assert type(view_of({"kind": "tally"})) is DatapointView
    SCENARIOS.register("tallies")(TallyScenario)
    view = view_of({"kind": "tally"})
    assert view.picture([]) == Picture(graphs=[])
    assert (view.symbol(3), view.label(1)) == ("|||", "label 1")

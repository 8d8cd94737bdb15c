"""Planted failures match the probes that describe them, and count if the target fails."""

from __future__ import annotations

import pytest

from nip_astra.errors import ParameterError
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.scenario_base.conversation.planted_failures import Discovery, PlantedFailure
from tests.evaluation.test_failures import make_chains
from tests.kit.messages import says

AGAIN = PlantedFailure(name="again", probe=r"^cat \w+$", previous_probe="^hello")
ALONE = PlantedFailure(name="alone", probe="mat")


@pytest.mark.parametrize(
    ("plant", "probe", "previous", "matches"),
    [
        (ALONE, "a mat .", None, True),
        (ALONE, "a mat .", "anything", True),
        (ALONE, "a cat .", None, False),
        (AGAIN, "cat sat", "hello you", True),
        (AGAIN, "cat sat", "good day", False),
        (AGAIN, "cat sat", None, False),
        (AGAIN, "the cat sat", "hello you", False),
    ],
)
def test_a_plant_needs_its_probe_and_its_previous_probe_just_before(
    plant: PlantedFailure, probe: str, previous: str | None, matches: bool
) -> None:
    assert bool(plant.matches(probe, previous)) is matches


@pytest.mark.parametrize(
    ("values", "paths", "facts"),
    [
        (
            {"probe": "(", "previous_probe": "["},
            ["probe", "previous_probe"],
            ("unterminated subpattern", '"("'),
        ),
        *(({"rarity": rarity}, ["rarity"], (rarity,)) for rarity in (0.0, 1.1, -0.1)),
    ],
)
def test_patterns_are_regular_expressions_and_a_rarity_is_a_share(
    values: dict[str, object], paths: list[str], facts: tuple[object, ...]
) -> None:
    with pytest.raises(ParameterError) as caught:
        PlantedFailure.from_dict({"name": "x", "probe": "a"} | values)
    assert [fault.path for fault in caught.value.faults] == paths
    assert says(caught.value, *facts)


FAILING = make_chains(["a", "b"], ["good", "hello", "mat", "cat sat"], [0, 0, 0.6, 0.5])


@pytest.mark.parametrize(
    ("trees", "again", "alone", "num_queries"),
    [
        ([], None, None, 0),
        # A low score.
        ([make_chains(["a"], ["mat"], [0.49])], None, None, 1),
        (
            [make_chains(["a", "b"], ["good", "day"], [0.9, 0.9]), FAILING, FAILING],
            2 + 4,
            2 + 3,
            10,
        ),
        # The probe at depth 1 of the first episode follows 'good', not the 'hello' beside it.
        ([make_chains(["a", "b"], ["good", "hello", "cat sat", "day"], [0.9] * 4)], None, None, 4),
        # A first probe has none before it.
        ([make_chains(["a", "b"], ["good", "cat sat", "day", "hello"], [0.9] * 4)], None, None, 4),
    ],
)
def test_the_first_find_on_which_the_target_fails_counts_with_the_queries_before_it(
    trees: list[RolloutTree], again: int | None, alone: int | None, num_queries: int
) -> None:
    discovery = Discovery([AGAIN, ALONE], 0.5)
    for tree in trees:
        discovery.update(tree)
    assert discovery.first_query == {"again": again, "alone": alone}
    num_found = (again is not None) + (alone is not None)
    assert (discovery.num_found, discovery.num_queries) == (num_found, num_queries)


def test_counting_continues_from_a_checkpoint() -> None:
    discovery = Discovery([AGAIN, ALONE], 0.5, 100, {"again": 7})
    discovery.update(FAILING)
    assert (discovery.first_query, discovery.num_queries) == ({"again": 7, "alone": 103}, 104)

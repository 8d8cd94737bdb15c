"""Planted failures match the probes that describe them, and count if the target fails."""

from __future__ import annotations

import pytest

from nip_astra.errors import ParameterError
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.scenario_base.conversation.planted_failures import Discovery, PlantedFailure
from tests.evaluation.test_failures import make_chains

AGAIN = PlantedFailure(name="again", probe=r"^cat \w+$", previous_probe="^hello")
ALONE = PlantedFailure(name="alone", probe="mat")


def test_a_single_turn_plant_needs_its_probe_only() -> None:
    assert ALONE.matches("a mat .", None)
    assert ALONE.matches("a mat .", "anything")
    assert not ALONE.matches("a cat .", None)


def test_a_two_turn_plant_needs_the_probe_just_before() -> None:
    assert AGAIN.matches("cat sat", "hello you")
    assert not AGAIN.matches("cat sat", "good day")
    assert not AGAIN.matches("cat sat", None)
    assert not AGAIN.matches("the cat sat", "hello you")


def test_a_pattern_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(ParameterError) as caught:
        PlantedFailure.from_dict({"name": "x", "probe": "(", "previous_probe": "["})
    assert [fault.path for fault in caught.value.faults] == ["probe", "previous_probe"]
    assert "probe: is not a regular expression: missing ), unterminated subpattern" in str(
        caught.value
    )
    assert 'given "("' in str(caught.value)


@pytest.mark.parametrize("rarity", [0.0, 1.1, -0.1])
def test_a_rarity_is_a_share(rarity: float) -> None:
    with pytest.raises(ParameterError, match="rarity: must be"):
        PlantedFailure.from_dict({"name": "x", "probe": "a", "rarity": rarity})


def plants_in(*trees: RolloutTree) -> Discovery:
    discovery = Discovery([AGAIN, ALONE], 0.5)
    for tree in trees:
        discovery.update(tree)
    return discovery


def test_before_any_rollout_no_plant_is_hit() -> None:
    discovery = plants_in()
    assert discovery.first_query == {"again": None, "alone": None}
    assert (discovery.num_found, discovery.num_queries) == (0, 0)


def test_a_probe_on_which_the_target_does_not_fail_finds_nothing() -> None:
    discovery = plants_in(make_chains(["a"], ["mat"], [0.49]))
    assert (discovery.num_found, discovery.num_queries) == (0, 1)


def test_the_first_find_counts_with_the_queries_before_it() -> None:
    nothing = make_chains(["a", "b"], ["good", "day"], [0.9, 0.9])
    found = make_chains(["a", "b"], ["good", "hello", "mat", "cat sat"], [0.0, 0.0, 0.6, 0.5])
    discovery = plants_in(nothing, found, found)
    assert discovery.first_query == {"again": 2 + 4, "alone": 2 + 3}
    assert (discovery.num_found, discovery.num_queries) == (2, 10)


def test_a_find_of_another_episode_before_is_no_previous_probe() -> None:
    # The probe at depth 1 of the first episode follows 'good', not the 'hello' beside it.
    tree = make_chains(["a", "b"], ["good", "hello", "cat sat", "fine"], [0.0, 0.0, 0.9, 0.9])
    assert plants_in(tree).first_query["again"] is None


def test_counting_continues_from_a_checkpoint() -> None:
    tree = make_chains(["a"], ["mat"], [0.9])
    discovery = Discovery([AGAIN, ALONE], 0.5, 100, {"again": 7})
    discovery.update(tree)
    assert discovery.first_query == {"again": 7, "alone": 101}
    assert discovery.num_queries == 101

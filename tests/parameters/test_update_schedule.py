"""Schedules say in which iterations an agent learns."""

from __future__ import annotations

import pytest

from nip_astra.errors import ParameterError
from nip_astra.parameters.agents import AgentParameters
from nip_astra.parameters.update_schedule import (
    AlternatingPeriodicUpdateSchedule,
    ConstantUpdateSchedule,
    ContiguousPeriodicUpdateSchedule,
    UpdateSchedule,
)


def active(schedule: UpdateSchedule, count: int = 8) -> list[int]:
    return [iteration for iteration in range(count) if schedule.is_active(iteration)]


def test_a_constant_schedule_is_always_on_or_never() -> None:
    assert active(ConstantUpdateSchedule()) == list(range(8))
    assert active(ConstantUpdateSchedule(is_on=False)) == []


def test_a_contiguous_schedule_is_on_from_start_to_before_stop() -> None:
    schedule = ContiguousPeriodicUpdateSchedule(period=4, start=1, stop=3)
    assert active(schedule) == [1, 2, 5, 6]


def test_two_alternating_schedules_share_the_iterations() -> None:
    first = AlternatingPeriodicUpdateSchedule(period=3, first_agent_num_rounds=1)
    second = AlternatingPeriodicUpdateSchedule(
        period=3, first_agent_num_rounds=1, position="second"
    )
    assert active(first) == [0, 3, 6]
    assert active(second) == [1, 2, 4, 5, 7]


def test_parameters_may_be_given_in_their_order_and_the_first_agent_by_a_truth_value() -> None:
    assert active(ContiguousPeriodicUpdateSchedule(4, 1, 3)) == [1, 2, 5, 6]
    pairs = [(True, "first"), (False, "second")]
    for is_first, position in pairs:
        expected = AlternatingPeriodicUpdateSchedule(
            period=5, first_agent_num_rounds=3, position=position
        )
        for found in (
            AlternatingPeriodicUpdateSchedule(5, 3, first_agent=is_first),
            AlternatingPeriodicUpdateSchedule(5, 3, is_first),
            AlternatingPeriodicUpdateSchedule(5, 3, position),
        ):
            assert found == expected
    assert AlternatingPeriodicUpdateSchedule(5, 3).position == "first"


@pytest.mark.parametrize(
    ("in_order", "named", "words"),
    [
        ((5, 3, "first", 1), {}, "period, first_agent_num_rounds, position"),
        ((5, 3, True, 1), {}, "period, first_agent_num_rounds, position"),
        ((5, 3), {"period": 5}, "given twice"),
        ((5, 3, True), {"first_agent": False}, "first_agent: unknown parameter"),
        ((5, 3), {"first_agent": True, "position": "second"}, "first_agent: unknown parameter"),
        ((5, 3), {"first_agent": "yes"}, "first_agent: unknown parameter"),
        ((5, 5), {"first_agent": True}, "must be below the period"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(
    in_order: tuple[object, ...], named: dict[str, object], words: str
) -> None:
    with pytest.raises(ParameterError, match=words):
        AlternatingPeriodicUpdateSchedule(*in_order, **named)


@pytest.mark.parametrize(
    "schedule",
    [
        {"_type": "constant", "is_on": False},
        {"_type": "contiguous", "period": 4, "start": 1, "stop": 3},
        {"_type": "alternating", "period": 3, "first_agent_num_rounds": 1, "position": "second"},
    ],
)
def test_a_schedule_comes_back_from_its_dict(schedule: dict[str, object]) -> None:
    agent = AgentParameters.from_dict({"update_schedule": schedule})
    assert agent.to_dict()["update_schedule"] == schedule
    assert AgentParameters.from_dict(agent.to_dict()) == agent


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ({"_type": "contiguous", "period": 4, "start": 3, "stop": 3}, "start must be below stop"),
        ({"_type": "contiguous", "period": 4, "start": 3, "stop": 5}, "the period, which is 4"),
        (
            {"_type": "alternating", "period": 2, "first_agent_num_rounds": 2},
            "first_agent_num_rounds must be below the period, which is 2",
        ),
        ({"_type": "altrnating"}, "unknown update schedule 'altrnating'. Did you mean"),
    ],
)
def test_an_impossible_schedule_is_refused(schedule: dict[str, object], problem: str) -> None:
    with pytest.raises(ParameterError) as caught:
        AgentParameters.from_dict({"update_schedule": schedule})
    assert problem in str(caught.value)


def test_a_schedule_that_contradicts_itself_is_told_at_its_place_with_all_sources() -> None:
    schedule = {"_type": "contiguous", "period": 7, "start": 5, "stop": 2}
    sources = {"update_schedule.period": "a.yaml", "update_schedule.start": "--set"}
    with pytest.raises(ParameterError) as caught:
        AgentParameters.from_dict({"update_schedule": schedule}, sources=sources)
    (fault,) = caught.value.faults
    assert fault.path == "update_schedule"
    assert fault.source == "a.yaml, --set"

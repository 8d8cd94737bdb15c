"""Schedules decide in which iterations an agent learns."""

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

Alternating, Contiguous = AlternatingPeriodicUpdateSchedule, ContiguousPeriodicUpdateSchedule


@pytest.mark.parametrize(
    ("schedule", "active"),
    [
        (ConstantUpdateSchedule(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (ConstantUpdateSchedule(is_on=False), []),
        (Contiguous(period=4, start=1, stop=3), [1, 2, 5, 6]),
        (Contiguous(4, 1, 3), [1, 2, 5, 6]),
        (Alternating(period=3, first_agent_num_rounds=1), [0, 3, 6]),
        (Alternating(3, 1, "second"), [1, 2, 4, 5, 7]),
    ],
)
def test_an_agent_learns_in_the_active_iterations(
    schedule: UpdateSchedule, active: list[int]
) -> None:
    assert [iteration for iteration in range(8) if schedule.is_active(iteration)] == active
    agent = AgentParameters.from_dict({"update_schedule": schedule.to_dict()})
    assert agent.update_schedule == schedule


def test_the_position_may_be_given_by_a_truth_value() -> None:
    for is_first, position in ((True, "first"), (False, "second")):
        expected = Alternating(period=5, first_agent_num_rounds=3, position=position)
        assert Alternating(5, 3, first_agent=is_first) == Alternating(5, 3, is_first) == expected
        assert Alternating(5, 3, position) == expected


@pytest.mark.parametrize(
    ("in_order", "named", "facts"),
    [
        ((5, 3, True, 1), {}, "period, first_agent_num_rounds, position"),
        ((5, 3), {"period": 5}, "period, first_agent_num_rounds, position"),
        ((5, 3, True), {"first_agent": False}, "first_agent: unknown"),
        ((5, 3), {"first_agent": True, "position": "second"}, "first_agent: unknown"),
        ((5, 3), {"first_agent": "yes"}, "first_agent: unknown"),
        ((5, 5), {"first_agent": True}, "period, which is 5"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(
    in_order: tuple[object, ...], named: dict[str, object], facts: str
) -> None:
    with pytest.raises(ParameterError, match=facts):
        Alternating(*in_order, **named)


@pytest.mark.parametrize(
    ("schedule", "fact"),
    [
        ({"_type": "contiguous", "period": 4, "start": 3, "stop": 3}, "start"),
        ({"_type": "contiguous", "period": 4, "start": 3, "stop": 5}, "period, which is 4"),
        ({"_type": "alternating", "period": 2, "first_agent_num_rounds": 2}, "period, which is 2"),
        ({"_type": "altrnating"}, "'alternating'"),
    ],
)
def test_an_impossible_schedule_is_refused_at_its_place_with_all_sources(
    schedule: dict[str, object], fact: str
) -> None:
    sources = {"update_schedule.period": "a.yaml", "update_schedule._type": "--set"}
    with pytest.raises(ParameterError) as caught:
        AgentParameters.from_dict({"update_schedule": schedule}, sources=sources)
    (fault,) = caught.value.faults
    assert fault.path.removesuffix("._type") == "update_schedule"
    assert fault.source in ("--set", "a.yaml, --set")
    assert fact in fault.problem

"""When an agent learns: which iterations update its weights."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from nip_astra.errors import UnknownNameError
from nip_astra.parameters.parameters_base import PolymorphicParameters, polymorphic


class UpdateSchedule(PolymorphicParameters):
    """Base of the schedules."""

    def is_active(self, iteration: int) -> bool:
        """Say whether the agent learns in an iteration, counted from 0."""
        raise NotImplementedError


class ConstantUpdateSchedule(UpdateSchedule):
    """The agent learns always, or never."""

    type_name: ClassVar[str] = "constant"

    is_on: bool = True
    """False freezes the agent for the whole run."""

    def is_active(self, iteration: int) -> bool:
        return self.is_on


class ContiguousPeriodicUpdateSchedule(UpdateSchedule):
    """The agent learns in one stretch of every period."""

    type_name: ClassVar[str] = "contiguous"

    period: int = Field(ge=1)
    """Iterations in a period."""
    start: int = Field(ge=0)
    """First iteration of the stretch, counted from 0 within the period."""
    stop: int = Field(ge=1)
    """First iteration after the stretch."""

    @model_validator(mode="after")
    def _is_a_stretch(self) -> Self:
        if not self.start < self.stop <= self.period:
            raise ValueError(
                f"start must be below stop and stop at most the period, which is {self.period}"
            )
        return self

    def is_active(self, iteration: int) -> bool:
        return self.start <= iteration % self.period < self.stop


class AlternatingPeriodicUpdateSchedule(UpdateSchedule):
    """Two agents, or groups of agents, learn in turn."""

    type_name: ClassVar[str] = "alternating"

    period: int = Field(ge=2)
    """Iterations in a period."""
    first_agent_num_rounds: int = Field(ge=1)
    """Iterations of a period in which the first agent learns; the second learns in the rest."""
    position: Literal["first", "second"] = "first"
    """Which of the two this agent is."""

    @model_validator(mode="after")
    def _leaves_room(self) -> Self:
        if self.first_agent_num_rounds >= self.period:
            raise ValueError(
                f"first_agent_num_rounds must be below the period, which is {self.period}"
            )
        return self

    def is_active(self, iteration: int) -> bool:
        is_first = iteration % self.period < self.first_agent_num_rounds
        return is_first == (self.position == "first")


class _Kind:
    """What `polymorphic` expects of a registered component."""

    def __init__(self, parameters: type[UpdateSchedule]) -> None:
        self.Parameters = parameters


_KINDS = {
    str(schedule.type_name): _Kind(schedule)
    for schedule in (
        ConstantUpdateSchedule,
        ContiguousPeriodicUpdateSchedule,
        AlternatingPeriodicUpdateSchedule,
    )
}


def _kind(name: str) -> _Kind:
    if name not in _KINDS:
        raise UnknownNameError("update schedule", name, _KINDS, "Choose one of these.")
    return _KINDS[name]


UpdateScheduleField = polymorphic(_kind, UpdateSchedule)
"""Type of a field that holds an update schedule."""

"""Update schedules: the iterations in which an agent learns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from nip_astra.errors import ParameterError, ParameterFault, UnknownNameError, show_value
from nip_astra.parameters.parameters_base import ByType, PolymorphicParameters


class UpdateSchedule(PolymorphicParameters):
    """Base class of the schedules; parameters may be positional."""

    def __init__(self, /, *in_order: Any, **values: Any) -> None:
        names = list(type(self).model_fields)
        if len(in_order) > len(names) or set(names[: len(in_order)]) & set(values):
            raise ParameterError(
                [
                    ParameterFault(
                        self.type_name,
                        show_value([*in_order, values]),
                        f"has the parameters {', '.join(names)}, and one of them was given twice",
                        "Give each once, in this order or by name.",
                    )
                ]
            )
        super().__init__(**dict(zip(names, in_order, strict=False)), **values)

    # Validation of a group around it takes the fields as they are: see SubParameters.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as on BaseModel's

    def is_active(self, iteration: int) -> bool:
        """Return whether the agent learns in an iteration, counted from 0."""
        raise NotImplementedError


class ConstantUpdateSchedule(UpdateSchedule):
    """The agent learns always, or never."""

    type_name: ClassVar[str] = "constant"

    is_on: bool = True
    """False freezes the agent for the whole run."""

    def is_active(self, iteration: int) -> bool:
        return self.is_on


class ContiguousPeriodicUpdateSchedule(UpdateSchedule):
    """The agent learns in one contiguous part of every period."""

    type_name: ClassVar[str] = "contiguous"

    period: int = Field(ge=1)
    """Iterations in a period."""
    start: int = Field(ge=0)
    """First active iteration, counted from 0 within the period."""
    stop: int = Field(ge=1)
    """First inactive iteration after it."""

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
    """Two agents, or groups of agents, learn alternately."""

    type_name: ClassVar[str] = "alternating"

    period: int = Field(ge=2)
    """Iterations in a period."""
    first_agent_num_rounds: int = Field(ge=1)
    """Iterations of a period in which the first agent learns; the second learns in the rest."""
    position: Literal["first", "second"] = "first"
    """Which of the two this agent is."""

    def __init__(self, /, *in_order: Any, **values: Any) -> None:
        """Also accept `first_agent`, true for the first of the two, instead of `position`."""
        rest = [*in_order[2:], *([values["first_agent"]] if "first_agent" in values else [])]
        if len(rest) == 1 and isinstance(rest[0], bool) and "position" not in values:
            in_order = in_order[:2]
            values.pop("first_agent", None)
            values["position"] = "first" if rest[0] else "second"
        super().__init__(*in_order, **values)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as on BaseModel's

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


# `polymorphic` expects a component with `Parameters`.
_KINDS = {
    str(schedule.type_name): SimpleNamespace(Parameters=schedule)
    for schedule in (
        ConstantUpdateSchedule,
        ContiguousPeriodicUpdateSchedule,
        AlternatingPeriodicUpdateSchedule,
    )
}


def _kind(name: str) -> SimpleNamespace:
    if name not in _KINDS:
        raise UnknownNameError("update schedule", name, _KINDS, "Choose one of these.")
    return _KINDS[name]


UpdateScheduleField = Annotated[UpdateSchedule, ByType(_kind, UpdateSchedule)]
"""Type of a field that holds an update schedule."""

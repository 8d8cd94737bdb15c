"""Parameters that all agents with networks of their own share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from nip_astra.errors import ParameterError, ParameterFault, UnknownNameError, show_value
from nip_astra.parameters.conditions import ReadWhere, where, where_above, where_given
from nip_astra.parameters.parameters_base import ByType, PolymorphicParameters, SubParameters


class UpdateSchedule(PolymorphicParameters):
    """Base of the schedules; parameters may be given in their order, without names."""

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

    def __init__(self, /, *in_order: Any, **values: Any) -> None:
        """Take, in place of `position`, whether this is the first of the two, as `first_agent`."""
        said = [*in_order[2:], *([values["first_agent"]] if "first_agent" in values else [])]
        if len(said) == 1 and isinstance(said[0], bool) and "position" not in values:
            in_order = in_order[:2]
            values.pop("first_agent", None)
            values["position"] = "first" if said[0] else "second"
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


DEFAULT_AGENT = "default"
"""Key, beside the agents' names, of what holds for every agent that does not say otherwise."""


class LrFactors(SubParameters):
    """Multiples of a learning rate."""

    actor: float = Field(default=1.0, ge=0)
    """Of the policy. Larger learns faster; 0 freezes it."""
    critic: float = Field(default=1.0, ge=0)
    """Of the value function. Larger learns faster; 0 freezes it."""


class AgentParameters(SubParameters):
    """An agent of a scenario with tensors; a scenario adds the shape of its networks."""

    read_where: ClassVar[ReadWhere | None] = where("is_random", False)

    is_random: bool = False
    """Whether the agent plays uniformly at random, with no network, and learns nothing."""
    agent_lr_factor: LrFactors = LrFactors()
    """Learning rate of the whole agent, as a multiple of rl.lr, or of solo_agent.lr where
    solo_agent is the trainer; the actor's there. Pretraining has no such factors."""
    body_lr_factor: LrFactors = LrFactors()
    """Learning rate of the agent's body, as a multiple of the agent's."""
    update_schedule: UpdateScheduleField = ConstantUpdateSchedule()
    """Iterations in which the agent learns; epochs, of the trainer solo_agent."""
    use_orthogonal_initialisation: bool = True
    """Whether weight matrices start orthogonal and biases at 0, instead of torch's defaults."""
    orthogonal_initialisation_gain: Annotated[
        float, where("use_orthogonal_initialisation", True)
    ] = Field(default=1.0, gt=0)
    """Scale of orthogonal weights. Larger starts with larger outputs."""
    normalize_message_history: Annotated[bool, where("rl.normalize_observations", True)] = True
    """Whether this agent reads message histories shifted and scaled; false leaves them to it as
    they are, while those of others are normalised."""
    load_from_run: str | None = None
    """Run directory, or wandb://entity/project/run_id, whose trained agent of the same name this
    one starts from; null starts from random weights. The networks must have the same shapes. Such
    an agent is not pretrained."""
    checkpoint_version: Annotated[str, where_given("load_from_run")] = "latest"
    """Which of that run's agents: latest, or the name of one of its checkpoints, for instance
    step_00000200; on W&B a version or alias of its model, for instance v3."""


class RandomAgentParameters(AgentParameters):
    """An agent that plays uniformly at random: `is_random` is true."""

    def __init__(self, /, **values: Any) -> None:
        super().__init__(**{"is_random": True} | values)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as on BaseModel's


class AgentsParameters(dict[str, AgentParameters]):
    """Parameters of agents by name; `_default` stands for all that have no entry of their own."""

    def __init__(self, /, *agents: Any, **by_name: Any) -> None:
        super().__init__(*agents, **by_name)
        if "_default" in self:
            self[DEFAULT_AGENT] = self.pop("_default")

    def __missing__(self, name: str) -> AgentParameters:
        if DEFAULT_AGENT in self and name != DEFAULT_AGENT:
            return self[DEFAULT_AGENT]
        raise KeyError(name)


class HeadParameters(AgentParameters):
    """An agent whose heads are perceptrons; a scenario adds its body and what chooses messages."""

    d_decider: Annotated[int, where_above("num_decider_layers", 1)] = Field(
        default=16, ge=1, le=1_000_000
    )
    """Width of the hidden layers that decide, and that tell the label alone."""
    num_decider_layers: int = Field(default=2, ge=1, le=1000)
    """Linear layers that decide, and that tell the label alone."""
    include_round_in_decider: bool = True
    """Whether what decides sees the number of the round."""
    d_value: Annotated[int, where_above("num_value_layers", 1)] = Field(
        default=16, ge=1, le=1_000_000
    )
    """Width of the hidden layers of the value function."""
    num_value_layers: int = Field(default=2, ge=1, le=1000)
    """Linear layers of the value function."""
    include_round_in_value: bool = True
    """Whether the value function sees the number of the round."""
    d_linear_message_selector: Annotated[
        int,
        where("include_linear_message_space", True),
        where_above("num_linear_message_selector_layers", 1),
    ] = Field(default=16, ge=1)
    """Width of the hidden layers that choose a linear message."""
    num_linear_message_selector_layers: Annotated[
        int, where("include_linear_message_space", True)
    ] = Field(default=2, ge=1)
    """Linear layers that choose a linear message."""

"""Parameters that all agents with networks of their own share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from nip_astra.parameters.conditions import ReadWhere, where, where_above, where_given
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.update_schedule import ConstantUpdateSchedule, UpdateScheduleField

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
    """Parameters of agents by name; `_default` applies to all without an entry."""

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
    """Width of the hidden layers of the decision and solo heads."""
    num_decider_layers: int = Field(default=2, ge=1, le=1000)
    """Number of linear layers of the decision and solo heads."""
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

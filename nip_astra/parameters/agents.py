"""Parameters shared by all agents that are networks."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from nip_astra.parameters.conditions import ReadWhere, where, where_above, where_given
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.update_schedule import ConstantUpdateSchedule, UpdateScheduleField

DEFAULT_AGENT = "default"
"""Key beside the agents' names with the values for agents that do not set their own."""


class LrFactors(SubParameters):
    """Multiples of a learning rate."""

    actor: float = Field(default=1.0, ge=0)
    """Factor of the policy's learning rate. Larger learns faster; 0 freezes the policy."""
    critic: float = Field(default=1.0, ge=0)
    """Factor of the value function's learning rate. Larger learns faster; 0 freezes it."""


class AgentParameters(SubParameters):
    """An agent that is a network; scenarios add the shape of its networks."""

    read_where: ClassVar[ReadWhere | None] = where("is_random", False)

    is_random: bool = False
    """Whether the agent acts uniformly at random, without a network, and does not learn."""
    agent_lr_factor: LrFactors = LrFactors()
    """Learning rate of the whole agent, as a multiple of rl.lr; for the trainer solo_agent the
    actor factor, as a multiple of solo_agent.lr. Pretraining has no such factors."""
    body_lr_factor: LrFactors = LrFactors()
    """Learning rate of the agent's body, as a multiple of the agent's."""
    update_schedule: UpdateScheduleField = ConstantUpdateSchedule()
    """Iterations in which the agent learns; for the trainer solo_agent, epochs."""
    use_orthogonal_initialisation: bool = True
    """Whether weight matrices start orthogonal and biases at 0, instead of torch's defaults."""
    orthogonal_initialisation_gain: Annotated[
        float, where("use_orthogonal_initialisation", True)
    ] = Field(default=1.0, gt=0)
    """Scale of orthogonal weights. Larger starts with larger outputs."""
    normalize_message_history: Annotated[bool, where("rl.normalize_observations", True)] = True
    """Whether the agent reads normalised message histories; false gives it raw histories while
    other agents read normalised ones."""
    load_from_run: str | None = None
    """Run directory, or wandb://entity/project/run_id, with the trained agent of the same name to
    start from; null starts from random weights. The networks must have the same shapes. Such an
    agent is not pretrained."""
    checkpoint_version: Annotated[str, where_given("load_from_run")] = "latest"
    """Version of that agent: latest, or a checkpoint of the run, for instance step_00000200; on W&B
    a version or alias of its model, for instance v3."""


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
    """An agent whose heads are perceptrons; scenarios add its body and message selector."""

    d_decider: Annotated[int, where_above("num_decider_layers", 1)] = Field(
        default=16, ge=1, le=1_000_000
    )
    """Width of the hidden layers of the decision and solo heads."""
    num_decider_layers: int = Field(default=2, ge=1, le=1000)
    """Number of linear layers of the decision and solo heads."""
    include_round_in_decider: bool = True
    """Whether the decision and solo heads observe the round number."""
    d_value: Annotated[int, where_above("num_value_layers", 1)] = Field(
        default=16, ge=1, le=1_000_000
    )
    """Width of the hidden layers of the value function."""
    num_value_layers: int = Field(default=2, ge=1, le=1000)
    """Number of linear layers of the value function."""
    include_round_in_value: bool = True
    """Whether the value function observes the round number."""
    d_linear_message_selector: Annotated[
        int,
        where("include_linear_message_space", True),
        where_above("num_linear_message_selector_layers", 1),
    ] = Field(default=16, ge=1)
    """Width of the hidden layers of the linear message selector."""
    num_linear_message_selector_layers: Annotated[
        int, where("include_linear_message_space", True)
    ] = Field(default=2, ge=1)
    """Number of linear layers of the linear message selector."""

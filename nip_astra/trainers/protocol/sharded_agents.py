"""Agents whose weights are sharded over processes (FSDP2).

Shapes: B frames.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nip_astra.distributed.sharding import (
    full_tensor,
    local_tensor,
    shard,
    sum_gradients,
    sum_of_squares,
)
from nip_astra.distributed.team import Handler, Team
from nip_astra.errors import ConfigurationError
from nip_astra.parameters.trainers import RlTrainerParameters
from nip_astra.scenario_base.protocol.combined import CombinedAgents
from nip_astra.scenario_base.protocol.tensordict_agents import Agent, Observation, PolicyOutput
from nip_astra.trainers.protocol.optimizers import AgentOptimizers

T = TypeVar("T")

_GATHER = "gather_optimizers"


class _Networks(nn.Module):
    """Networks whose weights are gathered during a whole pass.

    A body may leave work to the head, and networks with written derivatives read weights without
    calling the layers that hold them, so that single layers cannot be watched.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, compute: Callable[[Observation], T], observation: Observation) -> T:
        return compute(observation)


def _watched(networks: Sequence[nn.Module | None], mesh: DeviceMesh) -> Callable[..., Any]:
    """Return a function that gathers some networks, of which this process keeps a shard."""
    found = _Networks([network for network in networks if network is not None])
    weights = list(found.parameters())
    # FSDP2 divides along the first dimension; of these there is nothing to divide.
    small = {weight for weight in weights if weight.ndim == 0 or weight.numel() == 0}
    if len(small) == len(weights):
        return found
    fully_shard(found, mesh=mesh, reshard_after_forward=True, ignored_params=small)
    sum_gradients(found)
    return found


class ShardedAgent(Agent):
    """An agent whose networks are sharded in place, and gathered for each pass.

    All processes must call it in the same order.
    """

    def __init__(self, agent: Agent, mesh: DeviceMesh) -> None:
        super().__init__(
            agent.name,
            agent.parameters_of_agent,
            agent.shape,
            policy_body=agent.policy_body,
            value_body=agent.value_body,
            policy_head=agent.policy_head,
            value_head=agent.value_head,
            solo_head=agent.solo_head,
        )
        actor, critic = [self.policy_body, self.policy_head], [self.value_body, self.value_head]
        if self.shares_body:
            both = _watched([*actor, self.value_head], mesh)
            self._passes = both, both
        else:
            self._passes = _watched(actor, mesh), _watched(critic, mesh)

    def policy(self, observation: Observation) -> PolicyOutput:
        output: PolicyOutput = self._passes[0](super().policy, observation)
        return output

    def policy_and_value(self, observation: Observation) -> tuple[PolicyOutput, Tensor]:
        found: tuple[PolicyOutput, Tensor] = self._passes[0](super().policy_and_value, observation)
        return found

    def value(self, observation: Observation) -> Tensor:
        values_B: Tensor = self._passes[1](super().value, observation)
        return values_B


class ShardedOptimizers(AgentOptimizers):
    """Adam for every agent, with sharded weights and state."""

    def __init__(self, agents: Mapping[str, Agent], rl: RlTrainerParameters, team: Team) -> None:
        super().__init__(agents, rl)
        self.team = team
        self._found: dict[str, Any] = {}

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers of the leader's requests."""
        return {_GATHER: lambda _: self._gather()}

    def state_dict(self) -> dict[str, Any]:
        """Return all optimizers' full state; called by the leader while it may send requests."""
        self.team.request(_GATHER, [None] * self.team.size)
        found, self._found = self._found, {}
        return found

    def _gather(self) -> None:
        """Gather the state tensor by tensor, for the leader to keep."""
        self._found = super().state_dict()
        for optimizer in self._found.values():
            for values in optimizer["state"].values():
                for key, value in values.items():
                    whole = full_tensor(value)
                    values[key] = whole.cpu() if self.team.is_leader else None
        if not self.team.is_leader:
            self._found = {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore each process's shard of the full state."""
        for name, optimizer in self.optimizers.items():
            weights = [w for group in optimizer.param_groups for w in group["params"]]
            remembered = {
                number: {key: shard(value, weights[number]) for key, value in values.items()}
                for number, values in state[name]["state"].items()
            }
            optimizer.load_state_dict({**state[name], "state": remembered})

    def _gradients(self, name: str) -> list[Tensor]:
        return [local_tensor(gradient) for gradient in super()._gradients(name)]

    def _norms(self, gradients: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        if not gradients:
            return {}
        squares = torch.stack([sum_of_squares(self._divided_gradients(n)) for n in gradients])
        self.team.all_reduce([squares])
        norms = {}
        for square, name in zip(squares, gradients, strict=True):
            beside = [g for g in super()._gradients(name) if not isinstance(g, DTensor)]
            norm = (square + sum_of_squares(beside).to(square.device)).sqrt()
            norms[name] = norm.to(self._weights(name)[0].dtype)
        return norms

    def _divided_gradients(self, name: str) -> list[Tensor]:
        return [g for g in super()._gradients(name) if isinstance(g, DTensor)]


class ShardedAgents:
    """The agents of a run and their optimizers, sharded over the processes of a team.

    The leader also holds the whole agents, for it plays and tests; `gather` updates them. In the
    other processes they are divided in place, and only learn then. Agents and optimizers must be
    equal in all processes at first.
    """

    def __init__(self, agents: CombinedAgents, optimizers: AgentOptimizers, team: Team) -> None:
        if not optimizers.are_disjoint:
            raise ConfigurationError(
                "agents that share weights cannot be divided among processes (sharding=fsdp). Set "
                "sharding=none, or give each agent networks of its own."
            )
        whole = list(agents.parameters())
        own = {name: agents[name] for name in agents.names}
        if team.is_leader:
            own = copy.deepcopy(own)
        mesh = team.mesh(next((weight.device for weight in whole), torch.device("cpu")))
        parts = {name: ShardedAgent(agent, mesh) for name, agent in own.items()}
        self.agents = CombinedAgents(parts, agents.protocol, agents.space)
        self.optimizers = ShardedOptimizers(parts, optimizers.rl, team)
        self.optimizers.load_state_dict(optimizers.state_dict())
        self._parts = list(self.agents.parameters())
        self._whole = whole if team.is_leader else None

    @torch.no_grad()
    def gather(self) -> None:
        """Update the leader's agents; a collective call."""
        for number, part in enumerate(self._parts):
            weight = full_tensor(part)
            if self._whole is not None:
                self._whole[number].copy_(weight)

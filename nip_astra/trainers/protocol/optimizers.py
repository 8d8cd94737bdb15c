"""An optimizer for each agent, with a learning rate for each of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from nip_astra.errors import CheckpointError
from nip_astra.parameters.agents import LrFactors
from nip_astra.parameters.trainers import RlTrainerParameters
from nip_astra.scenario_base.protocol.tensordict_agents import Agent, AgentBody
from nip_astra.trainers.protocol.group_adam import GroupAdam

ADAM_EPS = 1e-5
"""Added to the root of the second moment, as is usual for PPO; torch's default is 1e-8."""

OTHERS = ""
"""Name under which weights of the loss module that are no agent's are learned."""

Role = Literal["actor", "critic"]


class Part(NamedTuple):
    """Weights that have one learning rate.

    Attributes
    ----------
    name : str
        For instance "actor_body".
    parameters : list[Parameter]
        The weights.
    lr_factor : float
        Their learning rate as a multiple of rl.lr; 0 for weights that never move.
    """

    name: str
    parameters: list[nn.Parameter]
    lr_factor: float


def parts_of(agent: Agent, *, has_body_factor: bool = True) -> list[Part]:
    """The parts of an agent that reinforcement learning trains.

    The factor of a part is that of the agent, times that of the body for a body, times that of the
    graph network for the weights that a body gives as `gnn_parameters`. A body that policy and
    value function share counts as the actor's.

    Parameters
    ----------
    has_body_factor : bool
        Whether the body's own factor counts; it is 1 otherwise.
    """
    parts: list[Part] = []
    roles: list[tuple[Role, AgentBody | None, nn.Module | None]] = [
        ("actor", agent.policy_body, agent.policy_head),
        ("critic", None if agent.shares_body else agent.value_body, agent.value_head),
    ]
    for role, body, head in roles:
        parts += [] if body is None else _body_parts(agent, role, body, has_body_factor)
        if head is not None:
            factor = getattr(agent.parameters_of_agent.agent_lr_factor, role)
            parts.append(Part(f"{role}_head", list(head.parameters()), factor))
    return [part for part in parts if part.parameters]


def _body_parts(agent: Agent, role: Role, body: AgentBody, has_body_factor: bool) -> list[Part]:
    config = agent.parameters_of_agent
    factor = getattr(config.agent_lr_factor, role)
    if has_body_factor:
        factor *= getattr(config.body_lr_factor, role)
    gnn_factor = factor * getattr(getattr(config, "gnn_lr_factor", LrFactors()), role)
    of_body: Callable[[], Iterable[nn.Parameter]] | None = getattr(body, "gnn_parameters", None)
    gnn = [] if of_body is None else list(of_body())
    of_gnn = {id(parameter) for parameter in gnn}
    rest = [parameter for parameter in body.parameters() if id(parameter) not in of_gnn]
    return [Part(f"{role}_gnn", gnn, gnn_factor), Part(f"{role}_body", rest, factor)]


def annealing_factor(rl: RlTrainerParameters, iteration: int) -> float:
    """The share of the learning rates that is left in an iteration, counted from 0."""
    return 1 - iteration / rl.num_iterations if rl.anneal_lr else 1.0


class AgentOptimizers:
    """Adam for every agent that learns.

    An agent that is frozen in an iteration, by its update schedule or by a factor of 0, gets no
    gradient, makes no step, and has no part in the norm to which gradients are scaled down; what
    its optimizer remembers stays.

    Parameters
    ----------
    agents : Mapping[str, Agent]
        By name, in the protocol's order.
    more : Iterable[Parameter]
        Weights that are no agent's; they learn with rl.lr.

    Attributes
    ----------
    optimizers : dict[str, GroupAdam]
        By agent, `OTHERS` for the rest.
    are_disjoint : bool
        Whether no two agents share weights.
    weights : list[Parameter]
        All that may get a gradient, also of agents that do not learn.
    """

    def __init__(
        self,
        agents: Mapping[str, Agent],
        rl: RlTrainerParameters,
        more: Iterable[nn.Parameter] = (),
    ) -> None:
        self.rl = rl
        self.optimizers: dict[str, GroupAdam] = {}
        self.are_disjoint = not _share_weights(agents)
        self._schedules = {
            name: agent.parameters_of_agent.update_schedule for name, agent in agents.items()
        }
        self._frozen: list[nn.Parameter] = []
        self._taken: set[int] = set()
        for name, agent in agents.items():
            self._add(name, [] if agent.is_random else parts_of(agent))
        of_agents = {id(p) for agent in agents.values() for p in agent.parameters()}
        rest = [p for p in more if id(p) not in of_agents]
        self._add(OTHERS, [Part("loss_module", rest, 1.0)])
        learned = [weight for name in self.optimizers for weight in self._weights(name)]
        self.weights = [*learned, *self._frozen]

    def _add(self, name: str, parts: Sequence[Part]) -> None:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for part in parts:
            new = [p for p in part.parameters if id(p) not in self._taken and p.requires_grad]
            self._taken.update(id(p) for p in new)
            if part.lr_factor == 0:
                self._frozen += new
            else:
                by_factor.setdefault(part.lr_factor, []).extend(new)
        # One group a factor: each group costs a call of its own at every step.
        groups = [
            {"params": weights, "lr": self.rl.lr * factor, "lr_factor": factor}
            for factor, weights in by_factor.items()
            if weights
        ]
        if groups:
            self.optimizers[name] = GroupAdam(groups, lr=self.rl.lr, eps=ADAM_EPS)

    def learning(self, iteration: int) -> tuple[str, ...]:
        """The agents that learn in an iteration, counted from 0."""
        return tuple(
            name
            for name in self.optimizers
            if name != OTHERS and self._schedules[name].is_active(iteration)
        )

    def begin(self, iteration: int) -> None:
        """Set the learning rates of an iteration."""
        left = annealing_factor(self.rl, iteration)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = self.rl.lr * group["lr_factor"] * left

    def zero_grad(self) -> None:
        """Forget all gradients."""
        # A loop of our own: that of an optimizer takes several times as long.
        for parameter in self.weights:
            parameter.grad = None

    def clip(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Scale gradients down, and give what their norms were, by agent.

        Gradients of all others are forgotten.

        Parameters
        ----------
        names : Sequence[str]
            Agents that learn.
        """
        names = [*names, *([OTHERS] if OTHERS in self.optimizers else [])]
        for parameter in self._frozen:
            parameter.grad = None
        for name, optimizer in self.optimizers.items():
            if name not in names:
                optimizer.zero_grad(set_to_none=True)
        gradients = {name: self._gradients(name) for name in names}
        norms = self._norms(gradients)
        if self.rl.max_grad_norm is None or not norms:
            return norms
        joint = torch.linalg.vector_norm(torch.stack([*norms.values()]))
        for name, of_agent in gradients.items():
            norm = norms[name] if self.rl.grad_clipping == "per_agent" else joint
            if of_agent:
                factor = (self.rl.max_grad_norm / (norm + 1e-6)).clamp(max=1)
                torch._foreach_mul_(of_agent, factor)
        return norms

    def _norms(self, gradients: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        return {name: _norm(of_agent) for name, of_agent in gradients.items()}

    def _gradients(self, name: str) -> list[Tensor]:
        return [p.grad for p in self._weights(name) if p.grad is not None]

    def _weights(self, name: str) -> list[nn.Parameter]:
        return [p for group in self.optimizers[name].param_groups for p in group["params"]]

    def step(self, names: Sequence[str]) -> None:
        """Move the weights of the agents that learn."""
        for name in (*names, OTHERS):
            if name in self.optimizers:
                self.optimizers[name].step()

    def lr(self, name: str) -> float:
        """The present learning rate of an agent's first part."""
        return float(self.optimizers[name].param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """What all optimizers remember."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Raises
        ------
        CheckpointError
            When it is of other agents, or of agents with other weights.
        """
        if set(state) != set(self.optimizers):
            raise CheckpointError(
                f"the optimizers of {', '.join(map(repr, state))} were to be taken up, but here "
                f"{', '.join(map(repr, self.optimizers))} learn. Resume with the parameters of the "
                "run that wrote the checkpoint, or start a new run."
            )
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all numbers together; of one long vector, in a third of the time."""
    if not tensors:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    return norm


def _share_weights(agents: Mapping[str, Agent]) -> bool:
    weights = [{id(p) for p in agent.parameters()} for agent in agents.values()]
    return len(set().union(*weights)) < sum(len(ids) for ids in weights)

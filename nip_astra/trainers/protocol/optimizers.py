"""Optimizers per agent, with a learning rate for each of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nip_astra.distributed.sharding import local_tensor
from nip_astra.errors import CheckpointError
from nip_astra.parameters.agents import LrFactors
from nip_astra.parameters.trainers import RlTrainerParameters
from nip_astra.scenario_base.protocol.tensordict_agents import Agent

ADAM_EPS = 1e-5
"""Added to the root of the second moment, as is common for PPO; torch's default is 1e-8."""

OTHERS = ""
"""Name of the optimizer of the loss module's weights that belong to no agent."""


class LearningPart(NamedTuple):
    """Weights with one learning rate, a multiple of rl.lr; 0 for frozen weights."""

    name: str
    parameters: list[nn.Parameter]
    lr_factor: float


def parts_of(agent: Agent, *, has_body_factor: bool = True) -> list[LearningPart]:
    """Return the parts of an agent that are trained by RL, for instance "actor_body".

    The factor of a part is that of the agent, times that of the body for a body (unless
    `has_body_factor` is false), times that of the graph network for the `gnn_parameters` of a body.
    A body that policy and value function share counts as the actor's.
    """
    config = agent.parameters_of_agent
    gnn_factors = getattr(config, "gnn_lr_factor", LrFactors())
    value_body = None if agent.shares_body else agent.value_body
    parts: list[LearningPart] = []
    for role, body, head in (
        ("actor", agent.policy_body, agent.policy_head),
        ("critic", value_body, agent.value_head),
    ):
        head_factor = getattr(config.agent_lr_factor, role)
        if body is not None:
            factor = head_factor
            if has_body_factor:
                factor *= getattr(config.body_lr_factor, role)
            of_body = getattr(body, "gnn_parameters", None)
            gnn = [] if of_body is None else list(of_body())
            of_gnn = {id(parameter) for parameter in gnn}
            rest = [one for one in body.parameters() if id(one) not in of_gnn]
            parts.append(LearningPart(f"{role}_gnn", gnn, factor * getattr(gnn_factors, role)))
            parts.append(LearningPart(f"{role}_body", rest, factor))
        if head is not None:
            parts.append(LearningPart(f"{role}_head", list(head.parameters()), head_factor))
    return [part for part in parts if part.parameters]


def annealing_factor(rl: RlTrainerParameters, iteration: int) -> float:
    """Return the factor of learning rates in an iteration, counted from 0."""
    return 1 - iteration / rl.num_iterations if rl.anneal_lr else 1.0


class _Memory(NamedTuple):
    """Weights of a group and Adam's moments of them, as lists.

    `is_divided` where processes hold parts of the weights; each steps its own.
    """

    weights: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    num_steps: Tensor
    is_divided: bool

    def held(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return this process's shards of tensors, sharded like the weights."""
        return [local_tensor(one) for one in tensors] if self.is_divided else tensors


class GroupAdam(torch.optim.Adam):
    """Torch's fused Adam, with one step count for all weights of a group.

    Torch's own counts the steps of each weight and looks all up at every step, which takes longer
    than to move weights this small: for the 152 weights (48,359 numbers) of both agents of graph
    isomorphism 2.6 ms per step against 0.30 ms here, on one core.

    Numbers, and the saved state, are the same where every weight has a gradient at every step. A
    weight without is taken to have a gradient of 0, while torch leaves it and its count alone.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, eps: float) -> None:
        super().__init__(groups, lr=lr, eps=eps, fused=True)
        self._memories: list[_Memory] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's Adam, with a step count per weight."""
        state = super().state_dict()
        state["state"] = {
            number: {**of_weight, "step": of_weight["step"].clone()}
            for number, of_weight in state["state"].items()
        }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`, or of torch's Adam."""
        sizes = [len(group["params"]) for group in self.param_groups]
        stored = [len(group["params"]) for group in state_dict["param_groups"]]
        if stored != sizes:
            raise CheckpointError(
                f"the optimizer of the checkpoint has {stored} weights by learning rate, and here "
                f"there are {sizes}. Resume with the agents, learning-rate factors and version of "
                "nip_astra that wrote it, or start a new run."
            )
        for group in state_dict["param_groups"]:
            states = (state_dict["state"].get(number) for number in group["params"])
            counts = {0.0 if state is None else float(state["step"]) for state in states}
            if len(counts) > 1:
                raise CheckpointError(
                    "the optimizer of the checkpoint moved weights of one group "
                    f"{min(counts):g} to {max(counts):g} times. Resume with the version of "
                    "nip_astra that wrote it, or start a new run."
                )
        super().load_state_dict(dict(state_dict))
        self._memories = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no loss is needed
        """Update all weights."""
        if self._memories is None:
            self._memories = [self._memory(group["params"]) for group in self.param_groups]
        for group, memory in zip(self.param_groups, self._memories, strict=True):
            memory.num_steps.add_(1)
            beta1, beta2 = group["betas"]
            gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in memory.weights]
            torch._fused_adam_(
                memory.held(memory.weights),
                memory.held(gradients),
                memory.held(memory.means),
                memory.held(memory.squares),
                [],
                [memory.num_steps] * len(memory.weights),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )

    def _memory(self, weights: list[Tensor]) -> _Memory:
        """Return the moments of weights, initially zero; their counts become one tensor."""
        states = [self.state[weight] for weight in weights]
        counts = [state["step"] for state in states if state]
        num_steps = (
            torch.stack(counts).max() if counts else torch.zeros((), device=weights[0].device)
        )
        for weight, state in zip(weights, states, strict=True):
            if not state:
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)
            state["step"] = num_steps
        return _Memory(
            weights,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            num_steps,
            any(isinstance(weight, DTensor) for weight in weights),
        )


class AgentOptimizers:
    """Adam for every learning agent.

    An agent that is frozen in an iteration, by its update schedule or by a factor of 0, gets no
    gradient, makes no step, and has no part in the norm to which gradients are scaled down; the
    state of its optimizer stays.

    Parameters
    ----------
    agents : Mapping[str, Agent]
        By name, in the protocol's order.
    more : Iterable[Parameter]
        Weights that belong to no agent; they learn with rl.lr.

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
        ids = [{id(p) for p in agent.parameters()} for agent in agents.values()]
        self.are_disjoint = len(set().union(*ids)) == sum(len(one) for one in ids)
        self._schedules = {
            name: agent.parameters_of_agent.update_schedule for name, agent in agents.items()
        }
        self._frozen: list[nn.Parameter] = []
        self._taken: set[int] = set()
        for name, agent in agents.items():
            self._add(name, [] if agent.is_random else parts_of(agent))
        of_agents = {id(p) for agent in agents.values() for p in agent.parameters()}
        rest = [p for p in more if id(p) not in of_agents]
        self._add(OTHERS, [LearningPart("loss_module", rest, 1.0)])
        learned = [weight for name in self.optimizers for weight in self._weights(name)]
        self.weights = [*learned, *self._frozen]

    def _add(self, name: str, parts: Sequence[LearningPart]) -> None:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for part in parts:
            new = [p for p in part.parameters if id(p) not in self._taken and p.requires_grad]
            self._taken.update(id(p) for p in new)
            if part.lr_factor == 0:
                self._frozen += new
            else:
                by_factor.setdefault(part.lr_factor, []).extend(new)
        # One group per factor: each group costs a call at every step.
        groups = [
            {"params": weights, "lr": self.rl.lr * factor, "lr_factor": factor}
            for factor, weights in by_factor.items()
            if weights
        ]
        if groups:
            self.optimizers[name] = GroupAdam(groups, lr=self.rl.lr, eps=ADAM_EPS)

    def learning(self, iteration: int) -> tuple[str, ...]:
        """Return the agents that learn in an iteration, counted from 0."""
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
        """Clear all gradients."""
        # The loop of an optimizer takes several times as long.
        for parameter in self.weights:
            parameter.grad = None

    def clip(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Clip the gradients of the learning agents; return their norms before, by agent.

        The gradients of all others are cleared.
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
        """Update the weights of the learning agents."""
        for name in (*names, OTHERS):
            if name in self.optimizers:
                self.optimizers[name].step()

    def lr(self, name: str) -> float:
        """Return the current learning rate of an agent's first part."""
        return float(self.optimizers[name].param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all optimizers."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        if set(state) != set(self.optimizers):
            raise CheckpointError(
                f"the checkpoint has optimizers of {', '.join(map(repr, state))}, but here "
                f"{', '.join(map(repr, self.optimizers))} learn. Resume with the parameters of the "
                "run that wrote it, or start a new run."
            )
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all numbers; as one long vector, in a third of the time."""
    if not tensors:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    return norm

"""All agents of a protocol as one module, and their moves.

Shapes: B frames, A agents, C channels, V channels that an agent sees, P positions, S symbols,
L linear symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from nip_astra.distributed.sharding import RowDivision
from nip_astra.protocols.protocol_base import CONTINUE, Moves, ProtocolHandler
from nip_astra.rl_objectives.objective import FrameRows
from nip_astra.scenario_base.protocol.tensordict_agents import (
    MASKED,
    Agent,
    MessageSpace,
    Observation,
    PolicyOutput,
)
from nip_astra.utils.module_names import check_module_names


class AgentMoves(NamedTuple):
    """Moves of one agent in a batch of frames."""

    message_BVP: Tensor
    """Symbols, long."""
    decision_B: Tensor | None = None
    """0 reject, 1 accept, 2 continue; None for an agent without decisions."""
    linear_BVP: Tensor | None = None
    """Linear symbols, if any."""


class PolicyEvaluation(NamedTuple):
    """Log-probability and entropy of past moves under an agent's policy."""

    logprobs_B: Tensor
    """Log-probability of the joint move in nats, with grad; 0 where the agent could not act."""
    entropies_B: Tensor
    """Sum of the entropies of the agent's choices, in nats, with grad."""


def num_uniforms(num_channels: int, message_size: int, has_linear: bool) -> int:
    """Return the number of uniform random numbers per move of an agent."""
    num_symbols = num_channels * message_size
    if has_linear:
        num_symbols *= 2
    # One for the decision.
    return 1 + num_symbols


def draw(logs: PolicyOutput, uniforms_BU: Tensor) -> AgentMoves:
    """Sample moves from log-probabilities by inverse transform sampling.

    Uniforms in [0, 1) begin with the decision's; U >= `num_uniforms` of the visible channels.
    """
    message_BVPS = logs.message_logits_BVPS
    shape_BVP = message_BVPS.shape[:-1]
    num_symbols = message_BVPS.shape[1] * message_BVPS.shape[2]
    symbols_stop = 1 + num_symbols
    symbol_uniforms_BVP = uniforms_BU[:, 1:symbols_stop].reshape(shape_BVP)
    symbols_BVP = _invert_cumulative(message_BVPS, symbol_uniforms_BVP)
    decision_B = linear_BVP = None
    if logs.decision_logits_B3 is not None:
        decision_B = _invert_cumulative(logs.decision_logits_B3, uniforms_BU[:, 0])
    if logs.linear_logits_BVPL is not None:
        linear_uniforms = uniforms_BU[:, symbols_stop : symbols_stop + num_symbols]
        linear_uniforms_BVP = linear_uniforms.reshape(shape_BVP)
        linear_BVP = _invert_cumulative(logs.linear_logits_BVPL, linear_uniforms_BVP)
    return AgentMoves(symbols_BVP, decision_B, linear_BVP)


def _invert_cumulative(logs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first alternative whose cumulative probability exceeds the uniform number."""
    cumulative = logs.exp().cumsum(dim=-1)
    # Scaled, because rounding may leave the sum below 1.
    thresholds = uniforms.unsqueeze(-1) * cumulative[..., -1:]
    num_below = (cumulative <= thresholds).sum(dim=-1)
    return num_below.clamp(max=logs.shape[-1] - 1)


def normalised(output: PolicyOutput) -> PolicyOutput:
    """Return the log-softmax of all logits."""
    message, decision, linear = output
    return PolicyOutput(
        message.log_softmax(dim=-1),
        None if decision is None else decision.log_softmax(dim=-1),
        None if linear is None else linear.log_softmax(dim=-1),
    )


def evaluate_moves(
    output: PolicyOutput, moves: AgentMoves, active_BV: Tensor, can_decide_B: Tensor
) -> PolicyEvaluation:
    """Return log-probabilities and entropies of past moves where the agent could act."""
    logs = normalised(output)
    entropies_BV = _sum_entropies(logs.message_logits_BVPS)
    if logs.linear_logits_BVPL is not None and moves.linear_BVP is not None:
        entropies_BV = entropies_BV + _sum_entropies(logs.linear_logits_BVPL)
    is_active_BV = active_BV.to(entropies_BV.dtype)
    entropies_B = (entropies_BV * is_active_BV).sum(dim=-1)
    if logs.decision_logits_B3 is not None and moves.decision_B is not None:
        decision_logs_B3 = logs.decision_logits_B3
        negative_entropies_B = (decision_logs_B3.exp() * decision_logs_B3).sum(dim=-1)
        decides_B = can_decide_B.to(decision_logs_B3.dtype)
        entropies_B = entropies_B - negative_entropies_B * decides_B
    logprobs_B = joint_logprobs(logs, moves, active_BV, can_decide_B)
    return PolicyEvaluation(logprobs_B, entropies_B)


def joint_logprobs(
    logs: PolicyOutput, moves: AgentMoves, active_BV: Tensor, can_decide_B: Tensor
) -> Tensor:
    """Return log-probabilities of joint moves, [B], given the result of `normalised`."""
    logprobs_BV = _select(logs.message_logits_BVPS, moves.message_BVP).sum(dim=-1)
    if logs.linear_logits_BVPL is not None and moves.linear_BVP is not None:
        linear_BV = _select(logs.linear_logits_BVPL, moves.linear_BVP).sum(dim=-1)
        logprobs_BV = logprobs_BV + linear_BV
    logprobs_B = (logprobs_BV * active_BV.to(logprobs_BV.dtype)).sum(dim=-1)
    if logs.decision_logits_B3 is not None and moves.decision_B is not None:
        decision_B = _select(logs.decision_logits_B3, moves.decision_B)
        logprobs_B = logprobs_B + decision_B * can_decide_B.to(decision_B.dtype)
    return logprobs_B


def _sum_entropies(logs_BVPX: Tensor) -> Tensor:
    """Return entropies summed over positions, [B, V]."""
    return -(logs_BVPX.exp() * logs_BVPX).sum(dim=(-2, -1))


def _select(logs: Tensor, choice: Tensor) -> Tensor:
    """Return the values of the chosen alternatives."""
    return logs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class JointMoves:
    """Moves of all agents in a batch of frames."""

    decision_BA: Tensor
    """0 reject, 1 accept, 2 continue; 2 if the agent may not decide."""
    message_BACP: Tensor
    """Symbols, long; 0 if none is sent."""
    logprobs_BA: Tensor
    """Log-probability of each agent's joint move in nats; 0 if it could not act."""
    message_logits_BACPS: Tensor
    """Normalised log-probabilities of symbols; 0 if none is sent."""
    decision_logits_BA3: Tensor
    """Normalised log-probabilities of decisions; 0 if there is none."""
    linear_BACP: Tensor | None = None
    """Linear symbols, if any."""


class CombinedAgents(nn.Module):
    """The agents of a protocol, in its order.

    Attributes
    ----------
    agents : nn.ModuleDict
        `Agent`s by name.
    division : RowDivision or None
        Distributes the networks' rows over processes in distributed training.
    """

    def __init__(
        self, agents: Mapping[str, Agent], protocol: ProtocolHandler, space: MessageSpace
    ) -> None:
        super().__init__()
        check_module_names(agents, owner=f"an agent of the protocol {type(protocol).__name__}")
        self.agents = nn.ModuleDict(dict(agents))
        self.names = tuple(agents)
        self.protocol = protocol
        self.space = space
        self.needs_logits = protocol.needs_logits
        self.division: RowDivision | None = None

    def __getitem__(self, name: str) -> Agent:
        agent = self.agents[name]
        assert isinstance(agent, Agent)
        return agent

    def number(self, name: str) -> int:
        """Return the index of an agent in the dimension A."""
        return self.names.index(name)

    @torch.no_grad()
    def act(self, observation: Observation, generator: torch.Generator) -> JointMoves:
        """Sample the moves of all agents.

        Random numbers depend only on the generator and the number of frames. An agent's networks
        run only on frames in which it may act.
        """
        active_BAC, decides_BA = observation["active_mask"], observation["can_decide"]
        num_frames, space = len(active_BAC), self.space
        moves = self._empty_moves(num_frames, active_BAC.device)
        uniforms_per_move = num_uniforms(
            active_BAC.shape[2], space.message_size, space.num_linear_symbols > 0
        )
        # Drawn for all agents, also those that do not act, so that no draw depends on who does.
        uniforms_BAU = torch.rand(
            num_frames,
            len(self.names),
            uniforms_per_move,
            generator=generator,
            device=generator.device,
        ).to(active_BAC.device)
        acts_BA = active_BAC.any(dim=2) | decides_BA
        for number, name in enumerate(self.names):
            rows = acts_BA[:, number].nonzero().flatten()
            if len(rows) == num_frames:
                # Without copies of the frames.
                self._act(number, name, observation, uniforms_BAU[:, number], moves, slice(None))
            elif len(rows):
                selected = {key: column[rows] for key, column in observation.items()}
                self._act(number, name, selected, uniforms_BAU[rows, number], moves, rows)
        return moves

    def _empty_moves(self, num_frames: int, device: torch.device) -> JointMoves:
        """Return joint moves in which nobody acts."""
        space = self.space
        shape_BA = (num_frames, len(self.names))
        shape_BACP = (*shape_BA, self.protocol.num_channels, space.message_size)
        linear_BACP = None
        if space.num_linear_symbols:
            linear_BACP = torch.zeros(shape_BACP, dtype=torch.long, device=device)
        return JointMoves(
            decision_BA=torch.full(shape_BA, CONTINUE, device=device),
            message_BACP=torch.zeros(shape_BACP, dtype=torch.long, device=device),
            logprobs_BA=torch.zeros(shape_BA, device=device),
            message_logits_BACPS=torch.zeros(*shape_BACP, space.num_symbols, device=device),
            decision_logits_BA3=torch.zeros(*shape_BA, 3, device=device),
            linear_BACP=linear_BACP,
        )

    def _act(
        self,
        number: int,
        name: str,
        observation: Observation,
        uniforms_BU: Tensor,
        moves: JointMoves,
        rows: Tensor | slice,
    ) -> None:
        """Write an agent's moves in some frames into the joint moves."""
        agent = self[name]
        logs = normalised(agent.policy(observation))
        drawn = draw(logs, uniforms_BU)
        active_BV = self._select_visible(agent, observation["active_mask"][:, number])
        can_decide_B = observation["can_decide"][:, number]
        moves.logprobs_BA[rows, number] = joint_logprobs(logs, drawn, active_BV, can_decide_B)
        message_BVP = drawn.message_BVP * active_BV[..., None]
        moves.message_BACP[rows, number] = self._spread_over_channels(agent, message_BVP)
        if drawn.linear_BVP is not None and moves.linear_BACP is not None:
            linear_BVP = drawn.linear_BVP * active_BV[..., None]
            moves.linear_BACP[rows, number] = self._spread_over_channels(agent, linear_BVP)
        message_logits_BCPS, decision_logits_B3 = self._complete_logits(agent, logs, active_BV)
        moves.message_logits_BACPS[rows, number] = message_logits_BCPS
        moves.decision_logits_BA3[rows, number] = decision_logits_B3
        if drawn.decision_B is not None:
            moves.decision_BA[rows, number] = torch.where(can_decide_B, drawn.decision_B, CONTINUE)

    def _complete_logits(
        self, agent: Agent, logs: PolicyOutput, active_BV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of symbols in all channels and of decisions, else 0."""
        # The softmax moves the logits of impossible symbols further down.
        message_BVPS = logs.message_logits_BVPS.clamp(min=MASKED) * active_BV[..., None, None]
        message_BCPS = self._spread_over_channels(agent, message_BVPS)
        decision_B3 = logs.decision_logits_B3
        if decision_B3 is None:
            decision_B3 = message_BCPS.new_zeros(len(message_BCPS), 3)
        return message_BCPS, decision_B3

    def logit_reward(self, name: str, output: PolicyOutput, frames: TensorDict) -> Tensor | None:
        """Return the differentiable reward of an agent's current logits, [B] with grad, or None.

        The logits of other agents are those of the sampled frames.
        """
        agent, number = self[name], self.number(name)
        active_BV = self._select_visible(agent, frames["active_mask"][:, number])
        message_BCPS, decision_B3 = self._complete_logits(agent, normalised(output), active_BV)
        moves = Moves(
            frames["agents", "decision"],
            _replace_agent(frames["agents", "message_logits"], message_BCPS, number),
            _replace_agent(frames["agents", "decision_logits"], decision_B3, number),
        )
        return self.protocol.logit_reward(
            name, frames["round"], frames["seed"], frames["has_decided"], moves
        )

    def _spread_over_channels(self, agent: Agent, values_BV: Tensor) -> Tensor:
        """Return values of visible channels as those of all channels, 0 elsewhere, [B, C, ...]."""
        shape = agent.shape
        if shape.num_visible == shape.num_channels:
            return values_BV
        zeros_BC = values_BV.new_zeros(len(values_BV), shape.num_channels, *values_BV.shape[2:])
        channels_V = torch.tensor(shape.visible_channels, device=values_BV.device)
        return zeros_BC.index_copy(1, channels_V, values_BV)

    def _select_visible(self, agent: Agent, channels_BC: Tensor) -> Tensor:
        """Return the columns of the channels that an agent sees."""
        if agent.shape.num_visible == agent.shape.num_channels:
            return channels_BC
        return channels_BC[:, list(agent.shape.visible_channels)]

    def recorded_moves(self, name: str, frames: TensorDict) -> tuple[AgentMoves, Tensor, Tensor]:
        """Return an agent's moves, and masks of where it could send, [B, V], and decide, [B]."""
        agent, number = self[name], self.number(name)
        message_BVP = self._select_visible(agent, frames["agents", "message"][:, number])
        decision_B = None
        if agent.shape.has_decision:
            decision_B = frames["agents", "decision"][:, number]
        linear_BVP = None
        linear_BACP = frames.get(("agents", "linear_message"), None)
        if linear_BACP is not None:
            linear_BVP = self._select_visible(agent, linear_BACP[:, number])
        active_BV = self._select_visible(agent, frames["active_mask"][:, number])
        moves = AgentMoves(message_BVP, decision_B, linear_BVP)
        return moves, active_BV, frames["can_decide"][:, number]

    def policy(self, name: str, frames: Observation) -> PolicyOutput:
        """Return the logits of an agent's moves, with grad."""
        output: PolicyOutput
        output, _ = self._divided(lambda part: (self[name].policy(part), None), frames)
        return output

    def evaluate(
        self, name: str, frames: TensorDict, output: PolicyOutput | None = None
    ) -> PolicyEvaluation:
        """Return log-probabilities and entropies of an agent's sampled moves, with grad.

        `output` is the policy's output for these frames, if already computed.
        """
        moves, active_BV, can_decide_B = self.recorded_moves(name, frames)
        if output is None:
            output = self.policy(name, frames)
        return evaluate_moves(output, moves, active_BV, can_decide_B)

    def values(self, name: str, frames: Observation) -> Tensor:
        """Return an agent's values, [B], with grad."""
        values_B: Tensor
        _, values_B = self._divided(lambda part: (None, self[name].value(part)), frames)
        return values_B

    def policy_and_values(self, name: str, frames: Observation) -> tuple[PolicyOutput, Tensor]:
        """Return both, with grad, from one forward pass of the shared body."""
        return self._divided(self[name].policy_and_value, frames)

    def _divided(
        self,
        compute: Callable[[Observation], tuple[PolicyOutput | None, Tensor | None]],
        frames: Observation,
    ) -> tuple[Any, Any]:
        """Return a policy output and values, either may be None, as computed by all processes."""
        if self.division is None:
            return compute(frames)
        # Of the tensors, which the division returns without names.
        names: list[str] = []

        def compute_rows(rows: slice) -> list[Tensor]:
            output, values_B = compute(FrameRows(frames, rows))
            tensors: dict[str, Tensor | None] = {}
            if output is not None:
                tensors |= output._asdict()
            tensors["values"] = values_B
            present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            names[:] = present
            return list(present.values())

        tensors = self.division(compute_rows, len(frames["round"]))
        outputs = dict(zip(names, tensors, strict=True))
        values_B = outputs.pop("values", None)
        return PolicyOutput(**outputs) if outputs else None, values_B

    def is_acting(self, name: str, frames: Observation) -> Tensor:
        """Return frames in which an agent may send or decide, bool [B]."""
        number = self.number(name)
        active_BC = frames["active_mask"][:, number]
        return active_BC.any(dim=-1) | frames["can_decide"][:, number]


def _replace_agent(values_BA: Tensor, agent_values_B: Tensor, number: int) -> Tensor:
    """Return the values of all agents, with those of one agent replaced."""
    # Not in place: gradients flow to the agent's own values.
    before, after = values_BA[:, :number], values_BA[:, number + 1 :]
    return torch.cat([before, agent_values_B[:, None], after], dim=1)

"""Moves of one agent: sampling from logits, log-probabilities and entropies.

Shapes: B frames, V channels that the agent sees, P positions, S symbols, L linear symbols.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nip_astra.scenario_base.protocol.tensordict_agents import PolicyOutput


class AgentMoves(NamedTuple):
    """Moves of one agent in a batch of frames.

    Attributes
    ----------
    message_BVP : Tensor
        Symbols, long.
    decision_B : Tensor or None
        0 reject, 1 accept, 2 continue; None for an agent without decisions.
    linear_BVP : Tensor or None
        Linear symbols, if any.
    """

    message_BVP: Tensor
    decision_B: Tensor | None = None
    linear_BVP: Tensor | None = None


class PolicyEvaluation(NamedTuple):
    """Log-probability and entropy of past moves under an agent's policy.

    Attributes
    ----------
    logprobs_B : Tensor
        Log-probability of the joint move in nats, with grad; 0 where the agent could not act.
    entropies_B : Tensor
        Sum of the entropies of the agent's choices, in nats, with grad.
    """

    logprobs_B: Tensor
    entropies_B: Tensor


def num_uniforms(num_channels: int, message_size: int, has_linear: bool) -> int:
    """Number of uniform random numbers per move of an agent."""
    return 1 + num_channels * message_size * (2 if has_linear else 1)


def draw(logs: PolicyOutput, uniforms_BU: Tensor) -> AgentMoves:
    """Sample moves by inverse transform sampling.

    Parameters
    ----------
    logs : PolicyOutput
        Log-probabilities from `normalised`.
    uniforms_BU : Tensor
        Uniform in [0, 1), the decision's first; [B, U] with U >= `num_uniforms` of the visible
        channels.
    """
    message = logs.message_logits_BVPS
    num_symbols = message.shape[1] * message.shape[2]
    symbols_BVP = _invert(message, uniforms_BU[:, 1 : 1 + num_symbols].reshape(message.shape[:-1]))
    decision_B = linear_BVP = None
    if logs.decision_logits_B3 is not None:
        decision_B = _invert(logs.decision_logits_B3, uniforms_BU[:, 0])
    if logs.linear_logits_BVPL is not None:
        uniforms_BVP = uniforms_BU[:, 1 + num_symbols : 1 + 2 * num_symbols]
        uniforms_BVP = uniforms_BVP.reshape(message.shape[:-1])
        linear_BVP = _invert(logs.linear_logits_BVPL, uniforms_BVP)
    return AgentMoves(symbols_BVP, decision_B, linear_BVP)


def _invert(logs: Tensor, uniforms: Tensor) -> Tensor:
    """First alternative whose cumulative probability exceeds the uniform number."""
    cumulative = logs.exp().cumsum(dim=-1)
    # Scaled, because rounding may leave the sum below 1.
    level = uniforms.unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative <= level).sum(dim=-1).clamp(max=logs.shape[-1] - 1)


def normalised(output: PolicyOutput) -> PolicyOutput:
    """Log-softmax of all logits."""
    message, decision, linear = output
    return PolicyOutput(
        message.log_softmax(dim=-1),
        None if decision is None else decision.log_softmax(dim=-1),
        None if linear is None else linear.log_softmax(dim=-1),
    )


def evaluate_moves(
    output: PolicyOutput, moves: AgentMoves, active_BV: Tensor, can_decide_B: Tensor
) -> PolicyEvaluation:
    """Log-probabilities and entropies of past moves.

    Parameters
    ----------
    active_BV : Tensor
        Bool, whether the agent could send in the channel.
    can_decide_B : Tensor
        Bool, whether its decision could count.
    """
    logs = normalised(output)
    entropies_BV = _entropies(logs.message_logits_BVPS)
    if logs.linear_logits_BVPL is not None and moves.linear_BVP is not None:
        entropies_BV = entropies_BV + _entropies(logs.linear_logits_BVPL)
    entropies_B = (entropies_BV * active_BV.to(entropies_BV.dtype)).sum(dim=-1)
    if logs.decision_logits_B3 is not None and moves.decision_B is not None:
        logs_B3 = logs.decision_logits_B3
        decides_B = can_decide_B.to(logs_B3.dtype)
        entropies_B = entropies_B - (logs_B3.exp() * logs_B3).sum(dim=-1) * decides_B
    return PolicyEvaluation(logprobs_of(logs, moves, active_BV, can_decide_B), entropies_B)


def logprobs_of(
    logs: PolicyOutput, moves: AgentMoves, active_BV: Tensor, can_decide_B: Tensor
) -> Tensor:
    """Log-probabilities of joint moves, [B], from those of `normalised`."""
    logprobs_BV = _taken(logs.message_logits_BVPS, moves.message_BVP).sum(dim=-1)
    if logs.linear_logits_BVPL is not None and moves.linear_BVP is not None:
        linear_BV = _taken(logs.linear_logits_BVPL, moves.linear_BVP).sum(dim=-1)
        logprobs_BV = logprobs_BV + linear_BV
    logprobs_B = (logprobs_BV * active_BV.to(logprobs_BV.dtype)).sum(dim=-1)
    if logs.decision_logits_B3 is not None and moves.decision_B is not None:
        decided_B = _taken(logs.decision_logits_B3, moves.decision_B)
        logprobs_B = logprobs_B + decided_B * can_decide_B.to(decided_B.dtype)
    return logprobs_B


def _entropies(logs_BVPX: Tensor) -> Tensor:
    """Entropies summed over positions, [B, V]."""
    return -(logs_BVPX.exp() * logs_BVPX).sum(dim=(-2, -1))


def _taken(logs: Tensor, choice: Tensor) -> Tensor:
    return logs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)

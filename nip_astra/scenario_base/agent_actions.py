"""Moves of one agent: drawing them from logits, and how likely they are.

Shapes: B frames, V channels that the agent sees, P positions, S symbols, L linear symbols.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nip_astra.scenario_base.tensordict_agents import PolicyOutput


class AgentMoves(NamedTuple):
    """Moves of one agent in a batch of frames.

    Attributes
    ----------
    message_BVP : Tensor
        Symbols, long.
    decision_B : Tensor or None
        0 reject, 1 accept, 2 continue; None for an agent that has no decision.
    linear_BVP : Tensor or None
        Linear symbols; None where there are none.
    """

    message_BVP: Tensor
    decision_B: Tensor | None = None
    linear_BVP: Tensor | None = None


class PolicyEvaluation(NamedTuple):
    """How an agent's policy sees moves that were made.

    Attributes
    ----------
    logprobs_B : Tensor
        Log-probability of the joint move in nats, with grad; 0 where the agent could make none.
    entropies_B : Tensor
        Sum of the entropies of what the agent had to choose, in nats, with grad.
    """

    logprobs_B: Tensor
    entropies_B: Tensor


def num_uniforms(num_channels: int, message_size: int, has_linear: bool) -> int:
    """Give how many uniform numbers an agent's move takes."""
    return 1 + num_channels * message_size * (2 if has_linear else 1)


def draw(output: PolicyOutput, uniforms_BU: Tensor) -> AgentMoves:
    """Draw moves by inverting the distribution functions.

    Parameters
    ----------
    uniforms_BU : Tensor
        Uniform in [0, 1), the decision's first: [B, at least `num_uniforms` of the channels that
        the agent sees].
    """
    message = output.message_logits_BVPS
    num_symbols = message.shape[1] * message.shape[2]
    symbols_BVP = _invert(message, uniforms_BU[:, 1 : 1 + num_symbols].reshape(message.shape[:-1]))
    decision_B = linear_BVP = None
    if output.decision_logits_B3 is not None:
        decision_B = _invert(output.decision_logits_B3, uniforms_BU[:, 0])
    if output.linear_logits_BVPL is not None:
        uniforms_BVP = uniforms_BU[:, 1 + num_symbols : 1 + 2 * num_symbols]
        uniforms_BVP = uniforms_BVP.reshape(message.shape[:-1])
        linear_BVP = _invert(output.linear_logits_BVPL, uniforms_BVP)
    return AgentMoves(symbols_BVP, decision_B, linear_BVP)


def _invert(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Give the first alternative whose cumulative probability exceeds the uniform number."""
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    # Rounding may leave the sum below 1; the number is drawn within what there is.
    level = uniforms.unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative <= level).sum(dim=-1).clamp(max=logits.shape[-1] - 1)


def evaluate_moves(
    output: PolicyOutput, moves: AgentMoves, active_BV: Tensor, can_decide_B: Tensor
) -> PolicyEvaluation:
    """Give log-probabilities and entropies of moves that were made.

    Parameters
    ----------
    active_BV : Tensor
        Bool, whether the agent could send in the channel.
    can_decide_B : Tensor
        Bool, whether its decision could count.
    """
    active = active_BV.to(output.message_logits_BVPS.dtype)
    logprobs_BV, entropies_BV = _symbols(output.message_logits_BVPS, moves.message_BVP)
    if output.linear_logits_BVPL is not None and moves.linear_BVP is not None:
        linear_BV, linear_entropies_BV = _symbols(output.linear_logits_BVPL, moves.linear_BVP)
        logprobs_BV, entropies_BV = logprobs_BV + linear_BV, entropies_BV + linear_entropies_BV
    logprobs_B = (logprobs_BV * active).sum(dim=-1)
    entropies_B = (entropies_BV * active).sum(dim=-1)
    if output.decision_logits_B3 is not None and moves.decision_B is not None:
        decides_B = can_decide_B.to(active.dtype)
        logs_B3 = output.decision_logits_B3.log_softmax(dim=-1)
        logprobs_B = logprobs_B + _taken(logs_B3, moves.decision_B) * decides_B
        entropies_B = entropies_B - (logs_B3.exp() * logs_B3).sum(dim=-1) * decides_B
    return PolicyEvaluation(logprobs_B, entropies_B)


def _symbols(logits_BVPX: Tensor, symbols_BVP: Tensor) -> tuple[Tensor, Tensor]:
    """Give log-probabilities and entropies of the symbols, summed over positions, [B, V]."""
    logs = logits_BVPX.log_softmax(dim=-1)
    return _taken(logs, symbols_BVP).sum(dim=-1), -(logs.exp() * logs).sum(dim=(-2, -1))


def _taken(logs: Tensor, choice: Tensor) -> Tensor:
    return logs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)

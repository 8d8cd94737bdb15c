"""Moves are drawn as likely as their logits say, and counted only where the agent may make them."""

from __future__ import annotations

import math

import pytest
import torch

from nip_astra.scenario_base.protocol.combined import (
    AgentMoves,
    draw,
    evaluate_moves,
    normalised,
    num_uniforms,
)
from nip_astra.scenario_base.protocol.tensordict_agents import MASKED, PolicyOutput


def output_of(num_frames: int, *, has_linear: bool = False) -> PolicyOutput:
    generator = torch.Generator().manual_seed(3)
    return PolicyOutput(
        torch.randn(num_frames, 2, 3, 5, generator=generator, dtype=torch.float64),
        torch.randn(num_frames, 3, generator=generator, dtype=torch.float64),
        torch.randn(num_frames, 2, 3, 4, generator=generator, dtype=torch.float64)
        if has_linear
        else None,
    )


def test_the_shares_of_what_is_drawn_are_the_probabilities() -> None:
    logits_S = torch.tensor([0.0, 1.0, MASKED, -1.0])
    count = 40_000
    output = PolicyOutput(
        logits_S.expand(count, 1, 1, 4), torch.tensor([2.0, 0, 0]).expand(count, 3)
    )
    uniforms = torch.rand(count, 2, generator=torch.Generator().manual_seed(0))
    moves = draw(normalised(output), uniforms)
    shares = torch.bincount(moves.message_BVP.flatten(), minlength=4) / count
    torch.testing.assert_close(shares, logits_S.softmax(0), atol=0.01, rtol=0)
    assert shares[2] == 0
    assert moves.decision_B is not None
    expected = math.exp(2) / (math.exp(2) + 2)
    assert float((moves.decision_B == 0).float().mean()) == pytest.approx(expected, abs=0.01)


def test_the_largest_uniform_number_draws_a_possible_symbol() -> None:
    output = PolicyOutput(torch.tensor([0.0, 0.0, MASKED]).view(1, 1, 1, 3))
    moves = draw(normalised(output), torch.full((1, 2), 1 - 2**-24))
    assert moves.message_BVP.item() == 1


def test_decision_symbols_and_linear_symbols_take_numbers_of_their_own() -> None:
    output = output_of(200, has_linear=True)
    uniforms = torch.rand(200, num_uniforms(2, 3, True), dtype=torch.float64)
    moves = draw(normalised(output), uniforms)
    for column in range(uniforms.shape[1]):
        changed = uniforms.clone()
        changed[:, column] = (changed[:, column] + 0.5) % 1
        other = draw(normalised(output), changed)
        assert moves.decision_B is not None
        assert other.decision_B is not None
        assert moves.linear_BVP is not None
        assert other.linear_BVP is not None
        differs = [
            (moves.decision_B != other.decision_B).any()[None],
            (moves.message_BVP != other.message_BVP).flatten(1).any(dim=0),
            (moves.linear_BVP != other.linear_BVP).flatten(1).any(dim=0),
        ]
        assert torch.cat(differs).nonzero().flatten().tolist() == [column]


def test_a_joint_log_probability_is_the_sum_over_what_the_agent_may_do() -> None:
    output = output_of(6, has_linear=True)
    moves = draw(normalised(output), torch.rand(6, num_uniforms(2, 3, True), dtype=torch.float64))
    active = torch.tensor([[1, 1], [1, 0], [0, 1], [0, 0], [1, 1], [0, 0]], dtype=torch.bool)
    decides = torch.tensor([1, 1, 0, 1, 0, 0], dtype=torch.bool)
    got = evaluate_moves(output, moves, active, decides)
    assert output.decision_logits_B3 is not None
    assert output.linear_logits_BVPL is not None
    assert moves.decision_B is not None
    assert moves.linear_BVP is not None
    for frame in range(6):
        expected, entropy = 0.0, 0.0
        for channel in range(2):
            for position in range(3):
                for logits, symbols in (
                    (output.message_logits_BVPS, moves.message_BVP),
                    (output.linear_logits_BVPL, moves.linear_BVP),
                ):
                    dist = torch.distributions.Categorical(logits=logits[frame, channel, position])
                    if active[frame, channel]:
                        expected += float(dist.log_prob(symbols[frame, channel, position]))
                        entropy += float(dist.entropy())
        if decides[frame]:
            dist = torch.distributions.Categorical(logits=output.decision_logits_B3[frame])
            expected += float(dist.log_prob(moves.decision_B[frame]))
            entropy += float(dist.entropy())
        assert float(got.logprobs_B[frame]) == pytest.approx(expected, abs=1e-12)
        assert float(got.entropies_B[frame]) == pytest.approx(entropy, abs=1e-12)
    assert got.logprobs_B[5] == 0


def test_impossible_symbols_leave_gradients_finite() -> None:
    logits = torch.tensor([[0.5, MASKED, 0.1]], requires_grad=True)
    output = PolicyOutput(logits.view(1, 1, 1, 3))
    evaluation = evaluate_moves(
        output,
        AgentMoves(torch.zeros(1, 1, 1, dtype=torch.long)),
        torch.ones(1, 1, dtype=torch.bool),
        torch.zeros(1, dtype=torch.bool),
    )
    (evaluation.logprobs_B + evaluation.entropies_B).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0

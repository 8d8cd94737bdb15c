"""All agents act as one, each where it is allowed, and recompute the same probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.samplers.episodes import EpisodeSampler
from nip_astra.scenario_base.protocol.combined import (
    AgentMoves,
    draw,
    evaluate_moves,
    normalised,
    num_uniforms,
)
from nip_astra.scenario_base.protocol.tensordict_agents import MASKED, PolicyOutput
from tests.kit.protocol_games import NUM_SYMBOLS, build_game

LINEAR = {"include_linear_message_space": True, "message_size": 2}


def played(
    protocol: str, scenario: dict[str, Any] | None = None, num_steps: int = 4, **options: Any
) -> tuple[Any, TensorDict]:
    """The agents of a game, and frames that they played."""
    game = build_game(protocol, scenario, **options)
    agents = game.combined_agents
    batch = EpisodeSampler(game.train_environment, agents, key=(0,)).collect(num_steps)
    return agents, batch.reshape(-1)


@pytest.mark.parametrize("protocol", [str(member) for member in InteractionProtocolType])
@pytest.mark.parametrize("zero_knowledge", [False, True])
def test_an_agent_finds_its_moves_as_likely_as_when_it_made_them(
    protocol: str, zero_knowledge: bool
) -> None:
    options = {"protocol_common": {"zero_knowledge": zero_knowledge}}
    agents, batch = played(protocol, LINEAR, 6, **options)
    for number, name in enumerate(agents.names):
        evaluation = agents.evaluate(name, batch)
        torch.testing.assert_close(evaluation.logprobs_B, batch["agents", "logprob"][:, number])
        is_acting_B = agents.is_acting(name, batch)
        assert (evaluation.logprobs_B[~is_acting_B] == 0).all()
        assert (evaluation.entropies_B[~is_acting_B] == 0).all()
        assert (evaluation.logprobs_B[is_acting_B] < 0).all()
        assert (batch["agents", "decision"][:, number][~batch["can_decide"][:, number]] == 2).all()
    assert batch["agents", "message"].max() < NUM_SYMBOLS - 1


def test_an_agent_sees_only_its_own_channels() -> None:
    agents, frames = played("mnip")
    changed = frames.clone()
    # The channel of the other prover.
    changed["message_history"][:, :, 1] = 1 - changed["message_history"][:, :, 1]
    first = agents["prover0"].policy(frames).message_logits_BVPS
    torch.testing.assert_close(first, agents["prover0"].policy(changed).message_logits_BVPS)
    other = agents["prover1"].policy(changed).message_logits_BVPS
    assert not torch.equal(agents["prover1"].policy(frames).message_logits_BVPS, other)


def test_a_random_agent_plays_possible_moves_alike_and_learns_nothing() -> None:
    agents, frames = played("nip", {"agents": {"default": {}, "prover": {"is_random": True}}})
    assert list(agents["prover"].parameters()) == []
    probabilities = agents["prover"].policy(frames).message_logits_BVPS.softmax(-1)
    expected = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]).expand_as(probabilities)
    torch.testing.assert_close(probabilities, expected)
    assert (agents.values("prover", frames) == 0).all()


def test_statistics_of_histories_shift_and_scale_inputs_of_bodies() -> None:
    agents, frames = played("nip", num_steps=8)
    body = agents["verifier"].policy_body
    body.set_statistics(frames["message_history"])
    read = body.history(frames)
    torch.testing.assert_close(read.mean(dim=0), torch.zeros_like(read[0]), atol=1e-5, rtol=0)
    std = frames["message_history"].std(dim=0)
    torch.testing.assert_close(read.std(dim=0), (std > 0).float(), atol=1e-4, rtol=0)
    assert "history_mean" in body.state_dict()


def output_of(num_frames: int) -> PolicyOutput:
    """Of two channels and three positions, with decisions and linear symbols."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((num_frames, 2, 3, 5), (num_frames, 3), (num_frames, 2, 3, 4))
    return PolicyOutput(
        *(torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    )


def test_actions_are_drawn_with_their_probabilities() -> None:
    logits_S = torch.tensor([0.0, 1.0, MASKED, -1.0])
    count = 40_000
    output = PolicyOutput(
        logits_S.expand(count, 1, 1, 4), torch.tensor([2.0, 0, 0]).expand(count, 3)
    )
    uniforms = torch.rand(count, 2, generator=torch.Generator().manual_seed(0))
    moves: Any = draw(normalised(output), uniforms)
    shares = torch.bincount(moves.message_BVP.flatten(), minlength=4) / count
    torch.testing.assert_close(shares, logits_S.softmax(0), atol=0.01, rtol=0)
    assert shares[2] == 0
    expected = math.exp(2) / (math.exp(2) + 2)
    assert float((moves.decision_B == 0).float().mean()) == pytest.approx(expected, abs=0.01)
    # The largest number draws a possible symbol.
    last = PolicyOutput(torch.tensor([0.0, 0.0, MASKED]).view(1, 1, 1, 3))
    assert draw(normalised(last), torch.full((1, 2), 1 - 2**-24)).message_BVP.item() == 1


def test_decision_symbols_and_linear_symbols_take_numbers_of_their_own() -> None:
    output = output_of(200)
    uniforms = torch.rand(200, num_uniforms(2, 3, True), dtype=torch.float64)
    moves: Any = draw(normalised(output), uniforms)
    for column in range(uniforms.shape[1]):
        changed = uniforms.clone()
        changed[:, column] = (changed[:, column] + 0.5) % 1
        other: Any = draw(normalised(output), changed)
        differs = [
            (moves.decision_B != other.decision_B).any()[None],
            (moves.message_BVP != other.message_BVP).flatten(1).any(dim=0),
            (moves.linear_BVP != other.linear_BVP).flatten(1).any(dim=0),
        ]
        assert torch.cat(differs).nonzero().flatten().tolist() == [column]


def test_a_joint_log_probability_is_the_sum_over_the_allowed_actions() -> None:
    output: Any = output_of(6)
    uniforms = torch.rand(6, num_uniforms(2, 3, True), dtype=torch.float64)
    moves: Any = draw(normalised(output), uniforms)
    active = torch.tensor([[1, 1], [1, 0], [0, 1], [0, 0], [1, 1], [0, 0]], dtype=torch.bool)
    decides = torch.tensor([1, 1, 0, 1, 0, 0], dtype=torch.bool)
    evaluation = evaluate_moves(output, moves, active, decides)
    choices = [
        (output.message_logits_BVPS, moves.message_BVP, active[..., None]),
        (output.linear_logits_BVPL, moves.linear_BVP, active[..., None]),
        (output.decision_logits_B3, moves.decision_B, decides),
    ]
    expected = entropy = torch.zeros(6, dtype=torch.float64)
    for logits, symbols, is_allowed in choices:
        distribution = torch.distributions.Categorical(logits=logits)
        expected = expected + (distribution.log_prob(symbols) * is_allowed).reshape(6, -1).sum(1)
        entropy = entropy + (distribution.entropy() * is_allowed).reshape(6, -1).sum(1)
    torch.testing.assert_close(evaluation.logprobs_B, expected)
    torch.testing.assert_close(evaluation.entropies_B, entropy)
    assert evaluation.logprobs_B[5] == 0


def test_impossible_symbols_leave_gradients_finite() -> None:
    logits = torch.tensor([[0.5, MASKED, 0.1]], requires_grad=True)
    moves = AgentMoves(torch.zeros(1, 1, 1, dtype=torch.long))
    active = torch.ones(1, 1, dtype=torch.bool)
    evaluation = evaluate_moves(PolicyOutput(logits.view(1, 1, 1, 3)), moves, active, ~active[0])
    (evaluation.logprobs_B + evaluation.entropies_B).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0

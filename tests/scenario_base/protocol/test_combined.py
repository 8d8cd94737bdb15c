"""All agents act as one, each where it may, and see again what they did with equal probability."""

from __future__ import annotations

import pytest
import torch

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.samplers.episodes import EpisodeSampler
from tests.protocol_games import NUM_SYMBOLS, build_game

LINEAR = {"include_linear_message_space": True, "message_size": 2}


@pytest.mark.parametrize("protocol", [str(member) for member in InteractionProtocolType])
@pytest.mark.parametrize("zero_knowledge", [False, True])
def test_an_agent_finds_its_moves_as_likely_as_when_it_made_them(
    protocol: str, zero_knowledge: bool
) -> None:
    game = build_game(protocol, LINEAR, protocol_common={"zero_knowledge": zero_knowledge})
    agents = game.combined_agents
    assert agents is not None
    batch = EpisodeSampler(game.train_environment, agents, key=(0,)).collect(6).reshape(-1)
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
    game = build_game("mnip")
    agents = game.combined_agents
    assert agents is not None
    frames = EpisodeSampler(game.train_environment, agents, key=(0,)).collect(4).reshape(-1)
    changed = frames.clone()
    # The channel of the other prover.
    changed["message_history"][:, :, 1] = 1 - changed["message_history"][:, :, 1]
    first = agents["prover0"].policy(frames).message_logits_BVPS
    torch.testing.assert_close(first, agents["prover0"].policy(changed).message_logits_BVPS)
    other = agents["prover1"].policy(changed).message_logits_BVPS
    assert not torch.equal(agents["prover1"].policy(frames).message_logits_BVPS, other)


def test_a_random_agent_plays_possible_moves_alike_and_learns_nothing() -> None:
    game = build_game("nip", {"agents": {"default": {}, "prover": {"is_random": True}}})
    agents = game.combined_agents
    assert agents is not None
    assert list(agents["prover"].parameters()) == []
    frames = EpisodeSampler(game.train_environment, agents, key=(0,)).collect(4).reshape(-1)
    probabilities = agents["prover"].policy(frames).message_logits_BVPS.softmax(-1)
    torch.testing.assert_close(
        probabilities[..., :-1], torch.full_like(probabilities[..., :-1], 1 / 3)
    )
    assert (agents.values("prover", frames) == 0).all()


def test_statistics_of_histories_shift_and_scale_what_bodies_read() -> None:
    game = build_game("nip")
    agents = game.combined_agents
    assert agents is not None
    frames = EpisodeSampler(game.train_environment, agents, key=(0,)).collect(8).reshape(-1)
    body = agents["verifier"].policy_body
    assert body is not None
    body.set_statistics(frames["message_history"])
    read = body.history(frames)
    torch.testing.assert_close(read.mean(dim=0), torch.zeros_like(read[0]), atol=1e-5, rtol=0)
    std = frames["message_history"].std(dim=0)
    torch.testing.assert_close(read.std(dim=0), (std > 0).float(), atol=1e-4, rtol=0)
    assert "history_mean" in body.state_dict()

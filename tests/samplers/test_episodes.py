"""Batches follow each other, are replayed exactly, and hold the rewards of their ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.errors import ConfigurationError
from nip_astra.samplers.episodes import EpisodeSampler
from nip_astra.scenario_base.protocol.combined import CombinedAgents
from nip_astra.scenario_instance import ScenarioInstance
from tests.kit.protocol_games import build_game


def sampler_of(game: ScenarioInstance, seed: int = 0) -> EpisodeSampler:
    return EpisodeSampler(game.train_environment, game.combined_agents, key=(seed,))


def assert_equal(batch: TensorDict, other: TensorDict) -> None:
    for key in batch.keys(include_nested=True, leaves_only=True):
        assert batch[key].equal(other[key]), key


def test_episodes_go_on_from_one_batch_to_the_next() -> None:
    whole = sampler_of(build_game()).collect(12)
    parts = sampler_of(build_game())
    assert_equal(whole, torch.cat([parts.collect(5), parts.collect(7)], dim=1))


def test_looking_ahead_and_resuming_give_the_next_frames(tmp_path: Path) -> None:
    sampler = sampler_of(build_game("mnip", {"include_linear_message_space": True}))
    sampler.collect(5)
    save_state(tmp_path / "state", sampler.state())
    ahead, played = sampler.look_ahead(6), sampler.collect(6)
    other = sampler_of(build_game("mnip", {"include_linear_message_space": True}), seed=7)
    other.load_state(load_state(tmp_path / "state"))
    assert_equal(played, ahead)
    assert_equal(played, other.collect(6))


def test_each_frame_is_followed_by_the_next() -> None:
    batch = sampler_of(build_game()).collect(8)
    for name in ("round", "message_history", "vector", "active_mask"):
        assert batch["next", name][:, :-1].equal(batch[name][:, 1:])
    done_ET = batch["next", "done"].squeeze(-1)
    assert done_ET.any()
    assert (batch["next", "round"][done_ET] == 0).all()


@pytest.mark.parametrize("zero_knowledge", [False, True])
def test_rewards_are_those_of_the_protocol_for_the_decisions(zero_knowledge: bool) -> None:
    game = build_game(protocol_common={"zero_knowledge": zero_knowledge})
    batch = sampler_of(game).collect(24)
    verifier = game.combined_agents.number("verifier")
    decisions_ET = batch["agents", "decision"][..., verifier]
    decided_ET = decisions_ET != 2
    right_ET = decisions_ET == batch["y"].squeeze(-1)
    rewards_ET = batch["next", "agents", "reward"][..., verifier, 0]
    assert decided_ET.any()
    assert (rewards_ET[decided_ET & right_ET] == 1).all()
    assert (rewards_ET[decided_ET & ~right_ET] == -1).all()
    if not zero_knowledge:
        assert batch["next", "decision"].equal(torch.where(decided_ET, decisions_ET, 2))
        assert batch["next", "done"].squeeze(-1)[decided_ET].all()


def test_the_datapoints_of_an_iteration_are_all_played() -> None:
    batch = sampler_of(build_game("adp")).collect(8)
    assert set(batch["datapoint_id"].flatten().tolist()) == set(range(64))


def test_batches_of_whole_episodes_skip_no_datapoint() -> None:
    game = build_game("adp")
    sampler, num_rounds = sampler_of(game), game.train_environment.protocol.max_message_rounds
    numbers: list[int] = []
    while len(numbers) < 64:
        batch = sampler.collect(num_rounds, renews=False)
        numbers += batch["datapoint_id"][:, 0].flatten().tolist()
    assert sorted(numbers[:64]) == list(range(64))


@pytest.mark.parametrize("name", ["train", "pop", "training"])
def test_an_agent_that_torch_cannot_name_is_refused(name: str) -> None:
    agents = build_game().combined_agents
    with pytest.raises(ConfigurationError) as caught:
        CombinedAgents({name: agents["verifier"]}, agents.protocol, agents.space)
    assert name in str(caught.value)


def test_beginning_anew_leaves_the_episodes_in_progress() -> None:
    sampler = sampler_of(build_game(protocol_common={"verifier_first": False}))
    sampler.collect(5)
    assert sampler.collect(1)["round"].any()
    sampler.begin_anew()
    assert not sampler.collect(1)["round"].any()

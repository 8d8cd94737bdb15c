"""Advantages and rewards to go: by hand, against TorchRL, and without leaks across episodes."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives.value import GAE
from torchrl.objectives.value.functional import generalized_advantage_estimate
from torchrl.objectives.value.functional import reward2go as torchrl_reward_to_go

from nip_astra.rl_objectives.advantages import AdvantageEstimate, gae, reward_to_go
from nip_astra.rl_objectives.objective import EpisodeGae

E, T, A = 5, 7, 2


def random_batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reward_ETA = torch.randn(E, T, A, generator=generator, dtype=torch.float64)
    value_ETA = torch.randn(E, T, A, generator=generator, dtype=torch.float64)
    last_EA = torch.randn(E, A, generator=generator, dtype=torch.float64)
    is_end_ET = torch.rand(E, T, generator=generator) < 0.3
    return reward_ETA, value_ETA, last_EA, is_end_ET


def gae_of(
    reward_ETA: Tensor,
    value_ETA: Tensor,
    last_EA: Tensor,
    is_end_ET: Tensor,
    gamma: float = 0.9,
    lam: float = 0.95,
) -> AdvantageEstimate:
    end_ET1 = is_end_ET[..., None]
    return gae(reward_ETA, value_ETA, gamma=gamma, lam=lam, bootstrap_E=last_EA, is_end_EH=end_ET1)


def test_an_episode_of_two_rounds_equals_hand_computed_values() -> None:
    reward, value = torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[0.5], [0.25]]])
    found = gae_of(reward, value, torch.tensor([[9.0]]), torch.tensor([[False, True]]), lam=0.5)
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.9 * 0.25 - 0.5 = -0.275.
    assert found.advantages.flatten().tolist() == pytest.approx([-0.275 + 0.45 * 0.75, 0.75])
    assert found.returns.flatten().tolist() == pytest.approx([0.5625, 1.0])


def test_a_batch_that_ends_before_the_episode_counts_the_value_after_it() -> None:
    reward, value, last = (torch.tensor([[[x]]]) for x in (1.0, 0.5, 2.0))
    found = gae_of(reward, value, last[0], torch.tensor([[False]]), lam=0.5)
    assert float(found.advantages) == pytest.approx(1 + 0.9 * 2 - 0.5)


def test_nothing_passes_from_an_episode_to_the_one_before() -> None:
    reward, value, last, _ = random_batch()
    is_end = torch.zeros(E, T, dtype=torch.bool)
    is_end[:, 3] = True
    before = gae_of(reward, value, last, is_end)
    reward[:, 4:] += 100.0
    value[:, 4:] -= 50.0
    after = gae_of(reward, value, last, is_end)
    assert torch.equal(before.advantages[:, :4], after.advantages[:, :4])
    assert not torch.equal(before.advantages[:, 4:], after.advantages[:, 4:])


@pytest.mark.parametrize("number", range(A))
def test_advantages_are_those_of_torchrl(number: int) -> None:
    reward, value, last, is_end = random_batch()
    # Discounts that are exact in single precision, in which TorchRL keeps them.
    found = gae_of(reward, value, last, is_end, gamma=0.875, lam=0.75)
    next_value = torch.cat([value[:, 1:], last[:, None]], dim=1)
    end = is_end[..., None]
    advantage, target = generalized_advantage_estimate(
        0.875,
        0.75,
        value[..., number, None],
        next_value[..., number, None],
        reward[..., number, None],
        end,
        end,
    )
    torch.testing.assert_close(found.advantages[..., number], advantage[..., 0])
    torch.testing.assert_close(found.returns[..., number], target[..., 0])


def test_rewards_to_go_are_those_of_torchrl_where_every_episode_ends() -> None:
    reward, _, _, is_end = random_batch()
    is_end[:, -1] = True
    found = reward_to_go(reward, is_end[..., None], gamma=0.9)
    for number in range(A):
        expected = torchrl_reward_to_go(reward[..., number, None], is_end[..., None], 0.9)
        torch.testing.assert_close(found[..., number, None], expected)


def test_a_reward_to_go_equals_a_hand_computed_value() -> None:
    reward = torch.tensor([[[1.0], [2.0], [4.0], [8.0]]])
    is_end = torch.tensor([[False, True, False, False]])
    found = reward_to_go(reward, is_end[..., None], gamma=0.5)
    assert found.flatten().tolist() == [2.0, 2.0, 8.0, 8.0]


class Recorder:
    """Values that are linear in an observation; records its inputs."""

    def __init__(self) -> None:
        self.num_frames: list[int] = []

    def __call__(self, name: str, frames: TensorDict) -> Tensor:
        self.num_frames.append(len(frames["observation"]))
        return frames["observation"] * (1.0 if name == "first" else -2.0)


def sampled_batch(is_end_ET: Tensor) -> TensorDict:
    generator = torch.Generator().manual_seed(3)
    seen = torch.randn(E, T + 1, generator=generator)
    reward = torch.randn(E, T, A, 1, generator=generator)
    end = is_end_ET[..., None]
    following = {
        "observation": seen[:, 1:],
        "agents": TensorDict({"reward": reward}, batch_size=[E, T]),
        "done": end,
        "terminated": end.clone(),
        "has_decided": torch.zeros(E, T, A, dtype=torch.bool),
    }
    content = {
        "observation": seen[:, :-1],
        "agents": TensorDict({}, batch_size=[E, T]),
        "next": TensorDict(following, batch_size=[E, T]),
    }
    return TensorDict(content, batch_size=[E, T])


def test_the_module_calls_each_value_function_once_for_all_frames_and_once_for_the_last() -> None:
    values = Recorder()
    module = EpisodeGae(("first", "second"), values, gamma=0.9, lmbda=0.95)
    batch = module(sampled_batch(torch.zeros(E, T, dtype=torch.bool)))
    assert values.num_frames == [E * T, E * T, E, E]
    for key in ("value", "advantage", "value_target"):
        assert batch["agents", key].shape == (E, T, A, 1)
        assert not batch["agents", key].requires_grad


def test_if_all_episodes_end_with_the_batch_later_values_are_not_computed() -> None:
    values, is_end = Recorder(), torch.zeros(E, T, dtype=torch.bool)
    is_end[:, -1] = True
    EpisodeGae(("first", "second"), values, gamma=0.9, lmbda=0.95)(sampled_batch(is_end))
    assert values.num_frames == [E * T, E * T]


def test_the_module_equals_that_of_torchrl_in_its_layout() -> None:
    _, _, _, is_end = random_batch(seed=2)
    batch = sampled_batch(is_end)
    ours = EpisodeGae(("first", "second"), Recorder(), gamma=0.9, lmbda=0.95)(batch.clone())
    for number, factor in enumerate((1.0, -2.0)):
        theirs = batch.clone()
        theirs["value"] = batch["observation"][..., None] * factor
        theirs["next", "value"] = batch["next", "observation"][..., None] * factor
        theirs["next", "reward"] = batch["next", "agents", "reward"][:, :, number]
        module = GAE(gamma=0.9, lmbda=0.95, value_network=None, skip_existing=True)
        module.set_keys(value="value")
        module(theirs)
        torch.testing.assert_close(ours["agents", "advantage"][:, :, number], theirs["advantage"])
        torch.testing.assert_close(
            ours["agents", "value_target"][:, :, number], theirs["value_target"]
        )


def test_an_agents_own_end_is_an_end_for_it_and_for_no_other() -> None:
    batch = sampled_batch(torch.zeros(E, T, dtype=torch.bool))
    module = EpisodeGae(("first", "second"), Recorder(), gamma=0.9, lmbda=0.95)
    before = module(batch.clone())["agents", "advantage"]
    batch["next", "has_decided"][:, 2, 0] = True
    after = module(batch)["agents", "advantage"]
    assert after[:, :, 1].equal(before[:, :, 1])
    assert after[:, 3:, 0].equal(before[:, 3:, 0])
    reward = batch["next", "agents", "reward"][:, 2, 0, 0]
    torch.testing.assert_close(after[:, 2, 0, 0], reward - batch["observation"][:, 2])

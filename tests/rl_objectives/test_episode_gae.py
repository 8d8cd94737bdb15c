"""Advantages and rewards to go: by hand, against TorchRL, and without leaks across episodes."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives.value import GAE
from torchrl.objectives.value.functional import reward2go as torchrl_reward_to_go

from nip_astra.rl_objectives.advantages import reward_to_go
from nip_astra.rl_objectives.objective import EpisodeGae

E, T, A = 5, 7, 2
NAMES = ("first", "second")


def random_ends(seed: int) -> Tensor:
    return torch.rand(E, T, generator=torch.Generator().manual_seed(seed)) < 0.3


def test_rewards_to_go_are_those_of_torchrl_where_every_episode_ends() -> None:
    generator = torch.Generator().manual_seed(0)
    reward = torch.randn(E, T, A, generator=generator, dtype=torch.float64)
    is_end = random_ends(seed=0)
    is_end[:, -1] = True
    result = reward_to_go(reward, is_end[..., None], gamma=0.9)
    for number in range(A):
        expected = torchrl_reward_to_go(reward[..., number, None], is_end[..., None], 0.9)
        torch.testing.assert_close(result[..., number, None], expected)


def values_of(name: str, frames: TensorDict) -> Tensor:
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


@pytest.mark.parametrize("is_over", [False, True])
def test_the_module_equals_that_of_torchrl_in_its_layout(is_over: bool) -> None:
    is_end = random_ends(seed=2)
    is_end[:, -1] |= is_over
    batch = sampled_batch(is_end)
    ours = EpisodeGae(NAMES, values_of, gamma=0.9, lmbda=0.95)(batch.clone())
    for number, factor in enumerate((1.0, -2.0)):
        theirs = batch.clone()
        theirs["value"] = batch["observation"][..., None] * factor
        theirs["next", "value"] = batch["next", "observation"][..., None] * factor
        theirs["next", "reward"] = batch["next", "agents", "reward"][:, :, number]
        module = GAE(gamma=0.9, lmbda=0.95, value_network=None, skip_existing=True)
        module.set_keys(value="value")
        module(theirs)
        for key in ("value", "advantage", "value_target"):
            torch.testing.assert_close(ours["agents", key][:, :, number], theirs[key])
            assert not ours["agents", key].requires_grad


def test_an_agents_own_end_is_an_end_for_it_and_for_no_other() -> None:
    batch = sampled_batch(torch.zeros(E, T, dtype=torch.bool))
    module = EpisodeGae(NAMES, values_of, gamma=0.9, lmbda=0.95)
    before = module(batch.clone())["agents", "advantage"]
    batch["next", "has_decided"][:, 2, 0] = True
    after = module(batch)["agents", "advantage"]
    assert after[:, :, 1].equal(before[:, :, 1])
    assert after[:, 3:, 0].equal(before[:, 3:, 0])
    reward = batch["next", "agents", "reward"][:, 2, 0, 0]
    torch.testing.assert_close(after[:, 2, 0, 0], reward - batch["observation"][:, 2])

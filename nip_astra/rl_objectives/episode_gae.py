"""Advantages and returns in batches of consecutive frames of many environments.

Shapes: E environments, T consecutive rounds, A agents; F frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor, nn


class ValueFunction(Protocol):
    """An agent's values of a batch of frames."""

    def __call__(self, name: str, frames: TensorDict, /) -> Tensor:
        """Values, [F]."""


class GaeEstimate(NamedTuple):
    """Advantages, and what value functions are to learn.

    Attributes
    ----------
    advantage_ETA : Tensor
        In units of the reward; no grad.
    value_target_ETA : Tensor
        Advantage plus value.
    """

    advantage_ETA: Tensor
    value_target_ETA: Tensor


def gae(
    reward_ETA: Tensor,
    value_ETA: Tensor,
    last_value_EA: Tensor,
    is_end_ETA: Tensor,
    *,
    gamma: float,
    lmbda: float,
) -> GaeEstimate:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) of several agents at once.

    `delta_t = r_t + gamma * V_(t+1) - V_t` and `A_t = delta_t + gamma * lmbda * A_(t+1)`. After an
    end, both `V_(t+1)` and `A_(t+1)` are 0, so nothing passes from one episode to another.

    Parameters
    ----------
    reward_ETA, value_ETA : Tensor
        Reward of each round, and the value of the frame before it.
    last_value_EA : Tensor
        Value of the frame after the last round; what is not played yet counts as worth this.
    is_end_ETA : Tensor
        bool; True where the episode ended with the round, for all agents (last dimension 1) or for
        the one.
    gamma, lmbda : float
        In [0, 1].
    """
    goes_on_ETA = is_end_ETA.logical_not().to(value_ETA.dtype)
    next_value_ETA = torch.cat([value_ETA[:, 1:], last_value_EA.unsqueeze(1)], dim=1)
    delta_ETA = reward_ETA + gamma * next_value_ETA * goes_on_ETA - value_ETA
    advantage_ETA = _discounted_sums(delta_ETA, goes_on_ETA, gamma * lmbda)
    return GaeEstimate(advantage_ETA, advantage_ETA + value_ETA)


def reward_to_go(reward_ETA: Tensor, is_end_ETA: Tensor, *, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each round to the end of its episode, [E, T, A].

    Where the batch ends before the episode does, it is the sum up to there.

    Parameters
    ----------
    reward_ETA : Tensor
        Reward of each round.
    is_end_ETA : Tensor
        bool; as in `gae`.
    gamma : float
        Discount a round, in [0, 1].
    """
    goes_on_ETA = is_end_ETA.logical_not().to(reward_ETA.dtype)
    return _discounted_sums(reward_ETA, goes_on_ETA, gamma)


def ends_of(batch: TensorDict) -> Tensor:
    """Where the episode ended for each agent, by its end or by the agent's own, [E, T, A]."""
    ends_ETA: Tensor = batch["next", "terminated"] | batch["next", "has_decided"]
    return ends_ETA


def reward_to_go_of(parts: Sequence[TensorDict], *, gamma: float) -> Tensor:
    """`reward_to_go` of a batch, [E, T, A, 1].

    Parameters
    ----------
    parts : Sequence[TensorDict]
        The batch [E, T], and where there is one what was played on after it.
    gamma : float
        Discount a round, in [0, 1].
    """
    rewards_ETA = torch.cat([part["next", "agents", "reward"] for part in parts], dim=1)
    ends_ETA = torch.cat([ends_of(part) for part in parts], dim=1)
    to_go_ETA = reward_to_go(rewards_ETA.squeeze(-1), ends_ETA, gamma=gamma)
    return to_go_ETA[:, : parts[0].shape[1], :, None]


def _discounted_sums(terms_ETA: Tensor, goes_on_ETA: Tensor, factor: float) -> Tensor:
    """`s_t = x_t + factor * goes_on_t * s_(t+1)`."""
    total_EA = torch.zeros_like(terms_ETA[:, 0])
    sums = []
    for t in reversed(range(terms_ETA.shape[1])):
        total_EA = terms_ETA[:, t] + factor * goes_on_ETA[:, t] * total_EA
        sums.append(total_EA)
    return torch.stack(sums[::-1], dim=1)


class EpisodeGae(nn.Module):
    """Writes values, advantages and value targets into a batch.

    Called under no grad with a batch [E, T] as the sampler gives it. Each value function runs once
    on all frames, and once on those after the last round where any episode goes on there. Ends are
    `("next", "terminated")`, and for an agent that may decide before the others have, its own
    `("next", "has_decided")`.

    Parameters
    ----------
    agent_names : Sequence[str]
        In the order of the dimension A.
    values : ValueFunction
        Gives the values of one agent.
    gamma, lmbda : float
        See `gae`.
    """

    def __init__(
        self, agent_names: Sequence[str], values: ValueFunction, *, gamma: float, lmbda: float
    ) -> None:
        super().__init__()
        self.agent_names = tuple(agent_names)
        self.values = values
        self.gamma = gamma
        self.lmbda = lmbda

    @torch.no_grad()
    def forward(self, batch: TensorDict) -> TensorDict:
        """Write `("agents", "value" | "advantage" | "value_target")`, each [E, T, A, 1]."""
        shape = batch.batch_size
        value_ETA = self._values(batch.flatten()).reshape(*shape, -1)
        if bool(batch["next", "terminated"][:, -1].all()):
            last_value_EA = torch.zeros_like(value_ETA[:, -1])
        else:
            last_value_EA = self._values(_observation_after(batch))
        found = gae(
            batch["next", "agents", "reward"].squeeze(-1).to(value_ETA.dtype),
            value_ETA,
            last_value_EA,
            ends_of(batch),
            gamma=self.gamma,
            lmbda=self.lmbda,
        )
        batch["agents", "value"] = value_ETA.unsqueeze(-1)
        batch["agents", "advantage"] = found.advantage_ETA.unsqueeze(-1)
        batch["agents", "value_target"] = found.value_target_ETA.unsqueeze(-1)
        return batch

    def _values(self, frames_F: TensorDict) -> Tensor:
        return torch.stack([self.values(name, frames_F) for name in self.agent_names], dim=-1)


def _observation_after(batch: TensorDict) -> TensorDict:
    """The frames after the last round, [E]."""
    following = batch["next"][:, -1]
    names = [name for name in batch.keys() if name not in ("next", "agents")]  # noqa: SIM118
    return following.select(*names)

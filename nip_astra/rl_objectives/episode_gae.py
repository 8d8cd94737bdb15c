"""Advantages and returns in batches of consecutive frames of many environments.

Shape suffixes: `E` environment, `T` consecutive round, `A` agent; `F` frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from nip_astra.rl_objectives.advantages import gae, reward_to_go


class ValueFunction(Protocol):
    """An agent's values of a batch of frames."""

    def __call__(self, name: str, frames: TensorDict, /) -> Tensor:
        """Values, [F]."""


def ends_of(batch: TensorDict) -> Tensor:
    """Where the episode ended for each agent, by its end or the agent's decision, [E, T, A]."""
    ends_ETA: Tensor = batch["next", "terminated"] | batch["next", "has_decided"]
    return ends_ETA


def reward_to_go_of(parts: Sequence[TensorDict], *, gamma: float) -> Tensor:
    """`reward_to_go` of a batch, [E, T, A, 1].

    Parameters
    ----------
    parts : Sequence[TensorDict]
        The batch [E, T], and where there is one the rounds played after it.
    gamma : float
        Discount a round, in [0, 1].
    """
    rewards_ETA = torch.cat([part["next", "agents", "reward"] for part in parts], dim=1)
    ends_ETA = torch.cat([ends_of(part) for part in parts], dim=1)
    to_go_ETA = reward_to_go(rewards_ETA.squeeze(-1), ends_ETA, gamma=gamma)
    return to_go_ETA[:, : parts[0].shape[1], :, None]


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
            gamma=self.gamma,
            lam=self.lmbda,
            bootstrap_E=last_value_EA,
            is_end_EH=ends_of(batch),
        )
        batch["agents", "value"] = value_ETA.unsqueeze(-1)
        batch["agents", "advantage"] = found.advantages.unsqueeze(-1)
        batch["agents", "value_target"] = found.returns.unsqueeze(-1)
        return batch

    def _values(self, frames_F: TensorDict) -> Tensor:
        return torch.stack([self.values(name, frames_F) for name in self.agent_names], dim=-1)


def _observation_after(batch: TensorDict) -> TensorDict:
    """The frames after the last round, [E]."""
    following = batch["next"][:, -1]
    names = [name for name in batch.keys() if name not in ("next", "agents")]  # noqa: SIM118
    return following.select(*names)

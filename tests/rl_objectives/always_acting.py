"""Agents that all act in every frame, for comparisons with other implementations of losses.

Shapes: B frames, A agents, D numbers observed, K actions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn

NAMES = ("first", "second")
D, K = 4, 3


class Evaluation(NamedTuple):
    logprobs_B: Tensor
    entropies_B: Tensor


class OneAgent(nn.Module):
    shares_body = False

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(D, K, dtype=torch.float64)
        self.critic = nn.Linear(D, 1, dtype=torch.float64)


class AlwaysActing(nn.Module):
    """Linear policies and values of each agent's own observation."""

    needs_logits = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.names = NAMES
        self.agents = nn.ModuleDict({name: OneAgent() for name in NAMES})

    def __getitem__(self, name: str) -> nn.Module:
        return self.agents[name]

    def number(self, name: str) -> int:
        return self.names.index(name)

    def policy(self, name: str, frames: Any) -> Tensor:
        return self[name].policy(frames["agents", "observation"][:, self.number(name)])

    def evaluate(self, name: str, frames: Any, output: Any = None) -> Evaluation:
        number = self.number(name)
        logs_BK = (self.policy(name, frames) if output is None else output).log_softmax(-1)
        action_B1 = frames["agents", "action"][:, number, None]
        entropies_B = -(logs_BK.exp() * logs_BK).sum(-1)
        return Evaluation(logs_BK.gather(-1, action_B1).squeeze(-1), entropies_B)

    def values(self, name: str, frames: Any) -> Tensor:
        return self[name].critic(frames["agents", "observation"][:, self.number(name)]).squeeze(-1)

    def is_acting(self, name: str, frames: Any) -> Tensor:
        return frames["is_acting"][:, self.number(name)]


def make_batch(agents: AlwaysActing, num_frames: int = 12, seed: int = 1) -> TensorDict:
    """Frames of a policy that differs a little from the present one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (num_frames, len(NAMES))
    content = {
        "observation": normal(*shape, D),
        "action": torch.randint(K, shape, generator=generator),
        "advantage": normal(*shape, 1),
        "value": normal(*shape, 1),
        "value_target": 2 * normal(*shape, 1),
        "reward_to_go": normal(*shape, 1),
    }
    batch = TensorDict({"agents": content, "is_acting": torch.ones(shape).bool()}, [num_frames])
    with torch.no_grad():
        logprobs = [agents.evaluate(name, batch).logprobs_B for name in NAMES]
    batch["agents", "logprob"] = torch.stack(logprobs, dim=1) + 0.3 * normal(*shape)
    return batch


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in module.named_parameters()
    }

"""A view of a game and a check of derivatives, for tests of graph and image networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nip_astra.scenario_base.protocol.tensordict_agents import AgentShape, MessageSpace

NUM_ROUNDS = 3
Frames = dict[str, Tensor]


def agent_shape(
    num_symbols: int,
    *,
    is_verifier: bool = True,
    visible: Sequence[int] = (0, 1),
    message_size: int = 1,
    num_linear: int = 0,
) -> AgentShape:
    """A network's view of a game with three rounds and two channels."""
    return AgentShape(
        name="agent",
        is_verifier=is_verifier,
        has_decision=is_verifier,
        num_rounds=NUM_ROUNDS,
        num_channels=2,
        visible_channels=tuple(visible),
        message_space=MessageSpace(num_symbols, message_size, num_linear),
        d_representation=16,
    )


class _Loss(nn.Module):
    def __init__(self, body: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.body, self.names = body, names

    def forward(self, frames: Frames) -> Tensor:
        read = self.body(frames)
        return torch.stack([read[name].pow(3).sum() for name in self.names]).sum()


def check_second_derivatives(body: nn.Module, frames: Frames, *names: str) -> None:
    """Compare those of some representations in all weights with finite differences."""
    loss = _Loss(body.double(), names)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in frames.items()}
    weights = {name: x.detach().requires_grad_() for name, x in loss.named_parameters()}

    def with_weights(*values: Tensor) -> Tensor:
        replaced = dict(zip(weights, values, strict=True))
        return torch.func.functional_call(loss, replaced, (exact,))

    assert torch.autograd.gradgradcheck(with_weights, list(weights.values()), fast_mode=True)

"""Value functions with more information than the agents' policies.

Shapes: B frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from nip_astra.scenario_base.protocol.message_space import AgentShape
from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentValueHead,
    Observation,
    Representation,
)

CENTRAL_CRITIC = "rl_central_critic"
"""The `trainer_type` of trainers with centralised value functions."""


def seeing_all(shape: AgentShape) -> AgentShape:
    """The agent's shape with all channels visible."""
    return replace(shape, visible_channels=tuple(range(shape.num_channels)))


class LabelledValueHead(AgentValueHead):
    """Predicts the expected reward given the label, with one head per label.

    Parameters
    ----------
    build : Callable
        Builds a value head of the scenario.
    """

    def __init__(self, build: Callable[[], AgentValueHead]) -> None:
        super().__init__()
        self.heads = nn.ModuleList([build(), build()])

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        values_BY = torch.stack([head(representation, observation) for head in self.heads], dim=-1)
        values_B: Tensor = values_BY.gather(-1, observation["y"]).squeeze(-1)
        return values_B

"""Frames and agents of image classification, made without an environment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nip_astra.scenario_base.protocol.tensordict_agents import AgentShape, MessageSpace
from nip_astra.scenarios.images.agents import (
    ImageBody,
    ImageClassificationAgentParameters,
    ImageGrid,
)

NUM_ROUNDS = 3


def make_shape(grid: ImageGrid, **changes: Any) -> AgentShape:
    """An agent's view of a game with three rounds and two channels."""
    message = {"message_size": 1, "num_linear_symbols": 0}
    message |= {name: changes.pop(name) for name in list(changes) if name in message}
    values: dict[str, Any] = {
        "name": "verifier",
        "is_verifier": True,
        "has_decision": True,
        "num_rounds": NUM_ROUNDS,
        "num_channels": 2,
        "visible_channels": (0, 1),
        "message_space": MessageSpace(grid.num_latent_pixels, **message),
        "d_representation": 6,
    }
    return AgentShape(**values | changes)


def make_grid(height: int = 8, width: int = 8, *, groups: int = 1, channels: int = 1) -> ImageGrid:
    """The sizes of a grey square image that is halved once."""
    return ImageGrid.of((channels, height, width), groups)


def make_body(
    grid: ImageGrid,
    shape: AgentShape,
    *,
    num_block_groups: int = 1,
    embedding_channels: int | None = None,
    **agent: Any,
) -> ImageBody:
    """A body with four channels."""
    torch.manual_seed(0)
    return ImageBody(
        ImageClassificationAgentParameters(**{"num_blocks_per_group": 1} | agent),
        shape,
        grid,
        num_block_groups=num_block_groups,
        initial_num_channels=4,
        embedding_channels=embedding_channels,
    )


def make_frames(
    grid: ImageGrid, shape: AgentShape, num_frames: int = 5, seed: int = 0
) -> dict[str, Tensor]:
    """Frames with random messages but without the label, which no network may read."""
    generator = torch.Generator().manual_seed(seed)
    place = (shape.num_channels, shape.message_space.message_size)

    def messages(num_symbols: int, *lead: int) -> Tensor:
        size = (num_frames, *lead, *place)
        symbols = torch.randint(num_symbols, size, generator=generator)
        return torch.nn.functional.one_hot(symbols, num_symbols).float()

    frames = {
        "round": torch.arange(num_frames) % shape.num_rounds,
        "image": torch.rand(
            num_frames, grid.num_channels, grid.height, grid.width, generator=generator
        ),
        "message_history": messages(grid.num_latent_pixels, shape.num_rounds),
        "message": messages(grid.num_latent_pixels),
    }
    linear = shape.message_space.num_linear_symbols
    if linear:
        frames["linear_message_history"] = messages(linear, shape.num_rounds)
        frames["linear_message"] = messages(linear)
    return frames

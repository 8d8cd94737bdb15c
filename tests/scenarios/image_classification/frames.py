"""Frames and agents of image classification, made without an environment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nip_astra.scenario_base.protocol.tensordict_agents import AgentShape
from nip_astra.scenarios.images.agents import (
    ImageBody,
    ImageClassificationAgentParameters,
    ImageGrid,
)
from tests.scenarios.networks import Frames, agent_shape


def make_grid(height: int = 8, width: int = 8, *, groups: int = 1, channels: int = 1) -> ImageGrid:
    """The sizes of a grey square image that is halved once."""
    return ImageGrid.of((channels, height, width), groups)


def make_shape(grid: ImageGrid, **changes: Any) -> AgentShape:
    """An agent's view of a game about such images."""
    return agent_shape(grid.num_latent_pixels, **changes)


def body_and_frames(
    grid: ImageGrid | None = None,
    *,
    shape: dict[str, Any] = {},
    num_frames: int = 5,
    num_block_groups: int = 1,
    embedding_channels: int | None = None,
    **agent: Any,
) -> tuple[ImageBody, Frames]:
    """A body with four channels, and frames for it."""
    torch.manual_seed(0)
    grid = grid or make_grid()
    body = ImageBody(
        ImageClassificationAgentParameters(**{"num_blocks_per_group": 1} | agent),
        make_shape(grid, **shape),
        grid,
        num_block_groups=num_block_groups,
        initial_num_channels=4,
        embedding_channels=embedding_channels,
    )
    return body, make_frames(grid, body.shape, num_frames)


def make_frames(grid: ImageGrid, shape: AgentShape, num_frames: int = 5) -> Frames:
    """Frames with random messages but without the label, which no network may read."""
    generator = torch.Generator().manual_seed(0)
    place = (shape.num_channels, shape.message_space.message_size)

    def messages(num_symbols: int, *lead: int) -> Tensor:
        size = (num_frames, *lead, *place)
        symbols = torch.randint(num_symbols, size, generator=generator)
        return torch.nn.functional.one_hot(symbols, num_symbols).float()

    size = (num_frames, grid.num_channels, grid.height, grid.width)
    frames = {
        "round": torch.arange(num_frames) % shape.num_rounds,
        "image": torch.rand(size, generator=generator),
        "message_history": messages(grid.num_latent_pixels, shape.num_rounds),
        "message": messages(grid.num_latent_pixels),
    }
    linear = shape.message_space.num_linear_symbols
    if linear:
        frames["linear_message_history"] = messages(linear, shape.num_rounds)
        frames["linear_message"] = messages(linear)
    return frames

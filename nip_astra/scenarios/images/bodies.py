"""Networks that read an image and what was said about it.

Shapes: B frames, K channels of an image, H and W its height and width, h and w those of the grid
of latent pixels, S = h * w latent pixels, R rounds, V channels that the agent sees, P positions of
a message, L linear symbols, D width of the representation, F width of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from nip_astra.scenario_base.protocol.tensordict_agents import AgentBody, AgentShape, Observation
from nip_astra.scenarios.images.parameters import ImageClassificationAgentParameters
from nip_astra.scenarios.images.pretrained.embeddings import embedding_key
from nip_astra.utils.activations import ACTIVATIONS


class ImageGrid(NamedTuple):
    """Sizes of the image and of the grid of latent pixels, in pixels.

    Attributes
    ----------
    num_channels, height, width : int
        Of the image.
    latent_height, latent_width : int
        Of the grid: those of the image, halved once for each group of blocks, rounded down.
    """

    num_channels: int
    height: int
    width: int
    latent_height: int
    latent_width: int

    @classmethod
    def of(cls, image_shape: Sequence[int], num_block_groups: int) -> ImageGrid:
        """The sizes for images [K, H, W] and as many groups of blocks."""
        channels, height, width = image_shape
        return cls(channels, height, width, height >> num_block_groups, width >> num_block_groups)

    @property
    def num_latent_pixels(self) -> int:
        """S, the number of symbols."""
        return self.latent_height * self.latent_width


class ImageBody(AgentBody):
    """Reads an image, the messages as pictures on it, and gives a vector for each latent pixel.

    A message points at latent pixels, so that the history is a stack of small pictures. They are
    brought to the image's size and laid over it, beside the pretrained view of the image if there
    is one; two layers read each pixel, and groups of convolutions halve the image.

    Its representation: `latent_pixels` [B, S, D], and `image` [B, D], their mean.

    Parameters
    ----------
    num_block_groups : int
        Times that the image is halved.
    initial_num_channels : int
        Width of the first group; each further one has twice as many.
    embedding_channels : int or None
        Channels of the pretrained view; None where the agent has none.
    """

    def __init__(
        self,
        agent: ImageClassificationAgentParameters,
        shape: AgentShape,
        grid: ImageGrid,
        *,
        num_block_groups: int,
        initial_num_channels: int,
        embedding_channels: int | None = None,
    ) -> None:
        super().__init__(shape)
        self.grid = grid
        self.activation = ACTIVATIONS[agent.activation_function]()
        messages = (shape.num_rounds + 1) * shape.num_visible * shape.message_space.message_size
        model = agent.pretrained_embeddings_model
        self.embedding_key = None if model is None else embedding_key(model)
        self.read_image = nn.Conv2d(grid.num_channels, initial_num_channels, 1)
        self.read_messages = nn.Conv2d(messages, initial_num_channels, 1, bias=False)
        self.read_linear_messages: nn.Linear | None = None
        self.reduce_embeddings: nn.Conv2d | None = None
        self.read_embeddings: nn.Conv2d | None = None
        if shape.message_space.num_linear_symbols:
            size = shape.num_rounds * shape.num_visible * shape.message_space.message_size
            size *= shape.message_space.num_linear_symbols
            self.read_linear_messages = nn.Linear(size, initial_num_channels, bias=False)
        if self.embedding_key is not None:
            assert embedding_channels is not None
            reduced = agent.pretrained_embedding_channels
            self.reduce_embeddings = nn.Conv2d(embedding_channels, reduced, 1)
            self.read_embeddings = nn.Conv2d(reduced, initial_num_channels, 1, bias=False)
        self.pixel_layer = nn.Conv2d(initial_num_channels, initial_num_channels, 1)
        widths = [initial_num_channels << number for number in range(num_block_groups)]
        self.groups = nn.ModuleList(
            _Group(agent, before, after) for before, after in pairwise([widths[0], *widths])
        )
        self.to_representation = nn.Conv2d(widths[-1], shape.d_representation, 1)

    def forward(self, observation: Observation) -> dict[str, Tensor]:
        # With channels last, convolutions of few channels take half the time on a CPU.
        pixels_BFHW = self._read(observation).contiguous(memory_format=torch.channels_last)
        pixels_BFHW = self.activation(self.pixel_layer(self.activation(pixels_BFHW)))
        for group in self.groups:
            pixels_BFHW = group(pixels_BFHW)
        latent_BSD = self.to_representation(pixels_BFHW).flatten(2).transpose(1, 2)
        return {"latent_pixels": latent_BSD, "image": latent_BSD.mean(1)}

    def _read(self, observation: Observation) -> Tensor:
        """The first layer, [B, F, H, W], of image, messages and view laid over each other.

        A layer that reads each pixel alone gives the same before and after pixels are repeated, so
        each part is read at its own size and brought to the image's after that.
        """
        layer_BFHW: Tensor = self.read_image(observation["image"])
        grid = self.grid
        batch = len(layer_BFHW)
        messages_BMS = torch.cat(
            [self.history(observation).flatten(1, 3), self.last_message(observation).flatten(1, 2)],
            dim=1,
        )
        small = messages_BMS.view(batch, -1, grid.latent_height, grid.latent_width)
        layer_BFHW = layer_BFHW + self._to_image_size(self.read_messages(small))
        if self.read_linear_messages is not None:
            linear_BF = self.read_linear_messages(self.linear_history(observation).flatten(1))
            layer_BFHW = layer_BFHW + linear_BF[..., None, None]
        if self.embedding_key is not None:
            assert self.reduce_embeddings is not None
            assert self.read_embeddings is not None
            view = self.activation(self.reduce_embeddings(observation[self.embedding_key]))
            layer_BFHW = layer_BFHW + self._to_image_size(self.read_embeddings(view))
        return layer_BFHW

    def _to_image_size(self, pixels_BFhw: Tensor) -> Tensor:
        """Repeat pixels, or take the mean of those that fall together."""
        size = (self.grid.height, self.grid.width)
        if pixels_BFhw.shape[-2] > size[0] or pixels_BFhw.shape[-1] > size[1]:
            return functional.adaptive_avg_pool2d(pixels_BFhw, size)
        return functional.interpolate(pixels_BFhw, size=size, mode="nearest")


class _Group(nn.Module):
    """Blocks of convolutions that give half the height and width, rounded down."""

    def __init__(
        self, agent: ImageClassificationAgentParameters, channels_in: int, channels_out: int
    ) -> None:
        super().__init__()
        block: Any = _ResidualBlock if agent.building_block_type == "residual" else _ConvBlock
        self.pools = agent.stride == 1
        self.blocks = nn.Sequential(
            *(
                block(
                    agent,
                    channels_out if number else channels_in,
                    channels_out,
                    stride=1 if number else agent.stride,
                )
                for number in range(agent.num_blocks_per_group)
            )
        )

    def forward(self, pixels_BFHW: Tensor) -> Tensor:
        height, width = pixels_BFHW.shape[-2] // 2, pixels_BFHW.shape[-1] // 2
        found: Tensor = self.blocks(pixels_BFHW)
        if self.pools:
            return functional.max_pool2d(found, 2)
        # A strided convolution rounds an odd size up.
        return found[..., :height, :width]


class _ConvBlock(nn.Module):
    """A convolution and an activation."""

    def __init__(
        self,
        agent: ImageClassificationAgentParameters,
        channels_in: int,
        channels_out: int,
        *,
        stride: int,
    ) -> None:
        super().__init__()
        self.convolution = _convolution(agent, channels_in, channels_out, stride)
        self.activation = ACTIVATIONS[agent.activation_function]()

    def forward(self, pixels_BFHW: Tensor) -> Tensor:
        found: Tensor = self.activation(self.convolution(pixels_BFHW))
        return found


class _ResidualBlock(nn.Module):
    """Two convolutions, added to what went in; that is projected where the shape changes."""

    def __init__(
        self,
        agent: ImageClassificationAgentParameters,
        channels_in: int,
        channels_out: int,
        *,
        stride: int,
    ) -> None:
        super().__init__()
        self.first = _convolution(agent, channels_in, channels_out, stride)
        self.second = _convolution(agent, channels_out, channels_out, 1)
        self.activation = ACTIVATIONS[agent.activation_function]()
        self.shortcut: nn.Module = nn.Identity()
        if channels_in != channels_out or stride != 1:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride=stride)

    def forward(self, pixels_BFHW: Tensor) -> Tensor:
        inner = self.second(self.activation(self.first(pixels_BFHW)))
        found: Tensor = self.activation(inner + self.shortcut(pixels_BFHW))
        return found


def _convolution(
    agent: ImageClassificationAgentParameters, channels_in: int, channels_out: int, stride: int
) -> nn.Conv2d:
    size = agent.kernel_size
    return nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2)

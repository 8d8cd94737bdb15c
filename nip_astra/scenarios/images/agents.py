"""Agents that read images: parameters, body and policy head.

Shapes: B frames, K channels of an image, H and W its height and width, h and w those of the grid
of latent pixels, S = h * w latent pixels, V visible channels, P positions of a message, D width of
the representation, F width of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.nn import functional

from nip_astra.parameters.agents import HeadParameters
from nip_astra.parameters.conditions import where_above, where_given
from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentBody,
    AgentShape,
    ImpossibleSymbols,
    Observation,
    Representation,
)
from nip_astra.scenarios.heads import SummaryPolicyHead
from nip_astra.scenarios.images.pretrained import PretrainedModelParameters, embedding_key
from nip_astra.utils.activations import ACTIVATIONS

LATENT, IMAGE = "latent_pixels", "image"
"""Names in a representation: [B, S, D] and [B, D]."""


class ImageClassificationAgentParameters(HeadParameters):
    """An agent that reads an image and the messages about it."""

    activation_function: Literal["tanh", "relu", "gelu", "sigmoid"] = "relu"
    """Activation between layers."""
    building_block_type: Literal["conv", "residual"] = "conv"
    """conv: one convolution and activation. residual: two of them, added to their input."""
    num_blocks_per_group: int = Field(default=2, ge=1, le=1000)
    """Blocks before each halving of the image. Larger sees more context and is slower."""
    kernel_size: int = Field(default=3, ge=1)
    """Kernel size of convolutions in pixels; odd. Larger sees more context and is slower."""
    stride: Literal[1, 2] = 1
    """1: the maximum of 2 x 2 pixels halves the image after each group of blocks. 2: the first
    convolution of a group halves it instead, which is faster and coarser."""
    d_latent_pixel_selector: Annotated[int, where_above("num_latent_pixel_selector_layers", 1)] = (
        Field(default=16, ge=1)
    )
    """Width of the hidden layers that score a latent pixel."""
    num_latent_pixel_selector_layers: int = Field(default=2, ge=1, le=1000)
    """Linear layers that score a latent pixel; 1 has no hidden layer."""
    pretrained_embeddings_model: PretrainedModelParameters | None = None  # type: ignore[valid-type]
    """A pretrained model whose image embedding is another input of the body; null for none."""
    pretrained_embedding_channels: Annotated[int, where_given("pretrained_embeddings_model")] = (
        Field(default=16, ge=1)
    )
    """Channels to which that embedding is reduced before it is scaled to the image's size."""

    @field_validator("kernel_size")
    @classmethod
    def _is_odd(cls, size: int) -> int:
        if size % 2 == 0:
            raise ValueError(f"must be odd, for instance {size + 1}")
        return size


class ImageGrid(NamedTuple):
    """Sizes of an image, and of its grid of latent pixels: halved, rounding down, per group of
    blocks.
    """

    num_channels: int
    height: int
    width: int
    latent_height: int
    latent_width: int

    @classmethod
    def of(cls, image_shape: Sequence[int], num_block_groups: int) -> ImageGrid:
        """Return the sizes for images [K, H, W]."""
        channels, height, width = image_shape
        return cls(channels, height, width, height >> num_block_groups, width >> num_block_groups)

    @property
    def num_latent_pixels(self) -> int:
        """S, the number of symbols."""
        return self.latent_height * self.latent_width


class ImageBody(AgentBody):
    """A vector for each latent pixel, from the image and the messages.

    Messages point at latent pixels, so the history is a stack of small pictures. They are scaled to
    the image's size and laid over it, with the pretrained embedding if any; two layers read each
    pixel, and groups of convolutions halve the image.

    The representation has `latent_pixels` [B, S, D] and their mean, `image` [B, D].

    Parameters
    ----------
    num_block_groups : int
        Times that the image is halved.
    initial_num_channels : int
        Width of the first group; each further one has twice as many.
    embedding_channels : int or None
        Channels of the pretrained embedding, if any.
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
        # Each group has twice the channels of the one before.
        widths = [initial_num_channels << number for number in range(num_block_groups)]
        self.groups = nn.ModuleList()
        for channels_in, channels_out in pairwise([widths[0], *widths]):
            self.groups.append(_Group(agent, channels_in, channels_out))
        self.to_representation = nn.Conv2d(widths[-1], shape.d_representation, 1)

    def forward(self, observation: Observation) -> dict[str, Tensor]:
        # With channels last, convolutions of few channels take half the time on a CPU.
        pixels_BFHW = self._read(observation).contiguous(memory_format=torch.channels_last)
        pixels_BFHW = self.activation(self.pixel_layer(self.activation(pixels_BFHW)))
        for group in self.groups:
            pixels_BFHW = group(pixels_BFHW)
        latent_BSD = self.to_representation(pixels_BFHW).flatten(2).transpose(1, 2)
        return {LATENT: latent_BSD, IMAGE: latent_BSD.mean(1)}

    def _read(self, observation: Observation) -> Tensor:
        """Compute the first layer, [B, F, H, W], from image, messages and embedding.

        It reads each pixel alone, so each part is read at its own size and then scaled.
        """
        layer_BFHW: Tensor = self.read_image(observation["image"])
        grid = self.grid
        batch = len(layer_BFHW)
        history = self.history(observation).flatten(1, 3)
        last_message = self.last_message(observation).flatten(1, 2)
        messages_BMS = torch.cat([history, last_message], dim=1)
        # The symbols are the latent pixels, row by row.
        messages_BMhw = messages_BMS.view(batch, -1, grid.latent_height, grid.latent_width)
        layer_BFHW = layer_BFHW + self._to_image_size(self.read_messages(messages_BMhw))
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
        """Upsample pixels by repetition, or downsample by averaging."""
        size = (self.grid.height, self.grid.width)
        height, width = pixels_BFhw.shape[-2:]
        if height > self.grid.height or width > self.grid.width:
            return functional.adaptive_avg_pool2d(pixels_BFhw, size)
        return functional.interpolate(pixels_BFhw, size=size, mode="nearest")


class _Group(nn.Module):
    """Blocks of convolutions with half the height and width as output, rounded down."""

    def __init__(
        self, agent: ImageClassificationAgentParameters, channels_in: int, channels_out: int
    ) -> None:
        super().__init__()
        block: Any = _ResidualBlock if agent.building_block_type == "residual" else _ConvBlock
        self.pools = agent.stride == 1
        # The first block changes width and size.
        blocks = [block(agent, channels_in, channels_out, stride=agent.stride)]
        for _ in range(1, agent.num_blocks_per_group):
            blocks.append(block(agent, channels_out, channels_out, stride=1))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, pixels_BFHW: Tensor) -> Tensor:
        height = pixels_BFHW.shape[-2] // 2
        width = pixels_BFHW.shape[-1] // 2
        result_BFHW: Tensor = self.blocks(pixels_BFHW)
        if self.pools:
            return functional.max_pool2d(result_BFHW, 2)
        # A strided convolution rounds an odd size up.
        return result_BFHW[..., :height, :width]


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
        result_BFHW: Tensor = self.activation(self.convolution(pixels_BFHW))
        return result_BFHW


class _ResidualBlock(nn.Module):
    """Two convolutions, added to their input, which is projected if the shape changes."""

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
        result_BFHW: Tensor = self.activation(inner + self.shortcut(pixels_BFHW))
        return result_BFHW


def _convolution(
    agent: ImageClassificationAgentParameters, channels_in: int, channels_out: int, stride: int
) -> nn.Conv2d:
    size = agent.kernel_size
    return nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2)


class ImagePolicyHead(SummaryPolicyHead):
    """Scores each latent pixel together with the whole image, and decides from the image."""

    key = IMAGE
    names = ("select_latent_pixel", "decide", "select_linear")
    select_latent_pixel: nn.Sequential

    def __init__(
        self,
        agent: ImageClassificationAgentParameters,
        shape: AgentShape,
        impossible: ImpossibleSymbols | None = None,
    ) -> None:
        super().__init__(
            agent,
            shape,
            impossible,
            d_symbol=2 * shape.d_representation,
            d_selector=agent.d_latent_pixel_selector,
            num_selector_layers=agent.num_latent_pixel_selector_layers,
            d_summary=shape.d_representation,
        )

    def symbol_logits(self, representation: Representation, observation: Observation) -> Tensor:
        latent_BSD = representation[LATENT]
        image_BSD = representation[IMAGE].unsqueeze(1).expand_as(latent_BSD)
        pixel_and_image = torch.cat([latent_BSD, image_BSD], dim=-1)
        return self.by_place(self.select_latent_pixel(pixel_and_image))

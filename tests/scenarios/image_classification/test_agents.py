"""Bodies that read images and messages, and the outputs of agents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nip_astra.scenario_base.protocol.tensordict_agents import AgentShape
from nip_astra.scenarios.heads import SummarySoloHead, SummaryValueHead
from nip_astra.scenarios.images.agents import (
    ImageBody,
    ImageClassificationAgentParameters,
    ImageGrid,
    ImagePolicyHead,
)
from nip_astra.scenarios.images.pretrained import PcaModel, embedding_key
from tests.scenarios.networks import Frames, agent_shape, check_second_derivatives


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


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("block", ["conv", "residual"])
@pytest.mark.parametrize(("height", "width", "groups"), [(8, 8, 2), (9, 5, 1), (13, 10, 2)])
def test_each_group_halves_the_image_rounds_down_and_keeps_a_vector_per_latent_pixel(
    height: int, width: int, groups: int, block: str, stride: int
) -> None:
    grid = make_grid(height, width, groups=groups, channels=3)
    assert (grid.latent_height, grid.latent_width) == (height >> groups, width >> groups)
    blocks = {"building_block_type": block, "num_blocks_per_group": 2, "stride": stride}
    body, frames = body_and_frames(grid, num_block_groups=groups, **blocks)
    read = body(frames)
    assert read["latent_pixels"].shape == (5, (height >> groups) * (width >> groups), 16)
    torch.testing.assert_close(read["image"], read["latent_pixels"].mean(1))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_symbol_is_the_place_of_the_image_that_it_names(stride: int) -> None:
    options = {"kernel_size": 1, "stride": stride, "activation_function": "tanh"}
    body, frames = body_and_frames(num_frames=1, **options)
    before = body(frames)["latent_pixels"]
    row, column = 2, 1
    symbol = row * body.grid.latent_width + column
    for key, index in (
        ("image", (0, 0, 2 * row, 2 * column)),
        ("message", (0, 1, 0, symbol)),
        ("message_history", (0, 2, 0, 0, symbol)),
    ):
        changed = {name: value.clone() for name, value in frames.items()}
        changed[key][index] -= 3.0
        moved = (body(changed)["latent_pixels"] - before).abs().sum(-1)[0]
        assert moved.nonzero().flatten().tolist() == [symbol], key


def test_the_first_layer_reads_everything_laid_over_the_image() -> None:
    model = PcaModel.Parameters(num_components=2)
    grid, shape = make_grid(9, 7), {"message_size": 2, "num_linear": 3}
    embeddings = {"pretrained_embeddings_model": model, "pretrained_embedding_channels": 3}
    given: Any = body_and_frames(grid, shape=shape, embedding_channels=2, **embeddings)
    (body, frames), view = given, torch.rand(5, 2, 3, 2)
    frames[embedding_key(model)] = view
    size = (grid.height, grid.width)

    def laid_over(small: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(small, size=size, mode="nearest")

    sent = torch.cat([frames["message_history"].flatten(1, 3), frames["message"].flatten(1, 2)], 1)
    grids = sent.unflatten(-1, (grid.latent_height, grid.latent_width))
    linear = frames["linear_message_history"].flatten(1)[..., None, None]
    layers = [
        (frames["image"], body.read_image.weight),
        (laid_over(grids), body.read_messages.weight),
        (linear.expand(-1, -1, *size), body.read_linear_messages.weight[..., None, None]),
        (laid_over(torch.relu(body.reduce_embeddings(view))), body.read_embeddings.weight),
    ]
    stack, weight = (torch.cat(parts, dim=1) for parts in zip(*layers, strict=True))
    expected = functional.conv2d(stack, weight, body.read_image.bias)
    torch.testing.assert_close(body._read(frames), expected)


def test_a_view_larger_than_the_image_is_averaged() -> None:
    model = PcaModel.Parameters()
    body, frames = body_and_frames(embedding_channels=8, pretrained_embeddings_model=model)
    frames[embedding_key(model)] = torch.rand(5, 8, 16, 16)
    assert body(frames)["image"].isfinite().all()
    assert torch.equal(body._to_image_size(torch.ones(1, 1, 16, 16)), torch.ones(1, 1, 8, 8))


def test_messages_in_channels_that_an_agent_does_not_see_change_nothing() -> None:
    body, frames = body_and_frames(shape={"visible": (1,), "num_linear": 2})
    before = body(frames)["image"]
    for hidden, differs in ((0, False), (1, True)):
        changed = {name: value.clone() for name, value in frames.items()}
        for name in ("message_history", "linear_message_history"):
            changed[name][:, :, hidden] += 1.0
        changed["message"][:, hidden] += 1.0
        assert torch.equal(body(changed)["image"], before) is not differs


def test_frames_do_not_touch_each_other() -> None:
    body, frames = body_and_frames(building_block_type="residual")
    together = body(frames)["latent_pixels"]
    apart = [
        body({name: value[row : row + 1] for name, value in frames.items()})["latent_pixels"]
        for row in range(5)
    ]
    torch.testing.assert_close(torch.cat(apart), together)


@pytest.mark.parametrize("block", ["conv", "residual"])
def test_second_derivatives_are_those_of_finite_differences(block: str) -> None:
    options = {"building_block_type": block, "activation_function": "tanh"}
    body, frames = body_and_frames(make_grid(4, 4), shape={"num_linear": 2}, **options)
    check_second_derivatives(body, frames, "image", "latent_pixels")


def test_each_parameter_of_the_body_changes_it() -> None:
    usual, frames = body_and_frames()
    for changes in (
        *({"activation_function": name} for name in ("tanh", "gelu")),
        *({"building_block_type": "residual"}, {"num_blocks_per_group": 2}),
        *({"kernel_size": 5}, {"stride": 2}),
    ):
        body, _ = body_and_frames(**changes)
        assert not torch.allclose(body(frames)["image"], usual(frames)["image"]), changes


def test_every_weight_of_the_body_is_used() -> None:
    model = PcaModel.Parameters()
    options = {"building_block_type": "residual", "activation_function": "tanh"}
    body, frames = body_and_frames(
        make_grid(groups=2),
        shape={"num_linear": 2},
        num_block_groups=2,
        embedding_channels=8,
        pretrained_embeddings_model=model,
        **options,
    )
    frames[embedding_key(model)] = torch.rand(5, 8, 2, 2)
    body(frames)["latent_pixels"].square().sum().backward()
    unused = [name for name, weight in body.named_parameters() if not weight.grad.abs().sum() > 0]
    assert unused == []


GRID = make_grid()


def value_head(agent: Any, shape: AgentShape) -> SummaryValueHead:
    return SummaryValueHead(agent, shape, "image", shape.d_representation)


def solo_head(agent: Any, shape: AgentShape) -> SummarySoloHead:
    return SummarySoloHead(agent, "image", shape.d_representation)


def represent(shape: AgentShape) -> dict[str, torch.Tensor]:
    latent = torch.randn(5, 16, shape.d_representation, generator=torch.manual_seed(1))
    return {"latent_pixels": latent, "image": latent.mean(1)}


def make_head(shape: AgentShape, kind: Any = ImagePolicyHead, **agent: Any) -> Any:
    torch.manual_seed(0)
    return kind(ImageClassificationAgentParameters(**agent), shape)


def test_logits_of_every_visible_channel_and_position() -> None:
    shape = make_shape(GRID, visible=(1,), message_size=3, num_linear=4)
    output = make_head(shape)(represent(shape), make_frames(GRID, shape))
    assert [tuple(logits.shape) for logits in output] == [(5, 1, 3, 16), (5, 3), (5, 1, 3, 4)]


def test_the_logit_of_a_symbol_is_that_of_its_latent_pixel() -> None:
    shape = make_shape(GRID, message_size=2)
    head, frames = make_head(shape), make_frames(GRID, shape)
    read = represent(shape)
    before = head(read, frames).message_logits_BVPS
    changed = {**read, "latent_pixels": read["latent_pixels"].clone()}
    changed["latent_pixels"][:, 7] += 1.0
    moved = (head(changed, frames).message_logits_BVPS - before).abs()
    assert (moved[..., 7] > 0).all()
    assert moved[..., [*range(7), *range(8, 16)]].abs().max() == 0


@pytest.mark.parametrize("includes_round", [True, False])
def test_the_round_is_read_if_requested(includes_round: bool) -> None:
    shape = make_shape(GRID)
    frames, read = make_frames(GRID, shape), represent(shape)
    later = {**frames, "round": (frames["round"] + 1) % shape.num_rounds}
    policy = make_head(shape, include_round_in_decider=includes_round)
    value = make_head(shape, value_head, include_round_in_value=includes_round)
    decisions = [policy(read, item).decision_logits_B3 for item in (frames, later)]
    values = [value(read, item) for item in (frames, later)]
    assert values[0].shape == (5,)
    assert torch.equal(*decisions) is not includes_round
    assert torch.equal(*values) is not includes_round


@pytest.mark.parametrize(
    ("kind", "networks"),
    [
        (ImagePolicyHead, ("latent_pixel_selector", "decider", "linear_message_selector")),
        (value_head, ("value",)),
        (solo_head, ("decider",)),
    ],
)
def test_each_parameter_of_a_head_changes_its_shape(kind: Any, networks: tuple[str, ...]) -> None:
    shape = make_shape(GRID, num_linear=2)
    for name in networks:
        options: list[dict[str, Any]] = [{}, {f"d_{name}": 5}, {f"num_{name}_layers": 4}]
        heads = [make_head(shape, kind, **given) for given in options]
        shapes = [[weight.shape for weight in head.parameters()] for head in heads]
        assert all(shapes.count(item) == 1 for item in shapes), name


@pytest.mark.parametrize("include_round_in_decider", [True, False])
def test_decisions_may_start_from_the_solo_head(include_round_in_decider: bool) -> None:
    shape = make_shape(GRID)
    head = make_head(shape, include_round_in_decider=include_round_in_decider)
    solo = make_head(shape, solo_head)
    read, frames = represent(shape), make_frames(GRID, shape)
    head.decide_as(solo)
    decision_logits = head(read, frames).decision_logits_B3
    torch.testing.assert_close(decision_logits[:, :2], solo(read, frames))
    assert (decision_logits[:, 2] == 0).all()

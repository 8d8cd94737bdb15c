"""Bodies that read images and messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from nip_astra.scenarios.images.pretrained import PcaModel, embedding_key
from tests.scenarios.image_classification.frames import body_and_frames, make_grid
from tests.scenarios.networks import check_second_derivatives


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


@pytest.mark.parametrize(
    "agent",
    [
        *({"activation_function": name} for name in ("tanh", "gelu")),
        *({"building_block_type": "residual"}, {"num_blocks_per_group": 2}),
        *({"kernel_size": 5}, {"stride": 2}),
    ],
)
def test_each_parameter_of_the_body_changes_it(agent: dict[str, Any]) -> None:
    (usual, frames), (body, _) = body_and_frames(), body_and_frames(**agent)
    assert not torch.allclose(body(frames)["image"], usual(frames)["image"])


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

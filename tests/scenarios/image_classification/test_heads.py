"""Outputs of agents for an image that a body has read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nip_astra.scenario_base.protocol.tensordict_agents import MASKED, AgentShape
from nip_astra.scenarios.heads import SummarySoloHead, SummaryValueHead
from nip_astra.scenarios.images.agents import ImageClassificationAgentParameters, ImagePolicyHead
from tests.scenarios.image_classification.frames import make_frames, make_grid, make_shape

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


def test_impossible_symbols_are_masked() -> None:
    shape = make_shape(GRID)
    forbidden = torch.arange(16) == 3
    head = ImagePolicyHead(ImageClassificationAgentParameters(), shape, lambda *_: forbidden)
    logits = head(represent(shape), make_frames(GRID, shape)).message_logits_BVPS
    assert (logits[..., 3] == MASKED).all()
    assert (logits[..., :3] > MASKED).all()


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
    ("kind", "agent"),
    [
        (ImagePolicyHead, {"d_latent_pixel_selector": 5}),
        (ImagePolicyHead, {"num_latent_pixel_selector_layers": 1}),
        (ImagePolicyHead, {"d_decider": 5}),
        (ImagePolicyHead, {"num_decider_layers": 3}),
        (ImagePolicyHead, {"d_linear_message_selector": 5}),
        (ImagePolicyHead, {"num_linear_message_selector_layers": 3}),
        (value_head, {"d_value": 5}),
        (value_head, {"num_value_layers": 1}),
        (solo_head, {"d_decider": 5}),
        (solo_head, {"num_decider_layers": 1}),
    ],
)
def test_each_parameter_of_a_head_changes_its_shape(kind: Any, agent: dict[str, Any]) -> None:
    shape = make_shape(GRID, num_linear=2)

    def shapes(**given: Any) -> list[torch.Size]:
        return [weight.shape for weight in make_head(shape, kind, **given).parameters()]

    assert shapes(**agent) != shapes()


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

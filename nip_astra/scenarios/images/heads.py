"""What agents do with an image that a body has read.

Shapes: B frames, S latent pixels, D width of the representation, V channels that the agent sees,
P positions of a message, L linear symbols, R rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentPolicyHead,
    AgentShape,
    AgentValueHead,
    ImpossibleSymbols,
    Observation,
    PolicyOutput,
    Representation,
    SoloAgentHead,
    mlp,
    round_one_hot,
    start_from,
)
from nip_astra.scenarios.images.parameters import ImageClassificationAgentParameters


class ImagePolicyHead(AgentPolicyHead):
    """Chooses latent pixels by what is there and by the whole image, and decides by the image."""

    def __init__(
        self,
        agent: ImageClassificationAgentParameters,
        shape: AgentShape,
        impossible: ImpossibleSymbols | None = None,
    ) -> None:
        super().__init__(shape, impossible)
        width, activation = shape.d_representation, agent.activation_function
        num_symbols_sent = shape.num_visible * shape.message_space.message_size
        self.select_latent_pixel = mlp(
            2 * width,
            agent.d_latent_pixel_selector,
            agent.num_latent_pixel_selector_layers,
            num_symbols_sent,
            activation,
        )
        self.decide: nn.Sequential | None = None
        self.select_linear: nn.Sequential | None = None
        self.includes_round = agent.include_round_in_decider
        if shape.has_decision:
            rounds = shape.num_rounds if self.includes_round else 0
            self.decide = mlp(
                width + rounds, agent.d_decider, agent.num_decider_layers, 3, activation
            )
        if shape.message_space.num_linear_symbols:
            self.select_linear = mlp(
                width,
                agent.d_linear_message_selector,
                agent.num_linear_message_selector_layers,
                num_symbols_sent * shape.message_space.num_linear_symbols,
                activation,
            )

    def decide_as(self, solo_head: SoloAgentHead) -> None:
        if self.decide is not None and isinstance(solo_head, ImageSoloHead):
            start_from(self.decide, solo_head.network)

    def logits(self, representation: Representation, observation: Observation) -> PolicyOutput:
        latent_BSD, image_BD = representation["latent_pixels"], representation["image"]
        place = (len(image_BD), self.shape.num_visible, self.shape.message_space.message_size)
        around_BSD = image_BD.unsqueeze(1).expand_as(latent_BSD)
        chosen = self.select_latent_pixel(torch.cat([latent_BSD, around_BSD], dim=-1))
        decision_logits_B3 = linear_logits_BVPL = None
        if self.decide is not None:
            decision_logits_B3 = self.decide(
                _with_round(image_BD, observation, self.shape, self.includes_round)
            )
        if self.select_linear is not None:
            linear_logits_BVPL = self.select_linear(image_BD).view(*place, -1)
        return PolicyOutput(
            chosen.transpose(1, 2).reshape(*place, -1), decision_logits_B3, linear_logits_BVPL
        )


class ImageValueHead(AgentValueHead):
    """Values a frame by the whole image and what was said."""

    def __init__(self, agent: ImageClassificationAgentParameters, shape: AgentShape) -> None:
        super().__init__()
        self.shape = shape
        self.includes_round = agent.include_round_in_value
        rounds = shape.num_rounds if self.includes_round else 0
        self.network = mlp(
            shape.d_representation + rounds,
            agent.d_value,
            agent.num_value_layers,
            1,
            agent.activation_function,
        )

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        read = _with_round(representation["image"], observation, self.shape, self.includes_round)
        values_B: Tensor = self.network(read).squeeze(-1)
        return values_B


class ImageSoloHead(SoloAgentHead):
    """Says the label by the whole image."""

    def __init__(self, agent: ImageClassificationAgentParameters, shape: AgentShape) -> None:
        super().__init__()
        self.network = mlp(
            shape.d_representation,
            agent.d_decider,
            agent.num_decider_layers,
            2,
            agent.activation_function,
        )

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        logits_B2: Tensor = self.network(representation["image"])
        return logits_B2


def _with_round(
    image_BD: Tensor, observation: Observation, shape: AgentShape, includes_round: bool
) -> Tensor:
    if not includes_round:
        return image_BD
    return torch.cat([image_BD, round_one_hot(observation, shape)], dim=-1)

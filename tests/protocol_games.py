"""A game of provers and verifiers with networks of a few weights, built without the factory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.scenario_base.message_space import AgentShape
from nip_astra.scenario_base.tensordict_agents import (
    AgentBody,
    AgentPolicyHead,
    AgentValueHead,
    Observation,
    PolicyOutput,
    Representation,
    SoloAgentHead,
    mlp,
)
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scenarios.tensordict_base import Datasets, TensorDictScenario

NUM_SYMBOLS = 4


class VectorBody(AgentBody):
    """Reads the history, and the hidden features unless the agent is a verifier."""

    def __init__(self, shape: AgentShape, num_features: int) -> None:
        super().__init__(shape)
        num_inputs = num_features + self.history_mean.numel() + self.linear_mean.numel()
        self.net = mlp(num_inputs, 16, 2, shape.d_representation, "tanh")

    def forward(self, observation: Observation) -> dict[str, Tensor]:
        features = observation["features"] * float(not self.shape.is_verifier)
        parts = [features, self.history(observation).flatten(1)]
        if self.shape.message_space.num_linear_symbols:
            parts.append(self.linear_history(observation).flatten(1))
        return {"vector": torch.tanh(self.net(torch.cat(parts, dim=1)))}


class VectorPolicyHead(AgentPolicyHead):
    """Linear in the vector."""

    def __init__(self, shape: AgentShape, impossible: Any = None) -> None:
        super().__init__(shape, impossible)
        space = shape.message_space
        self.place = (shape.num_visible, space.message_size)
        count = shape.num_visible * space.message_size
        self.message = nn.Linear(shape.d_representation, count * space.num_symbols)
        symbols = count * space.num_linear_symbols
        self.linear = nn.Linear(shape.d_representation, symbols) if symbols else None
        self.decision = nn.Linear(shape.d_representation, 3)

    def logits(self, representation: Representation, observation: Observation) -> PolicyOutput:
        vector, space = representation["vector"], self.shape.message_space
        linear = self.linear and self.linear(vector).view(-1, *self.place, space.num_linear_symbols)
        return PolicyOutput(
            self.message(vector).view(-1, *self.place, space.num_symbols),
            self.decision(vector) if self.shape.has_decision else None,
            linear,
        )


class VectorValueHead(AgentValueHead):
    """Linear in the vector."""

    def __init__(self, shape: AgentShape) -> None:
        super().__init__()
        self.value = nn.Linear(shape.d_representation, 1)

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        return self.value(representation["vector"]).squeeze(-1)


class VectorSoloHead(SoloAgentHead):
    """Linear in the vector."""

    def __init__(self, shape: AgentShape) -> None:
        super().__init__()
        self.label = nn.Linear(shape.d_representation, 2)

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        return self.label(representation["vector"])


class HiddenLabel(TensorDictScenario):
    """The first feature of a datapoint is its label, which verifiers do not see."""

    kind = "hidden_label"

    class Parameters(TensorDictScenario.Parameters):
        """How many datapoints there are."""

        num_datapoints: int = 64
        """Half of them have the label 1."""

    @classmethod
    def build_datasets(cls, parameters: Any, *, seed: int, scenario_dir: Path | None) -> Datasets:
        y = torch.arange(parameters.num_datapoints)[:, None] % 2
        features = torch.cat([2.0 * y - 1.0, y.new_zeros(len(y), 2).float()], dim=1)
        dataset = TensorDict({"y": y, "features": features}, batch_size=[len(y)])
        return Datasets(dataset, dataset.clone())

    @classmethod
    def num_symbols(cls, parameters: Any, dataset: TensorDict) -> int:
        return NUM_SYMBOLS

    @classmethod
    def build_body(
        cls, parameters: Any, agent: Any, shape: AgentShape, dataset: TensorDict
    ) -> AgentBody:
        return VectorBody(shape, dataset["features"].shape[1])

    @classmethod
    def build_policy_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentPolicyHead:
        return VectorPolicyHead(shape, cls.impossible_symbols)

    @classmethod
    def build_value_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentValueHead:
        return VectorValueHead(shape)

    @classmethod
    def build_solo_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> SoloAgentHead:
        return VectorSoloHead(shape)

    @classmethod
    def impossible_symbols(cls, observation: Observation, shape: AgentShape) -> Tensor | None:
        """Nobody sends the last symbol."""
        return torch.arange(shape.message_space.num_symbols) == NUM_SYMBOLS - 1


def hidden_label_parameters(
    protocol: str = "nip", scenario: dict[str, Any] | None = None, **groups: Any
) -> HyperParameters:
    """Give hyper-parameters with all sections; `groups` are plain values by group."""
    sections = {
        "hidden_label": HiddenLabel.Parameters,
        protocol: PROTOCOL_HANDLERS.get(protocol).Parameters,
    }
    values = {
        "trainer": "none",
        "scenario": "hidden_label",
        "interaction_protocol": protocol,
        "hidden_label": {"agents": {"default": {}}, "d_representation": 8} | (scenario or {}),
        "rl": {"frames_per_batch": 64, "steps_per_env_per_iteration": 4},
    }
    return HyperParameters.with_sections(sections).from_dict(values | groups)


def build_game(
    protocol: str = "nip",
    scenario: dict[str, Any] | None = None,
    *,
    trainer_type: str = "rl",
    **groups: Any,
) -> ScenarioInstance:
    """Build the game: 16 environments of 4 steps unless `groups` say otherwise."""
    hyper_params = hidden_label_parameters(protocol, scenario, **groups)
    return HiddenLabel.build(
        hyper_params,
        hyper_params.hidden_label,  # type: ignore[attr-defined]
        ExperimentSettings(),
        scenario_dir=None,
        trainer_type=trainer_type,
    )


__all__ = ["HiddenLabel", "build_game", "hidden_label_parameters"]

"""A game of provers and verifiers built by hand, without a trainer or a registered kind."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.scenario_base.protocol.tensordict_agents import AgentShape, Observation
from nip_astra.scenario_instance import ScenarioInstance
from tests.kit.toy_protocol_scenario import KIND, ToyProtocolScenario

NUM_SYMBOLS = 4


class GameOfSymbols(ToyProtocolScenario):
    """The toy scenario with four symbols, of which no agent sends the last."""

    @classmethod
    def num_symbols(cls, parameters: Any, dataset: TensorDict) -> int:
        return NUM_SYMBOLS

    @classmethod
    def impossible_symbols(cls, observation: Observation, shape: AgentShape) -> Tensor | None:
        return torch.arange(shape.message_space.num_symbols) == NUM_SYMBOLS - 1


def build_game(
    protocol: str = "nip", scenario: dict[str, Any] | None = None, **groups: Any
) -> ScenarioInstance:
    """Build the game: 16 environments of 4 steps unless `groups`, plain values, override this."""
    handler = PROTOCOL_HANDLERS.get(protocol)
    sections = {KIND: GameOfSymbols.Parameters, protocol: handler.Parameters}
    values = {
        "trainer": "none",
        "scenario": KIND,
        "interaction_protocol": protocol,
        KIND: {"agents": {"default": {}}, "num_datapoints": 64} | (scenario or {}),
        "rl": {"frames_per_batch": 64, "steps_per_env_per_iteration": 4},
    }
    hyper_params = HyperParameters.with_sections(sections).from_dict(values | groups)
    return GameOfSymbols.build(
        hyper_params,
        getattr(hyper_params, KIND),
        ExperimentSettings(),
        scenario_dir=None,
        trainer_type="rl",
    )

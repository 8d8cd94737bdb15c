"""A scenario whose prover sees a vector that reveals the label, and whose verifier sees nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from tensordict import TensorDict
from torch import Tensor, nn

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.factory import build_scenario_instance
from nip_astra.parameters.agents import AgentParameters
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentBody,
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
)
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.scenarios.tensordict_base import Datasets, TensorDictScenario
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer

KIND = "toy_protocol"


class ToyAgentParameters(AgentParameters):
    """Width of the networks."""

    d_hidden: int = 16


class ToyBody(AgentBody):
    def __init__(self, agent: Any, shape: AgentShape, dataset: TensorDict) -> None:
        super().__init__(shape)
        space, places = shape.message_space, shape.num_rounds * shape.num_visible
        d_in = places * space.message_size * (space.num_symbols + space.num_linear_symbols)
        self.sees_vector = not shape.is_verifier
        d_in += shape.num_rounds + (dataset["vector"].shape[-1] if self.sees_vector else 0)
        self.net = mlp(d_in, agent.d_hidden, 2, shape.d_representation, "tanh")
        self.num_calls = 0

    def forward(self, observation: Observation) -> dict[str, Tensor]:
        self.num_calls += 1
        parts = [self.history(observation).flatten(1)]
        parts.append(round_one_hot(observation, self.shape).to(parts[0].dtype))
        if self.shape.message_space.num_linear_symbols:
            parts.append(self.linear_history(observation).flatten(1))
        if self.sees_vector:
            parts.append(observation["vector"])
        return {"representation": torch.tanh(self.net(torch.cat(parts, dim=-1)))}


class ToyPolicyHead(AgentPolicyHead):
    def __init__(self, shape: AgentShape, impossible: ImpossibleSymbols | None = None) -> None:
        super().__init__(shape, impossible)
        space, d_in = shape.message_space, shape.d_representation
        self.place = (shape.num_visible, space.message_size)
        places = shape.num_visible * space.message_size
        self.message = nn.Linear(d_in, places * space.num_symbols)
        self.linear = None
        if space.num_linear_symbols:
            self.linear = nn.Linear(d_in, places * space.num_linear_symbols)
        self.decision = nn.Linear(d_in, 3) if shape.has_decision else None

    def logits(self, representation: Representation, observation: Observation) -> PolicyOutput:
        read = representation["representation"]
        return PolicyOutput(
            self.message(read).unflatten(-1, (*self.place, -1)),
            self.decision(read) if self.decision is not None else None,
            self.linear(read).unflatten(-1, (*self.place, -1)) if self.linear is not None else None,
        )


class ToyValueHead(AgentValueHead):
    def __init__(self, shape: AgentShape) -> None:
        super().__init__()
        self.value = nn.Linear(shape.d_representation, 1)

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        return self.value(representation["representation"]).squeeze(-1)


class ToySoloHead(SoloAgentHead):
    def __init__(self, shape: AgentShape) -> None:
        super().__init__()
        self.label = nn.Linear(shape.d_representation, 2)

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        return self.label(representation["representation"])


class ToyProtocolScenario(TensorDictScenario):
    """A vector whose first number is positive where the label is 1."""

    kind = KIND

    class Parameters(TensorDictScenario.Parameters):
        """Numbers of datapoints and of the words of a message."""

        agents: Mapping[str, ToyAgentParameters] = {"default": ToyAgentParameters()}
        num_datapoints: int = 32
        num_symbols: int = 2

    @classmethod
    def build_datasets(cls, parameters: Any, *, seed: int, scenario_dir: Path | None) -> Datasets:
        def make(offset: int) -> TensorDict:
            generator = torch.Generator().manual_seed(seed + offset)
            count = parameters.num_datapoints
            y = torch.arange(count).remainder(2)
            vector = torch.randn(count, 3, generator=generator)
            vector[:, 0] = (2 * y - 1) * (0.5 + vector[:, 0].abs())
            content = {"y": y[:, None], "vector": vector, "wl_score": y + 1}
            return TensorDict(content, batch_size=[count])

        return Datasets(make(0), make(1))

    @classmethod
    def num_symbols(cls, parameters: Any, dataset: TensorDict) -> int:
        return int(parameters.num_symbols)

    @classmethod
    def build_body(
        cls, parameters: Any, agent: Any, shape: AgentShape, dataset: TensorDict
    ) -> AgentBody:
        return ToyBody(agent, shape, dataset)

    @classmethod
    def build_policy_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentPolicyHead:
        return ToyPolicyHead(shape, cls.impossible_symbols)

    @classmethod
    def build_value_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentValueHead:
        return ToyValueHead(shape)

    @classmethod
    def build_solo_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> SoloAgentHead:
        return ToySoloHead(shape)


@contextmanager
def toy_kind() -> Iterator[None]:
    """Register the kind within the block."""
    SCENARIOS.register(KIND)(ToyProtocolScenario)
    try:
        yield
    finally:
        SCENARIOS.forget(KIND)


PLUGIN = """
from nip_astra.scenarios.registry import SCENARIOS
from tests.kit.toy_protocol_scenario import KIND, ToyProtocolScenario

if KIND not in SCENARIOS.names():
    SCENARIOS.register(KIND)(ToyProtocolScenario)
"""

SMALL = {
    "interaction_protocol": "nip",
    KIND: {"agents": {"default": {}}},
    "nip": {"max_message_rounds": 3},
    "protocol_common": {"shared_reward": True, "verifier_first": False},
    "rl": {
        "num_iterations": 3,
        "num_test_iterations": 1,
        "frames_per_batch": 96,
        "minibatch_size": 40,
        "num_epochs": 2,
        "lr": 0.01,
    },
}
"""A game of the prover's word, the verifier's turn, and again the prover's, in milliseconds."""


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` on top of `base`, group by group."""
    found = dict(base)
    for name, value in more.items():
        below = found.get(name)
        is_group = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[name] = merged(below, value) if is_group else value
    return found


def toy_scenario_folder(folder: Path) -> Path:
    """Write a scenario folder of the kind, with a plug-in that registers it."""
    folder.mkdir(parents=True)
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "scenario.yaml").write_text(yaml.safe_dump({"kind": KIND}))
    return folder


def toy_hyper_params(
    trainer: str = "vanilla_ppo", trainer_class: type[Trainer] | None = None, **more: Any
) -> HyperParameters:
    """Complete hyper-parameters of a small game; `more` goes on top."""
    trainer_class = trainer_class or TRAINERS.get(trainer)
    values = merged(SMALL, more) | {"trainer": trainer, "scenario": KIND}
    protocol = values["interaction_protocol"]
    sections = {
        trainer: trainer_class.Parameters,
        "solo_agent": TRAINERS.get("solo_agent").Parameters,
        KIND: ToyProtocolScenario.Parameters,
        protocol: PROTOCOL_HANDLERS.get(protocol).Parameters,
    }
    if protocol != "nip" and "nip" not in more:
        values.pop("nip")
    return HyperParameters.with_sections(sections).from_dict(values)


def toy_trainer(
    trainer: str = "vanilla_ppo",
    *,
    settings: ExperimentSettings | None = None,
    trainer_class: type[Trainer] | None = None,
    **more: Any,
) -> Trainer:
    """Build a trainer on the toy game; the kind must be registered."""
    cls = trainer_class or TRAINERS.get(trainer)
    hyper_params = toy_hyper_params(trainer, cls, **more)
    settings = settings or ExperimentSettings(progress=False)
    instance = build_scenario_instance(
        hyper_params, ExperimentSettings(), kind=KIND, trainer_type=cls.trainer_type
    )
    return cls(hyper_params, instance, settings)

"""The base of scenarios whose agents are networks that follow an interaction protocol."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from nip_astra.errors import AgentShapeError, ConfigurationError, DataError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.agents import DEFAULT_AGENT, AgentParameters, RandomAgentParameters
from nip_astra.parameters.conditions import where
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters, explicit_values
from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.protocols.registry import build_protocol_handler
from nip_astra.scenario_base.protocol.combined import CombinedAgents
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.tensordict_agents import (
    CENTRAL_CRITIC,
    Agent,
    AgentBody,
    AgentPolicyHead,
    AgentShape,
    AgentValueHead,
    LabelledValueHead,
    MessageSpace,
    Observation,
    PolicyOutput,
    RandomPolicyHead,
    Representation,
    SoloAgentHead,
    initialise_orthogonally,
)
from nip_astra.scenario_instance import ProtocolInstance
from nip_astra.scenarios.registry import Scenario, parameters_of_agents
from nip_astra.utils.devices import resolve_device
from nip_astra.utils.seeding import derive_seed


class Datasets(NamedTuple):
    """Training and test datapoints.

    Batch size [N], with `y` [N, 1] long, 0 or 1, and the agents' observations.
    """

    train: TensorDict
    test: TensorDict


class TensorDictScenario(Scenario):
    """Agents that are networks follow a protocol about a datapoint with a label.

    A kind provides the datasets, the symbols of messages, and the parts of agents.
    """

    uses_protocol: ClassVar[bool] = True
    parameter_groups: ClassVar[tuple[str, ...]] = (
        "protocol_common",
        "zk_protocol",
        "rl.frames_per_batch",
        "rl.rollouts_per_iteration",
        "rl.steps_per_env_per_iteration",
        "rl.use_shared_body",
        "rl.pretrain_agents",
    )
    kind: ClassVar[str]
    """The registered name of the kind."""

    class Parameters(SubParameters):
        """Agents, messages and representations; a kind adds its own."""

        agents: Mapping[str, AgentParameters] = {}
        """Agents by name; those of `default` apply to all others."""
        message_size: int = Field(default=1, ge=1, le=1_000_000)
        """Number of symbols of a message."""
        include_linear_message_space: bool = False
        """Whether messages also have linear symbols, which have no meaning in the scenario."""
        d_linear_message_space: Annotated[int, where("include_linear_message_space", True)] = Field(
            default=2, ge=2, le=1_000_000
        )
        """Number of linear symbols. Larger carries more information."""
        d_representation: int = Field(default=16, ge=1, le=1_000_000)
        """Width of the input of heads."""

        @model_validator(mode="before")
        @classmethod
        def _fill_in_defaults(cls, values: Any) -> Any:
            agents = values.get("agents") if isinstance(values, Mapping) else None
            if not isinstance(agents, Mapping):
                return values
            filled = {}
            for name, agent in agents.items():
                is_random = isinstance(agent, RandomAgentParameters)
                filled[name] = explicit_values(agent) if is_random else agent
            default = filled.get(DEFAULT_AGENT)
            if isinstance(default, Mapping):
                for name, agent in filled.items():
                    if isinstance(agent, Mapping):
                        filled[name] = _merge(default, agent)
            return {**values, "agents": filled}

    @classmethod
    @abstractmethod
    def build_datasets(cls, parameters: Any, *, seed: int, scenario_dir: Path | None) -> Datasets:
        """Generate or read the datapoints."""

    @classmethod
    @abstractmethod
    def num_symbols(cls, parameters: Any, dataset: TensorDict) -> int:
        """Return S, the number of symbols."""

    @classmethod
    @abstractmethod
    def build_body(
        cls, parameters: Any, agent: Any, shape: AgentShape, dataset: TensorDict
    ) -> AgentBody:
        """Build a body from the kind's and the agent's parameters.

        Parameters
        ----------
        dataset : TensorDict
            The training set, for the shapes of observations.
        """

    @classmethod
    @abstractmethod
    def build_policy_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentPolicyHead:
        """Build a policy head, which needs `impossible_symbols`."""

    @classmethod
    @abstractmethod
    def build_value_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentValueHead:
        """Build a value head."""

    @classmethod
    @abstractmethod
    def build_solo_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> SoloAgentHead:
        """Build a head that predicts the label without a conversation."""

    @classmethod
    def describe_datapoint(cls, parameters: Any, row: TensorDictBase) -> dict[str, Any]:
        """Return a datapoint's description for reports, as plain values for a JSON file.

        Parameters
        ----------
        row : TensorDictBase
            Batch size []: one row of a dataset, and its index, `datapoint_id`.
        """
        return {"id": int(row["datapoint_id"])}

    @classmethod
    def layers_on(cls, device: torch.device) -> str:
        """Return the implementation of layers on a device."""
        return "torch"

    @classmethod
    def impossible_symbols(cls, observation: Observation, shape: AgentShape) -> Tensor | None:
        """Return symbols that an agent cannot send, bool, broadcasting to [B, V, P, S]."""
        return None

    @classmethod
    def build(
        cls,
        hyper_params: HyperParameters,
        parameters: Any,
        settings: ExperimentSettings,
        *,
        scenario_dir: Path | None,
        trainer_type: str,
    ) -> ProtocolInstance:
        _check_is_complete(cls)
        device = resolve_device(settings.device)
        protocol = build_protocol_handler(hyper_params)
        datasets = cls.build_datasets(parameters, seed=hyper_params.seed, scenario_dir=scenario_dir)
        for split, dataset in zip(Datasets._fields, datasets, strict=True):
            _check_dataset(dataset, split)
        datasets = Datasets(datasets.train.to(device), datasets.test.to(device))
        num_linear_symbols = 0
        if parameters.include_linear_message_space:
            num_linear_symbols = parameters.d_linear_message_space
        num_symbols = cls.num_symbols(parameters, datasets.train)
        space = MessageSpace(num_symbols, parameters.message_size, num_linear_symbols)
        agents = cls.build_agents(hyper_params, parameters, protocol, space, datasets, trainer_type)
        # A trainer changes the mode for training.
        combined = CombinedAgents(agents, protocol, space).to(device).eval()
        rl = hyper_params.rl
        num_environments = 1
        # A solo agent plays no episodes.
        if trainer_type != "solo_agent":
            steps = rl.steps_per_env_per_iteration or protocol.max_message_rounds
            num_environments = rl.rollouts_per_iteration or _num_environments(
                rl.frames_per_batch, steps
            )

        def environment(split: str, dataset: TensorDict) -> ProtocolEnvironment:
            return ProtocolEnvironment(
                protocol,
                dataset,
                space,
                num_environments=num_environments,
                key=(hyper_params.seed, split),
            )

        train_environment = environment("train", datasets.train)
        check_agents(agents, train_environment)
        return ProtocolInstance(
            kind=cls.kind,
            agents=agents,
            train_dataset=datasets.train,
            test_dataset=datasets.test,
            protocol_handler=protocol,
            combined_agents=combined,
            train_environment=train_environment,
            test_environment=environment("test", datasets.test),
            scenario_dir=scenario_dir,
            describe_datapoint=partial(cls.describe_datapoint, parameters),
            layers=cls.layers_on(device),
        )

    @classmethod
    def build_agents(
        cls,
        hyper_params: HyperParameters,
        parameters: Any,
        protocol: ProtocolHandler,
        space: MessageSpace,
        datasets: Datasets,
        trainer_type: str,
    ) -> dict[str, Agent]:
        """Build all agents of the protocol with the parts that the trainer needs."""
        agents = {}
        for name, agent_parameters in parameters_of_agents(parameters, protocol).items():
            shape = AgentShape(
                name=name,
                is_verifier=name not in protocol.prover_names,
                has_decision=protocol.has_decision_logits(name),
                num_rounds=protocol.max_message_rounds,
                num_channels=protocol.num_channels,
                visible_channels=tuple(protocol.visible_channels(name)),
                message_space=space,
                d_representation=parameters.d_representation,
            )
            # Each agent has a seed of its own, so that another agent's parameters do not change its
            # initial weights.
            with torch.random.fork_rng():
                torch.manual_seed(derive_seed(hyper_params.seed, "agent", name))
                agents[name] = cls._build_agent(
                    hyper_params, parameters, agent_parameters, shape, datasets.train, trainer_type
                )
        return agents

    @classmethod
    def _build_agent(
        cls,
        hyper_params: HyperParameters,
        parameters: Any,
        agent: AgentParameters,
        shape: AgentShape,
        dataset: TensorDict,
        trainer_type: str,
    ) -> Agent:
        if agent.is_random:
            head = RandomPolicyHead(shape, cls.impossible_symbols)
            return Agent(shape.name, agent, shape, policy_head=head)
        is_solo = trainer_type == "solo_agent"
        has_central_critic = trainer_type == CENTRAL_CRITIC
        body = cls.build_body(parameters, agent, shape, dataset)
        value_body: AgentBody | None = None
        value_head: AgentValueHead | None = None
        if not is_solo:
            critic_shape = shape
            if has_central_critic:
                # It sees every channel, and has a value for each label.
                all_channels = tuple(range(shape.num_channels))
                critic_shape = replace(shape, visible_channels=all_channels)
            value_body = body
            if not hyper_params.rl.use_shared_body:
                value_body = cls.build_body(parameters, agent, critic_shape, dataset)
            build_value_head = partial(cls.build_value_head, parameters, agent, critic_shape)
            if has_central_critic:
                value_head = LabelledValueHead(build_value_head)
            else:
                value_head = build_value_head()
        # In this order: each part draws its weights from the agent's generator.
        policy_head: AgentPolicyHead | None = None
        if not is_solo:
            policy_head = cls.build_policy_head(parameters, agent, shape)
        solo_head: SoloAgentHead | None = None
        if is_solo or hyper_params.rl.pretrain_agents:
            solo_head = cls.build_solo_head(parameters, agent, shape)
        built = Agent(
            shape.name,
            agent,
            shape,
            policy_body=body,
            value_body=value_body,
            policy_head=policy_head,
            value_head=value_head,
            solo_head=solo_head,
        )
        if agent.use_orthogonal_initialisation:
            initialise_orthogonally(built, agent.orthogonal_initialisation_gain)
        for body in built.bodies:
            body.after_initialisation()
        return built


def _check_is_complete(scenario_class: type[TensorDictScenario]) -> None:
    """Raise for a class with missing hooks: it is never instantiated, so Python does not check."""
    missing = sorted(scenario_class.__abstractmethods__)
    if not hasattr(scenario_class, "kind"):
        missing.append("kind")
    if missing:
        raise ConfigurationError(
            f"the scenario class {scenario_class.__name__} lacks {', '.join(missing)}. Define them."
        )


def _merge(default: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `values` into `default`, group by group; a group of another `_type` replaces."""
    merged = dict(default)
    for name, value in values.items():
        default_value = merged.get(name)
        merged[name] = value
        if isinstance(value, Mapping) and isinstance(default_value, Mapping):
            default_type = default_value.get("_type")
            if value.get("_type", default_type) == default_type:
                merged[name] = _merge(default_value, value)
    return merged


def _num_environments(frames_per_batch: int, steps: int) -> int:
    num_environments = frames_per_batch // steps
    if num_environments * steps != frames_per_batch:
        valid_frames = max(num_environments, 1) * steps
        raise ConfigurationError(
            f"rl.frames_per_batch={frames_per_batch} is not a multiple of the {steps} rounds of an "
            f"environment per iteration. Set it to {valid_frames}, or set "
            "rl.steps_per_env_per_iteration."
        )
    return num_environments


def _check_dataset(dataset: TensorDict, split: str) -> None:
    if len(dataset) == 0:
        raise DataError(f"the {split} dataset is empty. Give it at least one datapoint.")
    labels = dataset["y"]
    is_label = (labels == 0) | (labels == 1)
    if labels.shape != (len(dataset), 1) or not bool(is_label.all()):
        raise DataError(
            f"the labels `y` of the {split} dataset must be 0 or 1, of shape [{len(dataset)}, 1]; "
            f"got shape {list(labels.shape)}. Give two classes."
        )


# ---- a check that networks return tensors of the shapes that a protocol needs


NUM_FRAMES = 5
"""Batch size of the check; unlike other dimensions, so that swapped ones are noticed."""


@torch.no_grad()
def check_agents(agents: Mapping[str, Agent], environment: ProtocolEnvironment) -> None:
    """Run every agent, in evaluation mode, on a few first frames, and check its outputs' shapes.

    Agents, environment and generators are unchanged.

    Raises
    ------
    AgentShapeError
        Names the agent, its part, and the expected and actual shape.
    """
    rows = torch.arange(NUM_FRAMES) % len(environment.dataset)
    frames = environment.first_frames(rows.to(environment.device))
    for agent in agents.values():
        with torch.random.fork_rng(devices=[]):
            _check_parts(agent, frames)


def _check_parts(agent: Agent, frames: Observation) -> None:
    representation = _read(agent, agent.policy_body, frames)
    if agent.policy_head is not None:
        policy = _Part(agent, "policy head", agent.policy_head)
        space = agent.shape.message_space
        output = policy.run(agent.policy_head.logits, representation, frames)
        if not isinstance(output, PolicyOutput):
            raise policy.shape_error(_describe(output), "a PolicyOutput")
        # Visible channels and message positions, V and P.
        message_shape = [agent.shape.num_visible, space.message_size]
        num_linear = space.num_linear_symbols
        expected_shapes: dict[str, list[int] | None] = {
            "message_logits_BVPS": [*message_shape, space.num_symbols],
            "linear_logits_BVPL": [*message_shape, num_linear] if num_linear else None,
        }
        if agent.shape.has_decision or output.decision_logits_B3 is not None:
            expected_shapes["decision_logits_B3"] = [3]
        for name, expected in expected_shapes.items():
            policy.check(getattr(output, name), expected, f"{name}: ")
        policy.run(agent.policy_head, representation, frames)
    if agent.solo_head is not None:
        solo = _Part(agent, "solo head", agent.solo_head)
        solo.check(solo.run(agent.solo_head, representation, frames), [2])
    if agent.value_head is not None:
        critic_representation = _read(agent, agent.value_body, frames)
        head = agent.value_head
        # Of a central critic the first label's head; its heads are alike.
        checked_head = head.heads[0] if isinstance(head, LabelledValueHead) else head
        value_part = _Part(agent, "value head", checked_head)
        values = value_part.run(checked_head, critic_representation, frames)
        value_part.check(values, [])


def _read(agent: Agent, body: AgentBody | None, frames: Observation) -> Representation:
    if body is None:
        return {}
    part = _Part(agent, "body", body)
    representation: Any = part.run(body, frames)
    if not isinstance(representation, Mapping):
        raise part.shape_error(_describe(representation), "a dictionary of tensors")
    for name, tensor in representation.items():
        has_rows = isinstance(tensor, Tensor) and tensor.ndim > 0
        if not has_rows or len(tensor) != NUM_FRAMES:
            expected = f"numbers of shape [{NUM_FRAMES}, ...]"
            raise part.shape_error(f"{name}: {_describe(tensor)}", expected)
    return representation


class _Part(NamedTuple):
    """A checked part of an agent."""

    agent: Agent
    kind: str
    module: object

    def run(self, call: Callable[..., Any], *inputs: Any) -> Any:
        try:
            return call(*inputs)
        except Exception as error:
            raise self._error(f"fails: {type(error).__name__}: {error}") from error

    def check(self, output: object, expected: list[int] | None, name: str = "") -> None:
        """Check that an output has the expected shape (B omitted), or is None if expected."""
        expected_description = "None"
        if expected is not None:
            expected_description = f"numbers of shape {[NUM_FRAMES, *expected]}"
        description = _describe(output)
        if description != expected_description:
            raise self.shape_error(f"{name}{description}", expected_description)

    def shape_error(self, actual: str, expected: str) -> AgentShapeError:
        return self._error(f"returns {actual}, expected {expected}")

    def _error(self, fault: str) -> AgentShapeError:
        shape = self.agent.shape
        space = shape.message_space
        module = type(self.module).__name__
        decision = "a decision" if shape.has_decision else "no decision"
        return AgentShapeError(
            f"the {self.kind} {module} of the agent {self.agent.name!r}, on {NUM_FRAMES} frames, "
            f"{fault}. Give it the sizes of the agent's shape: num_visible {shape.num_visible}, "
            f"message_size {space.message_size}, num_symbols {space.num_symbols}, "
            f"num_linear_symbols {space.num_linear_symbols}, d_representation "
            f"{shape.d_representation} and {decision}."
        )


def _describe(output: object) -> str:
    if isinstance(output, Tensor):
        numbers = "numbers" if output.is_floating_point() else str(output.dtype)
        return f"{numbers} of shape {list(output.shape)}"
    return "None" if output is None else f"a {type(output).__name__}"

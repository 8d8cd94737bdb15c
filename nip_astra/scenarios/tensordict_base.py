"""The base of scenarios whose agents are networks that play an interaction protocol."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from nip_astra.errors import ConfigurationError, DataError, nearest_names
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.agents import DEFAULT_AGENT, AgentParameters, RandomAgentParameters
from nip_astra.parameters.conditions import where
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters, explicit_values
from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.protocols.registry import build_protocol_handler
from nip_astra.scenario_base.protocol.combined import CombinedAgents
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.head_shapes import check_agents
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
    RandomPolicyHead,
    SoloAgentHead,
    initialise_orthogonally,
    shape_of_agent,
)
from nip_astra.scenario_instance import ProtocolInstance
from nip_astra.scenarios.registry import Scenario
from nip_astra.utils.devices import resolve_device
from nip_astra.utils.seeding import derive_seed


class Datasets(NamedTuple):
    """Datapoints to train and to test on."""

    train: TensorDict
    test: TensorDict
    """Batch size [N], with `y` [N, 1] long, 0 or 1, and what agents see of a datapoint."""


class TensorDictScenario(Scenario):
    """Agents with networks play a protocol about a datapoint with a label.

    A kind gives the datasets, the symbols that messages consist of, and the parts of agents.
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
    """The name under which the kind is registered; a kind sets it."""

    class Parameters(SubParameters):
        """What agents say and how wide their representations are; a kind adds its own."""

        agents: Mapping[str, AgentParameters] = {}
        """Agents by name; what stands under `default` holds for all that do not say otherwise."""
        message_size: int = Field(default=1, ge=1, le=1_000_000)
        """Symbols that an agent sends in a channel at once."""
        include_linear_message_space: bool = False
        """Whether a symbol without a meaning in the scenario is sent beside each other symbol."""
        d_linear_message_space: Annotated[int, where("include_linear_message_space", True)] = Field(
            default=2, ge=2, le=1_000_000
        )
        """Number of such symbols. Larger lets agents agree on more."""
        d_representation: int = Field(default=16, ge=1, le=1_000_000)
        """Width of what a body gives to its heads."""

        @model_validator(mode="before")
        @classmethod
        def _fill_in_defaults(cls, values: Any) -> Any:
            agents = values.get("agents") if isinstance(values, Mapping) else None
            if not isinstance(agents, Mapping):
                return values
            filled = {
                name: explicit_values(own) if isinstance(own, RandomAgentParameters) else own
                for name, own in agents.items()
            }
            default = filled.get(DEFAULT_AGENT)
            if isinstance(default, Mapping):
                filled = {
                    name: _merged(default, own) if isinstance(own, Mapping) else own
                    for name, own in filled.items()
                }
            return {**values, "agents": filled}

    @classmethod
    @abstractmethod
    def build_datasets(cls, parameters: Any, *, seed: int, scenario_dir: Path | None) -> Datasets:
        """Make or read the datapoints."""

    @classmethod
    @abstractmethod
    def num_symbols(cls, parameters: Any, dataset: TensorDict) -> int:
        """S, the number of symbols that a message chooses from."""

    @classmethod
    @abstractmethod
    def build_body(
        cls, parameters: Any, agent: Any, shape: AgentShape, dataset: TensorDict
    ) -> AgentBody:
        """Make a body.

        Parameters
        ----------
        parameters : TensorDictScenario.Parameters
            Those of the kind.
        agent : AgentParameters
            Those of the agent.
        dataset : TensorDict
            The training set, for the shapes of what agents see.
        """

    @classmethod
    @abstractmethod
    def build_policy_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentPolicyHead:
        """Make a policy head; `impossible_symbols` is to be given to it."""

    @classmethod
    @abstractmethod
    def build_value_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentValueHead:
        """Make a value head."""

    @classmethod
    @abstractmethod
    def build_solo_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> SoloAgentHead:
        """Make a head that says the label without a conversation."""

    @classmethod
    def describe_datapoint(cls, parameters: Any, row: TensorDictBase) -> dict[str, Any]:
        """What a report shows of a datapoint, as plain values for a JSON file.

        Parameters
        ----------
        parameters : TensorDictScenario.Parameters
            Those of the kind.
        row : TensorDictBase
            Batch size []: one row of a dataset, with its number in it as `datapoint_id`.
        """
        return {"id": int(row["datapoint_id"])}

    @classmethod
    def layers_on(cls, device: torch.device) -> str:
        """Say by what layers are computed on a device, where that is not torch alone."""
        return "torch"

    @classmethod
    def impossible_symbols(cls, observation: Observation, shape: AgentShape) -> Tensor | None:
        """The symbols that an agent cannot send, True, broadcasting to [B, V, P, S]."""
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
        _check_is_whole(cls)
        device = resolve_device(settings.device)
        protocol = build_protocol_handler(hyper_params)
        datasets = cls.build_datasets(parameters, seed=hyper_params.seed, scenario_dir=scenario_dir)
        for split, dataset in zip(Datasets._fields, datasets, strict=True):
            _check_dataset(dataset, split)
        datasets = Datasets(datasets.train.to(device), datasets.test.to(device))
        space = MessageSpace(
            cls.num_symbols(parameters, datasets.train),
            parameters.message_size,
            parameters.d_linear_message_space if parameters.include_linear_message_space else 0,
        )
        agents = cls.build_agents(hyper_params, parameters, protocol, space, datasets, trainer_type)
        # In play; a trainer changes that for as long as agents learn.
        combined = CombinedAgents(agents, protocol, space).to(device).eval()
        steps = hyper_params.rl.steps_per_env_per_iteration or protocol.max_message_rounds
        num_environments = 1
        if trainer_type != "solo_agent":
            rl = hyper_params.rl
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
        """Make all agents of the protocol with the parts that the trainer needs."""
        cls._check_names(parameters, protocol)
        needs_solo_head = trainer_type == "solo_agent" or hyper_params.rl.pretrain_agents
        agents = {}
        for name in protocol.agent_names:
            agent_parameters = cls.parameters_of(parameters, name)
            shape = shape_of_agent(name, protocol, space, parameters.d_representation)
            with _seeded(derive_seed(hyper_params.seed, "agent", name)):
                agents[name] = cls._build_agent(
                    parameters,
                    agent_parameters,
                    shape,
                    datasets.train,
                    has_rl_heads=trainer_type != "solo_agent",
                    has_solo_head=needs_solo_head,
                    has_central_critic=trainer_type == CENTRAL_CRITIC,
                    shares_body=hyper_params.rl.use_shared_body,
                )
        return agents

    @classmethod
    def parameters_of(cls, parameters: Any, name: str) -> AgentParameters:
        """The parameters of an agent by its name."""
        agents = parameters.agents
        own = agents.get(name, agents.get(DEFAULT_AGENT))
        if own is None:
            raise ConfigurationError(
                f"no parameters for the agent {name!r}, only for "
                f"{', '.join(sorted(agents)) or 'none'}. Add agents.{name}, or "
                f"agents.{DEFAULT_AGENT} for all agents."
            )
        return own  # type: ignore[no-any-return]  # by the kind's own type

    @classmethod
    def _build_agent(
        cls,
        parameters: Any,
        agent: AgentParameters,
        shape: AgentShape,
        dataset: TensorDict,
        *,
        has_rl_heads: bool,
        has_solo_head: bool,
        has_central_critic: bool,
        shares_body: bool,
    ) -> Agent:
        if agent.is_random:
            head = RandomPolicyHead(shape, cls.impossible_symbols)
            return Agent(shape.name, agent, shape, policy_head=head)
        body = cls.build_body(parameters, agent, shape, dataset)
        value_body = value_head = None
        if has_rl_heads:
            seen = shape
            if has_central_critic:
                seen = replace(shape, visible_channels=tuple(range(shape.num_channels)))
            value_body = body if shares_body else cls.build_body(parameters, agent, seen, dataset)
            build_value_head = partial(cls.build_value_head, parameters, agent, seen)
            value_head = (
                LabelledValueHead(build_value_head) if has_central_critic else build_value_head()
            )
        built = Agent(
            shape.name,
            agent,
            shape,
            policy_body=body,
            value_body=value_body,
            policy_head=cls.build_policy_head(parameters, agent, shape) if has_rl_heads else None,
            value_head=value_head,
            solo_head=cls.build_solo_head(parameters, agent, shape) if has_solo_head else None,
        )
        if agent.use_orthogonal_initialisation:
            initialise_orthogonally(built, agent.orthogonal_initialisation_gain)
        for body in built.bodies:
            body.after_initialisation()
        return built

    @classmethod
    def _check_names(cls, parameters: Any, protocol: ProtocolHandler) -> None:
        unknown = sorted(set(parameters.agents) - {*protocol.agent_names, DEFAULT_AGENT})
        if unknown:
            near = nearest_names(unknown[0], protocol.agent_names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(
                f"parameters were given for the agent {unknown[0]!r}, but the protocol has the "
                f"agents {', '.join(protocol.agent_names)}.{hint} Name one of them, or put what "
                f"holds for all under agents.{DEFAULT_AGENT}."
            )


def _check_is_whole(kind: type[TensorDictScenario]) -> None:
    """Refuse a class with missing hooks; it is never instantiated, so Python does not check."""
    missing = sorted(kind.__abstractmethods__) + ([] if hasattr(kind, "kind") else ["kind"])
    if missing:
        raise ConfigurationError(
            f"the scenario class {kind.__name__} lacks {', '.join(missing)}. Define each; see "
            "TensorDictScenario."
        )


def _merged(default: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` on top of `default`, group by group; a group of another `_type` replaces."""
    merged = dict(default)
    for name, value in own.items():
        below = merged.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            is_same_kind = value.get("_type", below.get("_type")) == below.get("_type")
            merged[name] = _merged(below, value) if is_same_kind else value
        else:
            merged[name] = value
    return merged


def _num_environments(frames_per_batch: int, steps: int) -> int:
    if frames_per_batch % steps:
        raise ConfigurationError(
            f"rl.frames_per_batch is {frames_per_batch}, but each environment plays {steps} rounds "
            "an iteration, and frames_per_batch must be a multiple of that. Choose "
            f"{max(frames_per_batch // steps, 1) * steps}, or set rl.steps_per_env_per_iteration."
        )
    return frames_per_batch // steps


def _check_dataset(dataset: TensorDict, split: str) -> None:
    if len(dataset) == 0:
        raise DataError(f"the {split} dataset is empty. Give it at least one datapoint.")
    labels = dataset["y"]
    if labels.shape != (len(dataset), 1) or not bool(((labels == 0) | (labels == 1)).all()):
        raise DataError(
            f"the labels `y` of the {split} dataset must be 0 or 1, of shape [{len(dataset)}, 1]; "
            f"they have shape {list(labels.shape)}. Make the classes two."
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Have torch's global generator start from a seed within the block, and leave it as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield

"""The built components of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nip_astra.distributed.team import Team
from nip_astra.errors import MissingPartError
from nip_astra.language_models.services.retrying import RetryingChatModel
from nip_astra.reward_terms.base import RewardTerm
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from nip_astra.scenario_base.tasks.base import Task

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

    from nip_astra.protocols.protocol_base import ProtocolHandler
    from nip_astra.scenario_base.protocol.combined import CombinedAgents

    # TorchRL takes seconds to import, and conversations do not need it.
    from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment


@dataclass(kw_only=True)
class ScenarioInstance:
    """The components that a scenario built; each family has a subclass.

    Access to a part of another family raises `MissingPartError`.
    """

    kind: str
    """The scenario's kind, for instance "ast_chat"."""
    agents: Mapping[str, Any] = field(default_factory=dict)
    """`ConversationAgent`s with language models, or `Agent`s with their own networks, by role."""
    scenario_dir: Path | None = None
    """Folder of the scenario, `scenario://` in references."""
    layers: str = "torch"
    """Implementation of layers, which decides last digits: "torch", or the compiled code."""
    services: Mapping[str, RetryingChatModel] = field(default_factory=dict)
    """Chat models by role: "target", "judge"."""
    team: Team = field(default_factory=Team, compare=False)
    """The processes that use the components together."""

    @property
    def num_parameters(self) -> int:
        """Number of weights of the largest model, which decides the number of threads."""
        models = (getattr(agent, "language_model", None) for agent in self.agents.values())
        return max((model.num_parameters() for model in models if model is not None), default=0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "kind" not in vars(self):
            raise AttributeError(name)
        parts = ", ".join(part.name for part in fields(self))
        raise MissingPartError(
            f"a scenario of the kind {self.kind!r} has no part {name!r}, only {parts}. Choose a "
            "--scenario for the trainer's family."
        )


@dataclass(kw_only=True)
class ConversationInstance(ScenarioInstance):
    """An attacker, its reference and a target."""

    datasets: Mapping[str, Sequence[str]]
    """Opening prompts by split: train, dev, test."""
    sampler: TreeSampler
    """Samples conversations of the agents."""
    planted_failures: Sequence[PlantedFailure] = ()
    """Ground truth, if known."""
    reward_terms: Mapping[str, RewardTerm] = field(default_factory=dict)
    """Terms added to the rewards of training rollouts, by name."""


@dataclass(kw_only=True)
class TaskInstance(ScenarioInstance):
    """A policy that solves problems in messages."""

    task: Task
    """The problems, each with its environment."""


@dataclass(kw_only=True)
class ProtocolInstance(ScenarioInstance):
    """Agents with networks that follow an interaction protocol."""

    protocol_handler: ProtocolHandler
    train_dataset: TensorDict
    test_dataset: TensorDict
    train_environment: ProtocolEnvironment
    test_environment: ProtocolEnvironment
    combined_agents: CombinedAgents
    """All agents as one module."""
    describe_datapoint: Callable[[TensorDictBase], dict[str, Any]]
    """Plain values of one row of a dataset, for reports."""

    @property
    def num_parameters(self) -> int:
        return max(
            sum(weights.numel() for weights in agent.parameters())
            for agent in self.combined_agents.agents.values()
        )

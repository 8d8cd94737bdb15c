"""The built components of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    # TorchRL takes seconds to import, and a conversation needs none of it.
    from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment


@dataclass(kw_only=True)
class ScenarioInstance:
    """What a scenario built from its parameters; each family has its own parts in a subclass.

    Raises
    ------
    MissingPartError
        When a part is asked for that only instances of another family have.
    """

    kind: str
    """The scenario's kind, for instance "ast_chat"."""
    agents: Mapping[str, Any] = field(default_factory=dict)
    """By role: `ConversationAgent`s that speak through a language model, or `Agent`s with networks
    of their own."""
    scenario_dir: Path | None = None
    """Folder of the scenario, which `scenario://` references name."""
    layers: str = "torch"
    """By what layers are computed, which decides last digits: "torch", or what is compiled."""
    services: Mapping[str, RetryingChatModel] = field(default_factory=dict)
    """Chat models that are asked, by who they are: "target", "judge"."""

    @property
    def num_parameters(self) -> int:
        """Weights of the largest model, which decides how many threads are worth their cost."""
        models = (getattr(agent, "language_model", None) for agent in self.agents.values())
        return max((one.num_parameters() for one in models if one is not None), default=0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "kind" not in vars(self):
            raise AttributeError(name)
        parts = [one.name for one in fields(self)]
        raise MissingPartError(
            f"the part {name!r} of the scenario was asked for, but a scenario of the kind "
            f"{self.kind!r} builds none; it has {', '.join(parts)}. Choose a --scenario of the "
            "family that the trainer is for."
        )


@dataclass(kw_only=True)
class ConversationInstance(ScenarioInstance):
    """An attacker, its reference and a target that converse."""

    datasets: Mapping[str, Sequence[str]]
    """Opening prompts by split: train, dev, test."""
    sampler: TreeSampler
    """Plays the agents against each other."""
    planted_failures: Sequence[PlantedFailure] = ()
    """Ground truth, where the scenario has one."""
    reward_terms: Mapping[str, RewardTerm] = field(default_factory=dict)
    """What is added to the rewards of training rollouts, by name."""


@dataclass(kw_only=True)
class TaskInstance(ScenarioInstance):
    """A policy that answers problems in messages."""

    task: Task
    """The problems, each with its environment."""


@dataclass(kw_only=True)
class ProtocolInstance(ScenarioInstance):
    """Agents with networks that play an interaction protocol."""

    protocol_handler: ProtocolHandler
    """The interaction protocol."""
    train_dataset: TensorDict
    test_dataset: TensorDict
    """Datapoints that conversations are about."""
    train_environment: ProtocolEnvironment
    test_environment: ProtocolEnvironment
    """In which the protocol is played about them."""
    combined_agents: CombinedAgents
    """All agents as one actor."""
    describe_datapoint: Callable[[TensorDictBase], dict[str, Any]]
    """Gives plain values that a report shows of one row of a dataset."""

    @property
    def num_parameters(self) -> int:
        return max(
            sum(weights.numel() for weights in agent.parameters())
            for agent in self.combined_agents.agents.values()
        )

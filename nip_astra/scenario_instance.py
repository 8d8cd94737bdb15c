"""The built components of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


@dataclass
class ScenarioInstance:
    """What a scenario built from its parameters; a trainer takes what it needs.

    Attributes
    ----------
    kind : str
        The scenario's kind, for instance "ast_chat".
    agents : Mapping
        By role: `ConversationAgent`s that speak through a language model, or `Agent`s with
        networks of their own.
    datasets : Mapping[str, Sequence[str]]
        Opening prompts by split: train, dev, test.
    sampler : TreeSampler, optional
        Plays the agents against each other.
    planted_failures : Sequence[PlantedFailure]
        Ground truth, where the scenario has one.
    scenario_dir : Path, optional
        Folder of the scenario, which `scenario://` references name.
    reward_terms : Mapping[str, RewardTerm]
        What is added to the rewards of training rollouts, by name.
    protocol_handler : ProtocolHandler, optional
        The interaction protocol that the agents play.
    train_dataset, test_dataset : TensorDict, optional
        Datapoints that conversations under a protocol are about.
    train_environment, test_environment : ProtocolEnvironment, optional
        In which the protocol is played about them.
    combined_agents : CombinedAgents, optional
        All agents with networks as one actor.
    describe_datapoint : callable, optional
        Gives plain values that a report shows of one row of a dataset.
    task : Task, optional
        Problems that a policy answers in messages.
    layers : str
        By what layers are computed, which decides last digits: "torch", or what is compiled.
    """

    kind: str
    agents: Mapping[str, Any] = field(default_factory=dict)
    datasets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sampler: TreeSampler | None = None
    planted_failures: Sequence[PlantedFailure] = ()
    scenario_dir: Path | None = None
    reward_terms: Mapping[str, RewardTerm] = field(default_factory=dict)

    protocol_handler: ProtocolHandler | None = None
    train_dataset: TensorDict | None = None
    test_dataset: TensorDict | None = None
    train_environment: ProtocolEnvironment | None = None
    test_environment: ProtocolEnvironment | None = None
    combined_agents: CombinedAgents | None = None
    describe_datapoint: Callable[[TensorDictBase], dict[str, Any]] | None = None
    task: Task | None = None
    layers: str = "torch"

    @property
    def num_parameters(self) -> int:
        """Weights of the largest model, which decides how many threads are worth their cost."""
        if self.combined_agents is not None:
            return max(
                sum(weights.numel() for weights in agent.parameters())
                for agent in self.combined_agents.agents.values()
            )
        sizes = [agent.language_model.num_parameters() for agent in self.agents.values()]
        return max(sizes, default=0)

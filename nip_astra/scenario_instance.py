"""The built components of an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nip_astra.reward_terms.base import RewardTerm
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.planted_failures import PlantedFailure


@dataclass
class ScenarioInstance:
    """What a scenario built from its parameters; a trainer takes what it needs.

    Attributes
    ----------
    kind : str
        The scenario's kind, for instance "ast_chat".
    agents : Mapping[str, ConversationAgent]
        By role.
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
    """

    kind: str
    agents: Mapping[str, ConversationAgent] = field(default_factory=dict)
    datasets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sampler: TreeSampler | None = None
    planted_failures: Sequence[PlantedFailure] = ()
    scenario_dir: Path | None = None
    reward_terms: Mapping[str, RewardTerm] = field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """Weights of the largest model, which decides how many threads are worth their cost."""
        sizes = [agent.language_model.num_parameters() for agent in self.agents.values()]
        return max(sizes, default=0)

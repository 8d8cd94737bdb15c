"""Reward terms, which are added in training alone, and credit, which flows to earlier turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.reward_terms.base import RatedProbes, RewardTerm
from nip_astra.rl_objectives.advantages import best_child_backup, mean_child_return
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.rollouts import learning_logprobs


class CreditParameters(SubParameters):
    """How much of what follows a probe is put down to it."""

    kind: Literal["own", "best_child", "mean_child"] = "own"
    """own: the node's reward alone. best_child: reward + decay * the best child's credit, which
    rewards a probe for the best continuation found. mean_child: reward + decay * the mean of the
    children's credits, the discounted return of the turns that follow."""
    decay: Annotated[float, where("kind", "best_child", "mean_child")] = Field(
        default=0.9, ge=0, le=1
    )
    """Weight of a turn's credit in that of the turn before. Larger looks further ahead."""


def credit_of(tree: RolloutTree, parameters: CreditParameters) -> Tensor:
    """Each node's credit, float32 `[N]`, NaN where its own reward is."""
    nodes = tree.nodes
    if parameters.kind == "own":
        own: Tensor = nodes["reward"].clone()
        return own
    place = nodes["parent"], nodes["depth"]
    if parameters.kind == "best_child":
        return best_child_backup(nodes["reward"], *place, decay=parameters.decay)
    return mean_child_return(nodes["reward"], *place, discount=parameters.decay)


class RewardShaping:
    """Adds reward terms, by their logged names, to training rollouts, and keeps their state."""

    def __init__(self, terms: Mapping[str, RewardTerm]) -> None:
        self.terms = terms

    @torch.no_grad()
    def apply(self, tree: RolloutTree) -> dict[str, float]:
        """Add every term to the nodes' rewards, and give their means to log."""
        if not self.terms:
            return {}
        rated = _rated_probes(tree)
        metrics = {"reward/base": float(tree.nodes["reward"].nanmean())}
        for name, term in self.terms.items():
            added_N = term.added(rated)
            tree.nodes[f"reward/{name}"] = added_N
            tree.nodes["reward"] = tree.nodes["reward"] + added_N
            metrics[f"reward/{name}"] = float(added_N.mean())
        return metrics

    def observe(self, tree: RolloutTree) -> None:
        """Let the terms remember a rollout."""
        if self.terms:
            rated = _rated_probes(tree)
            for term in self.terms.values():
                term.observe(rated)

    def state(self) -> dict[str, Any]:
        """What the terms remember, for a checkpoint."""
        return {name: term.state() for name, term in self.terms.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        for name, term in self.terms.items():
            term.load_state(state[name])


def _rated_probes(tree: RolloutTree) -> RatedProbes:
    nodes = tree.nodes
    return RatedProbes(
        prompts=[tree.prompts[episode] for episode in nodes["episode"].tolist()],
        probes=tree.probes,
        responses=tree.responses,
        probe_mask_NT=nodes["probe_mask"],
        probe_logprobs_NT=learning_logprobs(tree)[0],
        reference_logprobs_NT=nodes["reference_logprobs"],
        response_score_N=nodes["response_score"],
        tree_width=tree.tree_width,
    )

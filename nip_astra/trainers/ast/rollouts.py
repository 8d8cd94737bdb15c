"""Training trees of conversations, their rewards and credit, and samples of their nodes.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.reward_terms.base import RatedProbes, RewardTerm
from nip_astra.rl_objectives.advantages import best_child_backup, mean_child_return
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import TreeSampler
from nip_astra.utils.seeding import derived_generator


class Rollouts:
    """Samples and scores the trees of each iteration.

    Each iteration draws opening prompts without replacement; all are used before any repeats.
    """

    def __init__(
        self,
        sampler: TreeSampler,
        prompts: Sequence[str],
        *,
        num_episodes: int,
        tree_width: int,
        tree_depth: int,
        seed: int,
    ) -> None:
        self.sampler = sampler
        self.prompts = prompts
        self.num_episodes = num_episodes
        self.size = {"tree_width": tree_width, "tree_depth": tree_depth}
        self.seed = seed

    def play(self, iteration: int, *, seed: int | None = None) -> RolloutTree:
        """Sample the trees of an iteration; opening prompts depend only on iteration and seed."""
        seed = self.seed if seed is None else seed
        prompts = self.prompts_of(iteration, seed)
        return self.sampler.sample(prompts, **self.size, key=(seed, "train", iteration))

    def begin(self, iteration: int) -> Callable[[], RolloutTree]:
        """Start the trees of an iteration with the current weights; see `TreeSampler.begin`."""
        prompts = self.prompts_of(iteration)
        return self.sampler.begin(prompts, **self.size, key=(self.seed, "train", iteration))

    def play_one(self) -> RolloutTree:
        """Sample the tree of one episode, outside of all iterations."""
        return self.sampler.sample(self.prompts[:1], **self.size, key=(self.seed, "dry run"))

    def cache_bytes(self, num_episodes: int) -> int:
        """Return the memory for keys and values of episodes sampled together."""
        return self.sampler.cache_bytes(self.prompts[:num_episodes], **self.size)

    def prompts_of(self, iteration: int, seed: int | None = None) -> list[str]:
        """Return the opening prompts of an iteration."""
        seed = self.seed if seed is None else seed
        first = iteration * self.num_episodes
        orders: dict[int, list[int]] = {}
        chosen = []
        for number in range(first, first + self.num_episodes):
            cycle, place = divmod(number, len(self.prompts))
            if cycle not in orders:
                generator = derived_generator(seed, "prompts", cycle)
                orders[cycle] = torch.randperm(len(self.prompts), generator=generator).tolist()
            chosen.append(self.prompts[orders[cycle][place]])
        return chosen


def node_samples(tree: RolloutTree, nodes: Sequence[int], **columns: Tensor) -> list[Sample]:
    """Return samples: `context`, `probe`, `old_logprobs`, `reference_logprobs`, `episode` of a
    node.

    With the log-probabilities of `learning_logprobs`, and the columns that `Behaviour` has set.

    Parameters
    ----------
    columns : Tensor
        Further columns, `[N]` or one per token `[N, T]`.
    """
    mask_NT = tree.nodes["probe_mask"]
    old_NT, reference_NT = learning_logprobs(tree)
    columns = {"old_logprobs": old_NT, "reference_logprobs": reference_NT, **columns}
    if "importance_weight" in tree.nodes.keys():  # noqa: SIM118 - iteration gives rows
        columns["importance_weight"] = tree.nodes["importance_weight"]
    return [
        {
            "context": torch.tensor(tree.context_of(node)),
            "probe": tree.nodes["probe"][node][mask_NT[node]],
            "episode": tree.nodes["episode"][node],
            **{
                name: values[node][mask_NT[node]] if values.ndim == 2 else values[node]
                for name, values in columns.items()
            },
            **(tree.more_of_samples[node] if tree.more_of_samples else {}),
        }
        for node in nodes
    ]


def learning_logprobs(tree: RolloutTree) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of probes under attacker and reference, `[N, T]`, for training.

    Under the sampling distribution, if `Behaviour` has set them, else under the models.
    """
    names = "drawn_logprobs", "drawn_reference_logprobs"
    if names[0] not in tree.nodes.keys():  # noqa: SIM118 - iteration gives rows
        names = "probe_logprobs", "reference_logprobs"
    return tree.nodes[names[0]], tree.nodes[names[1]]


# ---- reward terms and credit


class CreditParameters(SubParameters):
    """How much of the following rewards is credited to a probe."""

    kind: Literal["own", "best_child", "mean_child"] = "own"
    """own: the node's reward only. best_child: reward + decay * the best child's credit, which
    credits a probe with the best continuation found. mean_child: reward + decay * the mean of the
    children's credits, the discounted return of the following turns."""
    decay: Annotated[float, where("kind", "best_child", "mean_child")] = Field(
        default=0.9, ge=0, le=1
    )
    """Weight of a turn's credit in that of the previous turn. Larger looks further ahead."""


def credit_of(tree: RolloutTree, parameters: CreditParameters) -> Tensor:
    """Return each node's credit, float32 `[N]`, NaN if its own reward is."""
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
        """Add every term to the nodes' rewards, and return their means as metrics."""
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
        """Update the terms with a rollout."""
        if self.terms:
            rated = _rated_probes(tree)
            for term in self.terms.values():
                term.observe(rated)

    def state(self) -> dict[str, Any]:
        """Return the states of the terms, for a checkpoint."""
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

"""Collect experience and turn it into losses; the middle of every AST loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from tensordict import TensorDict

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import TreeSampler
from nip_astra.utils.seeding import derived_generator


class Algorithm(Protocol):
    """What an algorithm gives: samples from a tree, a batch from samples, a loss from a batch."""

    def flatten(self, tree: RolloutTree) -> list[Sample]:
        """The training samples of a rollout."""

    def collate_fn(self, samples: Sequence[Sample]) -> TensorDict:
        """One batch of samples."""

    def step(self, batch: TensorDict) -> LossOutput:
        """The loss of a batch, a mean over its samples, and scalars to log."""


@dataclass(frozen=True)
class Experience:
    """What one call of `Harness.experience` gathered."""

    tree: RolloutTree
    samples: list[Sample]
    metrics: dict[str, float]


class Harness:
    """Collects episodes and yields shuffled batches.

    Parameters
    ----------
    prompts : Sequence[str]
        Opening prompts; each iteration draws from them without replacement, and goes through all
        before any comes again.
    num_episodes_per_experience : int
        Trees an iteration.
    batch_order : str
        "shuffled", or "by_episode": samples of an episode stand together, in the order of its tree.
    prepare : Callable, optional
        Completes a tree before it is flattened, for instance by credit, and gives what to log.
    """

    def __init__(
        self,
        sampler: TreeSampler,
        algorithm: Algorithm,
        prompts: Sequence[str],
        *,
        num_episodes_per_experience: int,
        batch_size: int,
        tree_width: int,
        tree_depth: int,
        seed: int,
        batch_order: str = "shuffled",
        prepare: Callable[[RolloutTree], dict[str, float]] | None = None,
    ) -> None:
        self.sampler = sampler
        self.algorithm = algorithm
        self.prompts = prompts
        self.num_episodes_per_experience = num_episodes_per_experience
        self.batch_size = batch_size
        self.tree_width = tree_width
        self.tree_depth = tree_depth
        self.seed = seed
        self.batch_order = batch_order
        self.prepare = prepare

    def experience(self, iteration: int) -> Experience:
        """Play the episodes of one iteration; the same iteration gives the same prompts."""
        tree = self.sampler.sample(
            self._prompts_of(iteration),
            tree_width=self.tree_width,
            tree_depth=self.tree_depth,
            key=(self.seed, "train", iteration),
        )
        return self.digest(tree)

    def digest(self, tree: RolloutTree) -> Experience:
        """What a rollout teaches."""
        metrics = self.prepare(tree) if self.prepare is not None else {}
        return Experience(tree, self.algorithm.flatten(tree), metrics)

    def batches(
        self, samples: Sequence[Sample], *, iteration: int, epoch: int
    ) -> Iterator[TensorDict]:
        """The samples in batches, in random order; one batch may be smaller.

        Raises
        ------
        ConfigurationError
            When samples are to be kept together by episode and do not say theirs.
        """
        generator = derived_generator(self.seed, "shuffle", iteration, epoch)
        order = torch.randperm(len(samples), generator=generator).tolist()
        if self.batch_order == "by_episode":
            order = _by_episode(samples, order)
        parts = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        if self.batch_order == "by_episode":
            again = torch.randperm(len(parts), generator=generator).tolist()
            parts = [parts[i] for i in again]
        for part in parts:
            yield self.algorithm.collate_fn([samples[i] for i in part])

    def step(self, batch: TensorDict) -> LossOutput:
        """The loss of a batch and scalars to log."""
        return self.algorithm.step(batch)

    def _prompts_of(self, iteration: int) -> list[str]:
        first = iteration * self.num_episodes_per_experience
        numbers = range(first, first + self.num_episodes_per_experience)
        orders: dict[int, list[int]] = {}
        for number in numbers:
            cycle = number // len(self.prompts)
            if cycle not in orders:
                generator = derived_generator(self.seed, "prompts", cycle)
                orders[cycle] = torch.randperm(len(self.prompts), generator=generator).tolist()
        return [
            self.prompts[orders[number // len(self.prompts)][number % len(self.prompts)]]
            for number in numbers
        ]


def _by_episode(samples: Sequence[Sample], order: Sequence[int]) -> list[int]:
    """Put the samples of an episode together, the episodes in the order of their first samples."""
    if any("episode" not in sample for sample in samples):
        raise ConfigurationError(
            "training.batch_order is by_episode, but the samples that flatten gave do not say "
            "their episode. Let flatten put tree.nodes['episode'][node] into each sample as "
            "'episode', or set training.batch_order to shuffled."
        )
    episodes = [int(sample["episode"]) for sample in samples]
    rank = {episode: i for i, episode in enumerate(dict.fromkeys(episodes[i] for i in order))}
    return sorted(range(len(samples)), key=lambda i: rank[episodes[i]])

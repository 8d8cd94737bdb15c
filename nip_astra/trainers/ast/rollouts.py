"""The episodes that training plays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import TreeSampler
from nip_astra.utils.seeding import derived_generator


class Rollouts:
    """Plays and scores the trees of each iteration.

    Parameters
    ----------
    prompts : Sequence[str]
        Opening prompts; each iteration draws from them without replacement, and goes through all
        before any comes again.
    num_episodes : int
        Trees an iteration.
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
        """The trees of an iteration; equal iterations and seeds open with equal prompts."""
        seed = self.seed if seed is None else seed
        prompts = self.prompts_of(iteration, seed)
        return self.sampler.sample(prompts, **self.size, key=(seed, "train", iteration))

    def begin(self, iteration: int) -> Callable[[], RolloutTree]:
        """Begin the trees of an iteration with the weights of now; see `TreeSampler.begin`."""
        prompts = self.prompts_of(iteration)
        return self.sampler.begin(prompts, **self.size, key=(self.seed, "train", iteration))

    def play_one(self) -> RolloutTree:
        """The tree of one episode, which belongs to no iteration."""
        return self.sampler.sample(self.prompts[:1], **self.size, key=(self.seed, "dry run"))

    def cache_bytes(self, num_episodes: int) -> int:
        """Memory for the keys and values of so many episodes played at once."""
        return self.sampler.cache_bytes(self.prompts[:num_episodes], **self.size)

    def prompts_of(self, iteration: int, seed: int | None = None) -> list[str]:
        """The opening prompts of an iteration."""
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

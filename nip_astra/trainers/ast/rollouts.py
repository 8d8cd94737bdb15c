"""The trees that training plays, and training samples of their nodes.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import TreeSampler
from nip_astra.utils.seeding import derived_generator


class Rollouts:
    """Plays and scores the trees of each iteration.

    Each iteration draws opening prompts without replacement, all of them before any comes again.
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


def node_samples(tree: RolloutTree, nodes: Sequence[int], **columns: Tensor) -> list[Sample]:
    """One sample a node: `context`, `probe`, `old_logprobs`, `reference_logprobs`, `episode`.

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
    """Log-probabilities of probes under attacker and reference, `[N, T]`, to learn from.

    Under the distribution sampled from, if `Behaviour` has set them, else under the models.
    """
    names = "drawn_logprobs", "drawn_reference_logprobs"
    if names[0] not in tree.nodes.keys():  # noqa: SIM118 - iteration gives rows
        names = "probe_logprobs", "reference_logprobs"
    return tree.nodes[names[0]], tree.nodes[names[1]]

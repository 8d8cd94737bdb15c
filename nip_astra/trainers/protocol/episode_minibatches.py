"""Minibatches of whole episodes.

Shapes: E environments, T rounds played, B frames, N episodes.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.trainers.protocol.minibatches import MinibatchBuffer
from nip_astra.utils.seeding import SeedPart


def episode_numbers(done_ET: Tensor) -> Tensor:
    """Number the episodes of a batch: frames have the same number from one end to the next.

    An episode that goes on from the batch before, or into the next, counts as one of its own.

    Parameters
    ----------
    done_ET : Tensor
        bool, frames after which an episode ends.

    Returns
    -------
    Tensor
        `[E, T]`, long.
    """
    num_environments, num_steps = done_ET.shape
    ended_before_ET = done_ET.long().cumsum(dim=1) - done_ET.long()
    first_E1 = torch.arange(num_environments, device=done_ET.device).unsqueeze(1) * num_steps
    return first_E1 + ended_before_ET


class EpisodeMinibatchBuffer(MinibatchBuffer):
    """The episodes of an iteration in a new order each epoch, none cut by a minibatch.

    A minibatch holds those episodes of an epoch whose first frames fall into its `minibatch_size`
    frames, so it may be larger by all but one of the frames of an episode, or smaller.

    Parameters
    ----------
    episode_key : str
        Entry of the frames that tells their episodes apart.
    """

    def __init__(self, minibatch_size: int, *key: SeedPart, episode_key: str) -> None:
        super().__init__(minibatch_size, *key)
        self.episode_key = episode_key

    def _divide(self, frames: TensorDict, generator: torch.Generator) -> tuple[Tensor, list[int]]:
        _, episode_B = frames[self.episode_key].cpu().unique(return_inverse=True)
        lengths_N = episode_B.bincount()
        order_N = torch.randperm(len(lengths_N), generator=generator)
        lengths_N = lengths_N[order_N]
        minibatch_N = (lengths_N.cumsum(0) - lengths_N) // self.minibatch_size
        sizes = minibatch_N.bincount(weights=lengths_N.double()).long()
        order_B = order_N.argsort()[episode_B].argsort(stable=True)
        return order_B, [size for size in sizes.tolist() if size]

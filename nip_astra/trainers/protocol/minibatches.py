"""Minibatches of an iteration's frames.

Shapes: E environments, T rounds played, B frames, N episodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.utils.seeding import SeedPart, derive_seed


class ReplayBuffer(Protocol):
    """What the train loop asks of a buffer; TorchRL's with a sampler without replacement fits."""

    def extend(self, data: TensorDict, /) -> Any:
        """Take the frames of an iteration, [B]."""

    def empty(self) -> Any:
        """Forget all frames."""

    def __iter__(self) -> Iterator[Any]:
        """The minibatches of one epoch."""


class MinibatchBuffer:
    """The frames of an iteration in a new order each epoch.

    The order depends on the key and on how many epochs there have been, so it survives a restart.
    The last minibatch of an epoch may be smaller than the others.

    Parameters
    ----------
    minibatch_size : int
        Frames in a minibatch.
    key : SeedPart
        Path of names that the orders derive from.
    """

    def __init__(self, minibatch_size: int, *key: SeedPart) -> None:
        self.minibatch_size = minibatch_size
        self.num_epochs = 0
        self._key = key
        self._frames: TensorDict | None = None

    def __len__(self) -> int:
        return 0 if self._frames is None else len(self._frames)

    def extend(self, data: TensorDict) -> None:
        """Add frames, [B]."""
        self._frames = data if self._frames is None else torch.cat([self._frames, data])

    def empty(self) -> None:
        """Forget all frames."""
        self._frames = None

    def __iter__(self) -> Iterator[TensorDict]:
        if self._frames is None:
            raise ConfigurationError(
                "minibatches were asked for, but the buffer holds no frames. Call extend first."
            )
        generator = torch.Generator().manual_seed(derive_seed(*self._key, self.num_epochs))
        self.num_epochs += 1
        order_B, sizes = self._divide(self._frames, generator)
        yield from self._frames[order_B.to(self._frames.device)].split(sizes)

    def _divide(
        self, frames: TensorDict, generator: torch.Generator
    ) -> tuple[Tensor, int | list[int]]:
        """The order of an epoch's frames, and the sizes of minibatches: a hook."""
        return torch.randperm(len(frames), generator=generator), self.minibatch_size

    def state_dict(self) -> dict[str, Any]:
        """How many epochs there have been; frames are not kept."""
        return {"num_epochs": self.num_epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.num_epochs = state["num_epochs"]


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
        Entry of the frames that identifies their episodes.
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

"""Minibatches of an iteration's frames.

Shapes: B frames.
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

"""What one call of `Harness.experience` gathered, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic

from nip_astra.astra.core.common import Batch


class ExperienceLoader(Generic[Batch]):
    """Batches of samples, in the manner of torch's DataLoader: any number of passes, and a length.

    The episodes are played once. Each pass is in an order of its own, where batches are shuffled;
    `next` goes on with a pass that it begins itself.

    Parameters
    ----------
    epoch : Callable
        Gives the batches of the pass of that number.
    num_samples : int
        Samples gathered.
    batch_size : int
        Most samples in a batch.
    """

    def __init__(
        self, epoch: Callable[[int], Iterator[Batch]], *, num_samples: int, batch_size: int
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self._epoch = epoch
        self._num_passes = 0
        self._current: Iterator[Batch] | None = None

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        number, self._num_passes = self._num_passes, self._num_passes + 1
        return self._epoch(number)

    def __next__(self) -> Batch:
        self._current = self._current or iter(self)
        return next(self._current)

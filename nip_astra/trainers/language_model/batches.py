"""An iteration's samples in batches, and the batches of each optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rollouts.samples import Sample
from nip_astra.utils.seeding import derived_generator

BatchT = TypeVar("BatchT")


def batches_of(
    samples: Sequence[Sample],
    collate: Callable[[Sequence[Sample]], BatchT],
    *,
    size: int,
    order: str,
    key: tuple[int, int, int],
) -> Iterator[BatchT]:
    """The samples in batches, in random order; one batch may be smaller.

    Parameters
    ----------
    order : str
        "shuffled", or "by_episode": samples of an episode stand together, in the order that they
        were given.
    key : tuple of int
        Seed, iteration and epoch, which decide the order.

    Raises
    ------
    ConfigurationError
        When samples are to be kept together by episode and do not say theirs.
    """
    seed, iteration, epoch = key
    generator = derived_generator(seed, "shuffle", iteration, epoch)
    places = torch.randperm(len(samples), generator=generator).tolist()
    if order == "by_episode":
        places = _by_episode(samples, places)
    parts = [places[i : i + size] for i in range(0, len(places), size)]
    if order == "by_episode":
        again = torch.randperm(len(parts), generator=generator).tolist()
        parts = [parts[i] for i in again]
    for part in parts:
        yield collate([samples[i] for i in part])


def in_groups(batches: Iterable[BatchT], size: int) -> Iterator[list[BatchT]]:
    """Neighbouring batches in groups, of which the last may be smaller."""
    group: list[BatchT] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _by_episode(samples: Sequence[Sample], order: Sequence[int]) -> list[int]:
    """Put the samples of an episode together, the episodes in the order of their first samples."""
    if any("episode" not in sample for sample in samples):
        raise ConfigurationError(
            "training.batch_order is by_episode, but the samples that flatten gave do not say "
            "their episode. Let flatten put tree.nodes['episode'][node] into each sample as "
            "'episode', or set training.batch_order to shuffled."
        )
    episodes: list[Any] = [int(sample["episode"]) for sample in samples]
    rank = {episode: i for i, episode in enumerate(dict.fromkeys(episodes[i] for i in order))}
    return sorted(range(len(samples)), key=lambda i: rank[episodes[i]])

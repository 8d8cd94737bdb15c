"""Which datapoints an iteration or a test plays about."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from nip_astra.scenario_base.text.game import TextEpisode
from nip_astra.scenarios.pure_text_base import PureTextScenarioInstance, row_of
from nip_astra.utils.seeding import derive_seed

NUM_SEEDS = 2**16
"""Seeds that an episode may have."""


def train_episodes(
    instance: PureTextScenarioInstance, *, seed: int, iteration: int, count: int
) -> Iterator[TextEpisode]:
    """An iteration's episodes: passes over the data, each in an order of its own, go on in them."""
    data = instance.train_data
    for number in range(iteration * count, (iteration + 1) * count):
        epoch, place = divmod(number, len(data))
        row = shuffled(len(data), seed, "train data", epoch)[place]
        episode_seed = derive_seed(seed, "train episode", number) % NUM_SEEDS
        yield instance.game.start(row, row_of(data, row), episode_seed)


def held_out_episodes(
    instance: PureTextScenarioInstance, *, seed: int, count: int | None
) -> Iterator[TextEpisode]:
    """A test's episodes, the same at each test; about all of the data where `count` is None."""
    data = instance.test_data
    rows = range(len(data)) if count is None else shuffled(len(data), seed, "test data")[:count]
    for row in rows:
        episode_seed = derive_seed(seed, "test episode", row) % NUM_SEEDS
        yield instance.game.start(row, row_of(data, row), episode_seed)


@lru_cache(maxsize=8)
def shuffled(count: int, *key: str | int) -> tuple[int, ...]:
    """An order of so many things that depends on the key alone."""
    return tuple(np.random.default_rng(derive_seed(*key)).permutation(count).tolist())

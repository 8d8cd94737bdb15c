"""Statistics of agents that play and do not learn.

Shapes: E environments, T rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from nip_astra.trainers.protocol.statistics import (
    EndedEpisodes,
    EpisodeLedger,
    MetricSums,
    episode_statistics,
    first_episodes,
    frame_statistics,
    policy_figures,
    read,
)
from nip_astra.utils.intervals import rate_estimate


class PlayStatistics:
    """Statistics of each environment's first episode in several batches, taken together.

    Whichever episodes end within so many rounds, short ones are more among them than are played; an
    environment's first episode is as long as it is.

    Parameters
    ----------
    names : Sequence[str]
        Agents, in the order of the dimension A.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._episodes: list[EndedEpisodes] = []
        self._sums = MetricSums()

    def add(self, batch: TensorDict) -> None:
        """Take a batch [E, T] of the sampler, with advantages or without.

        It starts with new episodes and is as long as the longest one may be.
        """
        counts_ET = first_episodes(batch)
        self._episodes.append(EpisodeLedger().ended(batch, counts_ET))
        frames = batch[counts_ET]
        self._sums.add(frame_statistics(frames, self.names))
        self._sums.add(policy_figures(frames, self.names))

    def report(self) -> dict[str, Any]:
        """The statistics, with `num_episodes` and an interval of the accuracy.

        Episodes about one datapoint are alike, and the interval allows for that.

        Figures of episodes and of single frames are those of all batches together; means over the
        frames of a batch are averaged over the batches.
        """
        if not self._episodes:
            return {}
        episodes = EndedEpisodes.join(self._episodes)
        found: dict[str, Any] = read(episode_statistics(episodes, self.names) | self._sums.result())
        found["num_episodes"] = float(len(episodes.datapoint_N))
        if "mean_accuracy" in found:
            estimate = rate_estimate(episodes.is_right_N.tolist(), episodes.datapoint_N.tolist())
            found["mean_accuracy_interval"] = [estimate.low, estimate.high]
        return found

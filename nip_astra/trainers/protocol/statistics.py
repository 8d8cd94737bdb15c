"""What is logged of the play and learning of agents in a protocol.

Numbers stay on their device and are read once an iteration, by `read`.

Shapes: E environments, T rounds, A agents, N episodes that ended, F frames, D datapoints,
C channels, P positions, S symbols.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.protocols.protocol_base import CONTINUE
from nip_astra.scenario_base.protocol.tensordict_agents import MASKED
from nip_astra.utils.intervals import rate_estimate
from nip_astra.utils.processor import peak_memory_bytes

SHARED_FIGURES = ("kl", "clip_fraction", "ratio_outside_clip", "ess")
"""Figures of agents whose mean over the agents is logged as well."""


@dataclass(frozen=True)
class EndedEpisodes:
    """Episodes that ended in a batch.

    Attributes
    ----------
    datapoint_N : Tensor
        Row of the dataset, long.
    reward_NA : Tensor
        Sum of each agent's rewards from the episode's first round, also of earlier batches.
    num_rounds_N : Tensor
        Length, as float.
    is_right_N : Tensor
        Whether the decision was the label, as float; running out of rounds is wrong.
    is_undecided_N : Tensor
        Whether the rounds ran out without a decision, as float.
    """

    datapoint_N: Tensor
    reward_NA: Tensor
    num_rounds_N: Tensor
    is_right_N: Tensor
    is_undecided_N: Tensor

    @classmethod
    def join(cls, parts: Sequence[EndedEpisodes]) -> EndedEpisodes:
        """Put the episodes of several batches together."""
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)))


class EpisodeLedger:
    """Adds up rewards of episodes that go on from one batch to the next."""

    def __init__(self) -> None:
        self._running: tuple[Tensor, Tensor] | None = None

    def ended(self, batch: TensorDict, counts_ET: Tensor | None = None) -> EndedEpisodes:
        """The episodes that ended in a batch [E, T] as the sampler gives it.

        Parameters
        ----------
        counts_ET : Tensor, optional
            bool; frames whose episodes count. All where it is not given.
        """
        reward_ETA = batch["next", "agents", "reward"].squeeze(-1)
        is_end_ET = batch["next", "done"].squeeze(-1)
        num_environments, num_steps, num_agents = reward_ETA.shape
        if self._running is None:
            self._running = (
                reward_ETA.new_zeros(num_environments, num_agents),
                reward_ETA.new_zeros(num_environments),
            )
        sum_EA, length_E = self._running
        sums, lengths = [], []
        for t in range(num_steps):
            sum_EA, length_E = sum_EA + reward_ETA[:, t], length_E + 1
            sums.append(sum_EA)
            lengths.append(length_E)
            goes_on_E = (~is_end_ET[:, t]).to(reward_ETA.dtype)
            sum_EA, length_E = sum_EA * goes_on_E[:, None], length_E * goes_on_E
        self._running = sum_EA, length_E
        is_end_ET = is_end_ET if counts_ET is None else is_end_ET & counts_ET
        decision_N = batch["next", "decision"][is_end_ET]
        label_N = batch["y"].squeeze(-1)[is_end_ET]
        return EndedEpisodes(
            datapoint_N=batch["datapoint_id"][is_end_ET],
            reward_NA=torch.stack(sums, dim=1)[is_end_ET],
            num_rounds_N=torch.stack(lengths, dim=1)[is_end_ET],
            is_right_N=(decision_N == label_N).float(),
            is_undecided_N=(decision_N == CONTINUE).float(),
        )

    def state(self) -> dict[str, Tensor]:
        """The sums of the episodes in progress."""
        if self._running is None:
            return {}
        return {"sum": self._running[0], "length": self._running[1]}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Take up what `state` gave."""
        self._running = (
            (state["sum"].to(device), state["length"].to(device)) if "sum" in state else None
        )


def first_episodes(batch: TensorDict) -> Tensor:
    """The frames of each environment's first episode in a batch, bool [E, T]."""
    is_end_ET: Tensor = batch["next", "done"].squeeze(-1).long()
    num_ended_before_ET = is_end_ET.cumsum(dim=1) - is_end_ET
    return num_ended_before_ET == 0


def episode_statistics(episodes: EndedEpisodes, names: Sequence[str]) -> dict[str, Tensor]:
    """Rewards, lengths and accuracy of episodes; nothing where none ended.

    `worst_*` is the smallest mean of a datapoint.
    """
    if len(episodes.datapoint_N) == 0:
        return {}
    group_N: Tensor = torch.unique(episodes.datapoint_N, return_inverse=True)[1]
    reward_DA = _group_means(episodes.reward_NA, group_N)
    found = {
        "mean_episode_length": episodes.num_rounds_N.mean(),
        "mean_accuracy": episodes.is_right_N.mean(),
        "std_accuracy": episodes.is_right_N.std(correction=0),
        "worst_datapoint_accuracy": _group_means(episodes.is_right_N[:, None], group_N).min(),
        "share_undecided": episodes.is_undecided_N.mean(),
    }
    for number, name in enumerate(names):
        found[f"{name}/mean_episode_reward"] = episodes.reward_NA[:, number].mean()
        found[f"{name}/worst_episode_reward"] = reward_DA[:, number].min()
    return found


def _group_means(values_NX: Tensor, group_N: Tensor) -> Tensor:
    num_groups = int(group_N.max()) + 1
    sums = values_NX.new_zeros(num_groups, values_NX.shape[1]).index_add(0, group_N, values_NX)
    counts = values_NX.new_zeros(num_groups).index_add(0, group_N, torch.ones_like(values_NX[:, 0]))
    return sums / counts[:, None]


def frame_statistics(batch: TensorDict, names: Sequence[str]) -> dict[str, Tensor]:
    """Means over frames of rewards, and of values and advantages where they were estimated.

    `residual_critic_variance` is `Var(target - V) / Var(target)`: 0 for values that foresee all
    there is to foresee, 1 for constant ones; NaN where all targets are equal.
    """
    agents, found = batch["agents"], {}
    reward_FA = batch["next", "agents", "reward"].flatten(0, -3).squeeze(-1)
    has_values = "value" in agents.keys()  # noqa: SIM118 - a TensorDict is no container of names
    for number, name in enumerate(names):
        found[f"{name}/mean_step_reward"] = reward_FA[:, number].mean()
        if not has_values:
            continue
        value_F, target_F, advantage_F = (
            agents[key][..., number, 0].flatten() for key in ("value", "value_target", "advantage")
        )
        found |= {
            f"{name}/mean_advantage": advantage_F.mean(),
            f"{name}/mean_value": value_F.mean(),
            f"{name}/mean_value_target": target_F.mean(),
            f"{name}/residual_critic_variance": (target_F - value_F).var(correction=0)
            / target_F.var(correction=0),
        }
    return found


def policy_figures(batch: TensorDict, names: Sequence[str]) -> dict[str, Tensor]:
    """How decided the policies were that a batch was sampled from, figures of each frame, [F].

    Entropies are divided by the log of the number of possible alternatives. `message_entropy` and
    `max_message_prob`, the probability of the likeliest symbol, are means over the symbols sent in
    the frame; all are NaN where an agent had nothing to choose.
    """
    frames, found = batch.reshape(-1), {}
    for number, name in enumerate(names):
        active_FC = frames["active_mask"][:, number]
        logs_FCPS = frames["agents", "message_logits"][:, number]
        entropy_FC = _normalised_entropy(logs_FCPS).mean(dim=-1)
        peak_FC = logs_FCPS.amax(dim=-1).exp().mean(dim=-1)
        sends = active_FC.to(entropy_FC.dtype)
        # 0 / 0 is NaN, as it should be for who sends nothing.
        found[f"{name}/message_entropy"] = (entropy_FC * sends).sum(-1) / sends.sum(-1)
        found[f"{name}/max_message_prob"] = (peak_FC * sends).sum(-1) / sends.sum(-1)
        decision_F = _normalised_entropy(frames["agents", "decision_logits"][:, number])
        can_decide_F = frames["can_decide"][:, number]
        found[f"{name}/decision_entropy"] = decision_F.masked_fill(~can_decide_F, torch.nan)
    return found


def _normalised_entropy(logs: Tensor) -> Tensor:
    """Entropies over the last dimension of log-probabilities, as shares of the largest."""
    entropy = -(logs.exp() * logs).sum(dim=-1)
    largest = (logs > MASKED / 2).sum(dim=-1).to(logs.dtype).log()
    return entropy / torch.where(largest > 0, largest, 1.0)


class MetricSums:
    """Collects what the minibatches of an iteration gave, without reading any of it."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take scalars, and figures of single frames."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value.detach())

    def result(self) -> dict[str, Tensor]:
        """Means of scalars, and `mean_*` and `std_*` of figures of frames, NaN left out.

        A figure of an agent is NaN in minibatches, or frames, that say nothing of it.
        """
        found: dict[str, Tensor] = {}
        for name, values in self._values.items():
            if values[0].ndim == 0:
                found[name] = torch.stack(values).nanmean()
            else:
                found |= mean_and_std(name, torch.cat(values))
        return found


def mean_and_std(name: str, values_F: Tensor) -> dict[str, Tensor]:
    """`mean_*` and `std_*` of figures of frames; those that are NaN do not count."""
    agent, slash, figure = name.rpartition("/")
    mean = values_F.nanmean()
    variance = (values_F - mean).square().nanmean()
    return {
        f"{agent}{slash}mean_{figure}": mean,
        f"{agent}{slash}std_{figure}": variance.sqrt(),
    }


def mean_over_agents(
    metrics: Mapping[str, Tensor], names: Iterable[str], figures: Iterable[str]
) -> dict[str, Tensor]:
    """Means of figures over those agents that have them, NaN left out."""
    found = {}
    for figure in figures:
        values = [metrics[f"{name}/{figure}"] for name in names if f"{name}/{figure}" in metrics]
        if values:
            found[figure] = torch.stack(values).nanmean()
    return found


def iteration_statistics(
    batch: TensorDict, ended: EndedEpisodes, metrics: Mapping[str, Tensor], names: Sequence[str]
) -> dict[str, Tensor]:
    """What is logged of an iteration beside what its minibatches gave.

    Parameters
    ----------
    ended : EndedEpisodes
        Episodes that ended in the batch.
    metrics : Mapping
        Of the minibatches, of which some are averaged over agents.
    """
    figures = MetricSums()
    figures.add(policy_figures(batch, names))
    return {
        **episode_statistics(ended, names),
        **frame_statistics(batch, names),
        **figures.result(),
        **mean_over_agents(metrics, names, SHARED_FIGURES),
    }


def read(metrics: Mapping[str, Tensor], prefix: str = "") -> dict[str, float]:
    """Read all numbers in one transfer from the device; those that are not finite are left out."""
    if not metrics:
        return {}
    # Double: counts and sums above 2^24 stay exact.
    values = torch.stack([value.double().reshape(()) for value in metrics.values()]).tolist()
    return {
        _prefixed(name, prefix): value
        for name, value in zip(metrics, values, strict=True)
        if math.isfinite(value)
    }


def _prefixed(name: str, prefix: str) -> str:
    agent, slash, figure = name.rpartition("/")
    return f"{agent}{slash}{prefix}{figure}"


def timings_of(num_frames: int, started: float, collected: float) -> dict[str, float]:
    """How long an iteration took, by what it did, and how much memory; by `time.perf_counter`."""
    updated = time.perf_counter()
    return {
        "time/collect_seconds": collected - started,
        "time/update_seconds": updated - collected,
        "time/frames_per_second": num_frames / max(updated - started, 1e-9),
        "memory/peak_gib": peak_memory_bytes() / 2**30,
    }


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


def as_of_test(statistics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of test statistics with the prefix `test_` before each figure."""
    found = {}
    for name, value in statistics.items():
        agent, slash, figure = name.rpartition("/")
        if isinstance(value, float):
            found[f"{agent}{slash}test_{figure}"] = value
    return found

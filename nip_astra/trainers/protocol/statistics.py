"""Statistics and sample episodes of rollouts and training of protocol agents.

Numbers stay on their device and are read once an iteration, by `read`.

Shapes: E environments, T rounds, A agents, N episodes that ended, F frames, D datapoints,
C channels, P positions, S symbols.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from nip_astra.protocols.protocol_base import CONTINUE, ProtocolHandler
from nip_astra.scenario_base.protocol.tensordict_agents import MASKED
from nip_astra.scenario_instance import ProtocolInstance
from nip_astra.utils.intervals import rate_estimate
from nip_astra.utils.processor import peak_memory_bytes
from nip_astra.utils.seeding import derived_generator

SHARED_FIGURES = ("kl", "clip_fraction", "ratio_outside_clip", "ess")
"""Figures of agents that are also logged as means over the agents."""


class EndedEpisodes(NamedTuple):
    """Episodes that ended in a batch.

    Attributes
    ----------
    datapoint_N : Tensor
        Row of the dataset, long.
    reward_NA : Tensor
        Sum of each agent's rewards from the episode's first round, also of earlier batches.
    num_rounds_N : Tensor
        Length, as float.
    is_correct_N : Tensor
        Whether the decision was the label, as float; running out of rounds is wrong.
    is_undecided_N : Tensor
        Whether the rounds ran out without a decision, as float.
    """

    datapoint_N: Tensor
    reward_NA: Tensor
    num_rounds_N: Tensor
    is_correct_N: Tensor
    is_undecided_N: Tensor


class EpisodeLedger:
    """Accumulates rewards of episodes that continue across batches."""

    def __init__(self) -> None:
        self._running: tuple[Tensor, Tensor] | None = None

    def ended(self, batch: TensorDict, counts_ET: Tensor | None = None) -> EndedEpisodes:
        """Return the episodes that ended in a batch [E, T], in frames of `counts_ET` or any."""
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
            is_correct_N=(decision_N == label_N).float(),
            is_undecided_N=(decision_N == CONTINUE).float(),
        )

    def state(self) -> dict[str, Tensor]:
        """Return the sums of the episodes in progress."""
        if self._running is None:
            return {}
        return {"sum": self._running[0], "length": self._running[1]}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the sums of `state`."""
        self._running = (
            (state["sum"].to(device), state["length"].to(device)) if "sum" in state else None
        )


def first_episodes(batch: TensorDict) -> Tensor:
    """Return the frames of each environment's first episode in a batch, bool [E, T]."""
    is_end_ET: Tensor = batch["next", "done"].squeeze(-1).long()
    num_ended_before_ET = is_end_ET.cumsum(dim=1) - is_end_ET
    return num_ended_before_ET == 0


def episode_statistics(episodes: EndedEpisodes, names: Sequence[str]) -> dict[str, Tensor]:
    """Return rewards, lengths and accuracy of episodes; empty if none ended.

    `worst_*` is the smallest mean of a datapoint.
    """
    if len(episodes.datapoint_N) == 0:
        return {}
    group_N: Tensor = torch.unique(episodes.datapoint_N, return_inverse=True)[1]
    reward_DA = _group_means(episodes.reward_NA, group_N)
    figures = {
        "mean_episode_length": episodes.num_rounds_N.mean(),
        "mean_accuracy": episodes.is_correct_N.mean(),
        "std_accuracy": episodes.is_correct_N.std(correction=0),
        "worst_datapoint_accuracy": _group_means(episodes.is_correct_N[:, None], group_N).min(),
        "share_undecided": episodes.is_undecided_N.mean(),
    }
    for number, name in enumerate(names):
        figures[f"{name}/mean_episode_reward"] = episodes.reward_NA[:, number].mean()
        figures[f"{name}/worst_episode_reward"] = reward_DA[:, number].min()
    return figures


def _group_means(values_NX: Tensor, group_N: Tensor) -> Tensor:
    num_groups = int(group_N.max()) + 1
    sums = values_NX.new_zeros(num_groups, values_NX.shape[1]).index_add(0, group_N, values_NX)
    counts = values_NX.new_zeros(num_groups).index_add(0, group_N, torch.ones_like(values_NX[:, 0]))
    return sums / counts[:, None]


def frame_statistics(batch: TensorDict, names: Sequence[str]) -> dict[str, Tensor]:
    """Return means over frames of rewards, and of values and advantages if estimated.

    `residual_critic_variance` is `Var(target - V) / Var(target)`: 0 for perfect values, 1 for
    constant ones; NaN where all targets are equal.
    """
    agents, found = batch["agents"], {}
    reward_FA = batch["next", "agents", "reward"].flatten(0, -3).squeeze(-1)
    has_values = "value" in agents.keys()  # noqa: SIM118 - a TensorDict is not a container of names
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
    """Return metrics of each frame, [F], of the policies that sampled a batch.

    Entropies are divided by the log of the number of possible alternatives. `message_entropy` and
    `max_message_prob`, the probability of the likeliest symbol, are means over the symbols sent in
    the frame; all are NaN where an agent had no choice.
    """
    frames, found = batch.reshape(-1), {}
    for number, name in enumerate(names):
        active_FC = frames["active_mask"][:, number]
        logs_FCPS = frames["agents", "message_logits"][:, number]
        entropy_FC = _normalised_entropy(logs_FCPS).mean(dim=-1)
        peak_FC = logs_FCPS.amax(dim=-1).exp().mean(dim=-1)
        sends = active_FC.to(entropy_FC.dtype)
        # 0 / 0 is NaN, for an agent that sends nothing.
        found[f"{name}/message_entropy"] = (entropy_FC * sends).sum(-1) / sends.sum(-1)
        found[f"{name}/max_message_prob"] = (peak_FC * sends).sum(-1) / sends.sum(-1)
        decision_F = _normalised_entropy(frames["agents", "decision_logits"][:, number])
        can_decide_F = frames["can_decide"][:, number]
        found[f"{name}/decision_entropy"] = decision_F.masked_fill(~can_decide_F, torch.nan)
    return found


def _normalised_entropy(logs: Tensor) -> Tensor:
    """Return entropies over the last dimension of log-probabilities, as shares of the maximum."""
    entropy = -(logs.exp() * logs).sum(dim=-1)
    largest = (logs > MASKED / 2).sum(dim=-1).to(logs.dtype).log()
    return entropy / torch.where(largest > 0, largest, 1.0)


class MetricSums:
    """Collects the metrics of an iteration's minibatches, without synchronising."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add scalars, and per-frame metrics."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value.detach())

    def result(self) -> dict[str, Tensor]:
        """Return means of scalars, and `mean_*` and `std_*` of per-frame metrics, ignoring NaN.

        A figure of an agent is NaN in minibatches, or frames, without information about it.
        """
        found: dict[str, Tensor] = {}
        for name, values in self._values.items():
            if values[0].ndim == 0:
                found[name] = torch.stack(values).nanmean()
            else:
                values_F = torch.cat(values)
                mean = values_F.nanmean()
                found[_prefixed(name, "mean_")] = mean
                found[_prefixed(name, "std_")] = (values_F - mean).square().nanmean().sqrt()
        return found


def mean_over_agents(
    metrics: Mapping[str, Tensor], names: Iterable[str], figures: Iterable[str]
) -> dict[str, Tensor]:
    """Return means of metrics over the agents that have them, ignoring NaN."""
    found = {}
    for figure in figures:
        values = [metrics[f"{name}/{figure}"] for name in names if f"{name}/{figure}" in metrics]
        if values:
            found[figure] = torch.stack(values).nanmean()
    return found


def iteration_statistics(
    batch: TensorDict, ended: EndedEpisodes, metrics: Mapping[str, Tensor], names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the statistics of an iteration beside the `metrics` of its minibatches.

    `ended` are the episodes that ended in the batch.
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
    """Read all numbers in one transfer from the device; non-finite ones are left out."""
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
    """Return an iteration's time by part, from values of `time.perf_counter`, and memory."""
    updated = time.perf_counter()
    return {
        "time/collect_seconds": collected - started,
        "time/update_seconds": updated - collected,
        "time/frames_per_second": num_frames / max(updated - started, 1e-9),
        "memory/peak_gib": peak_memory_bytes() / 2**30,
    }


class PlayStatistics:
    """Statistics of each environment's first episode, over several batches.

    Among all episodes that end within so many rounds, short ones would be overrepresented. `names`
    are the agents, in the order of the dimension A.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._episodes: list[EndedEpisodes] = []
        self._sums = MetricSums()

    def add(self, batch: TensorDict) -> None:
        """Add a batch [E, T], with advantages or without.

        It starts with new episodes and is as long as the longest one may be.
        """
        counts_ET = first_episodes(batch)
        self._episodes.append(EpisodeLedger().ended(batch, counts_ET))
        frames = batch[counts_ET]
        self._sums.add(frame_statistics(frames, self.names))
        self._sums.add(policy_figures(frames, self.names))

    def report(self) -> dict[str, Any]:
        """Return the statistics, with `num_episodes` and an interval of the accuracy, by datapoint.

        Means over the frames of a batch are averaged over the batches; all other figures are those
        of all batches together.
        """
        if not self._episodes:
            return {}
        episodes = EndedEpisodes(*(torch.cat(parts) for parts in zip(*self._episodes, strict=True)))
        found: dict[str, Any] = read(episode_statistics(episodes, self.names) | self._sums.result())
        found["num_episodes"] = float(len(episodes.datapoint_N))
        if "mean_accuracy" in found:
            estimate = rate_estimate(episodes.is_correct_N.tolist(), episodes.datapoint_N.tolist())
            found["mean_accuracy_interval"] = [estimate.low, estimate.high]
        return found


def as_of_test(statistics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of test statistics with the prefix `test_` before each figure."""
    return {
        _prefixed(name, "test_"): value
        for name, value in statistics.items()
        if isinstance(value, float)
    }


# ---- episodes of tests


def outcome_rows(
    batch: TensorDict, names: Sequence[str], dataset: Any, hashes: dict[int, str]
) -> list[dict[str, Any]]:
    """Return a row for the first episode of each environment of a batch [E, T], without messages.

    Digests of datapoints of the `dataset` are added to `hashes`.
    """
    counts_ET = first_episodes(batch)
    ended = EpisodeLedger().ended(batch, counts_ET)
    is_end_ET = batch["next", "done"].squeeze(-1) & counts_ET
    y_N = batch["y"].squeeze(-1)[is_end_ET].tolist()
    decision_N = batch["next", "decision"][is_end_ET].tolist()
    rewards_NA = ended.reward_NA.tolist()
    rows = []
    for place, datapoint in enumerate(ended.datapoint_N.tolist()):
        if datapoint not in hashes:
            hashes[datapoint] = _hash_of(dataset[datapoint])
        rows.append(
            {
                "datapoint_id": datapoint,
                "datapoint_hash": hashes[datapoint],
                "y": int(y_N[place]),
                "decision": int(decision_N[place]),
                "is_correct": bool(ended.is_correct_N[place]),
                "num_rounds": int(ended.num_rounds_N[place]),
                "rewards": dict(zip(names, rewards_NA[place], strict=True)),
            }
        )
    return rows


def _hash_of(datapoint: Any) -> str:
    """Return a short digest of the tensors of a datapoint."""
    whole = hashlib.sha256()
    leaves = datapoint.flatten_keys(".").items()
    for name, value in sorted(leaves, key=lambda one: str(one[0])):
        whole.update(json.dumps([name, list(value.shape)]).encode())
        whole.update(value.cpu().contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


# ---- sample episodes

COLUMNS = ("episode", "label", "decision", "is_correct", "rewards", "datapoint", "rounds")
"""Columns of a row of sample episodes; `decision` is 2 if the rounds ended without one."""
TRAIN_TABLE = "train"
NUM_TEST_EPISODES = 12
"""Minimum number of recorded episodes of a test."""


class Span(NamedTuple):
    """A whole episode of a batch: its environment, and its first and last round in the batch."""

    environment: int
    first: int
    last: int


def num_samples(table: str, requested: int) -> int:
    """Return the number of episodes of a batch in a table, if training tables have `requested`."""
    return (
        requested if table == TRAIN_TABLE or requested == 0 else max(requested, NUM_TEST_EPISODES)
    )


def episode_rows(
    batch: TensorDict,
    instance: ProtocolInstance,
    *,
    num_episodes: int,
    step: int,
    seed: int,
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return columns and rows of sampled episodes that begin and end in a batch [E, T].

    Half of the sample are episodes with the right decision and half the others, as far as there
    are enough of each. Cells are plain values for a JSON file. The choice depends on `step` and
    `seed` alone.
    """
    spans = whole_episodes(batch)
    if not spans:
        return COLUMNS, []
    environments, _, lasts = torch.tensor(spans).unbind(dim=1)
    decisions, labels = batch["next", "decision"], batch["y"].squeeze(-1)
    right = (decisions == labels)[environments, lasts].cpu()
    generator = derived_generator(seed, "sample of episodes", step)
    order = torch.randperm(len(right), generator=generator)
    rights, others = order[right[order]].tolist(), order[~right[order]].tolist()
    num_others = min(len(others), max(num_episodes // 2, num_episodes - len(rights)))
    chosen = sorted(rights[: num_episodes - num_others] + others[:num_others])
    return COLUMNS, [_row(batch, spans[number], instance, number) for number in chosen]


def whole_episodes(batch: TensorDictBase) -> list[Span]:
    """Return the episodes that begin and end in a batch, by environment and time."""
    rounds_ET = batch["round"]
    num_steps = rounds_ET.shape[1]
    done_ET = batch["next", "done"].squeeze(-1)
    times_T = torch.arange(num_steps, device=rounds_ET.device)
    # The first end at or after each frame; `num_steps` where the batch ends before the episode.
    ends_ET = torch.where(done_ET, times_T, num_steps)
    ends_ET = ends_ET.flip(1).cummin(dim=1).values.flip(1)
    begins_ET = (rounds_ET == 0) & (ends_ET < num_steps)
    places = begins_ET.nonzero()
    ends = ends_ET[begins_ET]
    return [
        Span(environment, first, last)
        for (environment, first), last in zip(places.tolist(), ends.tolist(), strict=True)
    ]


def _row(
    batch: TensorDictBase, span: Span, instance: ProtocolInstance, number: int
) -> tuple[Any, ...]:
    protocol = instance.protocol_handler
    episode = batch[span.environment, span.first : span.last + 1].cpu()
    label, decision = int(episode["y"][-1]), int(episode["next", "decision"][-1])
    reward_TA = episode["next", "agents", "reward"].squeeze(-1)
    return (
        number,
        label,
        decision,
        decision == label,
        _by_agent(protocol, reward_TA.sum(dim=0)),
        # A frame holds a copy of its row of the dataset.
        instance.describe_datapoint(
            episode[0].select(*instance.train_dataset.keys(), "datapoint_id", strict=False)
        ),
        [_round(frame, protocol) for frame in episode.unbind(0)],
    )


def _round(frame: TensorDictBase, protocol: ProtocolHandler) -> dict[str, Any]:
    moves = [
        move
        for number, name in enumerate(protocol.agent_names)
        if (move := _move(frame, number, name, protocol)) is not None
    ]
    rewards = _by_agent(protocol, frame["next", "agents", "reward"].squeeze(-1))
    return {"round": int(frame["round"]), "moves": moves, "rewards": rewards}


def _move(
    frame: TensorDictBase, number: int, name: str, protocol: ProtocolHandler
) -> dict[str, Any] | None:
    """Return an agent's move in a round; None if it was inactive."""
    active_C = frame["active_mask"][number]
    decides = bool(frame["can_decide"][number])
    if not decides and not bool(active_C.any()):
        return None
    agents = frame["agents"]
    channels = active_C.nonzero().flatten().tolist()

    def messages(kind: str) -> dict[str, list[int]]:
        symbols_CP = agents[kind][number]
        return {protocol.message_channel_names[one]: symbols_CP[one].tolist() for one in channels}

    move = {
        "agent": name,
        "decision": int(agents["decision"][number]) if decides else None,
        "messages": messages("message"),
        "logprob": round(float(agents["logprob"][number]), 6),
    }
    if "linear_message" in agents:
        move["linear"] = messages("linear_message")
    return move


def _by_agent(protocol: ProtocolHandler, rewards_A: Tensor) -> dict[str, float]:
    rounded = [round(reward, 6) for reward in rewards_A.tolist()]
    return dict(zip(protocol.agent_names, rounded, strict=True))

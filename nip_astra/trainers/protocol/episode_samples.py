"""Whole episodes of a batch as rows of a table, for people and for the report.

Shapes: E environments, T rounds played, A agents, C channels, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.scenario_instance import ProtocolInstance
from nip_astra.utils.seeding import derived_generator

COLUMNS = ("episode", "label", "decision", "is_right", "rewards", "datapoint", "rounds")
"""Columns of a row; `decision` is 2 where the rounds ended without one."""
DATAPOINT_KEY = "datapoint_id"
TRAIN_TABLE = "train"
NUM_TEST_EPISODES = 12
"""Episodes of a test that are recorded at least, as it is made once."""


class Span(NamedTuple):
    """A whole episode of a batch: its environment, and its first and last round in the batch."""

    environment: int
    first: int
    last: int


def num_samples(table: str, asked: int) -> int:
    """How many episodes of a batch a table takes, of as many as are asked for in training."""
    return asked if table == TRAIN_TABLE or asked == 0 else max(asked, NUM_TEST_EPISODES)


def episode_rows(
    batch: TensorDict,
    instance: ProtocolInstance,
    *,
    num_episodes: int,
    step: int,
    seed: int,
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Columns and rows of a sample of the episodes that begin and end in a batch.

    Half of the sample are episodes with the right decision and half the others, as far as there
    are enough of each. Cells are plain values for a JSON file.

    Parameters
    ----------
    batch : TensorDict
        [E, T], as the sampler gives it.
    num_episodes : int
        Size of the sample at most.
    step, seed : int
        Iteration, and the experiment's seed; the choice depends on nothing else.
    """
    spans = whole_episodes(batch)
    if not spans:
        return COLUMNS, []
    chosen = _choose(is_right(batch, spans), num_episodes, step=step, seed=seed)
    return COLUMNS, [_row(batch, spans[number], instance, number) for number in chosen]


def whole_episodes(batch: TensorDictBase) -> list[Span]:
    """The episodes that begin and end in a batch, by environment and time."""
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


def is_right(batch: TensorDictBase, spans: Sequence[Span]) -> Tensor:
    """Say of each episode whether the decision that counted is the label, [episodes] bool."""
    environments, _, lasts = torch.tensor(spans).unbind(dim=1)
    decisions = batch["next", "decision"][environments, lasts]
    found: Tensor = decisions == batch["y"].squeeze(-1)[environments, lasts]
    return found.cpu()


def _choose(right: Tensor, num_episodes: int, *, step: int, seed: int) -> list[int]:
    """Draw as many right as other episodes; where one kind is short, the other fills up."""
    generator = derived_generator(seed, "sample of episodes", step)
    order = torch.randperm(len(right), generator=generator)
    rights, others = order[right[order]].tolist(), order[~right[order]].tolist()
    num_others = min(len(others), max(num_episodes // 2, num_episodes - len(rights)))
    return sorted(rights[: num_episodes - num_others] + others[:num_others])


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
        instance.describe_datapoint(_datapoint(episode[0], instance)),
        [_round(frame, protocol) for frame in episode.unbind(0)],
    )


def _datapoint(frame: TensorDictBase, instance: ProtocolInstance) -> TensorDictBase:
    """The row of the dataset that a frame is about; a frame holds a copy of it."""
    names = [*instance.train_dataset.keys(), DATAPOINT_KEY]
    return frame.select(*names, strict=False)


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
    """What an agent did in a round; None where it could do nothing."""
    active_C = frame["active_mask"][number]
    decides = bool(frame["can_decide"][number])
    if not decides and not bool(active_C.any()):
        return None
    agents = frame["agents"]
    channels = active_C.nonzero().flatten().tolist()

    def said(kind: str) -> dict[str, list[int]]:
        symbols_CP = agents[kind][number]
        return {protocol.message_channel_names[one]: symbols_CP[one].tolist() for one in channels}

    move = {
        "agent": name,
        "decision": int(agents["decision"][number]) if decides else None,
        "messages": said("message"),
        "logprob": round(float(agents["logprob"][number]), 6),
    }
    if "linear_message" in agents:
        move["linear"] = said("linear_message")
    return move


def _by_agent(protocol: ProtocolHandler, rewards_A: Tensor) -> dict[str, float]:
    rounded = [round(reward, 6) for reward in rewards_A.tolist()]
    return dict(zip(protocol.agent_names, rounded, strict=True))

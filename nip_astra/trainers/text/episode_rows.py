"""Sample rollouts in words as rows of a table, which reports show as conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nip_astra.samplers.text_rollouts import active_turns
from nip_astra.scenario_base.text.game import TextGame
from nip_astra.trainers.text.statistics import episode_returns
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed

COLUMNS = ("episode", "label", "decision", "is_right", "rewards", "datapoint", "rounds")
"""As tables of tensor games have them; a message is a text here."""


def episode_rows(
    rollouts: NestedArrayDict, game: TextGame, *, num_episodes: int, step: int, seed: int
) -> list[tuple[Any, ...]]:
    """Rows of a sample of rollouts, half of them with the right decision where there are enough."""
    names = game.protocol.agent_names
    is_right_N = rollouts["decision"] == rollouts["y"]
    chosen = _choose(is_right_N.tolist(), num_episodes, derive_seed(seed, "episode rows", step))
    returns_NA = episode_returns(rollouts)
    return [
        (
            place,
            int(rollouts["y"][place]),
            int(rollouts["decision"][place]),
            bool(is_right_N[place]),
            dict(zip(names, returns_NA[place].tolist(), strict=True)),
            _datapoint(rollouts, place),
            _rounds(rollouts, place, game),
        )
        for place in chosen
    ]


def _choose(are_right: Sequence[bool], count: int, seed: int) -> list[int]:
    order = np.random.default_rng(seed).permutation(len(are_right)).tolist()
    right = [place for place in order if are_right[place]]
    other = [place for place in order if not are_right[place]]
    num_right = min(len(right), max(count - count // 2, count - len(other)))
    return sorted(right[:num_right] + other[: count - num_right])


def _datapoint(rollouts: NestedArrayDict, place: int) -> dict[str, Any]:
    columns = rollouts.get("datapoint")
    texts = {} if columns is None else {name: str(one[place]) for name, one in columns.items()}
    return {"kind": "text", "id": int(rollouts["datapoint_id"][place]), "texts": texts}


def _rounds(rollouts: NestedArrayDict, place: int, game: TextGame) -> list[dict[str, Any]]:
    names, channels = game.protocol.agent_names, game.protocol.message_channel_names
    rounds: list[dict[str, Any]] = [
        {
            "round": number,
            "moves": [],
            "rewards": dict(
                zip(names, rollouts["agents", "reward"][place, number].tolist(), strict=True)
            ),
        }
        for number in range(int(rollouts["num_rounds"][place]))
    ]
    for _, number, agent in active_turns(rollouts[place : place + 1]):
        at = (place, number, agent)
        said = zip(channels, rollouts["agents", "message"][at], strict=True)
        is_verifier = names[agent] in game.protocol.verifier_names
        rounds[number]["moves"].append(
            {
                "agent": names[agent],
                "decision": int(rollouts["agents", "decision"][at]) if is_verifier else None,
                "messages": {channel: text for channel, text in said if text is not None},
            }
        )
    return rounds

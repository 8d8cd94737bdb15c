"""Rollouts in words as a `NestedArrayDict`, with everything that was asked, said and earned.

Its batch is the rollouts; a tree of branches has one for each of its ends, and rollouts that share
a beginning hold the same nodes. Keys, with their shapes:

    datapoint_id, seed, y, num_rounds, decision  [N]        decision 2: none
    stance                                       [N, A]     what each prover argued for, y elsewhere
    (datapoint, <column>)                        [N]        the data's own columns
    (node, id), (node, parent)                   [N, R]     missing where the rollout has ended
    padding                                      [N, R]     True there
    (agents, is_active)                          [N, R, A]  who had a turn
    (agents, decision), (agents, reward)         [N, R, A]
    (agents, prompt)                             [N, R, A]  what was asked, as JSON
    (agents, raw_message)                        [N, R, A]  the answer as it was given
    (agents, message)                            [N, R, A, C]
    (agents, num_retries), (agents, is_cut), (agents, is_filled)  [N, R, A]

Shape suffixes: `N` rollout, `R` round, `A` agent, `C` channel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from nip_astra.language_models.services.chat import ChatMessage
from nip_astra.protocols.protocol_base import CONTINUE
from nip_astra.samplers.text_rollouts import TextNode
from nip_astra.scenario_base.text.game import TextGame
from nip_astra.utils.nested_array_dict import (
    BoolArraySpec,
    CompositeSpec,
    FloatArraySpec,
    IntArraySpec,
    NestedArrayDict,
    StringArraySpec,
)


def rollout_spec(game: TextGame, num_rollouts: int) -> CompositeSpec:
    """The keys, types and shapes of so many rollouts, the data's own columns left out."""
    n, r = num_rollouts, game.protocol.max_message_rounds
    a, c = game.protocol.num_agents, game.protocol.num_channels
    move = {
        "is_active": BoolArraySpec((n, r, a)),
        "decision": IntArraySpec((n, r, a)),
        "reward": FloatArraySpec((n, r, a)),
        "prompt": StringArraySpec((n, r, a)),
        "raw_message": StringArraySpec((n, r, a)),
        "message": StringArraySpec((n, r, a, c)),
        "num_retries": IntArraySpec((n, r, a)),
        "is_cut": BoolArraySpec((n, r, a)),
        "is_filled": BoolArraySpec((n, r, a)),
    }
    whole = ("datapoint_id", "seed", "y", "num_rounds", "decision")
    return CompositeSpec(
        {
            **{name: IntArraySpec((n,)) for name in whole},
            "stance": IntArraySpec((n, a)),
            "node": {"id": StringArraySpec((n, r)), "parent": StringArraySpec((n, r))},
            "padding": BoolArraySpec((n, r)),
            "agents": move,
        },
        (n,),
    )


def rollouts_of(game: TextGame, ends: Sequence[TextNode]) -> NestedArrayDict:
    """The rollouts that end in these nodes."""
    rollouts = rollout_spec(game, len(ends)).zero()
    rollouts["agents", "decision"][:] = CONTINUE
    rollouts["decision"][:] = CONTINUE
    rollouts["padding"][:] = True
    for place, end in enumerate(ends):
        _fill(rollouts, place, game, end)
    columns = list(ends[0].episode.datapoint) if ends else []
    for column in columns:
        if column != "y":
            rollouts["datapoint", column] = [end.episode.datapoint[column] for end in ends]
    return rollouts


def _fill(rollouts: NestedArrayDict, place: int, game: TextGame, end: TextNode) -> None:
    episode, agents = end.episode, game.protocol.agent_names
    rollouts["datapoint_id"][place] = episode.datapoint_id
    rollouts["seed"][place] = episode.seed
    rollouts["y"][place] = episode.datapoint["y"]
    rollouts["num_rounds"][place] = episode.round
    rollouts["stance"][place] = [game.stance(agent, episode.datapoint) for agent in agents]
    for number, node in enumerate(end.path()):
        assert node.outcome is not None
        assert node.parent is not None
        at = (place, number)
        rollouts["padding"][at] = False
        rollouts["node", "id"][at] = node.node_id
        rollouts["node", "parent"][at] = node.parent.node_id
        rollouts["agents", "reward"][at] = node.outcome.rewards
        if node.outcome.decision != CONTINUE:
            rollouts["decision"][place] = node.outcome.decision
        for a, agent in enumerate(agents):
            if agent in node.moves:
                _fill_move(rollouts, (*at, a), game, node, agent)


def _fill_move(
    rollouts: NestedArrayDict, at: tuple[int, int, int], game: TextGame, node: TextNode, agent: str
) -> None:
    move, parts = node.moves[agent], rollouts["agents"]
    parts["is_active"][at] = True
    parts["decision"][at] = move.parsed.decision
    parts["prompt"][at] = json.dumps(move.prompt, ensure_ascii=False)
    parts["raw_message"][at] = move.answer
    parts["num_retries"][at] = move.num_retries
    parts["is_cut"][at] = move.is_cut
    parts["is_filled"][at] = move.is_filled
    for channel, text in move.parsed.messages.items():
        parts["message"][(*at, game.protocol.message_channel_names.index(channel))] = text


def read_prompt(text: str) -> tuple[ChatMessage, ...]:
    """The messages that an entry of `(agents, prompt)` holds."""
    return tuple(ChatMessage(role=one["role"], content=one["content"]) for one in json.loads(text))


class ActiveTurn(NamedTuple):
    """A turn that an agent had in a stored rollout."""

    rollout: int
    round: int
    agent: int


def active_turns(rollouts: NestedArrayDict, agent: int | None = None) -> Iterator[ActiveTurn]:
    """The turns of all agents or of one, by rollout, round and agent."""
    for n, r, a in np.argwhere(rollouts["agents", "is_active"]).tolist():
        if agent is None or a == agent:
            yield ActiveTurn(n, r, a)


def transcripts(
    rollouts: NestedArrayDict, agent_names: Sequence[str], channel_names: Sequence[str]
) -> list[dict[str, Any]]:
    """What was said in each rollout, as plain values for people to read.

    A turn has the agent, its messages by channel, its decision where it made one, and the answer as
    it was given.
    """
    found = []
    for n in range(len(rollouts)):
        turns = []
        for _, r, a in active_turns(rollouts[n : n + 1]):
            at = (n, r, a)
            texts = zip(channel_names, rollouts["agents", "message"][at], strict=True)
            turns.append(
                {
                    "round": r,
                    "agent": agent_names[a],
                    "messages": {name: text for name, text in texts if text is not None},
                    "decision": int(rollouts["agents", "decision"][at]),
                    "raw_message": rollouts["agents", "raw_message"][at],
                    "reward": float(rollouts["agents", "reward"][at]),
                }
            )
        found.append(
            {
                "datapoint_id": int(rollouts["datapoint_id"][n]),
                "y": int(rollouts["y"][n]),
                "decision": int(rollouts["decision"][n]),
                "turns": turns,
            }
        )
    return found

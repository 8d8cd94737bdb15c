"""Rollouts whose parts are played by the processes that train a run together.

Each process has the models, with equal weights. Where a rollout is cut hangs on the experiment
alone; the leader tells each process which parts are its own, and what comes back is plain values
and tensors.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nip_astra.distributed.team import Team
from nip_astra.errors import NipAstraError, WorkerProcessError
from nip_astra.language_models.base import TokenCount
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.dialogue import Plan
from nip_astra.samplers.parts import Played, count_others, cut_evenly, play_here, put_together
from nip_astra.scenario_base.agents import ConversationAgent

if TYPE_CHECKING:
    from nip_astra.samplers.trees import TreeSampler

PLAY = "play"
"""Name of the handler that plays a shard of a rollout."""


class _Company(NamedTuple):
    """The processes that play together, and this one's own sampler, of which all have an equal."""

    team: Team
    sampler: TreeSampler


_company: _Company | None = None


@contextmanager
def playing_together(team: Team, sampler: TreeSampler) -> Iterator[None]:
    """Let rollouts of a sampler's agents be divided among a team within the block.

    They are while the leader may ask the others, whose handler `PLAY` is `play_shard` of their own
    sampler.
    """
    global _company
    before = _company
    _company = _Company(team, sampler) if team.size > 1 else None
    try:
        yield
    finally:
        _company = before


def are_played_together(sampler: TreeSampler) -> bool:
    """Say whether other processes have what a sampler plays with, and may be asked now."""
    if _company is None or not _company.team.may_ask:
        return False
    own = _company.sampler
    if type(own) is not type(sampler):
        return False
    is_known = any(sampler.attacker is agent for agent in (own.attacker, own.reference))
    is_own = sampler.target is own.target and sampler.reference is own.reference
    agents = (sampler.attacker, sampler.target, sampler.reference)
    return (
        (is_known and is_own)
        and sampler.reward == own.reward
        and all(
            type(agent) is ConversationAgent and agent.language_model.is_in_this_process
            for agent in agents
        )
    )


def play_together(
    sampler: TreeSampler,
    prompts: Sequence[str],
    plan: Plan,
    first_episode: int,
    pieces: Sequence[range],
) -> RolloutTree:
    """Play the parts of a rollout, each process some of them.

    Raises
    ------
    WorkerProcessError
        When a process could not play its parts.
    """
    assert _company is not None
    team = _company.team
    speaks = "reference" if sampler.attacker is sampler.reference else "attacker"
    asked = {
        "speaks": speaks,
        "asks_reference": sampler.asks_reference,
        "prompts": [str(prompt) for prompt in prompts],
        "plan": [plan.tree_width, plan.tree_depth, list(plan.key)],
        "first_episode": first_episode,
    }
    shards = cut_evenly(range(len(pieces)), team.size)
    arguments = [
        asked | {"pieces": [[one.start, one.stop] for one in pieces[shard.start : shard.stop]]}
        for shard in shards
    ]
    told = team.ask(PLAY, arguments)
    for rank, one in enumerate(told):
        if one["failure"] is not None:
            raise WorkerProcessError(
                f"process {rank} of {team.size} could not play its part of a rollout: "
                f"{one['failure']}"
            )
    played = []
    for shard, one in zip(shards, told, strict=True):
        mine = [prompts[p.start : p.stop] for p in pieces[shard.start : shard.stop]]
        trees = [
            RolloutTree.from_plain(plain, some)
            for plain, some in zip(one["trees"], mine, strict=True)
        ]
        counts = [TokenCount(**count) for count in one["counts"]]
        played.append(Played(trees, counts, one["num_truncated"]))
    count_others((sampler.attacker, sampler.target, sampler.reference), played[1:])
    return put_together([one for one in played if one.trees])


@torch.no_grad()
def play_shard(sampler: TreeSampler, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Play what the leader has asked this process for, in plain values.

    What goes wrong is told, not raised: all processes wait for what each has played.
    """
    try:
        return _play_shard(sampler, asked)
    except NipAstraError as error:
        return {"failure": str(error)}
    except Exception:
        return {"failure": traceback.format_exc()}


def _play_shard(own: TreeSampler, asked: Mapping[str, Any]) -> dict[str, Any]:
    speaker = own.reference if asked["speaks"] == "reference" else own.attacker
    sampler = own.with_attacker(speaker, asks_reference=asked["asks_reference"])
    width, depth, key = asked["plan"]
    play: Callable[[range], RolloutTree] = sampler.player(
        asked["prompts"], Plan(width, depth, tuple(key)), asked["first_episode"]
    )
    agents = (sampler.attacker, sampler.target, sampler.reference)
    played = play_here(play, agents, [range(*piece) for piece in asked["pieces"]])
    return {
        "failure": None,
        "trees": [tree.to_plain() for tree in played.trees],
        "counts": [asdict(count) for count in played.counts],
        "num_truncated": played.num_truncated,
    }

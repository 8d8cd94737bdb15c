"""Rollouts whose parts are played by the processes that train a run together.

Each process has the models, with equal weights. Where a rollout is cut depends on the experiment
alone; the leader tells each process which parts are its own, and what comes back is plain values
and tensors.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nip_astra.distributed.team import Team
from nip_astra.errors import NipAstraError, WorkerProcessError
from nip_astra.language_models.base import TokenCount
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.dialogue import Plan
from nip_astra.samplers.parts import Part, Played, count_others, play_here
from nip_astra.scenario_base.agents import ConversationAgent, Speaker
from nip_astra.scenario_base.text_attackers import TextAttacker
from nip_astra.utils.cutting import cut_evenly

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
) -> list[Played[RolloutTree]]:
    """Play the parts of a rollout, each process some of them.

    Raises
    ------
    WorkerProcessError
        When a process could not play its parts.
    """
    assert _company is not None
    speaks = "reference" if sampler.attacker is sampler.reference else "attacker"
    asked = {
        "speaks": speaks,
        "asks_reference": sampler.asks_reference,
        "prompts": [str(prompt) for prompt in prompts],
        "plan": [plan.tree_width, plan.tree_depth, list(plan.key)],
        "first_episode": first_episode,
    }
    agents = (sampler.attacker, sampler.target, sampler.reference)

    def read(plain: Any, piece: range) -> RolloutTree:
        return RolloutTree.from_plain(plain, prompts[piece.start : piece.stop])

    return play_on_team(_company.team, PLAY, asked, pieces, agents, read)


def play_on_team(
    team: Team,
    name: str,
    asked: Mapping[str, Any],
    pieces: Sequence[range],
    agents: Sequence[Speaker | TextAttacker],
    read: Callable[[Any, range], Part],
) -> list[Played[Part]]:
    """Have each process of a team play some parts of a rollout.

    Parameters
    ----------
    name : str
        Of the handler, which plays the `pieces` that it is asked for and gives what `told_of` does.
    asked : Mapping
        Plain values, the same for all.
    pieces : Sequence[range]
        The episodes, or problems, of each part.
    read : Callable
        Makes of a part's plain value what was played.

    Returns
    -------
    list of Played
        What each process played, in the order of the parts, but for those that had none.

    Raises
    ------
    WorkerProcessError
        When a process could not play its parts.
    """
    shards = [pieces[run.start : run.stop] for run in cut_evenly(range(len(pieces)), team.size)]
    told = team.ask(
        name,
        [{**asked, "pieces": [[one.start, one.stop] for one in shard]} for shard in shards],
    )
    for rank, one in enumerate(told):
        if one["failure"] is not None:
            raise WorkerProcessError(
                f"process {rank} of {team.size} could not play its part of a rollout: "
                f"{one['failure']}"
            )
    played = [
        Played(
            [read(plain, piece) for plain, piece in zip(one["parts"], shard, strict=True)],
            [TokenCount(**count) for count in one["counts"]],
            one["num_truncated"],
        )
        for shard, one in zip(shards, told, strict=True)
    ]
    count_others(agents, played[1:])
    return [one for one in played if one.parts]


def told_of(play: Callable[[], Played[Part]], write: Callable[[Part], Any]) -> dict[str, Any]:
    """What a process tells the leader of the parts that it plays, in plain values.

    What goes wrong is told, not raised: all processes wait for what each has played.

    Parameters
    ----------
    write : Callable
        Makes plain values of a part.
    """
    try:
        played = play()
        return {
            "failure": None,
            "parts": [write(part) for part in played.parts],
            "counts": [asdict(count) for count in played.counts],
            "num_truncated": played.num_truncated,
        }
    except NipAstraError as error:
        return {"failure": str(error)}
    except Exception:
        return {"failure": traceback.format_exc()}


@torch.no_grad()
def play_shard(sampler: TreeSampler, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Play what the leader has asked this process for, in plain values."""
    return told_of(partial(_play_shard, sampler, asked), RolloutTree.to_plain)


def _play_shard(own: TreeSampler, asked: Mapping[str, Any]) -> Played[RolloutTree]:
    speaker = own.reference if asked["speaks"] == "reference" else own.attacker
    sampler = own.with_attacker(speaker, asks_reference=asked["asks_reference"])
    width, depth, key = asked["plan"]
    play: Callable[[range], RolloutTree] = sampler.player(
        asked["prompts"], Plan(width, depth, tuple(key)), asked["first_episode"]
    )
    agents = (sampler.attacker, sampler.target, sampler.reference)
    return play_here([partial(play, range(*piece)) for piece in asked["pieces"]], agents)

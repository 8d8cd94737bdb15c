"""Rollouts that are cut into parts, which several processes play at once.

Where a rollout is cut depends on the experiment alone: the last digits of what models say depend on
the rows that a batch has. How many processes play the parts depends on the machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Generic, NamedTuple, TypeVar

from nip_astra.language_models.base import TokenCount, TokenModel, TokenSampler
from nip_astra.scenario_base.agents import ConversationAgent, Speaker
from nip_astra.scenario_base.chat_agent import ChatWork
from nip_astra.scenario_base.text_attackers import TextAttacker
from nip_astra.utils.actors import are_actors_used, get_actors
from nip_astra.utils.cutting import cut_evenly
from nip_astra.utils.forked import call_at_once, get_num_processes
from nip_astra.utils.processor import SMALL_MODEL_PARAMETERS

logger = logging.getLogger(__name__)

SMALLEST_PART = 64
"""Nodes for which it is worth to fork a process, which takes as long as some of them do."""

Part = TypeVar("Part")
"""What playing a part of a rollout gives, for instance a tree."""


class Played(NamedTuple, Generic[Part]):
    """What a process played, part by part, and what its agents counted meanwhile."""

    parts: list[Part]
    counts: list[TokenCount]
    num_truncated: list[int]


def cut_rollout(
    agents: Sequence[Speaker | TextAttacker],
    num_episodes: int,
    num_nodes: int,
    num_parts: int,
    *,
    is_played_together: bool = False,
) -> list[range]:
    """Cut the episodes of a rollout into equal parts.

    Parameters
    ----------
    num_nodes : int
        Of all episodes together.
    num_parts : int
        At most so many parts; fewer where they would be small, and one for large models, models on
        a GPU, and agents or backends that a process of its own could not play. Actors play large
        models too.
    is_played_together : bool
        Whether other processes have the models, however large, and play parts.
    """
    count = min(num_parts, num_episodes, num_nodes // SMALLEST_PART)
    if count <= 1 or not (is_played_together or all(map(_can_be_divided, agents))):
        return [range(num_episodes)]
    return cut_evenly(range(num_episodes), count)


def play_parts(
    plays: Sequence[Callable[[], Part]],
    agents: Sequence[Speaker | TextAttacker],
    most_processes: int,
) -> list[Played[Part]]:
    """Play the parts of a rollout, in at most as many processes as the run may use.

    Tokens are counted as if this process had played all of it.

    Parameters
    ----------
    plays : Sequence[Callable]
        Each plays a part, with the agents.

    Returns
    -------
    list of Played
        What each process played, in the order of the parts.
    """
    if are_played_by_actors(agents):
        return begin_parts(plays, agents)()
    agents = _each_once(agents)
    num_processes = min(get_num_processes(), most_processes, len(plays))
    if num_processes <= 1:
        return [Played([play() for play in plays], [], [])]
    for model in _models_of(agents):
        # Weights are laid out here, once for all processes.
        if isinstance(model, TokenSampler):
            model.open_session().close()
    runs = [plays[run.start : run.stop] for run in cut_evenly(range(len(plays)), num_processes)]
    mine, *others = call_at_once([partial(play_here, run, agents) for run in runs])
    count_others(agents, others)
    return [mine, *others]


def begin_parts(
    plays: Sequence[Callable[[], Part]], agents: Sequence[Speaker | TextAttacker]
) -> Callable[[], list[Played[Part]]]:
    """Have actors begin the parts of a rollout; what it gives waits for them and counts tokens.

    Each part is a call of its own, so that who is faster plays more of them.
    """
    agents = _each_once(agents)
    actors = get_actors()
    assert actors is not None
    models = [model for model in _all_models_of(agents) if not isinstance(model, ChatWork)]
    kept = [part for model in models for part in (*model.shared_parts(), model)]
    wait = actors.begin([partial(play_here, [play], agents) for play in plays], kept)

    def finish() -> list[Played[Part]]:
        played = wait()
        count_others(agents, played)
        return played

    return finish


def are_played_by_actors(agents: Sequence[Speaker | TextAttacker]) -> bool:
    """Say whether actors play what these agents say; they cannot, where one has a connection."""
    if not are_actors_used():
        return False
    others = [agent.role for agent in agents if not _can_be_copied(agent)]
    if others:
        _warn_once(", ".join(dict.fromkeys(others)))
    return not others


@cache
def _warn_once(roles: str) -> None:
    logger.warning(
        "rollouts are played in this process, though actors were asked for: a copy of the %s "
        "cannot speak in another one. Requests to a local chat model are divided all the same",
        roles,
    )


def can_be_forked(agents: Sequence[Speaker | TextAttacker]) -> bool:
    """Say whether forked processes can play what these agents say: of small models on the CPU."""
    return all(map(_can_be_forked, agents))


def count_others(agents: Sequence[Speaker | TextAttacker], others: Sequence[Played[Part]]) -> None:
    """Count what other processes did as if this one had."""
    agents = _each_once(agents)
    for played in others:
        for model, spent in zip(_models_of(agents), played.counts, strict=True):
            model.token_count.add(spent)
        for agent, added in zip(agents, played.num_truncated, strict=True):
            agent.num_truncated_contexts += added


def _each_once(agents: Sequence[Speaker | TextAttacker]) -> list[Speaker | TextAttacker]:
    return list({id(agent): agent for agent in agents}.values())


def play_here(
    plays: Sequence[Callable[[], Part]], agents: Sequence[Speaker | TextAttacker]
) -> Played[Part]:
    """Play parts in this process, and say what its agents counted meanwhile."""
    agents = _each_once(agents)
    before = [agent.num_truncated_contexts for agent in agents]
    with ExitStack() as stack:
        counts = [stack.enter_context(model.counting()) for model in _models_of(agents)]
        parts = [play() for play in plays]
    after = [agent.num_truncated_contexts for agent in agents]
    return Played(parts, counts, [new - old for new, old in zip(after, before, strict=True)])


def _can_be_divided(agent: Speaker | TextAttacker) -> bool:
    return _can_be_forked(agent) or (are_actors_used() and _can_be_copied(agent))


def _can_be_forked(agent: Speaker | TextAttacker) -> bool:
    # An agent of another class may keep what only its own process would know.
    models = list(_all_models_of([agent]))
    is_known = type(agent) is ConversationAgent and all(
        getattr(model, "can_be_forked", False) for model in models
    )
    return is_known and max(model.num_parameters() for model in models) < SMALL_MODEL_PARAMETERS


def _can_be_copied(agent: Speaker | TextAttacker) -> bool:
    return type(agent) is ConversationAgent and all(
        getattr(model, "can_be_copied", False) for model in _all_models_of([agent])
    )


def _models_of(agents: Sequence[Speaker | TextAttacker]) -> list[TokenModel | ChatWork]:
    """The agents' models, one of those that share a count."""
    return list({id(model.token_count): model for model in _all_models_of(agents)}.values())


def _all_models_of(agents: Sequence[Speaker | TextAttacker]) -> Iterator[TokenModel | ChatWork]:
    """The agents' models, behind those that speak for them."""
    for agent in agents:
        yield from getattr(agent.language_model, "voices", ())
        yield agent.language_model

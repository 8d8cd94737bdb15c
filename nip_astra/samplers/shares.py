"""Episodes of one rollout, played by several processes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from nip_astra.language_models.base import LanguageModel, TokenCount
from nip_astra.rollouts.tree import RolloutTree, merge_trees
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.utils.forked import call_at_once, get_num_processes

SMALLEST_SHARE = 64
"""Nodes for which it is worth to fork a process, which takes as long as some of them do."""

Play = Callable[[range], RolloutTree]
"""Plays some of the episodes of a rollout."""


class _Played(NamedTuple):
    """What a process played, and what its agents counted meanwhile."""

    tree: RolloutTree
    counts: list[TokenCount]
    num_truncated: list[int]


def num_shares(agents: Sequence[ConversationAgent], num_episodes: int, num_nodes: int) -> int:
    """Give how many processes play a rollout.

    Parameters
    ----------
    num_nodes : int
        Of all episodes together.
    """
    count = min(get_num_processes(), num_episodes, num_nodes // SMALLEST_SHARE)
    return count if count > 1 and all(map(_can_be_forked, agents)) else 1


def play_at_once(
    play: Play, agents: Sequence[ConversationAgent], num_episodes: int, count: int
) -> RolloutTree:
    """Play a rollout in `count` processes; tokens are counted as if this one had played it.

    Its seconds are those of the process that took the longest.
    """
    agents = list({id(agent): agent for agent in agents}.values())
    for model in _models_of(agents):
        # Weights are laid out here, once for all processes.
        model.open_session().close()
    ends = [num_episodes * share // count for share in range(count + 1)]
    shares = [range(start, stop) for start, stop in pairwise(ends)]
    mine, *others = call_at_once([partial(_play, play, agents, share) for share in shares])
    for played in others:
        for model, spent in zip(_models_of(agents), played.counts, strict=True):
            model.token_count.add(spent)
        for agent, added in zip(agents, played.num_truncated, strict=True):
            agent.num_truncated_contexts += added
    trees = [mine.tree, *(played.tree for played in others)]
    tree = merge_trees(trees)
    tree.seconds = {name: max(t.seconds[name] for t in trees) for name in mine.tree.seconds}
    return tree


def _play(play: Play, agents: Sequence[ConversationAgent], share: range) -> _Played:
    before = [agent.num_truncated_contexts for agent in agents]
    with ExitStack() as stack:
        counts = [stack.enter_context(model.counting()) for model in _models_of(agents)]
        tree = play(share)
    after = [agent.num_truncated_contexts for agent in agents]
    return _Played(tree, counts, [new - old for new, old in zip(after, before, strict=True)])


def _can_be_forked(agent: ConversationAgent) -> bool:
    # An agent of another class may keep what only its own process would know.
    is_known = type(agent) is ConversationAgent
    return is_known and getattr(agent.language_model, "can_be_forked", False)


def _models_of(agents: Sequence[ConversationAgent]) -> list[LanguageModel]:
    """Give the agents' models, one of those that share a count."""
    models = (agent.language_model for agent in agents)
    return list({id(model.token_count): model for model in models}.values())

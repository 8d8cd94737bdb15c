"""Values of the nodes of rollout trees, and pairs of answers of which one did better.

A node is a round that was played: what all agents did in it, and what it paid. Siblings are other
moves in the same round. Shape suffixes: `A` agent.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nip_astra.language_models.services.fine_tuning import PreferenceExample
from nip_astra.samplers.text_arrays import read_prompt
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed

Floats = npt.NDArray[np.float64]


@dataclass
class ValuedNode:
    """A round of a tree of rollouts.

    Attributes
    ----------
    parent_id : str
        The round before, or the start, which is no node.
    place : tuple of int
        Rollout and round of the arrays in which it is found.
    rewards_A : ndarray
        What it paid.
    children : list of str
        The rounds after it, one a branch.
    values_A : ndarray
        What it and all that follows pay on average.
    """

    parent_id: str
    place: tuple[int, int]
    rewards_A: Floats
    children: list[str] = field(default_factory=list)
    values_A: Floats = field(default_factory=lambda: np.zeros(0))


def valued_nodes(rollouts: NestedArrayDict) -> dict[str, ValuedNode]:
    """All nodes of trees by their ids, with their values.

    `V(n) = r(n) + mean of V(c) over the children c`, for each agent: the mean, over the ways in
    which the tree goes on, of what is earned from this round on. Each way of a node counts alike,
    however many ends it has, so that V estimates what the agents' own play would earn.
    """
    nodes: dict[str, ValuedNode] = {}
    ids, parents = rollouts["node", "id"], rollouts["node", "parent"]
    for place, number in np.argwhere(~rollouts["padding"]).tolist():
        name = str(ids[place, number])
        if name not in nodes:
            rewards_A = rollouts["agents", "reward"][place, number]
            nodes[name] = ValuedNode(str(parents[place, number]), (place, number), rewards_A)
    for name, node in nodes.items():
        if node.parent_id in nodes:
            nodes[node.parent_id].children.append(name)
    for node in sorted(nodes.values(), key=lambda one: -one.place[1]):
        following = [nodes[child].values_A for child in node.children]
        node.values_A = node.rewards_A + (np.mean(following, axis=0) if following else 0.0)
    return nodes


@dataclass(frozen=True)
class AnswerPair:
    """Two answers of an agent to the same messages, of which one did better.

    Attributes
    ----------
    preferred_value, rejected_value : float
        Values of the agent after them.
    """

    agent: str
    example: PreferenceExample
    preferred_value: float
    rejected_value: float


def preference_pairs(
    rollouts: NestedArrayDict,
    agent_names: Sequence[str],
    mid_points: Mapping[str, float],
    *,
    seed: int,
) -> list[AnswerPair]:
    """A pair for each agent of each place of a tree where one of its answers did well and one not.

    An answer did well where the agent's value of its node is at least the agent's mid-point. Of
    several that did well, and of several that did not, one is drawn, such that the two texts
    differ. The opening round counts as any other.

    Parameters
    ----------
    mid_points : Mapping of float
        By agent; see `ProtocolHandler.reward_mid_point_estimate`.
    """
    nodes = valued_nodes(rollouts)
    siblings: dict[str, list[str]] = {}
    for name, node in nodes.items():
        siblings.setdefault(node.parent_id, []).append(name)
    pairs = []
    for parent_id, names in siblings.items():
        for number, agent in enumerate(agent_names):
            generator = random.Random(derive_seed(seed, "pair", parent_id, agent))
            pair = _pair(
                rollouts, [nodes[name] for name in names], number, mid_points[agent], generator
            )
            if pair is not None:
                pairs.append(AnswerPair(agent, *pair))
    return pairs


def _pair(
    rollouts: NestedArrayDict,
    nodes: Sequence[ValuedNode],
    agent: int,
    mid_point: float,
    generator: random.Random,
) -> tuple[PreferenceExample, float, float] | None:
    spoken = [one for one in nodes if _has_answer(rollouts, one, agent)]
    good = [one for one in spoken if one.values_A[agent] >= mid_point]
    bad = [one for one in spoken if one.values_A[agent] < mid_point]
    if not good or not bad:
        return None
    raw = rollouts["agents", "raw_message"]
    texts = {one.place: str(raw[(*one.place, agent)]) for one in spoken}
    better, worse = generator.choice(good), generator.choice(bad)
    if texts[better.place] == texts[worse.place]:
        # What follows made the difference there; another pair may have something to prefer.
        differing = [
            (one, other) for one in good for other in bad if texts[one.place] != texts[other.place]
        ]
        if not differing:
            return None
        better, worse = generator.choice(differing)
    prompt = read_prompt(rollouts["agents", "prompt"][(*better.place, agent)])
    example = PreferenceExample(prompt, texts[better.place], texts[worse.place])
    return example, float(better.values_A[agent]), float(worse.values_A[agent])


def _has_answer(rollouts: NestedArrayDict, node: ValuedNode, agent: int) -> bool:
    at = (*node.place, agent)
    return bool(rollouts["agents", "is_active"][at] and not rollouts["agents", "is_filled"][at])

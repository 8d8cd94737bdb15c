"""Values of the nodes of text rollout trees, and preference pairs of answers.

A node is one round: the moves of all agents and their rewards. Siblings are other moves in the same
round. Shape suffixes: `N` node, `A` agent.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nip_astra.language_models.services.fine_tuning import PreferenceExample
from nip_astra.rl_objectives.advantages import mean_child_return
from nip_astra.samplers.text_rollouts import read_prompt
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed


class TreeValues(NamedTuple):
    """The nodes of trees, a row each.

    Attributes
    ----------
    node_ids, parent_ids : list of str
        Ids of the nodes and of the rounds before; the parent of an opening round is no node.
    places : list of tuple
        Rollout and round of the arrays that hold each node.
    values_NA : Tensor
        Mean over continuations of the rewards from this round on, float64.
    """

    node_ids: list[str]
    parent_ids: list[str]
    places: list[tuple[int, int]]
    values_NA: Tensor


def tree_values(rollouts: NestedArrayDict) -> TreeValues:
    """All nodes of trees with their values.

    `V(n) = r(n) + mean of V(c) over the children c`, for each agent. Each child counts alike,
    however many ends it has, so that V estimates the return of the agents' own policy.
    """
    ids, parents = rollouts["node", "id"], rollouts["node", "parent"]
    places: dict[str, tuple[int, int]] = {}
    for rollout, number in zip(*(~rollouts["padding"]).nonzero(), strict=True):
        places.setdefault(str(ids[rollout, number]), (int(rollout), int(number)))
    rows = {name: row for row, name in enumerate(places)}
    parent_ids = [str(parents[place]) for place in places.values()]
    parent_N = torch.tensor([rows.get(name, -1) for name in parent_ids], dtype=torch.int64)
    depth_N = torch.tensor([number for _, number in places.values()], dtype=torch.int64)
    rewards = rollouts["agents", "reward"]
    rewards_NA = [rewards[place].tolist() for place in places.values()]
    rewards_AN = torch.tensor(rewards_NA, dtype=torch.float64).t()
    values_AN = [mean_child_return(one, parent_N, depth_N, discount=1.0) for one in rewards_AN]
    values_NA = torch.stack(values_AN, dim=1) if values_AN else torch.zeros(0, 0)
    return TreeValues(list(places), parent_ids, list(places.values()), values_NA)


@dataclass(frozen=True)
class AnswerPair:
    """A preference pair: two answers of an agent to the same messages.

    Attributes
    ----------
    preferred_value, rejected_value : float
        The agent's values of their nodes.
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
    """One pair for each agent and parent node with an answer that did well and one that did not.

    An answer did well if the agent's value of its node is at least the agent's mid-point. Of
    several candidates one is drawn, such that the two texts differ.

    Parameters
    ----------
    mid_points : Mapping of float
        By agent; see `ProtocolHandler.reward_mid_point_estimate`.
    """
    tree = tree_values(rollouts)
    siblings: dict[str, list[int]] = {}
    for node, parent in enumerate(tree.parent_ids):
        siblings.setdefault(parent, []).append(node)
    pairs = []
    for parent, nodes in siblings.items():
        for number, agent in enumerate(agent_names):
            generator = random.Random(derive_seed(seed, "pair", parent, agent))
            answers = [
                _Answer(str(rollouts["agents", "raw_message"][at]), value, at)
                for node in nodes
                if _has_answer(rollouts, at := (*tree.places[node], number))
                for value in [float(tree.values_NA[node, number])]
            ]
            drawn = _draw_pair(answers, mid_points[agent], generator)
            if drawn is not None:
                better, worse = drawn
                prompt = read_prompt(rollouts["agents", "prompt"][better.at])
                example = PreferenceExample(prompt, better.text, worse.text)
                pairs.append(AnswerPair(agent, example, better.value, worse.value))
    return pairs


class _Answer(NamedTuple):
    text: str
    value: float
    at: tuple[int, int, int]


def _has_answer(rollouts: NestedArrayDict, at: tuple[int, int, int]) -> bool:
    return bool(rollouts["agents", "is_active"][at] and not rollouts["agents", "is_filled"][at])


def _draw_pair(
    answers: Sequence[_Answer], mid_point: float, generator: random.Random
) -> tuple[_Answer, _Answer] | None:
    good = [one for one in answers if one.value >= mid_point]
    bad = [one for one in answers if one.value < mid_point]
    if not good or not bad:
        return None
    better, worse = generator.choice(good), generator.choice(bad)
    if better.text != worse.text:
        return better, worse
    # Their continuations made the difference; another pair may differ in its texts.
    differing = [(one, other) for one in good for other in bad if one.text != other.text]
    return generator.choice(differing) if differing else None

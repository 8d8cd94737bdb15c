"""Multi-agent training of chat models with trees of responses.

A node of a tree is one round: the moves of all agents and their rewards. Siblings are other moves
in the same round. Shape suffixes: `N` node, `A` agent.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.language_models.services.fine_tuning import PreferenceExample
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.advantages import mean_child_return
from nip_astra.samplers.text_rollouts import read_prompt
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed


@register_trainer(TrainerType.PURE_TEXT_MALT)
class PureTextMaltTrainer(PureTextRlTrainer):
    """MALT: DPO on pairs of answers, from trees of responses.

    In each round of a rollout all agents answer several times, which makes a tree. The value of a
    round for an agent is `V(n) = r(n) + mean of V(c) over its children c` (arXiv:2412.01928,
    section 4). Where an answer of an agent has a value of at least the mid-point of its rewards,
    and a sibling one below, the two make a pair; a group's model is trained by DPO on the pairs
    of its agents.
    """

    never_reads: ClassVar[tuple[str, ...]] = ("text_rl.verifier_guess_replacement_*",)

    class Parameters(SubParameters):
        """Trees of responses, and DPO on their pairs."""

        num_responses_per_timestep: int = Field(default=2, ge=2, le=10_000)
        """Continuations of each conversation in each round. A conversation of R rounds has up to
        this to the power of R ends."""
        dpo_beta: float | None = Field(default=None, gt=0)
        """Inverse temperature of DPO; null uses the service's default. Larger stays closer to the
        job's initial model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_branches = self.parameters.num_responses_per_timestep

    def _stage_create_fine_tune_jobs(self, rollouts: NestedArrayDict) -> None:
        protocol = self.game.protocol
        mid_points = {name: protocol.reward_mid_point_estimate(name) for name in self.agent_names}
        pairs = preference_pairs(
            rollouts, self.agent_names, mid_points, seed=self.hyper_params.seed
        )
        for group in self.shared_model_groups.values():
            names = {agent.name for agent in group.agents}
            examples = [pair.example for pair in pairs if pair.agent in names]
            group.create_dpo_fine_tune_job(examples, beta=self.parameters.dpo_beta)


class TreeValues(NamedTuple):
    """The nodes of trees, one row each.

    Attributes
    ----------
    node_ids, parent_ids : list of str
        Ids of the nodes and of the rounds before; the parent of an opening round is not a node.
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
    """Return all nodes of trees with their values.

    Each child weighs the same, however many ends it has, so that V estimates the return of the
    agents' own policy.
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


class AnswerPair(NamedTuple):
    """A preference pair: two answers of an agent to the same messages."""

    agent: str
    example: PreferenceExample


class _Answer(NamedTuple):
    text: str
    at: tuple[int, int, int]


def preference_pairs(
    rollouts: NestedArrayDict,
    agent_names: Sequence[str],
    mid_points: Mapping[str, float],
    *,
    seed: int,
) -> list[AnswerPair]:
    """Return one pair for each agent and parent node with a good and a bad answer.

    An answer is good if the agent's value of its node is at least the agent's mid-point, see
    `ProtocolHandler.reward_mid_point_estimate`. Of several candidates one is drawn, such that the
    two texts differ.
    """
    tree = tree_values(rollouts)
    siblings: dict[str, list[int]] = {}
    for node, parent in enumerate(tree.parent_ids):
        siblings.setdefault(parent, []).append(node)
    agents = rollouts["agents"]
    pairs = []
    for parent, nodes in siblings.items():
        for number, agent in enumerate(agent_names):
            good: list[_Answer] = []
            bad: list[_Answer] = []
            for node in nodes:
                at = (*tree.places[node], number)
                if agents["is_active"][at] and not agents["is_filled"][at]:
                    is_good = float(tree.values_NA[node, number]) >= mid_points[agent]
                    (good if is_good else bad).append(_Answer(str(agents["raw_message"][at]), at))
            generator = random.Random(derive_seed(seed, "pair", parent, agent))
            drawn = _draw_pair(good, bad, generator)
            if drawn is not None:
                better, worse = drawn
                prompt = read_prompt(agents["prompt"][better.at])
                example = PreferenceExample(prompt, better.text, worse.text)
                pairs.append(AnswerPair(agent, example))
    return pairs


def _draw_pair(
    good: Sequence[_Answer], bad: Sequence[_Answer], generator: random.Random
) -> tuple[_Answer, _Answer] | None:
    if not good or not bad:
        return None
    better, worse = generator.choice(good), generator.choice(bad)
    if better.text != worse.text:
        return better, worse
    # Their continuations made the difference; another pair may differ in its texts.
    differing = [(one, other) for one in good for other in bad if one.text != other.text]
    return generator.choice(differing) if differing else None

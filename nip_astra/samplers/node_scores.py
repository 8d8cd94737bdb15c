"""What the nodes of a tree are worth: the scores of what was said, and what the reward weighs."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field

from nip_astra.parameters.parameters_base import SubParameters, polymorphic
from nip_astra.reward_terms.base import REWARD_TERMS, RewardTerm
from nip_astra.rollouts.prompts import columns_of
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.scenario_base.chat_agent import NOT_ASKED
from nip_astra.scorers.base import Exchange, Message, Ratings, Scorer

RewardTermParameters = polymorphic(REWARD_TERMS.get, RewardTerm.Parameters)


class RewardParameters(SubParameters):
    """Weights of the reward of a node (arXiv:2407.09447, section 3.2)."""

    w_response: float = Field(default=1.0, ge=0)
    """Weight of the response's score. Larger seeks failures more."""
    w_combined: float = Field(default=0.5, ge=0)
    """Weight of the score of probe and response together."""
    w_likelihood: float = Field(default=0.1, ge=0)
    """Reward lost per nat of the probe's mean negative log-likelihood per token. Larger keeps
    probes closer to ordinary conversation."""
    likelihood_model: Literal["target", "reference"] = "reference"
    """Under which model a probe's likelihood is taken: the target, as in the paper, or the
    reference, which is the attacker before training, that is, ordinary conversation."""
    terms: list[RewardTermParameters] = []  # type: ignore[valid-type]
    """What training adds to the reward, for instance for novelty; evaluations leave it out, since
    it depends on what was found before."""


def rate_nodes(scorer: Scorer, tree: RolloutTree) -> tuple[Ratings, Ratings]:
    """Rate every response, and every probe and response together, in one call.

    A response that failed is not rated: its score is NaN and an error, and those of what was said
    after it are unknown.
    """
    failures = tree.failures_of_nodes()
    there = [node for node, failure in enumerate(failures) if failure is None]
    exchanges, has_both = _exchanges(scorer, tree, there)
    rated = scorer.rate(exchanges) if exchanges else Ratings(torch.zeros(0), torch.zeros(0) > 0)
    is_error_N = torch.tensor([failure not in (None, NOT_ASKED) for failure in failures])
    if len(there) == len(failures) and has_both:
        return rated, rated
    found = []
    for number in range(1 if has_both else 2):
        part = slice(number * len(there), (number + 1) * len(there))
        scores_N = torch.full((len(failures),), math.nan)
        errors_N = is_error_N.clone()
        scores_N[there], errors_N[there] = rated.scores_N[part], rated.is_error_N[part]
        found.append(Ratings(scores_N, errors_N))
    return found[0], found[-1]


def _exchanges(scorer: Scorer, tree: RolloutTree, there: list[int]) -> tuple[list[Exchange], bool]:
    """What is rated of some nodes: responses, then both together unless one is the other."""
    if not scorer.reads_history:
        responses = [Exchange(tree.responses[node]) for node in there]
        both = [Exchange(f"{tree.probes[node]} {tree.responses[node]}") for node in there]
        return [*responses, *both], False
    # Who reads the conversation has seen the probe when it rates the response.
    histories: list[tuple[Message, ...]] = []
    places = zip(tree.nodes["parent"].tolist(), tree.nodes["episode"].tolist(), strict=True)
    for (parent, episode), probe in zip(places, tree.probes, strict=True):
        if parent < 0:
            before: tuple[Message, ...] = (Message("assistant", tree.prompts[episode]),)
        else:
            before = (*histories[parent], Message("assistant", tree.responses[parent]))
        histories.append((*before, Message("user", probe)))
    episodes = tree.nodes["episode"].tolist()
    return [
        Exchange(
            tree.responses[node],
            histories[node],
            columns=columns_of(tree.prompts[episodes[node]]),
        )
        for node in there
    ], True

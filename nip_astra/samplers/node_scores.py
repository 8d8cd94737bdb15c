"""What the nodes of a tree are worth: the scores of what was said, and what the reward weighs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nip_astra.parameters.parameters_base import SubParameters, polymorphic
from nip_astra.reward_terms.base import RewardTerm
from nip_astra.reward_terms.registry import REWARD_TERMS
from nip_astra.rollouts.prompts import columns_of
from nip_astra.rollouts.tree import RolloutTree
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
    """Rate every response, and every probe and response together, in one call."""
    turns = list(zip(tree.probes, tree.responses, strict=True))
    if scorer.reads_history:
        # Who reads the conversation has seen the probe when it rates the response.
        histories: list[tuple[Message, ...]] = []
        places = zip(tree.nodes["parent"].tolist(), tree.nodes["episode"].tolist(), strict=True)
        for (parent, episode), probe in zip(places, tree.probes, strict=True):
            if parent < 0:
                before: tuple[Message, ...] = (Message("assistant", tree.prompts[episode]),)
            else:
                before = (*histories[parent], Message("assistant", tree.responses[parent]))
            histories.append((*before, Message("user", probe)))
        beside = [columns_of(tree.prompts[one]) for one in tree.nodes["episode"].tolist()]
        both = scorer.rate(
            [
                Exchange(response, history, columns=columns)
                for response, history, columns in zip(
                    tree.responses, histories, beside, strict=True
                )
            ]
        )
        return both, both
    texts = [*tree.responses, *(f"{probe} {response}" for probe, response in turns)]
    rated = scorer.rate([Exchange(text) for text in texts])
    count = len(turns)
    return (
        Ratings(rated.scores_N[:count], rated.is_error_N[:count]),
        Ratings(rated.scores_N[count:], rated.is_error_N[count:]),
    )

"""Trainers on preference pairs: the pairs, and the ratios that losses compare.

Shape suffixes: `N` node, `P` pair or group of siblings, `G` sibling, `B` row, `T` token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.language_models.base import pad_left, pad_right
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.preference import sequence_logprobs
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.executor import AsyncRolloutParameters
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.prompts import read_prompts
from nip_astra.trainers.ast.rewards import CreditParameters
from nip_astra.trainers.ast_base import AstTrainer
from nip_astra.utils.seeding import derived_generator


class WeakSupervisionParameters(SubParameters):
    """Given probes that win against the attacker's own (ASTPrompter, arXiv:2407.09447)."""

    probes: str
    """File of probes, in the formats of prompt files; `scenario://file` or a path."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Share of episodes whose pairs are replaced by one: a given probe against the attacker's worst
    answer to the opening. Larger imitates more and searches less."""


class PairParameters(AsyncRolloutParameters):
    """Strength of the preference and choice of pairs.

    Played ahead, pairs are of probes that an older attacker said. Their losses hold for pairs of
    whoever said them, so nothing is corrected.
    """

    beta: float = Field(default=0.1, gt=0)
    """Inverse temperature. Larger stays closer to the reference."""
    length_normalised: bool = False
    """Whether a probe counts by its mean log-probability per token in place of the sum. The sum
    compares whole probes, as in the papers; the mean takes the advantage of being short away, and
    needs a larger beta."""
    min_reward_difference: float = Field(default=0.0, ge=0)
    """A pair needs credits that differ by more than this."""
    min_score_difference: float | None = Field(default=None, ge=0, le=1)
    """A pair needs response scores that differ by more than this; null asks for none. Where
    failures are rare, pairs that differ in likelihood only drown the others, and the attacker
    collapses onto the most ordinary probes."""
    min_chosen_score: float | None = Field(default=None, ge=0, le=1)
    """A pair needs a chosen probe whose response scores at least this; null asks for none.
    Other than min_score_difference it keeps pairs of two failures that differ in likelihood,
    which teach to fail plausibly."""
    credit: CreditParameters = CreditParameters()
    """By what siblings are ranked."""
    weak_supervision: WeakSupervisionParameters | None = None
    """Probes to learn from before the attacker finds its own; null for none."""


class PairSelection(NamedTuple):
    """The node indices of pairs, and the numbers of groups without a pair by reason.

    Ties are groups whose credits are all equal, or which have fewer than two rated siblings.
    """

    chosen: list[int]
    rejected: list[int]
    num_ties: int
    num_identical: int
    num_below_margin: int


def select_pairs(
    tree: RolloutTree,
    *,
    min_reward_difference: float,
    min_score_difference: float | None = None,
    min_chosen_score: float | None = None,
) -> PairSelection:
    """Pair the best with the worst sibling of every node (arXiv:2407.09447, section 3).

    Siblings are ranked by `credit`, or else `reward`; those without a verdict are left out. The
    conditions on a pair are those of `PairParameters`. A group without a pair is counted under the
    first reason that holds: tie, identical probes, below a margin.
    """
    groups_PG = tree.sibling_groups()
    reward_N = tree.nodes.get("credit", tree.nodes["reward"])
    rewards_PG = reward_N[groups_PG]
    best_P = _node_at(groups_PG, rewards_PG.nan_to_num(nan=-math.inf).argmax(dim=1))
    worst_P = _node_at(groups_PG, rewards_PG.nan_to_num(nan=math.inf).argmin(dim=1))
    # A group without any verdict has nothing to choose between.
    reward_gap_P = (reward_N[best_P] - reward_N[worst_P]).nan_to_num(nan=0.0)
    scores_N = tree.nodes["response_score"]

    is_tie_P = reward_gap_P == 0
    probes = tree.nodes["probe"] * tree.nodes["probe_mask"]
    is_same_P = (probes[best_P] == probes[worst_P]).all(dim=1) & ~is_tie_P
    is_close_P = reward_gap_P <= min_reward_difference
    if min_score_difference is not None:
        is_close_P |= scores_N[best_P] - scores_N[worst_P] <= min_score_difference
    if min_chosen_score is not None:
        is_close_P |= scores_N[best_P] < min_chosen_score
    is_close_P &= ~is_tie_P & ~is_same_P
    is_pair_P = ~(is_tie_P | is_same_P | is_close_P)
    return PairSelection(
        chosen=best_P[is_pair_P].tolist(),
        rejected=worst_P[is_pair_P].tolist(),
        num_ties=int(is_tie_P.sum()),
        num_identical=int(is_same_P.sum()),
        num_below_margin=int(is_close_P.sum()),
    )


def _node_at(groups_PG: Tensor, index_P: Tensor) -> Tensor:
    return groups_PG.gather(1, index_P.unsqueeze(1)).squeeze(1)


def preference_samples(
    tree: RolloutTree, parameters: PairParameters
) -> tuple[list[Sample], dict[str, float]]:
    """One sample per pair of siblings, and metrics.

    A sample has `context`, `chosen`, `rejected`, `reference_logratio`, `reference_chosen` (log p of
    the chosen probe under the reference) and `episode`.
    """
    pairs = select_pairs(
        tree,
        min_reward_difference=parameters.min_reward_difference,
        min_score_difference=parameters.min_score_difference,
        min_chosen_score=parameters.min_chosen_score,
    )
    probe, mask = tree.nodes["probe"], tree.nodes["probe_mask"]
    reference_N = sequence_logprobs(
        tree.nodes["reference_logprobs"], mask, length_normalised=parameters.length_normalised
    )
    samples = [
        {
            "context": torch.tensor(tree.context_of(chosen)),
            "chosen": probe[chosen][mask[chosen]],
            "rejected": probe[rejected][mask[rejected]],
            "reference_logratio": reference_N[chosen] - reference_N[rejected],
            "reference_chosen": reference_N[chosen],
            "episode": tree.nodes["episode"][chosen],
        }
        for chosen, rejected in zip(pairs.chosen, pairs.rejected, strict=True)
    ]
    return samples, {
        "pairs/kept": float(len(pairs.chosen)),
        "pairs/ties": float(pairs.num_ties),
        "pairs/identical": float(pairs.num_identical),
        "pairs/below_margin": float(pairs.num_below_margin),
    }


class GivenProbes:
    """Probes from a file, and the pairs in which they win."""

    def __init__(
        self,
        parameters: WeakSupervisionParameters,
        *,
        attacker: ConversationAgent,
        reference: ConversationAgent,
        scenario_dir: Path | None,
        seed: int,
    ) -> None:
        self.share = parameters.share
        self.reference = reference
        self.seed = seed
        texts = read_prompts(parameters.probes, scenario_dir)
        self.probes = [attacker.say(text) for text in texts]

    @torch.no_grad()
    def replace(
        self, samples: Sequence[Sample], tree: RolloutTree, pairs: PairParameters, *, iteration: int
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples with those of a share of the episodes replaced by given pairs."""
        generator = derived_generator(self.seed, "weak supervision", iteration)
        is_given_E = torch.rand(tree.num_episodes, generator=generator) < self.share
        choice_E = torch.randint(len(self.probes), (tree.num_episodes,), generator=generator)
        kept = [sample for sample in samples if not is_given_E[int(sample["episode"])]]
        episodes = is_given_E.nonzero().flatten().tolist()
        if not episodes:
            return kept, {"pairs/given": 0.0}
        credit_N = tree.nodes["credit"].nan_to_num(nan=torch.inf)
        worst = [
            int(credit_N[group].argmin()) + int(group[0])
            # The first level holds one group of siblings an episode, in order.
            for group in tree.sibling_groups()[: tree.num_episodes][is_given_E]
        ]
        chosen = [self.probes[index] for index in choice_E[is_given_E].tolist()]
        contexts = [tree.contexts[episode] for episode in episodes]
        cpu = torch.device("cpu")
        ids, mask = pad_right(chosen, cpu)
        scorer = self.reference.token_scorer(to="score given probes")
        scored = scorer.logprobs(*pad_left(contexts, cpu), ids, mask).cpu()
        normalised = pairs.length_normalised
        chosen_P = sequence_logprobs(scored, mask, length_normalised=normalised)
        probe, probe_mask = tree.nodes["probe"][worst], tree.nodes["probe_mask"][worst]
        rejected_P = sequence_logprobs(
            tree.nodes["reference_logprobs"][worst], probe_mask, length_normalised=normalised
        )
        given = [
            {
                "context": torch.tensor(context),
                "chosen": torch.tensor(ids_of_probe),
                "rejected": probe[row][probe_mask[row]],
                "reference_logratio": chosen_P[row] - rejected_P[row],
                "reference_chosen": chosen_P[row],
                "episode": torch.tensor(episode),
            }
            for row, (context, ids_of_probe, episode) in enumerate(
                zip(contexts, chosen, episodes, strict=True)
            )
        ]
        return [*kept, *given], {"pairs/given": float(len(given))}


class AstPreferenceTrainer(AstTrainer):
    """Prefer, at every point of a conversation, the best probe to the worst.

    Pairs: best and worst sibling of every node of the tree (ASTPrompter, arXiv:2407.09447). A
    subclass gives `loss`.
    """

    class Parameters(PairParameters):
        """Strength of the preference and choice of pairs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = self.parameters.weak_supervision
        self._given = given and GivenProbes(
            given,
            attacker=self.attacker,
            reference=self.sampler.reference,
            scenario_dir=self.scenario_instance.scenario_dir,
            seed=self.hyper_params.seed,
        )

    def flatten(self, tree: RolloutTree) -> list[Sample]:
        """One sample a preference pair."""
        samples, metrics = preference_samples(tree, self.parameters)
        if self._given:
            samples, more = self._given.replace(
                samples, tree, self.parameters, iteration=self.state.iteration
            )
            metrics |= more
        self.log_metrics(metrics)
        return samples

    def pair_logprobs(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """`log p(chosen)` and `log p(rejected)` under the policy, `[B]` nats, with gradient.

        Sums over tokens, or means where the parameters ask for length normalisation.
        """
        names = ("chosen", "rejected")
        chosen_B, rejected_B = (
            sequence_logprobs(
                logprobs_BT,
                _of_width(batch[f"{name}_mask"], logprobs_BT.shape[1]).to(logprobs_BT.device),
                length_normalised=self.parameters.length_normalised,
            )
            for name, logprobs_BT in zip(names, self.policy_logprobs(batch, *names), strict=True)
        )
        return chosen_B, rejected_B

    def logratios(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """`log p(chosen) - log p(rejected)` under policy and reference, `[B]` nats."""
        chosen_B, rejected_B = self.pair_logprobs(batch)
        return chosen_B - rejected_B, batch["reference_logratio"].to(chosen_B.device)

    def answer_logratios(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """`log policy - log reference` of the chosen and of the rejected probe, `[B]` nats."""
        chosen_B, rejected_B = self.pair_logprobs(batch)
        of_chosen_B = batch["reference_chosen"].to(chosen_B.device)
        of_rejected_B = of_chosen_B - batch["reference_logratio"].to(chosen_B.device)
        return chosen_B - of_chosen_B, rejected_B - of_rejected_B


def _of_width(mask_BT: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(mask_BT, (0, width - mask_BT.shape[1]))

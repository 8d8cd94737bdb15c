"""Preference optimisation of an attacker: pairs of a tree, and trainers on them.

Shape suffixes: `N` node, `P` pair or group of siblings, `G` sibling, `B` row, `T` token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from nip_astra.language_models.base import pad_left, pad_right
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.preference import (
    Divergence,
    PairKind,
    divergence_scores,
    kto_loss,
    orpo_loss,
    pair_loss,
    preference_loss,
    sequence_logprobs,
    simpo_loss,
)
from nip_astra.rl_objectives.reductions import LossOutput, mean_over_rows
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.executor import AsyncRolloutParameters
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.prompts import read_probes
from nip_astra.trainers.ast.base import AstTrainer
from nip_astra.trainers.ast.rollouts import CreditParameters
from nip_astra.trainers.registry import register_trainer
from nip_astra.utils.seeding import derived_generator

_BASELINE = "kto_baseline"
"""Column of a batch: mean log-ratio of the probes of its optimizer step, equal in all rows."""


class WeakSupervisionParameters(SubParameters):
    """Given probes that are preferred to the attacker's own (ASTPrompter, arXiv:2407.09447)."""

    probes: str
    """File of probes, in the formats of prompt files; `scenario://file` or a path."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Share of episodes whose pairs are replaced by one: a given probe preferred to the attacker's
    worst probe after the opening. Larger imitates more and searches less."""


class PairParameters(AsyncRolloutParameters):
    """Strength of the preference and selection of pairs.

    Asynchronous rollouts need no correction: the losses hold for pairs of any attacker.
    """

    beta: float = Field(default=0.1, gt=0)
    """Inverse temperature. Larger stays closer to the reference."""
    length_normalised: bool = False
    """Whether a probe's log-probability is the mean over its tokens instead of the sum. The sum
    compares whole probes, as in the papers; the mean removes the advantage of short probes, and
    needs a larger beta."""
    min_reward_difference: float = Field(default=0.0, ge=0)
    """Minimum difference of credits in a pair (exclusive)."""
    min_score_difference: float | None = Field(default=None, ge=0, le=1)
    """Minimum difference of response scores in a pair; null for none. If failures are rare, pairs
    that differ only in likelihood outnumber the others, and the attacker collapses to the most
    ordinary probes."""
    min_chosen_score: float | None = Field(default=None, ge=0, le=1)
    """Minimum response score of the chosen probe; null for none. Unlike min_score_difference it
    keeps pairs of two failures that differ in likelihood, which teach plausible failures."""
    credit: CreditParameters = CreditParameters()
    """Credit by which siblings are ranked."""
    weak_supervision: WeakSupervisionParameters | None = None
    """Given probes, used before the attacker finds its own; null for none."""


class PairSelection(NamedTuple):
    """Node indices of pairs, and the number of groups without a pair by reason.

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
    # A response without a score, which the reward may not need, satisfies no minimum.
    if min_score_difference is not None:
        is_close_P |= ~(scores_N[best_P] - scores_N[worst_P] > min_score_difference)
    if min_chosen_score is not None:
        is_close_P |= ~(scores_N[best_P] >= min_chosen_score)
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
    """Return one sample per pair of siblings, and metrics.

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
    """Probes from a file, and the pairs in which they are preferred."""

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
        texts = read_probes(parameters.probes, scenario_dir)
        self.probes = [attacker.encode_turn(text) for text in texts]

    @torch.no_grad()
    def replace(
        self, samples: Sequence[Sample], tree: RolloutTree, pairs: PairParameters, *, iteration: int
    ) -> tuple[list[Sample], dict[str, float]]:
        """Replace the samples of a share of the episodes by pairs with given probes."""
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
    """Base of trainers on pairs of the best and the worst sibling of every node.

    Pairs as in ASTPrompter, arXiv:2407.09447. Subclasses implement `loss`.
    """

    class Parameters(PairParameters):
        """Strength of the preference and selection of pairs."""

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
        samples, metrics = preference_samples(tree, self.parameters)
        if self._given:
            samples, more = self._given.replace(
                samples, tree, self.parameters, iteration=self.state.iteration
            )
            metrics |= more
        self.log_metrics(metrics)
        return samples

    def pair_logprobs(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Return `log p(chosen)` and `log p(rejected)` under the policy, `[B]` nats, with gradient.

        Sums over tokens, or means if `length_normalised`.
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
        """Return `log p(chosen) - log p(rejected)` under policy and reference, `[B]` nats."""
        chosen_B, rejected_B = self.pair_logprobs(batch)
        return chosen_B - rejected_B, batch["reference_logratio"].to(chosen_B.device)

    def answer_logratios(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Return `log policy - log reference` of chosen and rejected probes, `[B]` nats."""
        chosen_B, rejected_B = self.pair_logprobs(batch)
        of_chosen_B = batch["reference_chosen"].to(chosen_B.device)
        of_rejected_B = of_chosen_B - batch["reference_logratio"].to(chosen_B.device)
        return chosen_B - of_chosen_B, rejected_B - of_rejected_B


def _of_width(mask_BT: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(mask_BT, (0, width - mask_BT.shape[1]))


@register_trainer(TrainerType.AST_DPO)
class AstDpoTrainer(AstPreferenceTrainer):
    """Direct preference optimisation on the best and the worst sibling of every node.

    With `h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected)`, log-probabilities summed
    over the tokens that the attacker sampled (or their mean, `length_normalised`), the loss is the
    mean over pairs of, by `loss`:

    - `sigmoid`: `-log sigmoid(beta * h)` (arXiv:2305.18290, eq. 7); with `label_smoothing` e it is
      conservative, `-(1 - e) log sigmoid(beta * h) - e log sigmoid(-beta * h)`;
    - `robust`: `(-(1 - e) log sigmoid(beta * h) + e log sigmoid(-beta * h)) / (1 - 2 e)`, unbiased
      where a share e of the preferences is flipped (arXiv:2403.00409);
    - `hinge`: `max(0, 1 - beta * h)` (SLiC, arXiv:2305.10425);
    - `nca`, `sppo`, `apo_zero`, `apo_down`: of each probe's own log-ratio, see
      `rl_objectives.preference.pair_loss`;
    - `kto`: `1 - sigmoid(beta (c - z))` of the chosen and `1 - sigmoid(beta (z - r))` of the
      rejected probe (arXiv:2402.01306), with z the mean log-ratio of the probes of the optimizer
      step, at least 0, however the step is split into minibatches.

    With a `divergence` the first three compare `f'(pi / ref)` of both probes for their log-ratios
    (f-DPO, arXiv:2309.16240).
    """

    class Parameters(AstPreferenceTrainer.Parameters):
        """Strength of the preference, selection of pairs, and the loss."""

        loss: Literal[
            "sigmoid", "robust", "hinge", "nca", "sppo", "apo_zero", "apo_down", "kto"
        ] = "sigmoid"
        """Loss of a pair."""
        divergence: Annotated[Divergence, where("loss", "sigmoid", "robust", "hinge")] = (
            "reverse_kl"
        )
        """Divergence that keeps the attacker near the reference: reverse_kl is DPO; forward_kl and
        js preserve likely probes of the reference more than they avoid unlikely ones."""
        alpha: Annotated[float, where("divergence", "alpha")] = Field(default=0.5, gt=0, lt=1)
        """Order of the alpha-divergence, between forward_kl (0) and reverse_kl (1)."""
        label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
        """Assumed share of wrong preferences, for instance because of scorer errors. Larger trusts
        each pair less."""

        @model_validator(mode="after")
        def _has_a_use_for_smoothing(self) -> AstDpoTrainer.Parameters:
            if self.loss not in ("sigmoid", "robust") and self.label_smoothing > 0:
                raise ValueError(
                    f"label_smoothing has no meaning for the {self.loss} loss; set it to 0, or "
                    "loss to sigmoid or robust"
                )
            return self

    def _write_step_totals(self, batches: Sequence[TensorDict]) -> None:
        super()._write_step_totals(batches)
        is_whole = len(batches) == 1 and self.team.size == 1
        if self.parameters.loss != "kto" or is_whole:
            return
        # Of parts of a step none knows the others: all are scored once more before the first.
        with torch.no_grad():
            ratios_B = torch.cat([one for batch in batches for one in self.answer_logratios(batch)])
        for batch in batches:
            batch[_BASELINE] = mean_over_rows(ratios_B).cpu().expand(len(batch))

    def loss(self, batch: TensorDict) -> LossOutput:
        options = self.parameters
        if options.loss in get_args(PairKind):
            return pair_loss(*self.answer_logratios(batch), kind=options.loss, beta=options.beta)
        if options.loss == "kto":
            ratios_B = torch.cat(self.answer_logratios(batch))
            is_chosen_B = torch.arange(len(ratios_B), device=ratios_B.device) < len(batch)
            of_step_B = batch.get(_BASELINE, None)
            of_batch = mean_over_rows(ratios_B.detach())
            baseline = of_batch if of_step_B is None else of_step_B[0]
            return kto_loss(ratios_B, is_chosen_B, beta=options.beta, baseline=baseline)
        policy_B, reference_B = self.logratios(batch)
        if options.divergence != "reverse_kl":
            chosen_B, rejected_B = (
                divergence_scores(ratios_B, options.divergence, alpha=options.alpha)
                for ratios_B in self.answer_logratios(batch)
            )
            policy_B, reference_B = chosen_B - rejected_B, torch.zeros_like(chosen_B)
        return preference_loss(
            policy_B,
            reference_B,
            kind=options.loss,
            beta=options.beta,
            label_smoothing=options.label_smoothing,
        )


@register_trainer(TrainerType.AST_IPO)
class AstIpoTrainer(AstPreferenceTrainer):
    """Identity preference optimisation: preferences by a fixed, bounded margin.

    Loss: `(h - 1 / (2 beta))^2`, mean over pairs, with
    `h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected)` (arXiv:2310.12036, eq. 17).
    Log-probabilities are summed over a probe's tokens as in the paper, or averaged with
    `length_normalised`; the margin, `1 / (2 beta)`, is in the same nats. Other
    than DPO's, the loss does not push pairs apart without end, so it keeps a bound on how far the
    attacker goes even where one probe always wins.
    """

    def loss(self, batch: TensorDict) -> LossOutput:
        return preference_loss(*self.logratios(batch), kind="ipo", beta=self.parameters.beta)


@register_trainer(TrainerType.AST_SIMPO)
class AstSimpoTrainer(AstPreferenceTrainer):
    """Simple preference optimisation: preferences by likelihood per token, without a reference.

    Loss: `-log sigmoid(beta (c - r) - margin)`, mean over pairs, with `c` and `r` the means of
    `log pi` over the tokens of the chosen and of the rejected probe (arXiv:2405.14734, eq. 6).
    Nothing holds the attacker near the reference but the scenario's own reward.

    With `loss: orpo` it is `-c - orpo_weight log sigmoid(log odds(c) - log odds(r))`, where the
    odds of a probe are `p / (1 - p)` of its mean log-probability (arXiv:2403.07691).
    """

    class Parameters(AstPreferenceTrainer.Parameters):
        """Strength of the preference, its margin, and selection of pairs."""

        loss: Literal["simpo", "orpo"] = "simpo"
        """Loss of a pair."""
        orpo_weight: Annotated[float, where("loss", "orpo")] = Field(default=0.1, gt=0)
        """Lambda of ORPO. Larger weights the preference more and imitation less."""
        beta: Annotated[float, where("loss", "simpo")] = Field(default=2.0, gt=0)
        """Scale of the difference. Larger saturates sooner, so that clear pairs teach less."""
        length_normalised: bool = True
        """Whether a probe's log-probability is the mean over its tokens, as in the paper; false
        uses the sum, which needs a smaller beta."""
        margin: Annotated[float, where("loss", "simpo")] = Field(default=1.0, ge=0)
        """Target margin of the scaled log-probabilities. Larger keeps pushing pairs apart that
        already differ."""

        @model_validator(mode="after")
        def _has_means_for_odds(self) -> AstSimpoTrainer.Parameters:
            if self.loss == "orpo" and not self.length_normalised:
                raise ValueError(
                    "orpo takes the odds of mean log-probabilities; set length_normalised to true"
                )
            return self

    def loss(self, batch: TensorDict) -> LossOutput:
        chosen_B, rejected_B = self.pair_logprobs(batch)
        if self.parameters.loss == "orpo":
            weight = self.parameters.orpo_weight
            return orpo_loss(chosen_B, rejected_B, -chosen_B, weight=weight)
        return simpo_loss(
            chosen_B, rejected_B, beta=self.parameters.beta, margin=self.parameters.margin
        )

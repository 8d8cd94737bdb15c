"""Group-relative policy optimisation of an attacker: siblings compete."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any

from pydantic import Field
from tensordict import TensorDict

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.advantages import group_advantages
from nip_astra.rl_objectives.group_variants import GROUP_VARIANTS, GroupVariantName
from nip_astra.rl_objectives.kl import KlKind
from nip_astra.rl_objectives.masked import reduce_loss
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.policy_gradient import group_policy_loss
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.behaviour import BehaviourParameters, importance_weights_of
from nip_astra.trainers.ast.kl_penalty import check_estimator
from nip_astra.trainers.ast.node_samples import node_samples
from nip_astra.trainers.ast.rewards import CreditParameters
from nip_astra.trainers.ast.staleness import CorrectedStalenessParameters
from nip_astra.trainers.ast_base import AstTrainer
from nip_astra.trainers.registry import register_trainer

logger = logging.getLogger(__name__)


@register_trainer(TrainerType.AST_GRPO)
class AstGrpoTrainer(AstTrainer):
    """Raise what did better than its siblings, lower what did worse.

    The children of a node are the group: the advantage of a probe is its credit against that of
    its siblings. The loss is `-surrogate + kl_weight * KL(pi || ref) - entropy_weight * entropy`;
    `variant` names surrogate, baseline, standard deviation, reduction and what becomes of groups
    of equal credit (`rl_objectives.group_variants`): grpo (arXiv:2402.03300), dr_grpo
    (arXiv:2503.20783), dapo (arXiv:2503.14476), cispo (arXiv:2506.13585), gspo
    (arXiv:2507.18071), rloo (arXiv:2402.14740). Old log-probabilities are those of sampling
    (`behaviour`).
    """

    compares_with_sampler = True

    class Parameters(CorrectedStalenessParameters):
        """Which policy loss, and what holds the attacker near ordinary conversation."""

        variant: GroupVariantName = "grpo"
        """The objective; see the trainer."""
        clip_low: float | None = Field(default=None, gt=0)
        """How far the ratio may fall below 1 before it is clipped; null takes the variant's."""
        clip_high: float | None = Field(default=None, gt=0)
        """How far the ratio may rise above 1 before it is clipped; null takes the variant's."""
        kl_weight: float = Field(default=0.05, ge=0)
        """Loss per nat of divergence from the reference, a mean over a probe's tokens (rloo: their
        sum, so that it needs a smaller weight). Larger stays closer to the reference."""
        kl_kind: KlKind = "k3"
        """Estimator of the divergence."""
        entropy_weight: float = Field(default=0.0, ge=0)
        """Loss taken off per nat of entropy and token. Larger keeps probes more varied."""
        credit: CreditParameters = CreditParameters()
        """What siblings are compared by."""
        behaviour: BehaviourParameters = BehaviourParameters()
        """Which log-probabilities are learnt from where sampling is tempered or cut; the variants
        with one ratio a probe (gspo, rloo) take importance weights of sequences alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scenario.tree_width < 2:
            raise ConfigurationError(
                "ast_grpo was asked to compare siblings, but tree_width is 1, so that no probe has "
                "any. Set the scenario's tree_width to 2 or more, or train with ast_ppo or "
                "ast_reinforce."
            )
        given = {"clip_low": self.parameters.clip_low, "clip_high": self.parameters.clip_high}
        self.variant = replace(
            GROUP_VARIANTS[self.parameters.variant],
            **{name: value for name, value in given.items() if value is not None},
        )
        level = self.behaviour.level if self.behaviour is not None else None
        if self.variant.ratio != "token" and level == "token":
            raise ConfigurationError(
                f"ast_grpo.variant={self.parameters.variant} was asked for with importance weights "
                "of tokens, but it has one ratio, and so one weight, a probe. Set "
                "ast_grpo.behaviour.importance_weights=sequence, or take another variant."
            )
        weighs_tokens = (
            self.parameters.max_staleness and self.parameters.staleness_weights == "token"
        )
        if self.variant.ratio != "token" and weighs_tokens:
            raise ConfigurationError(
                f"ast_grpo.variant={self.parameters.variant} has one ratio a probe, which "
                "staleness_weights of tokens do not fit. Set ast_grpo.staleness_weights=sequence, "
                "max_staleness to 0, or another variant."
            )
        self.results["objective"] = {"variant": self.parameters.variant, **asdict(self.variant)}
        logger.info("objective: %s", self.results["objective"])
        check_estimator(self.parameters.kl_kind, self.parameters.kl_weight, "ast_grpo.kl_kind")

    def flatten(self, tree: RolloutTree) -> list[Sample]:
        """One sample a node that its group says something about."""
        groups_PG = tree.sibling_groups()
        found = group_advantages(
            tree.nodes["credit"][groups_PG],
            baseline=self.variant.baseline,
            std_epsilon=self.variant.std_epsilon,
            zero_variance=self.variant.zero_variance,
        )
        self.log_metrics(
            {
                "groups/zero_variance": float(found.is_zero_variance_P.double().mean()),
                "groups/used_share": float(found.is_used_PG.float().mean()),
            }
        )
        used = groups_PG[found.is_used_PG].tolist()
        return node_samples(tree, used, advantage=found.advantages_PG.flatten())

    def loss(self, batch: TensorDict) -> LossOutput:
        """The policy loss of a batch of probes."""
        scores = self.policy_scores(batch, needs_entropy=self.parameters.entropy_weight > 0)
        batch = batch.to(scores.logprobs_BT.device)
        by = self.variant.reduction
        loss, metrics = group_policy_loss(
            scores.logprobs_BT,
            batch["old_logprobs"],
            batch["advantage"],
            batch["probe_mask"],
            variant=self.variant,
            normaliser=self.num_tokens_in_step(batch) if by == "token" else None,
            max_length=self.attacker.sampling.max_new_tokens if by == "sum_over_length" else None,
            reference_logprobs_BT=batch["reference_logprobs"],
            kl_weight=self.parameters.kl_weight,
            kl_kind=self.parameters.kl_kind,
            entropy_BT=scores.entropy_BT,
            weights_BT=importance_weights_of(batch, scores.logprobs_BT.device),
        )
        if scores.entropy_BT is not None:
            entropy = reduce_loss(scores.entropy_BT, batch["probe_mask"], "sequence")
            loss = loss - self.parameters.entropy_weight * entropy
        return LossOutput(loss, metrics)

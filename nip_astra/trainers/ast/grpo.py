"""Group-relative policy optimisation of an attacker, with siblings as groups."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import torch
from pydantic import Field
from tensordict import TensorDict

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.advantages import OF_GROUPS, AdvantageParameters, Baseline, Scale
from nip_astra.rl_objectives.kl import AdaptiveKl, KlParameters
from nip_astra.rl_objectives.policy_losses import (
    GROUP_VARIANTS,
    GroupVariantName,
    LossParameters,
    PolicyLoss,
    policy_loss,
)
from nip_astra.rl_objectives.reductions import LossOutput, Reduction, reduce_loss
from nip_astra.rl_objectives.registry import PolicyLossName, has_option
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.base import AstTrainer
from nip_astra.trainers.ast.behaviour import (
    BehaviourParameters,
    CorrectedStalenessParameters,
    check_weights,
    importance_weights_of,
)
from nip_astra.trainers.ast.rollouts import CreditParameters, learning_logprobs, node_samples
from nip_astra.trainers.registry import register_trainer

logger = logging.getLogger(__name__)


class AttackerKlParameters(KlParameters):
    """KL penalty of the loss."""

    weight: float = Field(default=0.05, ge=0)
    """Loss per nat of divergence, a mean over a probe's tokens (rloo: their sum, so use a smaller
    weight). Larger stays closer to the reference."""


@register_trainer(TrainerType.AST_GRPO)
class AstGrpoTrainer(AstTrainer):
    """Group-relative policy optimisation, in which siblings are the group.

    The children of a node are the group: the advantage of a probe is its credit against that of
    its siblings (`rl_objectives.advantages.group_advantages`). The loss is that of
    `rl_objectives.policy_losses.policy_loss`, with `kl.weight * KL(pi || ref)`, minus
    `entropy_weight * entropy`. `variant` chooses policy loss, clip, baseline, scale, reduction and
    the use of groups of equal credit, each of which may be set by itself: grpo (arXiv:2402.03300),
    dr_grpo (arXiv:2503.20783), dapo (arXiv:2503.14476), cispo (arXiv:2506.13585), gspo
    (arXiv:2507.18071), rloo (arXiv:2402.14740). Old log-probabilities are those of sampling
    (`behaviour`).
    """

    compares_with_sampler = True
    kl: AdaptiveKl

    class Parameters(LossParameters, AdvantageParameters, CorrectedStalenessParameters):
        """Policy loss, advantage, and KL penalty."""

        variant: GroupVariantName = "grpo"
        """The published algorithm; see the trainer."""
        loss: PolicyLossName | None = None  # type: ignore[assignment]  # null: the variant's
        """Policy loss, see `rl_objectives.policy_losses`; null uses the variant's. Another than the
        variant's has its own clip range and reduction, unless these are set."""
        clip_low: Annotated[float | None, has_option("clip_low")] = Field(default=None, ge=0)
        """Maximum distance of the ratio below 1 before clipping; null uses the variant's."""
        clip_high: Annotated[float | None, has_option("clip_high")] = Field(default=None, ge=0)
        """Maximum distance of the ratio above 1 before clipping; null uses the variant's."""
        reduction: Reduction | None = None
        """Reduction of the token losses, see `rl_objectives.reductions.reduce_loss`; null uses the
        variant's."""
        baseline: Annotated[Baseline | None, OF_GROUPS] = None
        """Baseline of a credit; null uses the variant's."""
        scale: Annotated[Scale | None, OF_GROUPS] = None
        """Divisor of the difference; null uses the variant's."""
        kl: AttackerKlParameters = AttackerKlParameters()
        """KL penalty."""
        entropy_weight: float = Field(default=0.0, ge=0)
        """Weight of the entropy bonus per token. Larger keeps probes more varied."""
        credit: CreditParameters = CreditParameters()
        """Credit by which siblings are compared."""
        behaviour: BehaviourParameters = BehaviourParameters()
        """Which log-probabilities are trained if sampling is tempered or truncated; the losses with
        one ratio per probe (gspo, rloo) support only importance weights of sequences."""

        def chosen_loss(self) -> PolicyLoss:
            """Return the variant's loss with the options that are set."""
            variant = GROUP_VARIANTS[self.variant]
            name = self.loss or variant.loss
            high = variant.clip_high if name == variant.loss else None
            return PolicyLoss.of(
                name,
                self.loss_options,
                self.clip_low,
                high if self.clip_high is None else self.clip_high,
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.parameters
        if self.scenario.tree_width < 2:
            raise ConfigurationError(
                "ast_grpo compares siblings, but tree_width is 1. Set the scenario's tree_width to "
                "2 or more, or train with ast_ppo or ast_reinforce."
            )
        variant = GROUP_VARIANTS[options.variant]
        self.policy_loss = options.chosen_loss()
        own = None if self.policy_loss.name == variant.loss else self.policy_loss.reduction
        self.reduction = options.reduction or own or variant.reduction
        self.group_options: dict[str, Any] = {
            "baseline": options.baseline or variant.baseline,
            "scale": options.scale or variant.scale,
            "std_epsilon": options.std_epsilon,
            "zero_variance": variant.zero_variance,
        }
        check_weights(self.policy_loss.name, self.behaviour, options, "ast_grpo")
        self.kl = options.kl.controller()
        self.results["objective"] = {
            "variant": options.variant,
            "source": variant.source,
            "loss": self.policy_loss.name,
            **self.policy_loss.options,
            **self.group_options,
            "advantage": options.advantage,
            "reduction": self.reduction,
        }
        logger.info("objective: %s", self.results["objective"])

    def flatten(self, tree: RolloutTree) -> list[Sample]:
        # Siblings are consecutive nodes.
        group_N = torch.arange(tree.num_nodes) // tree.tree_width
        found = self.parameters.advantages(tree.nodes["credit"], group_N, **self.group_options)
        self.log_metrics(found.metrics())
        self.log_metrics(self.kl.adapt(*learning_logprobs(tree), tree.nodes["probe_mask"]))
        used = found.is_used_N.nonzero().flatten().tolist()
        return node_samples(tree, used, advantage=found.advantages_N)

    def loss(self, batch: TensorDict) -> LossOutput:
        options = self.parameters
        scores = self.policy_scores(batch, needs_entropy=options.entropy_weight > 0)
        batch = batch.to(scores.logprobs_BT.device)
        loss, metrics = policy_loss(
            scores.logprobs_BT,
            self.old_logprobs(batch, scores.logprobs_BT),
            batch["advantage"],
            batch["probe_mask"],
            loss=self.policy_loss,
            reduction=self.reduction,
            normaliser=self.token_normaliser(batch, self.reduction),
            max_length=self.attacker.sampling.max_new_tokens,
            weights_BT=importance_weights_of(batch, scores.logprobs_BT.device),
            reference_logprobs_BT=batch["reference_logprobs"],
            kl_weight=self.kl.weight,
            kl_value=options.kl.value,
            kl_gradient=options.kl.gradient,
            entropy_BT=scores.entropy_BT,
        )
        if scores.entropy_BT is not None:
            entropy = reduce_loss(scores.entropy_BT, batch["probe_mask"], "sequence")
            loss = loss - options.entropy_weight * entropy
        return LossOutput(loss, metrics)

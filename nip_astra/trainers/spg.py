"""Stackelberg policy gradient of provers and verifiers, and its relatives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar

from torchrl.objectives import ValueEstimators

from nip_astra.parameters.conditions import ReadWhere, where
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.spg import SpgObjective
from nip_astra.rl_objectives.stackelberg_variants import VARIANTS
from nip_astra.trainers.protocol.opponent_shaping import (
    SpgParameters,
    check_sequence,
    policy_weights,
    update_rule,
)
from nip_astra.trainers.protocol.optimizers import annealing_factor
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.rl_tensordict_base import Gae, TensorDictRlTrainer

logger = logging.getLogger(__name__)

WITH_CLIP = where("spg.variant", *(name for name, one in VARIANTS.items() if one.is_clipped))
"""Condition of the clip of ratios."""


@register_trainer(TrainerType.SPG)
class SpgTrainer(TensorDictRlTrainer):
    """Leaders foresee how followers learn from them, and learn with that in view.

    With `L_i` the policy loss of agent i, minus its entropy bonus, as a function of all policies;
    F the followers of agent l, which are the agents of later groups; `D_F` their directions:

        spg, pspg   D_l = d_l L_l - (d_l D_F)' m,  (d_F D_F)' m = d_F L_l   (arXiv:1906.01217)
        lola, pola  D_l = d_l L_l - (d_l D_F)' eta d_F L_l
                                  [- (d_l d_F L_l)' eta D_F]                (arXiv:1709.04326)
        sos, psos   both terms, the first scaled down                       (arXiv:1811.08469)

    and Adam steps along `D_l`, clipped like any gradient. The losses of spg, lola and sos have the
    derivatives of the expected return (arXiv:1802.05098), for policies that played; those of pspg,
    pola and psos have PPO's clipped ratios. `eta` is the learning rate of the follower's actor,
    times opponent_step_factor. Minibatches are of whole episodes, since a follower's answer shows
    in what moves of one round do to those of another. See `rl_objectives.stackelberg` and
    `rl_objectives.shaping_losses`.
    """

    parameter_groups: ClassVar[tuple[str, ...] | None] = (
        "rl",
        "ppo.clip_low",
        "ppo.clip_high",
        "ppo.critic_coef",
        "ppo.entropy_weight",
        "ppo.normalize_advantage",
        "message_regression",
    )
    reads_where: ClassVar[Mapping[str, ReadWhere]] = {
        **TensorDictRlTrainer.reads_where,
        "ppo.clip_low": WITH_CLIP,
        "ppo.clip_high": WITH_CLIP,
    }

    class Parameters(SpgParameters):
        """Who foresees whom, and how."""

    def _get_loss_module_and_gae(self) -> tuple[SpgObjective, Gae]:
        by_name = {name: self.agents[name] for name in self.agents.names}
        sequence = self.parameters.stackelberg_sequence
        variant = self.parameters.variant
        if self.rl.num_epochs > 1 and not VARIANTS[variant].is_clipped:
            logger.warning(
                "%s goes %d times over moves of policies that are no longer those that made them; "
                "set rl.num_epochs=1, or spg.variant=p%s, which is meant for that",
                variant,
                self.rl.num_epochs,
                variant,
            )
        loss_module = SpgObjective(
            self.agents,
            self.hyper_params.ppo,
            self.rl,
            policy_parameters={name: policy_weights(agent) for name, agent in by_name.items()},
            groups=self.train_environment.protocol.stackelberg_sequence
            if sequence is None
            else check_sequence(sequence, self.agents.names),
            rule=update_rule(
                self.parameters,
                [
                    self.rl.lr * agent.parameters_of_agent.agent_lr_factor.actor
                    for agent in by_name.values()
                ],
            ),
            step_factor=lambda: annealing_factor(self.rl, self.state.iteration),
            key=(self.hyper_params.seed, "ihvp"),
        )
        loss_module.make_value_estimator(
            ValueEstimators.GAE, gamma=self.rl.gamma, lmbda=self.rl.lmbda
        )
        return loss_module, loss_module.value_estimator

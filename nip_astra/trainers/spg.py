"""Stackelberg policy gradient of provers and verifiers, with variants such as LOLA."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import nn

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.conditions import ReadWhere, where
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.spg import SpgObjective
from nip_astra.rl_objectives.stackelberg import VARIANTS, SpgParameters
from nip_astra.scenario_base.protocol.tensordict_agents import Agent
from nip_astra.trainers.protocol.optimizers import annealing_factor, parts_of
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.rl_tensordict_base import Gae, TensorDictRlTrainer

logger = logging.getLogger(__name__)

WITH_CLIP = where("spg.variant", *(name for name, one in VARIANTS.items() if one.is_clipped))
"""Condition of the clip of ratios."""


@register_trainer(TrainerType.SPG)
class SpgTrainer(TensorDictRlTrainer):
    """Opponent shaping: leaders anticipate how followers learn from them.

    With `L_i` the policy loss of agent i, minus its entropy bonus, as a function of all policies;
    F the followers of agent l, which are the agents of later groups; `D_F` their directions:

        spg, pspg   D_l = d_l L_l - (d_l D_F)' m,  (d_F D_F)' m = d_F L_l   (arXiv:1906.01217)
        lola, pola  D_l = d_l L_l - (d_l D_F)' eta d_F L_l
                                  [- (d_l d_F L_l)' eta D_F]                (arXiv:1709.04326)
        sos, psos   both terms, the first scaled down                       (arXiv:1811.08469)

    and Adam steps along `D_l`, clipped like any gradient. The losses of spg, lola and sos have the
    derivatives of the expected return (arXiv:1802.05098), for policies that played; those of pspg,
    pola and psos have PPO's clipped ratios. `eta` is the learning rate of the follower's actor,
    times opponent_step_factor. Minibatches are of whole episodes, since a follower's answer is
    the effect of moves of one round on those of another. See `rl_objectives.stackelberg` and
    `rl_objectives.spg`.
    """

    parameter_groups: ClassVar[tuple[str, ...] | None] = (
        "rl",
        *(f"ppo.{name}" for name in ("clip_low", "clip_high", "critic_coef", "entropy_weight")),
        "ppo.normalize_advantage",
        "message_regression",
    )
    reads_where: ClassVar[Mapping[str, ReadWhere]] = {
        **TensorDictRlTrainer.reads_where,
        "ppo.clip_low": WITH_CLIP,
        "ppo.clip_high": WITH_CLIP,
    }

    class Parameters(SpgParameters):
        """Anticipation of how other agents learn."""

    def _get_loss_module_and_gae(self) -> tuple[SpgObjective, Gae]:
        agents = [self.agents[name] for name in self.agents.names]
        variant, sequence = self.parameters.variant, self.parameters.stackelberg_sequence
        clipped = VARIANTS[variant]._replace(is_clipped=True)
        if self.rl.num_epochs > 1 and VARIANTS[variant] != clipped:
            logger.warning(
                "%s repeats moves of older policies in %d epochs; set rl.num_epochs=1, or "
                "spg.variant=%s, which is meant for that",
                *(variant, self.rl.num_epochs),
                next(name for name, one in VARIANTS.items() if one == clipped),
            )
        lrs = [self.rl.lr * agent.parameters_of_agent.agent_lr_factor.actor for agent in agents]

        def step_sizes() -> list[float]:
            left = annealing_factor(self.rl, self.state.iteration)
            return [left * (self.parameters.opponent_step_factor * lr) for lr in lrs]

        loss_module = SpgObjective(
            self.agents,
            self.hyper_params.ppo,
            self.rl,
            policy_parameters={agent.name: policy_weights(agent) for agent in agents},
            groups=self.train_environment.protocol.stackelberg_sequence
            if sequence is None
            else check_sequence(sequence, self.agents.names),
            rule=self.parameters,
            step_sizes=step_sizes,
            key=(self.hyper_params.seed, "ihvp"),
        )
        return loss_module, self.estimator_of(loss_module)


def check_sequence(
    sequence: Sequence[Sequence[str]], names: Sequence[str]
) -> Sequence[Sequence[str]]:
    """Return the sequence of groups; raise unless it has each agent once."""
    if sorted(name for group in sequence for name in group) != sorted(names):
        raise ConfigurationError(
            f"stackelberg_sequence {[list(group) for group in sequence]} must hold each agent of "
            f"the protocol once: {', '.join(names)}. Leave it out for the protocol's own order."
        )
    return sequence


def policy_weights(agent: Agent) -> list[nn.Parameter]:
    """Return the trained weights of an agent's policy; none for a random agent."""
    if agent.is_random:
        return []
    return [
        weight
        for part in parts_of(agent)
        if part.name.startswith("actor") and part.lr_factor > 0
        for weight in part.parameters
        if weight.requires_grad
    ]

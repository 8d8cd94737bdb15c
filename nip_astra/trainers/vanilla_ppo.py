"""Proximal policy optimisation of provers and verifiers, with own or central critics."""

from __future__ import annotations

from typing import Any, ClassVar

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.ippo import IppoObjective
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.rl_tensordict_base import Gae, TensorDictRlTrainer


@register_trainer(TrainerType.VANILLA_PPO)
class VanillaPpoTrainer(TensorDictRlTrainer):
    """Independent PPO of each agent, with a value function of its own observations (IPPO).

    Every agent takes all others for a part of its environment. With `r = pi(a) / pi_old(a)` and
    advantages `A` by GAE, means over the frames in which the agent acts (arXiv:1707.06347, eq. 7):

        L = -mean min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - entropy_weight mean H
            + critic_coef mean distance(V, A + V_old)

    or, with `ppo.loss_type: kl_penalty`, `-mean r A + beta mean -log r` in place of the first term
    (eq. 8). See `IppoObjective`.
    """

    parameter_groups: ClassVar[tuple[str, ...] | None] = ("rl", "ppo", "message_regression")

    def _get_loss_module_and_gae(self) -> tuple[IppoObjective, Gae]:
        loss_module = IppoObjective(self.agents, self.hyper_params.ppo, self.rl)
        return loss_module, self.estimator_of(loss_module)


@register_trainer(TrainerType.MAPPO)
class MappoTrainer(VanillaPpoTrainer):
    """PPO of each agent, with a value function that observes all channels and the label (MAPPO).

    The loss is that of vanilla_ppo. The value function of an agent, which only training needs,
    sees every channel and the label (arXiv:2103.01955): `V(s, y)` instead of `V(o)`. Its advantages
    do not charge an agent for unknown facts, and vary less. An agent has a value function
    of its own, since provers and verifiers are rewarded for different things.
    """

    trainer_type: ClassVar[str] = "rl_central_critic"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.rl.use_shared_body:
            raise ConfigurationError(
                "mappo cannot share bodies: its value functions see more than policies may. Set "
                "rl.use_shared_body=false, or train with vanilla_ppo."
            )

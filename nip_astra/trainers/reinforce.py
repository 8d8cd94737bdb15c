"""REINFORCE of provers and verifiers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from nip_astra.parameters.conditions import ReadWhere, where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.ippo import ReinforceObjective
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.rl_tensordict_base import Gae, TensorDictRlTrainer

logger = logging.getLogger(__name__)

WITH_CRITIC = where("reinforce.use_advantage_and_critic", True)


@register_trainer(TrainerType.REINFORCE)
class ReinforceTrainer(TensorDictRlTrainer):
    """REINFORCE for each agent, with reward to go or with advantages.

    Means over the frames in which the agent acts (Williams 1992):

        L = -mean log pi(a) G - entropy_weight mean H [+ critic_coef mean distance(V, A + V_old)]

    `G` is the discounted reward to go, or the advantage `A` by GAE. The gradient is that of the
    expected return only for the policy that played, so with `rl.num_epochs` above 1, or several
    minibatches, it is an approximation; a warning says so.
    """

    parameter_groups: ClassVar[tuple[str, ...] | None] = ("rl", "message_regression")
    reads_where: ClassVar[Mapping[str, ReadWhere]] = {
        **TensorDictRlTrainer.reads_where,
        "rl.lmbda": WITH_CRITIC,
        "rl.loss_critic_type": WITH_CRITIC,
        "rl.clip_value": WITH_CRITIC,
    }

    class Parameters(SubParameters):
        """Weights of moves."""

        use_advantage_and_critic: bool = False
        """Whether moves are weighted by advantages instead of rewards to go: less variance, and a
        value function to be learned."""
        critic_coef: Annotated[float, where("use_advantage_and_critic", True)] = Field(
            default=1.0, ge=0
        )
        """Weight of the value loss. It matters if policy and value function share a body."""
        entropy_weight: float = Field(default=0.0, ge=0)
        """Weight of the entropy bonus. Larger explores more."""

    def _get_loss_module_and_gae(self) -> tuple[ReinforceObjective, Gae | None]:
        uses_critic = self.parameters.use_advantage_and_critic
        if self.rl.num_epochs > 1:
            logger.warning(
                "reinforce repeats moves of an older policy in %d epochs; set rl.num_epochs=1 for "
                "the exact gradient",
                self.rl.num_epochs,
            )
        loss_module = ReinforceObjective(
            self.agents,
            self.rl,
            weight="advantage" if uses_critic else "reward_to_go",
            critic_coef=self.parameters.critic_coef,
            entropy_weight=self.parameters.entropy_weight,
        )
        return loss_module, self.estimator_of(loss_module) if uses_critic else None

"""Proximal policy optimisation of provers and verifiers with central critics."""

from __future__ import annotations

from typing import Any, ClassVar

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.types import TrainerType
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.vanilla_ppo import VanillaPpoTrainer


@register_trainer(TrainerType.MAPPO)
class MappoTrainer(VanillaPpoTrainer):
    """Each agent learns by PPO, with a value function that knows more than the agent (MAPPO).

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

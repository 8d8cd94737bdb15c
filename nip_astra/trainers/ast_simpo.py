"""Simple preference optimisation of an attacker, without a reference in the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from tensordict import TensorDict

from nip_astra.parameters.conditions import where
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.preference import orpo_loss, simpo_loss
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.trainers.ast.preference import AstPreferenceTrainer
from nip_astra.trainers.registry import register_trainer


@register_trainer(TrainerType.AST_SIMPO)
class AstSimpoTrainer(AstPreferenceTrainer):
    """Prefer the best probe to the worst by its likelihood per token alone.

    Loss: `-log sigmoid(beta (c - r) - margin)`, mean over pairs, with `c` and `r` the means of
    `log pi` over the tokens of the chosen and of the rejected probe (arXiv:2405.14734, eq. 6).
    Nothing holds the attacker near the reference but the scenario's own reward.

    With `loss: orpo` it is `-c - orpo_weight log sigmoid(log odds(c) - log odds(r))`, where the
    odds of a probe are `p / (1 - p)` of its mean log-probability (arXiv:2403.07691).
    """

    class Parameters(AstPreferenceTrainer.Parameters):
        """Strength of the preference, its margin, and choice of pairs."""

        loss: Literal["simpo", "orpo"] = "simpo"
        """Loss of a pair."""
        orpo_weight: Annotated[float, where("loss", "orpo")] = Field(default=0.1, gt=0)
        """Lambda of ORPO. Larger prefers more and imitates less."""
        beta: Annotated[float, where("loss", "simpo")] = Field(default=2.0, gt=0)
        """Scale of the difference. Larger saturates sooner, so that clear pairs teach less."""
        length_normalised: bool = True
        """Whether a probe counts by its mean log-probability per token, as in the paper; false
        takes the sum, which needs a smaller beta."""
        margin: Annotated[float, where("loss", "simpo")] = Field(default=1.0, ge=0)
        """What the chosen probe's scaled log-probability has to exceed the other's by. Larger goes
        on pushing pairs apart that are told apart already."""

        @model_validator(mode="after")
        def _has_means_for_odds(self) -> AstSimpoTrainer.Parameters:
            if self.loss == "orpo" and not self.length_normalised:
                raise ValueError(
                    "orpo takes the odds of mean log-probabilities; set length_normalised to true"
                )
            return self

    def loss(self, batch: TensorDict) -> LossOutput:
        """The SimPO or ORPO loss of a batch of pairs."""
        chosen_B, rejected_B = self.pair_logprobs(batch)
        if self.parameters.loss == "orpo":
            weight = self.parameters.orpo_weight
            return orpo_loss(chosen_B, rejected_B, -chosen_B, weight=weight)
        return simpo_loss(
            chosen_B, rejected_B, beta=self.parameters.beta, margin=self.parameters.margin
        )

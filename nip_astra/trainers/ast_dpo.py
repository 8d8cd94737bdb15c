"""Online direct preference optimisation of an attacker, with the losses of its family."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from tensordict import TensorDict

from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.preference import preference_loss
from nip_astra.trainers.ast.preference import AstPreferenceTrainer
from nip_astra.trainers.registry import register_trainer


@register_trainer(TrainerType.AST_DPO)
class AstDpoTrainer(AstPreferenceTrainer):
    """Prefer, at every point of a conversation, the best probe to the worst.

    With `h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected)`, log-probabilities summed
    over the tokens that the attacker sampled (or their mean, `length_normalised`), the loss is the
    mean over pairs of, by `loss`:

    - `sigmoid`: `-log sigmoid(beta * h)` (arXiv:2305.18290, eq. 7); with `label_smoothing` e it is
      conservative, `-(1 - e) log sigmoid(beta * h) - e log sigmoid(-beta * h)`;
    - `robust`: `(-(1 - e) log sigmoid(beta * h) + e log sigmoid(-beta * h)) / (1 - 2 e)`, unbiased
      where a share e of the preferences is flipped (arXiv:2403.00409);
    - `hinge`: `max(0, 1 - beta * h)` (SLiC, arXiv:2305.10425).
    """

    class Parameters(AstPreferenceTrainer.Parameters):
        """Strength of the preference, choice of pairs, and the loss on them."""

        loss: Literal["sigmoid", "robust", "hinge"] = "sigmoid"
        """Loss on the margin of a pair."""
        label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
        """Share of preferences taken to be wrong, for instance since the scorer errs. Larger trusts
        each pair less."""

        @model_validator(mode="after")
        def _has_a_use_for_smoothing(self) -> AstDpoTrainer.Parameters:
            if self.loss == "hinge" and self.label_smoothing > 0:
                raise ValueError(
                    "label_smoothing has no meaning for the hinge loss; set it to 0, or loss to "
                    "sigmoid or robust"
                )
            return self

    def loss(self, batch: TensorDict) -> LossOutput:
        """The loss of a batch of pairs."""
        return preference_loss(
            *self.logratios(batch),
            kind=self.parameters.loss,
            beta=self.parameters.beta,
            label_smoothing=self.parameters.label_smoothing,
        )

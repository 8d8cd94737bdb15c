"""Online identity preference optimisation of an attacker."""

from __future__ import annotations

from tensordict import TensorDict

from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.preference import preference_loss
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.trainers.ast.preference import AstPreferenceTrainer
from nip_astra.trainers.registry import register_trainer


@register_trainer(TrainerType.AST_IPO)
class AstIpoTrainer(AstPreferenceTrainer):
    """Prefer the best probe to the worst by a fixed margin, and by no more.

    Loss: `(h - 1 / (2 beta))^2`, mean over pairs, with
    `h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected)` (arXiv:2310.12036, eq. 17).
    Log-probabilities are summed over a probe's tokens as in the paper, or averaged with
    `length_normalised`; the margin asked for, `1 / (2 beta)`, is in nats of whichever it is. Other
    than DPO's, the loss does not push pairs apart without end, so it keeps a bound on how far the
    attacker goes even where one probe always wins.
    """

    def loss(self, batch: TensorDict) -> LossOutput:
        """The IPO loss of a batch of pairs."""
        return preference_loss(*self.logratios(batch), kind="ipo", beta=self.parameters.beta)

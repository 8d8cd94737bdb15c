"""Online direct preference optimisation of an attacker, with the losses of its family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict

from nip_astra.parameters.conditions import where
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.preference import (
    Divergence,
    PairKind,
    divergence_scores,
    kto_loss,
    pair_loss,
    preference_loss,
)
from nip_astra.rl_objectives.reductions import LossOutput, mean_over_rows
from nip_astra.trainers.ast.preference import AstPreferenceTrainer
from nip_astra.trainers.registry import register_trainer

_BASELINE = "kto_baseline"
"""Column of a batch: the mean log-ratio of the probes of its optimizer step, equal in all rows."""


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
    - `hinge`: `max(0, 1 - beta * h)` (SLiC, arXiv:2305.10425);
    - `nca`, `sppo`, `apo_zero`, `apo_down`: of each probe's own log-ratio, see
      `rl_objectives.preference.pair_loss`;
    - `kto`: `1 - sigmoid(beta (c - z))` of the chosen and `1 - sigmoid(beta (z - r))` of the
      rejected probe (arXiv:2402.01306), with z the mean log-ratio of the probes of the optimizer
      step, at least 0, however the step is split into minibatches.

    With a `divergence` the first three compare `f'(pi / ref)` of both probes for their log-ratios
    (f-DPO, arXiv:2309.16240).
    """

    class Parameters(AstPreferenceTrainer.Parameters):
        """Strength of the preference, choice of pairs, and the loss on them."""

        loss: Literal[
            "sigmoid", "robust", "hinge", "nca", "sppo", "apo_zero", "apo_down", "kto"
        ] = "sigmoid"
        """Loss of a pair."""
        divergence: Annotated[Divergence, where("loss", "sigmoid", "robust", "hinge")] = (
            "reverse_kl"
        )
        """Divergence that holds the attacker near the reference: reverse_kl is DPO; forward_kl and
        js hold probes that the reference would say more than those that it would not."""
        alpha: Annotated[float, where("divergence", "alpha")] = Field(default=0.5, gt=0, lt=1)
        """Of the alpha-divergence, between forward_kl (0) and reverse_kl (1)."""
        label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
        """Share of preferences taken to be wrong, for instance since the scorer errs. Larger trusts
        each pair less."""

        @model_validator(mode="after")
        def _has_a_use_for_smoothing(self) -> AstDpoTrainer.Parameters:
            if self.loss not in ("sigmoid", "robust") and self.label_smoothing > 0:
                raise ValueError(
                    f"label_smoothing has no meaning for the {self.loss} loss; set it to 0, or "
                    "loss to sigmoid or robust"
                )
            return self

    def _write_step_totals(self, batches: Sequence[TensorDict]) -> None:
        super()._write_step_totals(batches)
        is_whole = len(batches) == 1 and self.team.size == 1
        if self.parameters.loss != "kto" or is_whole:
            return
        # Of parts of a step none knows the others: all are scored once more before the first.
        with torch.no_grad():
            ratios_B = torch.cat([one for batch in batches for one in self.answer_logratios(batch)])
        for batch in batches:
            batch[_BASELINE] = mean_over_rows(ratios_B).cpu().expand(len(batch))

    def loss(self, batch: TensorDict) -> LossOutput:
        """The loss of a batch of pairs."""
        options = self.parameters
        if options.loss in get_args(PairKind):
            return pair_loss(*self.answer_logratios(batch), kind=options.loss, beta=options.beta)
        if options.loss == "kto":
            ratios_B = torch.cat(self.answer_logratios(batch))
            is_chosen_B = torch.arange(len(ratios_B), device=ratios_B.device) < len(batch)
            of_step_B = batch.get(_BASELINE, None)
            of_batch = mean_over_rows(ratios_B.detach())
            baseline = of_batch if of_step_B is None else of_step_B[0]
            return kto_loss(ratios_B, is_chosen_B, beta=options.beta, baseline=baseline)
        policy_B, reference_B = self.logratios(batch)
        if options.divergence != "reverse_kl":
            chosen_B, rejected_B = (
                divergence_scores(ratios_B, options.divergence, alpha=options.alpha)
                for ratios_B in self.answer_logratios(batch)
            )
            policy_B, reference_B = chosen_B - rejected_B, torch.zeros_like(chosen_B)
        return preference_loss(
            policy_B,
            reference_B,
            kind=options.loss,
            beta=options.beta,
            label_smoothing=options.label_smoothing,
        )

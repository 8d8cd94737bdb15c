"""What the trainers on preference pairs share: the pairs, and the ratios that losses compare."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.rl_objectives.preference import sequence_logprobs
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.preference_samples import (
    GivenProbes,
    PairParameters,
    preference_samples,
)
from nip_astra.trainers.ast_base import AstTrainer


class AstPreferenceTrainer(AstTrainer):
    """Prefer, at every point of a conversation, the best probe to the worst.

    Pairs: best and worst sibling of every node of the tree (ASTPrompter, arXiv:2407.09447). A
    subclass gives `loss`.
    """

    class Parameters(PairParameters):
        """Strength of the preference and choice of pairs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = self.parameters.weak_supervision
        self._given = given and GivenProbes(
            given,
            attacker=self.attacker,
            reference=self.sampler.reference,
            scenario_dir=self.scenario_instance.scenario_dir,
            seed=self.hyper_params.seed,
        )

    def flatten(self, tree: RolloutTree) -> list[Sample]:
        """One sample a preference pair."""
        samples, metrics = preference_samples(tree, self.parameters)
        if self._given:
            samples, more = self._given.replace(
                samples, tree, self.parameters, iteration=self.state.iteration
            )
            metrics |= more
        self.log_metrics(metrics)
        return samples

    def pair_logprobs(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """`log p(chosen)` and `log p(rejected)` under the policy, `[B]` nats, with gradient.

        Sums over tokens, or means where the parameters ask for length normalisation.
        """
        names = ("chosen", "rejected")
        chosen_B, rejected_B = (
            sequence_logprobs(
                logprobs_BT,
                _of_width(batch[f"{name}_mask"], logprobs_BT.shape[1]).to(logprobs_BT.device),
                length_normalised=self.parameters.length_normalised,
            )
            for name, logprobs_BT in zip(names, self.policy_logprobs(batch, *names), strict=True)
        )
        return chosen_B, rejected_B

    def logratios(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """`log p(chosen) - log p(rejected)` under policy and reference, `[B]` nats."""
        chosen_B, rejected_B = self.pair_logprobs(batch)
        return chosen_B - rejected_B, batch["reference_logratio"].to(chosen_B.device)

    def answer_logratios(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """`log policy - log reference` of the chosen and of the rejected probe, `[B]` nats."""
        chosen_B, rejected_B = self.pair_logprobs(batch)
        of_chosen_B = batch["reference_chosen"].to(chosen_B.device)
        of_rejected_B = of_chosen_B - batch["reference_logratio"].to(chosen_B.device)
        return chosen_B - of_chosen_B, rejected_B - of_rejected_B


def _of_width(mask_BT: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(mask_BT, (0, width - mask_BT.shape[1]))

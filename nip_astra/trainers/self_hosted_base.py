"""The base of trainers that prepare whole batches and read the weights.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives import policy_losses
from nip_astra.rl_objectives.kl import AdaptiveKl, kl_estimate
from nip_astra.rl_objectives.policy_losses import importance_weights
from nip_astra.rl_objectives.reductions import LossOutput, masked_mean
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.trainers.language_model_base import Experience
from nip_astra.trainers.service.contract import check_batch, check_takes
from nip_astra.trainers.service.mismatch import mismatch_metrics
from nip_astra.trainers.service.parameters import PolicyLossParameters, RolloutParameters
from nip_astra.trainers.service.samples import score_batch
from nip_astra.trainers.service_base import ServiceTrainer


def policy_loss(
    logprobs_BT: Tensor,
    batch: TensorDict,
    options: PolicyLossParameters,
    *,
    normaliser: float | None,
    max_length: int | None,
    kl_weight: float | None = None,
) -> LossOutput:
    """The loss of a batch by the parameters; see `rl_objectives.policy_losses.policy_loss`.

    Parameters
    ----------
    batch : TensorDict
        `old_logprobs`, `advantages`, `trained_mask`, `reference_logprobs` where `options.kl.weight`
        is above 0, and `correction_weights` where there are any.
    kl_weight : float, optional
        The weight of the divergence, where it was adapted.
    """
    batch = batch.to(logprobs_BT.device)
    has_reference = options.kl.weight > 0
    return policy_losses.policy_loss(
        logprobs_BT,
        batch["old_logprobs"],
        batch["advantages"],
        batch["trained_mask"],
        loss=options.chosen_loss(),
        reduction=options.reduction,
        normaliser=normaliser,
        max_length=max_length,
        weights_BT=batch.get("correction_weights", None),
        reference_logprobs_BT=batch["reference_logprobs"] if has_reference else None,
        kl_weight=options.kl.weight if kl_weight is None else kl_weight,
        kl_value=options.kl.value,
        kl_gradient=options.kl.gradient,
    )


class SelfHostedTrainer(ServiceTrainer):
    """Learn from batches: a subclass gives `_prepare_batch`, which sets `values["advantages"]`.

    The loss is that of `policy_loss` in the parameters; a subclass may give another `loss` of a
    batch, which holds each field of tokens of the prepared batch beside `old_logprobs`.
    """

    class Parameters(RolloutParameters):
        """Rollouts, and the loss."""

        policy_loss: PolicyLossParameters = PolicyLossParameters()
        """The loss of a batch."""

    @abstractmethod
    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Set the advantages of a batch, and give it back with figures to log; hook.

        Parameters
        ----------
        batch : Batch
            `input_ids`, `attention_mask`, `position_ids`, `loss_mask`, `logprobs` `[B, T]`,
            `rewards` `[B]`; `metadata["group_ids"]` and `["run_ids"]`.

        Returns
        -------
        tuple of Batch and dict
            The batch with `values["advantages"]`, floating, `[B]` or `[B, T]`, and numbers by name.
        """

    def prepare(self, trajectories: list[Trajectory]) -> tuple[list[Sample], dict[str, float]]:
        batch = Batch.from_trajectories(trajectories, global_step=self._iteration)
        if len(batch) == 0:
            return [], {}
        options = self._loss_options()
        mismatch: dict[str, float] = {}
        if options.rescore or self.parameters.max_staleness:
            mismatch = self._rescore(batch, options)
        if options.kl.weight > 0:
            agent: ConversationAgent = self.scenario_instance.agents["reference"]
            reference = agent.token_scorer(to="measure the policy's divergence from it")
            batch.values["reference_logprobs"] = self.score(reference, batch)
            mismatch |= self._adapt_kl(batch)
        if not self._is_checked:
            check_takes(self._prepare_batch, "batch")
        given = self._prepare_batch(batch)
        if not self._is_checked:
            given = check_batch(given, trainer=type(self).__name__, num_rows=len(batch))
            self._is_checked = True
        batch, metrics = given
        if "old_logprobs" not in batch.values:
            batch.values["old_logprobs"] = batch.values["logprobs"]
        self.dump("prepared_batch", batch)
        return self.learnt_samples(batch), {**mismatch, **metrics}

    def loss(self, batch: TensorDict) -> LossOutput:
        (logprobs_BT,) = self.policy_logprobs(batch, "response")
        return policy_loss(
            logprobs_BT,
            batch,
            self._loss_options(),
            normaliser=self.num_tokens_in_step(batch),
            max_length=self.agent.sampling.max_new_tokens,
            kl_weight=self.kl.weight,
        )

    @cached_property
    def kl(self) -> AdaptiveKl:
        """The weight of the divergence from the reference, fixed or adapted."""
        return self._loss_options().kl.controller()

    def trainer_state(self) -> dict[str, Any]:
        return super().trainer_state() | ({"kl": self.kl.state()} if self.kl.target else {})

    def load_trainer_state(self, state: dict[str, Any]) -> None:
        super().load_trainer_state(state)
        if "kl" in state:
            self.kl.load_state(state["kl"])

    def _adapt_kl(self, batch: Batch) -> dict[str, float]:
        """Adapt the weight of the divergence, where it has a target."""
        if self.kl.target is None:
            return {}
        values = batch.values
        mask_BT = values["loss_mask"]
        kl_BT = kl_estimate(values["logprobs"], values["reference_logprobs"], "k3", mask_BT=mask_BT)
        divergence, weight = float(masked_mean(kl_BT, mask_BT)), self.kl.weight
        self.kl.update(divergence, num_samples=len(batch))
        return {"kl/reference": divergence, "kl/weight": weight}

    def why_nothing_is_learnt(self, found: Experience) -> str:
        has_other_loss = type(self).loss is not SelfHostedTrainer.loss
        if not found.samples or has_other_loss or self._loss_options().kl.weight > 0:
            return super().why_nothing_is_learnt(found)
        if any(bool(one["advantages"][one["is_trained"]].any()) for one in found.samples):
            return ""
        return f"the advantages of all {len(found.samples)} trajectories are 0."

    def _loss_options(self) -> PolicyLossParameters:
        options: PolicyLossParameters = self.parameters.policy_loss
        return options

    def _compute_old_log_probs(self, batch: Batch) -> Tensor:
        """The policy's own log-probabilities before the update, `[B, T]`, scored again."""
        return score_batch(batch, self.service.compute_logprobs)

    def _rescore(self, batch: Batch, options: PolicyLossParameters) -> dict[str, float]:
        """Score the samples again and measure how much sampler and trainer differ.

        Samples of older weights are corrected for that: by default truncated, see `correction`.
        """
        if "logprobs" not in batch.values:
            raise ConfigurationError(
                "rescore and max_staleness need trajectories with log-probabilities. Set "
                "policy_loss.rescore to false and max_staleness to 0."
            )
        sampled_BT, mask_BT = batch.values["logprobs"], batch.values["loss_mask"]
        scored_BT = self._compute_old_log_probs(batch)
        if options.rescore or self._staleness:
            batch.values["old_logprobs"] = scored_BT
        correction = options.correction or ("truncate" if self._staleness else None)
        if correction is not None:
            batch.values["correction_weights"] = importance_weights(
                scored_BT,
                sampled_BT,
                mask_BT,
                level=options.correction_level,
                mode=correction,
                max_ratio=options.max_mismatch,
            )
        return mismatch_metrics(sampled_BT, scored_BT, mask_BT, level=options.correction_level)

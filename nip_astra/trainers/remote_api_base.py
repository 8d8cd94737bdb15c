"""The base of trainers that hand trajectories with advantages to a training service.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from nip_astra.rl_objectives.policy_losses import LossParameters, policy_loss
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.rl_objectives.registry import PolicyLossName
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.trainers.language_model.steps import STEP_TOTALS
from nip_astra.trainers.service.contract import check_takes, check_trajectories
from nip_astra.trainers.service.mismatch import mismatch_metrics
from nip_astra.trainers.service.parameters import RolloutParameters
from nip_astra.trainers.service.samples import score_batch
from nip_astra.trainers.service_base import ServiceTrainer


class RemoteLossParameters(LossParameters):
    """The loss, a sum over all tokens that are learnt, as of Tinker."""

    loss: PolicyLossName = "importance_sampling"
    """Loss of each token, see `rl_objectives.policy_losses`; cross_entropy reads no advantages."""


class RemoteApiTrainer(ServiceTrainer):
    """Learn by a sum over tokens: a subclass gives `_prepare_trajectories`.

    The loss is a sum over all tokens of the optimizer step, as of Tinker; trajectories whose
    advantage is 0 throughout are left out and counted.
    """

    needs_advantage: ClassVar[bool] = True
    """Whether the hook must set advantages."""

    class Parameters(RolloutParameters):
        """Rollouts, and the loss."""

        policy_loss: RemoteLossParameters = RemoteLossParameters()
        """The loss of a batch."""

    @abstractmethod
    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        """Set `advantage` of each trajectory, a number or one a token; hook.

        Parameters
        ----------
        metrics : dict
            Numbers to log by name; add to it.
        """

    def prepare(self, trajectories: list[Trajectory]) -> tuple[list[Sample], dict[str, float]]:
        metrics: dict[str, Any] = {}
        if not trajectories:
            return [], metrics
        needs_advantage = self._loss_options().loss != "cross_entropy" and self.needs_advantage
        if not self._is_checked:
            check_takes(self._prepare_trajectories, "trajectories", "metrics")
        prepared = self._prepare_trajectories(trajectories, metrics)
        if not self._is_checked:
            prepared = check_trajectories(
                prepared,
                trainer=type(self).__name__,
                needs_advantage=needs_advantage,
                metrics=metrics,
            )
            self._is_checked = True
        if needs_advantage:
            learnt = [one for one in prepared if bool(torch.as_tensor(one.advantage).any())]
        else:
            learnt = prepared
            for one in learnt:
                one.advantage = 1.0
        metrics["rollout/dropped_share"] = 1 - len(learnt) / max(len(prepared), 1)
        batch = Batch.from_trajectories(learnt)
        if learnt and self._async is not None:
            scored_BT = score_batch(batch, self.service.compute_logprobs)
            values = batch.values
            metrics |= mismatch_metrics(values["logprobs"], scored_BT, values["loss_mask"])
        if "logprobs" in batch.values:
            batch.values["old_logprobs"] = batch.values["logprobs"]
        self.dump("prepared_trajectories", batch)
        return self.learnt_samples(batch), metrics

    def _loss_options(self) -> RemoteLossParameters:
        options: RemoteLossParameters = self.parameters.policy_loss
        return options

    def loss(self, batch: TensorDict) -> LossOutput:
        options = self._loss_options()
        (logprobs_BT,) = self.policy_logprobs(batch, "response")
        batch = batch.to(logprobs_BT.device)
        # The loop takes the mean over samples; services take the sum over tokens.
        num_samples = float(batch[STEP_TOTALS][0, 1])
        has_ratio = options.loss != "cross_entropy"
        return policy_loss(
            logprobs_BT,
            batch["old_logprobs"] if has_ratio else None,
            batch["advantages"],
            batch["trained_mask"],
            loss=options.chosen_loss(),
            reduction="token",
            normaliser=len(batch) / num_samples,
        )

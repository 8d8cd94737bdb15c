"""The base of trainers that hand trajectories with advantages to a training service.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from tensordict import TensorDict

from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.masked import masked_fill_zero, masked_sum
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.token_losses import (
    cispo_loss,
    clipped_loss,
    importance_sampling_loss,
)
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.trainers.language_model.steps import STEP_TOTALS
from nip_astra.trainers.service.contract import check_takes, check_trajectories
from nip_astra.trainers.service.losses import clip_share, ratio_metrics
from nip_astra.trainers.service.mismatch import mismatch_metrics
from nip_astra.trainers.service.parameters import RolloutParameters
from nip_astra.trainers.service.samples import samples_of, score_batch
from nip_astra.trainers.service_base import ServiceTrainer

LossFunction = Literal["importance_sampling", "ppo", "cispo", "cross_entropy"]
"""Losses that services have, by the names of Tinker's protocol."""


class ServiceLossParameters(SubParameters):
    """The loss that the service takes; a sum over all tokens that are learnt."""

    loss_fn: LossFunction = "importance_sampling"
    """importance_sampling: `-ratio A`; ppo: clipped; cispo: `-clip(ratio) A log pi`; cross_entropy:
    `-log pi`, without advantages."""
    clip_low_threshold: Annotated[float | None, where("loss_fn", "ppo", "cispo")] = Field(
        default=None, ge=0, le=1
    )
    """Smallest ratio that is not clipped; null takes Tinker's, 0.8 for ppo and 0 for cispo."""
    clip_high_threshold: Annotated[float | None, where("loss_fn", "ppo", "cispo")] = Field(
        default=None, ge=1
    )
    """Largest ratio that is not clipped; null takes Tinker's, 1.2 for ppo and 4 for cispo."""

    def clip_range(self) -> tuple[float, float]:
        """The smallest and largest ratio that is not clipped."""
        low, high = (0.0, 4.0) if self.loss_fn == "cispo" else (0.8, 1.2)
        given = self.clip_low_threshold, self.clip_high_threshold
        return low if given[0] is None else given[0], high if given[1] is None else given[1]


class RemoteApiTrainer(ServiceTrainer):
    """Learn by a service's own loss: a subclass gives `_prepare_trajectories`.

    The loss is a sum over tokens, as services have it, of the whole optimizer step; trajectories
    whose advantage is 0 throughout are left out and counted.
    """

    needs_advantage: ClassVar[bool] = True
    """Whether the hook must set advantages."""

    class Parameters(RolloutParameters):
        """What is played, and which loss the service takes."""

        service_loss: ServiceLossParameters = ServiceLossParameters()
        """The loss of the service."""

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
        needs_advantage = self._loss_options().loss_fn != "cross_entropy" and self.needs_advantage
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
            told = [one for one in prepared if bool(torch.as_tensor(one.advantage).any())]
        else:
            told = prepared
            for one in told:
                one.advantage = 1.0
        metrics["rollout/dropped_share"] = 1 - len(told) / max(len(prepared), 1)
        batch = Batch.from_trajectories(told)
        if told and self._async is not None:
            scored_BT = score_batch(batch, self.service.compute_logprobs)
            values = batch.values
            metrics |= mismatch_metrics(values["logprobs"], scored_BT, values["loss_mask"])
        if "logprobs" in batch.values:
            batch.values["old_logprobs"] = batch.values["logprobs"]
        self.dump("prepared_trajectories", batch)
        return samples_of(batch), metrics

    def _loss_options(self) -> ServiceLossParameters:
        options: ServiceLossParameters = self.parameters.service_loss
        return options

    def loss(self, batch: TensorDict) -> LossOutput:
        options = self._loss_options()
        (logprobs_BT,) = self.policy_logprobs(batch, "response")
        mask_BT = batch["trained_mask"].to(logprobs_BT.device)
        metrics = {}
        if options.loss_fn == "cross_entropy":
            loss_BT = masked_fill_zero(-logprobs_BT, mask_BT)
        else:
            old_BT = batch["old_logprobs"].to(logprobs_BT.device)
            given = (logprobs_BT, old_BT, batch["advantages"].to(logprobs_BT.device), mask_BT)
            low, high = options.clip_range()
            if options.loss_fn == "importance_sampling":
                loss_BT = importance_sampling_loss(*given)
            elif options.loss_fn == "ppo":
                loss_BT = clipped_loss(*given, least_ratio=low, most_ratio=high)
            else:
                loss_BT = cispo_loss(*given, least_ratio=low, most_ratio=high)
            metrics = ratio_metrics(logprobs_BT, old_BT, mask_BT)
            if options.loss_fn != "importance_sampling":
                metrics["clip_share"] = clip_share(
                    *given,
                    least_ratio=low,
                    most_ratio=high,
                    is_one_sided=options.loss_fn == "ppo",
                )
        # The loop takes the mean over samples; services take the sum over tokens.
        num_samples = float(batch[STEP_TOTALS][0, 1])
        return LossOutput(masked_sum(loss_BT, mask_BT) * num_samples / len(batch), metrics)

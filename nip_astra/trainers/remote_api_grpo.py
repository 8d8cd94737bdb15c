"""GRPO by trajectories with advantages."""

from __future__ import annotations

from typing import Any

from nip_astra.parameters.types import TrainerType
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.rollouts.trajectory_advantages import compute_grpo_advantage_for_trajectories
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.remote_api_base import RemoteApiTrainer, ServiceLossParameters
from nip_astra.trainers.service.metrics import log_grpo_metrics
from nip_astra.trainers.service.parameters import GrpoParameters


@register_trainer(TrainerType.REMOTE_API_GRPO)
class RemoteApiGrpoTrainer(RemoteApiTrainer):
    """Raise the runs that did better than others on the same problem, by a service's own loss.

    Advantages are those of `self_hosted_grpo`: `(r - mu) / (std + 1e-6)` by runs of a problem
    (`rl_objectives.run_advantages`).
    """

    class Parameters(GrpoParameters):
        """How rewards become advantages, and which loss the service takes."""

        service_loss: ServiceLossParameters = ServiceLossParameters()
        """The loss of the service."""

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        options = self.parameters
        compute_grpo_advantage_for_trajectories(
            trajectories,
            use_run_ids=options.use_run_ids,
            baseline=options.baseline,
            scale=options.scale,
        )
        log_grpo_metrics(trajectories, metrics)
        return trajectories

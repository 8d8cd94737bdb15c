"""GRPO by trajectories with advantages."""

from __future__ import annotations

from typing import Any

from nip_astra.parameters.types import TrainerType
from nip_astra.rollouts.trajectory import Trajectory, advantages_of
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.remote_api_base import RemoteApiTrainer, RemoteLossParameters
from nip_astra.trainers.service.parameters import GrpoParameters


@register_trainer(TrainerType.REMOTE_API_GRPO)
class RemoteApiGrpoTrainer(RemoteApiTrainer):
    """Raise the runs that did better than others on the same problem.

    Advantages are those of `self_hosted_grpo`: `(r - mu) / (std + 1e-6)` by runs of a problem
    (`rl_objectives.advantages`).
    """

    class Parameters(GrpoParameters):
        """How rewards become advantages, and the loss."""

        policy_loss: RemoteLossParameters = RemoteLossParameters()
        """The loss of a batch."""

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        options = self.parameters
        found = advantages_of(trajectories, options, use_run_ids=options.use_run_ids)
        for trajectory, advantage in zip(trajectories, found.advantages_N.tolist(), strict=True):
            trajectory.advantage = advantage
        metrics |= found.metrics()
        return trajectories

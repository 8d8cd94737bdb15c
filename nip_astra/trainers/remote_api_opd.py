"""On-policy distillation by trajectories with advantages."""

from __future__ import annotations

from typing import Any, ClassVar

from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.advantages import reverse_kl_advantages
from nip_astra.rl_objectives.reductions import masked_mean
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.remote_api_base import RemoteApiTrainer, RemoteLossParameters
from nip_astra.trainers.service.parameters import RolloutParameters
from nip_astra.trainers.service.teacher import DistillationParameters, load_teacher


@register_trainer(TrainerType.REMOTE_API_OPD)
class RemoteApiOpdTrainer(RemoteApiTrainer):
    """Say what the teacher would say, on what the student itself says.

    Each token has the advantage `A_t = -weight (log S_t - log T_t)`, with a `discount` the sum over
    what follows; see `self_hosted_opd`.
    """

    learns_from_rewards: ClassVar[bool] = False

    class Parameters(RolloutParameters):
        """The teacher, and the loss."""

        distillation: DistillationParameters = DistillationParameters()
        """Whom the student learns from."""
        policy_loss: RemoteLossParameters = RemoteLossParameters()
        """The loss of a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = load_teacher(self, self.parameters.distillation)

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        options = self.parameters.distillation
        batch = Batch.from_trajectories(trajectories)
        student_BT, mask_BT = batch.values["logprobs"], batch.values["loss_mask"]
        teacher_BT = self.score(self.teacher, batch)
        advantages_BT = reverse_kl_advantages(
            student_BT, teacher_BT, mask_BT, weight=options.weight, discount=options.discount
        )
        for trajectory, advantages_T in zip(trajectories, advantages_BT, strict=True):
            trajectory.advantage = advantages_T[: len(trajectory)]
        metrics["opd/reverse_kl"] = float(masked_mean(student_BT - teacher_BT, mask_BT))
        return trajectories

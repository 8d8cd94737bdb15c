"""On-policy distillation of a language model on the problems of a task."""

from __future__ import annotations

from typing import Any, ClassVar

from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.advantages import reverse_kl_advantages
from nip_astra.rl_objectives.reductions import masked_mean
from nip_astra.rollouts.batch import Batch
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.self_hosted_base import SelfHostedTrainer
from nip_astra.trainers.service.parameters import ImportanceLossParameters, RolloutParameters
from nip_astra.trainers.service.teacher import DistillationParameters, load_teacher


@register_trainer(TrainerType.SELF_HOSTED_OPD)
class SelfHostedOpdTrainer(SelfHostedTrainer):
    """Say what the teacher would say, on what the student itself says.

    Each token has the advantage `A_t = -weight (log S_t - log T_t)`, with a `discount` the sum over
    what follows; its policy gradient is that of KL(student || teacher), exactly so in expectation
    (`rl_objectives.advantages`). Rewards are not learnt from; they are logged.
    """

    learns_from_rewards: ClassVar[bool] = False

    class Parameters(RolloutParameters):
        """The teacher, and which loss is taken."""

        distillation: DistillationParameters = DistillationParameters()
        """Whom the student learns from."""
        policy_loss: ImportanceLossParameters = ImportanceLossParameters()
        """The loss of a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = load_teacher(self, self.parameters.distillation)

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        options = self.parameters.distillation
        student_BT, mask_BT = batch.values["logprobs"], batch.values["loss_mask"]
        teacher_BT = self.score(self.teacher, batch)
        batch.values["teacher_logprobs"] = teacher_BT
        batch.values["advantages"] = reverse_kl_advantages(
            student_BT, teacher_BT, mask_BT, weight=options.weight, discount=options.discount
        )
        return batch, {"opd/reverse_kl": float(masked_mean(student_BT - teacher_BT, mask_BT))}

"""Trainers that pass trajectories with advantages to a training service.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from nip_astra.errors import DataError
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.policy_losses import LossParameters, policy_loss
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.rl_objectives.registry import PolicyLossName
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import Sample, score_batch
from nip_astra.rollouts.trajectory import TokenSpan, Trajectory, advantages_of
from nip_astra.scenario_base.tasks.base import environment_of, opening_of
from nip_astra.trainers.language_model_base import HAS_GIVEN_OLD, STEP_TOTALS
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.service.base import (
    CollectedRollout,
    DistillationParameters,
    GrpoParameters,
    RolloutParameters,
    ServiceTrainer,
)
from nip_astra.trainers.service.contract import check_takes, check_trajectories
from nip_astra.trainers.service.metrics import mismatch_metrics


class RemoteLossParameters(LossParameters):
    """The loss, a sum over all trained tokens, as in Tinker."""

    loss: PolicyLossName = "importance_sampling"
    """Loss of each token, see `rl_objectives.policy_losses`; cross_entropy reads no advantages."""


class RemoteApiTrainer(ServiceTrainer):
    """Base of trainers with a sum over tokens; subclasses implement `_prepare_trajectories`.

    The loss is a sum over all tokens of the optimizer step, as in Tinker; trajectories whose
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
        """Hook: set `advantage` of each trajectory, a number or one per token.

        Parameters
        ----------
        metrics : dict
            Numbers to log by name; add to it.
        """

    def prepare(self, trajectories: list[Trajectory]) -> tuple[list[Sample], dict[str, float]]:
        metrics: dict[str, Any] = {}
        if not trajectories:
            return [], metrics
        needs_advantage = (
            self.parameters.policy_loss.loss != "cross_entropy" and self.needs_advantage
        )
        if not self._is_checked:
            check_takes(self._prepare_trajectories, "trajectories", "metrics")
        prepared = self._call_hook(trajectories, metrics)
        if not self._is_checked:
            prepared = check_trajectories(
                prepared,
                trainer=type(self).__name__,
                needs_advantage=needs_advantage,
                metrics=metrics,
            )
            self._is_checked = True
        if needs_advantage:
            learned = [one for one in prepared if bool(torch.as_tensor(one.advantage).any())]
        else:
            learned = prepared
            for one in learned:
                one.advantage = 1.0
        metrics["rollout/dropped_fraction"] = 1 - len(learned) / max(len(prepared), 1)
        batch = Batch.from_trajectories(learned)
        if learned and self._async is not None:
            scored_BT = score_batch(batch, self.service.compute_logprobs)
            values = batch.values
            metrics |= mismatch_metrics(values["logprobs"], scored_BT, values["loss_mask"])
        if "logprobs" in batch.values:
            batch.values["old_logprobs"] = batch.values["logprobs"]
            is_corrected = self.parameters.policy_loss.loss == "importance_sampling"
            if is_corrected or self._staleness:
                # Their ratio is that to the sampler, which corrects for its other weights.
                batch.values[HAS_GIVEN_OLD] = torch.ones(len(batch))
        self.dump("prepared_trajectories", batch)
        return self.learnt_samples(batch), metrics

    def _call_hook(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        """Return the result of `_prepare_trajectories`, not yet checked."""
        return self._prepare_trajectories(trajectories, metrics)

    def loss(self, batch: TensorDict) -> LossOutput:
        options = self.parameters.policy_loss
        (logprobs_BT,) = self.policy_logprobs(batch, "response")
        batch = batch.to(logprobs_BT.device)
        # The loop takes the mean over samples; services take the sum over tokens.
        num_samples = float(batch[STEP_TOTALS][0, 1])
        # Given solutions were not sampled: to a ratio they count as the policy's own.
        has_ratio = options.loss != "cross_entropy" and "old_logprobs" in batch.keys()  # noqa: SIM118 - `in` of a TensorDict asks for values
        return policy_loss(
            logprobs_BT,
            self.old_logprobs(batch, logprobs_BT) if has_ratio else None,
            batch["advantages"],
            batch["trained_mask"],
            loss=options.chosen_loss(),
            reduction="token",
            normaliser=len(batch) / num_samples,
        )


@register_trainer(TrainerType.REMOTE_API_GRPO)
class RemoteApiGrpoTrainer(RemoteApiTrainer):
    """GRPO on trajectories, with a loss of the training service.

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


@register_trainer(TrainerType.REMOTE_API_OPD)
class RemoteApiOpdTrainer(RemoteApiTrainer):
    """On-policy distillation on trajectories, with a loss of the training service.

    Each token has the advantage `A_t = -weight (log S_t - log T_t)`, with a `discount` the sum over
    what follows; see `self_hosted_opd`.
    """

    learns_from_rewards: ClassVar[bool] = False

    class Parameters(RolloutParameters):
        """The teacher, and the loss."""

        distillation: DistillationParameters = DistillationParameters()
        """The teacher of the student."""
        policy_loss: RemoteLossParameters = RemoteLossParameters()
        """The loss of a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = self.load_teacher()

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        batch = Batch.from_trajectories(trajectories)
        if self._staleness:
            batch.values["old_logprobs"] = score_batch(batch, self.service.compute_logprobs)
        metrics |= self.imitate(self.teacher, batch)
        for trajectory, advantages_T in zip(trajectories, batch.values["advantages"], strict=True):
            trajectory.advantage = advantages_T[: len(trajectory)]
        return trajectories


class CrossEntropyParameters(RemoteLossParameters):
    """The loss, a sum over all trained tokens, as in Tinker."""

    loss: PolicyLossName = "cross_entropy"
    """Loss of each token, see `rl_objectives.policy_losses`."""


@register_trainer(TrainerType.REMOTE_API_CROSS_ENTROPY)
class RemoteApiCrossEntropyTrainer(RemoteApiTrainer):
    """Supervised fine-tuning on a task's solutions: `-log pi`, summed over their tokens.

    Nothing is sampled in training; `group_size`, resampling and staleness have no use.
    """

    needs_advantage: ClassVar[bool] = False
    samples_in_training: ClassVar[bool] = False
    never_reads: ClassVar[tuple[str, ...]] = (
        "remote_api_cross_entropy.group_size",
        "remote_api_cross_entropy.mask_truncated_completions",
        "remote_api_cross_entropy.max_resampling_rounds",
        "remote_api_cross_entropy.max_staleness",
    )

    class Parameters(RolloutParameters):
        """The loss."""

        policy_loss: CrossEntropyParameters = CrossEntropyParameters()
        """The loss of a batch."""

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        return trajectories

    def _rollout_of(self, iteration: int) -> CollectedRollout:
        """Return the openings of an iteration's problems, each followed by its solution."""
        count = self.training.num_episodes_per_experience
        numbers = range(iteration * count, (iteration + 1) * count)
        return CollectedRollout([self._solved(self.problem(number)) for number in numbers], {})

    def _trajectories_of(self, problem: int) -> list[Trajectory]:
        return [self._solved(problem)]

    def _solved(self, problem: int) -> Trajectory:
        environment = environment_of(self.task, "train", problem)
        if environment.solution is None:
            raise DataError(
                f"problem {problem} of the task {type(self.task).__name__} has no solution. Choose "
                "a task with solutions, or train by reward with remote_api_grpo."
            )
        agent = self.agent
        opening = agent.tokenize(opening_of(environment))
        (context,) = agent.contexts([opening], continued=[environment.begins_answer])
        solution = agent.encode_turn(environment.solution)
        spans = [TokenSpan(context), TokenSpan(solution, [0.0] * len(solution))]
        trajectory = Trajectory.from_spans(spans, reward=1.0, group_id=problem)
        trajectory.logprobs = None  # nothing was sampled
        return trajectory

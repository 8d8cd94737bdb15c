"""Supervised training on a task's solutions."""

from __future__ import annotations

from typing import Any, ClassVar

from nip_astra.errors import DataError
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.registry import PolicyLossName
from nip_astra.rollouts.trajectory import TokenSpan, Trajectory
from nip_astra.scenario_base.tasks.base import environment_of, opening_of
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.remote_api_base import RemoteApiTrainer, RemoteLossParameters
from nip_astra.trainers.service.parameters import RolloutParameters
from nip_astra.trainers.service.playing import CollectedRollout


class CrossEntropyParameters(RemoteLossParameters):
    """The loss, a sum over all tokens that are learnt, as of Tinker."""

    loss: PolicyLossName = "cross_entropy"
    """Loss of each token, see `rl_objectives.policy_losses`."""


@register_trainer(TrainerType.REMOTE_API_CROSS_ENTROPY)
class RemoteApiCrossEntropyTrainer(RemoteApiTrainer):
    """Learn the solutions of a task's problems by heart: `-log pi`, summed over their tokens.

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
        """The openings of an iteration's problems, each followed by its solution."""
        count = self.training.num_episodes_per_experience
        numbers = range(iteration * count, (iteration + 1) * count)
        return CollectedRollout([self._solved(self.problem(number)) for number in numbers], {})

    def _trajectories_of(self, problem: int) -> list[Trajectory]:
        return [self._solved(problem)]

    def _solved(self, problem: int) -> Trajectory:
        environment = environment_of(self.task, "train", problem)
        if environment.solution is None:
            raise DataError(
                f"the solutions of the task {type(self.task).__name__} were to be learnt, but "
                f"problem {problem} has none. Choose a task with solutions, or train by reward "
                "with remote_api_grpo."
            )
        agent = self.agent
        turns = [agent.turn(one.role, one.text) for one in opening_of(environment)]
        (context,) = agent.contexts([turns])
        said = agent.say(environment.solution)
        spans = [TokenSpan(context), TokenSpan(said, [0.0] * len(said))]
        trajectory = Trajectory.from_spans(spans, reward=1.0, group_id=problem)
        trajectory.logprobs = None  # nothing was sampled
        return trajectory

"""Expert iteration of chat models."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer
from nip_astra.trainers.text.selection import above_threshold, sampling_weights, weighted_sample
from nip_astra.trainers.text.statistics import episode_returns
from nip_astra.utils.nested_array_dict import NestedArrayDict, concatenate_nested_array_dicts
from nip_astra.utils.seeding import derive_seed


@register_trainer(TrainerType.PURE_TEXT_EI)
class PureTextEiTrainer(PureTextRlTrainer):
    """Each model learns to answer as its agents did in the rollouts that they were paid well for.

    For every agent, rollouts are chosen by its own return `R = sum of its rewards`: those with
    `R >= reward_threshold`, or a sample with weights that grow with R. A group's model is then
    trained by a supervised job on its agents' answers in them (arXiv:2412.08897, section 5). In
    a share of the rollouts a verifier learns the right decision in place of its own.
    """

    class Parameters(SubParameters):
        """Expert iteration."""

        rollout_selection_method: Literal["threshold", "weighted_sampling"] = "threshold"
        """How rollouts are chosen: those with a good return, or a sample that leans to them."""
        reward_threshold: Annotated[float, where("rollout_selection_method", "threshold")] = 0.9
        """Least return of an agent in a rollout that it learns from. Larger is choosier."""
        weighting_use_replacement: Annotated[
            bool, where("rollout_selection_method", "weighted_sampling")
        ] = True
        """Whether a rollout may be drawn several times."""
        weighting_epsilon: Annotated[
            float, where("rollout_selection_method", "weighted_sampling")
        ] = Field(default=0.1, ge=0)
        """Weight of a uniform choice beside that by returns. Larger leans less to good ones."""
        weighting_minimum: Annotated[
            float | None, where("rollout_selection_method", "weighted_sampling")
        ] = Field(default=None, ge=0)
        """Returns below it count as it; null counts from the smallest return."""
        weighting_sample_size_factor: Annotated[
            float, where("rollout_selection_method", "weighted_sampling")
        ] = Field(default=0.5, gt=0)
        """Size of the sample, as a multiple of the number of rollouts."""
        fine_tune_on_all_previous_rollouts: bool = False
        """Whether rollouts of all iterations so far are chosen from, instead of this one's."""

    def _stage_create_fine_tune_jobs(self, rollouts: NestedArrayDict) -> None:
        if self.parameters.fine_tune_on_all_previous_rollouts:
            before = [self._rollouts_of(number) for number in range(self.state.iteration)]
            rollouts = concatenate_nested_array_dicts([*before, rollouts])
        replaced, own_guess = self._split_for_guess_replacement(rollouts, self.state.iteration)
        for group in self.shared_model_groups.values():
            chosen = {}
            for agent in group.agents:
                among = own_guess if agent.is_verifier else rollouts
                chosen[agent.name] = among[self._select(among, agent.number, agent.name)]
            verifiers = [agent.name for agent in group.agents if agent.is_verifier]
            group.create_supervised_fine_tune_job(chosen, dict.fromkeys(verifiers, replaced))

    def _select(self, rollouts: NestedArrayDict, agent: int, name: str) -> npt.NDArray[np.int64]:
        """The rollouts that an agent learns from."""
        parameters, returns_N = self.parameters, episode_returns(rollouts)[:, agent]
        if parameters.rollout_selection_method == "threshold" or not len(returns_N):
            return above_threshold(returns_N, parameters.reward_threshold)
        weights_N = sampling_weights(
            returns_N, minimum=parameters.weighting_minimum, epsilon=parameters.weighting_epsilon
        )
        return weighted_sample(
            weights_N,
            size_factor=parameters.weighting_sample_size_factor,
            with_replacement=parameters.weighting_use_replacement,
            seed=derive_seed(self.hyper_params.seed, "ei", name, self.state.iteration),
        )

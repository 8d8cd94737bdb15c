"""Expert iteration of chat models."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer
from nip_astra.trainers.text.rollouts import episode_returns
from nip_astra.utils.nested_array_dict import NestedArrayDict, concatenate_nested_array_dicts
from nip_astra.utils.seeding import derive_seed

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


def above_threshold(returns_N: Floats, threshold: float) -> Places:
    """Return the indices of returns that are at least the threshold, in order."""
    return np.flatnonzero(returns_N >= threshold).astype(np.int64)


def sampling_weights(returns_N: Floats, *, minimum: float | None, epsilon: float) -> Floats:
    """Return probabilities of rollouts, `[N]`: larger returns are more likely.

    With w the returns less the smallest one, or, where a minimum is given, the returns but at least
    it: `p = (w / sum w + epsilon / N) / (1 + epsilon)`. Where all w are 0, p is uniform.

    `minimum` is at least 0; None shifts the returns so that the smallest is 0. A larger `epsilon`
    is closer to uniform.
    """
    weights_N = returns_N - returns_N.min() if minimum is None else np.maximum(returns_N, minimum)
    total = weights_N.sum()
    uniform = np.full(len(returns_N), 1.0 / len(returns_N))
    shares_N = weights_N / total if total > 0 else uniform
    mixed_N: Floats = shares_N + epsilon * uniform
    probabilities_N: Floats = mixed_N / mixed_N.sum()
    return probabilities_N


def weighted_sample(
    weights_N: Floats, *, size_factor: float, with_replacement: bool, seed: int
) -> Places:
    """Sample `round(size_factor N)` indices by their probabilities, in order.

    Without replacement there are at most as many as have a probability above 0.
    """
    size = round(size_factor * len(weights_N))
    if not with_replacement:
        size = min(size, int((weights_N > 0).sum()))
    generator = np.random.default_rng(seed)
    drawn = generator.choice(len(weights_N), size=size, replace=with_replacement, p=weights_N)
    return np.sort(drawn).astype(np.int64)


@register_trainer(TrainerType.PURE_TEXT_EI)
class PureTextEiTrainer(PureTextRlTrainer):
    """Expert iteration: models are fine-tuned on their agents' answers in high-return rollouts.

    For every agent, rollouts are chosen by its own return `R = sum of its rewards`: those with
    `R >= reward_threshold`, or a sample with weights that grow with R. A group's model is then
    trained by a supervised job on its agents' answers in them (arXiv:2412.08897, section 5). In
    a share of the rollouts a verifier learns the right decision in place of its own.
    """

    never_reads: ClassVar[tuple[str, ...]] = ("text_rl.fine_tune_nll_weight",)

    class Parameters(SubParameters):
        """Expert iteration."""

        rollout_selection_method: Literal["threshold", "weighted_sampling"] = "threshold"
        """Selection of rollouts: those with a high return, or a sample weighted by returns."""
        reward_threshold: Annotated[float, where("rollout_selection_method", "threshold")] = 0.9
        """Minimum return of an agent in a training rollout. Larger is more selective."""
        weighting_use_replacement: Annotated[
            bool, where("rollout_selection_method", "weighted_sampling")
        ] = True
        """Whether a rollout may be drawn several times."""
        weighting_epsilon: Annotated[
            float, where("rollout_selection_method", "weighted_sampling")
        ] = Field(default=0.1, ge=0)
        """Weight of uniform sampling beside that by returns. Larger prefers high returns less."""
        weighting_minimum: Annotated[
            float | None, where("rollout_selection_method", "weighted_sampling")
        ] = Field(default=None, ge=0)
        """Lower bound of returns; null counts from the smallest return."""
        weighting_sample_size_factor: Annotated[
            float, where("rollout_selection_method", "weighted_sampling")
        ] = Field(default=0.5, gt=0)
        """Size of the sample, as a multiple of the number of rollouts."""
        fine_tune_on_all_previous_rollouts: bool = False
        """Whether rollouts are selected from all iterations so far, instead of the current one."""

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
        """Return the rollouts that an agent learns from."""
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

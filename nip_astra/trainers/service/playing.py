"""Who plays the rollouts of a trainer on trajectories: this process, others, or a service."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import LanguageModel, TokenModel
from nip_astra.language_models.services.training import LocalTrainingService, TrainingService
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.rollouts.trajectory_advantages import advantages_of
from nip_astra.samplers.tasks import Sample
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_instance import ScenarioInstance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectedRollout:
    """The rollout of an iteration's problems.

    Attributes
    ----------
    trajectories : list of Trajectory
        Those to learn from.
    metrics : dict[str, float]
        Figures to log.
    records : list
        Tables of transcripts for the run's records.
    """

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    records: list[list[list[Any]]] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """Plain values and tensors for a checkpoint."""
        return {
            "trajectories": [one.to_plain() for one in self.trajectories],
            "metrics": self.metrics,
            "records": self.records,
        }

    @classmethod
    def from_plain(cls, _iteration: int, plain: Mapping[str, Any]) -> CollectedRollout:
        """The rollout of `to_plain`."""
        rows = [Trajectory(**fields) for fields in plain["trajectories"]]
        return cls(rows, plain["metrics"], plain["records"])


class SamplingThread:
    """Collects rollouts in a thread beside the main one, with a copy of the policy's weights.

    Parameters
    ----------
    policy, sampler : LanguageModel
        What learns, and its `sampler_copy`, which only this thread uses.
    """

    def __init__(
        self,
        collect: Callable[[int], CollectedRollout],
        policy: LanguageModel,
        sampler: LanguageModel,
    ) -> None:
        self._collect, self._policy, self._sampler = collect, policy, sampler
        self._executor: ThreadPoolExecutor | None = None

    def begin(self, iterations: Sequence[int]) -> list[Callable[[], CollectedRollout]]:
        """Start rollouts with the current weights."""
        if self._executor is None:
            # One thread: weights stay during a rollout, and rollouts keep their order.
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="async-rollouts")
        weights = self._policy.weight_copy()
        return [self._executor.submit(self._run, one, weights).result for one in iterations]

    def _run(self, iteration: int, weights: Mapping[str, Tensor]) -> CollectedRollout:
        # Grad mode belongs to a thread.
        with torch.no_grad():
            self._sampler.take_weights(weights)
            return self._collect(iteration)


def sample_of_service(service: TrainingService, agent: ConversationAgent) -> Sample | None:
    """What draws in place of an agent's own model; None where the service has that draw."""
    is_own = (
        isinstance(service, LocalTrainingService)
        and type(service).sample is LocalTrainingService.sample
        and service.model is agent.language_model
    )
    return None if is_own else service.sample


def check_who_plays(
    hyper_params: HyperParameters,
    scenario_instance: ScenarioInstance,
    settings: ExperimentSettings | None,
) -> None:
    """Refuse to divide what a service plays, and tell of actors that have nothing to do.

    Raises
    ------
    ConfigurationError
        When parts, or actors, were asked for that nobody could play.
    """
    agent = scenario_instance.agents.get("policy")
    options = getattr(hyper_params, scenario_instance.kind, None)
    num_parts = int(getattr(options, "num_rollout_parts", 1))
    num_actors = 0 if settings is None else settings.num_actors
    if agent is None or (num_parts == 1 and not num_actors):
        return
    elsewhere = _what_plays_elsewhere(hyper_params, agent.language_model)
    if elsewhere and num_parts > 1:
        raise ConfigurationError(
            f"rollouts were to be cut into {num_parts} parts (task.num_rollout_parts), but "
            f"{elsewhere} samples what the policy says, and is asked about all of it at once: "
            "nothing is left to divide. Leave num_rollout_parts at 1."
        )
    task = vars(scenario_instance).get("task")
    if elsewhere and getattr(task, "scorer", None) is None:
        raise ConfigurationError(
            f"rollouts by {num_actors} actors were asked for, but {elsewhere} samples what the "
            "policy says, and is asked about all of it at once: nothing is left for them to play "
            "or to rate. Leave num_actors at 0."
        )
    if not elsewhere and num_actors > num_parts:
        logger.warning(
            "%d of %d actors have nothing to play, since rollouts are cut into %d: set "
            "task.num_rollout_parts to a multiple of num_actors",
            num_actors - num_parts,
            num_actors,
            num_parts,
        )


def _what_plays_elsewhere(hyper_params: HyperParameters, model: TokenModel) -> str:
    """What samples a policy whose weights are not in this process; nothing where they are."""
    service = getattr(getattr(hyper_params, hyper_params.trainer, None), "train_service", None)
    if service is not None and service.backend != "local":
        return f"the service {service.backend!r}"
    return "" if model.is_in_this_process else type(model).__name__


def informative_groups(
    trajectories: Sequence[Trajectory],
    *,
    needs_spread: bool = True,
    use_run_ids: bool = True,
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Trajectories of groups that teach something, and the others.

    A group without any reward never does.

    Parameters
    ----------
    needs_spread : bool
        Whether a group of equal rewards has no signal.
    use_run_ids : bool
        See `advantages_of`.
    """
    if not trajectories:
        return [], []
    found = advantages_of(trajectories, use_run_ids=use_run_ids)
    groups = dict.fromkeys(one.group_id for one in trajectories)
    is_flat = dict(zip(groups, found.is_zero_variance_P.tolist(), strict=True))
    known = {one.group_id for one in trajectories if one.reward is not None}
    # Minibatches depend on this order: groups of equal rewards come last.
    ordered = sorted(trajectories, key=lambda one: is_flat[one.group_id])
    is_informative = [
        one.group_id in known and not (needs_spread and is_flat[one.group_id]) for one in ordered
    ]
    informative = [one for one, teaches in zip(ordered, is_informative, strict=True) if teaches]
    return informative, [
        one for one, teaches in zip(ordered, is_informative, strict=True) if not teaches
    ]

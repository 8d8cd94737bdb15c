"""Rollouts of trainers on trajectories: where they are sampled, and which are informative."""

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
from nip_astra.language_models.base import LanguageModel
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.rollouts.trajectory import Trajectory, zero_variance_of
from nip_astra.scenario_instance import ScenarioInstance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectedRollout:
    """Trajectories to learn from, metrics, and tables of transcripts for the run's records."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    records: list[list[list[Any]]] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values and tensors for a checkpoint."""
        return {
            "trajectories": [one.to_plain() for one in self.trajectories],
            "metrics": self.metrics,
            "records": self.records,
        }

    @classmethod
    def from_plain(cls, _iteration: int, plain: Mapping[str, Any]) -> CollectedRollout:
        """Restore the rollout of `to_plain`."""
        rows = [Trajectory(**fields) for fields in plain["trajectories"]]
        return cls(rows, plain["metrics"], plain["records"])


class SamplingThread:
    """Collects rollouts in a second thread, with a copy of the policy's weights.

    `sampler` is the policy's `sampler_copy`, which only this thread uses.
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


def check_who_plays(
    hyper_params: HyperParameters,
    scenario_instance: ScenarioInstance,
    settings: ExperimentSettings | None,
) -> None:
    """Raise if rollouts of a service or engine would be split, and warn of idle actors."""
    agent = scenario_instance.agents.get("policy")
    options = getattr(hyper_params, scenario_instance.kind, None)
    num_parts = int(getattr(options, "num_rollout_parts", 1))
    num_actors = 0 if settings is None else settings.num_actors
    if agent is None or (num_parts == 1 and not num_actors):
        return
    model = agent.language_model
    service = getattr(getattr(hyper_params, hyper_params.trainer, None), "train_service", None)
    sampler = "" if model.is_in_this_process else type(model).__name__
    if service is not None and service.backend != "local":
        sampler = f"the service {service.backend!r}"
    if sampler and num_parts > 1:
        raise ConfigurationError(
            f"task.num_rollout_parts is {num_parts}, but {sampler} samples whole rollouts. Set it "
            "to 1."
        )
    task = vars(scenario_instance).get("task")
    if sampler and getattr(task, "scorer", None) is None:
        raise ConfigurationError(
            f"num_actors is {num_actors}, but {sampler} samples whole rollouts and the task has no "
            "scorer. Set it to 0."
        )
    if not sampler and num_actors > num_parts:
        logger.warning(
            "%d of %d actors have nothing to play, since rollouts are cut into %d: set "
            "task.num_rollout_parts to a multiple of num_actors",
            num_actors - num_parts,
            num_actors,
            num_parts,
        )


def informative_groups(
    trajectories: Sequence[Trajectory],
    *,
    needs_spread: bool = True,
    use_run_ids: bool = True,
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Split trajectories into those of informative groups, and the others.

    A group without any reward is not informative, nor, if `needs_spread`, one of equal rewards.
    """
    if not trajectories:
        return [], []
    groups = dict.fromkeys(one.group_id for one in trajectories)
    are_flat = zero_variance_of(trajectories, use_run_ids=use_run_ids)
    is_flat = dict(zip(groups, are_flat, strict=True))
    known = {one.group_id for one in trajectories if one.reward is not None}
    # Minibatches depend on this order: groups of equal rewards come last.
    ordered = sorted(trajectories, key=lambda one: is_flat[one.group_id])
    informative: list[Trajectory] = []
    others: list[Trajectory] = []
    for one in ordered:
        teaches = one.group_id in known and not (needs_spread and is_flat[one.group_id])
        (informative if teaches else others).append(one)
    return informative, others

"""A policy answers the problems of a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.adapters import adapters_drawn_from
from nip_astra.language_models.services.patience import open_accounts
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters, polymorphic
from nip_astra.parameters.types import ScenarioType
from nip_astra.scenario_base.agents import (
    ConversationAgentParameters,
    build_agent,
    build_reference,
    load_language_model,
)
from nip_astra.scenario_base.tasks.base import TASKS, TaskParameters, build_task
from nip_astra.scenario_base.tasks.dataset import DatasetTask
from nip_astra.scenario_instance import TaskInstance
from nip_astra.scenarios.registry import Scenario, register_scenario
from nip_astra.scorers.base import open_services
from nip_astra.utils.devices import resolve_device
from nip_astra.utils.seeding import derive_seed

TaskField = polymorphic(TASKS.get, TaskParameters)


class TaskEvaluationParameters(SubParameters):
    """How a policy is measured on problems that it does not learn from."""

    num_problems: int = Field(default=300, ge=1)
    """Held-out problems before and after training; of a data set at most all it has."""
    num_dev_problems: int = Field(default=100, ge=1)
    """Problems of a dev evaluation."""
    num_dev_runs: int = Field(default=1, ge=1, le=10_000)
    """Runs of each problem of a dev evaluation; with more than one, pass@k is logged for k up to
    this."""
    num_runs: int = Field(default=1, ge=1, le=10_000)
    """Runs of each problem; with more than one, pass@k is told for k up to this."""
    success_reward: float = 1.0
    """Reward from which a run counts as right."""
    batch_size: int = Field(default=256, ge=1)
    """Problems played at once."""


@register_scenario(ScenarioType.TASK)
class TaskScenario(Scenario):
    """A policy answers problems in messages, and an environment or a scorer rewards it."""

    trainer_types: ClassVar[tuple[str, ...]] = ("rl",)

    class Parameters(Scenario.Parameters):
        """Who answers what."""

        policy: ConversationAgentParameters
        """The language model that learns."""
        task: TaskField  # type: ignore[valid-type]
        """What it answers, by its `_type`."""
        max_turns: int = Field(default=8, ge=1)
        """Turns after which an episode that is not over ends with reward 0."""
        num_rollout_parts: int = Field(default=1, ge=1, le=1024)
        """Parts of whole problems into which rollouts and evaluations are cut, where the policy's
        weights are in this process. As many processes of one run, or actors of Ray, play them at
        once, or, of small models on the CPU where that is faster, as there are cores. More parts
        keep more of them busy, and compute more slowly in one. The last digits of what the policy
        says depend on this number, and on no number of processes."""
        evaluation: TaskEvaluationParameters = TaskEvaluationParameters()
        """How it is measured."""

    @classmethod
    def build(
        cls,
        hyper_params: HyperParameters,
        parameters: Any,
        settings: ExperimentSettings,
        *,
        scenario_dir: Path | None,
        trainer_type: str,
    ) -> TaskInstance:
        device = resolve_device(settings.device)
        with adapters_drawn_from(derive_seed(hyper_params.seed, "adapter")):
            model = load_language_model(
                parameters.policy.language_model,
                device=device,
                scenario_dir=scenario_dir,
                trainable=True,
            )
        policy = build_agent("policy", parameters.policy, model)
        reference = build_reference(parameters.policy, model)
        task = build_task(
            parameters.task, seed=hyper_params.seed, device=device, scenario_dir=scenario_dir
        )
        if isinstance(task, DatasetTask):
            task.check_lengths(policy)
        services = open_services(task.scorers, settings)
        open_accounts(services)
        return TaskInstance(
            kind=str(ScenarioType.TASK),
            agents={"policy": policy, "reference": reference},
            task=task,
            scenario_dir=scenario_dir,
            services=services,
        )

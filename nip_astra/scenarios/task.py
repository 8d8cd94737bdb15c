"""Tasks: a policy solves problems in messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.adapters import adapters_drawn_from
from nip_astra.language_models.services.retrying import resume_usage
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
from nip_astra.scenario_base.tasks.tools import ToolUseParameters, build_tools
from nip_astra.scenario_instance import TaskInstance
from nip_astra.scenarios.registry import Scenario, register_scenario
from nip_astra.scorers.base import open_services
from nip_astra.utils.devices import resolve_device
from nip_astra.utils.seeding import derive_seed

TaskField = polymorphic(TASKS.get, TaskParameters)


class TaskEvaluationParameters(SubParameters):
    """Evaluation of a policy on held-out problems."""

    num_problems: int = Field(default=300, ge=1)
    """Held-out problems before and after training, at most all of a dataset."""
    num_dev_problems: int = Field(default=100, ge=1)
    """Problems of a dev evaluation."""
    num_dev_runs: int = Field(default=1, ge=1, le=10_000)
    """Runs per problem of a dev evaluation; with more than one, pass@k is logged up to this k."""
    num_runs: int = Field(default=1, ge=1, le=10_000)
    """Runs per problem; with more than one, pass@k is reported up to this k."""
    success_reward: float | None = None
    """Minimum reward of a correct run; of several rewards, the first decides. null takes 1; then no
    accuracy is reported where a reward exceeds 1, as one in characters does."""
    batch_size: int = Field(default=256, ge=1)
    """Problems per batch."""


@register_scenario(ScenarioType.TASK)
class TaskScenario(Scenario):
    """A policy solves problems in messages; an environment or a scorer rewards it."""

    trainer_types: ClassVar[tuple[str, ...]] = ("rl",)

    class Parameters(Scenario.Parameters):
        """Policy and task."""

        policy: ConversationAgentParameters
        """Language model to train."""
        task: TaskField  # type: ignore[valid-type]
        """The task, by its `_type`."""
        max_turns: int = Field(default=8, ge=1)
        """Turns after which an unfinished episode ends with reward 0."""
        tools: ToolUseParameters = ToolUseParameters()
        """Tools that the policy may call in every episode, and limits of their use."""
        num_rollout_parts: int = Field(default=1, ge=1, le=1024)
        """Parts of whole problems into which rollouts and evaluations are split, if the policy's
        weights are in this process. Processes of the run or Ray actors run them in parallel; small
        models on the CPU use the available cores where that is faster. More parts keep more
        processes busy, but are slower in one. Last digits depend on this number, but not on the
        number of processes."""
        evaluation: TaskEvaluationParameters = TaskEvaluationParameters()
        """Evaluation of the policy."""

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
        task.tools = build_tools(parameters.tools, scenario_dir)
        task.tool_use = parameters.tools
        if isinstance(task, DatasetTask):
            task.check_lengths(policy)
        services = open_services(task.scorers, settings)
        resume_usage(services)
        return TaskInstance(
            kind=str(ScenarioType.TASK),
            agents={"policy": policy, "reference": reference},
            task=task,
            scenario_dir=scenario_dir,
            services=services,
        )

"""Agents that speak through chat models, and the groups that share a model and its jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nip_astra.errors import ConfigurationError, ServiceError
from nip_astra.language_models.services.chat import ChatModel
from nip_astra.language_models.services.fine_tuning import (
    FineTuningJob,
    FineTuningOptions,
    FineTuningService,
    JobStatus,
    PreferenceExample,
    SupervisedExample,
)
from nip_astra.scenario_base.text.event_loop import EventLoop
from nip_astra.scenario_base.text.examples import supervised_examples
from nip_astra.scenario_base.text.parameters import TextAgentParameters
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed


class TextAgent:
    """An agent of a protocol that speaks through its group's model.

    Attributes
    ----------
    name : str
        In the protocol.
    number : int
        Its place in the protocol.
    is_verifier : bool
        Whether it decides.
    parameters : TextAgentParameters
        How it speaks.
    group : PureTextSharedModelGroup
        Whose model it speaks through.
    """

    def __init__(
        self, name: str, number: int, *, is_verifier: bool, parameters: TextAgentParameters
    ) -> None:
        self.name, self.number, self.is_verifier = name, number, is_verifier
        self.parameters = parameters
        self.group: PureTextSharedModelGroup

    @property
    def model(self) -> ChatModel:
        """The model that speaks for it at present."""
        return self.group.model

    @property
    def temperature(self) -> float:
        """Of sampling."""
        return self.parameters.temperature

    @property
    def top_p(self) -> float:
        """Of sampling."""
        return self.parameters.top_p

    @property
    def max_tokens(self) -> int:
        """Longest answer."""
        return self.parameters.max_tokens

    @property
    def num_invalid_generation_retries(self) -> int:
        """Further answers in place of one that cannot be used."""
        return self.parameters.num_invalid_generation_retries


@dataclass(frozen=True)
class JobPlan:
    """How jobs of a run are named and trained.

    Attributes
    ----------
    run_key : str
        Names the run at its services, so that a resumed run finds its jobs.
    seed : int
        Of the experiment.
    min_examples : int
        Fewest examples of a job.
    options : FineTuningOptions
        What jobs have in common.
    """

    run_key: str = "run"
    seed: int = 0
    min_examples: int = 1
    options: FineTuningOptions = field(default_factory=FineTuningOptions)


class PureTextSharedModelGroup:
    """Agents that share one model, which jobs train.

    Parameters
    ----------
    name : str
        Of the group.
    agents : sequence of TextAgent
        Its members; they agree in model, `freeze_agent` and `fine_tune_from_scratch`.
    open_model : callable
        Opens the model of a name; that of the beginning for None.
    service : FineTuningService or None
        Trains it; None where nothing does.
    loop : EventLoop
        In which services are spoken to.

    Attributes
    ----------
    plan : JobPlan
        How jobs are named and trained; a trainer sets it.
    job_ids : list of str
        Jobs submitted so far, by their names at the service; empty text for one that was left out.

    Raises
    ------
    ConfigurationError
        When members do not agree.
    """

    def __init__(
        self,
        name: str,
        agents: Sequence[TextAgent],
        *,
        open_model: Callable[[str | None], ChatModel],
        service: FineTuningService | None,
        loop: EventLoop,
    ) -> None:
        _check_alike(name, agents)
        self.name, self.agents = name, list(agents)
        self.service, self.loop, self.plan = service, loop, JobPlan()
        self.job_ids: list[str] = []
        self._open_model = open_model
        self._model_name: str | None = None
        self._models: dict[str | None, ChatModel] = {}
        self._pending: str | None = None
        for agent in self.agents:
            agent.group = self

    @property
    def parameters(self) -> TextAgentParameters:
        """Those in which the members agree, and the first one's others."""
        return self.agents[0].parameters

    @property
    def is_frozen(self) -> bool:
        """Whether its model stays as it is."""
        return self.parameters.freeze_agent

    @property
    def model(self) -> ChatModel:
        """The model that speaks for its members at present."""
        if self._model_name not in self._models:
            self._models[self._model_name] = self._open_model(self._model_name)
        return self._models[self._model_name]

    @property
    def model_name(self) -> str:
        """Name, at its service, of the model that speaks at present."""
        return self.model.name if self._model_name is None else self._model_name

    def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: Mapping[str, NestedArrayDict],
        guess_replaced_rollouts: Mapping[str, NestedArrayDict] = {},
    ) -> FineTuningJob | None:
        """Train the model to answer as its members did in these rollouts.

        Parameters
        ----------
        rollouts_per_agent : Mapping of NestedArrayDict
            By agent; rollouts of agents of other groups are left alone.
        guess_replaced_rollouts : Mapping of NestedArrayDict
            Further ones, by agent, in which its last answer becomes the right decision.

        Returns
        -------
        FineTuningJob or None
            None where the group is frozen, or there are too few examples to train on.
        """
        examples: list[SupervisedExample] = []
        for agent in self.agents:
            if agent.name in rollouts_per_agent:
                examples += supervised_examples(rollouts_per_agent[agent.name], agent.number)
            if agent.name in guess_replaced_rollouts:
                replaced = guess_replaced_rollouts[agent.name]
                examples += supervised_examples(replaced, agent.number, replace_guess=True)
        return self._submit(examples, "supervised")

    def create_dpo_fine_tune_job(
        self, pairs: Sequence[PreferenceExample], *, beta: float | None = None
    ) -> FineTuningJob | None:
        """Train the model to prefer answers to others.

        Parameters
        ----------
        beta : float, optional
            Of DPO; None leaves it to the service.

        Returns
        -------
        FineTuningJob or None
            None where the group is frozen, or there are too few pairs to train on.
        """
        return self._submit(list(pairs), "dpo", beta)

    def get_fine_tune_job_status(self) -> JobStatus | None:
        """How far the job is that was submitted last; None where there is none to wait for.

        Raises
        ------
        ServiceError
            When the job has failed.
        """
        if self._pending is None:
            return None
        return self._look().status

    def switch_to_next_model(self) -> None:
        """Let members speak through the model that the last job has trained.

        Raises
        ------
        ServiceError
            When the job has failed, or is not over.
        """
        if self._pending is None:
            return
        job = self._look()
        if job.status != JobStatus.SUCCEEDED or job.model is None:
            raise ServiceError(
                f"the group {self.name!r} was to go on with the model of the job {job.job_id}, but "
                f"that is {job.status}. Wait until get_fine_tune_job_status says it has succeeded."
            )
        self._model_name, self._pending = job.model, None

    def get_state(self) -> dict[str, Any]:
        """Model and jobs, as plain values."""
        return {"model": self._model_name, "pending": self._pending, "jobs": list(self.job_ids)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `get_state` gave."""
        self._model_name, self._pending = state["model"], state["pending"]
        self.job_ids = list(state["jobs"])

    def models(self) -> list[ChatModel]:
        """The models that have spoken for its members so far, in this process."""
        return list(self._models.values())

    async def close(self) -> None:
        """End the connections of its models."""
        for model in self._models.values():
            await model.close()
        self._models = {}

    def _submit(
        self,
        examples: list[SupervisedExample] | list[PreferenceExample],
        method: str,
        beta: float | None = None,
    ) -> FineTuningJob | None:
        if self.is_frozen:
            return None
        if self.service is None:
            raise ConfigurationError(
                f"the group {self.name!r} was to be trained by a job, but its models have no "
                "service that trains. Set freeze_agent=true for its agents, or give a service."
            )
        number = len(self.job_ids)
        if len(examples) < self.plan.min_examples:
            self.job_ids.append("")
            return None
        from_scratch = self.parameters.fine_tune_from_scratch
        base = self._base_name() if from_scratch else self.model_name
        seed = derive_seed(self.plan.seed, "fine-tune job", self.name, number) % 2**31
        common = vars(self.plan.options)
        options = FineTuningOptions(**(common | {"method": method, "beta": beta, "seed": seed}))
        key = f"{self.plan.run_key}/{self.name}/{number}"
        job = self.loop.run(self.service.submit(base, examples, options, key=key))
        self.job_ids.append(job.job_id)
        self._pending = job.job_id
        return job

    def _base_name(self) -> str:
        if None not in self._models:
            self._models[None] = self._open_model(None)
        return self._models[None].name

    def _look(self) -> FineTuningJob:
        assert self.service is not None
        assert self._pending is not None
        job = self.loop.run(self.service.job(self._pending))
        if job.status in (JobStatus.FAILED, JobStatus.CANCELLED):
            raise ServiceError(
                f"the job {job.job_id} was to train the model of the group {self.name!r}, but it "
                f"is {job.status}: {job.error or 'the service says no reason'}. Resume the run "
                "when the service can train, or start a new run."
            )
        return job


def _check_alike(name: str, agents: Sequence[TextAgent]) -> None:
    faults = [
        f"{what} of {one.name} is {getattr(one.parameters, what)!r}, and that of "
        f"{agents[0].name} {getattr(agents[0].parameters, what)!r}"
        for one in agents[1:]
        for what in ("model", "freeze_agent", "fine_tune_from_scratch")
        if getattr(one.parameters, what) != getattr(agents[0].parameters, what)
    ]
    if faults:
        raise ConfigurationError(
            f"the agents {', '.join(one.name for one in agents)} were to share the model of the "
            f"group {name!r}, but {'; '.join(faults)}. Make them equal, or give the agents "
            "different shared_model_group."
        )


def group_agents(agents: Sequence[TextAgent]) -> dict[str, list[TextAgent]]:
    """The agents by the name of their group; one without a group has its own name for it."""
    groups: dict[str, list[TextAgent]] = {}
    for agent in agents:
        groups.setdefault(agent.parameters.shared_model_group or agent.name, []).append(agent)
    return groups

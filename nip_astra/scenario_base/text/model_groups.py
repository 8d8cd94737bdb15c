"""Agents that speak through chat models, and the groups that share a model and its jobs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, ServiceError
from nip_astra.language_models.services.chat import ChatMessage, ChatModel
from nip_astra.language_models.services.fine_tuning import (
    FineTuningJob,
    FineTuningOptions,
    FineTuningService,
    JobStatus,
    PreferenceExample,
    SupervisedExample,
)
from nip_astra.samplers.text_rollouts import active_turns, read_prompt
from nip_astra.scenario_base.text.parameters import TextAgentParameters
from nip_astra.scenario_base.text.parsing import decision_text
from nip_astra.utils.background_loop import BackgroundLoop
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed

_SHARED = (
    *("model", "load_from_run", "checkpoint_version"),
    *("freeze_agent", "fine_tune_from_scratch"),
)
"""Parameters in which the members of a group agree."""


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
        Its members; they agree in model, `load_from_run`, `checkpoint_version`, `freeze_agent`
        and `fine_tune_from_scratch`.
    open_model : callable
        Opens the model of a name; that of the beginning for None.
    service : FineTuningService or None
        Trains it; None where nothing does.
    loop : BackgroundLoop
        In which services are spoken to.

    Attributes
    ----------
    plan : JobPlan
        How jobs are named and trained; a trainer sets it.
    job_ids : list of str
        Jobs submitted so far, by their names at the service; empty text for one that was left out.
    is_waiting : bool
        Whether jobs are submitted again for other groups while this one waits for its own, so that
        it submits none; until it switches to its next model.

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
        loop: BackgroundLoop,
    ) -> None:
        _check_alike(name, agents)
        self.name, self.agents = name, list(agents)
        self.service, self.loop, self.plan = service, loop, JobPlan()
        self.job_ids: list[str] = []
        self.is_waiting = False
        self._open_model = open_model
        self._model_name: str | None = None
        self._model: ChatModel | None = None
        self._pending: str | None = None
        self._num_dead = 0
        self._first_name: str | None = None
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
        """The model that speaks for its members at present; the only one that is kept open."""
        if self._model is None:
            self._model = self._open_model(self._model_name)
        return self._model

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
                examples += _supervised_examples(rollouts_per_agent[agent.name], agent.number)
            if agent.name in guess_replaced_rollouts:
                replaced = guess_replaced_rollouts[agent.name]
                examples += _supervised_examples(replaced, agent.number, replace_guess=True)
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
        CheckpointError
            When the model's files are no longer as they were trained.
        """
        self.is_waiting = False
        if self._pending is None:
            return
        assert self.service is not None
        job = self._look()
        if job.model is None:
            raise ServiceError(
                f"the group {self.name!r} was to go on with the model of the job {job.job_id}, but "
                f"that is {job.status}. Wait until get_fine_tune_job_status says it has succeeded."
            )
        self._switch_to(self.service.take_up(job.model))
        self._pending = None

    def drop_dead_job(self) -> bool:
        """Forget the pending job if it ended without a model, and say whether that was so.

        The next job is submitted under the next key and trains with the seed of the dropped one.
        """
        if self._pending is None or not _is_dead(self._ask_for_job(self._pending)):
            return False
        self._pending = None
        self._num_dead += 1
        return True

    def get_state(self) -> dict[str, Any]:
        """Model and jobs, as plain values."""
        return {
            "model": self._model_name,
            "pending": self._pending,
            "jobs": list(self.job_ids),
            "num_dead_jobs": self._num_dead,
            "agents": [agent.name for agent in self.agents],
        }

    def save_model(self, folder: Path) -> None:
        """Copy the trained model into a folder; one that was not trained here is not copied."""
        if self.service is None or self._model_name is None:
            return
        place = Path(self.service.place_of(self._model_name))
        # The name of a model at a service may be that of some folder here.
        if place.is_absolute() and place.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(place, folder)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `get_state` gave.

        Raises
        ------
        CheckpointError
            When a model that was trained in this run is missing or no longer as it was.
        """
        model = state["model"]
        if model is not None and self.service is not None:
            model = self.service.take_up(model)
        self._switch_to(model)
        self._pending, self.job_ids = state["pending"], list(state["jobs"])
        self._num_dead = state.get("num_dead_jobs", 0)

    def models(self) -> list[ChatModel]:
        """The model that is open, if one is."""
        return [] if self._model is None else [self._model]

    async def close(self) -> None:
        """End the connections of its model."""
        if self._model is not None:
            await self._model.close()
            self._model = None

    def _switch_to(self, name: str | None) -> None:
        if name != self._model_name and self._model is not None:
            self.loop.run(self.close())
        self._model_name = name

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
        if self.is_waiting:
            is_none = self._pending is None
            return None if is_none else FineTuningJob(str(self._pending), JobStatus.RUNNING)
        number = len(self.job_ids)
        if len(examples) < self.plan.min_examples:
            self.job_ids.append("")
            return None
        from_scratch = self.parameters.fine_tune_from_scratch
        base = self._base_name() if from_scratch else self.model_name
        # A job in place of one that died trains as that one would have.
        place = number - self._num_dead
        seed = derive_seed(self.plan.seed, "fine-tune job", self.name, place) % 2**31
        common = vars(self.plan.options)
        options = FineTuningOptions(**(common | {"method": method, "beta": beta, "seed": seed}))
        key = f"{self.plan.run_key}/{self.name}/{number}"
        job = self.loop.run(self.service.submit(base, examples, options, key=key))
        self.job_ids.append(job.job_id)
        self._pending = job.job_id
        return job

    def _base_name(self) -> str:
        if self._first_name is None:
            is_first = self._model_name is None
            first = self.model if is_first else self._open_model(None)
            self._first_name = first.name
            if not is_first:
                self.loop.run(first.close())
        return self._first_name

    def _ask_for_job(self, job_id: str) -> FineTuningJob:
        assert self.service is not None
        return self.loop.run(self.service.job(job_id))

    def _look(self) -> FineTuningJob:
        assert self._pending is not None
        job = self._ask_for_job(self._pending)
        if _is_dead(job):
            reason = job.error or "the service gives no reason and no model"
            raise ServiceError(
                f"the job {job.job_id} of the group {self.name!r} is {job.status}: {reason}. "
                "Resume the run when the service can train: the job is submitted again, and no "
                "rollout is lost."
            )
        return job


def _is_dead(job: FineTuningJob) -> bool:
    """Whether a job has ended without a model to go on with."""
    return job.status.is_over and (job.status != JobStatus.SUCCEEDED or job.model is None)


def _check_alike(name: str, agents: Sequence[TextAgent]) -> None:
    faults = [
        f"{what} of {one.name} is {getattr(one.parameters, what)!r}, and that of "
        f"{agents[0].name} {getattr(agents[0].parameters, what)!r}"
        for one in agents[1:]
        for what in _SHARED
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


def _supervised_examples(
    rollouts: NestedArrayDict, agent: int, *, replace_guess: bool = False
) -> Iterator[SupervisedExample]:
    """An example for each turn of an agent with a valid answer; it holds the sampled texts.

    Parameters
    ----------
    agent : int
        Its place in the protocol.
    replace_guess : bool
        Whether its last answer of each rollout is replaced by the right decision.
    """
    turns = list(active_turns(rollouts, agent))
    # In order of rollout and round, so that the last one of a rollout stays.
    last_round = {turn.rollout: turn.round for turn in turns}
    for turn in turns:
        is_replaced = replace_guess and last_round[turn.rollout] == turn.round
        if rollouts["agents", "is_filled"][turn] and not is_replaced:
            continue
        answer = rollouts["agents", "raw_message"][turn]
        if is_replaced:
            answer = decision_text(int(rollouts["y"][turn.rollout]))
        prompt = read_prompt(rollouts["agents", "prompt"][turn])
        yield SupervisedExample((*prompt, ChatMessage(role="assistant", content=answer)))

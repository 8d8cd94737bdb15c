"""Agents that are chat models: parameters, models, and groups that share a model and its jobs."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import Field

from nip_astra.checkpoints.run_state import STATE
from nip_astra.checkpoints.store import LATEST, CheckpointStore
from nip_astra.checkpoints.tensors import load_state
from nip_astra.errors import CheckpointError, ConfigurationError, ServiceError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.fine_tuning import LocalFineTuningService
from nip_astra.language_models.services.chat import ChatMessage, ChatModel, ChatModelParameters
from nip_astra.language_models.services.fine_tuning import (
    FineTuningJob,
    FineTuningOptions,
    FineTuningParameters,
    FineTuningService,
    JobStatus,
    OpenAIFineTuning,
    PreferenceExample,
    SupervisedExample,
    without_weight,
)
from nip_astra.language_models.services.retrying import open_chat_model
from nip_astra.parameters.conditions import where, where_given
from nip_astra.parameters.parameters_base import PlainText, SubParameters
from nip_astra.parameters.types import ChatModelType
from nip_astra.samplers.text_rollouts import active_turns, read_prompt
from nip_astra.scenario_base.text.game import decision_text
from nip_astra.tracking import wandb_runs
from nip_astra.tracking.run_directory import MODEL_DIR, RESULTS, RunDirectory
from nip_astra.utils.background_loop import BackgroundLoop
from nip_astra.utils.devices import resolve_device
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed


class TextAgentParameters(SubParameters):
    """An agent that speaks through a chat model."""

    model: ChatModelParameters  # type: ignore[valid-type]
    """The first model."""
    load_from_run: str | None = None
    """Run directory, or wandb://entity/project/run_id, whose trained model of the agent with this
    name replaces the weights of `model`; null keeps them."""
    checkpoint_version: Annotated[str, where_given("load_from_run")] = "latest"
    """That run's model: latest, or a checkpoint such as step_00000015; on W&B a version or alias
    such as v3."""
    shared_model_group: PlainText | None = None
    """Name of a group of agents that share one model and its jobs; null for none. They must agree
    in model, load_from_run, checkpoint_version, freeze_agent and fine_tune_from_scratch."""
    freeze_agent: bool = False
    """Whether the agent's model is not trained."""
    fine_tune_from_scratch: Annotated[bool, where("freeze_agent", False)] = False
    """Whether each job starts from the first model, instead of from the last job's."""
    human_name: PlainText | None = None
    """Name in messages; null for the name in the protocol."""
    temperature: float | None = Field(default=1.0, ge=0)
    """Sampling temperature. Larger varies answers more; at 0 siblings of a tree are equal; null is
    the default of the model's service, which some models require."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of most likely tokens with this probability mass."""
    max_tokens: int = Field(default=256, ge=1)
    """Maximum length of an answer, in tokens."""
    max_response_words: int = Field(default=150, ge=1)
    """Maximum number of words that its prompt asks for."""
    num_invalid_generation_retries: int = Field(default=20, ge=0)
    """Further requests after an invalid answer. If all fail, the agent sends nothing in this
    round."""


JOBS = "jobs"
"""Folder of a run directory for models trained in this process."""
GROUPS = "groups.json"
"""File with the state of each group, beside a run's trained models."""


def open_text_models(
    agent: TextAgent, *, label: str, scenario_dir: Path | None, settings: ExperimentSettings
) -> tuple[Callable[[str | None], ChatModel], FineTuningService | None]:
    """Return a function that opens a group's models by name, the first for None, and the service
    that trains them.

    A model in this process is trained in this process, with its jobs in the run directory; a model
    behind OpenAI's protocol by jobs of the same service.

    Parameters
    ----------
    agent : TextAgent
        A member of the group, whose members agree in the models.
    label : str
        Name of the first model in messages and counts.
    """
    parameters: Any = agent.parameters.model
    service: FineTuningService | None = None
    if parameters.type_name == ChatModelType.LOCAL:
        service = LocalFineTuningService(
            _jobs_dir(settings),
            parameters.language_model,
            scenario_dir=scenario_dir,
            device=resolve_device(settings.device),
            num_threads=settings.num_threads,
        )
    elif parameters.type_name == ChatModelType.OPENAI:
        if parameters.service == "local":
            raise ConfigurationError(
                f"the chat model of {label} has service: local, which cannot train agents. Use "
                "_type: local, or start nip-astra serve and set its base_url."
            )
        service = OpenAIFineTuning(
            FineTuningParameters(
                base_url=parameters.base_url,
                api_key_variable=parameters.api_key_variable,
                timeout=parameters.timeout,
                limits=parameters.limits,
            )
        )

    def open_model(name: str | None) -> ChatModel:
        model_parameters = parameters
        if name is not None:
            source = name if service is None else service.find_model_path(name)
            model_parameters = renamed(parameters, source)
        elif agent.parameters.load_from_run is not None:
            trained = _find_trained_model(agent, settings)
            source = trained if service is None else service.resolve_model(trained)
            model_parameters = renamed(parameters, source)
        model = open_chat_model(model_parameters, settings, scenario_dir=scenario_dir, label=label)
        # The recorded name stays valid if the run is moved.
        model.name = name or model.name
        return model

    return open_model, service


def renamed(parameters: Any, name: str) -> Any:
    """Return parameters of the same backend with another model."""
    inner = getattr(parameters, "language_model", None)
    if inner is not None and "model" in type(inner).model_fields:
        language_model = inner.model_copy(update={"model": name})
        return parameters.model_copy(update={"language_model": language_model})
    if "model" in type(parameters).model_fields:
        return parameters.model_copy(update={"model": name})
    raise ConfigurationError(
        f"the chat model backend {parameters.type_name!r} has no parameter 'model', so it cannot "
        f"load the trained model {name!r}. Add it, or set freeze_agent=true for its agents."
    )


def _jobs_dir(settings: ExperimentSettings) -> Path:
    if settings.run_directory is not None:
        return settings.run_directory.path.resolve() / JOBS
    # A dry run, or a trainer without a run directory, keeps nothing.
    folder = Path(tempfile.mkdtemp(prefix="nip_astra-jobs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / JOBS


def folder_of_group(name: str) -> str:
    """Return a group's folder among a run's trained models."""
    return quote(name, safe="").replace(".", "%2E")


def models_of_run(run: Path, version: str = LATEST) -> dict[str, Any]:
    """Return states for `set_state` of the groups trained by a run.

    Paths of models are updated if the run was moved, or has only its folder `model`.

    Parameters
    ----------
    version : str
        A checkpoint, or "latest": the end of the run, or else its newest checkpoint.
    """
    states = _read_group_states(RunDirectory(run), version)
    if not states:
        raise ConfigurationError(
            f"the run {run} has no trained chat models. Give a run of a pure-text trainer."
        )
    for name, state in states.items():
        states[name] = state | {"model": _find_model(run, name, state["model"])}
    return states


def _read_group_states(directory: RunDirectory, version: str) -> dict[str, Any]:
    store = CheckpointStore(directory.checkpoints_dir)
    if version != LATEST:
        checkpoint = store.named(version)
    else:
        # A run that has ended may keep no checkpoint.
        if (directory.path / RESULTS).is_file():
            return dict(directory.read_json(RESULTS).get("groups") or {})
        groups_file = f"{MODEL_DIR}/{GROUPS}"
        if (directory.path / groups_file).is_file():
            return dict(directory.read_json(groups_file))
        checkpoint, _ = store.open_latest()
    return dict(load_state(checkpoint / STATE)["run"].get("groups") or {})


def _find_model(run: Path, group: str, model: str | None) -> str | None:
    """Return the current path of a model."""
    parts = Path(model or "").parts
    if JOBS not in parts:
        # A model behind a service.
        return model
    # From the last folder of jobs on: the run itself may be in a folder of that name.
    jobs_index = len(parts) - 1 - parts[::-1].index(JOBS)
    candidates = (
        run.resolve().joinpath(*parts[jobs_index:]),
        run.resolve() / MODEL_DIR / folder_of_group(group),
    )
    for candidate in candidates:
        if candidate.exists():
            return str(candidate)
    return model


def _find_trained_model(agent: TextAgent, settings: ExperimentSettings) -> str:
    """Return the model of an agent in the run that it loads."""
    run, version = str(agent.parameters.load_from_run), agent.parameters.checkpoint_version
    if run.startswith(wandb_runs.SCHEME):
        states = models_of_run(_download_run(run, version, settings))
    else:
        states = models_of_run(RunDirectory.find(run, settings.runs_dir).path, version)
    for name, state in states.items():
        # Older runs do not name the members of a group; a single one is the agent's.
        members = [name, agent.name] if len(states) == 1 else [name]
        if agent.name in state.get("agents", members) and state["model"]:
            return str(state["model"])
    trained = sorted(name for name, state in states.items() if state["model"] is not None)
    raise CheckpointError(
        f"the run {run} has no trained model of the agent {agent.name!r}, only of the groups "
        f"{', '.join(trained) or '(none)'}. Choose another run, or set load_from_run to null."
    )


def _download_run(run: str, version: str, settings: ExperimentSettings) -> Path:
    """Return the folder of a W&B run's models, downloaded once."""
    jobs_dir = _jobs_dir(settings)
    # Without a run directory, the jobs are in the shared temporary folder.
    parent = jobs_dir if settings.run_directory is None else jobs_dir.parent
    folder = parent / "loaded" / quote(f"{run}@{version}", safe="")
    if not folder.exists():
        # Renamed when complete: a kill leaves no half of a model under the final name.
        unfinished = folder.with_name(f".new-{folder.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        wandb_runs.download_model(run, unfinished / MODEL_DIR, version)
        unfinished.rename(folder)
    return folder


_SHARED = (
    "model",
    "load_from_run",
    "checkpoint_version",
    "freeze_agent",
    "fine_tune_from_scratch",
)
"""Parameters that must be equal for all members of a group."""


class TextAgent:
    """An agent of a protocol, played by its group's chat model; `number` is its index."""

    def __init__(
        self, name: str, number: int, *, is_verifier: bool, parameters: TextAgentParameters
    ) -> None:
        self.name = name
        self.number = number
        self.is_verifier = is_verifier
        self.parameters = parameters
        self.group: PureTextSharedModelGroup

    @property
    def model(self) -> ChatModel:
        """Current model."""
        return self.group.model


@dataclass(frozen=True)
class JobPlan:
    """Names and options of a run's jobs."""

    run_key: str = "run"
    """Name of the run at its services, by which a resumed run finds its jobs."""
    seed: int = 0
    """Seed of the experiment."""
    min_examples: int = 1
    """Minimum number of examples of a job."""
    options: FineTuningOptions = field(default_factory=FineTuningOptions)
    """Options of all jobs."""


class PureTextSharedModelGroup:
    """Agents that share one model, trained by fine-tuning jobs.

    Parameters
    ----------
    agents : sequence of TextAgent
        Its members; they agree in model, `load_from_run`, `checkpoint_version`, `freeze_agent`
        and `fine_tune_from_scratch`.
    open_model : callable
        Opens a model by name; the first one for None.
    service : FineTuningService or None
        Trains the model, if anything does.
    loop : BackgroundLoop
        Runs requests to services.

    Attributes
    ----------
    plan : JobPlan
        Names and options of jobs; set by a trainer.
    job_ids : list of str
        Submitted jobs by their names at the service; "" for an omitted one.
    is_waiting : bool
        Whether it waits for its own job while jobs of other groups are submitted again; it then
        submits none until it switches to its next model.
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
        _require_equal_parameters(name, agents)
        self.name = name
        self.agents = list(agents)
        self.service = service
        self.loop = loop
        self.plan = JobPlan()
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
        """Parameters of the first member."""
        return self.agents[0].parameters

    @property
    def is_frozen(self) -> bool:
        """Whether the model is not trained."""
        return self.parameters.freeze_agent

    @property
    def model(self) -> ChatModel:
        """Current model, the only one kept open."""
        if self._model is None:
            self._model = self._open_model(self._model_name)
        return self._model

    @property
    def model_name(self) -> str:
        """Return the name of the current model at its service."""
        return self.model.name if self._model_name is None else self._model_name

    def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: Mapping[str, NestedArrayDict],
        guess_replaced_rollouts: Mapping[str, NestedArrayDict] = {},
    ) -> FineTuningJob | None:
        """Train the model on its members' answers in rollouts, by agent.

        Parameters
        ----------
        guess_replaced_rollouts : Mapping of NestedArrayDict
            Further rollouts, by agent, whose last answer is replaced by the correct decision.

        Returns
        -------
        FineTuningJob or None
            None if the group is frozen or has too few examples.
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
        """Train the model on preference pairs; `beta` None uses the service's default.

        Returns
        -------
        FineTuningJob or None
            None if the group is frozen or has too few pairs.
        """
        return self._submit(list(pairs), "dpo", beta)

    def get_fine_tune_job_status(self) -> JobStatus | None:
        """Return the status of the pending job, if any; a failed one raises `ServiceError`."""
        if self._pending is None:
            return None
        return self._fetch_pending_job().status

    def switch_to_next_model(self) -> None:
        """Switch to the model of the last job."""
        self.is_waiting = False
        if self._pending is None:
            return
        assert self.service is not None
        job = self._fetch_pending_job()
        if job.model is None:
            raise ServiceError(
                f"the job {job.job_id} of the group {self.name!r} is {job.status}. Wait until "
                "get_fine_tune_job_status returns SUCCEEDED."
            )
        self._switch_to(self.service.resolve_model(job.model))
        self._pending = None

    def drop_dead_job(self) -> bool:
        """Discard the pending job if it ended without a model; return whether it did.

        The next job has the next key and the seed of the dropped one.
        """
        if self._pending is None or not _is_dead(self._fetch_job(self._pending)):
            return False
        self._pending = None
        self._num_dead += 1
        return True

    def get_state(self) -> dict[str, Any]:
        """Return model and jobs as plain values."""
        return {
            "model": self._model_name,
            "pending": self._pending,
            "jobs": list(self.job_ids),
            "num_dead_jobs": self._num_dead,
            "trained_weights": self.plan.options.trained_weights,
            "agents": [agent.name for agent in self.agents],
        }

    def save_model(self, folder: Path) -> None:
        """Copy the model into a folder if it was trained in this process."""
        if self.service is None or self._model_name is None:
            return
        model_dir = Path(self.service.find_model_path(self._model_name))
        # The name of a remote model may equal that of a local folder.
        if model_dir.is_absolute() and model_dir.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(model_dir, folder)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `get_state`."""
        model = state["model"]
        if model is not None and self.service is not None:
            model = self.service.resolve_model(model)
        self._switch_to(model)
        self._pending = state["pending"]
        self.job_ids = list(state["jobs"])
        self._num_dead = state.get("num_dead_jobs", 0)
        if "trained_weights" in state:
            trained_weights = state["trained_weights"]
        elif isinstance(self.service, LocalFineTuningService) and not self.service.has_adapter:
            # What jobs trained before they had an option for it.
            trained_weights = "all"
        else:
            trained_weights = None
        options = replace(self.plan.options, trained_weights=trained_weights)
        self.plan = replace(self.plan, options=options)

    def models(self) -> list[ChatModel]:
        """Return the open model, if any."""
        return [] if self._model is None else [self._model]

    async def close(self) -> None:
        """Close the connections of the model."""
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
                f"the models of the group {self.name!r} have no training service. Set "
                "freeze_agent=true for its agents, or choose another chat model."
            )
        if self.is_waiting:
            if self._pending is None:
                return None
            return FineTuningJob(self._pending, JobStatus.RUNNING)
        number = len(self.job_ids)
        if len(examples) < self.plan.min_examples:
            # Counted, so that the keys of later jobs do not depend on it.
            self.job_ids.append("")
            return None
        if self.parameters.fine_tune_from_scratch:
            base = self._first_model_name()
        else:
            base = self.model_name
        # A job that replaces a dead one has its seed.
        seed_number = number - self._num_dead
        seed = derive_seed(self.plan.seed, "fine-tune job", self.name, seed_number) % 2**31
        job_options = {"method": method, "beta": beta, "seed": seed}
        options = FineTuningOptions(**(vars(self.plan.options) | job_options))
        key = f"{self.plan.run_key}/{self.name}/{number}"
        job = self.loop.run(self.service.submit(base, examples, options, key=key))
        self.job_ids.append(job.job_id)
        self._pending = job.job_id
        return job

    def _first_model_name(self) -> str:
        """Return the name of the model before any job, which is opened for that if necessary."""
        if self._first_name is None:
            is_current = self._model_name is None
            first_model = self.model if is_current else self._open_model(None)
            self._first_name = first_model.name
            if not is_current:
                self.loop.run(first_model.close())
        return self._first_name

    def _fetch_job(self, job_id: str) -> FineTuningJob:
        assert self.service is not None
        return self.loop.run(self.service.job(job_id))

    def _fetch_pending_job(self) -> FineTuningJob:
        """Return the pending job; raise for one that has ended without a model."""
        assert self._pending is not None
        job = self._fetch_job(self._pending)
        if _is_dead(job):
            reason = job.error or "no reason given"
            raise ServiceError(
                f"the job {job.job_id} of the group {self.name!r} is {job.status}: {reason}. "
                "Resume the run when the service can train; the job is submitted again."
            )
        return job


def _is_dead(job: FineTuningJob) -> bool:
    """Return whether a job ended without a model."""
    return job.status.is_over and (job.status != JobStatus.SUCCEEDED or job.model is None)


def _require_equal_parameters(name: str, agents: Sequence[TextAgent]) -> None:
    first, *further_agents = agents
    faults = []
    for agent in further_agents:
        for parameter in _SHARED:
            value = getattr(agent.parameters, parameter)
            first_value = getattr(first.parameters, parameter)
            if value != first_value:
                faults.append(
                    f"{parameter} of {agent.name} is {value!r}, of {first.name} {first_value!r}"
                )
    if faults:
        raise ConfigurationError(
            f"the agents {', '.join(agent.name for agent in agents)} of the group {name!r} cannot "
            f"share a model: {'; '.join(faults)}. Make them equal, or use other groups."
        )


def group_agents(agents: Sequence[TextAgent]) -> dict[str, list[TextAgent]]:
    """Return the agents by group; an agent without a group forms one under its own name."""
    groups: dict[str, list[TextAgent]] = {}
    for agent in agents:
        groups.setdefault(agent.parameters.shared_model_group or agent.name, []).append(agent)
    return groups


def _supervised_examples(
    rollouts: NestedArrayDict, agent: int, *, replace_guess: bool = False
) -> Iterator[SupervisedExample]:
    """Yield prompt and answer of each turn in which an agent gave a valid answer.

    `replace_guess` replaces the last answer of each rollout by the correct decision.
    """
    turns = list(active_turns(rollouts, agent))
    # Turns are in order of rollout and round.
    last_round = {turn.rollout: turn.round for turn in turns}
    for turn in turns:
        is_replaced = replace_guess and last_round[turn.rollout] == turn.round
        if rollouts["agents", "is_filled"][turn] and not is_replaced:
            continue
        answer = rollouts["agents", "raw_message"][turn]
        if is_replaced:
            answer = decision_text(int(rollouts["y"][turn.rollout]))
        prompt = read_prompt(rollouts["agents", "prompt"][turn])
        # Earlier answers of the agent are learned in examples of their own.
        before = map(without_weight, prompt)
        yield SupervisedExample((*before, ChatMessage(role="assistant", content=answer)))

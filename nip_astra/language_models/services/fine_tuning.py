"""Fine-tuning jobs, at any service with OpenAI's protocol, including a local one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import Field

from nip_astra.errors import (
    AnswerTooLargeError,
    BudgetExhaustedError,
    ConfigurationError,
    ServiceError,
)
from nip_astra.language_models.services.chat import NUM_SEEDS, ChatMessage, LimitParameters
from nip_astra.language_models.services.http_client import OpenAIConnection, read_key
from nip_astra.parameters.parameters_base import SubParameters, Url
from nip_astra.progress import waiting_for

Method = Literal["supervised", "dpo"]
LrSchedule = Literal["linear", "constant"]
TrainedWeights = Literal["adapter", "all"]


class SupervisedExample(NamedTuple):
    """A conversation of which the assistant's messages are learned, see `without_weight`."""

    messages: tuple[ChatMessage, ...]


class PreferenceExample(NamedTuple):
    """A conversation with a preferred and a rejected answer."""

    messages: tuple[ChatMessage, ...]
    preferred: str
    rejected: str


def without_weight(message: Mapping[str, Any]) -> Any:
    """Return a message of the conversation that is read but not learned, as in OpenAI's format."""
    is_learned = message["role"] == "assistant"
    return {**message, "weight": 0} if is_learned else dict(message)


Examples: TypeAlias = Sequence[SupervisedExample] | Sequence[PreferenceExample]
"""The examples of a job, all of its method's kind."""


class JobStatus(StrEnum):
    """Status of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


@dataclass(frozen=True)
class FineTuningOptions:
    """Options of a job; None uses the service's default, ours uses `DEFAULTS`.

    Attributes
    ----------
    method : {"supervised", "dpo"}
        Its examples are `SupervisedExample` or `PreferenceExample`.
    lr_multiplier : float or None
        Multiple of the service's learning rate.
    beta : float or None
        Of DPO; larger stays closer to the initial model.
    nll_weight : float or None
        Weight of the preferred answers' cross entropy in a DPO job.
    freeze_embeddings : bool or None
        Whether token embeddings and output head stay fixed when all weights are trained.
    lr_schedule : {"linear", "constant"} or None
        Learning rate over the job: linear to zero, or constant.
    truncate_prompts : bool or None
        Whether a prompt beyond the model's window loses its first tokens; otherwise the job is
        refused.
    trained_weights : {"adapter", "all"} or None
        A low-rank adapter of the model, or all of its weights.
    """

    method: Method = "supervised"
    num_epochs: int | None = None
    batch_size: int | None = None
    lr_multiplier: float | None = None
    beta: float | None = None
    nll_weight: float | None = None
    freeze_embeddings: bool | None = None
    lr_schedule: LrSchedule | None = None
    truncate_prompts: bool | None = None
    trained_weights: TrainedWeights | None = None
    seed: int | None = None

    def resolved(self) -> dict[str, Any]:
        """Return all values by name, with `DEFAULTS` in place of None."""
        options = asdict(self)
        for name, option in options.items():
            if option is None:
                options[name] = DEFAULTS[name]
        return options


DEFAULTS: Mapping[str, Any] = {
    "num_epochs": 3,
    "batch_size": 8,
    "lr_multiplier": 1.0,
    "beta": 0.1,
    "nll_weight": 1.0,
    "freeze_embeddings": True,
    "lr_schedule": "linear",
    "truncate_prompts": False,
    "trained_weights": "adapter",
    "seed": 0,
}
"""Default values of options that are None."""
HYPERPARAMETERS: Mapping[str, str] = {
    "num_epochs": "n_epochs",
    "batch_size": "batch_size",
    "lr_multiplier": "learning_rate_multiplier",
    "freeze_embeddings": "freeze_embeddings",
    "lr_schedule": "lr_schedule",
    "truncate_prompts": "truncate_prompts",
    "trained_weights": "trained_weights",
    "beta": "beta",
    "nll_weight": "nll_weight",
}
"""Names of the options in OpenAI's protocol; the last ones are our own."""
DPO_OPTIONS = ("beta", "nll_weight")
"""Options of DPO jobs only."""


@dataclass(frozen=True)
class FineTuningJob:
    """A job as described by its service.

    Attributes
    ----------
    model : str or None
        Name of the trained model; None until the job has succeeded.
    error : str or None
        Reason of a failure.
    """

    job_id: str
    status: JobStatus
    model: str | None = None
    error: str | None = None


class FineTuningService(ABC):
    """Trains models through jobs."""

    @abstractmethod
    async def submit(
        self, model: str, examples: Examples, options: FineTuningOptions, *, key: str
    ) -> FineTuningJob:
        """Start a job that trains `model`, or return the existing one with its key."""

    @abstractmethod
    async def job(self, job_id: str) -> FineTuningJob:
        """Return the current state of a job; an unknown one counts as failed."""

    def find_model_path(self, model: str) -> str:
        """Return the path of a model with local files, else its name."""
        return model

    def resolve_model(self, model: str) -> str:
        """Return the current name of a model that an earlier process trained.

        Raises `CheckpointError` when its local files are missing or damaged.
        """
        return model


T = TypeVar("T")

KEY_FIELD = "nip_astra_key"
"""Metadata field with a job's key."""
LONGEST_KEY = 64
"""Length limit of metadata, in characters."""
OTHER_STATUSES = {"validating_files": JobStatus.QUEUED, "paused": JobStatus.RUNNING}
"""Statuses of OpenAI's protocol with another name or meaning here."""


class FineTuningParameters(SubParameters):
    """A service that trains models through jobs."""

    base_url: Url = Field(default="https://api.openai.com/v1", pattern=r"^https?://")
    """Address of the service up to `/fine_tuning/jobs`."""
    api_key_variable: str | None = None
    """Environment variable with the key; null sends none. The key is never stored."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds without data after which an attempt fails."""
    limits: LimitParameters = LimitParameters()
    """Timeouts and retries."""


class OpenAIFineTuning(FineTuningService):
    """Files and jobs of OpenAI's protocol.

    File names contain the digest of the examples and jobs their key, so that nothing is submitted
    twice after an interruption.
    """

    def __init__(
        self,
        parameters: FineTuningParameters,
        *,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        service = "the fine-tuning service"
        self.parameters = parameters
        self._pause = pause
        self._connection = OpenAIConnection(
            parameters.base_url,
            api_key=read_key(parameters.api_key_variable, f"api_key_variable of {service}"),
            timeout=parameters.timeout,
            service=service,
        )

    async def submit(
        self, model: str, examples: Examples, options: FineTuningOptions, *, key: str
    ) -> FineTuningJob:
        content = to_jsonl(examples, options.method)
        if len(key) > LONGEST_KEY:
            key = hashlib.sha256(key.encode()).hexdigest()

        async def attempt() -> FineTuningJob:
            # Before each attempt: only the response may have been lost.
            existing_job = await self._find(key)
            if existing_job is not None:
                return existing_job
            file_id = await self._upload(content)
            jobs = self._connection.client().fine_tuning.jobs
            fields: dict[str, Any] = {}
            if options.seed is not None:
                # Other services accept no larger seeds.
                fields["seed"] = options.seed % NUM_SEEDS
            job = await jobs.create(
                model=model,
                training_file=file_id,
                method=_method_field(options),
                metadata={KEY_FIELD: key},
                **fields,
            )
            return _read_job(job)

        return await self._with_retries(attempt, f"train {model!r} on {len(examples)} examples")

    async def job(self, job_id: str) -> FineTuningJob:
        async def attempt() -> FineTuningJob:
            try:
                job = await self._connection.client().fine_tuning.jobs.retrieve(job_id)
            except Exception as error:
                if not _is_not_found(error):
                    raise
                reason = f"{self.parameters.base_url} has no such job"
                return FineTuningJob(job_id, JobStatus.FAILED, error=reason)
            return _read_job(job)

        return await self._with_retries(attempt, f"report the job {job_id!r}")

    async def close(self) -> None:
        await self._connection.close()

    async def _find(self, key: str) -> FineTuningJob | None:
        """Return the newest job that was submitted under a key."""
        # The package requests further pages while this iterates.
        async for job in self._connection.client().fine_tuning.jobs.list(limit=100):
            # Some services have no metadata.
            metadata = getattr(job, "metadata", None) or {}
            if metadata.get(KEY_FIELD) == key:
                return _read_job(job)
        return None

    async def _upload(self, content: bytes) -> str:
        """Return the id of a file with this content; an uploaded one is reused."""
        files = self._connection.client().files
        name = f"nip_astra-{hashlib.sha256(content).hexdigest()[:32]}.jsonl"
        async for file in files.list(purpose="fine-tune"):
            if file.filename == name and file.bytes == len(content):
                return file.id
        uploaded = await files.create(file=(name, content), purpose="fine-tune")
        return uploaded.id

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]], action: str) -> T:
        """Repeat an attempt within the limits; `action` names in errors what was not possible."""
        limits = self.parameters.limits
        started = time.monotonic()
        num_attempts = 0
        cause: Exception
        while True:
            num_attempts += 1
            retry_after = 0.0
            try:
                async with asyncio.timeout(limits.attempt_timeout):
                    return await attempt()
            except TimeoutError as error:
                cause = error
                reason = f"no answer in {limits.attempt_timeout:g} s"
            except AnswerTooLargeError as error:
                raise self._failed(action, str(error)) from error
            except (ConfigurationError, BudgetExhaustedError, ServiceError):
                raise
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                # The package does not check what it reads.
                cause = error
                reason = f"its answer is malformed ({self._connection.shorten(str(error))})"
            except Exception as error:
                if _is_not_found(error):
                    # Of a model or job, not of the address, which `classify_error` would report.
                    raise self._failed(action, self._connection.shorten(str(error))) from error
                # The package's errors; `classify_error` raises any other again.
                failure = self._connection.classify_error(error)
                cause = error
                reason = failure.message
                retry_after = failure.retry_after
                if not failure.reason.may_pass:
                    raise self._failed(action, reason) from error
            spent = time.monotonic() - started
            pause = limits.pause_before(num_attempts, retry_after=retry_after, spent=spent)
            if pause is None:
                raise self._failed(action, f"{reason} ({num_attempts} attempts)") from cause
            with waiting_for(f"the fine-tuning service: {reason}; next attempt in {pause:.0f} s"):
                await self._pause(pause)

    def _failed(self, action: str, reason: str) -> ServiceError:
        return ServiceError(
            f"the service at {self.parameters.base_url} could not {action}: {reason}. Check the "
            "service, and that it knows the model, job and options."
        )


def _is_not_found(error: Exception) -> bool:
    return getattr(error, "status_code", None) == 404


def to_jsonl(examples: Examples, method: str) -> bytes:
    """Convert examples to JSON Lines in OpenAI's format."""
    example_class = SupervisedExample if method == "supervised" else PreferenceExample
    if not examples or not all(isinstance(example, example_class) for example in examples):
        raise ConfigurationError(
            f"a job of the method {method!r} needs one or more {example_class.__name__}s and no "
            "other examples."
        )
    lines = []
    for example in examples:
        row: dict[str, Any] = {"messages": list(example.messages)}
        if isinstance(example, PreferenceExample):
            row = {
                "input": row,
                "preferred_output": [{"role": "assistant", "content": example.preferred}],
                "non_preferred_output": [{"role": "assistant", "content": example.rejected}],
            }
        lines.append(f"{json.dumps(row, ensure_ascii=False)}\n")
    return "".join(lines).encode()


def _method_field(options: FineTuningOptions) -> Any:
    """Return the method with its hyper-parameters, without service defaults."""
    hyperparameters = {}
    for name, openai_name in HYPERPARAMETERS.items():
        option = getattr(options, name)
        is_read = options.method == "dpo" or name not in DPO_OPTIONS
        if option is not None and is_read:
            hyperparameters[openai_name] = option
    return {"type": options.method, options.method: {"hyperparameters": hyperparameters}}


def _read_job(job: Any) -> FineTuningJob:
    """Check a job of the package, which does not check what it reads."""
    if not isinstance(job.id, str) or not isinstance(job.status, str):
        raise ServiceError(
            f"the service answered with id {job.id!r} and status {job.status!r}, not with a "
            "fine-tuning job. Check base_url."
        )
    message = getattr(job.error, "message", None) if job.error is not None else None
    try:
        status = OTHER_STATUSES.get(job.status) or JobStatus(job.status)
    except ValueError:
        statuses = ", ".join([*JobStatus, *OTHER_STATUSES])
        status = JobStatus.FAILED
        message = f"its status {job.status!r} is not one of {statuses}"
    return FineTuningJob(job.id, status, job.fine_tuned_model or None, message or None)

"""Fine-tuning by jobs of any service that speaks OpenAI's protocol, a local one included."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import Field

from nip_astra.errors import (
    AnswerTooLargeError,
    BudgetExhaustedError,
    ConfigurationError,
    ServiceError,
)
from nip_astra.language_models.services.chat import LimitParameters
from nip_astra.language_models.services.fine_tuning import (
    DPO_OPTIONS,
    HYPERPARAMETERS,
    FineTuningJob,
    FineTuningOptions,
    FineTuningService,
    JobStatus,
    PreferenceExample,
    SupervisedExample,
)
from nip_astra.language_models.services.openai_client import OpenAIConnection, read_key
from nip_astra.parameters.parameters_base import SubParameters, Url
from nip_astra.progress import waiting_for

T = TypeVar("T")

KEY_FIELD = "nip_astra_key"
"""Field of a job's metadata that holds the key under which it was submitted."""
LONGEST_KEY = 64
STATUSES = {
    "validating_files": JobStatus.QUEUED,
    "queued": JobStatus.QUEUED,
    "running": JobStatus.RUNNING,
    "paused": JobStatus.RUNNING,
    "succeeded": JobStatus.SUCCEEDED,
    "failed": JobStatus.FAILED,
    "cancelled": JobStatus.CANCELLED,
}


class FineTuningParameters(SubParameters):
    """A service that trains models by jobs."""

    base_url: Url = Field(default="https://api.openai.com/v1", pattern=r"^https?://")
    """Address of the service up to `/fine_tuning/jobs`."""
    api_key_variable: str | None = None
    """Environment variable that holds the key; null sends none. The key is written nowhere."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds without a byte after which an attempt is given up."""
    limits: LimitParameters = LimitParameters()
    """Timeouts and retries."""


class OpenAIFineTuning(FineTuningService):
    """Files and jobs of OpenAI's protocol.

    Examples are uploaded as JSON Lines under a name that holds their digest, and a job carries its
    key in its metadata, so that a job submitted before an interruption is not submitted twice.

    Parameters
    ----------
    pause : Callable, optional
        Waits, in seconds.
    """

    def __init__(
        self,
        parameters: FineTuningParameters,
        *,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        what = "the fine-tuning service"
        self.parameters = parameters
        self._pause = pause
        self._connection = OpenAIConnection(
            parameters.base_url,
            api_key=read_key(parameters.api_key_variable, what=what),
            timeout=parameters.timeout,
            what=what,
        )

    async def submit(
        self,
        model: str,
        examples: Sequence[SupervisedExample] | Sequence[PreferenceExample],
        options: FineTuningOptions,
        *,
        key: str,
    ) -> FineTuningJob:
        content = jsonl_of(examples, options.method)
        key = _short(key)

        async def attempt() -> FineTuningJob:
            # Before each attempt: the answer may have been lost, and not the request.
            found = await self._find(key)
            if found is not None:
                return found
            file_id = await self._upload(content)
            jobs = self._connection.client().fine_tuning.jobs
            fields: dict[str, Any] = {} if options.seed is None else {"seed": options.seed % 2**31}
            job = await jobs.create(
                model=model,
                training_file=file_id,
                method=_method_of(options),
                metadata={KEY_FIELD: key},
                **fields,
            )
            return _job_of(job)

        return await self._with_retries(attempt, f"train {model!r} on {len(examples)} examples")

    async def job(self, job_id: str) -> FineTuningJob:
        async def attempt() -> FineTuningJob:
            try:
                return _job_of(await self._connection.client().fine_tuning.jobs.retrieve(job_id))
            except Exception as error:
                if getattr(error, "status_code", None) != 404:
                    raise
                gone = f"{self.parameters.base_url} has no such job"
                return FineTuningJob(job_id, JobStatus.FAILED, error=gone)

        return await self._with_retries(attempt, f"report the job {job_id!r}")

    async def cancel(self, job_id: str) -> FineTuningJob:
        async def attempt() -> FineTuningJob:
            return _job_of(await self._connection.client().fine_tuning.jobs.cancel(job_id))

        return await self._with_retries(attempt, f"cancel the job {job_id!r}")

    async def close(self) -> None:
        """End the connections."""
        await self._connection.close()

    async def _find(self, key: str) -> FineTuningJob | None:
        """The newest job that was submitted under a key."""
        async for job in self._connection.client().fine_tuning.jobs.list(limit=100):
            if (getattr(job, "metadata", None) or {}).get(KEY_FIELD) == key:
                return _job_of(job)
        return None

    async def _upload(self, content: bytes) -> str:
        """The id of a file with this content, which may be there already."""
        files = self._connection.client().files
        name = f"nip_astra-{hashlib.sha256(content).hexdigest()[:32]}.jsonl"
        async for file in files.list(purpose="fine-tune"):
            if file.filename == name and file.bytes == len(content):
                return file.id
        uploaded = await files.create(file=(name, content), purpose="fine-tune")
        return uploaded.id

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]], action: str) -> T:
        limits, started, number = self.parameters.limits, time.monotonic(), 0
        cause: Exception
        while True:
            number += 1
            retry_after = 0.0
            try:
                async with asyncio.timeout(limits.attempt_timeout):
                    return await attempt()
            except TimeoutError as error:
                cause, reason = error, f"no answer in {limits.attempt_timeout:g} s"
            except AnswerTooLargeError as error:
                raise self._failed(action, str(error)) from error
            except (ConfigurationError, BudgetExhaustedError, ServiceError):
                raise
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                # The package does not check what it reads.
                cause = error
                reason = f"its answer is malformed ({self._connection.shown(str(error))})"
            except Exception as error:
                if getattr(error, "status_code", None) == 404:
                    raise self._failed(action, self._connection.shown(str(error))) from error
                # The package's errors; `failure_of` raises any other again.
                failure = self._connection.failure_of(error)
                cause, reason, retry_after = error, failure.message, failure.retry_after
                if not failure.reason.may_pass:
                    raise self._failed(action, reason) from error
            spent = time.monotonic() - started
            pause = limits.pause_before(number, retry_after=retry_after, spent=spent)
            if pause is None:
                raise self._failed(action, f"{reason} ({number} attempts)") from cause
            with waiting_for(f"the fine-tuning service: {reason}; next attempt in {pause:.0f} s"):
                await self._pause(pause)

    def _failed(self, action: str, reason: str) -> ServiceError:
        return ServiceError(
            f"the service at {self.parameters.base_url} could not {action}: {reason}. Check the "
            "service, and that it knows the model, job and options."
        )


def jsonl_of(
    examples: Sequence[SupervisedExample] | Sequence[PreferenceExample], method: str
) -> bytes:
    """Examples as a file of OpenAI's form, an example a line.

    Raises
    ------
    ConfigurationError
        When there is none, or an example is of the other method.
    """
    wanted = SupervisedExample if method == "supervised" else PreferenceExample
    if not examples or not all(isinstance(example, wanted) for example in examples):
        raise ConfigurationError(
            f"a job of the method {method!r} needs one or more {wanted.__name__}s and no other "
            "examples."
        )
    rows = (_row_of(example) for example in examples)
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def _row_of(example: SupervisedExample | PreferenceExample) -> Mapping[str, Any]:
    messages = list(example.messages)
    if isinstance(example, SupervisedExample):
        return {"messages": messages}
    return {
        "input": {"messages": messages},
        "preferred_output": [{"role": "assistant", "content": example.preferred}],
        "non_preferred_output": [{"role": "assistant", "content": example.rejected}],
    }


def _method_of(options: FineTuningOptions) -> Any:
    """The method with its hyper-parameters; those left to the service are left out."""
    given = {
        theirs: getattr(options, name)
        for name, theirs in HYPERPARAMETERS.items()
        if getattr(options, name) is not None
        and (options.method == "dpo" or name not in DPO_OPTIONS)
    }
    return {"type": options.method, options.method: {"hyperparameters": given}}


def _job_of(job: Any) -> FineTuningJob:
    if not isinstance(job.id, str) or not isinstance(job.status, str):
        raise ServiceError(
            f"the service answered with id {job.id!r} and status {job.status!r}, not with a "
            "fine-tuning job. Check base_url."
        )
    message = getattr(job.error, "message", None) if job.error is not None else None
    status = STATUSES.get(job.status)
    if status is None:
        message = f"its status {job.status!r} is not one of {', '.join(STATUSES)}"
    return FineTuningJob(
        job.id, status or JobStatus.FAILED, job.fine_tuned_model or None, message or None
    )


def _short(key: str) -> str:
    """A key that metadata can hold."""
    is_short = len(key) <= LONGEST_KEY
    return key if is_short else hashlib.sha256(key.encode()).hexdigest()

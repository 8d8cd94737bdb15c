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
from nip_astra.language_models.services.limits import LimitParameters
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
    """How patiently it is asked."""


class OpenAIFineTuning(FineTuningService):
    """Files and jobs of OpenAI's protocol.

    Examples are uploaded as JSON Lines under a name that holds their digest, and a job carries its
    key in its metadata, so that what was begun before an interruption is found and not begun again.

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

        async def once() -> FineTuningJob:
            # Looked for before each attempt: an answer may have been lost, and not the request.
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

        return await self._patiently(once, f"train {model!r} on {len(examples)} examples")

    async def job(self, job_id: str) -> FineTuningJob:
        async def once() -> FineTuningJob:
            try:
                return _job_of(await self._connection.client().fine_tuning.jobs.retrieve(job_id))
            except Exception as error:
                if getattr(error, "status_code", None) != 404:
                    raise
                gone = f"{self.parameters.base_url} has no such job"
                return FineTuningJob(job_id, JobStatus.FAILED, error=gone)

        return await self._patiently(once, f"tell how far the job {job_id!r} is")

    async def cancel(self, job_id: str) -> FineTuningJob:
        async def once() -> FineTuningJob:
            return _job_of(await self._connection.client().fine_tuning.jobs.cancel(job_id))

        return await self._patiently(once, f"cancel the job {job_id!r}")

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

    async def _patiently(self, once: Callable[[], Awaitable[T]], what: str) -> T:
        limits, started, attempt = self.parameters.limits, time.monotonic(), 0
        cause: Exception
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(limits.attempt_timeout):
                    return await once()
            except TimeoutError as error:
                cause, asked, told = error, 0.0, f"no answer in {limits.attempt_timeout:g} s"
            except AnswerTooLargeError as error:
                raise self._refused(what, str(error)) from error
            except (ConfigurationError, BudgetExhaustedError, ServiceError):
                raise
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                # The package does not check what it reads.
                said = self._connection.shown(str(error))
                cause, asked, told = error, 0.0, f"its answer is not of the protocol ({said})"
            except Exception as error:
                if getattr(error, "status_code", None) == 404:
                    said = self._connection.shown(str(error))
                    raise self._refused(what, said) from error
                # The package's errors; any other one is raised again in there.
                failure = self._connection.failure_of(error)
                cause, asked, told = error, failure.retry_after, failure.message
                if not failure.reason.may_pass:
                    raise self._refused(what, told) from error
            spent = time.monotonic() - started
            pause = limits.pause_before(attempt, retry_after=asked, spent=spent)
            if pause is None:
                raise self._refused(what, f"{told} ({attempt} attempts)") from cause
            with waiting_for(f"the fine-tuning service: {told}; next attempt in {pause:.0f} s"):
                await self._pause(pause)

    def _refused(self, what: str, said: str) -> ServiceError:
        return ServiceError(
            f"the service at {self.parameters.base_url} was to {what}, but: {said}. Look after the "
            "service, and check that the model, job and options are ones that it knows."
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
            f"a job of the method {method!r} was to be submitted, but it needs one or more "
            f"{wanted.__name__}s and nothing else. Give those, or the other method."
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
            f"the service answered with id {job.id!r} and status {job.status!r}, which is no "
            "fine-tuning job. Check that base_url is the address of a service that trains."
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

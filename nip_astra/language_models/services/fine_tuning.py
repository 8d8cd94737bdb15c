"""Fine-tuning by jobs: examples in, a model's new name out, some time later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from nip_astra.language_models.services.chat import ChatMessage


class SupervisedExample(NamedTuple):
    """A conversation whose last message is to be imitated."""

    messages: tuple[ChatMessage, ...]


class PreferenceExample(NamedTuple):
    """A conversation with an answer that is preferred to another one."""

    messages: tuple[ChatMessage, ...]
    preferred: str
    rejected: str


class JobStatus(StrEnum):
    """How far a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Whether it will stay so."""
        return self not in (JobStatus.QUEUED, JobStatus.RUNNING)


@dataclass(frozen=True)
class FineTuningOptions:
    """How a job trains; None leaves a choice to the service.

    Attributes
    ----------
    method : {"supervised", "dpo"}
        What the examples are: `SupervisedExample` or `PreferenceExample`.
    beta : float or None
        Of DPO; larger stays closer to the model that the job starts from.
    """

    method: Literal["supervised", "dpo"] = "supervised"
    num_epochs: int | None = None
    batch_size: int | None = None
    lr_multiplier: float | None = None
    beta: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class FineTuningJob:
    """A job as its service describes it.

    Attributes
    ----------
    job_id : str
        Its name at the service.
    model : str or None
        Name of the trained model; None until the job has succeeded.
    error : str or None
        Why it failed.
    """

    job_id: str
    status: JobStatus
    model: str | None = None
    error: str | None = None


class FineTuningService(ABC):
    """Trains models by jobs."""

    @abstractmethod
    async def submit(
        self,
        model: str,
        examples: Sequence[SupervisedExample] | Sequence[PreferenceExample],
        options: FineTuningOptions,
        *,
        key: str,
    ) -> FineTuningJob:
        """Start a job that trains `model`, or find the one that was started under the same key.

        Parameters
        ----------
        key : str
            Names the job for its client, so that one who was cut off submits nothing twice.

        Raises
        ------
        ServiceError
            When the service cannot be reached or refuses the job.
        """

    @abstractmethod
    async def job(self, job_id: str) -> FineTuningJob:
        """Look at a job.

        Raises
        ------
        ServiceError
            When the service cannot be reached or knows no such job.
        """

    @abstractmethod
    async def cancel(self, job_id: str) -> FineTuningJob:
        """Stop a job that is not over."""

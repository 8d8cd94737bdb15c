"""Fine-tuning by jobs: examples in, a model's new name out, some time later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from nip_astra.errors import ContextLengthError
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
        """Look at a job; one that the service does not know has failed.

        Raises
        ------
        ServiceError
            When the service cannot be reached.
        """

    @abstractmethod
    async def cancel(self, job_id: str) -> FineTuningJob:
        """Stop a job that is not over."""

    def place_of(self, model: str) -> str:
        """Return what opens a model: a path where its files are kept here, else its name."""
        return model

    def take_up(self, model: str) -> str:
        """Return the name by which a model that an earlier process has trained is opened now.

        Raises
        ------
        CheckpointError
            When its files are kept by this service, and are missing or no longer as they were.
        """
        return model


def check_length(number: int, num_tokens: int, window: int) -> None:
    """Refuse an example that a model cannot read in full.

    Parameters
    ----------
    number : int
        Of the example, from 1.
    num_tokens : int
        Of its messages and its longest answer, the end of the turn included.

    Raises
    ------
    ContextLengthError
        When the model's window holds fewer tokens.
    """
    if num_tokens > window:
        raise ContextLengthError(
            f"example {number} has {num_tokens} tokens, but the model's window holds {window}. "
            "Shorten it, or leave it out."
        )

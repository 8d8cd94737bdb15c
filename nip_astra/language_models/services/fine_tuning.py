"""Fine-tuning by jobs: examples in, a model's new name out, some time later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from nip_astra.errors import ContextLengthError
from nip_astra.language_models.services.chat import ChatMessage

Method = Literal["supervised", "dpo"]
LrSchedule = Literal["linear", "constant"]


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
    """How a job trains; None leaves a choice to the service, ours takes `DEFAULTS`.

    Attributes
    ----------
    method : {"supervised", "dpo"}
        What the examples are: `SupervisedExample` or `PreferenceExample`.
    lr_multiplier : float or None
        Multiple of the service's learning rate.
    beta : float or None
        Of DPO; larger stays closer to the model that the job starts from.
    nll_weight : float or None
        Weight of the preferred answers' cross entropy in a DPO job.
    freeze_embeddings : bool or None
        Whether token embeddings and output head stay as they are where all weights are trained.
    lr_schedule : {"linear", "constant"} or None
        Learning rate over the job: to zero in a line, or constant.
    truncate_prompts : bool or None
        Whether a prompt that the model's window does not hold loses its first tokens; otherwise
        the job is refused.
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
    seed: int | None = None

    def resolved(self) -> dict[str, Any]:
        """All values, by name, with `DEFAULTS` in place of None."""
        return {
            name: DEFAULTS[name] if value is None else value for name, value in asdict(self).items()
        }


DEFAULTS: Mapping[str, Any] = {
    "num_epochs": 3,
    "batch_size": 8,
    "lr_multiplier": 1.0,
    "beta": 0.1,
    "nll_weight": 1.0,
    "freeze_embeddings": True,
    "lr_schedule": "linear",
    "truncate_prompts": False,
    "seed": 0,
}
"""Values of options that a job leaves open, in this process and served."""
HYPERPARAMETERS: Mapping[str, str] = {
    "num_epochs": "n_epochs",
    "batch_size": "batch_size",
    "lr_multiplier": "learning_rate_multiplier",
    "freeze_embeddings": "freeze_embeddings",
    "lr_schedule": "lr_schedule",
    "truncate_prompts": "truncate_prompts",
    "beta": "beta",
    "nll_weight": "nll_weight",
}
"""Names of the options in OpenAI's protocol, and of our own beside them."""
DPO_OPTIONS = ("beta", "nll_weight")
"""Options that supervised jobs do not have."""


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

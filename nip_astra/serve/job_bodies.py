"""What requests for fine-tuning jobs may say, and what is said of a job."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from nip_astra.serve.bodies import Body
from nip_astra.serve.job_store import Job, Status

Auto = Literal["auto"]
Suffix = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
NUM_EPOCHS, BATCH_SIZE, LR_MULTIPLIER, BETA = 3, 8, 1.0, 0.1
"""What "auto" is."""


class SupervisedOptions(Body):
    """Hyper-parameters of supervised jobs."""

    n_epochs: Annotated[int, Field(ge=1, le=1000)] | Auto = "auto"
    batch_size: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=1000)] | Auto = "auto"


class DpoOptions(SupervisedOptions):
    """Hyper-parameters of DPO jobs."""

    beta: Annotated[float, Field(gt=0, le=100)] | Auto = "auto"


class Supervised(Body):
    """The method that imitates."""

    hyperparameters: SupervisedOptions = SupervisedOptions()


class Dpo(Body):
    """The method that prefers."""

    hyperparameters: DpoOptions = DpoOptions()


class MethodBody(Body):
    """How a job trains."""

    type: Literal["supervised", "dpo"]
    supervised: Supervised = Supervised()
    dpo: Dpo = Dpo()


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class JobBody(Body):
    """A request of /v1/fine_tuning/jobs."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    training_file: Annotated[str, Field(min_length=1, max_length=128)]
    validation_file: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    method: MethodBody | None = None
    hyperparameters: SupervisedOptions | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    suffix: Suffix | None = None
    metadata: Metadata = {}

    @property
    def method_type(self) -> Literal["supervised", "dpo"]:
        """The method asked for."""
        return "supervised" if self.method is None else self.method.type

    @property
    def options(self) -> dict[str, Any]:
        """The hyper-parameters, nothing of them left to be chosen."""
        given: SupervisedOptions = self.hyperparameters or SupervisedOptions()
        if self.method is not None:
            chosen = self.method.dpo if self.method.type == "dpo" else self.method.supervised
            given = chosen.hyperparameters
        values = given.model_dump()
        automatic = {
            "n_epochs": NUM_EPOCHS,
            "batch_size": BATCH_SIZE,
            "learning_rate_multiplier": LR_MULTIPLIER,
            "beta": BETA,
        }
        return {
            name: automatic[name] if value == "auto" else value for name, value in values.items()
        }


def job_object(job: Job) -> dict[str, Any]:
    """A job as OpenAI's clients read it."""
    request = job.request
    options = request["options"]
    shared = {name: value for name, value in options.items() if name != "beta"}
    method = request["method"]
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "model": job.model,
        "fine_tuned_model": job.name if job.status is Status.SUCCEEDED else None,
        "organization_id": "local",
        "status": job.status.value,
        "error": job.error,
        "hyperparameters": shared,
        "method": {"type": method, method: {"hyperparameters": options}},
        "training_file": request["training_file"],
        "validation_file": request["validation_file"],
        "result_files": [],
        "trained_tokens": job.trained_tokens if job.status is Status.SUCCEEDED else None,
        "seed": job.plan["seed"],
        "suffix": request["suffix"],
        "metadata": request["metadata"],
        "estimated_finish": None,
        "integrations": [],
    }


def event_object(row: dict[str, Any]) -> dict[str, Any]:
    """An event as OpenAI's clients read it."""
    return {
        "id": f"ftevent-{row['number']:08d}",
        "object": "fine_tuning.job.event",
        "created_at": row["created_at"],
        "level": row["level"],
        "message": row["message"],
        "type": row["type"],
        "data": json.loads(row["data"]),
    }


def checkpoint_object(row: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as OpenAI's clients read it."""
    return {
        "id": row["id"],
        "object": "fine_tuning.job.checkpoint",
        "created_at": row["created_at"],
        "fine_tuned_model_checkpoint": row["name"],
        "fine_tuning_job_id": row["job"],
        "metrics": json.loads(row["metrics"]),
        "step_number": row["step"],
    }


def file_object(row: dict[str, Any]) -> dict[str, Any]:
    """A file as OpenAI's clients read it."""
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["bytes"],
        "created_at": row["created_at"],
        "filename": row["filename"],
        "purpose": "fine-tune",
        "status": "processed",
    }

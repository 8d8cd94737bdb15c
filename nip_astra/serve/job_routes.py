"""The routes for files and fine-tuning jobs, and the formats of their requests and replies."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import torch
from fastapi import APIRouter
from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from nip_astra.language_models.fine_tuning import FineTuningPlan
from nip_astra.language_models.services.fine_tuning import (
    DPO_OPTIONS,
    HYPERPARAMETERS,
    FineTuningOptions,
    LrSchedule,
    Method,
    TrainedWeights,
)
from nip_astra.language_models.services.fine_tuning import JobStatus as Status
from nip_astra.serve.job_runner import TRAINING, VALIDATION, JobRunner, read_examples
from nip_astra.serve.job_store import Job, JobStore
from nip_astra.serve.requests import (
    MAX_LISTED,
    ApiError,
    Body,
    Limit,
    Metadata,
    not_found,
    overloaded,
    read_body,
    wrong,
)
from nip_astra.serve.served_models import ServedModel, ServedModels
from nip_astra.serve.settings import ServiceSettings

EVENT_PREFIX = "ftevent-"
KEY = "idempotency_key"
"""Entry of a job's metadata; a second job with the same value is the first one."""
_CHUNK = 1 << 20
_UNFINISHED = (Status.QUEUED, Status.RUNNING, Status.PAUSED)
Auto = Literal["auto"]
Suffix = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class SupervisedOptions(Body):
    """Hyper-parameters of supervised jobs; the last four are not OpenAI's."""

    n_epochs: Annotated[int, Field(ge=1, le=1000)] | Auto = "auto"
    batch_size: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=1000)] | Auto = "auto"
    freeze_embeddings: bool | Auto = "auto"
    lr_schedule: LrSchedule | Auto = "auto"
    truncate_prompts: bool | Auto = "auto"
    trained_weights: TrainedWeights | Auto = "auto"


class DpoOptions(SupervisedOptions):
    """Hyper-parameters of DPO jobs; `nll_weight` is not OpenAI's."""

    beta: Annotated[float, Field(gt=0, le=100)] | Auto = "auto"
    nll_weight: Annotated[float, Field(ge=0, le=1000)] | Auto = "auto"


class Supervised(Body):
    """Supervised training."""

    hyperparameters: SupervisedOptions = SupervisedOptions()


class Dpo(Body):
    """Training on preferences."""

    hyperparameters: DpoOptions = DpoOptions()


class MethodBody(Body):
    """The method of a job."""

    type: Method
    supervised: Supervised = Supervised()
    dpo: Dpo = Dpo()


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
    def options(self) -> FineTuningOptions:
        """Return the method, its hyper-parameters and the seed; None for "auto"."""
        values: SupervisedOptions = self.hyperparameters or SupervisedOptions()
        method: Method = "supervised"
        if self.method is not None:
            method = self.method.type
            values = getattr(self.method, method).hyperparameters
        given: dict[str, Any] = {
            name: getattr(values, theirs, "auto") for name, theirs in HYPERPARAMETERS.items()
        }
        chosen = {name: value for name, value in given.items() if value != "auto"}
        return FineTuningOptions(method, seed=self.seed, **chosen)


def job_object(job: Job) -> dict[str, Any]:
    """Return a job in OpenAI's format."""
    request = job.request
    options, method = request["options"], request["method"]
    shared = {name: value for name, value in options.items() if name not in DPO_OPTIONS}
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
    """Return an event in OpenAI's format."""
    return {
        "id": f"{EVENT_PREFIX}{row['number']:08d}",
        "object": "fine_tuning.job.event",
        "created_at": row["created_at"],
        "level": row["level"],
        "message": row["message"],
        "type": row["type"],
        "data": json.loads(row["data"]),
    }


def checkpoint_object(row: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint in OpenAI's format."""
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
    """Return a file in OpenAI's format."""
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["bytes"],
        "created_at": row["created_at"],
        "filename": row["filename"],
        "purpose": "fine-tune",
        "status": "processed",
    }


def job_routes(
    store: JobStore, runner: JobRunner, models: ServedModels, settings: ServiceSettings
) -> APIRouter:
    """Return the routes of a service's state."""
    files, jobs = _FileRoutes(store), _JobRoutes(store, runner, models, settings)
    router = APIRouter(prefix="/v1")
    router.add_api_route("/files", files.create, methods=["POST"])
    router.add_api_route("/files", files.list_all, methods=["GET"])
    router.add_api_route("/files/{identity}", files.retrieve, methods=["GET"])
    router.add_api_route("/files/{identity}", files.delete, methods=["DELETE"])
    router.add_api_route("/files/{identity}/content", files.content, methods=["GET"])
    root = "/fine_tuning/jobs"
    router.add_api_route(root, jobs.create, methods=["POST"])
    router.add_api_route(root, jobs.list_all, methods=["GET"])
    router.add_api_route(f"{root}/{{identity}}", jobs.retrieve, methods=["GET"])
    router.add_api_route(f"{root}/{{identity}}/events", jobs.events, methods=["GET"])
    router.add_api_route(f"{root}/{{identity}}/checkpoints", jobs.checkpoints, methods=["GET"])
    router.add_api_route("/models/{name}", jobs.delete_model, methods=["DELETE"])
    for name, route in (("cancel", jobs.cancel), ("pause", jobs.pause), ("resume", jobs.resume)):
        router.add_api_route(f"{root}/{{identity}}/{name}", route, methods=["POST"])
    return router


class _FileRoutes:
    def __init__(self, store: JobStore) -> None:
        self.store = store

    async def create(self, request: Request) -> Response:
        try:
            form = await request.form(max_files=1, max_fields=8)
        except HTTPException as error:
            raise wrong(
                f"invalid upload: {error.detail}. Send a multipart form with file and purpose.",
                code="invalid_form",
            ) from error
        try:
            upload = _checked_upload(form)
            name = _checked_name(upload.filename)
            identity, part = self.store.new_file()
            try:
                # In a thread, so that other requests are answered meanwhile.
                await asyncio.to_thread(_write, upload.file, part)
                return JSONResponse(file_object(self.store.add_file(identity, part, name)))
            finally:
                part.unlink(missing_ok=True)
        finally:
            await form.close()

    async def list_all(
        self,
        purpose: str = "fine-tune",
        order: str = "desc",
        limit: Limit = MAX_LISTED,
        after: str | None = None,
    ) -> Response:
        rows = self.store.files() if purpose == "fine-tune" else []
        rows = rows[::-1] if order == "asc" else rows
        return _page([file_object(row) for row in rows], limit, after)

    def _find(self, identity: str) -> dict[str, Any]:
        found = self.store.files(identity)
        if not found:
            raise not_found("file", identity)
        return found[0]

    async def retrieve(self, identity: str) -> Response:
        return JSONResponse(file_object(self._find(identity)))

    async def content(self, request: Request, identity: str) -> Response:
        found = self._find(identity)
        # An invalid range would be refused in plain text; files are sent whole.
        request.scope["headers"] = [one for one in request.headers.raw if one[0] != b"range"]
        return FileResponse(
            self.store.file_path(found["id"]), media_type="application/octet-stream"
        )

    async def delete(self, identity: str) -> Response:
        found = self._find(identity)
        self.store.delete_file(found["id"])
        return JSONResponse({"id": found["id"], "object": "file", "deleted": True})


def _write(source: BinaryIO, path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(source, file, _CHUNK)
        file.flush()
        os.fsync(file.fileno())


def _checked_upload(form: FormData) -> UploadFile:
    unknown = sorted(set(form) - {"file", "purpose"})
    if unknown:
        raise wrong(
            f"the option {unknown[0][:100]!r} is not supported. Leave it out.",
            unknown[0][:100],
            "unsupported_parameter",
        )
    upload, purpose = form.get("file"), form.get("purpose")
    if purpose != "fine-tune":
        raise wrong(
            f"unknown purpose {ascii(purpose)[:80]} of a file. Give purpose='fine-tune'.",
            "purpose",
            "invalid_value",
        )
    if not isinstance(upload, UploadFile):
        raise wrong("the form has no part 'file'. Give it.", "file", "missing_required_parameter")
    return upload


def _checked_name(name: str | None) -> str:
    is_valid = name and len(name) <= 255 and name.isprintable() and name not in (".", "..")
    if not name or not is_valid or "/" in name or "\\" in name:
        raise wrong(
            f"invalid file name {ascii(name)[:80]}. Give printable text without slashes.",
            "file",
            "invalid_value",
        )
    return name


class _JobRoutes:
    def __init__(
        self,
        store: JobStore,
        runner: JobRunner,
        models: ServedModels,
        settings: ServiceSettings,
    ) -> None:
        self.store, self.runner = store, runner
        self.models, self.settings = models, settings

    async def create(self, request: Request) -> Response:
        body = await read_body(request, JobBody)
        key = body.metadata.get(KEY) or request.headers.get("idempotency-key")
        if key is not None:
            found = self.store.job_of_key(key)
            if found is not None:
                return JSONResponse(job_object(found))
        served = self.models.get(body.model)
        if sum(job.status in _UNFINISHED for job in self.store.jobs()) >= self.settings.max_jobs:
            raise overloaded(
                f"{self.settings.max_jobs} jobs wait or run, the limit of this service. Retry when "
                "one has ended.",
                "too_many_jobs",
            )
        if body.method is not None and body.hyperparameters is not None:
            raise wrong(
                "give hyperparameters within the method, not beside it.",
                "hyperparameters",
                "invalid_value",
            )
        job = await asyncio.to_thread(self._queue, body, served, key)
        self.runner.notify()
        return JSONResponse(job_object(job))

    def _queue(self, body: JobBody, served: ServedModel, key: str | None) -> Job:
        options = body.options
        if options.seed is None:
            options = replace(options, seed=secrets.randbelow(1 << 31))
        plan = self._plan(options, served).to_dict()
        identity = f"ftjob-{secrets.token_hex(12)}"
        folder = self.store.job_folder(identity)
        folder.mkdir(parents=True)
        try:
            self._take_file(body.training_file, folder / TRAINING, options, "training_file")
            if body.validation_file is not None:
                self._take_file(
                    body.validation_file, folder / VALIDATION, options, "validation_file"
                )
            root = served.base if served.adapter is not None and served.base else served.name
            job = self.store.add_job(
                {
                    "id": identity,
                    "model": body.model,
                    "root": root,
                    "name": f"ft:{root}:{body.suffix or ''}:{identity[-8:]}",
                    "plan": plan,
                    "request": {
                        "method": options.method,
                        "options": {
                            theirs: plan[name]
                            for name, theirs in HYPERPARAMETERS.items()
                            if options.method == "dpo" or name not in DPO_OPTIONS
                        },
                        "training_file": body.training_file,
                        "validation_file": body.validation_file,
                        "suffix": body.suffix,
                        "metadata": body.metadata,
                    },
                },
                key,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if job.id != identity:
            # Another request with the same key was faster.
            shutil.rmtree(folder, ignore_errors=True)
            return job
        self.store.add_event(identity, f"Created fine-tuning job: {identity}")
        return job

    def _take_file(
        self, identity: str, place: Path, options: FineTuningOptions, param: str
    ) -> None:
        """Link a file into the job's folder, so that the file may be deleted."""
        if not self.store.files(identity):
            raise not_found("file", identity, param)
        source = self.store.file_path(identity)
        try:
            os.link(source, place)
        except OSError:
            shutil.copyfile(source, place)
        read_examples(place, options.method)

    def _plan(self, options: FineTuningOptions, served: ServedModel) -> FineTuningPlan:
        settings, is_new = self.settings, served.adapter is None
        resolved = options.resolved()
        trains_all = resolved["trained_weights"] == "all"
        if trains_all and not is_new:
            raise _wrong_weights(
                f"{served.name!r} has an adapter, which a job continues. Leave trained_weights out."
            )
        num_parameters = served.engine.num_parameters
        if trains_all and num_parameters > settings.max_full_parameters:
            raise _wrong_weights(
                f"{served.name!r} has {num_parameters} weights, but max_full_parameters is "
                f"{settings.max_full_parameters}. Leave trained_weights out, or start the service "
                "with a larger max_full_parameters."
            )
        return FineTuningPlan(
            **resolved,
            source=served.source,
            lora_rank=settings.lora_rank if is_new and not trains_all else None,
            lora_alpha=settings.lora_alpha,
            start_from=None if is_new else str(served.folder),
            device=str(self.models.device),
            num_threads=torch.get_num_threads(),
        )

    def _find(self, identity: str) -> Job:
        with suppress(KeyError):
            return self.store.job(identity)
        raise not_found("fine-tuning job", identity)

    async def retrieve(self, identity: str) -> Response:
        return JSONResponse(job_object(self._find(identity)))

    async def list_all(
        self, request: Request, limit: Limit = 20, after: str | None = None
    ) -> Response:
        wanted = {
            name.removeprefix("metadata[").removesuffix("]"): value
            for name, value in request.query_params.items()
            if name.startswith("metadata[")
        }
        found = [job_object(job) for job in reversed(self.store.jobs())]
        chosen = [job for job in found if wanted.items() <= job["metadata"].items()]
        return _page(chosen, limit, after)

    async def events(self, identity: str, limit: Limit = 20, after: str | None = None) -> Response:
        job = self._find(identity).id
        before = None if after is None else self._event_number(job, after)
        # A long job has one for each of its steps: only those of the page are read.
        rows = self.store.newest_events(job, before=before, limit=limit + 1)
        return _page([event_object(row) for row in rows], limit, None)

    def _event_number(self, job: str, identity: str) -> int:
        digits = identity.removeprefix(EVENT_PREFIX)
        if digits.isascii() and digits.isdigit() and len(digits) < 16:
            number = int(digits)
            rows = self.store.newest_events(job, before=number + 1, limit=1)
            if rows and event_object(rows[0])["id"] == identity:
                return number
        raise _unknown_cursor(identity)

    async def checkpoints(
        self, identity: str, limit: Limit = 10, after: str | None = None
    ) -> Response:
        rows = self.store.checkpoints(self._find(identity).id)
        return _page([checkpoint_object(row) for row in rows], limit, after)

    async def cancel(self, identity: str) -> Response:
        return self._change(identity, _UNFINISHED, Status.CANCELLED, "The job was cancelled.")

    async def pause(self, identity: str) -> Response:
        return self._change(identity, _UNFINISHED[:2], Status.PAUSED, "The job was paused.")

    async def resume(self, identity: str) -> Response:
        return self._change(identity, _UNFINISHED[2:], Status.QUEUED, "The job was resumed.")

    async def delete_model(self, name: str) -> Response:
        served = self.models.get(name)
        if served.folder is None:
            raise wrong(
                f"{name!r} is a base model, and only fine-tuned models can be deleted. Start the "
                "service without it.",
                "model",
                "model_not_deletable",
            )
        users = [one.name for one in self.models.all() if one.base == name]
        users += [
            job.id
            for job in self.store.jobs()
            if job.status in _UNFINISHED
            and str(served.folder) in (job.plan["start_from"], job.plan["source"])
        ]
        if users:
            raise ApiError(
                409,
                f"{users[0]!r} starts from {name!r}. Delete that model, or cancel that job, first.",
                code="model_in_use",
            )
        await asyncio.to_thread(self._delete, served)
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    def _delete(self, served: ServedModel) -> None:
        assert served.folder is not None
        self.models.remove(served)
        self.store.delete_model(served.folder)

    def _change(
        self, identity: str, only: Sequence[Status], status: Status, message: str
    ) -> Response:
        job = self._find(identity)
        if not self.store.change_job(job.id, only=only, status=status):
            raise ApiError(
                409,
                f"the job {identity!r} cannot become {status.value}: it is "
                f"{self._find(identity).status.value}, not {' or '.join(only)}.",
                code="wrong_status",
            )
        self.store.add_event(job.id, message)
        self.runner.notify()
        return JSONResponse(job_object(self._find(identity)))


def _wrong_weights(message: str) -> ApiError:
    return wrong(message, "trained_weights", "invalid_value")


def _unknown_cursor(after: str) -> ApiError:
    return wrong(
        f"after is {after[:80]!r}, but the list has no such entry. Give the id of one.",
        "after",
        "invalid_value",
    )


def _page(objects: Sequence[dict[str, Any]], limit: int, after: str | None) -> Response:
    """Return a page of a list, by OpenAI's cursors."""
    first = 0
    if after is not None:
        places = [place for place, one in enumerate(objects) if one["id"] == after]
        if not places:
            raise _unknown_cursor(after)
        first = places[0] + 1
    found = list(objects[first : first + limit])
    content = {
        "object": "list",
        "data": found,
        "has_more": first + limit < len(objects),
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
    }
    return JSONResponse(content)

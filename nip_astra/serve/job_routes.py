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
from nip_astra.serve.completions import KEY_HEADER
from nip_astra.serve.job_runner import TRAINING, VALIDATION, JobRunner, read_examples
from nip_astra.serve.job_store import Job, JobStore
from nip_astra.serve.requests import (
    MAX_LISTED,
    ApiError,
    Body,
    Limit,
    Metadata,
    bad_request,
    not_found,
    overloaded,
    read_body,
)
from nip_astra.serve.served_models import ServedModel, ServedModels
from nip_astra.serve.settings import ServiceSettings

EVENT_PREFIX = "ftevent-"
KEY = "idempotency_key"
"""Entry of a job's metadata; a second job with the same value is the first one."""
_CHUNK = 1 << 20
_UNFINISHED = (Status.QUEUED, Status.RUNNING, Status.PAUSED)
DEFAULT_PAGE = 20
"""Entries of a page for a client that names no limit, as OpenAI's."""
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
        method: Method = "supervised"
        hyperparameters: SupervisedOptions = self.hyperparameters or SupervisedOptions()
        if self.method is not None:
            method = self.method.type
            of_method = self.method.dpo if method == "dpo" else self.method.supervised
            hyperparameters = of_method.hyperparameters
        options: dict[str, Any] = {}
        for name, openai_name in HYPERPARAMETERS.items():
            # Supervised jobs have no beta.
            option = getattr(hyperparameters, openai_name, "auto")
            if option != "auto":
                options[name] = option
        return FineTuningOptions(method, seed=self.seed, **options)


def job_object(job: Job) -> dict[str, Any]:
    """Return a job in OpenAI's format."""
    request = job.request
    method, options = request["method"], request["options"]
    # Clients of OpenAI's earlier API read hyper-parameters here; it had no DPO.
    supervised_options = {
        name: option for name, option in options.items() if name not in DPO_OPTIONS
    }
    has_succeeded = job.status is Status.SUCCEEDED
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "model": job.model,
        # Null until the model can be used: clients wait for it.
        "fine_tuned_model": job.name if has_succeeded else None,
        "organization_id": "local",
        "status": job.status.value,
        "error": job.error,
        "hyperparameters": supervised_options,
        "method": {"type": method, method: {"hyperparameters": options}},
        "training_file": request["training_file"],
        "validation_file": request["validation_file"],
        "result_files": [],
        "trained_tokens": job.trained_tokens if has_succeeded else None,
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
            raise bad_request(
                f"invalid upload: {error.detail}. Send a multipart form with file and purpose.",
                code="invalid_form",
            ) from error
        try:
            upload = _get_upload(form)
            filename = _check_filename(upload.filename)
            identity, part = self.store.new_file()
            try:
                # In a thread, so that other requests are answered meanwhile.
                await asyncio.to_thread(_write, upload.file, part)
                file = self.store.add_file(identity, part, filename)
                return JSONResponse(file_object(file))
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
        files = self.store.files(identity)
        if not files:
            raise not_found("file", identity)
        return files[0]

    async def retrieve(self, identity: str) -> Response:
        return JSONResponse(file_object(self._find(identity)))

    async def content(self, request: Request, identity: str) -> Response:
        file = self._find(identity)
        # An invalid range would be refused in plain text; files are sent whole.
        headers = [header for header in request.headers.raw if header[0] != b"range"]
        request.scope["headers"] = headers
        path = self.store.file_path(file["id"])
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, identity: str) -> Response:
        file = self._find(identity)
        self.store.delete_file(file["id"])
        return JSONResponse({"id": file["id"], "object": "file", "deleted": True})


def _write(source: BinaryIO, path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(source, file, _CHUNK)
        file.flush()
        # A client that got the file's id may count on it after a crash of the machine.
        os.fsync(file.fileno())


def _get_upload(form: FormData) -> UploadFile:
    """Return the file of an upload; raise `ApiError` if the form is invalid."""
    unknown = sorted(set(form) - {"file", "purpose"})
    if unknown:
        name = unknown[0][:100]
        message = f"the option {name!r} is not supported. Leave it out."
        raise bad_request(message, name, "unsupported_parameter")
    upload, purpose = form.get("file"), form.get("purpose")
    if purpose != "fine-tune":
        raise bad_request(
            f"unknown purpose {ascii(purpose)[:80]} of a file. Give purpose='fine-tune'.",
            "purpose",
            "invalid_value",
        )
    if not isinstance(upload, UploadFile):
        raise bad_request(
            "the form has no part 'file'. Give it.", "file", "missing_required_parameter"
        )
    return upload


def _check_filename(name: str | None) -> str:
    """Return a file's name; raise `ApiError` unless it is one on every system."""
    if name and len(name) <= 255 and name.isprintable() and name not in (".", ".."):
        has_slash = "/" in name or "\\" in name
        if not has_slash:
            return name
    raise bad_request(
        f"invalid file name {ascii(name)[:80]}. Give printable text without slashes.",
        "file",
        "invalid_value",
    )


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
        key = body.metadata.get(KEY) or request.headers.get(KEY_HEADER)
        if key is not None:
            job = self.store.find_job(key)
            if job is not None:
                return JSONResponse(job_object(job))
        served = self.models.get(body.model)
        num_unfinished = sum(job.status in _UNFINISHED for job in self.store.jobs())
        if num_unfinished >= self.settings.max_jobs:
            raise overloaded(
                f"{self.settings.max_jobs} jobs wait or run, the limit of this service. Retry when "
                "one has ended.",
                "too_many_jobs",
            )
        if body.method is not None and body.hyperparameters is not None:
            raise bad_request(
                "give hyperparameters within the method, not beside it.",
                "hyperparameters",
                "invalid_value",
            )
        job = await asyncio.to_thread(self._queue, body, served, key)
        self.runner.notify()
        return JSONResponse(job_object(job))

    def _queue(self, body: JobBody, served: ServedModel, key: str | None) -> Job:
        """Check a request's files, and store its job in a folder of its own."""
        options = body.options
        if options.seed is None:
            options = replace(options, seed=secrets.randbelow(1 << 31))
        plan = self._plan(options, served).to_dict()
        # The resolved options: a client that sent "auto" reads here what is used.
        resolved_options = {
            openai_name: plan[name]
            for name, openai_name in HYPERPARAMETERS.items()
            if options.method == "dpo" or name not in DPO_OPTIONS
        }
        identity = f"ftjob-{secrets.token_hex(12)}"
        # An adapter is served on the weights of its base, also one that continues another.
        root = served.base if served.adapter is not None and served.base else served.name
        new_job = {
            "id": identity,
            "model": body.model,
            "root": root,
            "name": f"ft:{root}:{body.suffix or ''}:{identity[-8:]}",
            "plan": plan,
            "request": {
                "method": options.method,
                "options": resolved_options,
                "training_file": body.training_file,
                "validation_file": body.validation_file,
                "suffix": body.suffix,
                "metadata": body.metadata,
            },
        }
        folder = self.store.job_folder(identity)
        folder.mkdir(parents=True)
        try:
            self._link_file(body.training_file, folder / TRAINING, options, "training_file")
            if body.validation_file is not None:
                target = folder / VALIDATION
                self._link_file(body.validation_file, target, options, "validation_file")
            job = self.store.add_job(new_job, key)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if job.id != identity:
            # Another request with the same key was faster.
            shutil.rmtree(folder, ignore_errors=True)
            return job
        self.store.add_event(identity, f"Created fine-tuning job: {identity}")
        return job

    def _link_file(
        self, identity: str, target: Path, options: FineTuningOptions, param: str
    ) -> None:
        """Link a file into the job's folder, so that the file may be deleted, and check it."""
        if not self.store.files(identity):
            raise not_found("file", identity, param)
        source = self.store.file_path(identity)
        try:
            os.link(source, target)
        except OSError:
            # Some file systems have no hard links.
            shutil.copyfile(source, target)
        read_examples(target, options.method)

    def _plan(self, options: FineTuningOptions, served: ServedModel) -> FineTuningPlan:
        """Return the plan of a job; raise `ApiError` if it may not train those weights."""
        settings = self.settings
        is_new = served.adapter is None
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
        needs_adapter = is_new and not trains_all
        return FineTuningPlan(
            **resolved,
            source=served.source,
            lora_rank=settings.lora_rank if needs_adapter else None,
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
        self, request: Request, limit: Limit = DEFAULT_PAGE, after: str | None = None
    ) -> Response:
        # OpenAI's clients send a filter as `metadata[name]=text`.
        metadata_filter = {}
        for name, text in request.query_params.items():
            if name.startswith("metadata["):
                metadata_filter[name.removeprefix("metadata[").removesuffix("]")] = text
        jobs = []
        for job in reversed(self.store.jobs()):
            metadata = job.request["metadata"]
            if metadata_filter.items() <= metadata.items():
                jobs.append(job_object(job))
        return _page(jobs, limit, after)

    async def events(
        self, identity: str, limit: Limit = DEFAULT_PAGE, after: str | None = None
    ) -> Response:
        job = self._find(identity).id
        before = None if after is None else self._find_event(job, after)
        # A long job has one for each of its steps: only those of the page are read, and one more,
        # which tells whether there is another page.
        rows = self.store.newest_events(job, before=before, limit=limit + 1)
        return _page([event_object(row) for row in rows], limit, None)

    def _find_event(self, job: str, identity: str) -> int:
        """Return the number of a job's event; raise `ApiError` if it has none with that id."""
        digits = identity.removeprefix(EVENT_PREFIX)
        # At most 15 digits: SQLite's integers have 64 bits.
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
        active = (Status.QUEUED, Status.RUNNING)
        return self._change(identity, active, Status.PAUSED, "The job was paused.")

    async def resume(self, identity: str) -> Response:
        return self._change(identity, (Status.PAUSED,), Status.QUEUED, "The job was resumed.")

    async def delete_model(self, name: str) -> Response:
        served = self.models.get(name)
        if served.folder is None:
            raise bad_request(
                f"{name!r} is a base model, and only fine-tuned models can be deleted. Start the "
                "service without it.",
                "model",
                "model_not_deletable",
            )
        # Models on its weights, and jobs that will read its folder.
        users = [model.name for model in self.models.all() if model.base == name]
        for job in self.store.jobs():
            sources = (job.plan["start_from"], job.plan["source"])
            if job.status in _UNFINISHED and str(served.folder) in sources:
                users.append(job.id)
        if users:
            raise ApiError(
                409,
                f"{users[0]!r} starts from {name!r}. Delete that model, or cancel that job, first.",
                code="model_in_use",
            )
        # In threads: the first waits for the engine's, the second deletes gigabytes.
        await asyncio.to_thread(self.models.remove, served)
        await asyncio.to_thread(self.store.delete_model, served.folder)
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    def _change(
        self, identity: str, only: Sequence[Status], status: Status, message: str
    ) -> Response:
        """Change the status of a job that has a status of `only`; otherwise refuse (409)."""
        job = self._find(identity)
        # One statement of the database: the job's process may change the status meanwhile.
        if not self.store.change_job(job.id, only=only, status=status):
            current_status = self._find(identity).status
            raise ApiError(
                409,
                f"the job {identity!r} cannot become {status.value}: it is "
                f"{current_status.value}, not {' or '.join(only)}.",
                code="wrong_status",
            )
        self.store.add_event(job.id, message)
        self.runner.notify()
        return JSONResponse(job_object(self._find(identity)))


def _wrong_weights(message: str) -> ApiError:
    return bad_request(message, "trained_weights", "invalid_value")


def _unknown_cursor(after: str) -> ApiError:
    return bad_request(
        f"after is {after[:80]!r}, but the list has no such entry. Give the id of one.",
        "after",
        "invalid_value",
    )


def _page(objects: Sequence[dict[str, Any]], limit: int, after: str | None) -> Response:
    """Return a page of a list, by OpenAI's cursors: `after` is the last id of the page before."""
    start = 0
    if after is not None:
        identities = [listed["id"] for listed in objects]
        if after not in identities:
            raise _unknown_cursor(after)
        start = identities.index(after) + 1
    page = list(objects[start : start + limit])
    content = {
        "object": "list",
        "data": page,
        "has_more": start + limit < len(objects),
        # OpenAI's clients send `last_id` as `after` for the next page.
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
    return JSONResponse(content)

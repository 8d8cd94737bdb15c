"""Fine-tuning jobs in this process: a folder for each job and its trained model."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from nip_astra.checkpoints.store import MANIFEST, inspect_folder, write_manifest
from nip_astra.errors import (
    CheckpointError,
    ConfigurationError,
    NipAstraError,
    RunDirectoryError,
    ServiceError,
)
from nip_astra.language_models.base import LANGUAGE_MODELS
from nip_astra.language_models.fine_tuning import STATE, FineTuning, FineTuningPlan, TrainingText
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.fine_tuning import (
    FineTuningJob,
    FineTuningOptions,
    FineTuningService,
    JobStatus,
    PreferenceExample,
    SupervisedExample,
)
from nip_astra.utils.devices import threads_for
from nip_astra.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

JOB, EXAMPLES, MODEL, ERROR = "job.json", "examples.jsonl", "model", "error"
CANCELLED = "cancelled"
"""Content of a cancelled job's file `error`."""


class LocalFineTuningService(FineTuningService):
    """Runs `FineTuning` on a small transformers model when a job's status is first requested.

    A killed job continues after its last saved step. Equal jobs give equal weights on the CPU. The
    name of a trained model is its path from the parent of `directory`, so that it stays valid when
    both are moved or copied.

    Parameters
    ----------
    directory : Path
        Folder of jobs and models.
    parameters : LanguageModel.Parameters
        Parameters of the backend; a job names the model.
    num_threads : int, optional
        CPU threads; None chooses by the model's size.
    """

    def __init__(
        self,
        directory: Path,
        parameters: Any,
        *,
        scenario_dir: Path | None = None,
        device: torch.device | str = "cpu",
        num_threads: int | None = None,
    ) -> None:
        self.directory, self.parameters = directory, parameters
        self.num_threads = num_threads
        self.scenario_dir, self.device = scenario_dir, torch.device(device)
        self._lock = asyncio.Lock()
        self._ending = threading.Lock()

    async def submit(
        self,
        model: str,
        examples: Sequence[SupervisedExample] | Sequence[PreferenceExample],
        options: FineTuningOptions,
        *,
        key: str,
    ) -> FineTuningJob:
        job_id = f"job-{sha256(key.encode()).hexdigest()[:16]}"
        folder = self.directory / job_id
        if not (folder / JOB).exists():
            if not examples:
                raise ServiceError(f"a job for {model!r} has no examples. Give at least one.")
            with _raising_run_directory_error(folder):
                self._write_job(folder, model, examples, options, key)
        return self._state(folder)

    def _write_job(
        self,
        folder: Path,
        model: str,
        examples: Sequence[SupervisedExample] | Sequence[PreferenceExample],
        options: FineTuningOptions,
        key: str,
    ) -> None:
        unfinished = folder.with_name(f".new-{folder.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        lines = "".join(json.dumps(example._asdict()) + "\n" for example in examples)
        (unfinished / EXAMPLES).write_text(lines, encoding="utf-8")
        job = {"model": model, "key": key, "options": asdict(options)}
        content = job | {"digest": _digest(job, lines)}
        (unfinished / JOB).write_text(json.dumps(content, indent=2), encoding="utf-8")
        unfinished.rename(folder)

    async def job(self, job_id: str) -> FineTuningJob:
        folder = self.directory / job_id
        async with self._lock:
            if not self._state(folder).status.is_over:
                await asyncio.to_thread(self._run, folder)
        return self._state(folder)

    async def cancel(self, job_id: str) -> FineTuningJob:
        folder = self.directory / job_id
        with self._ending, _raising_run_directory_error(folder):
            if not self._state(folder).status.is_over:
                (folder / ERROR).write_text(CANCELLED, encoding="utf-8")
        return self._state(folder)

    def take_up(self, model: str) -> str:
        path = Path(self.place_of(model))
        if not path.is_absolute():
            return model
        fault = "" if path.is_dir() else "there is no such folder"
        if (path / MANIFEST).exists():
            # An older version wrote none.
            _, fault = inspect_folder(path)
        if fault:
            raise CheckpointError(
                f"the trained model {path} cannot be used: {fault}. Restore its files, or start a "
                "new run."
            )
        return self._name_of(path.parent) if path.parent.parent == self.directory else model

    def place_of(self, model: str) -> str:
        """Return the path of a model trained by a job of this service, any other name unchanged.

        A path from before the run was moved or copied leads to the model in its current folder.
        """
        path = Path(model)
        if path.parts[-3::2] != (self.directory.name, MODEL):
            return model
        own = self.directory / path.parts[-2] / MODEL
        return str(own) if own.exists() or not path.is_absolute() else model

    def _name_of(self, folder: Path) -> str:
        return f"{self.directory.name}/{folder.name}/{MODEL}"

    def _state(self, folder: Path) -> FineTuningJob:
        if not (folder / JOB).exists():
            error = f"{self.directory} holds no such job"
            return FineTuningJob(folder.name, JobStatus.FAILED, error=error)
        if (folder / ERROR).exists():
            error = (folder / ERROR).read_text(encoding="utf-8")
            status = JobStatus.CANCELLED if error == CANCELLED else JobStatus.FAILED
            return FineTuningJob(folder.name, status, error=error)
        if (folder / MODEL).is_dir():
            return FineTuningJob(folder.name, JobStatus.SUCCEEDED, model=self._name_of(folder))
        return FineTuningJob(folder.name, JobStatus.QUEUED)

    def _run(self, folder: Path) -> None:
        try:
            model = self._train(folder)
        except RunDirectoryError:
            raise
        except NipAstraError as error:
            with _raising_run_directory_error(folder):
                (folder / ERROR).write_text(str(error), encoding="utf-8")
            return
        if model is None:
            return
        unfinished = folder / f".new-{MODEL}"
        with _raising_run_directory_error(folder):
            shutil.rmtree(unfinished, ignore_errors=True)
            model.save_pretrained(unfinished)
            write_manifest(unfinished, 0, {"job": folder.name}, is_best=False)
            with self._ending:
                if not (folder / ERROR).exists():
                    unfinished.rename(folder / MODEL)
            (folder / STATE).unlink(missing_ok=True)

    def _train(self, folder: Path) -> HuggingFaceLanguageModel | None:
        """Train and return the model; None if the job was cancelled."""
        job, examples = _read_job(folder)
        parameters = self.parameters.model_copy(update={"model": self.place_of(job["model"])})
        lora = getattr(parameters, "lora", None)
        options = FineTuningOptions(**job["options"]).resolved()
        plan = FineTuningPlan(
            **options,
            source=parameters.model,
            lora_rank=None if lora is None else lora.rank,
            lora_alpha=0.0 if lora is None else lora.alpha,
            start_from=None,
            device=str(self.device),
            num_threads=self.num_threads or 0,
        )
        model = self._load(parameters, plan.seed)
        with threads_for(model.num_parameters(), self.num_threads):
            tuning = FineTuning(plan, [_training_text(one) for one in examples], model)
            report = tuning.load_progress(folder)
            for report in tuning.run():
                if (folder / ERROR).exists():
                    (folder / STATE).unlink(missing_ok=True)
                    return None
                with _raising_run_directory_error(folder):
                    tuning.save_progress(folder, report)
        loss = float("nan") if report is None else report.metrics["loss"]
        logger.info("job %s trained %s; last loss %.4g", folder.name, model.source, loss)
        return model

    def _load(self, parameters: Any, seed: int) -> HuggingFaceLanguageModel:
        backend = LANGUAGE_MODELS.get(parameters.type_name)
        with torch.random.fork_rng(devices=[]):
            # A new adapter is drawn from the global generator.
            torch.manual_seed(derive_seed(seed, "adapter"))
            model = backend.load(
                parameters, device=self.device, scenario_dir=self.scenario_dir, trainable=True
            )
        if not isinstance(model, HuggingFaceLanguageModel):
            raise ConfigurationError(
                f"the backend {parameters.type_name!r} cannot be trained here. Use huggingface, or "
                "a service that trains."
            )
        return model


@contextmanager
def _raising_run_directory_error(folder: Path) -> Iterator[None]:
    """Convert errors of writing a job's files to one that names the job."""
    try:
        yield
    except NipAstraError:
        raise
    except Exception as error:
        # safetensors and tokenizers have errors of their own for a full disk.
        reason = getattr(error, "strerror", None) or error
        raise RunDirectoryError(
            f"the job {folder} could not be written: {reason}. Free space or change the "
            "permissions, then resume the run: the job continues."
        ) from error


def _digest(job: Mapping[str, Any], examples: str) -> str:
    content = {name: job[name] for name in ("model", "key", "options")}
    return sha256(json.dumps([content, examples], sort_keys=True).encode()).hexdigest()


def _read_job(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the job and its examples."""
    try:
        job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        text = (folder / EXAMPLES).read_text(encoding="utf-8")
        # An older version wrote no digest.
        is_whole = job.get("digest", "") in ("", _digest(job, text))
        examples = [json.loads(line) for line in text.split("\n") if line]
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error!r}. Restore its files.") from error
    if not is_whole:
        raise CheckpointError(f"the files of {folder} have changed. Restore them.")
    return job, examples


def _training_text(example: Mapping[str, Any]) -> TrainingText:
    if "preferred" in example:
        answers = (example["preferred"], example["rejected"])
        return TrainingText(tuple(example["messages"]), answers)
    *before, last = example["messages"]
    return TrainingText(tuple(before), (last["content"],))

"""Execution of fine-tuning jobs, one by one in separate processes, and serving of their models.

`python -m nip_astra.serve.job_runner STATE_DIR JOB` is the process of one job. It writes each step
to disk before reporting it: the state, which is renamed into place, then the event of the step.
"""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from nip_astra.errors import NipAstraError
from nip_astra.language_models.fine_tuning import (
    STATE,
    FineTuning,
    FineTuningPlan,
    StepReport,
    TrainingExample,
    TrainingText,
    preference_texts,
)
from nip_astra.language_models.services.fine_tuning import JobStatus as Status
from nip_astra.language_models.services.fine_tuning import Method
from nip_astra.serve.job_store import Job, JobStore
from nip_astra.serve.requests import ApiError, Body, bad_request, check_body, parse_json
from nip_astra.serve.served_models import ServedModels
from nip_astra.serve.text_routes import ChatTurn, Tool
from nip_astra.tracking.run_lock import run_lock
from nip_astra.utils.children import AdoptedChild, Child, process_start, start_program

PERIOD = 0.1
"""Seconds between checks of the process."""
SECONDS_TO_STOP = 20.0
"""Maximum seconds for a process to finish its step after SIGTERM."""
MAX_CRASHES = 3
"""Crashes after which a job fails."""
STOPPED = 75
"""Exit code of a process that was stopped before its job was complete."""
NUM_CHECKPOINTS = 3
"""Number of recent epochs whose models are kept."""
_TO_RUN = (Status.QUEUED, Status.RUNNING)
MODEL, TRAINING, VALIDATION = "model", "train.jsonl", "valid.jsonl"

logger = logging.getLogger(__name__)


class SupervisedTurn(ChatTurn):
    """A message of a supervised example."""

    weight: Literal[0, 1] | None = None
    """Whether a message of the assistant is learned; null for 1."""

    @model_validator(mode="after")
    def _check_weight(self) -> SupervisedTurn:
        if self.weight is not None and self.role != "assistant":
            raise ValueError("only messages of the role assistant have a weight")
        return self

    def plain(self) -> dict[str, Any]:
        weight = {} if self.weight is None else {"weight": self.weight}
        return super().plain() | weight


class ToolBody(Body):
    """Tools that the model reads."""

    tools: list[Tool] = []
    parallel_tool_calls: bool | None = None
    """Accepted as part of OpenAI's format. Training does not depend on it."""

    def plain_tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class SupervisedLine(ToolBody):
    """A conversation of which the assistant's messages are learned."""

    messages: Annotated[list[SupervisedTurn], Field(min_length=2)]


class PreferenceInput(ToolBody):
    """The messages before both answers of a pair."""

    messages: Annotated[list[ChatTurn], Field(min_length=1)]


class PreferenceLine(Body):
    """A conversation with a preferred and a rejected answer."""

    input: PreferenceInput
    preferred_output: Annotated[list[ChatTurn], Field(min_length=1, max_length=1)]
    non_preferred_output: Annotated[list[ChatTurn], Field(min_length=1, max_length=1)]


def read_examples(path: Path, method: Method) -> list[TrainingExample]:
    """Read a file of examples, JSON Lines in OpenAI's format; `ApiError` names an invalid line."""
    examples = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                examples.append(_read_line(line, number, method))
    if not examples:
        raise _wrong_file("the file has no examples. Give one JSON object per line.")
    return examples


def _read_line(line: bytes, number: int, method: Method) -> TrainingExample:
    try:
        content = parse_json(line)
        if method == "supervised":
            conversation = check_body(content, SupervisedLine)
            messages = tuple(message.plain() for message in conversation.messages)
            text = TrainingText(messages, tuple(conversation.plain_tools()))
            example: TrainingExample = (text,)
        else:
            pair = check_body(content, PreferenceLine)
            before = [message.plain() for message in pair.input.messages]
            answers = [pair.preferred_output[0].plain(), pair.non_preferred_output[0].plain()]
            example = preference_texts(before, answers, pair.input.plain_tools())
    except ApiError as error:
        raise _wrong_file(f"line {number} is no example of the method {method}: {error}") from error
    if any(text.messages[-1]["role"] != "assistant" for text in example):
        raise _wrong_file(f"line {number} must end with a message of the role 'assistant'.")
    if not all(text.learned for text in example):
        raise _wrong_file(
            f"all messages of line {number} have a weight of 0. Leave the line out, or give a "
            "message of the role 'assistant' the weight 1."
        )
    return example


def _wrong_file(message: str) -> ApiError:
    return bad_request(message, "training_file", "invalid_training_file")


# ---- the service


class JobRunner:
    """The thread that runs queued jobs, and serves their models among `models`."""

    def __init__(self, store: JobStore, models: ServedModels) -> None:
        self.store = store
        self.models = models
        # The id of the job of `_process`.
        self._job = ""
        self._process: Child | None = None
        self._stopped_at: float | None = None
        self._changed = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="job runner", daemon=True)

    def start(self) -> None:
        """Serve the models of earlier jobs, and start the thread."""
        for job in self.store.jobs():
            if job.status is Status.SUCCEEDED:
                self._serve(job)
            elif job.status is Status.RUNNING:
                # At most one was running.
                self._watch(job.id, AdoptedChild(job.id, job.pid, job.pid_started))
        self._thread.start()

    def notify(self) -> None:
        self._changed.set()

    def close(self) -> None:
        """Stop the current process; its job continues at the next start."""
        self._is_closed = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._process is not None:
            self._stopped_at = monotonic()
            self._process.stop(SECONDS_TO_STOP)
            self._settle(self._process)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._check()
            except Exception:
                # A full disk, for instance; the next attempt may succeed.
                logger.exception("the queue of jobs failed")
            self._changed.wait(PERIOD if self._process is not None else 1.0)
            self._changed.clear()

    def _check(self) -> None:
        """Settle or stop the current process, or begin the next job."""
        process = self._process
        if process is not None:
            if process.code is not None:
                self._settle(process)
            elif self.store.job(self._job).status is Status.RUNNING:
                return
            # A client cancelled or paused the job.
            elif self._stopped_at is None:
                self._stopped_at = monotonic()
                process.request_stop()
            elif monotonic() - self._stopped_at > SECONDS_TO_STOP:
                process.kill()
        if self._process is None:
            for job in self.store.jobs():
                # A running job without a process could not be started: the disk was full, for
                # instance.
                if job.status in _TO_RUN:
                    self._begin(job)
                    return

    def _watch(self, job: str, process: Child) -> None:
        self._job = job
        self._process = process
        self._stopped_at = None

    def _begin(self, job: Job) -> None:
        if not self.store.change_job(job.id, only=_TO_RUN, status=Status.RUNNING):
            return
        log = self.store.job_folder(job.id) / "log.txt"
        arguments = ["-m", __name__, str(self.store.folder), job.id]
        process = start_program(job.id, arguments, log=log, stdin=subprocess.DEVNULL)
        self._watch(job.id, process)
        # A restarted service finds the process by both: the system uses a pid again.
        started = process_start(process.pid)
        self.store.change_job(job.id, pid=process.pid, pid_started=started)
        self.store.add_event(job.id, "Fine-tuning job started.")

    def _settle(self, process: Child) -> None:
        """Handle the job of a process that has ended."""
        job = self.store.job(self._job)
        was_stopped = process.code == STOPPED or self._stopped_at is not None
        if job.status is not Status.RUNNING:
            # Cancelled, paused, or failed by its own process.
            pass
        elif job.is_trained:
            # It succeeds only once its model is served: clients use it at once.
            if self._serve(job):
                self.store.add_event(job.id, f"New fine-tuned model created: {job.name}")
                self.store.add_event(job.id, "The job has successfully completed.")
                self.store.change_job(job.id, only=[Status.RUNNING], status=Status.SUCCEEDED)
        elif was_stopped or isinstance(process, AdoptedChild):
            # A process of an earlier service usually ended with it, at a shutdown of the machine
            # for instance. That is no crash.
            self.store.change_job(job.id, only=[Status.RUNNING], status=Status.QUEUED)
        else:
            self._count_crash(job, process)
        self._process = None

    def _count_crash(self, job: Job, process: Child) -> None:
        crashes = job.crashes + 1
        reason = f"The training process {process.ending}"
        if crashes >= MAX_CRASHES:
            log = self.store.job_folder(job.id) / "log.txt"
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            output = lines[-1][:500] if lines else "none."
            text = f"{reason}, for the {crashes}rd time; its last output: {output}"
            self.store.add_event(job.id, text, level="error")
            self.store.change_job(
                job.id,
                only=[Status.RUNNING],
                status=Status.FAILED,
                error=_job_error("training_failed", text),
                crashes=crashes,
            )
            return
        self.store.add_event(job.id, f"{reason}; the job continues in another.", level="warn")
        self.store.change_job(job.id, only=[Status.RUNNING], status=Status.QUEUED, crashes=crashes)

    def _serve(self, job: Job) -> bool:
        """Serve the models of a job; return whether that succeeded."""
        folders = {job.name: self.store.job_folder(job.id) / MODEL}
        for row in self.store.checkpoints(job.id):
            folders[row["name"]] = self.store.folder / row["folder"]
        try:
            for name, folder in folders.items():
                # A client may have deleted a model of an earlier job; a job that has just ended
                # must have all of them.
                if job.status is Status.RUNNING or folder.exists():
                    self._serve_model(job, name, folder)
        except NipAstraError as error:
            logger.warning("the model %s is not served: %s", job.name, error)
            if job.status is Status.RUNNING:
                job_error = _job_error("not_servable", str(error))
                self.store.change_job(job.id, status=Status.FAILED, error=job_error)
            return False
        return True

    def _serve_model(self, job: Job, name: str, folder: Path) -> None:
        if (folder / "adapter_config.json").exists():
            # An adapter fits only the weights that it was trained on.
            source = self.models.get(job.root).source
            if source != job.plan["source"]:
                raise NipAstraError(
                    f"its base is {job.plan['source']}, but {job.root!r} is now {source}. Serve "
                    "the former under that name."
                )
            self.models.add_adapter(name, job.root, folder)
        else:
            self.models.add(name, str(folder), base=job.root)


def _job_error(code: str, message: str) -> dict[str, str | None]:
    """Return the error of a failed job, in OpenAI's format."""
    return {"code": code, "message": message, "param": None}


# ---- the process that trains


def main(state_dir: str, identity: str) -> int:
    """Train a job until it is complete or SIGTERM arrives; return the exit code."""
    store = JobStore(Path(state_dir))
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    # The service alone stops it, by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # A service killed before it noted its process may have left one that is still training.
        with run_lock(store.job_folder(identity), waits=True):
            job = store.job(identity)
            if job.is_trained or job.status is not Status.RUNNING:
                return STOPPED
            return JobTraining(store, job, lambda: bool(signals)).run()
    except (NipAstraError, OSError, MemoryError, RuntimeError) as error:
        logger.exception("the job failed")
        reason = str(error) or type(error).__name__
        has_failed = store.change_job(
            identity,
            only=[Status.RUNNING],
            status=Status.FAILED,
            error=_job_error("training_failed", reason),
        )
        if has_failed:
            store.add_event(identity, f"The job failed: {reason}", level="error")
        return 2


class JobTraining:
    """The training of one stored job; it stops after a step if `must_stop` returns True."""

    def __init__(self, store: JobStore, job: Job, must_stop: Callable[[], bool]) -> None:
        self.store, self.job, self.must_stop = store, job, must_stop
        self.folder = store.job_folder(job.id)

    def run(self) -> int:
        """Take the remaining steps; return the exit code."""
        plan = FineTuningPlan.from_dict(self.job.plan)
        torch.set_num_threads(plan.num_threads)
        self.tuning = FineTuning(plan, read_examples(self.folder / TRAINING, plan.method))
        self.validation = None
        if (self.folder / VALIDATION).exists():
            self.validation = read_examples(self.folder / VALIDATION, plan.method)
        saved = self.tuning.load_progress(self.folder)
        if saved is not None:
            self._report(saved)
            self.store.add_event(self.job.id, f"The job continues after step {saved.step}.")
        for report in self.tuning.run():
            is_last = report.step == self.tuning.num_steps
            # The service that would stop a cancelled job may have ended.
            is_running = self.store.job(self.job.id).status is Status.RUNNING
            must_stop = self.must_stop() or not is_running
            is_needed = is_last or must_stop or report.ends_epoch is not None
            # First the state, then the event: a client never sees a step that would be lost.
            self.tuning.save_progress(self.folder, report, is_needed=is_needed)
            self._report(report)
            if must_stop and not is_last:
                return STOPPED
        return self._finish()

    def _report(self, report: StepReport) -> None:
        """Store the event of a step, and the model at the end of an epoch; each once."""
        step, step_metrics, epoch = report
        # OpenAI's names, which its clients plot.
        metrics = {"step": step, "train_loss": step_metrics["loss"]}
        for name, figure in step_metrics.items():
            if name != "loss":
                metrics[name] = figure
        text = f"Step {step}/{self.tuning.num_steps}: training loss={step_metrics['loss']:.4f}"
        if epoch is not None:
            if self.validation is not None:
                metrics["full_valid_loss"] = self.tuning.evaluate(self.validation)
                text += f", validation loss={metrics['full_valid_loss']:.4f}"
            self._save_model(step, metrics)
        self.store.add_event(self.job.id, text, metrics=metrics, step=step)

    def _save_model(self, step: int, metrics: Mapping[str, Any]) -> None:
        is_last = step == self.tuning.num_steps
        folder = self.folder / (MODEL if is_last else f"step-{step}")
        if not folder.exists():
            # Renamed when it is complete: an interrupted one is written again.
            unfinished = self.folder / f"{folder.name}.new"
            shutil.rmtree(unfinished, ignore_errors=True)
            self.tuning.save(unfinished)
            unfinished.rename(folder)
        name = self.job.name if is_last else f"{self.job.name}:ckpt-step-{step}"
        self.store.add_checkpoint(self.job, step, folder, {**metrics, "step": step}, name=name)
        for old in self.store.drop_checkpoints(self.job.id, keep=NUM_CHECKPOINTS):
            shutil.rmtree(self.store.folder / old, ignore_errors=True)

    def _finish(self) -> int:
        is_still_running = self.store.change_job(
            self.job.id,
            only=[Status.RUNNING],
            is_trained=True,
            trained_tokens=self.tuning.num_tokens_trained,
        )
        if not is_still_running:
            return STOPPED
        # The state of the optimizer is needed to continue only.
        (self.folder / STATE).unlink(missing_ok=True)
        return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main(*sys.argv[1:]))

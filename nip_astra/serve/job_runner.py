"""Runs jobs one after the other, each in a process of its own, and serves what they make."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nip_astra.errors import NipAstraError
from nip_astra.serve.job_store import Job, JobStore, Status, is_running, process_start
from nip_astra.serve.served_models import ServedModels
from nip_astra.serve.worker import MODEL, STOPPED

PERIOD = 0.1
"""Seconds between looks at the process that trains."""
SECONDS_TO_STOP = 20.0
"""How long a process may go on with its step once it is told to end."""
MAX_CRASHES = 3
"""Processes that may die of one job before it is given up."""

logger = logging.getLogger(__name__)


@dataclass
class _Training:
    """A process that trains; one that an earlier service started is no child of this one."""

    job: str
    pid: int
    started: str | None
    child: subprocess.Popen[bytes] | None
    told_to_stop_at: float | None = None

    def has_ended(self) -> bool:
        if self.child is not None:
            return self.child.poll() is not None
        return not is_running(self.pid, self.started)

    def how_it_ended(self) -> str:
        code = None if self.child is None else self.child.returncode
        if code is None:
            return "ended while no service watched it"
        if code < 0:
            return f"was killed by signal {-code}"
        return f"ended with code {code}"

    def stop(self) -> None:
        """Ask it to end after its step; later asks kill it when it has taken too long."""
        now = time.monotonic()
        with suppress(ProcessLookupError):
            if self.told_to_stop_at is None:
                self.told_to_stop_at = now
                os.kill(self.pid, signal.SIGTERM)
            elif now - self.told_to_stop_at > SECONDS_TO_STOP:
                os.kill(self.pid, signal.SIGKILL)


class JobRunner:
    """The thread that works on the queue of jobs.

    Parameters
    ----------
    models : ServedModels
        Where trained models are offered.
    """

    def __init__(self, store: JobStore, models: ServedModels) -> None:
        self.store, self.models = store, models
        self._training: _Training | None = None
        self._changed = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="job runner", daemon=True)

    def start(self) -> None:
        """Offer what earlier jobs made, and begin to work on the queue."""
        for job in self.store.jobs():
            if job.status is Status.SUCCEEDED:
                self._offer(job)
            elif job.status is Status.RUNNING:
                # One after the other: at most one was running.
                self._training = _Training(job.id, job.pid or -1, job.pid_started, None)
        self._thread.start()

    def notify(self) -> None:
        """Look at the queue now."""
        self._changed.set()

    def close(self) -> None:
        """Tell the process that trains to keep its work and end; it goes on at the next start."""
        self._is_closed = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()
        training = self._training
        while training is not None and not training.has_ended():
            training.stop()
            time.sleep(0.02)
        if training is not None:
            self._settle(training)
            self._training = None

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._look()
            except Exception:
                # A full disk, for instance; the next look may fare better.
                logger.exception("the queue of jobs could not be worked on")
            self._changed.wait(PERIOD if self._training is not None else 1.0)
            self._changed.clear()

    def _look(self) -> None:
        training = self._training
        if training is not None:
            if training.has_ended():
                self._settle(training)
                self._training = None
            elif self.store.job(training.job).status is not Status.RUNNING:
                training.stop()
                return
        if self._training is None:
            waiting = [job for job in self.store.jobs() if job.status is Status.QUEUED]
            if waiting:
                self._begin(waiting[0])

    def _begin(self, job: Job) -> None:
        if not self.store.change_job(job.id, only=[Status.QUEUED], status=Status.RUNNING):
            return
        folder = self.store.job_folder(job.id)
        with (folder / "log.txt").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "nip_astra.serve.worker", str(self.store.folder), job.id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A terminal's Ctrl-C is for the service, which then tells the process to end.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        started = process_start(child.pid)
        self.store.change_job(job.id, pid=child.pid, pid_started=started)
        self.store.add_event(job.id, "Fine-tuning job started.")
        self._training = _Training(job.id, child.pid, started, child)

    def _settle(self, training: _Training) -> None:
        """Say what becomes of a job whose process has ended."""
        job = self.store.job(training.job)
        if job.status is not Status.RUNNING:
            return
        if job.is_trained:
            if self._offer(job):
                self.store.add_event(job.id, f"New fine-tuned model created: {job.name}")
                self.store.add_event(job.id, "The job has successfully completed.")
                self.store.change_job(job.id, only=[Status.RUNNING], status=Status.SUCCEEDED)
            return
        code = None if training.child is None else training.child.returncode
        if code == STOPPED or training.told_to_stop_at is not None:
            self.store.change_job(job.id, only=[Status.RUNNING], status=Status.QUEUED)
            return
        crashes = job.crashes + 1
        how = f"The process that trained {training.how_it_ended()}"
        if crashes >= MAX_CRASHES:
            text = f"{how}, for the {crashes}rd time; it said last: {self._last_words(job)}"
            fault = {"code": "training_failed", "message": text, "param": None}
            self.store.add_event(job.id, text, level="error")
            self.store.change_job(
                job.id, only=[Status.RUNNING], status=Status.FAILED, error=fault, crashes=crashes
            )
            return
        self.store.add_event(job.id, f"{how}; the job goes on in another one.", level="warn")
        self.store.change_job(job.id, only=[Status.RUNNING], status=Status.QUEUED, crashes=crashes)

    def _last_words(self, job: Job) -> str:
        log = self.store.job_folder(job.id) / "log.txt"
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "nothing."

    def _offer(self, job: Job) -> bool:
        """Serve what a job made, with the models of its epochs, and say whether that was done."""
        wanted = {job.name: self.store.job_folder(job.id) / MODEL}
        for row in self.store.checkpoints(job.id):
            wanted[row["name"]] = self.store.folder / row["folder"]
        try:
            for name, folder in wanted.items():
                self._offer_one(job, name, folder)
        except NipAstraError as error:
            logger.warning("the model %s is not served: %s", job.name, error)
            if job.status is Status.RUNNING:
                fault = {"code": "not_servable", "message": str(error), "param": None}
                self.store.change_job(job.id, status=Status.FAILED, error=fault)
            return False
        return True

    def _offer_one(self, job: Job, name: str, folder: Path) -> None:
        if (folder / "adapter_config.json").exists():
            if self.models.get(job.root).source != job.plan["source"]:
                raise NipAstraError(
                    f"it was trained on {job.plan['source']}, but {job.root!r} is now "
                    f"{self.models.get(job.root).source}. Serve the former under that name."
                )
            self.models.add_adapter(name, job.root, folder)
        else:
            self.models.add(name, str(folder), base=job.root)

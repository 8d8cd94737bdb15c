"""The process that trains one job: started by the service, and able to go on where one was killed.

Everything that it has done is on disk before it is told: a state that is renamed into place, then
the event of its step, which is kept once.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nip_astra.errors import NipAstraError
from nip_astra.serve.job_store import Job, JobStore, Status

STOPPED = 75
"""Exit code where the process was told to end before the job was done."""
LARGE_STATE = 64 << 20
"""Bytes of state up to which every step is kept; of a larger one, one every `LARGE_PERIOD`."""
LARGE_PERIOD = 60.0
NUM_CHECKPOINTS = 3
"""Newest epochs whose models are kept."""
STATE, MODEL, TRAINING, VALIDATION = "state.safetensors", "model", "train.jsonl", "valid.jsonl"

logger = logging.getLogger(__name__)


def main(state_dir: str, identity: str) -> int:
    """Train a job until it is done, or until SIGTERM; gives the exit code."""
    store = JobStore(Path(state_dir))
    asked_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_stop.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = store.job(identity)
    try:
        return _Work(store, job, lambda: bool(asked_to_stop)).run()
    except (NipAstraError, OSError, MemoryError, RuntimeError) as error:
        logger.exception("the job failed")
        _mark_failed(store, identity, error)
        return 2


def _mark_failed(store: JobStore, identity: str, error: BaseException) -> None:
    text = str(error) or type(error).__name__
    fault = {"code": "training_failed", "message": text, "param": None}
    if store.change_job(identity, only=[Status.RUNNING], status=Status.FAILED, error=fault):
        store.add_event(identity, f"The job failed: {text}", level="error")


class _Work:
    def __init__(self, store: JobStore, job: Job, must_stop: Callable[[], bool]) -> None:
        self.store, self.job, self.must_stop = store, job, must_stop
        self.folder = store.job_folder(job.id)
        self.kept_at = 0.0

    def run(self) -> int:
        import torch

        from nip_astra.serve.tuning import Tuning, TuningPlan
        from nip_astra.serve.tuning_data import read_texts

        plan = TuningPlan(**self.job.plan)
        torch.set_num_threads(plan.num_threads)
        self.tuning = Tuning(plan, read_texts(self.folder / TRAINING, plan.method))
        self.validation = None
        if (self.folder / VALIDATION).exists():
            self.validation = read_texts(self.folder / VALIDATION, plan.method)
        self._go_on()
        for step, metrics, epoch in self.tuning.run():
            is_last = step == self.tuning.num_steps
            # The service that would tell of a cancelled job may be gone.
            must_stop = self.must_stop() or not self._is_wanted()
            self._keep_state({"metrics": metrics, "epoch": epoch}, is_needed=is_last or must_stop)
            self._tell(step, metrics, epoch)
            if must_stop and not is_last:
                return STOPPED
        return self._finish()

    def _is_wanted(self) -> bool:
        return self.store.job(self.job.id).status is Status.RUNNING

    def _go_on(self) -> None:
        """Take what an earlier process left, and tell what it could not tell any more."""
        from safetensors import safe_open

        path = self.folder / STATE
        if not path.exists():
            return
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["about"])
            self.tuning.load_state({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
        self._tell(self.tuning.step, about["metrics"], about["epoch"])
        self.store.add_event(self.job.id, f"The job goes on after step {self.tuning.step}.")

    def _keep_state(self, about: dict[str, Any], *, is_needed: bool) -> None:
        from safetensors.torch import save_file

        state = {name: value.contiguous() for name, value in self.tuning.state().items()}
        size = sum(value.nbytes for value in state.values())
        is_due = size <= LARGE_STATE or time.monotonic() - self.kept_at > LARGE_PERIOD
        if is_due or is_needed or about["epoch"]:
            unfinished = self.folder / f"{STATE}.new"
            save_file(state, unfinished, metadata={"about": json.dumps(about)})
            unfinished.replace(self.folder / STATE)
            self.kept_at = time.monotonic()

    def _tell(self, step: int, metrics: dict[str, float], epoch: int | None) -> None:
        """Tell of a step, and keep the model at the end of an epoch; again does nothing."""
        data = {"step": step, "train_loss": metrics["loss"]}
        data.update({name: value for name, value in metrics.items() if name != "loss"})
        text = f"Step {step}/{self.tuning.num_steps}: training loss={metrics['loss']:.4f}"
        if epoch is not None:
            if self.validation is not None:
                data["full_valid_loss"] = self.tuning.evaluate(self.validation)
                text += f", validation loss={data['full_valid_loss']:.4f}"
            self._keep_model(step, data)
        self.store.add_event(self.job.id, text, data=data, step=step)

    def _keep_model(self, step: int, metrics: dict[str, Any]) -> None:
        is_last = step == self.tuning.num_steps
        folder = self.folder / (MODEL if is_last else f"step-{step}")
        if not folder.exists():
            unfinished = self.folder / f"{folder.name}.new"
            shutil.rmtree(unfinished, ignore_errors=True)
            self.tuning.save(unfinished)
            unfinished.rename(folder)
        name = self.job.name if is_last else f"{self.job.name}:ckpt-step-{step}"
        measured = {**metrics, "step": step}
        self.store.add_checkpoint(self.job, step, folder, measured, name=name)
        for old in self.store.drop_checkpoints(self.job.id, keep=NUM_CHECKPOINTS):
            shutil.rmtree(self.store.folder / old, ignore_errors=True)

    def _finish(self) -> int:
        is_wanted = self.store.change_job(
            self.job.id,
            only=[Status.RUNNING],
            is_trained=True,
            trained_tokens=self.tuning.num_tokens_trained,
        )
        if not is_wanted:
            return STOPPED
        (self.folder / STATE).unlink(missing_ok=True)
        return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main(*sys.argv[1:]))

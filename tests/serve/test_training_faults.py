"""A run whose service is killed during its work reports this, and continues without loss."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from nip_astra.errors import ModelLoadError, ServiceBusyError, ServiceUnreachableError
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.resume_check import what_was_found
from nip_astra.run import resume_experiment, run_experiment
from nip_astra.serve.requests import ApiError
from nip_astra.serve.settings import TrainingProtocol
from nip_astra.serve.training import WorkQueue
from tests.kit.resuming import short_experiment
from tests.serve.dying import DEATHS, dying_server
from tests.serve.running import POLICY, TrainingServer, training_server
from tests.serve.test_training_protocols import ADAPTED, ROW, SECTION, trainer_at

PATIENT = f"{SECTION}.patience_seconds=20"
SETTINGS: dict[str, Any] = {"progress": False, "checkpoint_period": 1}


def run_of(protocol: TrainingProtocol, port: int, folder: Path) -> ResolvedExperiment:
    service = {"base_url": f"http://127.0.0.1:{port}", "model": "policy", "patience_seconds": 1}
    service["backend"] = protocol
    overrides = [f"{SECTION}.{name}={value}" for name, value in service.items()]
    return short_experiment(
        "remote_api_grpo", folder, *overrides, *ADAPTED, "training.lr=1e-3", num_iterations=3
    )


@pytest.fixture(scope="module", params=["http", "tinker"])
def undisturbed(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingProtocol, dict[str, bytes]]:
    """A protocol, and a run's results through it if its service stays."""
    if request.param == "tinker":
        pytest.importorskip("tinker")
    folder = tmp_path_factory.mktemp("undisturbed")
    with training_server([request.param]) as server:
        resolved = run_of(request.param, server.port, folder)
        run_experiment(resolved, runs_dir=str(folder), run_id="run", **SETTINGS)
    return request.param, what_was_found(folder / "run")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.parametrize("dies_in", DEATHS)
def test_a_service_killed_at_work_is_reported_and_its_run_continues_without_loss(
    undisturbed: tuple[TrainingProtocol, dict[str, bytes]], dies_in: str, tmp_path: Path
) -> None:
    protocol, expected = undisturbed[0], {**undisturbed[1]}
    state_dir = str(tmp_path / "state")
    with dying_server(protocol, state_dir, dies_in) as (port, process):
        resolved = run_of(protocol, port, tmp_path)
        with pytest.raises(ServiceUnreachableError, match=r"does not answer.*nip-astra resume"):
            run_experiment(resolved, runs_dir=str(tmp_path), run_id="run", **SETTINGS)
        process.join(5)
        assert process.exitcode == -signal.SIGKILL
    # One of the three iterations is lost.
    (step,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert step.name == "step_00000005"
    server = TrainingServer({"policy": str(POLICY)}, [protocol], {"state_dir": state_dir})
    server.port = port
    server.start()
    try:
        resume_experiment(tmp_path / "run", progress=False)
    finally:
        server.stop()
    results = what_was_found(tmp_path / "run")
    if protocol == "tinker":
        # Which requests its server batches together depends on timing, and so do the last bits.
        lines = (one.pop("metrics.jsonl").splitlines() for one in (results, expected))
        for mine, theirs in zip(*lines, strict=True):
            assert json.loads(mine) == pytest.approx(json.loads(theirs), rel=1e-4, abs=1e-5)
        for one in (results, expected):
            # The path of the state at its service, and lengths of files of these metrics.
            assert one.pop("checkpoints/step_00000015/tinker.json")
            assert one.pop("step_00000015/state.json")
    assert results == expected


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> StoppedQueue:
    return StoppedQueue(monkeypatch)


class StoppedQueue:
    """Lets servers accept work, but do none while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.has_refused = threading.Event(), threading.Event()
        self.at_work: list[WorkQueue] = []
        do, check = WorkQueue._do, WorkQueue._check_room

        def do_where_open(queue: WorkQueue, batch: Any) -> None:
            self.at_work.append(queue)
            self.is_open.wait()
            do(queue, batch)

        def note_refusals(queue: WorkQueue) -> None:
            try:
                check(queue)
            except ApiError:
                self.has_refused.set()
                raise

        monkeypatch.setattr(WorkQueue, "_do", do_where_open)
        monkeypatch.setattr(WorkQueue, "_check_room", note_refusals)
        self.is_open.set()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Close the queue within the block; a test that fails there does not wait for it."""
        self.at_work.clear()
        self.has_refused.clear()
        self.is_open.clear()
        try:
            yield
        finally:
            self.is_open.set()

    def wait_for(self, *, at_work: int, waiting: int) -> None:
        while len(self.at_work) < at_work or self.at_work[0].num_waiting < waiting:
            time.sleep(0.005)


@pytest.mark.parametrize(
    # The SDK retries after a second or more.
    "protocol",
    ["http", pytest.param("tinker", marks=pytest.mark.slow)],
)
def test_a_full_queue_is_waited_for(queue: StoppedQueue, protocol: TrainingProtocol) -> None:
    if protocol == "tinker":
        pytest.importorskip("tinker")
    with training_server([protocol], max_waiting=1) as server, ThreadPoolExecutor(3) as pool:
        services = [trainer_at(server, protocol, PATIENT).service for _ in range(3)]
        with queue.shut():
            # One request is at work, one waits, and one is refused.
            answers = [pool.submit(one.compute_logprobs, *ROW) for one in services]
            assert queue.has_refused.wait(10)
        first, second, third = (answer.result(20) for answer in answers)
        assert first == second == third < 0


def test_a_queue_that_stays_full_is_reported(queue: StoppedQueue) -> None:
    with training_server(["http"], max_waiting=1) as server, ThreadPoolExecutor(2) as pool:
        patient = [trainer_at(server, "http", PATIENT).service for _ in range(2)]
        hurried = trainer_at(server, "http").service
        with queue.shut():
            answers = [pool.submit(patient[0].compute_logprobs, *ROW)]
            queue.wait_for(at_work=1, waiting=0)
            answers.append(pool.submit(patient[1].compute_logprobs, *ROW))
            queue.wait_for(at_work=1, waiting=1)
            with pytest.raises(ServiceBusyError, match="max_waiting"):
                hurried.compute_logprobs(*ROW)
        results = [answer.result(20) for answer in answers]
        assert hurried.compute_logprobs(*ROW) == results[0] == results[1]


def test_a_service_of_a_wrong_model_path_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelLoadError, match="nothing-there"),
        training_server(["http"], {"policy": str(tmp_path / "nothing-there")}),
    ):
        pass

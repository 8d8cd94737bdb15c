"""Our trainers learn through both training protocols as with the local service, and after kills."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("fastapi")
pytest.importorskip("tinker")

from nip_astra import errors
from nip_astra.language_models.services import http_training, tinker_training
from nip_astra.language_models.services.http_training import ROUTE, TrainingConnection
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.resume_check import read_run_contents
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.run import resume_experiment, run_experiment
from nip_astra.serve import training
from nip_astra.serve.app import open_training
from nip_astra.serve.local_service import LocalService
from nip_astra.serve.requests import ApiError
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol
from nip_astra.serve.tinker import host, routes
from nip_astra.serve.tinker.routes import Promises
from nip_astra.serve.training import Operation, WorkQueue
from tests.kit.experiments import task_trainer
from tests.kit.recording import record_calls
from tests.kit.resuming import short_experiment
from tests.kit.serving import wait_until
from tests.serve.dying import DEATHS, dying_server
from tests.serve.running import POLICY, TrainingServer, training_server

PROTOCOLS = ["http", "tinker"]
SECTION = "remote_api_grpo.train_service"
SHORT = ("training.num_episodes_per_experience=4", "training.lr=1e-3")
LORA = "task.policy.language_model.lora.rank=4"
ADAPTED = (LORA, "task.policy.language_model.lora.alpha=32", "task.policy.min_new_tokens=0")
ONE = torch.ones(1, 1, dtype=torch.bool)
ROW = torch.tensor([[3]]), ONE, torch.tensor([[4]]), ONE
"""A context and a continuation of one token each."""


@pytest.fixture(scope="module")
def server() -> Iterator[TrainingServer]:
    with training_server(PROTOCOLS, max_training_models=64) as running:
        yield running


def plain_trainer(backend: str, url: str, *overrides: str, name: str = "remote_api_grpo") -> Any:
    """A trainer of all weights; the backend "local" needs no service."""
    values = {"base_url": url, "model": "policy", "retry_timeout_seconds": 0.5}
    given = {"backend": backend} | (values if backend != "local" else {})
    options = [f"{name}.train_service.{key}={value}" for key, value in given.items()]
    return task_trainer(name, *SHORT, *options, *overrides)


def trainer_at(server: TrainingServer, backend: str, *overrides: str) -> Any:
    """A trainer of an adapter, as both protocols have it."""
    return plain_trainer(backend, server.url, *ADAPTED, *overrides)


def samples_of(trainer: Any) -> Any:
    with torch.no_grad():
        return trainer.collect(trainer.state.iteration).samples


def learn(trainer: Any, samples: list[Any], num_steps: int = 3) -> list[float]:
    """The losses of steps on given samples."""
    losses = []
    for _ in range(num_steps):
        trainer.state.begin(samples, {})
        trainer._update(trainer.state.iteration)
        losses.append(trainer.state.end()["loss"])
    return losses


def iterate(trainer: Any, num_iterations: int = 2) -> list[float]:
    """The losses of iterations."""
    return [learn(trainer, samples_of(trainer), 1)[0] for _ in range(num_iterations)]


def scores(trainer: Any, samples: list[Any]) -> Any:
    """Log-probabilities of the samples under the trained weights."""
    batch = trainer.collate_fn(samples)
    rows = (batch[name] for name in ("context", "context_mask", "response", "response_mask"))
    return trainer.service.compute_logprobs(*rows)


def weights(trainer: Any, folder: Path) -> dict[str, torch.Tensor]:
    trainer.service.save_weights_for_sampler(folder)
    return load_file(folder / "model.safetensors")


def test_losses_and_weights_are_those_of_the_local_service(server: TrainingServer) -> None:
    trainers = {name: trainer_at(server, name) for name in ("local", *PROTOCOLS)}
    samples = samples_of(trainers["local"])
    before = scores(trainers["local"], samples)
    losses = {name: learn(trainer, samples) for name, trainer in trainers.items()}
    after = {name: scores(trainer, samples) for name, trainer in trainers.items()}
    assert (after["local"] - before).abs().max() > 0.01
    for name in PROTOCOLS:
        assert losses[name] == pytest.approx(losses["local"], rel=1e-5, abs=1e-5)
        torch.testing.assert_close(after[name], after["local"], atol=1e-5, rtol=0)


def test_http_gives_the_iterations_and_weights_of_the_local_service(
    server: TrainingServer, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    here = task_trainer("self_hosted_grpo", *SHORT)
    torch.manual_seed(0)
    there = plain_trainer("http", server.url, name="self_hosted_grpo")
    before = weights(here, tmp_path / "before")
    assert iterate(here) == pytest.approx(iterate(there), abs=1e-6)
    mine, theirs = weights(here, tmp_path / "here"), weights(there, tmp_path / "there")
    assert any(not torch.equal(mine[key], before[key]) for key in mine)
    torch.testing.assert_close(theirs, mine, atol=1e-6, rtol=0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_state_continues_to_the_bit(
    server: TrainingServer, protocol: str, tmp_path: Path
) -> None:
    first, again = (trainer_at(server, protocol) for _ in range(2))
    iterate(first, 1)
    first.service.save_state(tmp_path)
    samples = samples_of(first)
    expected = learn(first, samples)
    again.service.load_state(tmp_path)
    again.state.iteration = 1
    assert learn(again, samples) == expected
    if protocol == "http":
        local = trainer_at(server, "local")
        local.service.load_state(tmp_path)
        local.state.iteration = 1
        assert learn(local, samples) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("protocol", ["http", pytest.param("tinker", marks=pytest.mark.slow)])
def test_a_checkpoint_continues_at_the_next_server(protocol: str, tmp_path: Path) -> None:
    with training_server([protocol]) as server:
        trainer = trainer_at(server, protocol)
        iterate(trainer, 1)
        trainer.service.save_state(tmp_path)
        samples = samples_of(trainer)
        expected = learn(trainer, samples)
        server.stop()
        with pytest.raises(errors.ServiceUnreachableError, match=r"nip-astra resume"):
            learn(trainer, samples)
        server.start()
        if protocol == "http":
            # The new service does not know the old service's models.
            with pytest.raises(errors.ServiceModelError, match="nip-astra resume RUN"):
                learn(trainer, samples)
        again = trainer_at(server, protocol)
        again.service.load_state(tmp_path)
        again.state.iteration = 1
        assert learn(again, samples) == expected


def test_a_repeated_request_repeats_no_step(server: TrainingServer) -> None:
    trainer = trainer_at(server, "http")
    paths: list[str] = []
    open_client = trainer.service.connection._clients.get

    async def request_twice(method: str, path: str, **sent: Any) -> Any:
        paths.append(path)
        await open_client().request(method, path, **sent)
        return await open_client().request(method, path, **sent)

    plain = iterate(trainer_at(server, "http"), 2)
    twice = SimpleNamespace(request=request_twice)
    trainer.service.connection._clients = SimpleNamespace(get=lambda: twice)
    assert iterate(trainer, 2) == plain
    assert len(paths) > 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_poisoned_request_changes_no_model(server: TrainingServer, protocol: str) -> None:
    trainer, plain = (trainer_at(server, protocol) for _ in range(2))
    samples = samples_of(plain)
    context, wide = ROW[:2], torch.ones(1, 9999, dtype=torch.bool)
    with pytest.raises(errors.ServiceRequestError, match="9999"):
        trainer.service.logprobs(*context, torch.tensor([[9999]]), ONE)
    with pytest.raises(errors.ServiceRequestError, match="window"):
        trainer.service.logprobs(*context, wide.long(), wide)
    if protocol == "tinker":
        with pytest.raises(errors.ServiceRequestError, match="weights"):
            trainer.service.forward_backward(
                [trainer.collate_fn(samples)],
                lambda _: LossOutput(trainer.service.logprobs(*ROW).sum() * math.nan, {}),
            )
    else:
        sample = {"contexts": [[3]], "rows_per_context": 1, "uniforms": torch.rand(1, 1)}
        hot = {"max_new_tokens": 1, "temperature": math.nan}
        for kind, arguments, fact in (
            ("explode", {}, "'explode'"),
            ("sample", {"contexts": 3}, "sample"),
            ("logprobs", {"rows": (*ROW[:2], torch.tensor([[4, 5]]), ONE)}, "shapes"),
            ("sample", sample | {"options": hot}, "temperature"),
            ("sample", sample | {"contexts": [[]], "options": {"max_new_tokens": 1}}, "no tokens"),
            ("optim_step", {"lr": math.nan, "max_grad_norm": None}, "nan"),
        ):
            with pytest.raises(errors.ServiceRequestError, match=fact):
                trainer.service._operate(kind, **arguments)
    assert learn(trainer, samples) == pytest.approx(learn(plain, samples), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_two_clients_on_one_model_are_refused(server: TrainingServer, protocol: str) -> None:
    trainer, other = (trainer_at(server, protocol) for _ in range(2))
    iterate(trainer, 1)
    mine, theirs = (
        one.service if protocol == "http" else one.service._training for one in (trainer, other)
    )
    theirs.model_id = mine.model_id
    with pytest.raises(errors.ServiceConflictError, match="one client at a time"):
        other.service.compute_logprobs(*ROW)
    assert len(iterate(trainer, 1)) == 1


@pytest.mark.parametrize(
    ("protocol", "override", "error", "fact"),
    [
        ("http", f"{SECTION}.model=nowhere", errors.ServiceModelError, "'nowhere'.*It has: policy"),
        ("tinker", f"{SECTION}.model=nowhere", errors.ServiceModelError, "nowhere"),
        ("tinker", f"{LORA[:-6]}alpha=8", errors.ConfigurationError, r"lora\.alpha 8"),
        ("tinker", "training.optimizer=sgd", errors.ConfigurationError, "'sgd'.*adamw"),
        ("tinker", "task.policy.min_new_tokens=1", errors.ConfigurationError, "min_new_tokens"),
    ],
)
def test_models_and_options_that_a_service_cannot_train_are_refused(
    server: TrainingServer, protocol: str, override: str, error: type[Exception], fact: str
) -> None:
    with pytest.raises(error, match=fact):
        iterate(trainer_at(server, protocol, override), 1)


def test_other_weights_under_the_name_are_refused() -> None:
    with (
        training_server(["http"], {"policy": str(POLICY.parent / "teacher")}) as server,
        pytest.raises(errors.ServiceRequestError, match="weights"),
    ):
        trainer_at(server, "http")


def test_losses_that_services_cannot_differentiate_are_refused(server: TrainingServer) -> None:
    trainer = trainer_at(server, "http")
    batch = trainer.collate_fn(samples_of(trainer))
    for loss, fact in (
        (lambda _: LossOutput(trainer.policy.logprobs(*ROW).sum(), {}), "differentiates the model"),
        (lambda _: LossOutput(torch.zeros(()), {}), "depends on no log-probability"),
    ):
        with pytest.raises(errors.ServiceRequestError, match=fact):
            trainer.service.forward_backward([batch], loss)


# ---- number of models that a service holds


@pytest.mark.parametrize(
    ("protocol", "error", "fact"),
    [
        ("http", errors.ServiceModelError, "nip-astra resume RUN"),
        ("tinker", errors.ServiceError, "closed"),
    ],
)
def test_a_closed_model_makes_room(protocol: str, error: type[Exception], fact: str) -> None:
    with training_server([protocol], max_training_models=1) as server:  # type: ignore[list-item]
        first = trainer_at(server, protocol)
        with pytest.raises(errors.ServiceBusyError, match="max_training_models"):
            trainer_at(server, protocol)
        iterate(first, 1)
        first.service.close()
        # A dropped service is also closed.
        second = trainer_at(server, protocol)
        with pytest.raises(error, match=fact):
            iterate(first, 1)
        del second
        gc.collect()
        assert len(iterate(trainer_at(server, protocol), 1)) == 1


def test_a_closed_run_leaves_no_weights_at_tinker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_training, "SECONDS_TO_FINISH", 0.3)
    with training_server(["tinker"]) as server:
        first, second = (trainer_at(server, "tinker") for _ in range(2))
        iterate(first, 1)
        saved = Path(server.settings["state_dir"]) / "tinker"
        assert any(saved.glob("*/sampler_weights/*"))
        first.service.close()
        assert not any(saved.glob("*/sampler_weights/*"))
        server.stop()
        started = time.monotonic()
        second.service.close()
        assert time.monotonic() - started < 1.0
        server.start()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_service_of_one_model_loads_its_state(protocol: TrainingProtocol, tmp_path: Path) -> None:
    with training_server([protocol], max_training_models=1) as server:
        trainer = trainer_at(server, protocol)
        samples = samples_of(trainer)
        trainer.service.save_state(tmp_path)
        expected = learn(trainer, samples)
        trainer.service.load_state(tmp_path)
        trainer.state.iteration = 0
        assert learn(trainer, samples) == expected


def test_checkpoints_of_tinker_are_held_by_one_service_and_cleared_at_its_start(
    tmp_path: Path,
) -> None:
    with training_server(["tinker"]) as server:
        trainer = trainer_at(server, "tinker")
        iterate(trainer, 1)
        trainer.service.save_state(tmp_path)
        with (
            pytest.raises(errors.ConfigurationError, match="--state-dir"),
            open_training(server.models, ServiceSettings(**server.settings), ["tinker"]),
        ):
            pass
        (run,) = Path(server.settings["state_dir"]).glob("tinker/*/")
        (run / "unfinished-of-a-killed-service").mkdir()
        assert len(list(run.glob("sampler_weights/*"))) == 1
        # It leaves what a killed service leaves.
        server.stop()
        server.start()
        assert {path.name for path in run.iterdir()} == {"run.json", "weights", "sampler_weights"}
        assert not any(run.glob("sampler_weights/*"))
        trainer_at(server, "tinker").service.load_state(tmp_path)


def test_only_the_last_result_of_a_client_is_kept() -> None:
    work = WorkQueue(max_waiting=8)
    work.open_lane("model")
    for number in range(1, 4):
        operation = Operation(lambda: "weights", str(number))
        work.submit_ordered("model", number, operation).future.result()
    assert [work.find("model", number) is None for number in range(1, 4)] == [True, True, False]
    work.close()


def test_operations_of_one_group_run_together_and_others_apart() -> None:
    work = WorkQueue(max_waiting=8)
    batches: list[list[str]] = []
    can_start = threading.Event()

    def run_together(arguments: Sequence[str]) -> list[str]:
        batches.append(list(arguments))
        return list(arguments)

    blocking = work.submit(Operation(can_start.wait))
    operations = [
        Operation(lambda: None, group=name[0], argument=name, run_together=run_together)
        for name in ("a1", "b1", "a2")
    ]
    for operation in operations:
        work.submit(operation)
    can_start.set()
    assert [operation.future.result() for operation in operations] == ["a1", "b1", "a2"]
    assert blocking.future.result()
    assert batches == [["a1", "a2"], ["b1"]]
    work.close()


def test_requests_that_are_open_at_the_end_are_refused(
    queue: StoppedQueue, caplog: pytest.LogCaptureFixture
) -> None:
    with training_server(["http"]) as server, ThreadPoolExecutor(2) as pool, queue.shut():
        body = {"base_model": "policy", "seed": 0, "optimizer": "adamw", "weight_decay": 0.0}
        headers = {http_training.KEY_HEADER: "key"}
        given: Any = {"json": body, "headers": headers, "timeout": 20}
        answer = pool.submit(httpx.post, f"{server.url}{ROUTE}", **given)
        wait_until(lambda: queue.at_work)
        stopped = pool.submit(server.stop)
        refused = answer.result()
        queue.is_open.set()
        stopped.result()
        server.start()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_silent_client_makes_room(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = record_calls(monkeypatch, host.TinkerHost, "open_session")
    with training_server([protocol], max_training_models=1) as server:
        silent = trainer_at(server, protocol)
        if protocol == "http":
            name = silent.service.model_id
            assert httpx.get(f"{server.url}{ROUTE}/{name}").json()["id"] == name
        with pytest.raises(errors.ServiceBusyError):
            trainer_at(server, protocol)
        for session in sessions:
            session.result.seen_at -= 2 * training.SECONDS_SILENT
        monkeypatch.setattr(training, "SECONDS_SILENT", 0.0)
        other = trainer_at(server, protocol)
        with pytest.raises(errors.ServiceError):
            iterate(silent, 1)
        assert len(iterate(other, 1)) == 1


def test_a_client_without_reports_keeps_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_training, "_report_alive", lambda *_: None)
    monkeypatch.setattr(training, "SECONDS_SILENT", 0.0)
    with training_server(["http"], max_training_models=1) as server:
        held = trainer_at(server, "http")
        with pytest.raises(errors.ServiceBusyError):
            trainer_at(server, "http")
        iterate(held, 1)


def test_clients_report_until_closed(
    server: TrainingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: SimpleQueue[str] = SimpleQueue()
    notify = TrainingConnection.notify

    def noted(connection: TrainingConnection, method: str, path: str) -> None:
        notify(connection, method, path)
        sent.put(method)

    monkeypatch.setattr(http_training, "SECONDS_BETWEEN_REPORTS", 0.01)
    monkeypatch.setattr(TrainingConnection, "notify", noted)
    service = trainer_at(server, "http").service
    assert [sent.get(timeout=10) for _ in range(2)] == ["GET", "GET"]
    service.close()
    assert "DELETE" in iter(lambda: sent.get(timeout=10), "")


# ---- addresses and tokens


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_address_that_refuses_is_reported_when_patience_ends(protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    started = time.monotonic()
    with pytest.raises(errors.ServiceUnreachableError, match=address):
        plain_trainer(protocol, f"http://{address}", *ADAPTED)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_token_and_an_address_are_needed(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "tml-secret")
    variable = f"{SECTION}.token_variable"
    with training_server([protocol], token_variable="SERVICE_TOKEN") as server:
        with pytest.raises(errors.ServiceError, match="token"):
            trainer_at(server, protocol)
        assert iterate(trainer_at(server, protocol, f"{variable}=SERVICE_TOKEN"), 1)
        with pytest.raises(errors.ConfigurationError, match="NOT_THERE"):
            trainer_at(server, protocol, f"{variable}=NOT_THERE")
    if protocol == "http":
        with pytest.raises(errors.ConfigurationError, match="needs base_url"):
            task_trainer("remote_api_grpo", f"{SECTION}.backend=http")
        return
    # The SDK would send no such key.
    monkeypatch.setenv("SERVICE_TOKEN", "secret")
    with (
        pytest.raises(errors.ConfigurationError, match=r"SERVICE_TOKEN.*tml-"),
        training_server([protocol], token_variable="SERVICE_TOKEN"),
    ):
        pass


@pytest.mark.slow
def test_the_command_serves_in_its_own_process() -> None:
    with LocalService({"policy": str(POLICY)}, protocols=["http"], num_threads=1) as service:
        assert httpx.get(f"{service.base_url}{ROUTE}").json() == {"models": ["policy"]}
        service._process.kill()
        while service.is_alive:
            time.sleep(0.01)


PATIENT = f"{SECTION}.retry_timeout_seconds=20"
SETTINGS: dict[str, Any] = {"progress": False, "checkpoint_period": 1}


def run_of(protocol: TrainingProtocol, port: int, folder: Path) -> ResolvedExperiment:
    service = {
        "base_url": f"http://127.0.0.1:{port}",
        "model": "policy",
        "retry_timeout_seconds": 1,
    }
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
    folder = tmp_path_factory.mktemp("undisturbed")
    with training_server([request.param]) as server:
        resolved = run_of(request.param, server.port, folder)
        run_experiment(resolved, runs_dir=str(folder), run_id="run", **SETTINGS)
    return request.param, read_run_contents(folder / "run")


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
        with pytest.raises(
            errors.ServiceUnreachableError, match=r"does not answer.*nip-astra resume"
        ):
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
    results = read_run_contents(tmp_path / "run")
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


def test_results_of_tinker_are_kept_until_they_were_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def statuses() -> list[int]:
        promises = Promises()
        for name in "abc":
            operation = Operation(lambda: None)
            operation.future.set_result(b"result")
            promises.add(name, operation, None)
            assert (await promises.answer("a")).body == b"result"
        monkeypatch.setattr(routes, "SECONDS_DELIVERED", -1.0)
        promises.add("c", operation, None)
        return [promises.knows(name) for name in "abc"]

    assert asyncio.run(statuses()) == [False, True, True]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> StoppedQueue:
    return StoppedQueue(monkeypatch)


class StoppedQueue:
    """Lets servers accept work, but do none while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.has_refused = threading.Event(), threading.Event()
        self.at_work: list[WorkQueue] = []
        do, check = WorkQueue._execute, WorkQueue._check_room

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

        monkeypatch.setattr(WorkQueue, "_execute", do_where_open)
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


def test_an_operation_that_takes_too_long_is_reported(
    server: TrainingServer, queue: StoppedQueue
) -> None:
    service = trainer_at(server, "http", PATIENT).service
    connection = service.connection
    connection.options = connection.options.model_copy(update={"operation_timeout": 0.1})
    with queue.shut(), pytest.raises(errors.ServiceUnreachableError, match="operation_timeout"):
        service.compute_logprobs(*ROW)


@pytest.mark.parametrize(
    # The SDK retries after a second or more.
    "protocol",
    ["http", pytest.param("tinker", marks=pytest.mark.slow)],
)
def test_a_full_queue_is_waited_for(queue: StoppedQueue, protocol: TrainingProtocol) -> None:
    with training_server([protocol], max_waiting=1) as server, ThreadPoolExecutor(3) as pool:
        services = [trainer_at(server, protocol, PATIENT).service for _ in range(3)]
        hurried = trainer_at(server, protocol).service
        with queue.shut():
            # One request is at work, one waits, and one is refused.
            answers = [pool.submit(one.compute_logprobs, *ROW) for one in services]
            assert queue.has_refused.wait(10)
            # No place is left for a request that would then wait until the queue is open.
            wait_until(lambda: bool(queue.at_work) and queue.at_work[0].num_waiting >= 1, 20)
            if protocol == "http":
                with pytest.raises(errors.ServiceBusyError, match="max_waiting"):
                    hurried.compute_logprobs(*ROW)
        first, second, third = (answer.result(20) for answer in answers)
        assert first == second == third == hurried.compute_logprobs(*ROW) < 0

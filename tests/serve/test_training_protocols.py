"""Our trainers learn through both training protocols, exactly as with the local service."""

from __future__ import annotations

import gc
import math
import socket
import time
from collections.abc import Iterator
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

from nip_astra.errors import (
    ConfigurationError,
    ServiceBusyError,
    ServiceConflictError,
    ServiceError,
    ServiceModelError,
    ServiceRequestError,
    ServiceUnreachableError,
)
from nip_astra.language_models.services import http_training, tinker_training
from nip_astra.language_models.services.http_training import ROUTE, TrainingConnection
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.serve import training
from nip_astra.serve.local_service import LocalService
from nip_astra.serve.tinker import host
from tests.kit.experiments import task_trainer
from tests.kit.recording import record_calls
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
    options = [f"{name}.train_service.backend={backend}"]
    if backend != "local":
        values = {"base_url": url, "model": "policy", "patience_seconds": 0.5}
        options += [f"{name}.train_service.{key}={value}" for key, value in values.items()]
    return task_trainer(name, *SHORT, *options, *overrides)


def trainer_at(server: TrainingServer, backend: str, *overrides: str) -> Any:
    """A trainer of an adapter, as both protocols have it."""
    return plain_trainer(backend, server.url, *ADAPTED, *overrides)


def samples_of(trainer: Any) -> list[Any]:
    with torch.no_grad():
        samples: list[Any] = trainer.collect(trainer.state.iteration).samples
    return samples


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


def scores(trainer: Any, samples: list[Any]) -> torch.Tensor:
    """Log-probabilities of the samples under the trained weights."""
    batch = trainer.collate_fn(samples)
    rows = (batch[name] for name in ("context", "context_mask", "response", "response_mask"))
    logprobs: torch.Tensor = trainer.service.compute_logprobs(*rows)
    return logprobs


def weights(trainer: Any, folder: Path) -> dict[str, torch.Tensor]:
    trainer.service.save_weights_for_sampler(folder)
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


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


@pytest.mark.parametrize(
    ("name", "options"), [("remote_api_grpo", ()), ("self_hosted_grpo", (LORA,))]
)
def test_http_gives_the_iterations_and_weights_of_the_local_service(
    server: TrainingServer, options: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    here = task_trainer(name, *SHORT, *options)
    torch.manual_seed(0)
    there = plain_trainer("http", server.url, *options, name=name)
    before = weights(here, tmp_path / "before")
    assert iterate(here) == pytest.approx(iterate(there), abs=1e-6)
    mine, theirs = weights(here, tmp_path / "here"), weights(there, tmp_path / "there")
    assert any(not torch.equal(mine[key], before[key]) for key in mine)
    for key, tensor in mine.items():
        torch.testing.assert_close(theirs[key], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_saved_state_continues_to_the_bit(
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
def test_a_dead_server_is_reported_and_a_checkpoint_continues_at_the_next(
    protocol: str, tmp_path: Path
) -> None:
    with training_server([protocol]) as server:
        trainer = trainer_at(server, protocol)
        iterate(trainer, 1)
        trainer.service.save_state(tmp_path)
        samples = samples_of(trainer)
        expected = learn(trainer, samples)
        server.stop()
        with pytest.raises(ServiceUnreachableError, match=r"nip-astra resume"):
            learn(trainer, samples)
        server.start()
        if protocol == "http":
            # The new service does not know the old service's models.
            with pytest.raises(ServiceModelError, match="nip-astra resume RUN"):
                learn(trainer, samples)
        again = trainer_at(server, protocol)
        again.service.load_state(tmp_path)
        again.state.iteration = 1
        assert learn(again, samples) == expected


def test_a_repeated_request_repeats_no_step(server: TrainingServer) -> None:
    trainer = trainer_at(server, "http")
    paths: list[str] = []
    open_client = trainer.service.connection._open

    async def request_twice(method: str, path: str, **sent: Any) -> Any:
        paths.append(path)
        await open_client().request(method, path, **sent)
        return await open_client().request(method, path, **sent)

    plain = iterate(trainer_at(server, "http"), 2)
    trainer.service.connection._open = lambda: SimpleNamespace(request=request_twice)
    assert iterate(trainer, 2) == plain
    assert len(paths) > 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_poisoned_request_leaves_the_model_as_it_was(
    server: TrainingServer, protocol: str
) -> None:
    trainer, plain = (trainer_at(server, protocol) for _ in range(2))
    samples = samples_of(plain)
    context, wide = ROW[:2], torch.ones(1, 9999, dtype=torch.bool)
    with pytest.raises(ServiceRequestError, match="9999"):
        trainer.service.logprobs(*context, torch.tensor([[9999]]), ONE)
    with pytest.raises(ServiceRequestError, match="window"):
        trainer.service.logprobs(*context, wide.long(), wide)
    if protocol == "tinker":
        with pytest.raises(ServiceRequestError, match="weights"):
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
            with pytest.raises(ServiceRequestError, match=fact):
                trainer.service._do(kind, **arguments)
    assert learn(trainer, samples) == pytest.approx(learn(plain, samples), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_two_clients_on_one_model_are_refused(server: TrainingServer, protocol: str) -> None:
    trainer, other = (trainer_at(server, protocol) for _ in range(2))
    iterate(trainer, 1)
    mine, theirs = (
        one.service if protocol == "http" else one.service._training for one in (trainer, other)
    )
    theirs.model_id = mine.model_id
    with pytest.raises(ServiceConflictError, match="one client at a time"):
        other.service.compute_logprobs(*ROW)
    assert len(iterate(trainer, 1)) == 1


@pytest.mark.parametrize(
    ("protocol", "override", "error", "fact"),
    [
        ("http", f"{SECTION}.model=nowhere", ServiceModelError, "'nowhere'.*It has: policy"),
        ("tinker", f"{SECTION}.model=nowhere", ServiceModelError, "nowhere"),
        ("tinker", f"{LORA[:-6]}alpha=8", ConfigurationError, r"lora\.alpha 8"),
        ("tinker", "training.optimizer=sgd", ConfigurationError, "'sgd'.*adamw"),
        ("tinker", "task.policy.min_new_tokens=1", ConfigurationError, "min_new_tokens"),
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
        pytest.raises(ServiceRequestError, match="weights"),
    ):
        trainer_at(server, "http")


def test_losses_that_services_cannot_differentiate_are_refused(server: TrainingServer) -> None:
    trainer = trainer_at(server, "http")
    batch = trainer.collate_fn(samples_of(trainer))
    for loss, fact in (
        (lambda _: LossOutput(trainer.policy.logprobs(*ROW).sum(), {}), "differentiates the model"),
        (lambda _: LossOutput(torch.zeros(()), {}), "depends on no log-probability"),
    ):
        with pytest.raises(ServiceRequestError, match=fact):
            trainer.service.forward_backward([batch], loss)


# ---- number of models that a service holds


@pytest.mark.parametrize(
    ("protocol", "error", "fact"),
    [("http", ServiceModelError, "nip-astra resume RUN"), ("tinker", ServiceError, "closed")],
)
def test_a_closed_model_makes_room_for_another(
    protocol: str, error: type[Exception], fact: str
) -> None:
    with training_server([protocol], max_training_models=1) as server:  # type: ignore[list-item]
        first = trainer_at(server, protocol)
        with pytest.raises(ServiceBusyError, match="max_training_models"):
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


def test_a_closed_run_leaves_no_weights_at_tinker_and_waits_for_no_dead_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_a_silent_client_makes_room_for_another(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = record_calls(monkeypatch, host.TinkerHost, "open_session")
    with training_server([protocol], max_training_models=1) as server:
        silent = trainer_at(server, protocol)
        if protocol == "http":
            url = f"{server.url}{ROUTE}/{silent.service.model_id}"
            assert httpx.get(url).json()["id"] == silent.service.model_id
        with pytest.raises(ServiceBusyError):
            trainer_at(server, protocol)
        for session in sessions:
            session.result.seen_at -= 2 * training.SECONDS_SILENT
        monkeypatch.setattr(training, "SECONDS_SILENT", 0.0)
        other = trainer_at(server, protocol)
        with pytest.raises(ServiceError):
            iterate(silent, 1)
        assert len(iterate(other, 1)) == 1


def test_a_client_that_never_reported_keeps_its_model_until_it_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_training, "_report", lambda *_: None)
    monkeypatch.setattr(training, "SECONDS_SILENT", 0.0)
    with training_server(["http"], max_training_models=1) as server:
        held = trainer_at(server, "http")
        with pytest.raises(ServiceBusyError):
            trainer_at(server, "http")
        iterate(held, 1)


def test_a_client_reports_until_it_closes(
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
        port = taken.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(ServiceUnreachableError, match=f"127.0.0.1:{port}"):
        plain_trainer(protocol, f"http://127.0.0.1:{port}", *ADAPTED)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_token_and_an_address_are_needed(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "tml-secret")
    variable = f"{SECTION}.token_variable"
    with training_server([protocol], token_variable="SERVICE_TOKEN") as server:
        with pytest.raises(ServiceError, match="token"):
            trainer_at(server, protocol)
        assert iterate(trainer_at(server, protocol, f"{variable}=SERVICE_TOKEN"), 1)
        with pytest.raises(ConfigurationError, match="NOT_THERE"):
            trainer_at(server, protocol, f"{variable}=NOT_THERE")
    if protocol == "http":
        with pytest.raises(ConfigurationError, match="needs base_url"):
            task_trainer("remote_api_grpo", f"{SECTION}.backend=http")


@pytest.mark.slow
def test_the_command_serves_in_its_own_process() -> None:
    with LocalService({"policy": str(POLICY)}, protocols=["http"], num_threads=1) as service:
        assert httpx.get(f"{service.base_url}{ROUTE}").json() == {"models": ["policy"]}
        service._process.kill()
        while service.is_alive:
            time.sleep(0.01)

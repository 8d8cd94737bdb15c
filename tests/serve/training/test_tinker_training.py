"""Our trainers learn through Tinker's protocol, with the numbers of the local service."""

from __future__ import annotations

import gc
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError

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
from nip_astra.language_models.services import tinker_training
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.serve import training
from nip_astra.serve.requests import Body
from nip_astra.serve.tinker import host
from nip_astra.serve.tinker.bodies import (
    PromptBody,
    SampleBody,
    SaveBody,
    SaveForSamplerBody,
    TtlBody,
)
from tests.kit.experiments import task_trainer
from tests.serve.training.running import Server, training_server
from tests.serve.training.test_http_training import SHORT, iterate

ADAPTED = (
    *SHORT,
    "task.policy.language_model.lora.rank=4",
    "task.policy.language_model.lora.alpha=32",
    "task.policy.min_new_tokens=0",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with training_server(["tinker", "http"], max_training_models=64) as running:
        yield running


def trainer_at(server: Server | Refusing, backend: str, *overrides: str) -> Any:
    section = "remote_api_grpo.train_service"
    options = [f"{section}.backend={backend}"]
    if backend != "local":
        options += [f"{section}.base_url={server.url}", f"{section}.model=policy"]
        options += [f"{section}.patience_seconds=0.5"]
    return task_trainer("remote_api_grpo", *ADAPTED, *options, *overrides)


def learn(trainer: Any, samples: list[Any]) -> list[float]:
    """The losses of steps on given samples."""
    losses = []
    for _ in range(3):
        trainer.state.begin(samples, {})
        trainer._update(trainer.state.iteration)
        losses.append(trainer.state.end()["loss"])
    return losses


def scores(trainer: Any, samples: list[Any]) -> torch.Tensor:
    """What the trained weights think of the samples."""
    batch = trainer.collate_fn(samples)
    rows = (batch[name] for name in ("context", "context_mask", "response", "response_mask"))
    found: torch.Tensor = trainer.service.compute_logprobs(*rows)
    return found


def test_losses_and_weights_are_those_of_the_local_service_and_of_ours(server: Server) -> None:
    trainers = {name: trainer_at(server, name) for name in ("local", "http", "tinker")}
    with torch.no_grad():
        samples = trainers["local"].collect(0).samples
    before = scores(trainers["local"], samples)
    losses = {name: learn(trainer, samples) for name, trainer in trainers.items()}
    after = {name: scores(trainer, samples) for name, trainer in trainers.items()}
    assert (after["local"] - before).abs().max() > 0.01
    for name in ("http", "tinker"):
        assert losses[name] == pytest.approx(losses["local"], rel=1e-5, abs=1e-5)
        torch.testing.assert_close(after[name], after["local"], atol=1e-5, rtol=0)


def test_a_checkpoint_names_the_state_of_the_service_and_goes_on(
    server: Server, tmp_path: Path
) -> None:
    first = trainer_at(server, "tinker")
    iterate(first, 1)
    first.service.save_state(tmp_path)
    with torch.no_grad():
        samples = first.collect(1).samples
    expected = learn(first, samples)
    again = trainer_at(server, "tinker")
    again.service.load_state(tmp_path)
    again.state.iteration = 1
    assert learn(again, samples) == expected


def test_what_the_protocol_cannot_honour_is_refused(server: Server) -> None:
    with pytest.raises(ConfigurationError, match=r"lora\.alpha 8"):
        trainer_at(server, "tinker", "task.policy.language_model.lora.alpha=8")
    with pytest.raises(ConfigurationError, match=r"'sgd'.*adamw"):
        trainer_at(server, "tinker", "training.optimizer=sgd")
    with pytest.raises(ConfigurationError, match="min_new_tokens"):
        iterate(trainer_at(server, "tinker", "task.policy.min_new_tokens=1"), 1)
    with pytest.raises(ServiceModelError, match="nowhere"):
        trainer_at(server, "tinker", "remote_api_grpo.train_service.model=nowhere")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        # Preparing so many samples would hold the event loop, and so late a date cannot be written.
        (SampleBody, "num_samples", 30_000_000),
        *((one, "ttl_seconds", 10**15) for one in (SaveBody, SaveForSamplerBody, TtlBody)),
        *((PromptBody, "chunks", [chunk]) for chunk in (3, "text", None, {"type": "image"})),
    ],
)
def test_a_value_without_a_use_is_refused_by_name(kind: type[Body], name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({name: value})
    assert name in [fault["loc"][0] for fault in caught.value.errors()]


def test_a_poisoned_request_leaves_the_model_and_the_client_as_they_were(server: Server) -> None:
    trainer, plain = trainer_at(server, "tinker"), trainer_at(server, "tinker")
    with torch.no_grad():
        samples = plain.collect(0).samples
    one = torch.ones(1, 1, dtype=torch.bool)
    rows = torch.tensor([[3]]), one
    with pytest.raises(ServiceRequestError, match="9999"):
        trainer.service.logprobs(*rows, torch.tensor([[9999]]), one)
    wide = torch.ones(1, 9999, dtype=torch.bool)
    with pytest.raises(ServiceRequestError, match="window"):
        trainer.service.logprobs(*rows, wide.long(), wide)

    def broken(batch: Any) -> Any:
        logprobs = trainer.service.logprobs(*rows, torch.tensor([[4]]), one)
        return LossOutput(logprobs.sum() * math.nan, {})

    with pytest.raises(ServiceRequestError, match="weights"):
        trainer.service.forward_backward([trainer.collate_fn(samples)], broken)
    assert learn(trainer, samples) == pytest.approx(learn(plain, samples), rel=1e-5, abs=1e-5)


def test_two_clients_on_one_model_are_told_apart(server: Server) -> None:
    trainer, other = trainer_at(server, "tinker"), trainer_at(server, "tinker")
    iterate(trainer, 1)
    one = torch.ones(1, 1, dtype=torch.bool)
    other.service._training.model_id = trainer.service._training.model_id
    with pytest.raises(ServiceConflictError, match="one client at a time"):
        other.service.compute_logprobs(torch.tensor([[3]]), one, torch.tensor([[4]]), one)
    assert len(iterate(trainer, 1)) == 1


def test_a_run_that_ends_holds_no_model_at_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_training, "SECONDS_TO_FINISH", 0.3)
    with training_server(["tinker"], max_training_models=1) as server:
        first = trainer_at(server, "tinker")
        with pytest.raises(ServiceBusyError, match="max_training_models"):
            trainer_at(server, "tinker")
        iterate(first, 1)
        weights = Path(server.settings["state_dir"]) / "tinker"
        assert any(weights.glob("*/sampler_weights/*"))
        first.service.close()
        assert not any(weights.glob("*/sampler_weights/*"))
        second = trainer_at(server, "tinker")
        with pytest.raises(ServiceError, match="closed"):
            iterate(first, 1)
        # One that is dropped is closed as well.
        del second
        gc.collect()
        third = trainer_at(server, "tinker")
        assert len(iterate(third, 1)) == 1
        server.stop()
        started = time.monotonic()
        third.service.close()
        assert time.monotonic() - started < 1.0
        server.start()


def test_a_client_that_is_silent_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[host.Session] = []
    open_session = host.TinkerHost.open_session

    def opened(*args: Any) -> host.Session:
        sessions.append(open_session(*args))
        return sessions[-1]

    monkeypatch.setattr(host.TinkerHost, "open_session", opened)
    with training_server(["tinker"], max_training_models=1) as server:
        silent = trainer_at(server, "tinker")
        with pytest.raises(ServiceBusyError):
            trainer_at(server, "tinker")
        for session in sessions:
            session.seen_at -= 2 * training.SECONDS_SILENT
        other = trainer_at(server, "tinker")
        with pytest.raises(ServiceError):
            iterate(silent, 1)
        assert len(iterate(other, 1)) == 1


@pytest.mark.slow
def test_a_server_that_dies_is_told_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    with training_server(["tinker"]) as server:
        trainer = trainer_at(server, "tinker")
        iterate(trainer, 1)
        trainer.service.save_state(tmp_path)
        with torch.no_grad():
            samples = trainer.collect(1).samples
        expected = learn(trainer, samples)
        server.stop()
        with pytest.raises(ServiceUnreachableError, match="nip-astra resume"):
            learn(trainer, samples)
        server.start()
        again = trainer_at(server, "tinker")
        again.service.load_state(tmp_path)
        again.state.iteration = 1
        assert learn(again, samples) == expected


@pytest.mark.parametrize("backend", ["http", "tinker"])
def test_an_address_that_refuses_is_reported_when_patience_ends(backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(ServiceUnreachableError, match=f"127.0.0.1:{port}"):
        trainer_at(Refusing(f"http://127.0.0.1:{port}"), backend)
    assert time.monotonic() - started < 5


class Refusing(NamedTuple):
    """Where nobody listens."""

    url: str

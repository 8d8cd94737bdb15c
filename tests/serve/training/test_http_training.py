"""A service of ours in another process trains as one in this process does, and says what fails."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import pytest
import torch

from nip_astra.errors import (
    ConfigurationError,
    ServiceBusyError,
    ServiceConflictError,
    ServiceError,
    ServiceModelError,
    ServiceRequestError,
    ServiceUnreachableError,
)
from nip_astra.language_models.services import http_training
from nip_astra.language_models.services.http_training import ROUTE, TrainingConnection
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.serve import training
from nip_astra.serve.local_service import LocalService
from tests.kit.experiments import task_trainer
from tests.serve.training.running import POLICY, Server, training_server

pytest.importorskip("fastapi")
SHORT = ("training.num_episodes_per_experience=4", "training.lr=1e-3")
LORA = "task.policy.language_model.lora.rank=4"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with training_server(["http"], max_training_models=64) as running:
        yield running


def distant(server: Server, *overrides: str, name: str = "remote_api_grpo") -> Any:
    section = f"{name}.train_service"
    options = [f"{section}.backend=http", f"{section}.base_url={server.url}"]
    options += [f"{section}.model=policy", f"{section}.patience_seconds=0.3"]
    return task_trainer(name, *SHORT, *options, *overrides)


def iterate(trainer: Any, num_iterations: int = 2) -> list[float]:
    """The losses of iterations."""
    losses = []
    for _ in range(num_iterations):
        with torch.no_grad():
            experience = trainer.collect(trainer.state.iteration)
        trainer.state.begin(experience.samples, {})
        trainer._update(trainer.state.iteration)
        losses.append(trainer.state.end()["loss"])
    return losses


def weights(trainer: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The policy as its service would hand it out."""
    from safetensors.torch import load_file

    trainer.service.save_weights_for_sampler(folder)
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


@pytest.mark.parametrize(
    ("name", "options"), [("remote_api_grpo", ()), ("self_hosted_grpo", (LORA,))]
)
def test_a_service_elsewhere_gives_the_losses_and_weights_of_one_here(
    server: Server, options: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    here = task_trainer(name, *SHORT, *options)
    torch.manual_seed(0)
    there = distant(server, *options, name=name)
    assert iterate(here) == pytest.approx(iterate(there), abs=1e-6)
    mine, theirs = weights(here, tmp_path / "here"), weights(there, tmp_path / "there")
    before = weights(task_trainer(name, *SHORT), tmp_path / "before")
    assert any(not torch.equal(mine[key], before[key]) for key in mine)
    for key, tensor in mine.items():
        torch.testing.assert_close(theirs[key], tensor, atol=1e-6, rtol=0)


def test_a_saved_state_goes_on_to_the_bit_and_is_that_of_a_local_service(
    server: Server, tmp_path: Path
) -> None:
    first = distant(server)
    iterate(first, 1)
    first.service.save_state(tmp_path / "state")
    expected = iterate(first, 1)
    again, here = distant(server), task_trainer("remote_api_grpo", *SHORT)
    for other in (again, here):
        other.service.load_state(tmp_path / "state")
        other.state.iteration = 1
    assert iterate(again, 1) == expected
    assert iterate(here, 1) == pytest.approx(expected, abs=1e-6)


def test_a_repeated_request_repeats_no_step(server: Server) -> None:
    trainer = distant(server)
    service = trainer.service
    asked: list[Any] = []
    open_client = service.connection._open

    class Twice:
        async def request(self, method: str, path: str, **sent: Any) -> Any:
            asked.append(path)
            await open_client().request(method, path, **sent)
            return await open_client().request(method, path, **sent)

    plain = iterate(distant(server), 2)
    service.connection._open = Twice
    assert iterate(trainer, 2) == plain
    assert len(asked) > 4


def test_a_wrong_model_path_is_told_with_what_there_is(server: Server) -> None:
    with pytest.raises(ServiceModelError, match=r"'nowhere'.*It has: policy"):
        distant(server, "remote_api_grpo.train_service.model=nowhere")


def test_other_weights_under_the_name_are_refused() -> None:
    with (
        training_server(["http"], {"policy": str(POLICY.parent / "teacher")}) as server,
        pytest.raises(ServiceRequestError, match="weights"),
    ):
        distant(server)


def test_a_poisoned_request_leaves_the_model_as_it_was(server: Server, tmp_path: Path) -> None:
    trainer = distant(server)
    before = weights(trainer, tmp_path / "before")
    one = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ServiceRequestError, match="9999"):
        trainer.service.logprobs(torch.tensor([[3]]), one, torch.tensor([[9999]]), one)
    with pytest.raises(ServiceRequestError, match="'explode'"):
        trainer.service._do("explode")
    with pytest.raises(ServiceRequestError, match="sample"):
        trainer.service._do("sample", contexts=3)
    with pytest.raises(ServiceRequestError, match="nan"):
        trainer.service.optim_step(lr=math.nan)
    options = {"max_new_tokens": 1, "temperature": math.nan}
    asked = {"contexts": [[3]], "rows_per_context": 1, "uniforms": torch.rand(1, 1)}
    with pytest.raises(ServiceRequestError, match="temperature"):
        trainer.service._do("sample", **asked, options=options)
    with pytest.raises(ServiceRequestError, match="no tokens"):
        trainer.service._do("sample", **asked | {"contexts": [[]]}, options={"max_new_tokens": 1})
    wide = torch.ones(1, 9999, dtype=torch.bool)
    with pytest.raises(ServiceRequestError, match="window"):
        trainer.service.logprobs(torch.tensor([[3]]), one, wide.long(), wide)
    after = weights(trainer, tmp_path / "after")
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert iterate(trainer) == iterate(distant(server))


def test_two_clients_on_one_model_are_told_apart(server: Server) -> None:
    trainer, other = distant(server), distant(server)
    iterate(trainer, 1)
    other.service.model_id = trainer.service.model_id
    with pytest.raises(ServiceConflictError, match="one client at a time"):
        iterate(other, 1)
    assert len(iterate(trainer, 1)) == 1


def test_losses_that_services_cannot_differentiate_are_refused(server: Server) -> None:
    trainer = distant(server)
    with torch.no_grad():
        batch = trainer.collate_fn(trainer.collect(0).samples)
    rows = batch["context"], batch["context_mask"], batch["response"], batch["response_mask"]

    def of_the_policy(_: Any) -> LossOutput:
        return LossOutput(trainer.policy.logprobs(*rows).sum(), {})

    with pytest.raises(ServiceRequestError, match="differentiates the model"):
        trainer.service.forward_backward([batch], of_the_policy)
    with pytest.raises(ServiceRequestError, match="depends on no log-probability"):
        trainer.service.forward_backward([batch], lambda _: LossOutput(torch.zeros(()), {}))


def test_too_many_models_are_told() -> None:
    with training_server(["http"], max_training_models=1) as server:
        trainer = distant(server)
        with pytest.raises(ServiceBusyError, match="max_training_models"):
            distant(server)
        trainer.service.close()
        with pytest.raises(ServiceModelError, match="nip-astra resume RUN"):
            iterate(trainer, 1)
        distant(server)


def test_a_client_reports_until_it_closes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: SimpleQueue[str] = SimpleQueue()
    notify = TrainingConnection.notify

    def noted(connection: TrainingConnection, method: str, path: str) -> None:
        notify(connection, method, path)
        sent.put(method)

    monkeypatch.setattr(http_training, "SECONDS_BETWEEN_REPORTS", 0.01)
    monkeypatch.setattr(TrainingConnection, "notify", noted)
    service = distant(server).service
    assert [sent.get(timeout=10) for _ in range(2)] == ["GET", "GET"]
    service.close()
    assert "DELETE" in iter(lambda: sent.get(timeout=10), "")


def test_a_client_that_reports_makes_room_soon_after_it_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with training_server(["http"], max_training_models=1) as server:
        living = distant(server).service
        url = f"{server.url}{ROUTE}/{living.model_id}"
        assert httpx.get(url).json()["id"] == living.model_id
        with pytest.raises(ServiceBusyError):
            distant(server)
        monkeypatch.setattr(training, "SECONDS_SILENT", 0.0)
        other = distant(server)
        with pytest.raises(ServiceModelError):
            living.optim_step(lr=0.1)
        iterate(other, 1)


def test_a_client_that_never_reported_keeps_its_model_until_it_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_training, "_report", lambda *_: None)
    monkeypatch.setattr(training, "SECONDS_SILENT", 0.0)
    with training_server(["http"], max_training_models=1) as server:
        held = distant(server)
        with pytest.raises(ServiceBusyError):
            distant(server)
        iterate(held, 1)


def test_a_dead_server_is_told_and_a_checkpoint_goes_on_at_the_next(tmp_path: Path) -> None:
    with training_server(["http"]) as server:
        trainer = distant(server)
        iterate(trainer, 1)
        trainer.service.save_state(tmp_path / "state")
        expected = iterate(trainer, 1)
        server.stop()
        with pytest.raises(ServiceUnreachableError, match=r"does not answer.*nip-astra resume"):
            iterate(trainer, 1)
        server.start()
        # The new one knows nothing of the old one's models.
        with pytest.raises(ServiceModelError, match="nip-astra resume RUN"):
            iterate(trainer, 1)
        again = distant(server)
        again.service.load_state(tmp_path / "state")
        again.state.iteration = 1
        assert iterate(again, 1) == expected


def test_a_token_is_asked_for_and_an_address_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "secret")
    section = "remote_api_grpo.train_service"
    with training_server(["http"], token_variable="SERVICE_TOKEN") as server:
        with pytest.raises(ServiceError, match="token"):
            distant(server)
        assert iterate(distant(server, f"{section}.token_variable=SERVICE_TOKEN"), 1)
        with pytest.raises(ConfigurationError, match="NOT_THERE"):
            distant(server, f"{section}.token_variable=NOT_THERE")
    with pytest.raises(ConfigurationError, match="needs base_url"):
        task_trainer("remote_api_grpo", f"{section}.backend=http")


@pytest.mark.slow
def test_the_command_serves_in_a_process_of_its_own() -> None:
    import httpx

    with LocalService({"policy": str(POLICY)}, protocols=["http"], num_threads=1) as service:
        assert httpx.get(f"{service.base_url}{ROUTE}").json() == {"models": ["policy"]}
        service._process.kill()
        while service.is_alive:
            time.sleep(0.01)

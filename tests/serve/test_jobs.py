"""Fine-tuning jobs, as the official client starts and follows them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.fine_tuning import FineTuningPlan
from nip_astra.language_models.services import chat
from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from nip_astra.language_models.services.fine_tuning import JobStatus as Status
from nip_astra.language_models.services.retrying import ResponseCache, RetryingChatModel
from nip_astra.serve import job_runner
from nip_astra.serve.job_runner import read_examples
from nip_astra.serve.job_store import JobStore
from nip_astra.serve.local_service import LocalService
from nip_astra.serve.settings import ServiceSettings
from nip_astra.utils.children import Child, is_running
from tests.kit.messages import says
from tests.kit.serving import wait_until
from tests.language_models.test_fine_tuning import fine_tune
from tests.serve.running import Running, running

PAIRS = [("how are you", "fine thanks"), ("the cat", "sat on a mat"), ("hello", "good day")]
FAST = {"n_epochs": 8, "batch_size": 1, "learning_rate_multiplier": 10.0}


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def supervised() -> bytes:
    rows = [{"messages": [turn("user", a), turn("assistant", b)]} for a, b in PAIRS]
    return "\n".join(map(json.dumps, rows)).encode()


def preferences() -> bytes:
    worse = {"non_preferred_output": [turn("assistant", "silly stupid cat")]}
    rows = [
        {"input": {"messages": [turn("user", a)]}, "preferred_output": [turn("assistant", b)]}
        for a, b in PAIRS
    ]
    return "\n".join(json.dumps(row | worse) for row in rows).encode()


def upload(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("data.jsonl", content), purpose="fine-tune").id


def submit(client: openai.OpenAI, content: bytes, method: str = "supervised", **more: Any) -> Any:
    given = hyperparameters(method, **more.pop("options", FAST))
    given |= {"model": "tiny", "training_file": upload(client, content), "seed": 1}
    return client.fine_tuning.jobs.create(**(given | more))


def finish(client: openai.OpenAI, job: Any) -> Any:
    over = ("succeeded", "failed", "cancelled")
    wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).status in over)
    return client.fine_tuning.jobs.retrieve(job.id)


def reply_of(client: openai.OpenAI, model: str, text: str) -> str:
    options: Any = {"messages": [turn("user", text)], "temperature": 0, "max_tokens": 8}
    return client.chat.completions.create(model=model, **options).choices[0].message.content or ""


@pytest.mark.usefixtures("in_process")
def test_a_supervised_job_teaches_a_served_model(service: Running, client: openai.OpenAI) -> None:
    job = submit(client, supervised(), suffix="taught", metadata={"run": "one"})
    assert (job.status in ("queued", "running"), job.fine_tuned_model) == (True, None)
    done = finish(client, job)
    model = done.fine_tuned_model
    assert done.status == "succeeded", done.error
    assert model == f"ft:tiny:taught:{job.id[-8:]}"
    assert (done.trained_tokens, done.hyperparameters.n_epochs) == (8 * (3 + 5 + 3), 8)
    replies, before = ([reply_of(client, name, a) for a, _ in PAIRS] for name in (model, "tiny"))
    assert replies == [answer for _, answer in PAIRS] != before

    events = list(client.fine_tuning.jobs.list_events(job.id, limit=7))
    steps = [event.data["step"] for event in reversed(events) if event.type == "metrics"]  # type: ignore[index]
    assert steps == list(range(1, 25))
    kept = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [checkpoint.step_number for checkpoint in kept] == [24, 21, 18]
    assert kept[0].fine_tuned_model_checkpoint == model
    jobs = [client.fine_tuning.jobs.list(metadata={"run": run}) for run in ("one", "two")]
    assert [[one.id for one in of_run] for of_run in jobs] == [[job.id], []]

    with pytest.raises(openai.BadRequestError, match="'tiny'"):
        client.models.delete("tiny")
    waiting = submit(client, supervised(), model=model)
    client.fine_tuning.jobs.pause(waiting.id)
    with pytest.raises(openai.ConflictError, match=waiting.id):
        client.models.delete(model)
    client.fine_tuning.jobs.cancel(waiting.id)
    assert client.models.delete(model).deleted
    assert not (service.store.job_folder(job.id) / "model").exists()
    with pytest.raises(openai.NotFoundError):
        reply_of(client, model, "the cat")
    assert reply_of(client, kept[1].fine_tuned_model_checkpoint, "the cat")
    service.runner._serve(service.store.job(job.id))
    assert model not in [served.id for served in client.models.list()]


def test_events_are_read_page_by_page(service: Running, client: openai.OpenAI) -> None:
    job = submit(client, supervised())
    client.fine_tuning.jobs.cancel(job.id)
    other = submit(client, supervised())
    client.fine_tuning.jobs.cancel(other.id)
    for step in range(25):
        service.store.add_event(job.id, f"step {step}", step=step + 10_000)
        service.store.add_event(other.id, f"step {step}", step=step + 10_000)
    pages = client.fine_tuning.jobs.list_events(job.id, limit=10)
    messages = [event.message for event in pages if event.message.startswith("step")]
    assert messages == [f"step {step}" for step in reversed(range(25))]
    assert len(pages.data) == 10
    foreign = client.fine_tuning.jobs.list_events(other.id, limit=1).data[0].id
    for cursor in (foreign, "ftevent-1e3", "ftevent-99999999999999999999", "nothing"):
        with pytest.raises(openai.BadRequestError, match="after"):
            client.fine_tuning.jobs.list_events(job.id, after=cursor)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_dpo_job_continues_a_fine_tuned_model(service: Running, client: openai.OpenAI) -> None:
    first = finish(client, submit(client, supervised(), options=FAST | {"n_epochs": 2}))
    files = {"model": first.fine_tuned_model, "validation_file": upload(client, preferences())}
    options = FAST | {"beta": 0.5, "n_epochs": 4, "nll_weight": 0}
    job = submit(client, preferences(), "dpo", options=options, **files)
    done = finish(client, job)
    assert done.status == "succeeded", done.error
    assert done.fine_tuned_model.startswith("ft:tiny::")
    assert done.method.dpo.hyperparameters.beta == 0.5
    metrics = client.fine_tuning.jobs.checkpoints.list(job.id).data[0].metrics
    assert metrics.train_loss is not None
    assert (metrics.train_loss < 0.3, metrics.full_valid_loss is None) == (True, False)
    assert reply_of(client, done.fine_tuned_model, "hello")


def test_a_job_with_a_key_is_started_once(client: openai.OpenAI) -> None:
    key = {"idempotency_key": "only once"}
    job, again = (submit(client, supervised(), metadata=key) for _ in range(2))
    assert job.id == again.id
    client.fine_tuning.jobs.cancel(job.id)


@pytest.mark.slow
def test_a_job_is_cancelled_paused_and_resumed(service: Running, client: openai.OpenAI) -> None:
    long = FAST | {"n_epochs": 900}
    job = submit(client, supervised(), options=long)
    behind = submit(client, supervised(), options=FAST | {"n_epochs": 1})
    assert client.fine_tuning.jobs.pause(behind.id).status == "paused"
    wait_until(lambda: len(service.store.events(job.id)) > 5)
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    pid = service.store.job(job.id).pid
    wait_until(lambda: not is_running(pid, service.store.job(job.id).pid_started))
    number = len(service.store.events(job.id))
    # The queue may have started it before the answer is written.
    assert client.fine_tuning.jobs.resume(job.id).status in ("queued", "running")
    wait_until(lambda: len(service.store.events(job.id)) > number + 5)
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    steps = [row["step"] for row in service.store.events(job.id) if row["step"] is not None]
    assert sorted(steps) == list(range(1, len(steps) + 1))
    assert client.fine_tuning.jobs.cancel(behind.id).status == "cancelled"
    for change in ("cancel", "pause", "resume"):
        with pytest.raises(openai.ConflictError, match="cannot become"):
            getattr(client.fine_tuning.jobs, change)(job.id)


@pytest.mark.slow
def test_a_killed_worker_goes_on(service: Running, client: openai.OpenAI, tmp_path: Path) -> None:
    job = submit(client, supervised(), options=FAST | {"n_epochs": 30})
    wait_until(lambda: len(service.store.events(job.id)) > 10)
    pid = service.store.job(job.id).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    done = finish(client, job)
    assert done.status == "succeeded", done.error
    events = service.store.events(job.id)
    steps = [row["step"] for row in events if row["step"] is not None]
    assert steps == list(range(90, 0, -1))
    messages = " ".join(row["message"] for row in events)
    assert says(messages, "SIGKILL", "continues after step")
    (tmp_path / "data").write_bytes(supervised())
    plan = FineTuningPlan(**service.store.job(job.id).plan)
    fine_tune(plan, read_examples(tmp_path / "data", "supervised"), tmp_path / "direct")
    folders = (tmp_path / "direct", service.store.job_folder(job.id) / "model")
    direct, by_job = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert direct.keys() == by_job.keys()
    assert all(torch.equal(direct[name], by_job[name]) for name in direct)


@pytest.mark.usefixtures("in_process")
def test_an_impossible_job_fails_with_its_reason(service: Running, client: openai.OpenAI) -> None:
    row = {"messages": [turn("user", "cat " * 200), turn("assistant", "mat")]}
    done = finish(client, submit(client, json.dumps(row).encode()))
    assert (done.status, done.fine_tuned_model) == ("failed", None)
    assert "the model's window holds 96" in done.error.message
    wait_until(lambda: any(row["level"] == "error" for row in service.store.events(done.id)))


def hyperparameters(method: str, **values: Any) -> dict[str, Any]:
    return {"method": {"type": method, method: {"hyperparameters": values}}}


@pytest.mark.parametrize(
    ("changes", "error", "fact"),
    [
        ({"model": "nothing"}, openai.NotFoundError, "model 'nothing'"),
        ({"training_file": "file-nothing"}, openai.NotFoundError, "file 'file-nothing'"),
        ({"training_file": "../../etc/passwd"}, openai.NotFoundError, r"'\.\./\.\./etc/passwd'"),
        ({"method": {"type": "dpo"}}, openai.BadRequestError, "line 1 .* dpo"),
        ({"method": {"type": "reinforcement"}}, openai.BadRequestError, "method.type"),
        (hyperparameters("supervised", beta=1), openai.BadRequestError, "beta"),
        (
            hyperparameters("supervised", trained_weights="all"),
            openai.BadRequestError,
            "max_full_parameters",
        ),
        ({"hyperparameters": {"n_epochs": 0}}, openai.BadRequestError, "n_epochs"),
        ({"integrations": [{"type": "wandb"}]}, openai.BadRequestError, "integrations"),
        ({"suffix": "../up"}, openai.BadRequestError, "suffix"),
    ],
)
def test_a_wrong_job_is_refused_at_once(
    client: openai.OpenAI, changes: dict[str, Any], error: type[Exception], fact: str
) -> None:
    given = {"model": "tiny", "training_file": upload(client, supervised()), **changes}
    with pytest.raises(error, match=fact):
        client.fine_tuning.jobs.create(**given)


def test_an_unknown_job_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'ftjob-none'"):
        client.fine_tuning.jobs.retrieve("ftjob-none")
    with pytest.raises(openai.BadRequestError, match="'ftjob-none'"):
        client.fine_tuning.jobs.list(after="ftjob-none")


def test_files_are_kept_listed_and_deleted(service: Running, client: openai.OpenAI) -> None:
    made = client.files.create(file=("mine.jsonl", b"{}\n"), purpose="fine-tune")
    assert (made.filename, made.bytes, made.status) == ("mine.jsonl", 3, "processed")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == b"{}\n"
    assert made.id in [one.id for one in client.files.list()]
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)
    assert not service.store.file_path(made.id).exists()


def test_a_limit_that_is_no_count_is_refused(client: openai.OpenAI) -> None:
    for limit in ("0", "10001", "x", "-1", "9" * 5000, "00000001099999"):
        for listed in (client.files, client.fine_tuning.jobs):
            with pytest.raises(openai.BadRequestError) as caught:
                listed.list(extra_query={"limit": limit})
            assert caught.value.param == "limit"


def test_a_path_is_no_file_name(service: Running, client: openai.OpenAI) -> None:
    def files() -> list[Path]:
        # The database may write files beside itself at any time.
        return sorted(f for f in service.store.folder.rglob("*") if "service.db" not in f.name)

    before = files()
    for name in ("../up", "a/b", "a\\b", "..", "a\u202eb", "x" * 256):
        with pytest.raises(openai.BadRequestError):
            client.files.create(file=(name, b"{}"), purpose="fine-tune")
    assert files() == before


def test_uploads_of_another_kind_are_json_errors(service: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"{}"), purpose="batch")
    url = f"{service.base_url}/files"
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    for reply in [
        httpx.post(url, content=b"--x\r\nbroken", headers=form),
        httpx.post(url, content=b"", headers={"Content-Type": "multipart/form-data"}),
        httpx.post(url, json={"file": "x"}),
        httpx.post(url, data={"purpose": "fine-tune"}),
        httpx.post(url, data={"purpose": "fine-tune", "expires_after": "1"}),
    ]:
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_models_of_up_to_a_size_are_trained_in_full(tiny_model_dir: Path) -> None:
    with (
        running({"tiny": str(tiny_model_dir)}, max_full_parameters=10**6) as service,
        openai.OpenAI(base_url=service.base_url, api_key="any") as client,
    ):
        options = FAST | {"n_epochs": 12, "trained_weights": "all"}
        done = finish(client, submit(client, supervised(), options=options))
        assert done.status == "succeeded", done.error
        assert (service.store.job_folder(done.id) / "model" / "model.safetensors").exists()
        assert reply_of(client, done.fine_tuned_model, "the cat") == "sat on a mat"
        assert client.models.delete(done.fine_tuned_model).deleted


def start(model: Path, state: Path, port: int = 0) -> LocalService:
    settings = ServiceSettings(port=port, state_dir=str(state))
    return LocalService({"tiny": str(model)}, settings, num_threads=1)


def half_an_upload(port: int) -> socket.socket:
    """A connection with an upload that never ends."""
    connection = socket.create_connection(("127.0.0.1", port))
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="half"\r\n\r\n'
    head = "POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3000000\r\n"
    head += "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    connection.sendall(head.encode() + part + b"a" * 2_000_000)
    return connection


class Insistent:
    """A client side that keeps sending requests, in a thread, while the service is away."""

    def __init__(self, base_url: str, memory: Path) -> None:
        parameters = OpenAIChatModel.Parameters(
            base_url=base_url, model="tiny", samples_per_request=64
        )
        self.model = RetryingChatModel(
            OpenAIChatModel(parameters),
            chat.LimitParameters(num_retries=10_000, request_timeout=1e6),
            cache=ResponseCache(memory),
            sleep=lambda _: asyncio.sleep(0.2),
        )
        self.pool = ThreadPoolExecutor(1)

    def ask(self, **fields: Any) -> Future[chat.ChatOutcome]:
        request = chat.ChatRequest((turn("user", "hello you"),), **fields)
        return self.pool.submit(lambda: chat.complete_all(self.model, [request])[0])


@pytest.mark.slow  # several processes, each of which imports torch
def test_a_killed_service_loses_nothing_finished(tiny_model_dir: Path, tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    service = start(tiny_model_dir, tmp_path, port)
    insistent = Insistent(service.base_url, tmp_path / "answers.sqlite")
    finished = insistent.ask(seed=1, max_tokens=8).result()
    with openai.OpenAI(base_url=service.base_url, api_key="any", max_retries=0) as client:
        done = finish(client, submit(client, supervised()))
        running_job = submit(client, supervised(), options=FAST | {"n_epochs": 60})
        waiting = submit(client, supervised(), options=FAST | {"n_epochs": 1})
        kept = client.files.create(file=("kept", b"whole"), purpose="fine-tune").id
        wait_until(lambda: len(store.events(running_job.id)) > 10)
        uploading = half_an_upload(port)
        options: Any = {"n": 100, "max_tokens": 85, "temperature": 0, "stream": True}
        given: Any = {"model": "tiny", "messages": [turn("user", "hello")], **options}
        stream = client.chat.completions.create(**given)
        next(iter(stream))
        cut = insistent.ask(seed=2, num_samples=64, max_tokens=80)
        os.kill(service.pid, signal.SIGKILL)
        with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
            list(stream)
    with suppress(ConnectionError):
        assert uploading.recv(1) == b""
    uploading.close()
    (tmp_path / "files" / "file-cut.part").write_bytes(b"half an upload")
    service.stop()
    service = start(tiny_model_dir, tmp_path, port)
    with service, openai.OpenAI(base_url=service.base_url, api_key="any") as client:
        assert reply_of(client, done.fine_tuned_model, "the cat") == "sat on a mat"
        assert client.files.content(kept).read() == b"whole"
        assert "half" not in [file.filename for file in client.files.list()]
        outcome = cut.result(timeout=120)
        assert all(isinstance(sample, chat.ChatAnswer) for sample in outcome.samples)
        assert insistent.model.use.failures.keys() == {"unavailable"}
        num_requests = insistent.model.use.num_requests
        again = insistent.ask(seed=1, max_tokens=8).result()
        assert again.is_cached
        assert again.samples == finished.samples
        assert insistent.model.use.num_requests == num_requests
        assert finish(client, running_job).status == "succeeded"
        assert finish(client, waiting).status == "succeeded"
        steps = [row["step"] for row in store.events(running_job.id) if row["step"] is not None]
        assert steps == list(range(180, 0, -1))
    assert not (tmp_path / "files" / "file-cut.part").exists()


@pytest.mark.slow  # several processes, each of which imports torch
def test_a_stopped_service_leaves_its_job_to_the_next(tiny_model_dir: Path, tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    with start(tiny_model_dir, tmp_path) as service:
        with openai.OpenAI(base_url=service.base_url, api_key="any") as client:
            job = submit(client, supervised(), options=FAST | {"n_epochs": 200})
        wait_until(lambda: len(store.events(job.id)) > 5)
    left = store.job(job.id)
    assert left.status is Status.QUEUED
    assert not is_running(left.pid, left.pid_started)
    assert left.crashes == 0


@pytest.mark.slow  # several processes, each of which imports torch
def test_a_job_that_dies_three_times_fails(client: openai.OpenAI, service: Running) -> None:
    job = submit(client, supervised(), options=FAST | {"n_epochs": 900})

    def has_begun_after(crashes: int) -> bool:
        now = service.store.job(job.id)
        return (now.status, now.crashes, now.pid is None) == (Status.RUNNING, crashes, False)

    for crashes in range(3):
        wait_until(partial(has_begun_after, crashes))
        time.sleep(0.2)
        os.kill(service.store.job(job.id).pid or 0, signal.SIGKILL)
    done = finish(client, job)
    assert done.status == "failed"
    assert "SIGKILL" in done.error.message


@pytest.mark.usefixtures("in_process")
def test_a_job_whose_process_cannot_be_started_is_tried_again(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_program, starts = job_runner.start_program, []

    def start(name: str, *given: Any, **options: Any) -> Child:
        starts.append(name)
        if len(starts) == 1:
            raise OSError("No space left on device")
        return start_program(name, *given, **options)

    monkeypatch.setattr(job_runner, "start_program", start)
    job = submit(client, supervised(), options=FAST | {"n_epochs": 1})
    assert finish(client, job).status == "succeeded"
    assert starts == [job.id] * 2


def test_two_services_do_not_share_a_state(tiny_model_dir: Path, tmp_path: Path) -> None:
    models = {"tiny": str(tiny_model_dir)}
    with (
        running(models, state_dir=str(tmp_path)),
        pytest.raises(ConfigurationError, match="--state-dir"),
        running(models, state_dir=str(tmp_path)),
    ):
        pass

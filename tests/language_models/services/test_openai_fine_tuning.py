"""Fine-tuning jobs of OpenAI's protocol: requests, recovery of jobs, and messages."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from nip_astra.errors import ConfigurationError, ServiceError
from nip_astra.language_models.services.fine_tuning import (
    FineTuningJob,
    FineTuningOptions,
    FineTuningParameters,
    JobStatus,
    OpenAIFineTuning,
    PreferenceExample,
    SupervisedExample,
)
from tests.kit.serving import serving

pytest.importorskip("openai")

PAGE = 2
"""Jobs and files on a page, so that lists have several."""


class JobStub:
    """The service; `faults` are statuses answered first; "lost" does the work, then disconnects.

    A test's client records its pauses here.
    """

    def __init__(self) -> None:
        self.files: list[dict[str, Any]] = []
        self.contents: dict[str, bytes] = {}
        self.jobs: list[dict[str, Any]] = []
        self.created: list[dict[str, Any]] = []
        self.faults: list[int | str] = []
        self.pauses: list[float] = []
        self.base_url = ""

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> Any:
        if path == "/v1/files":
            return self._upload(body) if method == "POST" else _page(self.files, query)
        if path == "/v1/fine_tuning/jobs":
            is_new = method == "POST"
            return self._create(json.loads(body)) if is_new else _page(self.jobs[::-1], query)
        name = path.removeprefix("/v1/fine_tuning/jobs/")
        return next((job for job in self.jobs if job["id"] == name), None)

    def _upload(self, body: bytes) -> dict[str, Any]:
        result = re.search(
            rb'name="file"; filename="([^"]+)"\r\n.*?\r\n\r\n(.*?)\r\n--', body, re.S
        )
        assert result is not None
        file = {
            "id": f"file-{len(self.files)}",
            "object": "file",
            "purpose": "fine-tune",
            "bytes": len(result[2]),
            "filename": result[1].decode(),
            "created_at": 0,
            "status": "processed",
        }
        self.files.append(file)
        self.contents[str(file["id"])] = result[2]
        return file

    def _create(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.created.append(fields)
        job = {name: fields.get(name) for name in ("model", "metadata", "training_file")}
        job |= {"id": f"job-{len(self.jobs)}", "object": "fine_tuning.job"}
        job |= {"status": "validating_files", "fine_tuned_model": None, "error": None}
        self.jobs.append(job)
        return job


def _page(items: list[dict[str, Any]], query: dict[str, list[str]]) -> dict[str, Any]:
    ids = [item["id"] for item in items]
    start = ids.index(query["after"][0]) + 1 if "after" in query else 0
    rest = items[start:]
    return {"object": "list", "data": rest[:PAGE], "has_more": len(rest) > PAGE}


@contextmanager
def job_stub() -> Iterator[JobStub]:
    """Serve jobs that keep their state until a test changes it."""
    stub = JobStub()

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> None:
        fault = stub.faults.pop(0) if stub.faults else None
        parts = urlsplit(request.path)
        status, result = fault if isinstance(fault, int) else 200, None
        if status == 200:
            result = stub.answer(request.command, parts.path, parse_qs(parts.query), body)
            status = 200 if result is not None else 404
        if fault == "lost":
            request.close_connection = True
            return
        payload = json.dumps(result or {"error": {"message": "so it is", "code": None}}).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(payload)))
        request.end_headers()
        request.wfile.write(payload)

    with serving(answer) as address:
        stub.base_url = f"{address}/v1"
        yield stub


SUPERVISED = SupervisedExample(
    ({"role": "user", "content": "hé"}, {"role": "assistant", "content": "ho"})
)
PREFERENCE = PreferenceExample(({"role": "user", "content": "hé"},), "ho", "no")


def use(stub: JobStub, method: str, *given: Any, **options: Any) -> FineTuningJob:
    """Call a method of a service that is opened for this call only."""

    async def pause(seconds: float) -> None:
        stub.pauses.append(seconds)

    async def whole() -> FineTuningJob:
        service = OpenAIFineTuning(FineTuningParameters(base_url=stub.base_url), pause=pause)
        try:
            return await getattr(service, method)(*given, **options)  # type: ignore[no-any-return]
        finally:
            await service.close()

    return asyncio.run(whole())


def submit(stub: JobStub, *examples: Any, key: str = "k", **options: Any) -> FineTuningJob:
    return use(stub, "submit", "base", examples, FineTuningOptions(**options), key=key)


def test_a_supervised_job_is_submitted_with_its_options() -> None:
    options = {"num_epochs": 2, "batch_size": 4, "lr_multiplier": 0.5, "seed": 2**31 + 3}
    with job_stub() as stub:
        job = submit(stub, SUPERVISED, **options)
    assert (job.job_id, job.status, job.model, job.error) == ("job-0", "queued", None, None)
    hyper_parameters = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5}
    method = {"type": "supervised", "supervised": {"hyperparameters": hyper_parameters}}
    created = {"model": "base", "training_file": "file-0", "method": method, "seed": 3}
    assert stub.created == [created | {"metadata": {"nip_astra_key": "k"}}]
    assert json.loads(stub.contents["file-0"]) == {"messages": list(SUPERVISED.messages)}


def test_a_preference_job_has_openais_form_and_leaves_the_rest_to_the_service() -> None:
    with job_stub() as stub:
        submit(stub, PREFERENCE, PREFERENCE, method="dpo", beta=0.2)
    method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}
    assert stub.created[0]["method"] == method
    assert "seed" not in stub.created[0]
    row = {
        "input": {"messages": [{"role": "user", "content": "hé"}]},
        "preferred_output": [{"role": "assistant", "content": "ho"}],
        "non_preferred_output": [{"role": "assistant", "content": "no"}],
    }
    rows = [json.loads(line) for line in stub.contents["file-0"].splitlines()]
    assert rows == [row, row]


def test_a_key_finds_its_job_among_others_on_later_pages() -> None:
    keys = [f"{n}" * 90 for n in range(3)]
    with job_stub() as stub:
        ids = [submit(stub, SUPERVISED, key=key).job_id for key in [*keys, *keys]]
    assert ids == [f"job-{n}" for n in range(3)] * 2
    assert len(stub.files) == 1, "the same examples are uploaded once"


def test_a_job_whose_response_was_lost_is_not_submitted_again() -> None:
    with job_stub() as stub:
        # Jobs are listed, files are listed, the file is sent, the job is started.
        stub.faults = ["", "", "", "lost"]
        job = submit(stub, SUPERVISED)
    assert (job.job_id, len(stub.jobs), stub.pauses) == ("job-0", 1, [1.0])


def test_failures_that_may_pass_are_retried_and_others_are_errors() -> None:
    with job_stub() as stub:
        stub.faults = [500, 429, 503]
        submit(stub, SUPERVISED)
        assert stub.pauses == [1.0, 2.0, 4.0]
        stub.faults = [500] * 6
        with pytest.raises(ServiceError, match=r"'job-0': status 500 .* \(6 attempts\)"):
            use(stub, "job", "job-0")
        stub.faults = [400]
        with pytest.raises(ServiceError, match="report the job 'job-0': status 400"):
            use(stub, "job", "job-0")
        assert use(stub, "job", "job-9").status is JobStatus.FAILED
        stub.faults = [401]
        with pytest.raises(ConfigurationError, match="base_url"):
            use(stub, "job", "job-0")


def test_the_status_and_the_end_of_a_job_are_reported() -> None:
    with job_stub() as stub:
        submit(stub, SUPERVISED)
        (job,) = stub.jobs
        for job["status"] in ("running", "paused"):
            assert use(stub, "job", "job-0").status is JobStatus.RUNNING
        job |= {"status": "succeeded", "fine_tuned_model": "ft:base:1"}
        done = use(stub, "job", "job-0")
        assert (done.status.is_over, done.model) == (True, "ft:base:1")
        job |= {"status": "failed", "fine_tuned_model": None}
        job["error"] = {"code": "x", "message": "no memory", "param": None}
        assert use(stub, "job", "job-0").error == "no memory"
        job["status"] = "cancelled"
        assert use(stub, "job", "job-0").status is JobStatus.CANCELLED
        job["status"] = "dreaming"
        dreaming = use(stub, "job", "job-0")
        assert dreaming.status is JobStatus.FAILED
        assert "'dreaming'" in str(dreaming.error)


def test_examples_of_the_other_method_and_none_at_all_are_refused() -> None:
    with job_stub() as stub:
        for examples in ([], [PREFERENCE]):
            with pytest.raises(ConfigurationError, match="SupervisedExample"):
                submit(stub, *examples)
        assert stub.files == stub.jobs == []

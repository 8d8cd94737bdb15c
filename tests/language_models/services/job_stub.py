"""Files and fine-tuning jobs of OpenAI's protocol on the loopback interface, with faults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kit.serving import serving

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
        """Carry out a request."""
        if path == "/v1/files":
            return self._upload(body) if method == "POST" else _page(self.files, query)
        if path == "/v1/fine_tuning/jobs":
            is_new = method == "POST"
            return self._create(json.loads(body)) if is_new else _page(self.jobs[::-1], query)
        name = path.removeprefix("/v1/fine_tuning/jobs/").removesuffix("/cancel")
        job = next((job for job in self.jobs if job["id"] == name), None)
        if job is not None and path.endswith("/cancel"):
            job["status"] = "cancelled"
        return job

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

"""A log of answered requests; one repeated with its `Idempotency-Key` gets the stored answer."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from nip_astra.language_models.services.retrying import connect
from nip_astra.serve.requests import bad_request

COMPLETIONS = "completions.db"
KEY_HEADER = "idempotency-key"
REPLAYED = {"Idempotent-Replayed": "true"}
NUM_KEPT = 200_000
"""Maximum number of stored requests; older ones are deleted."""
SECONDS_UNWRITTEN = 0.1
"""Maximum seconds for which log entries of requests without a key are held back to be batched.

A kill may lose them, which no client would notice."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS completions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, key TEXT, digest TEXT NOT NULL,
    model TEXT NOT NULL, outcome TEXT NOT NULL, answer BLOB
);
CREATE UNIQUE INDEX IF NOT EXISTS one_answer_a_key ON completions (key) WHERE answer IS NOT NULL;
"""


class CompletionRecord(NamedTuple):
    """A log entry; `outcome`: `answered`, `again` (stored answer), `left` (client disconnected)."""

    at: float
    key: str | None
    digest: str
    model: str
    outcome: str


_COLUMNS = ", ".join(CompletionRecord._fields)


class CompletionStore:
    """The log of a service and the answers to named requests, in a file of its state folder."""

    def __init__(self, folder: Path) -> None:
        self._database = connect(folder / COMPLETIONS)
        self._database.executescript(_SCHEMA)
        self._unwritten: list[CompletionRecord] = []
        # A lock lives as long as a request that holds or awaits it.
        self._key_locks: weakref.WeakValueDictionary[str, asyncio.Lock]
        self._key_locks = weakref.WeakValueDictionary()

    async def once(
        self, request: Request, model: str, answer: Callable[[], Awaitable[Response]]
    ) -> Response:
        """Return the result of `answer`, or that stored for an equal request with the same key."""
        key = request.headers.get(KEY_HEADER)
        digest = sha256(await request.body()).hexdigest()
        if key is None:
            response = await answer()
            if not self._unwritten:
                asyncio.get_running_loop().call_later(SECONDS_UNWRITTEN, self._write)
            outcome = _outcome(response)
            self._unwritten.append(CompletionRecord(time.time(), None, digest, model, outcome))
            return response
        # A client that timed out repeats its request while the first is still computed: the lock
        # of the key makes the second wait for the first's answer.
        lock = self._key_locks.setdefault(key, asyncio.Lock())
        async with lock:
            stored_answer = self._load_answer(key, digest)
            if stored_answer is not None:
                self._insert(key, digest, model, "again")
                return Response(stored_answer, media_type="application/json", headers=REPLAYED)
            response = await answer()
            outcome = _outcome(response)
            body = bytes(response.body) if outcome == "answered" else None
            self._insert(key, digest, model, outcome, body)
            return response

    def log(self) -> list[CompletionRecord]:
        """Return all records, oldest first."""
        self._write()
        rows = self._database.execute(f"SELECT {_COLUMNS} FROM completions ORDER BY number")
        return [CompletionRecord(*row) for row in rows]

    def close(self) -> None:
        self._write()
        self._database.close()

    def _load_answer(self, key: str, digest: str) -> bytes | None:
        """Return the stored answer of a key; raise `ApiError` if the key's request was another."""
        row = self._database.execute(
            "SELECT digest, answer FROM completions WHERE key = ? AND answer IS NOT NULL", (key,)
        ).fetchone()
        if row is None:
            return None
        stored_digest, answer = row
        if stored_digest != digest:
            raise bad_request(
                f"the Idempotency-Key {key[:100]!r} belongs to another request. Give each request "
                "its own.",
                code="idempotency_key_reused",
            )
        return bytes(answer)

    def _insert(
        self, key: str, digest: str, model: str, outcome: str, answer: bytes | None = None
    ) -> None:
        self._unwritten.append(CompletionRecord(time.time(), key, digest, model, outcome))
        self._write(answer)

    def _write(self, answer: bytes | None = None) -> None:
        """Write the entries that wait, the last one with its answer, in one transaction."""
        if not self._unwritten:
            return
        rows: list[tuple[object, ...]] = [(*record, None) for record in self._unwritten]
        rows[-1] = (*self._unwritten[-1], answer)
        self._unwritten = []
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(
                f"INSERT INTO completions ({_COLUMNS}, answer) VALUES (?, ?, ?, ?, ?, ?)", rows
            )
            self._database.execute(
                "DELETE FROM completions WHERE number <= (SELECT max(number) FROM completions) - ?",
                (NUM_KEPT,),
            )


def _outcome(response: Response) -> str:
    # Every other failure is raised as an `ApiError`; only a disconnected client gets a response.
    return "answered" if response.status_code == 200 else "left"

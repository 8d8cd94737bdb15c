"""Requests for text that were answered: a log, and answers for those who have lost theirs.

A client that names its request (`Idempotency-Key`) and is killed before it has read the answer asks
again under the same name, and is given the same answer; nothing is computed twice.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from nip_astra.serve.api_errors import wrong

COMPLETIONS = "completions.db"
KEY_HEADER = "idempotency-key"
REPLAYED = {"Idempotent-Replayed": "true"}
NUM_KEPT = 200_000
"""Requests that are remembered; older ones are forgotten."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS completions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, key TEXT, digest TEXT NOT NULL,
    model TEXT NOT NULL, outcome TEXT NOT NULL, answer BLOB
);
CREATE UNIQUE INDEX IF NOT EXISTS one_answer_a_key ON completions (key) WHERE answer IS NOT NULL;
"""


@dataclass(frozen=True)
class CompletionRecord:
    """A line of the log.

    Attributes
    ----------
    at : float
        Seconds since 1970.
    key : str or None
        The client's name of the request.
    digest : str
        Of the request's body: equal requests have equal ones.
    model : str
        Who was asked.
    outcome : str
        `answered`; `again`, where the answer was there already; or `left`, where the client did not
        wait for it.
    """

    at: float
    key: str | None
    digest: str
    model: str
    outcome: str


_COLUMNS = ", ".join(field.name for field in fields(CompletionRecord))


class CompletionStore:
    """The log of a service, in a SQLite file of its state folder; answers of named requests too."""

    def __init__(self, folder: Path) -> None:
        self._database = sqlite3.connect(
            folder / COMPLETIONS, timeout=60, isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode=WAL")
        # What a killed service has written is there; a power failure may lose the last of it.
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_SCHEMA)
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def once(
        self, request: Request, model: str, answer: Callable[[], Awaitable[Response]]
    ) -> Response:
        """What `answer` gives; where a request of that name was answered, the same again.

        Raises
        ------
        ApiError
            When the name belongs to another request.
        """
        key, digest = request.headers.get(KEY_HEADER), sha256(await request.body()).hexdigest()
        if key is None:
            response = await answer()
            self._add(None, digest, model, response)
            return response
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            kept = self._kept(key, digest)
            if kept is not None:
                self._insert(CompletionRecord(time.time(), key, digest, model, "again"))
                return Response(kept, media_type="application/json", headers=REPLAYED)
            response = await answer()
            self._add(key, digest, model, response)
            return response

    def log(self) -> list[CompletionRecord]:
        """Every request that was answered or left, the first first."""
        rows = self._database.execute(f"SELECT {_COLUMNS} FROM completions ORDER BY number")
        return [CompletionRecord(*row) for row in rows]

    def close(self) -> None:
        """End the connection."""
        self._database.close()

    def _kept(self, key: str, digest: str) -> bytes | None:
        row = self._database.execute(
            "SELECT digest, answer FROM completions WHERE key = ? AND answer IS NOT NULL", (key,)
        ).fetchone()
        if row is None:
            return None
        if row[0] != digest:
            raise wrong(
                f"the request is named {key[:100]!r}, but that is the name of another one, which "
                "was answered. Give each request an Idempotency-Key of its own.",
                code="idempotency_key_reused",
            )
        return bytes(row[1])

    def _add(self, key: str | None, digest: str, model: str, response: Response) -> None:
        is_answered = response.status_code == 200
        record = CompletionRecord(
            time.time(), key, digest, model, "answered" if is_answered else "left"
        )
        is_kept = is_answered and key is not None
        self._insert(record, bytes(response.body) if is_kept else None)

    def _insert(self, record: CompletionRecord, answer: bytes | None = None) -> None:
        values = (*vars(record).values(), answer)
        number = self._database.execute(
            f"INSERT INTO completions ({_COLUMNS}, answer) VALUES (?, ?, ?, ?, ?, ?)", values
        ).lastrowid
        self._database.execute(
            "DELETE FROM completions WHERE number <= ?", ((number or 0) - NUM_KEPT,)
        )

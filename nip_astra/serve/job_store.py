"""Files, jobs, their events and checkpoints: one SQLite database and folders beside it.

The service and the processes that train write to it concurrently; writes survive a kill.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nip_astra.language_models.services.fine_tuning import JobStatus as Status

DELETED = ".deleted"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, key TEXT UNIQUE,
    created_at INTEGER NOT NULL, status TEXT NOT NULL,
    model TEXT NOT NULL, root TEXT NOT NULL, name TEXT NOT NULL, plan TEXT NOT NULL,
    request TEXT NOT NULL, crashes INTEGER NOT NULL DEFAULT 0, pid INTEGER, pid_started TEXT,
    is_trained INTEGER NOT NULL DEFAULT 0, trained_tokens INTEGER, error TEXT, finished_at INTEGER
);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, created_at INTEGER NOT NULL,
    level TEXT NOT NULL, type TEXT NOT NULL, message TEXT NOT NULL, data TEXT NOT NULL, step INTEGER
);
CREATE INDEX IF NOT EXISTS events_of_a_job ON events (job, number);
CREATE UNIQUE INDEX IF NOT EXISTS one_event_a_step ON events (job, step) WHERE step IS NOT NULL;
CREATE TABLE IF NOT EXISTS checkpoints (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, job TEXT NOT NULL,
    created_at INTEGER NOT NULL, step INTEGER NOT NULL, folder TEXT NOT NULL, name TEXT NOT NULL,
    metrics TEXT NOT NULL, UNIQUE (job, step)
);
"""


@dataclass(frozen=True)
class Job:
    """A job that trains `model`; its result `name` shares weights of the served `root`."""

    number: int
    id: str
    created_at: int
    status: Status
    model: str
    root: str
    name: str
    plan: dict[str, Any]
    request: dict[str, Any]
    crashes: int
    pid: int | None
    pid_started: str | None
    is_trained: bool
    trained_tokens: int | None
    error: dict[str, Any] | None
    finished_at: int | None


_JSON = ("plan", "request", "error")
_COLUMNS = ", ".join(field.name for field in fields(Job))


class JobStore:
    """The state of a service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("files", "jobs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        with self._connection() as connection:
            # Readers do not wait for the writers of other processes.
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(_SCHEMA)

    def _connection(self) -> closing[sqlite3.Connection]:
        """Open the database; each statement is a transaction."""
        path = self.folder / "service.db"
        connection = sqlite3.connect(path, timeout=60, isolation_level=None)
        connection.row_factory = sqlite3.Row
        return closing(connection)

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        with self._connection() as connection:
            return [dict(row) for row in connection.execute(query, values)]

    def _change(self, statement: str, values: Sequence[Any] | Mapping[str, Any]) -> int:
        """Run a statement; return the number of changed rows."""
        with self._connection() as connection:
            return connection.execute(statement, values).rowcount

    # ---- files

    def new_file(self) -> tuple[str, Path]:
        """Return an id for a file, and the path to write it to before it is added."""
        identity = f"file-{secrets.token_hex(12)}"
        return identity, self.folder / "files" / f"{identity}.part"

    def file_path(self, identity: str) -> Path:
        return self.folder / "files" / identity

    def add_file(self, identity: str, part: Path, filename: str) -> dict[str, Any]:
        """Add a completely written file."""
        size = part.stat().st_size
        part.replace(self.file_path(identity))
        self._change("INSERT INTO files VALUES (?, ?, ?, ?)", (identity, filename, size, _now()))
        return self.files(identity)[0]

    def files(self, identity: str | None = None) -> list[dict[str, Any]]:
        """Return all files, newest first, or the one with an id."""
        where = "" if identity is None else "WHERE id = ?"
        values = () if identity is None else (identity,)
        return self._rows(f"SELECT * FROM files {where} ORDER BY rowid DESC", values)

    def delete_file(self, identity: str) -> None:
        """Delete a file; jobs keep their own copy."""
        self._change("DELETE FROM files WHERE id = ?", (identity,))
        self.file_path(identity).unlink(missing_ok=True)

    def delete_model(self, folder: Path) -> None:
        """Delete a job's model, atomically for a service that starts concurrently."""
        deleted = folder.with_name(f"{folder.name}{DELETED}")
        folder.rename(deleted)
        shutil.rmtree(deleted, ignore_errors=True)

    def clear_unfinished(self) -> None:
        """Remove files without a row, such as interrupted uploads, and half-deleted models."""
        stored_ids = {file["id"] for file in self.files()}
        for path in (self.folder / "files").iterdir():
            if path.name not in stored_ids:
                path.unlink()
        for path in (self.folder / "jobs").glob(f"*/*{DELETED}"):
            shutil.rmtree(path, ignore_errors=True)

    # ---- jobs

    def job_folder(self, identity: str) -> Path:
        return self.folder / "jobs" / identity

    def add_job(self, job: Mapping[str, Any], key: str | None) -> Job:
        """Queue a job, or return the one with its key."""
        values = {**job, "key": key, "created_at": _now(), "status": Status.QUEUED}
        for name in ("plan", "request"):
            values[name] = json.dumps(values[name])
        columns = ", ".join(values)
        placeholders = ", ".join(f":{name}" for name in values)
        # A key is unique: of two requests with the same one, the second inserts nothing.
        self._change(f"INSERT OR IGNORE INTO jobs ({columns}) VALUES ({placeholders})", values)
        job_with_key = self.find_job(key) if key is not None else None
        return job_with_key or self.job(str(job["id"]))

    def find_job(self, key: str) -> Job | None:
        """Return the job of the request with a key, if any."""
        jobs = self._jobs("WHERE key = ?", (key,))
        return jobs[0] if jobs else None

    def job(self, identity: str) -> Job:
        """Return the job with an id; `KeyError` if there is none."""
        jobs = self._jobs("WHERE id = ?", (identity,))
        if not jobs:
            raise KeyError(identity)
        return jobs[0]

    def jobs(self) -> list[Job]:
        return self._jobs("ORDER BY number")

    def _jobs(self, clauses: str, values: Sequence[Any] = ()) -> list[Job]:
        """Return the jobs that SQL clauses select and order."""
        jobs = []
        for row in self._rows(f"SELECT {_COLUMNS} FROM jobs {clauses}", values):
            for name in _JSON:
                row[name] = json.loads(row[name]) if row[name] else None
            row["status"] = Status(row["status"])
            row["is_trained"] = bool(row["is_trained"])
            jobs.append(Job(**row))
        return jobs

    def change_job(self, identity: str, *, only: Sequence[Status] = (), **values: Any) -> bool:
        """Change a job, unless `only` excludes its status; return whether it was changed."""
        if "error" in values:
            values["error"] = json.dumps(values["error"])
        if "status" in values and Status(values["status"]).is_over:
            values.setdefault("finished_at", _now())
        assignments = ", ".join(f"{name} = ?" for name in values)
        statement = f"UPDATE jobs SET {assignments} WHERE id = ?"
        if only:
            statement += f" AND status IN ({_placeholders(len(only))})"
        num_changed = self._change(statement, (*values.values(), identity, *only))
        return num_changed > 0

    # ---- events and checkpoints

    def add_event(
        self,
        job: str,
        message: str,
        *,
        level: str = "info",
        metrics: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """Add an event of a job; only one per step."""
        kind = "message" if step is None else "metrics"
        # A job that continues after a crash repeats steps; the index on (job, step) drops theirs.
        self._change(
            "INSERT OR IGNORE INTO events (job, created_at, level, type, message, data, step) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (job, _now(), level, kind, message, json.dumps(metrics or {}), step),
        )

    def events(self, job: str) -> list[dict[str, Any]]:
        """Return all events of a job, newest first."""
        return self._rows("SELECT * FROM events WHERE job = ? ORDER BY number DESC", (job,))

    def newest_events(self, job: str, *, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Return up to `limit` events of a job, newest first, optionally only earlier numbers."""
        return self._rows(
            "SELECT * FROM events WHERE job = ? AND number < ? ORDER BY number DESC LIMIT ?",
            (job, sys.maxsize if before is None else before, limit),
        )

    def add_checkpoint(
        self, job: Job, step: int, folder: Path, metrics: Mapping[str, float], *, name: str
    ) -> None:
        identity = f"ftckpt_{secrets.token_hex(12)}"
        # Relative, so that the state folder may be moved.
        path = str(folder.relative_to(self.folder))
        self._change(
            "INSERT OR IGNORE INTO checkpoints "
            "(id, job, created_at, step, folder, name, metrics) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (identity, job.id, _now(), step, path, name, json.dumps(dict(metrics))),
        )

    def drop_checkpoints(self, job: str, *, keep: int) -> list[str]:
        """Delete the rows of all but the newest checkpoints of a job; return their folders."""
        old = self.checkpoints(job)[keep:]
        identities = [row["id"] for row in old]
        statement = f"DELETE FROM checkpoints WHERE id IN ({_placeholders(len(old))})"
        self._change(statement, identities)
        return [row["folder"] for row in old]

    def checkpoints(self, job: str) -> list[dict[str, Any]]:
        """Return the checkpoints of a job, newest first."""
        return self._rows("SELECT * FROM checkpoints WHERE job = ? ORDER BY step DESC", (job,))


def _placeholders(count: int) -> str:
    return ", ".join("?" * count)


def _now() -> int:
    return int(time.time())

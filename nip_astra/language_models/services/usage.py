"""Usage of services (tokens, money, time) and their responses, in SQLite files of a run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
import statistics
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from nip_astra.errors import BudgetExhaustedError, RunDirectoryError
from nip_astra.language_models.services.chat import (
    NOTHING_USED,
    ChatAnswer,
    ChatModel,
    ChatRequest,
    ChatUsage,
    FinishReason,
)

logger = logging.getLogger(__name__)

TOTAL_SUFFIX = ".total"
"""Suffix of the file beside a usage log that holds the total."""


@dataclass(frozen=True)
class RequestRecord:
    """One attempt.

    Attributes
    ----------
    label : str
        Role of the model: "target", "judge".
    outcome : str
        "answered", or the reason of the failure.
    num_refusals : int
        Answers marked as refusals, or withheld for their content.
    cost : float or None
        None without prices.
    """

    label: str
    model: str
    seconds: float
    num_samples: int
    outcome: str
    num_refusals: int
    prompt_tokens: int
    completion_tokens: int
    is_estimated: bool
    cost: float | None


@dataclass(frozen=True)
class ServiceUse:
    """Usage of a chat model in a run.

    Attributes
    ----------
    num_requests : int
        Attempts, including failed ones.
    num_remembered : int
        Samples from the cache.
    num_refusals : int
        Answers marked as refusals, or withheld for their content.
    failures : Mapping[str, int]
        Attempts without an answer, by reason.
    num_estimated : int
        Attempts whose tokens are estimated, because the service did not report them.
    cost : float or None
        None without prices.
    median_seconds, p95_seconds : float or None
        Of answered attempts.
    """

    model: str
    num_requests: int = 0
    num_samples: int = 0
    num_remembered: int = 0
    num_refusals: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    num_estimated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    median_seconds: float | None = None
    p95_seconds: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Budget:
    """The most that a run may spend on services; None for no bound."""

    max_requests: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None


class Usage(NamedTuple):
    """A sum of requests, tokens and money."""

    requests: int = 0
    tokens: int = 0
    cost: float = 0.0

    def plus(self, other: Usage, sign: int = 1) -> Usage:
        """The sum, or with sign -1 the difference."""
        return Usage(
            self.requests + sign * other.requests,
            self.tokens + sign * other.tokens,
            self.cost + sign * other.cost,
        )

    def at_least(self, other: Usage) -> Usage:
        """The larger of each."""
        return Usage(
            max(self.requests, other.requests),
            max(self.tokens, other.tokens),
            max(self.cost, other.cost),
        )


_OPEN_LOGS: weakref.WeakValueDictionary[Path, UsageLog] = weakref.WeakValueDictionary()
_COLUMNS = tuple(RequestRecord.__dataclass_fields__)


class UsageLog:
    """Every attempt of a run; may be used from several threads.

    Parameters
    ----------
    path : Path, optional
        A SQLite file; None for memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._reserved = Usage()
        self._total = _TotalFile(path)
        self._database = self._open()
        with self._transaction():
            kept, found = self._total.read(), self._read_spent()
            self._spent = kept.at_least(found)
            if self._spent != kept:
                self._total.write(self._spent)
        if self._spent.requests > found.requests:
            logger.warning(
                "%s lacks %d of %d requests; the budget counts them, tables of usage do not",
                path,
                self._spent.requests - found.requests,
                self._spent.requests,
            )

    @classmethod
    def of(cls, path: Path | None) -> UsageLog:
        """The log of a file, opened once per process."""
        if path is None:
            return cls()
        log = _OPEN_LOGS.get(path.resolve())
        if log is None:
            log = _OPEN_LOGS[path.resolve()] = cls(path)
        return log

    @property
    def spent(self) -> Usage:
        """Usage of all models so far."""
        return self._spent

    async def reserve(self, most: Usage, budget: Budget) -> None:
        """Reserve the most that a request may use; waits for open requests if necessary.

        Raises
        ------
        BudgetExhaustedError
            If no request is open and the rest of the budget may not suffice.
        """
        while True:
            with self._lock:
                too_much = _exceeded(self._spent.plus(self._reserved).plus(most), budget)
                if too_much is None:
                    self._reserved = self._reserved.plus(most)
                    return
                if not self._reserved.requests:
                    raise BudgetExhaustedError(_budget_text(too_much, self._spent))
                loop = asyncio.get_running_loop()
                freed: asyncio.Future[None] = loop.create_future()
                self._waiting.append((loop, freed))
            await freed

    def release(self, reserved: Usage, record: RequestRecord | None) -> None:
        """Replace a reservation by the actual usage; None for a request that was cut off."""
        took = Usage()
        if record is not None:
            tokens = record.prompt_tokens + record.completion_tokens
            took = Usage(1, tokens, record.cost or 0.0)
        with self._lock:
            if record is not None:
                with self._transaction():
                    self._write(record)
                    self._total.write(self._total.read().plus(took))
            self._spent = self._spent.plus(took)
            self._reserved = self._reserved.plus(reserved, -1)
            waiting, self._waiting = self._waiting, []
        for loop, freed in waiting:
            # A closed loop has nobody waiting.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_free, freed)

    def set_aside(self, label: str) -> None:
        """Leave the usage under a label to the budget only."""
        with self._lock, guarded(self.path):
            self._database.execute(
                "UPDATE requests SET label = label || ' (before)' WHERE label = ?", (label,)
            )
            self._database.execute("DELETE FROM remembered WHERE label = ?", (label,))

    def count_cached(self, label: str, num_samples: int) -> None:
        """Count samples from the cache."""
        with self._lock, guarded(self.path):
            self._database.execute(
                "INSERT INTO remembered VALUES (?, ?) ON CONFLICT (label) "
                "DO UPDATE SET num_samples = num_samples + excluded.num_samples",
                (label, num_samples),
            )

    def use(self, label: str, model: str) -> ServiceUse:
        """Usage under a label."""
        with self._lock, guarded(self.path):
            totals = self._database.execute(
                "SELECT COUNT(*), COALESCE(SUM(num_samples), 0), COALESCE(SUM(num_refusals), 0), "
                "COALESCE(SUM(is_estimated), 0), COALESCE(SUM(prompt_tokens), 0), "
                "COALESCE(SUM(completion_tokens), 0), SUM(cost) FROM requests WHERE label = ?",
                (label,),
            ).fetchone()
            failures = self._database.execute(
                "SELECT outcome, COUNT(*) FROM requests WHERE label = ? AND outcome != 'answered' "
                "GROUP BY outcome ORDER BY outcome",
                (label,),
            ).fetchall()
            remembered = self._database.execute(
                "SELECT num_samples FROM remembered WHERE label = ?", (label,)
            ).fetchone()
            seconds = [
                row[0]
                for row in self._database.execute(
                    "SELECT seconds FROM requests WHERE label = ? AND outcome = 'answered'",
                    (label,),
                )
            ]
        return ServiceUse(
            model=model,
            num_requests=totals[0],
            num_samples=totals[1],
            num_remembered=remembered[0] if remembered else 0,
            num_refusals=totals[2],
            failures=dict(failures),
            num_estimated=totals[3],
            prompt_tokens=totals[4],
            completion_tokens=totals[5],
            cost=totals[6],
            median_seconds=statistics.median(seconds) if seconds else None,
            p95_seconds=sorted(seconds)[int(0.95 * (len(seconds) - 1))] if seconds else None,
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """An exclusive transaction over the block."""
        with guarded(self.path):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        """The database; a damaged one is renamed if the total is known.

        Raises
        ------
        RunDirectoryError
            If the usage so far cannot be known.
        """
        try:
            return _open_tables(self.path)
        except RunDirectoryError as error:
            path = self.path
            if path is None or not _is_damage(error.__cause__) or self._total.read() == Usage():
                raise
            for suffix in ("", "-wal", "-shm"):
                part = path.with_name(path.name + suffix)
                if part.exists():
                    part.replace(part.with_name(f"{part.name}.damaged"))
            logger.warning("%s is damaged and is kept as %s.damaged", path, path.name)
            return _open_tables(path)

    def _write(self, record: RequestRecord) -> None:
        marks = ", ".join("?" * (len(_COLUMNS) + 1))
        values = (time.time(), *(getattr(record, name) for name in _COLUMNS))
        with guarded(self.path):
            self._database.execute(f"INSERT INTO requests VALUES ({marks})", values)

    def _read_spent(self) -> Usage:
        with guarded(self.path):
            row = self._database.execute(
                "SELECT COUNT(*), COALESCE(SUM(prompt_tokens + completion_tokens), 0), "
                "COALESCE(SUM(cost), 0.0) FROM requests"
            ).fetchone()
        return Usage(*row)


class _TotalFile:
    """Total usage of a run, beside its log, which may be damaged or emptied."""

    def __init__(self, log: Path | None) -> None:
        self.path = None if log is None else log.with_suffix(TOTAL_SUFFIX)

    def read(self) -> Usage:
        """The total; zero if the file is new or invalid."""
        if self.path is None or not self.path.exists():
            return Usage()
        try:
            requests, tokens, cost = json.loads(self.path.read_text(encoding="utf-8"))
            return Usage(int(requests), int(tokens), float(cost))
        except (ValueError, TypeError):
            return Usage()

    def write(self, total: Usage) -> None:
        """Write the total at constant width, so that a kill cannot truncate it."""
        if self.path is not None:
            self.path.touch()
            with self.path.open("r+b", buffering=0) as file:
                file.write(f"{json.dumps(total):<100}\n".encode())


def _is_damage(error: BaseException | None) -> bool:
    """Whether a database is damaged, not only locked or out of space."""
    return type(error) is sqlite3.DatabaseError


def _open_tables(path: Path | None) -> sqlite3.Connection:
    database = connect(path)
    with guarded(path):
        database.execute(f"CREATE TABLE IF NOT EXISTS requests (at REAL, {', '.join(_COLUMNS)})")
        database.execute("CREATE TABLE IF NOT EXISTS remembered (label PRIMARY KEY, num_samples)")
        (problem,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            database.close()
            raise sqlite3.DatabaseError(problem)
    return database


def connect(path: Path | None) -> sqlite3.Connection:
    """A SQLite database that survives kills and that several processes may use."""
    with guarded(path):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(
            ":memory:" if path is None else path,
            check_same_thread=False,
            isolation_level=None,
            timeout=60.0,
        )
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
    return database


@contextmanager
def guarded(path: Path | None) -> Iterator[None]:
    """Turn errors of SQLite and of the disk into one that names the file."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise RunDirectoryError(
            f"cannot use {path}: {error}. Free disk space, set service_cache to another path, or "
            "remove a damaged file (its answers are then paid for again)."
        ) from error


def _exceeded(planned: Usage, budget: Budget) -> str | None:
    """The first setting that would be exceeded, if any."""
    bounds: dict[str, tuple[float, float | None]] = {
        "max_service_requests": (planned.requests, budget.max_requests),
        "max_service_tokens": (planned.tokens, budget.max_tokens),
        "max_service_cost": (planned.cost, budget.max_cost),
    }
    for name, (value, bound) in bounds.items():
        if bound is not None and value > bound:
            return f"{name}={bound:g}"
    return None


def _budget_text(setting: str, spent: Usage) -> str:
    name = setting.partition("=")[0]
    return (
        f"the next request could exceed {setting}, after {spent.requests} requests, "
        f"{spent.tokens} tokens and a cost of {spent.cost:.4g}. Continue with a larger limit: "
        f"nip-astra resume RUN --settings {name}=<more> (or the same command for an evaluation)"
    )


def _free(freed: asyncio.Future[None]) -> None:
    if not freed.done():
        freed.set_result(None)


class ResponseCache:
    """Answers by model, place, request and sample number, in a SQLite file.

    Failures are not stored. May be used from several threads and processes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = connect(path)
        self._lock = threading.Lock()
        with guarded(path):
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT) "
                "WITHOUT ROWID"
            )

    def get(self, keys: Sequence[str]) -> list[ChatAnswer | None]:
        """The answer of each key, or None."""
        answers = []
        with self._lock, guarded(self.path):
            for key in keys:
                row = self._database.execute(
                    "SELECT answer FROM answers WHERE key = ?", (key,)
                ).fetchone()
                answers.append(None if row is None else _read(row[0]))
        return answers

    def usage_of(self, keys: Sequence[str]) -> ChatUsage:
        """Tokens of the requests that gave these answers, as far as known."""
        marks = ", ".join("?" * len(keys))
        with self._lock, guarded(self.path):
            rows = self._database.execute(
                f"SELECT answer FROM answers WHERE key IN ({marks})", list(keys)
            ).fetchall()
        counts = [json.loads(text).get("usage", (0, 0)) for (text,) in rows]
        return ChatUsage(sum(prompt for prompt, _ in counts), sum(answer for _, answer in counts))

    def put(self, answers: Mapping[str, ChatAnswer], usage: ChatUsage = NOTHING_USED) -> None:
        """Store answers with their common usage; existing ones stay."""
        taken = dict.fromkeys(answers, NOTHING_USED) | dict.fromkeys(list(answers)[:1], usage)
        rows = [
            (key, json.dumps(asdict(answer) | {"usage": taken[key]}))
            for key, answer in answers.items()
        ]
        with self._lock, guarded(self.path):
            self._database.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", rows)


def key_of(model: ChatModel, request: ChatRequest, sample: int) -> str:
    """The key of an answer in the cache."""
    fields = asdict(request)
    del fields["num_samples"], fields["first_sample"], fields["key"]
    whole = {"model": model.name, "place": model.place, "sample": sample, **fields}
    text = json.dumps(whole, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(text: str) -> ChatAnswer | None:
    try:
        stored = json.loads(text)
        logprobs = stored["token_logprobs"]
        return ChatAnswer(
            str(stored["text"]),
            FinishReason(stored["finish_reason"]),
            stored["refusal"],
            None if logprobs is None else tuple(float(value) for value in logprobs),
        )
    except (ValueError, LookupError, TypeError):
        # Written by another version.
        return None

"""What requests to services took: tokens, money, time; kept over the stops of a run."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import statistics
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from nip_astra.errors import BudgetExhaustedError, RunDirectoryError

logger = logging.getLogger(__name__)

TOTAL_SUFFIX = ".total"
"""Of the file beside a ledger that holds what was spent in all."""


class ChatUsage(NamedTuple):
    """Tokens of a request and its answers, as the service counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class RequestRecord:
    """One attempt.

    Attributes
    ----------
    label : str
        Who was asked: "target", "judge".
    outcome : str
        "answered", or the reason of the failure.
    num_refusals : int
        Answers that the service marks as refusals, or withholds for their content.
    cost : float or None
        None where no prices are known.
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
    """What a chat model took in a run.

    Attributes
    ----------
    num_requests : int
        Attempts, those that failed included.
    num_remembered : int
        Samples that were remembered, so that nobody was asked.
    num_refusals : int
        Answers that the service marks as refusals or withholds for their content.
    failures : Mapping[str, int]
        Attempts without an answer, by reason.
    num_estimated : int
        Attempts whose tokens are guessed, since the service did not tell them.
    cost : float or None
        None where no prices are known.
    median_seconds, p95_seconds : float or None
        Of attempts that were answered.
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
        """Plain values that JSON can hold."""
        return asdict(self)


@dataclass(frozen=True)
class Budget:
    """Most that a run may spend on services; None for no bound."""

    max_requests: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None


class Spent(NamedTuple):
    """A part of a budget."""

    requests: int = 0
    tokens: int = 0
    cost: float = 0.0

    def plus(self, other: Spent, sign: int = 1) -> Spent:
        """The sum, or with sign -1 the difference."""
        return Spent(
            self.requests + sign * other.requests,
            self.tokens + sign * other.tokens,
            self.cost + sign * other.cost,
        )

    def at_least(self, other: Spent) -> Spent:
        """The larger of each."""
        return Spent(
            max(self.requests, other.requests),
            max(self.tokens, other.tokens),
            max(self.cost, other.cost),
        )


_LEDGERS: weakref.WeakValueDictionary[Path, RequestLedger] = weakref.WeakValueDictionary()
_COLUMNS = tuple(RequestRecord.__dataclass_fields__)


class RequestLedger:
    """Every attempt of a run, in a file of its own; may be used from several threads.

    Parameters
    ----------
    path : Path, optional
        A SQLite file; without one, attempts are forgotten with the process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._reserved = Spent()
        self._total = _TotalFile(path)
        self._database = self._open()
        with self._transaction():
            kept, found = self._total.read(), self._read_spent()
            self._spent = kept.at_least(found)
            if self._spent != kept:
                self._total.write(self._spent)
        if self._spent.requests > found.requests:
            logger.warning(
                "%s lacks %d of %d requests; the budget counts them, tables of what services took "
                "do not",
                path,
                self._spent.requests - found.requests,
                self._spent.requests,
            )

    @classmethod
    def of(cls, path: Path | None) -> RequestLedger:
        """The one ledger of a file in this process."""
        if path is None:
            return cls()
        ledger = _LEDGERS.get(path.resolve())
        if ledger is None:
            ledger = _LEDGERS[path.resolve()] = cls(path)
        return ledger

    @property
    def spent(self) -> Spent:
        """What was spent so far, by all models."""
        return self._spent

    async def reserve(self, most: Spent, budget: Budget) -> None:
        """Set aside the most that a request may take; waits for those under way where need be.

        Raises
        ------
        BudgetExhaustedError
            When nothing is under way, and the rest of the budget may not be enough.
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

    def release(self, reserved: Spent, record: RequestRecord | None) -> None:
        """Note what a request took in place of what was set aside for it; None for one cut off."""
        took = Spent()
        if record is not None:
            tokens = record.prompt_tokens + record.completion_tokens
            took = Spent(1, tokens, record.cost or 0.0)
        with self._lock:
            if record is not None:
                with self._transaction():
                    self._write(record)
                    self._total.write(self._total.read().plus(took))
            self._spent = self._spent.plus(took)
            self._reserved = self._reserved.plus(reserved, -1)
            waiting, self._waiting = self._waiting, []
        for loop, freed in waiting:
            # Who waits in a loop that has ended waits no more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_free, freed)

    def set_aside(self, label: str) -> None:
        """Count what was spent under a label for the budget alone."""
        with self._lock, guarded(self.path):
            self._database.execute(
                "UPDATE requests SET label = label || ' (before)' WHERE label = ?", (label,)
            )
            self._database.execute("DELETE FROM remembered WHERE label = ?", (label,))

    def note_remembered(self, label: str, num_samples: int) -> None:
        """Count samples that nobody had to be asked for."""
        with self._lock, guarded(self.path):
            self._database.execute(
                "INSERT INTO remembered VALUES (?, ?) ON CONFLICT (label) "
                "DO UPDATE SET num_samples = num_samples + excluded.num_samples",
                (label, num_samples),
            )

    def use(self, label: str, model: str) -> ServiceUse:
        """What those of a label took."""
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
        """Let no other process count within the block, and keep all of it or nothing."""
        with guarded(self.path):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        """The database; one that is damaged is put aside if the total is kept.

        Raises
        ------
        RunDirectoryError
            When what was spent cannot be known.
        """
        try:
            return _open_tables(self.path)
        except RunDirectoryError as error:
            path = self.path
            if path is None or not _is_damage(error.__cause__) or self._total.read() == Spent():
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

    def _read_spent(self) -> Spent:
        with guarded(self.path):
            row = self._database.execute(
                "SELECT COUNT(*), COALESCE(SUM(prompt_tokens + completion_tokens), 0), "
                "COALESCE(SUM(cost), 0.0) FROM requests"
            ).fetchone()
        return Spent(*row)


class _TotalFile:
    """What a run has spent in all, beside its ledger, which may be damaged or emptied."""

    def __init__(self, ledger: Path | None) -> None:
        self.path = None if ledger is None else ledger.with_suffix(TOTAL_SUFFIX)

    def read(self) -> Spent:
        """The total; nothing where the file is new or holds something else."""
        if self.path is None or not self.path.exists():
            return Spent()
        try:
            requests, tokens, cost = json.loads(self.path.read_text(encoding="utf-8"))
            return Spent(int(requests), int(tokens), float(cost))
        except (ValueError, TypeError):
            return Spent()

    def write(self, total: Spent) -> None:
        """Replace the total in one write of constant width, which a kill does not divide."""
        if self.path is not None:
            self.path.touch()
            with self.path.open("r+b", buffering=0) as file:
                file.write(f"{json.dumps(total):<100}\n".encode())


def _is_damage(error: BaseException | None) -> bool:
    """Whether a database is damaged, and not merely locked or out of space."""
    return type(error) is sqlite3.DatabaseError


def _open_tables(path: Path | None) -> sqlite3.Connection:
    database = connect(path)
    with guarded(path):
        database.execute(f"CREATE TABLE IF NOT EXISTS requests (at REAL, {', '.join(_COLUMNS)})")
        database.execute("CREATE TABLE IF NOT EXISTS remembered (label PRIMARY KEY, num_samples)")
        (told,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if told != "ok":
            database.close()
            raise sqlite3.DatabaseError(told)
    return database


def connect(path: Path | None) -> sqlite3.Connection:
    """A SQLite database that outlives kills, and that several processes may use."""
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


class guarded:  # noqa: N801 - reads as a word of a with statement
    """Turns errors of SQLite and of the disk into one that names the file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.Error | OSError):
            raise RunDirectoryError(
                f"what was asked of services was to be kept in {self.path}, but: {error}. Free the "
                "disk, or give another path as the setting service_cache; a file that is damaged "
                "can be removed, after which answers are paid for again."
            ) from error


def _exceeded(planned: Spent, budget: Budget) -> str | None:
    """The first setting whose bound would be passed; None for none."""
    bounds: dict[str, tuple[float, float | None]] = {
        "max_service_requests": (planned.requests, budget.max_requests),
        "max_service_tokens": (planned.tokens, budget.max_tokens),
        "max_service_cost": (planned.cost, budget.max_cost),
    }
    for name, (value, bound) in bounds.items():
        if bound is not None and value > bound:
            return f"{name}={bound:g}"
    return None


def _budget_text(setting: str, spent: Spent) -> str:
    name = setting.partition("=")[0]
    return (
        f"another request to a service was to be made, but it might go beyond the setting {setting}"
        f"; so far {spent.requests} requests with {spent.tokens} tokens were made, which cost "
        f"{spent.cost:.4g}. What is done is kept. Go on with: nip-astra resume RUN --settings "
        f"{name}=<more>, or, of an evaluation, with the same command and --settings {name}=<more>"
    )


def _free(freed: asyncio.Future[None]) -> None:
    if not freed.done():
        freed.set_result(None)

"""Retries, rate limits, a budget, a usage log and stored responses around a chat model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import sqlite3
import statistics
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from nip_astra.call_outcomes import KeptOutcome, current_outcomes, key_of_call
from nip_astra.errors import (
    BudgetExhaustedError,
    ConfigurationError,
    NipAstraError,
    RunDirectoryError,
    counted,
)
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.message_format import (
    THOUGHT_MARKERS,
    MessageFormat,
    thought_between,
)
from nip_astra.language_models.services.chat import (
    CHAT_MODELS,
    CPU,
    NOTHING_USED,
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    ChatUsage,
    FailureReason,
    FinishReason,
    LimitParameters,
    PerLoop,
    PriceParameters,
    estimate_usage,
    gather_all,
    join_outcomes,
    reject_long_answer,
    sum_usage,
)
from nip_astra.progress import count_requests, waiting_for
from nip_astra.rollouts.messages import ToolCall
from nip_astra.utils.devices import resolve_device

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_RESERVATIONS = 0.01
"""Period in which requests try again to reserve a part of a budget that open ones hold."""
TOTAL_SUFFIX = ".total"
"""Suffix of the file beside a usage log with the total usage."""


@dataclass(frozen=True)
class RequestRecord:
    """One attempt of the role `label`; `outcome` is "answered" or the reason of the failure."""

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
    num_cached : int
        Samples from the cache.
    num_refusals : int
        Answers marked as refusals, or withheld for their content.
    failures : Mapping[str, int]
        Attempts without an answer, by reason.
    num_estimated : int
        Attempts whose tokens the service did not report.
    cost : float or None
        None without prices.
    median_seconds, p95_seconds : float or None
        Of answered attempts.
    """

    model: str
    num_requests: int = 0
    num_samples: int = 0
    num_cached: int = 0
    num_refusals: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    num_estimated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    median_seconds: float | None = None
    p95_seconds: float | None = None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Budget:
    """Maximum spending of a run on services; None for no bound."""

    max_requests: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None


class Usage(NamedTuple):
    """A sum of requests, tokens and cost."""

    requests: int = 0
    tokens: int = 0
    cost: float = 0.0

    def plus(self, usage: Usage) -> Usage:
        return Usage(
            self.requests + usage.requests, self.tokens + usage.tokens, self.cost + usage.cost
        )

    def minus(self, usage: Usage) -> Usage:
        return Usage(
            self.requests - usage.requests, self.tokens - usage.tokens, self.cost - usage.cost
        )


_COLUMNS = tuple(RequestRecord.__dataclass_fields__)
_TOTALS = {
    "num_requests": "COUNT(*)",
    "num_samples": "COALESCE(SUM(num_samples), 0)",
    "num_refusals": "COALESCE(SUM(num_refusals), 0)",
    "num_estimated": "COALESCE(SUM(is_estimated), 0)",
    "prompt_tokens": "COALESCE(SUM(prompt_tokens), 0)",
    "completion_tokens": "COALESCE(SUM(completion_tokens), 0)",
    "cost": "SUM(cost)",
}
_FAILURES = (
    "SELECT outcome, COUNT(*) FROM requests WHERE label = ? AND outcome != 'answered' "
    "GROUP BY outcome ORDER BY outcome"
)


class UsageLog:
    """Every attempt of a run, in a SQLite file or in memory; thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._reserved = Usage()
        self._total = _TotalFile(path)
        self._database = self._open()
        with self._transaction():
            row = self._database.execute(
                "SELECT COUNT(*), COALESCE(SUM(prompt_tokens + completion_tokens), 0), "
                "COALESCE(SUM(cost), 0.0) FROM requests"
            ).fetchone()
            logged = Usage(*row)
            total = self._total.read()
            # The larger of both: a damaged log, or one killed before its commit, lacks requests; a
            # run of an earlier version has no total.
            self.spent = Usage._make(map(max, total, logged))
            if self.spent != total:
                self._total.write(self.spent)
        num_missing = self.spent.requests - logged.requests
        if num_missing > 0:
            logger.warning(
                "%s lacks %d of %d requests; the budget counts them, tables of usage do not",
                path,
                num_missing,
                self.spent.requests,
            )

    @classmethod
    def open(cls, path: Path | None) -> UsageLog:
        """Return the log of a file, opened once per process; see `keeping_service_files`."""
        return cls() if path is None else _open_once(cls, path)

    def close(self) -> None:
        """Close the file; the log can no longer be used."""
        with self._lock:
            self._database.close()

    async def reserve(self, max_usage: Usage, budget: Budget) -> None:
        """Reserve the maximum usage of a request; wait for open requests if necessary.

        Raises `BudgetExhaustedError` if none is open and the rest may not suffice.
        """
        while True:
            with self._lock:
                planned = self.spent.plus(self._reserved).plus(max_usage)
                exceeded = _find_exceeded_limit(planned, budget)
                if exceeded is None:
                    self._reserved = self._reserved.plus(max_usage)
                    return
                # Open requests usually use less than they reserved. Without any, waiting is vain.
                if self._reserved.requests == 0:
                    raise BudgetExhaustedError(
                        f"the next request could exceed {exceeded.name}={exceeded.limit:g}, after "
                        f"{self.spent.requests} requests, {self.spent.tokens} tokens and a cost "
                        f"of {self.spent.cost:.4g}. Continue with a larger limit: nip-astra "
                        f"resume RUN --settings {exceeded.name}=<more> (or the same command for "
                        "an evaluation)"
                    )
            await asyncio.sleep(SECONDS_BETWEEN_RESERVATIONS)

    def release(self, reserved: Usage, record: RequestRecord | None) -> None:
        """Replace a reservation by the actual usage; None for an aborted request."""
        with self._lock:
            self._reserved = self._reserved.minus(reserved)
            if record is None:
                return
            tokens = record.prompt_tokens + record.completion_tokens
            usage = Usage(1, tokens, record.cost or 0.0)
            self.spent = self.spent.plus(usage)
            placeholders = ", ".join("?" * (len(_COLUMNS) + 1))
            row = (time.time(), *astuple(record))
            with self._transaction():
                self._database.execute(f"INSERT INTO requests VALUES ({placeholders})", row)
                # From the file, not from `spent`: other processes of the run write to it too.
                self._total.write(self._total.read().plus(usage))

    def archive(self, label: str) -> None:
        """Exclude the usage under a label from everything but the budget."""
        self._run("UPDATE requests SET label = label || ' (before)' WHERE label = ?", label)
        self._run("DELETE FROM remembered WHERE label = ?", label)

    def count_cached(self, label: str, num_samples: int) -> None:
        self._run(
            "INSERT INTO remembered VALUES (?, ?) ON CONFLICT (label) "
            "DO UPDATE SET num_samples = num_samples + excluded.num_samples",
            label,
            num_samples,
        )

    def use(self, label: str, model: str) -> ServiceUse:
        """Return the usage under a label."""
        columns = ", ".join(_TOTALS.values())
        (totals,) = self._run(f"SELECT {columns} FROM requests WHERE label = ?", label)
        cached = self._run("SELECT num_samples FROM remembered WHERE label = ?", label)
        answered = self._run(
            "SELECT seconds FROM requests WHERE label = ? AND outcome = 'answered'", label
        )
        seconds = sorted(row[0] for row in answered)
        median: float | None = None
        p95: float | None = None
        if seconds:
            median = statistics.median(seconds)
            p95 = seconds[int(0.95 * (len(seconds) - 1))]
        return ServiceUse(
            model,
            **dict(zip(_TOTALS, totals, strict=True)),
            num_cached=cached[0][0] if cached else 0,
            failures=dict(self._run(_FAILURES, label)),
            median_seconds=median,
            p95_seconds=p95,
        )

    def _run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, guarded(self.path):
            return self._database.execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with guarded(self.path):
            # It takes the write lock at once. A lock taken at the first write could fail, since
            # another process may have written after this one has read.
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        """Open the database; a damaged one is renamed if the total is known."""
        try:
            return _open_tables(self.path)
        except RunDirectoryError as error:
            path = self.path
            # A subclass of this error means a locked database or a full disk.
            is_damaged = type(error.__cause__) is sqlite3.DatabaseError
            if path is None or not is_damaged or self._total.read() == Usage():
                raise
            for suffix in ("", "-wal", "-shm"):
                part = path.with_name(path.name + suffix)
                if part.exists():
                    part.replace(part.with_name(f"{part.name}.damaged"))
            logger.warning("%s is damaged and is kept as %s.damaged", path, path.name)
            return _open_tables(path)


class _TotalFile:
    """Total usage of a run, beside its log, which may be damaged or emptied."""

    def __init__(self, log: Path | None) -> None:
        self.path = None if log is None else log.with_suffix(TOTAL_SUFFIX)

    def read(self) -> Usage:
        """Read the total; zero if the file is new or invalid."""
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
            # Overwritten in place by a single write; mode "w" would empty the file first.
            with self.path.open("r+b", buffering=0) as file:
                file.write(f"{json.dumps(total):<100}\n".encode())


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
    """Open a SQLite database that survives kills and may be used by several processes."""
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
        # Safe against a kill; a power failure may lose the last entries.
        database.execute("PRAGMA synchronous=NORMAL")
    return database


@contextmanager
def guarded(path: Path | None) -> Iterator[None]:
    """Convert errors of SQLite and of the disk to one that names the file."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise RunDirectoryError(
            f"cannot use {path}: {error}. Free disk space, set service_cache to another path, or "
            "remove a damaged file (its answers are then paid for again)."
        ) from error


class _Limit(NamedTuple):
    """A limit of a budget, under the name of its setting."""

    name: str
    limit: float


def _find_exceeded_limit(planned: Usage, budget: Budget) -> _Limit | None:
    """Return the first limit that would be exceeded, if any."""
    limits = (budget.max_requests, budget.max_tokens, budget.max_cost)
    for name, amount, limit in zip(Usage._fields, planned, limits, strict=True):
        if limit is not None and amount > limit:
            return _Limit(f"max_service_{name}", limit)
    return None


class ResponseCache:
    """Answers by model, place, request and sample number, in a file; thread- and process-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = connect(path)
        self._lock = threading.Lock()
        with guarded(path):
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT) "
                "WITHOUT ROWID"
            )

    @classmethod
    def open(cls, path: Path) -> ResponseCache:
        """Return the cache in a file, opened once per process; see `keeping_service_files`."""
        return _open_once(cls, path)

    def close(self) -> None:
        """Close the file; the cache can no longer be used."""
        with self._lock:
            self._database.close()

    def get(self, keys: Sequence[str]) -> list[ChatAnswer | None]:
        """Return the answer of each key; None without one."""
        answers = []
        with self._lock, guarded(self.path):
            for key in keys:
                row = self._database.execute(
                    "SELECT answer FROM answers WHERE key = ?", (key,)
                ).fetchone()
                answers.append(None if row is None else _read_stored_answer(row[0]))
        return answers

    def sum_usage(self, keys: Sequence[str]) -> ChatUsage:
        """Return the tokens of the requests with these answers, as far as known."""
        placeholders = ", ".join("?" * len(keys))
        with self._lock, guarded(self.path):
            rows = self._database.execute(
                f"SELECT answer FROM answers WHERE key IN ({placeholders})", list(keys)
            ).fetchall()
        usages = [ChatUsage(*json.loads(text).get("usage", (0, 0))) for (text,) in rows]
        return sum_usage([NOTHING_USED, *usages])

    def put(self, answers: Mapping[str, ChatAnswer], usage: ChatUsage = NOTHING_USED) -> None:
        """Store answers with their common usage; existing ones stay."""
        rows = []
        # With the first answer, so that a sum over all counts it once.
        row_usage = usage
        for key, answer in answers.items():
            rows.append((key, json.dumps(asdict(answer) | {"usage": row_usage})))
            row_usage = NOTHING_USED
        with self._lock, guarded(self.path):
            self._database.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", rows)


_OPEN_FILES: weakref.WeakValueDictionary[tuple[type, Path], Any] = weakref.WeakValueDictionary()
"""The open logs and caches of this process."""
_KEPT_FILES: dict[Path, list[UsageLog | ResponseCache]] = {}
"""Logs and caches opened within `keeping_service_files`, by its folder."""
ServiceFile = TypeVar("ServiceFile", UsageLog, ResponseCache)


@contextmanager
def keeping_service_files(folder: Path) -> Iterator[None]:
    """Keep logs and caches open within the block; close those in the folder, that of a run, after.

    A staged run opens a model after each job of fine-tuning, and each model would open the files
    again: SQLite releases a file only when every connection to it in the process is closed.
    """
    folder = folder.resolve()
    files: list[UsageLog | ResponseCache] = []
    _KEPT_FILES[folder] = files
    try:
        yield
    finally:
        del _KEPT_FILES[folder]
        for file in files:
            path = None if file.path is None else file.path.resolve()
            # A cache that several runs share is elsewhere, and may be in use by another run.
            if path is not None and path.is_relative_to(folder):
                # A run that is resumed in this process opens it again.
                _OPEN_FILES.pop((type(file), path), None)
                file.close()


def _open_once(cls: type[ServiceFile], path: Path) -> ServiceFile:
    key = (cls, path.resolve())
    file: ServiceFile | None = _OPEN_FILES.get(key)
    if file is None:
        file = cls(path)
        # Weakly, so that it is closed with its last model, unless a block keeps it.
        _OPEN_FILES[key] = file
        for kept_files in _KEPT_FILES.values():
            kept_files.append(file)
    return file


def cache_key(model: ChatModel, request: ChatRequest, sample: int) -> str:
    """Return the key of an answer in the cache."""
    fields = asdict(request)
    # Samples are stored one by one, and the request's name does not affect its answer.
    del fields["num_samples"], fields["first_sample"], fields["key"]
    identity = {"model": model.name, "place": model.place, "sample": sample, **fields}
    text = json.dumps(identity, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_stored_answer(text: str) -> ChatAnswer | None:
    try:
        stored = json.loads(text)
        logprobs = stored["token_logprobs"]
        if logprobs is not None:
            logprobs = tuple(float(logprob) for logprob in logprobs)
        # Earlier versions stored neither calls nor reasoning.
        calls = [ToolCall(name, dict(values)) for name, values in stored.get("calls", ())]
        return ChatAnswer(
            str(stored["text"]),
            FinishReason(stored["finish_reason"]),
            stored["refusal"],
            logprobs,
            stored.get("reasoning"),
            tuple(calls),
        )
    except (ValueError, LookupError, TypeError):
        # Written by another version.
        return None


SECONDS_OF_AN_ANSWER = 10.0
"""Attempts longer than this are shown on the progress bar."""
ANSWER_TOKENS = 1024
"""Tokens reserved for an answer without `max_tokens`."""
USAGE_FILE = "service_requests.sqlite"
CACHE_FILE = "service_answers.sqlite"


class RateLimiter:
    """Spaces attempts evenly in time."""

    def __init__(
        self,
        limits: LimitParameters,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.clock = clock
        self.sleep = sleep
        self._seconds_a_request = 60.0 / (limits.requests_per_minute or float("inf"))
        self._seconds_a_token = 60.0 / (limits.tokens_per_minute or float("inf"))
        self._next_by_requests = self._next_by_tokens = self._not_before = float("-inf")

    async def acquire(self, num_tokens: int) -> None:
        """Wait until an attempt of about `num_tokens` tokens may start."""
        while True:
            now = self.clock()
            start = max(now, self._next_by_requests, self._next_by_tokens, self._not_before)
            self._next_by_requests = start + self._seconds_a_request
            self._next_by_tokens = start + num_tokens * self._seconds_a_token
            if start > now:
                await self.sleep(start - now)
            # If the service has requested a pause meanwhile, attempts are spaced after it anew.
            if start >= self._not_before:
                return

    def correct(self, planned: int, used: int) -> None:
        """Replace the planned tokens of an attempt by the actual ones."""
        self._next_by_tokens += (used - planned) * self._seconds_a_token

    def pause(self, seconds: float) -> None:
        """Delay all further attempts for some seconds."""
        self._not_before = max(self._not_before, self.clock() + seconds)


class RetryingChatModel(ChatModel):
    """A chat model with retries, rate limits, a budget and a cache of responses.

    Parameters
    ----------
    label : str
        Its role in the run: "target", "judge".
    is_cache_of_run : bool
        Whether this run paid for everything in the cache.
    budget : Budget
        Of the whole usage log, which several models may share.
    clock, sleep, jitter : Callable
        Time and waiting, in seconds, and random numbers in [0, 1).

    Attributes
    ----------
    last_failure : str
        Message of the last failed request; empty without one.
    """

    def __init__(
        self,
        model: ChatModel,
        limits: LimitParameters,
        *,
        label: str = "chat",
        prices: PriceParameters | None = None,
        usage_log: UsageLog | None = None,
        budget: Budget = Budget(),
        cache: ResponseCache | None = None,
        is_cache_of_run: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        if budget.max_cost is not None and prices is None:
            raise ConfigurationError(
                f"max_service_cost={budget.max_cost:g} needs prices of {model.name!r}. Set "
                f"prices of the {label}: {{prompt: 0.15, completion: 0.6}}, per million tokens."
            )
        self.model = model
        # Under the same key in the cache as without retries.
        self.name = model.name
        self.place = model.place
        self.limits = limits
        self.label = self.account = label
        self.prices = prices
        self.usage_log = usage_log or UsageLog()
        self.budget = budget
        self.cache = cache if model.can_be_remembered else None
        self._remembers_run_alone = is_cache_of_run
        self._limiter = RateLimiter(limits, clock=clock, sleep=sleep)
        # It affects the start of attempts, not the answers.
        self._jitter = jitter or random.random
        self._slots = PerLoop(lambda: asyncio.Semaphore(limits.concurrency))
        self._num_open = 0
        self.last_failure = ""
        self._end: Exception | None = None

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> RetryingChatModel:
        kind = CHAT_MODELS.get(parameters.type_name)
        model = kind.load(parameters, scenario_dir=scenario_dir, device=device)
        return cls(model, parameters.limits, prices=parameters.prices)

    @property
    def use(self) -> ServiceUse:
        """Return the usage of the model so far, including the run before it was resumed."""
        return self.usage_log.use(self.account, self.name)

    def max_usage(self, request: ChatRequest) -> Usage:
        """Estimate an upper bound of the usage of one attempt."""
        prompt_tokens = estimate_usage(request.messages, ()).prompt_tokens
        answer_tokens = (request.max_tokens or ANSWER_TOKENS) * request.num_samples
        usage = ChatUsage(prompt_tokens, answer_tokens)
        return Usage(1, sum(usage), self.prices.cost(usage) if self.prices else 0.0)

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        self._num_open += 1
        try:
            parts = request.parts(self.model.samples_at_once)
            outcomes = await gather_all(map(self._answer_part, parts))
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                # All that the error concerned have ended. The user may have fixed its cause, as in
                # a notebook.
                self._end = None
        count_requests()
        return join_outcomes(outcomes)

    async def close(self) -> None:
        await self.model.close()

    async def _answer_part(self, request: ChatRequest) -> ChatOutcome:
        try:
            return await self._cached_or_requested(request)
        except NipAstraError as error:
            # A wrong key, an exhausted budget or a full disk: the others would fail alike.
            self._end = error
            raise

    async def _cached_or_requested(self, request: ChatRequest) -> ChatOutcome:
        """Return responses from the cache if it has all of them; else request and store them."""
        if self.cache is None:
            return self._split(await self._request_with_retries(request))
        keys = [cache_key(self.model, request, number) for number in request.sample_numbers]
        cached: dict[str, ChatAnswer] = {}
        for key, answer in zip(keys, self.cache.get(keys), strict=True):
            # Other versions stored answers without a word, and of any length.
            if answer is not None and self._is_reply(answer, request):
                cached[key] = answer
        if len(cached) == len(keys):
            self.usage_log.count_cached(self.account, len(keys))
            # What another run paid for is no usage of this one.
            before = self.cache.sum_usage(keys) if self._remembers_run_alone else NOTHING_USED
            answers = tuple(cached[key] for key in keys)
            return self._split(ChatOutcome(answers, is_cached=True, usage_before=before))
        outcome = self._take_timeout(keys, cached)
        if outcome is None:
            outcome = await self._request_with_retries(request)
            self._keep_timeout(keys, outcome)
        new_answers = {}
        samples: list[ChatAnswer | ChatFailure] = []
        for key, sample in zip(keys, outcome.samples, strict=True):
            if isinstance(sample, ChatAnswer) and self._is_reply(sample, request):
                new_answers[key] = sample
            # A stored answer stays, so that a resumed run reads what the first one did.
            samples.append(cached.get(key, sample))
        self.cache.put(new_answers, outcome.usage)
        return self._split(replace(outcome, samples=tuple(samples)))

    def _keep_timeout(self, keys: Sequence[str], outcome: ChatOutcome) -> None:
        """Keep failures by a time limit for a resumed run; the cache keeps answers."""
        failures = [
            [str(sample.reason), sample.message] if isinstance(sample, ChatFailure) else None
            for sample in outcome.samples
        ]
        is_late = any(
            isinstance(sample, ChatFailure) and sample.reason is FailureReason.TIMEOUT
            for sample in outcome.samples
        )
        outcomes = current_outcomes()
        if is_late and self._remembers_run_alone and outcomes is not None:
            key = key_of_call("chat", [self.account, *keys])
            outcomes.keep(KeptOutcome(key, {"failures": failures, "usage": list(outcome.usage)}))

    def _take_timeout(
        self, keys: Sequence[str], cached: Mapping[str, ChatAnswer]
    ) -> ChatOutcome | None:
        """Return the outcome of a request that exceeded its time limit before the run's resumption.

        `cached` are the samples that were answered then.
        """
        outcomes = current_outcomes()
        if not self._remembers_run_alone or outcomes is None:
            return None
        kept = outcomes.take(key_of_call("chat", [self.account, *keys]))
        if kept is None:
            return None
        samples: list[ChatAnswer | ChatFailure] = []
        for key, failure in zip(keys, kept.value["failures"], strict=True):
            if failure is not None:
                reason, message = failure
                samples.append(ChatFailure(FailureReason(reason), message))
            elif key in cached:
                samples.append(cached[key])
            else:
                # An answer that no cache keeps, such as one that was cut.
                return None
        return ChatOutcome(
            tuple(samples), is_cached=True, usage_before=ChatUsage(*kept.value["usage"])
        )

    def _split(self, outcome: ChatOutcome) -> ChatOutcome:
        """Take the reasoning out of the texts of answers; the cache has them as they came."""
        markers = self.model.reasoning_markers
        samples = tuple(split_answer(sample, markers) for sample in outcome.samples)
        return replace(outcome, samples=samples)

    def _is_reply(self, answer: ChatAnswer, request: ChatRequest) -> bool:
        """Return whether an answer is a reply to the request, which is not requested again."""
        is_missing = split_answer(answer, self.model.reasoning_markers).is_missing
        is_too_long = reject_long_answer(answer, request) is not answer
        return not is_missing and not is_too_long

    async def _request_with_retries(self, request: ChatRequest) -> ChatOutcome:
        num_attempts = 0
        seconds_spent = 0.0
        usage = NOTHING_USED
        is_estimated = False
        samples: list[ChatAnswer | ChatFailure] = []
        while True:
            seconds_left = self.limits.seconds_per_request - seconds_spent
            outcome, seconds = await self._attempt(request, seconds_left)
            num_attempts += 1
            seconds_spent += seconds
            usage = sum_usage([usage, outcome.usage])
            is_estimated |= outcome.is_usage_estimated
            # A retry requests all samples again; those that had an answer keep it.
            samples = [
                earlier if isinstance(earlier, ChatAnswer) else sample
                for earlier, sample in zip(samples or outcome.samples, outcome.samples, strict=True)
            ]
            failures = [sample for sample in samples if isinstance(sample, ChatFailure)]
            pause = self._pause_before(num_attempts, failures, seconds_spent)
            if pause is None:
                break
            if pause > 0:
                reason = f"{failures[0].reason}, {failures[0].message}"
                with waiting_for(f"{self.label}: {reason}; next attempt in {pause:.0f} s"):
                    await self._limiter.sleep(pause)
                seconds_spent += pause
        final_samples = tuple(
            self._describe_failure(sample, num_attempts)
            if isinstance(sample, ChatFailure)
            else sample
            for sample in samples
        )
        return ChatOutcome(final_samples, usage, is_usage_estimated=is_estimated)

    def _describe_failure(self, failure: ChatFailure, num_attempts: int) -> ChatFailure:
        """Return the failure, with its number of attempts in the message."""
        message = failure.message
        if failure.retry_after > self.limits.max_retry_after:
            message += (
                f"; Retry-After of {failure.retry_after:g} s is more than max_retry_after "
                f"({self.limits.max_retry_after:g})"
            )
        if num_attempts > 1:
            message += f" ({counted(num_attempts, 'attempt')})"
        self.last_failure = message
        return replace(failure, message=message)

    def _pause_before(
        self, attempt: int, failures: Sequence[ChatFailure], spent: float
    ) -> float | None:
        """Return the seconds to wait before a retry; None for no retry."""
        passing = [failure for failure in failures if failure.reason.may_pass]
        if not passing:
            return None
        retry_after = max(failure.retry_after for failure in passing)
        pause = self.limits.pause_before(
            attempt, retry_after=retry_after, spent=spent, jitter=self._jitter
        )
        if pause is None:
            return None
        reasons = {failure.reason for failure in passing}
        if FailureReason.RATE_LIMITED in reasons:
            # The limit is the account's, so it holds for every request.
            self._limiter.pause(retry_after)
        if reasons == {FailureReason.MALFORMED}:
            # The service works; another sample may be well formed.
            return 0.0
        return pause

    async def _attempt(
        self, request: ChatRequest, seconds_left: float
    ) -> tuple[ChatOutcome, float]:
        """Make one attempt, within the limits, and measure its duration."""
        max_usage = self.max_usage(request)
        # The budget is reserved last: a request that waits for the rate limit holds no part of it.
        async with self._slots.get():
            self._raise_if_ended()
            await self._limiter.acquire(max_usage.tokens)
            self._raise_if_ended()
            await self.usage_log.reserve(max_usage, self.budget)
            record: RequestRecord | None = None
            started = self._limiter.clock()
            try:
                outcome = await self._request_in_time(request, seconds_left)
                samples = tuple(reject_long_answer(sample, request) for sample in outcome.samples)
                outcome = replace(outcome, samples=samples)
                seconds = self._limiter.clock() - started
                record = self._make_record(outcome, seconds)
            finally:
                self.usage_log.release(max_usage, record)
            self._limiter.correct(max_usage.tokens, sum(outcome.usage))
            return outcome, seconds

    def _raise_if_ended(self) -> None:
        """Raise the error that ended a concurrent request."""
        if self._end is not None:
            raise self._end

    async def _request_in_time(self, request: ChatRequest, seconds_left: float) -> ChatOutcome:
        """Return the outcome of a request, or failures if the time is over."""
        timeout = min(self.limits.attempt_timeout, seconds_left)
        status = f"no answer for {SECONDS_OF_AN_ANSWER:.0f} s, at most {timeout:.0f} s"
        try:
            async with asyncio.timeout(timeout):
                with waiting_for(f"{self.label}: {status}", after=SECONDS_OF_AN_ANSWER):
                    return await self.model.answer(request)
        except TimeoutError:
            failure = ChatFailure(FailureReason.TIMEOUT, f"no answer in {timeout:.3g} s")
            # The prompt has to be paid for even without an answer.
            return ChatOutcome(
                (failure,) * request.num_samples,
                estimate_usage(request.messages, ()),
                is_usage_estimated=True,
            )

    def _make_record(self, outcome: ChatOutcome, seconds: float) -> RequestRecord:
        failures = [sample for sample in outcome.samples if isinstance(sample, ChatFailure)]
        answers = [sample for sample in outcome.samples if isinstance(sample, ChatAnswer)]
        return RequestRecord(
            label=self.account,
            model=self.name,
            seconds=seconds,
            num_samples=len(answers),
            outcome=str(failures[0].reason) if failures else "answered",
            num_refusals=sum(answer.is_refused for answer in answers),
            prompt_tokens=outcome.usage.prompt_tokens,
            completion_tokens=outcome.usage.completion_tokens,
            is_estimated=outcome.is_usage_estimated,
            cost=self.prices.cost(outcome.usage) if self.prices else None,
        )


Sample = TypeVar("Sample", ChatAnswer, ChatFailure, ChatAnswer | ChatFailure)


def split_answer(sample: Sample, markers: Sequence[str] | None) -> Sample:
    """Return an answer whose text is without the reasoning between markers at its beginning.

    The opening marker may be missing, since a chat template may have it in the prompt.

    Parameters
    ----------
    markers : sequence of str or None
        See `ChatModel.Parameters.reasoning_markers`.
    """
    has_no_markers = markers is not None and not markers
    if isinstance(sample, ChatFailure) or has_no_markers:
        return sample
    thought = thought_between(markers) or THOUGHT_MARKERS[0]
    # A closing marker before any opening one ends a thought that the prompt opened.
    before_opening = sample.text.partition(thought.opening)[0]
    begins_in_thought = thought.closing in before_opening
    if not begins_in_thought and not sample.text.lstrip().startswith(thought.opening):
        return sample
    parsed = MessageFormat(thought).parse(sample.text, begins_in_thought=begins_in_thought)
    reasonings = [part for part in (sample.reasoning, parsed.reasoning) if part]
    return replace(
        sample,
        text=parsed.text,
        reasoning="\n\n".join(reasonings) or None,
        is_unfinished=parsed.is_unfinished,
    )


def open_chat_model(
    parameters: ChatModel.Parameters,
    settings: ExperimentSettings | None = None,
    *,
    scenario_dir: Path | None = None,
    label: str = "chat",
) -> RetryingChatModel:
    """Build a chat model with retries, rate limits, a budget and a cache.

    Parameters
    ----------
    settings : ExperimentSettings, optional
        Budget and path of the cache: `service_cache` or the run directory; no cache without them.
    label : str
        Its role in the run: "target", "judge".
    """
    settings = settings or ExperimentSettings()
    kind = CHAT_MODELS.get(parameters.type_name)
    device = resolve_device(settings.device)
    model = kind.load(parameters, scenario_dir=scenario_dir, device=device)
    model.num_threads = settings.num_threads
    model.reasoning_markers = parameters.reasoning_markers
    return with_retries(model, parameters.limits, parameters.prices, settings, label=label)


def with_retries(
    model: ChatModel,
    limits: LimitParameters,
    prices: PriceParameters | None,
    settings: ExperimentSettings,
    *,
    label: str,
) -> RetryingChatModel:
    """Add retries, rate limits, budget and cache to a model; see `open_chat_model`."""
    run = settings.run_directory
    log_path = None if run is None else run.path / USAGE_FILE
    cache_path = None if run is None else run.path / CACHE_FILE
    if settings.service_cache is not None:
        cache_path = Path(settings.service_cache).expanduser()
    budget = Budget(
        max_requests=settings.max_service_requests,
        max_tokens=settings.max_service_tokens,
        max_cost=settings.max_service_cost,
    )
    return RetryingChatModel(
        model,
        limits,
        label=label,
        prices=prices,
        usage_log=UsageLog.open(log_path),
        budget=budget,
        cache=None if cache_path is None else ResponseCache.open(cache_path),
        is_cache_of_run=settings.service_cache is None,
    )


def resume_usage(
    services: Mapping[str, RetryingChatModel], purpose: str = "", *, is_new: bool = False
) -> None:
    """Count usage under each model's role and a purpose from now on, with `is_new` from zero."""
    for name, model in services.items():
        model.account = f"{name}, {purpose}" if purpose else name
        if is_new:
            model.usage_log.archive(model.account)

"""Retries, rate limits, a budget and stored responses around a chat model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nip_astra.errors import BudgetExhaustedError, ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
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
    LimitParameters,
    PriceParameters,
    estimate_usage,
)
from nip_astra.language_models.services.run_sync import gather_all
from nip_astra.language_models.services.usage import (
    Budget,
    RequestRecord,
    ResponseCache,
    ServiceUse,
    Usage,
    UsageLog,
    key_of,
)
from nip_astra.progress import waiting_for
from nip_astra.utils.devices import resolve_device

SECONDS_OF_AN_ANSWER = 10.0
"""Longer attempts are shown on the progress bar."""
ANSWER_TOKENS = 1024
"""Tokens reserved for an answer without `max_tokens`."""
USAGE_FILE = "service_requests.sqlite"
CACHE_FILE = "service_answers.sqlite"


class RateLimiter:
    """Spreads attempts evenly over time."""

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
        now = self.clock()
        start = max(now, self._next_by_requests, self._next_by_tokens, self._not_before)
        self._next_by_requests = start + self._seconds_a_request
        self._next_by_tokens = start + num_tokens * self._seconds_a_token
        while start > now:
            await self.sleep(start - now)
            # The service may have requested a pause meanwhile.
            now, start = max(start, self.clock()), max(start, self._not_before)

    def correct(self, planned: int, taken: int) -> None:
        """Replace the planned tokens of an attempt by those it took."""
        self._next_by_tokens += (taken - planned) * self._seconds_a_token

    def pause(self, seconds: float) -> None:
        """Start no attempt for some time."""
        self._not_before = max(self._not_before, self.clock() + seconds)


class RetryingChatModel(ChatModel):
    """A chat model with retries, rate limits, a budget and a cache of responses.

    Parameters
    ----------
    label : str
        Its role in the run: "target", "judge".
    cache : ResponseCache, optional
        Without one, no response is stored.
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
        budget: Budget = Budget(),  # noqa: B008 - frozen
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
        self.name, self.place = model.name, model.place
        self.limits = limits
        self.label = self.account = label
        self.prices = prices
        self.usage_log = usage_log or UsageLog()
        self.budget = budget
        self.cache = cache if model.can_be_remembered else None
        self._remembers_run_alone = is_cache_of_run
        self._limiter = RateLimiter(limits, clock=clock, sleep=sleep)
        # It changes when an attempt starts, and no answer.
        self._jitter = jitter or random.random
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_open = 0
        self.last_failure = ""
        self._end: Exception | None = None

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> RetryingChatModel:
        model = _load(parameters, scenario_dir, device)
        return cls(model, parameters.limits, prices=parameters.prices)

    @property
    def use(self) -> ServiceUse:
        """Usage of the model so far, including the run before it was resumed."""
        return self.usage_log.use(self.account, self.name)

    def max_usage(self, request: ChatRequest) -> Usage:
        """Estimated upper bound of the usage of one attempt."""
        read = estimate_usage(request.messages, ()).prompt_tokens
        said = (request.max_tokens or ANSWER_TOKENS) * request.num_samples
        cost = self.prices.cost(ChatUsage(read, said)) if self.prices else 0.0
        return Usage(1, read + said, cost)

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        self._num_open += 1
        try:
            parts = request.parts(self.model.samples_at_once)
            outcomes = await gather_all(map(self._answer_part, parts))
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._end = None
        return ChatOutcome(
            tuple(sample for outcome in outcomes for sample in outcome.samples),
            _sum_usage(outcome.usage for outcome in outcomes),
            is_cached=all(outcome.is_cached for outcome in outcomes),
            is_usage_estimated=any(outcome.is_usage_estimated for outcome in outcomes),
            usage_before=_sum_usage(outcome.usage_before for outcome in outcomes),
        )

    async def close(self) -> None:
        await self.model.close()

    async def _answer_part(self, request: ChatRequest) -> ChatOutcome:
        """Take responses from the cache if it has all of them; else request and store them."""
        if self.cache is None:
            return await self._request_with_retries(request)
        keys = [key_of(self.model, request, number) for number in request.sample_numbers]
        known = self.cache.get(keys)
        if all(answer is not None for answer in known):
            self.usage_log.count_cached(self.account, len(known))
            answers = tuple(answer for answer in known if answer is not None)
            before = self.cache.usage_of(keys) if self._remembers_run_alone else NOTHING_USED
            return ChatOutcome(answers, is_cached=True, usage_before=before)
        outcome = await self._request_with_retries(request)
        pairs = zip(keys, outcome.samples, strict=True)
        answered = {key: one for key, one in pairs if isinstance(one, ChatAnswer)}
        self.cache.put(answered, outcome.usage)
        samples = zip(known, outcome.samples, strict=True)
        return replace(outcome, samples=tuple(old or new for old, new in samples))

    async def _request_with_retries(self, request: ChatRequest) -> ChatOutcome:
        samples: list[ChatAnswer | ChatFailure | None] = [None] * request.num_samples
        usage, is_estimated = NOTHING_USED, False
        spent, attempt = 0.0, 0
        while True:
            outcome, seconds = await self._attempt(request, self.limits.seconds_per_request - spent)
            attempt, spent = attempt + 1, spent + seconds
            usage = _sum_usage([usage, outcome.usage])
            is_estimated |= outcome.is_usage_estimated
            samples = [
                old if isinstance(old, ChatAnswer) else new
                for old, new in zip(samples, outcome.samples, strict=True)
            ]
            failures = [one for one in samples if isinstance(one, ChatFailure)]
            pause = self._pause_before(attempt, failures, spent)
            if pause is None:
                break
            if pause > 0:
                last = f"{failures[0].reason}, {failures[0].message}"
                with waiting_for(f"{self.label}: {last}; next attempt in {pause:.0f} s"):
                    await self._limiter.sleep(pause)
                spent += pause
        final = [
            self._with_attempts(one, attempt) if isinstance(one, ChatFailure) else one
            for one in samples
            if one is not None
        ]
        return ChatOutcome(tuple(final), usage, is_usage_estimated=is_estimated)

    def _with_attempts(self, failure: ChatFailure, num_attempts: int) -> ChatFailure:
        """The failure, with its number of attempts in the message."""
        message = failure.message
        if failure.retry_after > self.limits.max_retry_after:
            message += (
                f"; Retry-After of {failure.retry_after:g} s is more than max_retry_after "
                f"({self.limits.max_retry_after:g})"
            )
        if num_attempts > 1:
            message += f" ({num_attempts} attempts)"
        self.last_failure = message
        return replace(failure, message=message)

    def _pause_before(
        self, attempt: int, failures: Sequence[ChatFailure], spent: float
    ) -> float | None:
        """Seconds before the next attempt; None for no further attempt."""
        passing = [failure for failure in failures if failure.reason.may_pass]
        if not passing:
            return None
        requested = max(failure.retry_after for failure in passing)
        pause = self.limits.pause_before(
            attempt, retry_after=requested, spent=spent, jitter=self._jitter
        )
        if pause is None:
            return None
        if any(failure.reason is FailureReason.RATE_LIMITED for failure in passing):
            # The limit is the account's, so it holds for every request.
            self._limiter.pause(requested)
        # A malformed answer needs no pause.
        return 0.0 if all(one.reason is FailureReason.MALFORMED for one in passing) else pause

    async def _attempt(
        self, request: ChatRequest, seconds_left: float
    ) -> tuple[ChatOutcome, float]:
        """Make one attempt, within the limits, and measure its seconds."""
        most = self.max_usage(request)
        async with self._free_slots():
            self._raise_if_ended()
            await self._limiter.acquire(most.tokens)
            self._raise_if_ended()
            record: RequestRecord | None = None
            try:
                await self.usage_log.reserve(most, self.budget)
            except BudgetExhaustedError as error:
                self._end = error
                raise
            started = self._limiter.clock()
            try:
                outcome = await self._request_in_time(request, seconds_left)
                seconds = self._limiter.clock() - started
                record = self._record(outcome, seconds)
            except (ConfigurationError, BudgetExhaustedError) as error:
                self._end = error
                raise
            finally:
                self.usage_log.release(most, record)
            self._limiter.correct(most.tokens, sum(outcome.usage))
            return outcome, seconds

    def _raise_if_ended(self) -> None:
        """Raise the error that ended a concurrent request: the others would fail alike."""
        if self._end is not None:
            raise self._end

    async def _request_in_time(self, request: ChatRequest, seconds_left: float) -> ChatOutcome:
        limit = min(self.limits.attempt_timeout, seconds_left)
        what = f"{self.label}: no answer for {SECONDS_OF_AN_ANSWER:.0f} s, at most {limit:.0f} s"
        try:
            async with asyncio.timeout(limit):
                with waiting_for(what, after=SECONDS_OF_AN_ANSWER):
                    return await self.model.answer(request)
        except TimeoutError:
            failure = ChatFailure(FailureReason.TIMEOUT, f"no answer in {limit:.3g} s")
            # The prompt has to be paid for even without an answer.
            return ChatOutcome(
                (failure,) * request.num_samples,
                estimate_usage(request.messages, ()),
                is_usage_estimated=True,
            )

    def _free_slots(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._loop is not loop:
            self._slots, self._loop = asyncio.Semaphore(self.limits.concurrency), loop
        return self._slots

    def _record(self, outcome: ChatOutcome, seconds: float) -> RequestRecord:
        failures = [one for one in outcome.samples if isinstance(one, ChatFailure)]
        answers = [one for one in outcome.samples if isinstance(one, ChatAnswer)]
        refused = sum(one.is_refused for one in answers)
        refused += sum(failure.reason is FailureReason.REFUSED for failure in failures)
        return RequestRecord(
            label=self.account,
            model=self.name,
            seconds=seconds,
            num_samples=len(answers),
            outcome=str(failures[0].reason) if failures else "answered",
            num_refusals=refused,
            prompt_tokens=outcome.usage.prompt_tokens,
            completion_tokens=outcome.usage.completion_tokens,
            is_estimated=outcome.is_usage_estimated,
            cost=self.prices.cost(outcome.usage) if self.prices else None,
        )


def open_chat_model(
    parameters: ChatModel.Parameters,
    settings: ExperimentSettings | None = None,
    *,
    scenario_dir: Path | None = None,
    label: str = "chat",
) -> RetryingChatModel:
    """The chat model of some parameters, with retries, rate limits, a budget and a cache.

    Parameters
    ----------
    settings : ExperimentSettings, optional
        Budget and place of the cache: `service_cache` or the run directory; no cache without them.
    label : str
        Its role in the run: "target", "judge".

    Raises
    ------
    ConfigurationError
        If a parameter is invalid, or a budget of money has no prices.
    """
    settings = settings or ExperimentSettings()
    model = _load(parameters, scenario_dir, resolve_device(settings.device))
    model.num_threads = settings.num_threads
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
    shared = settings.service_cache
    if shared is not None:
        cache_path: Path | None = Path(shared).expanduser()
    else:
        cache_path = None if run is None else run.path / CACHE_FILE
    return RetryingChatModel(
        model,
        limits,
        label=label,
        prices=prices,
        usage_log=UsageLog.of(None if run is None else run.path / USAGE_FILE),
        budget=Budget(
            settings.max_service_requests, settings.max_service_tokens, settings.max_service_cost
        ),
        cache=None if cache_path is None else ResponseCache(cache_path),
        is_cache_of_run=shared is None,
    )


def resume_usage(
    services: Mapping[str, RetryingChatModel], purpose: str = "", *, is_new: bool = False
) -> None:
    """Count the usage of each model under its role and a purpose from now on.

    Parameters
    ----------
    services : Mapping
        Models by role: "target", "judge".
    purpose : str
        For instance "evaluation test", if a usage log serves several.
    is_new : bool
        Whether to start at zero, leaving earlier usage to the budget only.
    """
    for name, model in services.items():
        model.account = f"{name}, {purpose}" if purpose else name
        if is_new:
            model.usage_log.set_aside(model.account)


def _load(
    parameters: ChatModel.Parameters, scenario_dir: Path | None, device: torch.device
) -> ChatModel:
    cls = CHAT_MODELS.get(parameters.type_name)
    return cls.load(parameters, scenario_dir=scenario_dir, device=device)


def _sum_usage(usages: Iterable[ChatUsage]) -> ChatUsage:
    found = list(usages)
    return ChatUsage(sum(u.prompt_tokens for u in found), sum(u.completion_tokens for u in found))

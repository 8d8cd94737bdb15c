"""Patience, measure and memory around a chat model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

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
)
from nip_astra.language_models.services.limits import LimitParameters, Pace, PriceParameters
from nip_astra.language_models.services.memory import AnswerMemory, key_of
from nip_astra.language_models.services.texts import guess_usage
from nip_astra.language_models.services.usage import (
    Budget,
    RequestLedger,
    RequestRecord,
    ServiceUse,
    Spent,
)
from nip_astra.progress import waiting_for
from nip_astra.utils.devices import resolve_device

T = TypeVar("T")

SECONDS_OF_AN_ANSWER = 10.0
"""An attempt that takes longer is shown on the progress bar."""
ANSWER_TOKENS = 1024
"""Tokens set aside for an answer whose length is left to the service."""
LEDGER_FILE = "service_requests.sqlite"
MEMORY_FILE = "service_answers.sqlite"


class PatientChatModel(ChatModel):
    """A chat model that is asked in measure, again where that may help, and never twice.

    Parameters
    ----------
    label : str
        Who it is in the run, for the ledger: "target", "judge".
    memory : AnswerMemory, optional
        Without one, nothing is remembered.
    remembers_run_alone : bool
        Whether all that the memory holds was paid for by this run.
    budget : Budget
        Of the whole ledger, which several models may share.
    clock, pause, jitter : Callable
        Tell the time and wait, in seconds, and draw a number in [0, 1).

    Attributes
    ----------
    last_failure : str
        Why the last request that failed did so; empty if none has.
    """

    def __init__(
        self,
        model: ChatModel,
        limits: LimitParameters,
        *,
        label: str = "chat",
        prices: PriceParameters | None = None,
        ledger: RequestLedger | None = None,
        budget: Budget = Budget(),  # noqa: B008 - frozen
        memory: AnswerMemory | None = None,
        remembers_run_alone: bool = False,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        if budget.max_cost is not None and prices is None:
            raise ConfigurationError(
                f"the setting max_service_cost is {budget.max_cost:g}, but nothing says what "
                f"{model.name!r} costs. Give the {label}'s chat model prices, for instance "
                "prices: {prompt: 0.15, completion: 0.6} for a million tokens each."
            )
        self.model = model
        self.name, self.place = model.name, model.place
        self.limits = limits
        self.label = self.account = label
        self.prices = prices
        self.ledger = ledger or RequestLedger()
        self.budget = budget
        self.memory = memory if model.can_be_remembered else None
        self._remembers_run_alone = remembers_run_alone
        self._pace = Pace(limits, clock=clock, pause=pause)
        # Only when an attempt begins depends on it, and nothing that is said.
        self._jitter = jitter or random.random
        self._places: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_asking = 0
        self.last_failure = ""
        self._end: Exception | None = None

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> PatientChatModel:
        model = _load(parameters, scenario_dir, device)
        return cls(model, parameters.limits, prices=parameters.prices)

    @property
    def use(self) -> ServiceUse:
        """What was asked of the model so far, earlier parts of the run included."""
        return self.ledger.use(self.account, self.name)

    def most_of(self, request: ChatRequest) -> Spent:
        """The most that one attempt may take, about."""
        read = guess_usage(request.messages, ()).prompt_tokens
        said = (request.max_tokens or ANSWER_TOKENS) * request.num_samples
        cost = self.prices.cost(ChatUsage(read, said)) if self.prices else 0.0
        return Spent(1, read + said, cost)

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        self._num_asking += 1
        try:
            parts = request.parts(self.model.samples_at_once)
            outcomes = await gather_all(map(self._answer_part, parts))
        finally:
            self._num_asking -= 1
            if not self._num_asking:
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
        """Remember what can be remembered, and ask for the rest."""
        if self.memory is None:
            return await self._ask_patiently(request)
        keys = [key_of(self.model, request, number) for number in request.sample_numbers]
        known = self.memory.recall(keys)
        if all(answer is not None for answer in known):
            self.ledger.note_remembered(self.account, len(known))
            answers = tuple(answer for answer in known if answer is not None)
            before = self.memory.usage_of(keys) if self._remembers_run_alone else NOTHING_USED
            return ChatOutcome(answers, is_cached=True, usage_before=before)
        outcome = await self._ask_patiently(request)
        pairs = zip(keys, outcome.samples, strict=True)
        answered = {key: one for key, one in pairs if isinstance(one, ChatAnswer)}
        self.memory.remember(answered, outcome.usage)
        samples = zip(known, outcome.samples, strict=True)
        return replace(outcome, samples=tuple(old or new for old, new in samples))

    async def _ask_patiently(self, request: ChatRequest) -> ChatOutcome:
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
                    await self._pace.pause(pause)
                spent += pause
        told = [
            self._completed(one, attempt) if isinstance(one, ChatFailure) else one
            for one in samples
            if one is not None
        ]
        return ChatOutcome(tuple(told), usage, is_usage_estimated=is_estimated)

    def _completed(self, failure: ChatFailure, num_attempts: int) -> ChatFailure:
        """The failure of a request, with what became of its attempts."""
        message = failure.message
        if failure.retry_after > self.limits.max_retry_after:
            message += (
                f"; it asks for a pause of {failure.retry_after:g} s, more than max_retry_after "
                f"({self.limits.max_retry_after:g})"
            )
        if num_attempts > 1:
            message += f" ({num_attempts} attempts)"
        self.last_failure = message
        return replace(failure, message=message)

    def _pause_before(
        self, attempt: int, failures: Sequence[ChatFailure], spent: float
    ) -> float | None:
        """Seconds before the next attempt; None if there is to be none."""
        passing = [failure for failure in failures if failure.reason.may_pass]
        if not passing:
            return None
        asked = max(failure.retry_after for failure in passing)
        pause = self.limits.pause_before(
            attempt, retry_after=asked, spent=spent, jitter=self._jitter
        )
        if pause is None:
            return None
        if any(failure.reason is FailureReason.RATE_LIMITED for failure in passing):
            # The limit is the account's: nobody else would fare better meanwhile.
            self._pace.hold(asked)
        # Another sample may be well-formed at once.
        return 0.0 if all(one.reason is FailureReason.MALFORMED for one in passing) else pause

    async def _attempt(
        self, request: ChatRequest, seconds_left: float
    ) -> tuple[ChatOutcome, float]:
        """Ask once, when it is this request's turn, and measure the seconds that it takes."""
        most = self.most_of(request)
        async with self._free_places():
            self._raise_if_ended()
            await self._pace.take_turn(most.tokens)
            self._raise_if_ended()
            record: RequestRecord | None = None
            try:
                await self.ledger.reserve(most, self.budget)
            except BudgetExhaustedError as error:
                self._end = error
                raise
            started = self._pace.clock()
            try:
                outcome = await self._ask_in_time(request, seconds_left)
                seconds = self._pace.clock() - started
                record = self._record(outcome, seconds)
            except (ConfigurationError, BudgetExhaustedError) as error:
                self._end = error
                raise
            finally:
                self.ledger.release(most, record)
            self._pace.correct(most.tokens, sum(outcome.usage))
            return outcome, seconds

    def _raise_if_ended(self) -> None:
        """Raise what ended a request of those who ask together: the others would fare alike."""
        if self._end is not None:
            raise self._end

    async def _ask_in_time(self, request: ChatRequest, seconds_left: float) -> ChatOutcome:
        limit = min(self.limits.attempt_timeout, seconds_left)
        what = f"{self.label}: no answer for {SECONDS_OF_AN_ANSWER:.0f} s, at most {limit:.0f} s"
        try:
            async with asyncio.timeout(limit):
                with waiting_for(what, after=SECONDS_OF_AN_ANSWER):
                    return await self.model.answer(request)
        except TimeoutError:
            failure = ChatFailure(FailureReason.TIMEOUT, f"no answer in {limit:.3g} s")
            # What was read has to be paid for, whatever became of the answer.
            return ChatOutcome(
                (failure,) * request.num_samples,
                guess_usage(request.messages, ()),
                is_usage_estimated=True,
            )

    def _free_places(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._loop is not loop:
            self._places, self._loop = asyncio.Semaphore(self.limits.concurrency), loop
        return self._places

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
) -> PatientChatModel:
    """The chat model that parameters describe, with patience, limits, budget and memory around it.

    Parameters
    ----------
    settings : ExperimentSettings, optional
        Say the budget, and where answers are remembered: in `service_cache`, or in the run
        directory; without either, nowhere.
    label : str
        Who it is in the run, for messages and counts: "target", "judge".

    Raises
    ------
    ConfigurationError
        When the parameters cannot be meant, or a budget of money has no prices.
    """
    settings = settings or ExperimentSettings()
    model = _load(parameters, scenario_dir, resolve_device(settings.device))
    model.num_threads = settings.num_threads
    return make_patient(model, parameters.limits, parameters.prices, settings, label=label)


def make_patient(
    model: ChatModel,
    limits: LimitParameters,
    prices: PriceParameters | None,
    settings: ExperimentSettings,
    *,
    label: str,
) -> PatientChatModel:
    """Put patience, limits, budget and memory around a model; see `open_chat_model`."""
    run = settings.run_directory
    remembered = settings.service_cache
    if remembered is not None:
        memory_path: Path | None = Path(remembered).expanduser()
    else:
        memory_path = None if run is None else run.path / MEMORY_FILE
    return PatientChatModel(
        model,
        limits,
        label=label,
        prices=prices,
        ledger=RequestLedger.of(None if run is None else run.path / LEDGER_FILE),
        budget=Budget(
            settings.max_service_requests, settings.max_service_tokens, settings.max_service_cost
        ),
        memory=None if memory_path is None else AnswerMemory(memory_path),
        remembers_run_alone=remembered is None,
    )


def open_accounts(
    services: Mapping[str, PatientChatModel], purpose: str = "", *, is_new: bool = False
) -> None:
    """Count what each model takes under its name from now on.

    Parameters
    ----------
    services : Mapping
        By who they are: "target", "judge".
    purpose : str
        What they are asked for, where a ledger serves several: "evaluation test".
    is_new : bool
        Whether what was counted so before is of something else.
    """
    for name, model in services.items():
        model.account = f"{name}, {purpose}" if purpose else name
        if is_new:
            model.ledger.set_aside(model.account)


async def gather_all(tasks: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all tasks; where one fails, the others end first, then its error is raised."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    found: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


def _load(
    parameters: ChatModel.Parameters, scenario_dir: Path | None, device: torch.device
) -> ChatModel:
    cls = CHAT_MODELS.get(parameters.type_name)
    return cls.load(parameters, scenario_dir=scenario_dir, device=device)


def _sum_usage(usages: Iterable[ChatUsage]) -> ChatUsage:
    found = list(usages)
    return ChatUsage(sum(u.prompt_tokens for u in found), sum(u.completion_tokens for u in found))

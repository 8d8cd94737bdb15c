"""Patience, limits, budget and memory around a chat model; nothing sleeps."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Mapping
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import BudgetExhaustedError, ConfigurationError, RunDirectoryError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat import (
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    ChatUsage,
    FailureReason,
    FinishReason,
    LimitParameters,
    PriceParameters,
    complete_all,
)
from nip_astra.language_models.services.chat_models.scripted import ScriptedChatModel
from nip_astra.language_models.services.retrying import (
    Budget,
    RateLimiter,
    ResponseCache,
    RetryingChatModel,
    UsageLog,
    cache_key,
    open_chat_model,
)
from nip_astra.rollouts.messages import ToolCall
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.text_games import FakeChatModel
from tests.language_models.services.requests import ask, failure, saying, texts


class Clock:
    """Time that passes only while a task waits; simultaneous waits pass together."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        end = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, end)


Reaction = str | ChatAnswer | ChatFailure | Exception


def model_of(reactions: Iterable[Reaction] | Callable[[int], Reaction]) -> FakeChatModel:
    """A model that reacts in turn, or by a function of the request's number."""
    in_turn = map(reactions, count()) if callable(reactions) else iter(reactions)

    def script(request: ChatRequest, sample: int) -> str | ChatAnswer | ChatFailure:
        reaction = next(in_turn)
        if isinstance(reaction, Exception):
            raise reaction
        return reaction

    return FakeChatModel(script, name="stand-in", tokens_per_answer=5)


def patient(
    model: ChatModel, clock: Clock | None = None, *, limits: Mapping[str, Any] = {}, **more: Any
) -> RetryingChatModel:
    clock = clock or Clock()
    how: dict[str, Any] = {"clock": clock, "sleep": clock.pause, "jitter": lambda: 0.0} | more
    return RetryingChatModel(model, LimitParameters(**limits), **how)


def failing(reason: FailureReason, wait: float = 0.0, message: str = "so it is") -> ChatFailure:
    return ChatFailure(reason, message, wait)


# ---- retries


UNAVAILABLE, TIMEOUT = FailureReason.UNAVAILABLE, FailureReason.TIMEOUT


@pytest.mark.parametrize(
    ("reason", "num_failures", "limits", "jitter", "pauses", "is_answered"),
    [
        (UNAVAILABLE, 3, {}, 0.0, [1, 2, 4], True),
        (FailureReason.MALFORMED, 1, {}, 0.0, [], True),
        (TIMEOUT, 3, {"num_retries": 2}, 0.0, [1, 2], False),
        (TIMEOUT, 9, {"num_retries": 8}, 0.5, [0.75, 1.5, 3, 6, 12, 24, 45, 45], False),
        # All attempts at a request and their pauses share a limit.
        (UNAVAILABLE, 4, {"num_retries": 8, "request_timeout": 8.0}, 0.0, [1, 2, 4], False),
        (FailureReason.REFUSED, 1, {}, 0.0, [], False),
        (FailureReason.UNKNOWN_FORM, 1, {}, 0.0, [], False),
    ],
)
def test_failures_that_may_pass_are_retried_after_longer_and_longer_pauses(
    reason: FailureReason,
    num_failures: int,
    limits: dict[str, Any],
    jitter: float,
    pauses: list[float],
    is_answered: bool,
) -> None:
    clock = Clock()
    inner = model_of([failing(reason)] * num_failures + ["there"] * is_answered)
    model = patient(inner, clock, limits=limits, jitter=lambda: jitter)
    (outcome,) = ask(model, saying("hi"))
    assert clock.pauses == pauses
    assert len(inner.requests) == num_failures + is_answered
    assert model.use.failures == {str(reason): num_failures}
    assert model.use.prompt_tokens == 10 * len(inner.requests)
    if is_answered:
        assert texts(outcome) == ["there"]
        return
    count = f" ({num_failures} attempts)" if num_failures > 1 else ""
    assert failure(outcome) == failing(reason, message=f"so it is{count}")


def test_all_requests_wait_as_long_as_the_service_requests() -> None:
    clock = Clock()
    busy = failing(FailureReason.RATE_LIMITED, 30.0)
    times: list[float] = []

    def react(number: int) -> Reaction:
        times.append(clock.now)
        return busy if number == 0 else "there"

    model = patient(model_of(react), clock, limits={"concurrency": 1})
    outcomes = ask(model, saying("a"), saying("b"))
    assert [texts(outcome) for outcome in outcomes] == [["there"], ["there"]]
    assert times[0] == 0.0
    assert min(times[1:]) >= 30.0


def test_a_longer_pause_than_allowed_fails_the_request_at_once() -> None:
    clock = Clock()
    # The request's own time limit, of 1,200 s, would allow it.
    inner = model_of([failing(FailureReason.RATE_LIMITED, 100.0), "there"])
    model = patient(inner, clock, limits={"max_retry_after": 60.0})
    first, second = (ask(model, saying(text))[0] for text in ("a", "b"))
    assert failure(first).reason is FailureReason.RATE_LIMITED
    assert "100 s" in failure(first).message
    assert (texts(second), clock.now) == (["there"], 0.0)
    assert model.last_failure == failure(first).message


def test_an_attempt_that_takes_too_long_is_given_up() -> None:
    class Silent(FakeChatModel):
        async def answer(self, request: ChatRequest) -> ChatOutcome:
            return await asyncio.Future()

    model = patient(Silent(lambda *_: ""), limits={"attempt_timeout": 1e-6, "num_retries": 0})
    assert failure(ask(model, saying("hi"))[0]).reason is FailureReason.TIMEOUT
    assert model.use.prompt_tokens > 0, "what was read has to be paid for"


def test_a_misconfiguration_ends_all_waiting_requests() -> None:
    wrong = ConfigurationError("a wrong key")
    inner = model_of([wrong, wrong])
    model = patient(inner, limits={"concurrency": 2})
    with pytest.raises(ConfigurationError, match="a wrong key"):
        ask(model, *[saying(str(n)) for n in range(50)])
    assert len(inner.requests) == 2
    inner.script = lambda request, sample: "there"
    assert texts(ask(model, saying("hi"))[0]) == ["there"], "later ones are asked again"


# ---- usage


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ({"requests_per_minute": 6}, 30.0),
        # 5 prompt tokens and 95 of an answer are reserved, 15 are used.
        ({"tokens_per_minute": 60.0}, 45.0),
    ],
)
def test_attempts_and_their_tokens_are_spread_over_the_minute(
    limits: dict[str, float], seconds: float
) -> None:
    clock, inner = Clock(), model_of(repeat("x"))
    model = patient(inner, clock, limits={**limits, "concurrency": 1})
    ask(model, *[saying(str(n), max_tokens=95) for n in range(4)])
    assert clock.now == seconds
    many = model_of(repeat("x"))
    ask(patient(many, limits={"concurrency": 3}), *[saying(str(n)) for n in range(20)])
    assert (many.most_in_flight, len(many.requests)) == (3, 20)


class Timeline:
    """Time that passes from one end of a wait to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waits: list[tuple[float, int, asyncio.Future[None]]] = []

    async def pause(self, seconds: float) -> None:
        ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waits, (self.now + seconds, len(self._waits), ends))
        await ends

    async def pass_all(self) -> None:
        await asyncio.sleep(0)
        while self._waits:
            self.now, _, ends = heapq.heappop(self._waits)
            ends.set_result(None)
            await asyncio.sleep(0)


def test_attempts_after_a_requested_pause_are_spread_as_before_it() -> None:
    time, starts = Timeline(), list[float]()
    limits = LimitParameters(requests_per_minute=60)
    limiter = RateLimiter(limits, clock=lambda: time.now, sleep=time.pause)

    async def attempt() -> None:
        await limiter.acquire(1)
        starts.append(time.now)

    async def refused() -> None:
        limiter.pause(20.0)
        await time.pass_all()

    async def together() -> None:
        await asyncio.gather(*[attempt() for _ in range(4)], refused())

    asyncio.run(together())
    assert starts == [0.0, 20.0, 21.0, 22.0]


# ---- budget


def test_a_budget_of_requests_stops_and_can_be_raised(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    inner = model_of(repeat("x"))
    model = patient(inner, usage_log=UsageLog.open(path), budget=Budget(max_requests=3))
    with pytest.raises(BudgetExhaustedError) as caught:
        ask(model, *[saying(str(n)) for n in range(9)])
    assert len(inner.requests) == 3
    for fact in ("max_service_requests=3", "3 requests", "45 tokens", "nip-astra resume"):
        assert fact in str(caught.value)
    del model
    more = patient(inner, usage_log=UsageLog.open(path), budget=Budget(max_requests=4))
    assert more.use.num_requests == 3
    ask(more, saying("a"))
    with pytest.raises(BudgetExhaustedError):
        ask(more, saying("b"))


def test_a_budget_of_tokens_is_not_passed_by_many_at_once_nor_left_unused() -> None:
    inner = model_of(repeat("x"))
    # Of 100 tokens each request reserves 55 and uses 15: sequentially, up to 3.
    model = patient(inner, budget=Budget(max_tokens=100))
    with pytest.raises(BudgetExhaustedError, match="max_service_tokens=100"):
        ask(model, *[saying("x", max_tokens=50) for _ in range(9)])
    assert (model.usage_log.spent.tokens, inner.most_in_flight) == (60, 1)


def test_a_budget_of_money_needs_prices() -> None:
    prices = PriceParameters(prompt=1e5, completion=2e5)
    inner = model_of(repeat("x"))
    model = patient(inner, prices=prices, budget=Budget(max_cost=5.0))
    with pytest.raises(BudgetExhaustedError, match="max_service_cost=5"):
        ask(model, *[saying("x" * 24, max_tokens=5) for _ in range(9)])
    assert model.use.cost == pytest.approx(4.0)
    with pytest.raises(ConfigurationError, match="stand-in"):
        patient(inner, budget=Budget(max_cost=5.0))


def test_models_of_a_run_share_its_budget() -> None:
    ledger = UsageLog()
    first, second = (
        patient(model_of(repeat("x")), label=label, usage_log=ledger, budget=Budget(max_requests=2))
        for label in ("target", "judge")
    )
    ask(first, saying("a"))
    ask(second, saying("a"))
    with pytest.raises(BudgetExhaustedError):
        ask(first, saying("b"))
    assert (first.use.num_requests, second.use.num_requests) == (1, 1)


# ---- cache


def test_every_part_of_a_request_distinguishes_answers(tmp_path: Path) -> None:
    inner = model_of(str)
    model = patient(inner, cache=ResponseCache(tmp_path / "a.sqlite"))
    changes: list[dict[str, Any]] = [
        *({}, {"seed": 1}, {"temperature": 0.5}, {"top_p": 0.5}, {"max_tokens": 7}),
        *({"stop": ("a",)}, {"first_sample": 1}, {"needs_logprobs": True}),
        {"response_format": {"type": "json_object"}},
    ]
    ask(model, saying("other"), *(saying("hi", **change) for change in changes))
    inner.name = "another"
    ask(model, saying("hi"))
    inner.place = "elsewhere"
    ask(model, saying("hi"))
    assert len(inner.requests) == len(changes) + 3


def test_samples_are_remembered_one_by_one(tmp_path: Path) -> None:
    model = patient(model_of(str), cache=ResponseCache(tmp_path / "a.sqlite"))
    model.model.samples_at_once = 1
    assert texts(ask(model, saying("hi", num_samples=2))[0]) == ["0", "1"]
    assert texts(ask(model, saying("hi", num_samples=3))[0]) == ["0", "1", "2"]


def test_logprobs_ends_and_refusals_are_remembered_and_failures_are_not(tmp_path: Path) -> None:
    whole = ChatAnswer("a \ud800", FinishReason.CONTENT_FILTER, "no", (-0.5, -1.25))
    refused = failing(FailureReason.REFUSED)
    inner = model_of([refused, whole])
    for expected, is_cached in ((refused, False), (whole, False), (whole, True)):
        model = patient(inner, cache=ResponseCache(tmp_path / "a.sqlite"))
        (outcome,) = ask(model, saying("hi"))
        assert (outcome.samples, outcome.is_cached) == ((expected,), is_cached)
    # An answer is paid for once.
    assert (len(inner.requests), outcome.usage, model.use.num_cached) == (2, (0, 0), 1)


@pytest.mark.parametrize("what", ["emptied", "removed", "damaged", "cut"])
def test_a_ledger_that_was_lost_leaves_the_budget_as_it_was(tmp_path: Path, what: str) -> None:
    path, budget = tmp_path / "ledger.sqlite", Budget(max_requests=40, max_tokens=10**6)
    model = patient(model_of(repeat("x")), usage_log=UsageLog(path), budget=budget)
    ask(model, *[saying(str(number)) for number in range(39)])
    model.usage_log._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    model.usage_log._database.close()
    if what == "removed":
        path.unlink()
    else:
        content = path.read_bytes()
        wrong = {"emptied": b"", "damaged": b"no database" * 99, "cut": content[:-4096]}
        path.write_bytes(wrong[what])
    again = UsageLog(path)
    assert again.spent == (39, 39 * 15, 0.0)
    last = patient(model_of(repeat("x")), usage_log=again, budget=budget)
    ask(last, saying("one more"))
    assert UsageLog(path).spent.requests == 40
    with pytest.raises(BudgetExhaustedError):
        ask(last, saying("too much"))


@pytest.mark.parametrize("kind", [UsageLog, ResponseCache])
def test_a_damaged_file_is_a_typed_error(tmp_path: Path, kind: type[Any]) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"no database" * 99)
    with pytest.raises(RunDirectoryError, match=r"a\.sqlite"):
        kind(tmp_path / "a.sqlite")


@pytest.mark.parametrize("table", ["requests", "answers"])
def test_files_that_fail_meanwhile_end_all_waiting_requests(tmp_path: Path, table: str) -> None:
    log, cache = UsageLog(tmp_path / "log"), ResponseCache(tmp_path / "cache")
    inner = model_of(str)
    budget, limits = Budget(max_requests=3), {"concurrency": 2}
    model = patient(inner, limits=limits, usage_log=log, budget=budget, cache=cache)
    database = {"requests": log, "answers": cache}[table]._database
    database.execute(f"ALTER TABLE {table} RENAME TO kept")
    # Answers can still be looked up.
    database.execute(f"CREATE VIEW {table} AS SELECT * FROM kept")
    with pytest.raises(RunDirectoryError, match=table):
        ask(model, *[saying(str(n)) for n in range(50)])
    assert len(inner.requests) == log.spent.requests == 2


# ---- counts and construction


def test_refusals_withheld_answers_and_times_are_counted() -> None:
    reactions: list[Reaction] = [
        *("a", ChatAnswer("", refusal="no"), ChatAnswer("", FinishReason.CONTENT_FILTER)),
        failing(FailureReason.REFUSED),
    ]
    model = patient(model_of(reactions), limits={"concurrency": 1})
    ask(model, *[saying(str(n)) for n in range(4)])
    use = model.use.to_dict()
    assert (use["num_requests"], use["num_samples"], use["num_refusals"]) == (4, 3, 2)
    assert (use["failures"], use["cost"], use["median_seconds"]) == ({"refused": 1}, None, 0.0)


def test_a_model_of_a_run_keeps_its_files_there(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "mine", lambda run: None)
    settings = ExperimentSettings(run_directory=directory, max_service_requests=1)
    parameters = ScriptedChatModel.Parameters(answers=["x"])
    model = open_chat_model(parameters, settings, label="target")
    assert texts(complete_all(model, [saying("hi")])[0]) == ["x"]
    again = open_chat_model(parameters, settings, label="target")
    assert complete_all(again, [saying("hi")])[0].is_cached
    with pytest.raises(BudgetExhaustedError):
        complete_all(again, [saying("more")])
    names = {path.name for path in directory.path.glob("*.sqlite")}
    assert names == {"service_requests.sqlite", "service_answers.sqlite"}
    elsewhere = ExperimentSettings(service_cache=str(tmp_path / "shared.sqlite"))
    complete_all(open_chat_model(parameters, elsewhere), [saying("hi")])
    assert complete_all(open_chat_model(parameters, elsewhere), [saying("hi")])[0].is_cached
    without = open_chat_model(ScriptedChatModel.Parameters())
    assert not any(complete_all(without, [saying("hi")])[0].is_cached for _ in range(2))


def test_texts_of_a_service_can_be_encoded() -> None:
    answer = ChatAnswer("a \ud800", refusal="no \ud83d")
    assert (answer.text, answer.refusal) == ("a \ufffd", "no \ufffd")
    assert ChatFailure(FailureReason.MALFORMED, "\ud800").message == "\ufffd"


# ---- answers that are far longer than requested


ENDLESS = "word " * 100_000


def test_a_long_answer_is_a_failure_of_its_turn_and_is_not_stored(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "answers.sqlite")
    inner = model_of([ENDLESS, "a", "b"])
    model = patient(inner, cache=cache)
    assert failure(ask(model, saying("hi", max_tokens=4))[0]).reason is FailureReason.TOO_LONG
    assert len(inner.requests) == 1, "another attempt would be as long"
    assert model.use.failures == {"too_long": 1}
    assert "4 tokens" in model.last_failure
    assert (tmp_path / "answers.sqlite").stat().st_size < 50_000
    assert texts(ask(model, saying("ho", max_tokens=4))[0]) == ["a"]
    # As with other failures, a resumed run requests it again.
    assert texts(ask(model, saying("hi", max_tokens=4))[0]) == ["b"]


@pytest.mark.parametrize("stored", [ChatAnswer(ENDLESS), ChatAnswer("", FinishReason.LENGTH)])
def test_stored_answers_of_other_versions_that_are_no_replies_are_requested_again(
    tmp_path: Path, stored: ChatAnswer
) -> None:
    cache = ResponseCache(tmp_path / "answers.sqlite")
    model = patient(model_of(["a"]), cache=cache)
    request = saying("hi", max_tokens=4)
    cache.put({cache_key(model.model, request, 0): stored})
    assert texts(ask(model, request)[0]) == ["a"]


def test_the_tokens_of_a_request_with_several_samples_are_stored_once(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "answers.sqlite")
    cache.put({"first": ChatAnswer("a"), "second": ChatAnswer("b")}, ChatUsage(7, 3))
    assert cache.sum_usage(["first", "second"]) == (7, 3)
    assert cache.sum_usage(["unknown"]) == (0, 0)


def test_an_answer_without_a_word_is_not_stored(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "answers.sqlite")
    model = patient(model_of([ChatAnswer("", FinishReason.LENGTH), "a"]), cache=cache)
    assert [texts(ask(model, saying("hi"))[0]) for _ in range(3)] == [[""], ["a"], ["a"]]


def test_the_bound_holds_long_words_of_any_script_and_the_default_of_a_service() -> None:
    longest = "\u0915" * 10 * 100  # 30 bytes a token
    assert texts(ask(patient(model_of([longest])), saying("hi", max_tokens=100))[0]) == [longest]
    whole = ENDLESS
    assert texts(ask(patient(model_of([whole])), saying("hi", max_tokens=None))[0]) == [whole]
    too_much = patient(model_of([3 * whole]))
    assert failure(ask(too_much, saying("hi", max_tokens=None))[0]).reason is FailureReason.TOO_LONG


def test_reasoning_and_calls_of_an_answer_are_kept_in_the_cache(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "answers.sqlite")
    answer = ChatAnswer("", reasoning="hm", calls=(ToolCall("look", {"at": ["x", 1]}),))
    ask(patient(model_of([answer]), cache=cache), saying("hi"))
    (outcome,) = ask(patient(model_of([]), cache=cache), saying("hi"))
    assert outcome.samples == (answer,)

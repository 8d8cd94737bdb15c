"""Clients of servers that misbehave: each request ends in time, with a valid outcome.

The slow tests are of servers that may let a request run into its time limit.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("openai")

from nip_astra.errors import ConfigurationError, NipAstraError, ServiceError
from nip_astra.language_models.services import fine_tuning, http_client, http_training, retrying
from nip_astra.language_models.services.chat import ChatFailure, LimitParameters
from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from nip_astra.language_models.services.fine_tuning import (
    FineTuningOptions,
    FineTuningParameters,
    OpenAIFineTuning,
    SupervisedExample,
)
from nip_astra.language_models.services.http_client import MIB
from nip_astra.language_models.services.http_training import TrainingConnection
from nip_astra.language_models.services.retrying import RetryingChatModel
from nip_astra.language_models.services.training import TrainServiceParameters
from tests.kit.misbehaving import MISBEHAVIOURS, misbehaving
from tests.kit.recording import record_calls
from tests.kit.serving import wait_until
from tests.language_models.services.requests import ask, saying

LONGEST = 12.0
LIMITS = LimitParameters(
    num_retries=1, backoff=0.01, attempt_timeout=3.0, request_timeout=3.1, max_retry_after=0.1
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LARGEST_ANSWER", 4 * MIB)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Perform the imports of the package's first request."""
    with misbehaving(MISBEHAVIOURS["usage: null"].send) as server:
        parameters = OpenAIChatModel.Parameters(base_url=f"{server.address}/v1", model="m")
        ask(OpenAIChatModel(parameters), saying("hi"))


def in_time(work: Callable[[], Any]) -> Any:
    """The result of some work, within `LONGEST` seconds and 64 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    result = work()
    assert time.monotonic() - started < LONGEST
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    return result


def outcome_of_a_chat(address: str) -> str:
    parameters = OpenAIChatModel.Parameters(base_url=f"{address}/v1", model="m", timeout=4.0)
    model = RetryingChatModel(OpenAIChatModel(parameters), LIMITS)
    try:
        (outcome,) = ask(model, saying("hi", needs_logprobs=True))
    except NipAstraError as error:
        return type(error).__name__
    (sample,) = outcome.samples
    assert model.use.num_requests <= 2
    if isinstance(sample, ChatFailure):
        assert sample.message
        return str(sample.reason)
    return f"says {sample.text}"


def outcome_of_training(address: str) -> str:
    limits = {"retry_timeout_seconds": 1.0, "operation_timeout": 3.0, "max_answer_mib": 4.0}
    connection = TrainingConnection(
        TrainServiceParameters(backend="http", base_url=address, **limits)
    )
    try:
        connection.post_json("/training/v1/models", {"base_model": "m"}, key="k")
    except NipAstraError as error:
        return type(error).__name__
    return "an object"


def outcome_of_a_job(address: str) -> str:
    parameters = FineTuningParameters(base_url=f"{address}/v1", timeout=4.0, limits=LIMITS)
    service = OpenAIFineTuning(parameters)
    example = SupervisedExample(({"role": "user", "content": "hi"},))

    async def submit() -> str:
        try:
            job = await service.submit("m", [example], FineTuningOptions(), key="k")
        except NipAstraError as error:
            return type(error).__name__
        finally:
            await service.close()
        return f"submitted {job.job_id}"

    return asyncio.run(submit())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "timeout" in server.outcomes else ())
        for name, server in MISBEHAVIOURS.items()
    ],
)
def test_a_chat_model_ends_in_time_with_the_right_outcome(name: str) -> None:
    misbehaviour = MISBEHAVIOURS[name]
    with misbehaving(misbehaviour.send) as server:
        assert in_time(lambda: outcome_of_a_chat(server.address)) in misbehaviour.outcomes


KINDS = {kind.__name__ for kind in [ServiceError, *ServiceError.__subclasses__()]}
OF_TRAINING = {
    "endless body": "AnswerTooLargeError",
    "body: a list": "ServiceError",
    "gzip in gzip": "AnswerTooLargeError",
}
SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in MISBEHAVIOURS if name not in OF_TRAINING
]


@pytest.mark.parametrize("name", [*OF_TRAINING, *SLOW])
@pytest.mark.parametrize("outcome_of", [outcome_of_training, outcome_of_a_job])
def test_training_and_jobs_end_in_time_with_a_typed_error(
    outcome_of: Callable[[str], str], name: str
) -> None:
    with misbehaving(MISBEHAVIOURS[name].send) as server:
        result = in_time(lambda: outcome_of(server.address))
    if name not in OF_TRAINING:
        assert result in KINDS | {"ConfigurationError", "BudgetExhaustedError", "an object"}
    else:
        is_job = outcome_of is outcome_of_a_job
        assert result == ("ServiceError" if is_job else OF_TRAINING[name])


@pytest.mark.parametrize(
    "name",
    ["endless body", "gzip bomb", "body drips", "headers drip", "no answer", "reset", "status 500"],
)
def test_a_notification_of_a_training_service_is_not_waited_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_training, "SECONDS_TO_NOTIFY", 0.3)
    with misbehaving(MISBEHAVIOURS[name].send) as server:
        connection = TrainingConnection(
            TrainServiceParameters(backend="http", base_url=server.address)
        )
        in_time(lambda: connection.notify("DELETE", "/training/v1/models/m"))
        wait_until(lambda: server.num_requests == 1)


@pytest.mark.parametrize(
    "address", ["http://[", "http://a\x00b", "http://", "ftp://a.test", "http://a.test:99999"]
)
def test_an_invalid_address_is_refused(address: str) -> None:
    for outcome_of in (outcome_of_a_chat, outcome_of_training, outcome_of_a_job):
        with pytest.raises(ConfigurationError):
            outcome_of(address)


@pytest.mark.parametrize(
    ("outcome_of", "module", "facts"),
    [
        (outcome_of_a_chat, retrying, ("503", "no answer for 10 s")),
        (outcome_of_training, http_training, ("503",)),
        (outcome_of_a_job, fine_tuning, ("503",)),
    ],
)
def test_the_bar_shows_the_service_that_is_late(
    outcome_of: Callable[[str], str],
    module: ModuleType,
    facts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = record_calls(monkeypatch, module, "waiting_for")
    with misbehaving(MISBEHAVIOURS["status 503"].send) as server:
        outcome_of(server.address)
    shown = [call.arguments[0] for call in waits]
    assert all(any(fact in what for what in shown) for fact in facts)

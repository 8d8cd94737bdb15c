"""Chat models that are functions of the user."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import BudgetExhaustedError, ConfigurationError
from nip_astra.language_models.services.chat import (
    CHAT_MODELS,
    ChatAnswer,
    ChatFailure,
    FailureReason,
    FinishReason,
    LimitParameters,
)
from nip_astra.language_models.services.chat_models.python import PythonChatModel, register_function
from nip_astra.language_models.services.retrying import RetryingChatModel, open_chat_model
from nip_astra.rollouts.messages import ToolCall
from tests.language_models.services.requests import ask, failure, saying, texts

SOURCE = """
def echo(messages, temperature=None, seed=None):
    return f"{messages[-1]['content']} {temperature} {seed}"

async def later(messages, **options):
    return {"content": sorted(options)[0], "finish_reason": "length"}

class Counted:
    def __call__(self, messages):
        return "called"

counted = Counted()

def strange(messages, mood):
    return mood
"""


@pytest.fixture
def file(tmp_path: Path, no_plugins_left: None) -> Path:
    path = tmp_path / "target.py"
    path.write_text(SOURCE)
    return path


def sample_of(function: Callable[..., Any], **fields: Any) -> ChatAnswer | ChatFailure:
    (outcome,) = ask(PythonChatModel("f", function=function), saying("hi", **fields))
    (sample,) = outcome.samples
    return sample


def test_a_function_of_a_file_answers_with_the_arguments_that_it_declares(file: Path) -> None:
    kind = CHAT_MODELS.get("python")
    model = open_chat_model(kind.Parameters(function=f"{file}:echo"))
    outcomes = ask(model, saying("hi", temperature=0.5, seed=3), saying("ho", temperature=None))
    assert [texts(outcome) for outcome in outcomes] == [["hi 0.5 3"], ["ho None None"]]
    assert outcomes[0].is_usage_estimated
    later = kind.load(kind.Parameters(function=f"{file}:later"), scenario_dir=None)
    assert ask(later, saying("hi"))[0].samples == (ChatAnswer("max_tokens", FinishReason.LENGTH),)
    called = kind.load(kind.Parameters(function=f"{file}:counted"), scenario_dir=None)
    assert texts(ask(called, saying("hi"))[0]) == ["called"]
    for name, fact in (("strange", "mood"), ("nothing", "echo")):
        with pytest.raises(ConfigurationError, match=fact):
            kind.load(kind.Parameters(function=f"{file}:{name}"), scenario_dir=None)


def test_samples_have_seeds_of_their_own() -> None:
    model = RetryingChatModel(
        PythonChatModel("f", function=lambda messages, seed: str(seed)), LimitParameters()
    )
    (outcome,) = ask(model, saying("hi", num_samples=3, seed=7))
    assert len({*texts(outcome)}) == 3
    assert texts(outcome)[0] == "7"


CALL = {"function": {"name": "look", "arguments": '{"at": 1}'}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hi", ChatAnswer("hi")),
        (ChatAnswer("x", FinishReason.LENGTH), ChatAnswer("x", FinishReason.LENGTH)),
        ({"role": "assistant", "content": "hi"}, ChatAnswer("hi")),
        ({"content": [{"type": "text", "text": "hi"}]}, ChatAnswer("hi")),
        (
            {"content": None, "tool_calls": [CALL]},
            ChatAnswer("", calls=(ToolCall("look", {"at": 1}),)),
        ),
        ({"content": None, "refusal": "no"}, ChatAnswer("", refusal="no")),
    ],
)
def test_values_of_a_function_are_answers(value: Any, expected: ChatAnswer) -> None:
    assert sample_of(lambda messages: value) == expected


@pytest.mark.parametrize("value", [None, 3, [1], {}, {"content": 3}, b"hi"])
def test_other_values_are_malformed_answers(value: Any) -> None:
    sample = sample_of(lambda messages: value)
    assert isinstance(sample, ChatFailure)
    assert sample.reason is FailureReason.MALFORMED


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("odd"),
        MuteError(),
        SystemExit(3),
        StopIteration(),
        KeyboardInterrupt(),
        OSError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_a_function_is_a_failed_attempt(error: BaseException) -> None:
    def fail(messages: Any) -> str:
        raise error

    async def fail_later(messages: Any) -> str:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        raise ValueError("stand-in")

    for function in (fail, fail_later):
        sample = sample_of(function)
        assert isinstance(sample, ChatFailure)
        assert sample.reason is FailureReason.UNAVAILABLE

    def spend(messages: Any) -> str:
        raise BudgetExhaustedError("nothing left. Add funds.")

    with pytest.raises(BudgetExhaustedError):
        sample_of(spend)


def test_a_function_that_does_not_return_is_late_and_does_not_hold_the_others() -> None:
    never = threading.Event()

    def answer(messages: Any) -> str:
        if messages[-1]["content"] == "stuck":
            never.wait(30)
        return "a"

    limits = LimitParameters(attempt_timeout=0.1, num_retries=0)
    model = RetryingChatModel(PythonChatModel("f", function=answer), limits)
    outcomes = ask(model, *[saying("stuck")] * 3, saying("go"))
    assert [failure(outcome).reason for outcome in outcomes[:3]] == [FailureReason.TIMEOUT] * 3
    assert texts(outcomes[3]) == ["a"]
    never.set()


def test_requests_are_answered_at_once() -> None:
    together = threading.Barrier(3, timeout=10)

    def answer(messages: Any) -> str:
        together.wait()
        return "a"

    outcomes = ask(PythonChatModel("f", function=answer), *[saying("hi")] * 3)
    assert [texts(outcome) for outcome in outcomes] == [["a"]] * 3


def test_answers_are_those_of_the_code(file: Path, tmp_path: Path) -> None:
    first = PythonChatModel(f"{file}:echo")
    other = tmp_path / "other" / "target.py"
    other.parent.mkdir()
    other.write_text(SOURCE + "# changed\n")
    assert first.can_be_remembered
    assert first.place != PythonChatModel(f"{other}:echo").place


def test_a_function_of_a_notebook_is_registered_and_replaces_an_earlier_one(
    no_plugins_left: None,
) -> None:
    for word in ("a", "b"):
        register_function("mine", lambda messages, word=word: word)
        kind = CHAT_MODELS.get("mine")
        model = kind.load(kind.Parameters(), scenario_dir=None)
        assert texts(ask(model, saying("hi"))[0]) == [word]

"""Answers from a script."""

from __future__ import annotations

from typing import Any

import pytest

from nip_astra.errors import ParameterError
from nip_astra.language_models.services.chat import (
    ChatFailure,
    ChatRequest,
    FailureReason,
    FinishReason,
)
from nip_astra.language_models.services.chat_models.scripted import ScriptedChatModel
from tests.language_models.services.requests import ask, failure, saying, texts


def load(**parameters: Any) -> ScriptedChatModel:
    return ScriptedChatModel.load(ScriptedChatModel.Parameters(**parameters), scenario_dir=None)


def test_samples_go_through_the_answers_from_a_place_that_depends_on_the_request() -> None:
    model = load(answers=["a", "b", "c"])
    (first,) = ask(model, saying("hello", num_samples=3))
    assert sorted(texts(first)) == ["a", "b", "c"]
    (later,) = ask(model, saying("hello", num_samples=2, first_sample=1))
    assert texts(later) == texts(first)[1:]
    starts = {texts(ask(model, saying(f"hello {n}"))[0])[0] for n in range(20)}
    assert starts == {"a", "b", "c"}


def test_the_first_pattern_that_matches_the_last_message_counts() -> None:
    model = load(answers=["?"], when={"(?i)france": ["Paris.", "It is Paris."], "F": ["no"]})
    france, other = ask(model, saying("Capital of France", num_samples=3), saying("no f"))
    assert texts(france) == ["Paris.", "It is Paris.", "Paris."]
    assert texts(other) == ["?"]


def test_a_function_answers_by_request_and_sample_number() -> None:
    def script(request: ChatRequest, sample: int) -> str | ChatFailure:
        if sample == 1:
            return ChatFailure(FailureReason.TIMEOUT, "too late")
        return f"{request.messages[0]['content']} {sample}"

    model = ScriptedChatModel(script)
    assert texts(ask(model, saying("x", num_samples=3))[0]) == ["x 0", "<timeout>", "x 2"]
    assert [request.num_samples for request in model.requests] == [3]


def test_stop_texts_and_max_tokens_end_an_answer_and_words_are_counted() -> None:
    model = load(answers=["one two three. four five"])
    stopped, short = ask(model, saying("a b", stop=(".",)), saying("a", max_tokens=2))
    assert texts(stopped) == ["one two three"]
    assert stopped.usage == (2, 3)
    assert texts(short) == ["one two"]
    assert short.samples[0].finish_reason is FinishReason.LENGTH  # type: ignore[union-attr]


def test_a_form_is_unknown_to_it() -> None:
    (outcome,) = ask(load(), saying("a", response_format={"type": "json_object"}))
    assert failure(outcome).reason is FailureReason.UNKNOWN_FORM


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"when": {"(": ["a"]}}, "invalid regular expression"),
        ({"when": {"a": []}}, "has no answer for 'a'"),
        ({"answers": []}, "at least 1"),
    ],
)
def test_invalid_scripts_are_refused(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(ParameterError, match=problem):
        ScriptedChatModel.Parameters(**parameters)

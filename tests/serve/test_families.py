"""Reasoning and calls of families of models in answers of the service, whole and streamed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import openai
import pytest
import torch

from nip_astra.language_models import batch_engine
from nip_astra.language_models.sequences import RunningSequence, TokenRecord
from nip_astra.rollouts.messages import ToolCall
from tests.kit.families import FAMILIES, HELLO, TOOL, WITH_THOUGHTS, WITH_TOOLS, quickly
from tests.kit.messages import says
from tests.kit.tiny import make_language_model
from tests.serve.running import Running, running

SERVED = {name: f"family-{place}" for place, name in enumerate(FAMILIES)}
CALLS = [ToolCall("note", {"text": 'a\nb </tool_call> "007"', "count": 7, "place": {"at": [1]}})]
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    models = {}
    for name, family in FAMILIES.items():
        folder = tmp_path_factory.mktemp(SERVED[name])
        tokenizer = family.tokenizer()
        models[SERVED[name]] = str(make_language_model(folder, window=8192, tokenizer=tokenizer))
    with running(models) as service:
        yield service


@pytest.fixture
def ask(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Ask a family's model, which writes the given text."""

    def run(name: str, text: str, **options: Any) -> Any:
        tokenizer = FAMILIES[name].tokenizer()
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

        def draw(
            _: torch.Tensor, rows: list[RunningSequence], banned_ids: torch.Tensor, __: object
        ) -> list[TokenRecord]:
            tokens = [ids[row.num_tokens] for row in rows]
            for row, token in zip(rows, tokens, strict=True):
                assert token not in {*banned_ids.tolist()} - {*row.request.shown_ids}
            return [TokenRecord(token, math.nan) for token in tokens]

        monkeypatch.setattr(batch_engine, "draw_tokens", draw)
        given: dict[str, Any] = {"model": SERVED[name], "messages": [HELLO], "max_tokens": 1000}
        return client.chat.completions.create(**(given | options))

    return run


def message_of(answer: Any) -> dict[str, Any]:
    """Reasoning, content, calls and finish reason of a whole answer or a stream."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "end": None}
    for chunk in [answer] if hasattr(answer, "usage") else answer:
        for choice in chunk.choices:
            part = getattr(choice, "message", None) or choice.delta
            found["reasoning"] += getattr(part, "reasoning_content", None) or ""
            found["content"] += part.content or ""
            calls = [call.function for call in part.tool_calls or ()]
            found["calls"] += [ToolCall(one.name, json.loads(one.arguments)) for one in calls]
            found["end"] = choice.finish_reason or found["end"]
    return found


def both(ask: Ask, name: str, text: str, **options: Any) -> dict[str, Any]:
    """The answer, which is the same when it is streamed."""
    whole = message_of(ask(name, text, **options))
    assert message_of(ask(name, text, stream=True, **options)) == whole
    return whole


@pytest.mark.parametrize("name", quickly(WITH_TOOLS))
def test_calls_are_tool_calls_of_the_answer(name: str, ask: Ask) -> None:
    family = FAMILIES[name]
    calls = CALLS * (2 if family.has_two_calls else 1)
    before = "Hm." if family.think else ""
    thought = family.think(before) if family.think else ""
    answer = both(ask, name, thought + family.write_calls(calls), tools=[TOOL])
    assert answer == {"reasoning": before, "content": "", "calls": calls, "end": "tool_calls"}
    text = thought + family.say("So 4 < 5.")
    answer = both(ask, name, text, tools=[TOOL])
    assert answer == {"reasoning": before, "content": "So 4 < 5.", "calls": [], "end": "stop"}


@pytest.mark.parametrize("name", quickly(WITH_THOUGHTS))
def test_thoughts_are_reasoning_content_and_calls_within_are_none(name: str, ask: Ask) -> None:
    family = FAMILIES[name]
    assert family.think is not None
    thought = "Or <tool_call>?"
    if family.shows_tools and family.call_start == "<tool_call>":
        thought += family.write_calls(CALLS)
    options: dict[str, Any] = {"tools": [TOOL]} if family.shows_tools else {}
    whole = family.think(thought) + family.say("Tea.")
    answer = both(ask, name, whole, **options)
    assert answer == {
        "reasoning": thought.strip(),
        "content": "Tea.",
        "calls": [],
        "end": "stop",
    }
    cut = both(ask, name, family.think("Well, I"), max_tokens=len("<think>\nWell"), **options)
    assert (cut["content"], cut["calls"], cut["end"]) == ("", [], "length")


@pytest.mark.parametrize("name", ["Qwen 3.5", "gpt-oss", "LFM 2.5", "Gemma 4, fifth template"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_an_answer_with_its_reasoning_can_be_sent_back(name: str, field: str, ask: Ask) -> None:
    family = FAMILIES[name]
    assert family.think is not None
    text = family.think("Hm.") + family.write_calls(CALLS)
    message = ask(name, text, tools=[TOOL]).choices[0].message.model_dump(exclude_none=True)
    message[field] = message.pop("reasoning_content")
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "kept"}
    messages = [HELLO, message, result]
    again = ask(name, text, messages=messages, tools=[TOOL], extra_body={"return_token_ids": True})
    prompt = family.tokenizer().decode(again.prompt_token_ids)
    assert prompt.index("Hm.") < prompt.index("007") < prompt.index("kept")


def test_only_an_assistant_has_reasoning(ask: Ask) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask("Qwen 3.5", "x", messages=[{**HELLO, "reasoning_content": "x"}])
    assert says(caught.value, "reasoning_content", "assistant")


@pytest.mark.parametrize(
    ("name", "options", "param"),
    [
        ("Phi 3.5", {"tools": [TOOL]}, "tools"),
        ("Qwen 3.5", {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ("Gemma 4", {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_a_family_cannot_do_is_refused_by_name(
    name: str, options: dict[str, Any], param: str, ask: Ask
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(name, "x", **options)
    assert caught.value.param == param
    assert SERVED[name] in str(caught.value)


needs_library = pytest.mark.skipif(
    find_spec("llguidance") is None, reason="needs pip install 'nip_astra[structured]'"
)
STOP = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["count"],
    "additionalProperties": False,
}


@needs_library
@pytest.mark.parametrize("name", ["Qwen 2.5", "gpt-oss", "Llama 3.2"])
def test_answers_can_be_constrained_to_calls(name: str, client: openai.OpenAI) -> None:
    function = {"name": "stop", "description": "Stop.", "parameters": STOP}
    options: dict[str, Any] = {"tools": [{"type": "function", "function": function}]}
    options |= {"model": SERVED[name], "messages": [HELLO], "tool_choice": "required"}
    answers = client.chat.completions.create(**options, n=4, max_tokens=400, seed=1)
    messages = [choice.message for choice in answers.choices if choice.finish_reason != "length"]
    assert messages
    for message in messages:
        assert not message.content
        assert {call.function.name for call in message.tool_calls} == {"stop"}


@needs_library
def test_an_answer_in_a_form_begins_after_the_thought(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"model": SERVED["Qwen 3.5"], "messages": [HELLO], "seed": 1}
    schema = {"name": "answer", "schema": STOP}
    options["response_format"] = {"type": "json_schema", "json_schema": schema}
    tokenizer = FAMILIES["Qwen 3.5"].tokenizer()
    thought = tokenizer.encode("Hm.\n</think>", add_special_tokens=False)
    draw = batch_engine.draw_tokens

    def think(logits_RV: torch.Tensor, rows: list[RunningSequence], *more: Any) -> Any:
        """Prefer a thought, of which the grammar still decides whether it may come."""
        for row, sequence in enumerate(rows):
            if sequence.num_tokens < len(thought):
                logits_RV[row, thought[sequence.num_tokens]] = 1e4
        return draw(logits_RV, rows, *more)

    monkeypatch.setattr(batch_engine, "draw_tokens", think)
    answers = client.chat.completions.create(**options, n=4, max_tokens=400)
    ended = [choice.message for choice in answers.choices if choice.finish_reason == "stop"]
    assert ended
    for message in ended:
        assert message.reasoning_content == "Hm."
        assert set(json.loads(message.content or "")) == {"count"}

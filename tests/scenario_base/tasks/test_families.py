"""Policies of families of models that think and call tools in an episode."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from nip_astra.errors import ModelAbilityError
from nip_astra.language_models.base import SamplingOptions
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.chat import render_chat
from nip_astra.rollouts.messages import ToolCall, Turn
from nip_astra.samplers.tasks import TaskPlan, play_task
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.tokens import ChatFormat, PlainFormat
from nip_astra.scenario_base.tasks.base import Environment, Episode, Reaction, Task
from nip_astra.scenario_base.tasks.tools import Toolbox, ToolUseParameters
from tests.kit.families import FAMILIES, HELLO, WITH_TOOLS, Family, quickly
from tests.kit.tiny import load_backend, make_language_model

RESULT = 'a "line"\nand another'
CALL = ToolCall("note", {"text": "one\n</tool_call> two", "count": 7, "place": {"at": [1]}})
DIGITS = ToolCall("note", {"text": "007"})


def note(text: str = "", count: int = 0, place: dict = {}) -> str:  # type: ignore[type-arg]
    """Keep a note."""
    Room.notes.append((text, count, place))
    return RESULT


class Room(Environment):
    """Is left with the right answer; notes may be kept."""

    tools = [note]
    notes: list[tuple[str, int, Any]] = []
    answers: list[str] = []

    def reset(self) -> Sequence[Turn]:
        return [Turn("user", "hello")]

    def step(self, message: str) -> Reaction:
        self.answers.append(message)
        return Reaction(reward=float(message == "5"))


class RoomTask(Task):
    """The room."""

    def environment(self, split: object, index: int) -> Environment:
        return Room()


@cache
def load_model(name: str) -> HuggingFaceLanguageModel:
    with TemporaryDirectory() as folder:
        tokenizer = FAMILIES[name].tokenizer()
        return load_backend(make_language_model(Path(folder), window=8192, tokenizer=tokenizer))


Play = Callable[..., tuple[Episode, list[str]]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Plays an episode in which a family's model writes the given texts; with its contexts."""

    def run(name: str, *turns: str) -> tuple[Episode, list[str]]:
        Room.notes, Room.answers = [], []
        model = load_model(name)
        tokenizer = model.tokenizer
        ends = [(*tokenizer.encode(turn, add_special_tokens=False), 3) for turn in turns]
        queue = iter([token for ids in ends for token in ids])
        banned = {*model.token_sampler.banned_ids.tolist()}

        def draw(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            token = torch.tensor([next(queue)])
            assert int(token) not in banned
            return token, logits.log_softmax(1)[0, token]

        monkeypatch.setattr(model.token_sampler, "draw", draw)
        agent = ConversationAgent("policy", model, ChatFormat(tokenizer), SamplingOptions(800))
        contexts: list[str] = []
        build = agent.contexts

        def record(*arguments: Any) -> list[list[int]]:
            built = build(*arguments)
            contexts.extend(tokenizer.batch_decode(built))
            return built

        monkeypatch.setattr(agent, "contexts", record)
        task = RoomTask(None, seed=0, device=torch.device("cpu"), scenario_dir=None)
        task.tools, task.tool_use = [], ToolUseParameters()
        with torch.no_grad():
            rollout = play_task(agent, task, [0], TaskPlan("train", 1, 5, key=(0,)))
        return rollout.episodes[0], contexts

    return run


def think(family: Family, thought: str) -> str:
    return "" if family.think is None else family.think(thought)


@pytest.mark.parametrize("name", quickly(WITH_TOOLS))
def test_a_policy_calls_tools_in_its_own_form_and_reads_their_results(
    name: str, play: Play
) -> None:
    family = FAMILIES[name]
    calls = [CALL, DIGITS] if family.has_two_calls else [CALL]
    text = family.write_calls(calls)
    last = think(family, "So 4?") + family.say("5")
    episode, contexts = play(name, think(family, "Hm.") + text, last)
    assert (episode.reward, Room.answers) == (1.0, ["5"])
    assert Room.notes == [(*CALL.arguments.values(),), ("007", 0, {})][: len(calls)]
    assert episode.tool_counts == {"calls": len(calls)}
    turn, *results, answer = episode.messages[1:]
    assert (turn.text, turn.calls) == ("", tuple(calls))
    assert [(one.role, one.text) for one in results] == [("tool", RESULT)] * len(calls)
    assert (answer.text, answer.reasoning) == ("5", "So 4?" if family.think else None)
    # The context of the second turn is the conversation as the template writes it.
    parts = [call.as_message_part(f"call{place}") for place, call in enumerate(calls)]
    result = {"role": "tool", "name": "note", "content": RESULT}
    called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": parts}
    messages = [HELLO, called]
    messages += [{**result, "tool_call_id": part["id"]} for part in parts]
    tools = [json.loads(tool) for tool in Toolbox.of([note]).described]
    rendered = render_chat(load_model(name).tokenizer, messages, opens_answer=True, tools=tools)
    after_calls = rendered[rendered.rindex(text) :]
    assert contexts[1].endswith(after_calls)


@pytest.mark.parametrize("name", quickly([n for n in WITH_TOOLS if FAMILIES[n].think]))
def test_a_call_within_a_thought_is_not_executed(name: str, play: Play) -> None:
    family = FAMILIES[name]
    assert family.think is not None
    considered = family.write_calls([CALL]) if family.call_start.startswith("<") else "note?"
    episode, _ = play(name, family.think(f"Or {considered}") + family.say("5"))
    assert (episode.reward, Room.notes, Room.answers) == (1.0, [], ["5"])
    assert episode.messages[-1].reasoning == f"Or {considered}".strip()
    cut = family.think("So 5")[: family.think("So 5").index("So 5") + 4]
    episode, _ = play(name, cut)
    assert (episode.messages[-1].is_missing, episode.messages[-1].text) == (True, "")
    assert (Room.notes, Room.answers) == ([], [])


@pytest.mark.parametrize("name", quickly([n for n in WITH_TOOLS if "Llama" not in n]))
def test_a_malformed_call_is_answered_with_an_error(name: str, play: Play) -> None:
    family = FAMILIES[name]
    text = family.write_calls([CALL])
    malformed = text[: text.index("two")]
    episode, _ = play(name, think(family, "Hm.") + malformed, think(family, "") + family.say("5"))
    assert (episode.reward, Room.notes) == (1.0, [])
    assert episode.tool_counts == {"calls": 1, "malformed": 1}
    assert episode.messages[2].text.startswith("Error: ")


def test_tools_are_refused_where_the_template_writes_no_calls(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "without calls", Family("lfm2"))
    with pytest.raises(ModelAbilityError):
        play("without calls", "5")


# ---- given conversations with calls


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_given_conversation_with_calls_is_that_of_the_template(name: str) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    form = ChatFormat(tokenizer)
    calls = (ToolCall("note", {"text": "milk", "count": 2}),)
    turns = [Turn("user", "hello"), Turn("assistant", calls=calls), Turn("tool", "done")]
    if form.message_format.channels is not None:
        with pytest.raises(ModelAbilityError, match="channels"):
            form.written_text(turns[1])
        return
    texts = [form.written_text(turn) for turn in turns]
    encoded = [
        replace(turn, ids=form.encode(text)) for turn, text in zip(turns, texts, strict=True)
    ]
    context = tokenizer.decode(form.context(encoded))
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [calls[0].as_message_part("callofone")],
    }
    result = {"role": "tool", "content": "done", "name": "note", "tool_call_id": "callofone"}
    rendered = render_chat(tokenizer, [HELLO, answer, result], opens_answer=True)
    # Nemotron's template begins a new line where a policy's own call follows its thought.
    assert "".join(context.split()) == "".join(rendered.split())


def test_a_plain_format_shows_no_given_calls() -> None:
    form = PlainFormat(FAMILIES["Qwen 3"].tokenizer())
    with pytest.raises(ModelAbilityError, match="tool_calls"):
        form.written_text(Turn("assistant", calls=(CALL,)))

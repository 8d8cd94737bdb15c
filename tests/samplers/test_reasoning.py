"""A policy's reasoning is learned from, and is no part of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from nip_astra.language_models.base import Generation, SamplingOptions, pad_right
from nip_astra.rollouts.messages import ToolCall, Turn
from nip_astra.samplers.tasks import TaskPlan, TaskRollout, play_task
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.tokens import ChatFormat
from nip_astra.scenario_base.tasks.base import Environment, Reaction, Task
from tests.kit.families import FAMILIES, WITH_THOUGHTS, WITH_TOOLS
from tests.kit.tiny import make_thinking_tokenizer

CPU = torch.device("cpu")
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Sums(Environment):
    """Asks for a sum; a wrong answer gets another try."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.tools = (add,)

    def reset(self) -> Sequence[Turn]:
        return [Turn("user", "1 + 2?")]

    def step(self, message: str) -> Reaction:
        self.read.append(message)
        if message == "3":
            return Reaction(reward=1.0)
        return Reaction([Turn("user", "No.")], is_over=False)


class SumTask(Task):
    def __init__(self) -> None:
        super().__init__(None, seed=0, device=CPU, scenario_dir=None)

    def environment(self, split: object, index: int) -> Environment:
        return Sums()


class Scripted:
    """Generates texts in order; `!` at the end leaves out the end of a turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.contexts: list[list[int]] = []
        self.sampled: list[list[int]] = []

    def __call__(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        self.contexts += map(list, contexts)
        text = self.texts.pop(0)
        row = self.tokenizer.encode(text.removesuffix("!"), add_special_tokens=False)
        row += [] if text.endswith("!") else [self.tokenizer.eos_token_id]
        self.sampled.append(row)
        ids, mask = pad_right([row], CPU)
        return Generation(ids, mask, torch.where(mask, -0.5, 0.0))

    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(context) for context in self.contexts]


def make_agent(tokenizer: PreTrainedTokenizerFast, **options: Any) -> ConversationAgent:
    ends = (tokenizer.eos_token_id,)
    model: Any = SimpleNamespace(tokenizer=tokenizer, context_window=4096, end_ids=ends)
    return ConversationAgent(
        "policy", model, ChatFormat(tokenizer, **options), SamplingOptions(256)
    )


def play(script: Scripted, *, max_turns: int = 4, **options: Any) -> TaskRollout:
    agent = make_agent(script.tokenizer, **options)
    plan = TaskPlan("train", 1, max_turns, (0,))
    return play_task(agent, SumTask(), [0], plan, sample=script)


@pytest.mark.parametrize("opens_thought", [False, True])
@pytest.mark.parametrize("are_special", [False, True])
def test_only_calls_after_the_reasoning_are_executed(
    opens_thought: bool, are_special: bool
) -> None:
    tokenizer = make_thinking_tokenizer(opens_thought=opens_thought, are_special=are_special)
    opening = "" if opens_thought else "<think>\n"
    script = Scripted(
        tokenizer,
        [
            f"{opening}I could write {ADD} twice.\n</think>\n\n{ADD}",
            f"{opening}So it is {ADD} 3.\n</think>\n\n3",
        ],
    )
    (episode,) = play(script).episodes
    assert episode.tool_counts == {"calls": 1}
    assert episode.environment.read == ["3"]
    assert episode.reward == 1.0
    assert episode.messages == [
        Turn("user", "1 + 2?"),
        Turn(
            "assistant",
            "",
            f"I could write {ADD} twice.",
            (ToolCall("add", {"a": 1, "b": 2}),),
        ),
        Turn("tool", "3"),
        Turn("assistant", "3", f"So it is {ADD} 3."),
    ]


@pytest.mark.parametrize("opens_thought", [False, True])
def test_all_sampled_tokens_are_learned_from_after_the_context_that_they_followed(
    opens_thought: bool,
) -> None:
    tokenizer = make_thinking_tokenizer(opens_thought=opens_thought)
    opening = "" if opens_thought else "<think>\n"
    script = Scripted(
        tokenizer,
        [
            f"{opening}A tool.\n</think>\n\n{ADD}",
            f"{opening}Four?\n</think>\n\n4",
            f"{opening}Three.\n</think>\n\n3",
        ],
    )
    trajectories = play(script).trajectories
    # The second context extends the first turn; the third is without the earlier reasoning.
    assert len(trajectories) == 2
    first, second = trajectories
    assert [first.tokens[i] for i, own in enumerate(first.loss_mask) if own] == [
        *script.sampled[0],
        *script.sampled[1],
    ]
    assert list(first.tokens[: len(script.contexts[1])]) == script.contexts[1]
    assert [second.tokens[i] for i, own in enumerate(second.loss_mask) if own] == script.sampled[2]
    prompts = script.prompts()
    assert "A tool." in prompts[1]
    assert "A tool." not in prompts[2]
    assert "Four?" not in prompts[2]
    assert f"assistant: {ADD}<end>tool: 3<end>assistant: 4<end>user: No.<end>" in prompts[2]


@pytest.mark.parametrize("answer", ["<think>\nOne and !", "<think>\nOne and two.\n</think>\n\n!"])
def test_an_answer_that_ends_before_its_text_is_missing(answer: str) -> None:
    rollout = play(Scripted(make_thinking_tokenizer(), [answer]))
    (episode,) = rollout.episodes
    assert episode.messages[-1].is_missing
    assert episode.environment.read == []
    assert episode.reward == 0.0
    (trajectory,) = rollout.trajectories
    assert trajectory.extras["is_cut"] == 1


def test_an_empty_answer_that_the_policy_ended_is_read() -> None:
    (episode,) = play(
        Scripted(make_thinking_tokenizer(), ["<think>\n\n</think>\n\n", "3"])
    ).episodes
    assert episode.environment.read == ["", "3"]


def test_other_markers_are_a_parameter() -> None:
    script = Scripted(make_thinking_tokenizer(), ["(( 3 ))3"])
    (episode,) = play(script, reasoning_markers=["((", "))"]).episodes
    assert (episode.messages[-1].text, episode.messages[-1].reasoning) == ("3", "3")
    script = Scripted(make_thinking_tokenizer(), ["<think>\n</think>\n3", "3"])
    (episode,) = play(script, reasoning_markers=[]).episodes
    assert episode.environment.read == ["<think>\n</think>\n3", "3"]


def test_a_token_across_the_end_of_the_reasoning_is_written_anew() -> None:
    """Without tokens of their own, markers may end within a token."""
    tokenizer = make_thinking_tokenizer()
    tokenizer.add_tokens([")4"])
    script = Scripted(tokenizer, ["(4)4", "(3)3"])
    play(script, reasoning_markers=["(", ")"])
    assert "assistant: 4<end>user: No." in script.prompts()[1]


# ---- families of models


class Notes(Environment):
    """Asks for a note, then for an answer."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.notes: list[str] = []
        self.tools = (self.note,)

    def note(self, text: str) -> str:
        """Keep a note."""
        self.notes.append(text)
        return "kept"

    def reset(self) -> Sequence[Turn]:
        return [Turn("user", "hello")]

    def step(self, message: str) -> Reaction:
        self.read.append(message)
        return Reaction(reward=1.0)


class NoteTask(SumTask):
    def environment(self, split: object, index: int) -> Environment:
        return Notes()


def play_notes(name: str, *texts: str, **options: Any) -> tuple[Notes, TaskRollout]:
    agent = make_agent(FAMILIES[name].tokenizer(), **options)
    agent.language_model.context_window = 1 << 16
    script = Scripted(agent.language_model.tokenizer, texts)
    rollout = play_task(agent, NoteTask(), [0], TaskPlan("train", 1, 3, (0,)), sample=script)
    (episode,) = rollout.episodes
    assert isinstance(episode.environment, Notes)
    return episode.environment, rollout


@pytest.mark.parametrize("name", WITH_THOUGHTS)
def test_families_answer_after_their_reasoning(name: str) -> None:
    family = FAMILIES[name]
    assert family.think is not None
    thought = "Perhaps tea."
    if family.shows_tools:
        thought += family.write_calls([ToolCall("note", {"text": "draft"})])
    environment, rollout = play_notes(name, family.think(thought) + family.say("Tea."))
    assert (environment.read, environment.notes) == (["Tea."], [])
    (episode,) = rollout.episodes
    assert episode.messages[-1] == Turn("assistant", "Tea.", thought.strip())


@pytest.mark.parametrize("name", WITH_THOUGHTS)
def test_families_that_are_cut_within_their_reasoning_have_no_answer(name: str) -> None:
    family = FAMILIES[name]
    assert family.think is not None
    whole = family.think("Perhaps tea.")
    cut = whole[: whole.index("tea")]
    environment, rollout = play_notes(name, f"{cut}!")
    (episode,) = rollout.episodes
    assert environment.read == []
    assert episode.messages[-1].is_missing
    assert episode.reward == 0.0


@pytest.mark.parametrize(
    "name", [name for name, family in FAMILIES.items() if family.thinking_off is not None]
)
def test_families_with_thinking_off_answer_at_once(name: str) -> None:
    environment, rollout = play_notes(name, "Tea.", template_options=FAMILIES[name].thinking_off)
    assert environment.read == ["Tea."]
    (episode,) = rollout.episodes
    assert episode.messages[-1] == Turn("assistant", "Tea.")


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_families_call_tools_and_answer(name: str) -> None:
    family = FAMILIES[name]
    call = ToolCall("note", {"text": 'a\nb </tool_call> "007"'})
    thought = "" if family.think is None else family.think("A note.")
    environment, _ = play_notes(
        name, thought + family.write_calls([call]), thought + family.say("Done.")
    )
    assert environment.notes == ['a\nb </tool_call> "007"']
    assert environment.read == ["Done."]

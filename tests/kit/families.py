"""Families of models by their chat templates, which are read from the installed `trl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from nip_astra.language_models.services.chat import render_chat
from nip_astra.rollouts.messages import ToolCall
from tests.kit.tiny import make_byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "A text."},
        "count": {"type": "integer", "description": "A number."},
        "place": {"type": "object", "properties": {}, "description": "A place."},
    },
    "required": [],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "note", "description": "Keep a note.", "parameters": SCHEMA},
}
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}


def template_of(name: str) -> str:
    """A chat template of the installed library."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs pip install 'nip_astra[test]'")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def between(opening: str, closing: str) -> Callable[[str], str]:
    return lambda thought: f"{opening}{thought}{closing}"


@dataclass(frozen=True)
class Family:
    """How the models of a family write, independently of what the product finds out."""

    template: str
    think: Callable[[str], str] | None = None
    """Writes a thought before an answer; None for a family without thoughts."""
    say: Callable[[str], str] = str
    """Writes a text."""
    call_start: str = "<tool_call>"
    call_end: str = "<|im_end|>"
    """What the template writes after calls."""
    opens_thought: bool = False
    """Whether the prompt opens the thought; `think` writes only the rest of it then."""
    thinking_off: Mapping[str, Any] | None = None
    """Variables of the template for answers without a thought."""
    special: Sequence[str] = ()
    """Marks that are special tokens of the family's tokenizers."""
    has_two_calls: bool = True
    shows_tools: bool = True

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer of bytes with the family's template and special tokens."""
        return _make_tokenizer(self.template, tuple(self.special))

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        """The calls as the template writes them."""
        parts = [call.as_message_part(f"abcdefgh{place}") for place, call in enumerate(calls)]
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": parts}
        text = render_chat(self.tokenizer(), [HELLO, answer], opens_answer=False, tools=[TOOL])
        written = text.rpartition("hello")[2]
        written = written[written.index(self.call_start) :]
        return written[: written.rindex(self.call_end)] if self.call_end else written


@cache
def _make_tokenizer(template: str, special: tuple[str, ...]) -> PreTrainedTokenizerFast:
    tokenizer = make_byte_tokenizer()
    marks = [AddedToken(mark, special=True) for mark in special]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.chat_template = template_of(template)
    return tokenizer


_CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
_RECIPIENTS = ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"]
_THINK = between("<think>\n", "\n</think>\n\n")
_REST = between("", "\n</think>\n\n")
_OFF = {"enable_thinking": False}
_GEMMA: dict[str, Any] = {
    "think": between("<|channel>thought\n", "\n<channel|>"),
    "call_start": "<|tool_call>",
    "call_end": "<|tool_response>",
    "special": ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>"],
    "thinking_off": {},
}
_LFM: dict[str, Any] = {
    "call_start": "<|tool_call_start|>",
    "special": ["<|tool_call_start|>", "<|tool_call_end|>"],
}
_NEMOTRON: dict[str, Any] = {"think": _REST, "opens_thought": True, "thinking_off": _OFF}
FAMILIES = {
    "Qwen 2.5": Family("qwen2_5"),
    "Qwen 3": Family("qwen3", _THINK, thinking_off=_OFF),
    "Qwen 3 instruct": Family("qwen3_instruct_2507"),
    "Qwen 3.5": Family("qwen3_5_think", _REST, opens_thought=True, thinking_off=_OFF),
    "Qwen 3.5 without thinking": Family("qwen3_5_nothink", _THINK, thinking_off={}),
    "Qwen 3.6": Family("qwen3_6", _REST, opens_thought=True, thinking_off=_OFF),
    "Qwen 3.8": Family("qwen3_8", _REST, opens_thought=True),
    "GLM 4": Family("glm4moe", between("\n<think>", "</think>\n"), call_end="", thinking_off=_OFF),
    "gpt-oss": Family(
        "gptoss",
        between("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        between("<|channel|>final<|message|>", ""),
        call_start=" to=functions.",
        call_end="<|call|>",
        special=_CHANNELS,
        has_two_calls=False,
    ),
    "Gemma 4": Family("gemma4", **_GEMMA),
    "Gemma 4, fifth template": Family("gemma4_v5", **_GEMMA),
    "Nemotron 3 nano": Family("nemotron_3_nano", **_NEMOTRON),
    "Nemotron 3 super": Family("nemotron_3_super", **_NEMOTRON),
    "Nemotron 3 ultra": Family("nemotron_3_ultra", **_NEMOTRON),
    "Nemotron 3.5": Family("nemotron_3_5_lightning", **_NEMOTRON),
    "LFM 2": Family("lfm2_v2", **_LFM),
    "LFM 2.5": Family("lfm2_2_5_v2", between("<think>", "</think>"), **_LFM),
    "Llama 3.1": Family(
        "llama3_1", call_start='{"name"', call_end="<|eot_id|>", has_two_calls=False
    ),
    "Llama 3.2": Family(
        "llama3_2", call_start='{"name"', call_end="<|eot_id|>", has_two_calls=False
    ),
    "Muse": Family(
        "muse_glimmer",
        between(" to=self<|message|>", "<|eom|><|start|>assistant"),
        between(" to=user<|message|>", ""),
        call_start=" to=note",
        call_end="<|eot|>",
        special=_RECIPIENTS,
    ),
    "DeepSeek R1": Family("deepseekv3", _REST, opens_thought=True, shows_tools=False),
    "DeepSeek R1 distilled": Family(
        "deepseek_r1_distill", _REST, opens_thought=True, shows_tools=False
    ),
    "Cohere": Family("cohere2", shows_tools=False),
    "Phi 3.5": Family("phi3_5", shows_tools=False),
}
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.shows_tools]
WITH_THOUGHTS = [name for name, family in FAMILIES.items() if family.think is not None]
SIMILAR = (
    *("Qwen 3 instruct", "Qwen 3.5 without thinking", "Qwen 3.6", "Qwen 3.8", "Llama 3.1"),
    *("Gemma 4, fifth template", "Nemotron 3 nano", "Nemotron 3 ultra", "DeepSeek R1 distilled"),
)
"""Families that write as another one."""


def quickly(names: Sequence[str]) -> list[Any]:
    """Parameters of a test that leaves similar families to the slow tests."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in SIMILAR else n for n in names]

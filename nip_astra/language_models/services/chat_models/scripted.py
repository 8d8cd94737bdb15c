"""Answers that are written down beforehand, for tests and for trying out what a run would ask."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator

from nip_astra.language_models.services.chat import (
    CPU,
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    ChatUsage,
    FailureReason,
    FinishReason,
    cut_at_stop,
    register_chat_model,
)
from nip_astra.parameters.parameters_base import PlainText
from nip_astra.parameters.types import ChatModelType
from nip_astra.utils.seeding import SeedPart, derive_seed

Script = Callable[[ChatRequest, int], str | ChatAnswer | ChatFailure]
"""`(request, sample_number) -> answer`; a text stands for an answer that ended by itself."""


@register_chat_model(ChatModelType.SCRIPTED)
class ScriptedChatModel(ChatModel):
    """Answers from a list, by patterns of what was said, or by a function.

    The answer to a request and a sample number is always the same. Words count as tokens.

    Parameters
    ----------
    script : Callable or Sequence of str
        A function, or answers of which each request begins at one of its own; further samples go on
        from there.
    """

    class Parameters(ChatModel.Parameters):
        """What is answered to what."""

        answers: list[PlainText] = Field(default=["I see."], min_length=1)
        """Answers where no pattern matches; each request begins at one of its own, and further
        samples go on from there."""
        when: dict[PlainText, list[PlainText]] = {}
        """Answers by regular expressions, of which the first that matches the last message counts;
        samples take them in turn."""
        model: PlainText = "scripted"
        """Name under which answers are remembered."""

        @field_validator("when")
        @classmethod
        def _can_be_used(cls, when: dict[str, list[str]]) -> dict[str, list[str]]:
            for pattern, answers in when.items():
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"has {pattern!r}, which is no regular expression: {error}"
                    ) from error
                if not answers:
                    raise ValueError(f"has no answer for {pattern!r}; give at least one")
            return when

    def __init__(self, script: Script | Sequence[str], *, name: str = "scripted") -> None:
        self.name = name
        self._script: Script = script if callable(script) else _by_turns({}, script)
        self.requests: list[ChatRequest] = []
        """What was asked so far, in order."""

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> ScriptedChatModel:
        model = cls(_by_turns(parameters.when, parameters.answers), name=parameters.model)
        model.place = str(derive_seed(str(parameters.when), str(parameters.answers)))
        return model

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        self.requests.append(request)
        if request.response_format is not None:
            form = "a scripted model answers with texts only, and knows no response_format"
            failure = ChatFailure(FailureReason.UNKNOWN_FORM, form)
            return ChatOutcome((failure,) * request.num_samples)
        samples = tuple(
            _ended(self._script(request, number), request) for number in request.sample_numbers
        )
        said = sum(len(one.text.split()) for one in samples if isinstance(one, ChatAnswer))
        read = sum(len(message["content"].split()) for message in request.messages)
        return ChatOutcome(samples, ChatUsage(read, said))


def _by_turns(when: Mapping[str, Sequence[str]], answers: Sequence[str]) -> Script:
    def script(request: ChatRequest, sample: int) -> str:
        last = request.messages[-1]["content"] if request.messages else ""
        for pattern, matching in when.items():
            if re.search(pattern, last):
                return matching[sample % len(matching)]
        parts: list[SeedPart] = [request.seed if request.seed is not None else "no seed"]
        for message in request.messages:
            parts += [message["role"], message["content"]]
        return answers[(derive_seed(*parts) + sample) % len(answers)]

    return script


def _ended(said: str | ChatAnswer | ChatFailure, request: ChatRequest) -> ChatAnswer | ChatFailure:
    """What was said up to a stop text or `max_tokens` words."""
    if not isinstance(said, str):
        return said
    text = cut_at_stop(said, request.stop)
    text = said if text is None else text
    if request.max_tokens is not None and len(text.split()) > request.max_tokens:
        words = re.findall(r"\s*\S+", text)[: request.max_tokens]
        return ChatAnswer("".join(words), FinishReason.LENGTH)
    return ChatAnswer(text)

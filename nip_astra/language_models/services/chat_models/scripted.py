"""A chat model with fixed answers, for tests and trial runs."""

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
"""`(request, sample_number) -> answer`; a text is an answer with the finish reason "stop"."""


@register_chat_model(ChatModelType.SCRIPTED)
class ScriptedChatModel(ChatModel):
    """Answers from a list, by patterns of the last message, or by a function.

    The answer to a request and a sample number is always the same. Words count as tokens.

    Parameters
    ----------
    script : Callable or Sequence of str
        A function, or answers; the request determines the first, further samples take the next.
    """

    class Parameters(ChatModel.Parameters):
        """Scripted answers."""

        answers: list[PlainText] = Field(default=["I see."], min_length=1)
        """Answers if no pattern matches; the request determines the first, further samples take the
        next."""
        when: dict[PlainText, list[PlainText]] = {}
        """Answers by regular expression; the first that matches the last message counts, and
        samples take its answers in turn."""
        model: PlainText = "scripted"
        """Name under which answers are stored."""

        @field_validator("when")
        @classmethod
        def _can_be_used(cls, when: dict[str, list[str]]) -> dict[str, list[str]]:
            for pattern, answers in when.items():
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"has the invalid regular expression {pattern!r}: {error}"
                    ) from error
                if not answers:
                    raise ValueError(f"has no answer for {pattern!r}; give at least one")
            return when

    def __init__(self, script: Script | Sequence[str], *, name: str = "scripted") -> None:
        self.name = name
        self._script: Script = script if callable(script) else _script_of({}, script)
        self.requests: list[ChatRequest] = []
        """The requests so far, in order."""

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> ScriptedChatModel:
        model = cls(_script_of(parameters.when, parameters.answers), name=parameters.model)
        model.place = str(derive_seed(str(parameters.when), str(parameters.answers)))
        return model

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        self.requests.append(request)
        if request.response_format is not None:
            form = "scripted models do not support response_format"
            failure = ChatFailure(FailureReason.UNKNOWN_FORM, form)
            return ChatOutcome((failure,) * request.num_samples)
        samples = tuple(
            _ended(self._script(request, number), request) for number in request.sample_numbers
        )
        prompt = sum(len(message["content"].split()) for message in request.messages)
        answer = sum(len(one.text.split()) for one in samples if isinstance(one, ChatAnswer))
        return ChatOutcome(samples, ChatUsage(prompt, answer))


def _script_of(when: Mapping[str, Sequence[str]], answers: Sequence[str]) -> Script:
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


def _ended(given: str | ChatAnswer | ChatFailure, request: ChatRequest) -> ChatAnswer | ChatFailure:
    """Return the answer up to a stop text or `max_tokens` words."""
    if not isinstance(given, str):
        return given
    text = cut_at_stop(given, request.stop)
    text = given if text is None else text
    if request.max_tokens is not None and len(text.split()) > request.max_tokens:
        words = re.findall(r"\s*\S+", text)[: request.max_tokens]
        return ChatAnswer("".join(words), FinishReason.LENGTH)
    return ChatAnswer(text)

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
        self._script: Script = script if callable(script) else _make_script({}, script)
        self.requests: list[ChatRequest] = []
        """The requests so far, in order."""

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> ScriptedChatModel:
        model = cls(_make_script(parameters.when, parameters.answers), name=parameters.model)
        # Answers of another script are not stored answers of this one.
        model.place = str(derive_seed(str(parameters.when), str(parameters.answers)))
        return model

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        self.requests.append(request)
        if request.response_format is not None:
            message = "scripted models do not support response_format"
            failure = ChatFailure(FailureReason.UNKNOWN_FORM, message)
            return ChatOutcome((failure,) * request.num_samples)
        samples = []
        for number in request.sample_numbers:
            scripted = self._script(request, number)
            samples.append(_end_text(scripted, request) if isinstance(scripted, str) else scripted)
        texts = [sample.text for sample in samples if isinstance(sample, ChatAnswer)]
        usage = ChatUsage(
            prompt_tokens=sum(len(message["content"].split()) for message in request.messages),
            completion_tokens=sum(len(text.split()) for text in texts),
        )
        return ChatOutcome(tuple(samples), usage)


def _make_script(when: Mapping[str, Sequence[str]], answers: Sequence[str]) -> Script:
    """Return the script of answers by pattern, and otherwise by the request."""

    def script(request: ChatRequest, sample: int) -> str:
        last_text = request.messages[-1]["content"] if request.messages else ""
        for pattern, pattern_answers in when.items():
            if re.search(pattern, last_text):
                return pattern_answers[sample % len(pattern_answers)]
        parts: list[SeedPart] = [request.seed if request.seed is not None else "no seed"]
        for message in request.messages:
            parts += [message["role"], message["content"]]
        return answers[(derive_seed(*parts) + sample) % len(answers)]

    return script


def _end_text(text: str, request: ChatRequest) -> ChatAnswer:
    """Return the answer up to a stop text or `max_tokens` words."""
    cut_text = cut_at_stop(text, request.stop)
    if cut_text is not None:
        text = cut_text
    if request.max_tokens is not None and len(text.split()) > request.max_tokens:
        words = re.findall(r"\s*\S+", text)[: request.max_tokens]
        return ChatAnswer("".join(words), FinishReason.LENGTH)
    return ChatAnswer(text)

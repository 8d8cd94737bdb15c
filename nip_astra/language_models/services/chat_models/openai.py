"""A model behind any service that speaks OpenAI's chat-completions protocol."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, JsonValue

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
)
from nip_astra.language_models.services.openai_client import OpenAIConnection, read_key
from nip_astra.language_models.services.registry import register_chat_model
from nip_astra.language_models.services.texts import guess_usage
from nip_astra.parameters.types import ChatModelType
from nip_astra.utils.seeding import derive_seed

NUM_SEEDS = 2**31
"""Seeds that every service takes; a larger one is taken modulo this."""


@register_chat_model(ChatModelType.OPENAI)
class OpenAIChatModel(ChatModel):
    """A model behind any service that speaks OpenAI's chat-completions protocol."""

    class Parameters(ChatModel.Parameters):
        """Which model at which address."""

        model: str
        """Name of the model at the service."""
        base_url: str = Field(default="https://api.openai.com/v1", pattern=r"^https?://")
        """Address of the service up to `/chat/completions`."""
        api_key_variable: str | None = None
        """Environment variable that holds the key; null sends none. The key is written nowhere."""
        token_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
        """Name under which the most tokens of an answer are sent. Newer models of OpenAI demand
        max_completion_tokens; most other services know max_tokens."""
        sends_seed: bool = True
        """Whether requests hold a seed; false for services that refuse it."""
        samples_per_request: int = Field(default=1, ge=1)
        """Samples that one request asks for (`n`). Larger pays for the messages once for all of
        them, where the service knows `n`."""
        extra_body: dict[str, JsonValue] = {}
        """Further fields of each request, for instance `reasoning_effort`."""
        timeout: float = Field(default=120.0, gt=0)
        """Seconds without a byte after which an attempt is given up."""

    def __init__(self, parameters: Any, *, what: str = "the chat model") -> None:
        self.parameters = parameters
        self.name = parameters.model
        self.samples_at_once = parameters.samples_per_request
        self._connection = OpenAIConnection(
            parameters.base_url,
            api_key=read_key(parameters.api_key_variable, what=what),
            timeout=parameters.timeout,
            what=what,
        )
        more = json.dumps(parameters.extra_body, sort_keys=True) if parameters.extra_body else ""
        self.place = self._connection.base_url + more

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> OpenAIChatModel:
        return cls(parameters)

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        parts = request.parts(self.samples_at_once)
        outcomes = await asyncio.gather(*map(self._ask, parts))
        return ChatOutcome(
            tuple(sample for outcome in outcomes for sample in outcome.samples),
            ChatUsage(*(sum(counts) for counts in zip(*(o.usage for o in outcomes), strict=True))),
            is_usage_estimated=any(outcome.is_usage_estimated for outcome in outcomes),
        )

    async def close(self) -> None:
        await self._connection.close()

    async def _ask(self, request: ChatRequest) -> ChatOutcome:
        """Send one request."""
        completions = self._connection.client().chat.completions.with_raw_response
        messages: Any = list(request.messages)
        try:
            response = await completions.create(
                model=self.name,
                messages=messages,
                extra_body=self._fields(request),
                extra_headers=_headers(request),
            )
            found = json.loads(response.http_response.text)
        except (ValueError, RecursionError) as error:
            return _failed(request, FailureReason.MALFORMED, f"the answer is no JSON: {error}")
        except Exception as error:
            # The package's errors; any other one is raised again in there.
            failure = self._connection.failure_of(error)
            return ChatOutcome((failure,) * request.num_samples)
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or not choices:
            said = self._connection.shown(json.dumps(found))
            return _failed(
                request, FailureReason.MALFORMED, f"{said!r} is no chat completion with an answer"
            )
        samples = _read_samples(choices, request)
        usage = _read_usage(found.get("usage"))
        if usage is not None:
            return ChatOutcome(samples, usage)
        texts = [one.text for one in samples if isinstance(one, ChatAnswer)]
        return ChatOutcome(samples, guess_usage(request.messages, texts), is_usage_estimated=True)

    def _fields(self, request: ChatRequest) -> dict[str, Any]:
        """The fields of a request beside model and messages; what is left to the service is out."""
        fields: dict[str, Any] = {
            self.parameters.token_field: request.max_tokens,
            "temperature": request.temperature,
            "top_p": None if request.top_p == 1.0 else request.top_p,
            "stop": list(request.stop) or None,
            "n": request.num_samples if request.num_samples > 1 else None,
            "logprobs": True if request.needs_logprobs else None,
            "response_format": request.response_format,
            "seed": self._seed_of(request),
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return {**given, **self.parameters.extra_body}

    def _seed_of(self, request: ChatRequest) -> int | None:
        if request.seed is None or not self.parameters.sends_seed:
            return None
        seed, first = request.seed, request.first_sample
        return (derive_seed(seed, "sample", first) if first else seed) % NUM_SEEDS


def _headers(request: ChatRequest) -> dict[str, str]:
    """The name of the request, of as many letters as any service takes."""
    if request.key is None:
        return {}
    part = f"{request.key}/{request.first_sample}/{request.num_samples}"
    return {"Idempotency-Key": hashlib.sha256(part.encode()).hexdigest()}


def _failed(request: ChatRequest, reason: FailureReason, message: str) -> ChatOutcome:
    # The service may have done its work and want to be paid for reading.
    failures = (ChatFailure(reason, message),) * request.num_samples
    return ChatOutcome(failures, guess_usage(request.messages, ()), is_usage_estimated=True)


def _read_samples(choices: list[Any], request: ChatRequest) -> tuple[ChatAnswer | ChatFailure, ...]:
    """One sample of each choice; a failure where there is none."""
    missing = ChatFailure(FailureReason.MALFORMED, f"only {len(choices)} answers were given")
    read = [_read_choice(choice) for choice in choices[: request.num_samples]]
    return (*read, *[missing] * (request.num_samples - len(read)))


def _read_choice(choice: Any) -> ChatAnswer | ChatFailure:
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return ChatFailure(FailureReason.MALFORMED, "the answer has no message")
    text, refusal = message.get("content"), message.get("refusal")
    try:
        finish = FinishReason(choice.get("finish_reason"))
    except ValueError:
        finish = FinishReason.STOP
    if not isinstance(text, str):
        # A model that thinks may use up its tokens before its first word.
        is_silent = bool(refusal) or finish is not FinishReason.STOP
        if text is not None or not is_silent:
            return ChatFailure(FailureReason.MALFORMED, "the answer has no text")
        text = ""
    return ChatAnswer(
        text,
        finish,
        refusal if isinstance(refusal, str) and refusal else None,
        _read_logprobs(choice.get("logprobs")),
    )


def _read_logprobs(found: Any) -> tuple[float, ...] | None:
    tokens = found.get("content") if isinstance(found, dict) else None
    if not isinstance(tokens, list):
        return None
    values = [token.get("logprob") if isinstance(token, dict) else None for token in tokens]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return None
    return tuple(float(value) for value in values if value is not None)


def _read_usage(found: Any) -> ChatUsage | None:
    """The tokens that a service counts; None where they are missing or no counts."""
    if not isinstance(found, Mapping):
        return None
    counts = [found.get(name) for name in ChatUsage._fields]
    if not all(type(count) is int and 0 <= count < NUM_SEEDS for count in counts):
        return None
    return ChatUsage(*(int(count) for count in counts if count is not None))

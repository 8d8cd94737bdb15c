"""A chat model behind any service with OpenAI's chat-completions protocol."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, JsonValue, model_validator

from nip_astra.errors import counted
from nip_astra.language_models.services.chat import (
    CPU,
    NUM_SEEDS,
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    ChatUsage,
    FailureReason,
    FinishReason,
    estimate_usage,
    register_chat_model,
)
from nip_astra.language_models.services.http_client import (
    OpenAIConnection,
    passing_reason,
    read_key,
)
from nip_astra.language_models.services.service_process import OwnService, digest_of_files
from nip_astra.language_models.sources import resolve_model
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import PlainText, Url
from nip_astra.parameters.types import ChatModelType

UNFINISHED = ("error", "abort")
"""Finish reasons of OpenRouter and vLLM for an answer that the service did not complete."""


@register_chat_model(ChatModelType.OPENAI)
class OpenAIChatModel(ChatModel):
    """A model behind any service with OpenAI's chat-completions protocol."""

    class Parameters(ChatModel.Parameters):
        """Model and address."""

        model: PlainText
        """Name of the model at the service."""
        service: Literal["address", "local"] = "address"
        """address: a service at `base_url`. local: a `nip-astra serve` in its own process on a free
        port of this machine, from the first request to the end of the run."""
        weights: Annotated[str | None, where("service", "local")] = None
        """Weights that the local service serves as `model`: a folder, hub id or `.gguf` file,
        `scenario://x` in the scenario's folder or `package://name/x`."""
        base_url: Annotated[Url, where("service", "address")] = Field(
            default="https://api.openai.com/v1", pattern=r"^https?://"
        )
        """Address of the service up to `/chat/completions`."""
        api_key_variable: Annotated[str | None, where("service", "address")] = None
        """Environment variable with the key; null sends none. The key is never stored."""
        token_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
        """Name of the field for the maximum answer length. Newer models of OpenAI require
        max_completion_tokens; most other services support max_tokens."""
        sends_seed: bool = True
        """Whether requests have a seed; false for services that refuse it."""
        samples_per_request: int = Field(default=1, ge=1)
        """Samples per request (`n`). Larger pays once for the prompt of several samples, if the
        service supports `n`."""
        extra_body: dict[str, JsonValue] = {}
        """Additional fields of each request, for instance `reasoning_effort`."""
        timeout: float = Field(default=120.0, gt=0)
        """Seconds without data after which an attempt fails."""

        @model_validator(mode="after")
        def _has_weights(self) -> Self:
            if self.service == "local" and self.weights is None:
                raise ValueError(
                    "has service: local, which needs weights: a folder, hub id or .gguf file"
                )
            return self

    def __init__(
        self,
        parameters: Any,
        *,
        what: str = "the chat model",
        scenario_dir: Path | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.parameters = parameters
        self.name = parameters.model
        self.samples_at_once = parameters.samples_per_request
        self._what = what
        self._own: OwnService | None = None
        self._connection: OpenAIConnection | None = None
        if parameters.service == "local":
            source, file = resolve_model(parameters.weights, scenario_dir)
            path = Path(source) / (file or "")
            weights = str(path.resolve()) if path.exists() else source
            self._own = OwnService.shared(self.name, weights, str(device))
            # Not its address: the port changes.
            self.place = f"local service of {weights} {digest_of_files(weights)}"
        else:
            key = read_key(parameters.api_key_variable, f"api_key_variable of {what}")
            self._connection = self._connect(parameters.base_url, key)
            self.place = self._connection.base_url
        if parameters.extra_body:
            self.place += json.dumps(parameters.extra_body, sort_keys=True)

    def _connect(self, base_url: str, api_key: str | None) -> OpenAIConnection:
        return OpenAIConnection(
            base_url,
            api_key=api_key,
            timeout=self.parameters.timeout,
            what=self._what,
            # A proxy cannot reach addresses of this machine.
            uses_proxies=self._own is None,
        )

    async def _open(self) -> OpenAIConnection:
        """Open the connection; start a local service if necessary."""
        if self._own is not None:
            base_url = self._own.address
            if base_url is None:
                base_url = await asyncio.to_thread(self._own.start)
            if self._connection is None or self._connection.base_url != base_url:
                self._connection = self._connect(base_url, None)
        assert self._connection is not None
        return self._connection

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> OpenAIChatModel:
        return cls(parameters, scenario_dir=scenario_dir, device=device)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        if self._own is not None:
            await asyncio.to_thread(self._own.stop)

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        connection = await self._open()
        completions = connection.client().chat.completions.with_raw_response
        messages: Any = list(request.messages)
        fields = self._fields(request)
        try:
            response = await completions.create(
                model=self.name,
                messages=messages,
                extra_body=fields,
                extra_headers=_headers(request),
            )
            found = json.loads(response.http_response.text)
        except (ValueError, RecursionError) as error:
            return _failed(request, FailureReason.MALFORMED, f"the answer is not JSON: {error}")
        except Exception as error:
            # Errors of the package; others are raised again.
            failure = connection.failure_of(error, has_format="response_format" in fields)
            return ChatOutcome((failure,) * request.num_samples)
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or not choices:
            shown = connection.shown(json.dumps(found))
            fault = found.get("error") if isinstance(found, dict) else None
            # OpenRouter's status is 200 although the service behind it failed.
            reason = passing_reason(fault.get("code")) if isinstance(fault, dict) else None
            reason = reason or FailureReason.MALFORMED
            return _failed(request, reason, f"{shown!r} is not a chat completion")
        missing = ChatFailure(
            FailureReason.MALFORMED, f"only {counted(len(choices), 'answer')} came"
        )
        read = [_read_choice(choice) for choice in choices[: request.num_samples]]
        samples = (*read, *[missing] * (request.num_samples - len(read)))
        usage = _read_usage(found.get("usage"))
        if usage is not None:
            return ChatOutcome(samples, usage)
        texts = [one.text for one in samples if isinstance(one, ChatAnswer)]
        return ChatOutcome(
            samples, estimate_usage(request.messages, texts), is_usage_estimated=True
        )

    def _fields(self, request: ChatRequest) -> dict[str, Any]:
        """Return the fields of a request besides model and messages, without service defaults."""
        fields: dict[str, Any] = {
            self.parameters.token_field: request.max_tokens,
            "temperature": request.temperature,
            "top_p": None if request.top_p == 1.0 else request.top_p,
            "stop": list(request.stop) or None,
            "n": request.num_samples if request.num_samples > 1 else None,
            "logprobs": True if request.needs_logprobs else None,
            "response_format": request.response_format,
            "seed": request.seed_from(request.first_sample) if self.parameters.sends_seed else None,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return {**given, **self.parameters.extra_body}


def _headers(request: ChatRequest) -> dict[str, str]:
    """Return the key of the request as headers, at a length that every service accepts."""
    if request.key is None:
        return {}
    part = f"{request.key}/{request.first_sample}/{request.num_samples}"
    return {"Idempotency-Key": hashlib.sha256(part.encode()).hexdigest()}


def _failed(request: ChatRequest, reason: FailureReason, message: str) -> ChatOutcome:
    # The service may charge for the prompt.
    failures = (ChatFailure(reason, message),) * request.num_samples
    return ChatOutcome(failures, estimate_usage(request.messages, ()), is_usage_estimated=True)


def _read_choice(choice: Any) -> ChatAnswer | ChatFailure:
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return ChatFailure(FailureReason.MALFORMED, "the answer has no message")
    text, refusal = message.get("content"), message.get("refusal")
    if choice.get("finish_reason") in UNFINISHED:
        return ChatFailure(FailureReason.UNAVAILABLE, "the service failed within the answer")
    try:
        finish = FinishReason(choice.get("finish_reason"))
    except ValueError:
        finish = FinishReason.STOP
    if not isinstance(text, str):
        # A reasoning model may use up its tokens before its first word.
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
    """Return the tokens counted by the service; None if missing or invalid."""
    if not isinstance(found, Mapping):
        return None
    counts = [found.get(name) for name in ChatUsage._fields]
    if not all(type(count) is int and 0 <= count < NUM_SEEDS for count in counts):
        return None
    return ChatUsage(*(int(count) for count in counts if count is not None))

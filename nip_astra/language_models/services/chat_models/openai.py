"""A chat model behind any service with OpenAI's chat-completions protocol."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, JsonValue, model_validator

from nip_astra.errors import counted
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
    estimate_usage,
    register_chat_model,
)
from nip_astra.language_models.services.http_client import (
    OpenAIConnection,
    find_filter_message,
    find_passing_reason,
    find_token_field,
    is_status_error,
    read_key,
    responses_up_to,
)
from nip_astra.language_models.services.service_process import OwnService, digest_files
from nip_astra.language_models.sources import resolve_model
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import PlainText, Url
from nip_astra.parameters.types import ChatModelType
from nip_astra.rollouts.messages import ToolCall

WITHHELD = ("content_filter", "refusal", "safety", "prohibited_content")
"""Finish reasons for an answer that a filter or the model's provider withholds."""
MAX_TOKENS_COUNTED = 2**31
"""Counts of tokens from this one on are invalid: they would exhaust any budget."""
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
        max_completion_tokens; most other services support max_tokens. If the service rejects it by
        name, the other one is used for the rest of the run."""
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
        service_name: str = "the chat model",
        scenario_dir: Path | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.parameters = parameters
        self.name = parameters.model
        self.samples_at_once = parameters.samples_per_request
        self._service_name = service_name
        self._token_field: str = parameters.token_field
        self._own: OwnService | None = None
        self._connection: OpenAIConnection | None = None
        if parameters.service == "local":
            source, file = resolve_model(parameters.weights, scenario_dir)
            path = Path(source) / (file or "")
            weights = str(path.resolve()) if path.exists() else source
            self._own = OwnService.shared(self.name, weights, str(device))
            # The key of stored answers. Not the address, whose port changes.
            self.place = f"local service of {weights} {digest_files(weights)}"
        else:
            key = read_key(parameters.api_key_variable, f"api_key_variable of {service_name}")
            self._connection = self._connect(parameters.base_url, key)
            self.place = self._connection.base_url
        if parameters.extra_body:
            self.place += json.dumps(parameters.extra_body, sort_keys=True)

    def _connect(self, base_url: str, api_key: str | None) -> OpenAIConnection:
        return OpenAIConnection(
            base_url,
            api_key=api_key,
            timeout=self.parameters.timeout,
            service=self._service_name,
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
        try:
            with responses_up_to(request.longest_response):
                response = await self._send(connection, request)
            body = json.loads(response)
        except (ValueError, RecursionError) as error:
            return _failed(request, FailureReason.MALFORMED, f"the answer is not JSON: {error}")
        except Exception as error:
            return self._outcome_of_error(connection, error, request)
        choices = body.get("choices") if isinstance(body, dict) else None
        if not isinstance(choices, list) or not choices:
            reason = None
            fault = body.get("error") if isinstance(body, dict) else None
            if isinstance(fault, dict):
                # OpenRouter's status is 200 although the service behind it failed.
                reason = find_passing_reason(fault.get("code"))
            message = f"{connection.shorten(json.dumps(body))!r} is not a chat completion"
            return _failed(request, reason or FailureReason.MALFORMED, message)
        samples = [read_choice(choice) for choice in choices[: request.num_samples]]
        num_missing = request.num_samples - len(samples)
        if num_missing > 0:
            # Some services ignore `n`.
            message = f"only {counted(len(choices), 'answer')} came"
            samples += [ChatFailure(FailureReason.MALFORMED, message)] * num_missing
        usage = _read_usage(body.get("usage"))
        if usage is not None:
            return ChatOutcome(tuple(samples), usage)
        texts = [sample.text for sample in samples if isinstance(sample, ChatAnswer)]
        estimated_usage = estimate_usage(request.messages, texts)
        return ChatOutcome(tuple(samples), estimated_usage, is_usage_estimated=True)

    async def _send(self, connection: OpenAIConnection, request: ChatRequest) -> str:
        """Return the body of the service's response.

        If the service rejects the name of the field for the maximum length, the request is sent
        again with the other one, which is kept once it is accepted.
        """
        token_field = self._token_field
        try:
            return await self._post(connection, request, token_field)
        except Exception as error:
            other_field = find_token_field(error, token_field) if is_status_error(error) else None
            if other_field is None or request.max_tokens is None:
                raise
        body = await self._post(connection, request, other_field)
        self._token_field = other_field
        return body

    async def _post(
        self, connection: OpenAIConnection, request: ChatRequest, token_field: str
    ) -> str:
        # The raw response: the package builds objects without checking what it reads.
        completions = connection.client().chat.completions.with_raw_response
        messages: Any = list(request.messages)
        response = await completions.create(
            model=self.name,
            messages=messages,
            extra_body=self._fields(request, token_field),
            extra_headers=_headers(request),
        )
        text: str = response.http_response.text
        return text

    def _outcome_of_error(
        self, connection: OpenAIConnection, error: Exception, request: ChatRequest
    ) -> ChatOutcome:
        """Return the outcome of an error of the package; raise any other error again."""
        refusal = find_filter_message(error) if is_status_error(error) else None
        if refusal is not None:
            # Part of the experiment's data, not a failure: the probe was refused.
            refusal = connection.shorten(refusal)
            answer = ChatAnswer("", FinishReason.CONTENT_FILTER, refusal=refusal)
            usage = estimate_usage(request.messages, ())
            return ChatOutcome((answer,) * request.num_samples, usage, is_usage_estimated=True)
        has_format = "response_format" in self._fields(request, self._token_field)
        failure = connection.classify_error(error, has_format=has_format)
        return ChatOutcome((failure,) * request.num_samples)

    def _fields(self, request: ChatRequest, token_field: str) -> dict[str, Any]:
        """Return the fields of a request besides model and messages, without service defaults."""
        seed = request.seed_from(request.first_sample) if self.parameters.sends_seed else None
        # Some services refuse a field that they do not know, even at its default.
        fields: dict[str, Any] = {
            token_field: request.max_tokens,
            "temperature": request.temperature,
            "top_p": None if request.top_p == 1.0 else request.top_p,
            "stop": list(request.stop) or None,
            "n": request.num_samples if request.num_samples > 1 else None,
            "logprobs": True if request.needs_logprobs else None,
            "response_format": request.response_format,
            "seed": seed,
        }
        sent_fields = {name: field for name, field in fields.items() if field is not None}
        return {**sent_fields, **self.parameters.extra_body}


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


def read_choice(choice: Any) -> ChatAnswer | ChatFailure:
    """Return the answer in an element of a chat completion's `choices`."""
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return ChatFailure(FailureReason.MALFORMED, "the answer has no message")
    if choice.get("finish_reason") in UNFINISHED:
        return ChatFailure(FailureReason.UNAVAILABLE, "the service failed within the answer")
    parts = read_content(message.get("content"))
    if parts is None:
        return ChatFailure(FailureReason.MALFORMED, "the content of the answer is not a text")
    # DeepSeek's and SGLang's name, then OpenRouter's and vLLM's, then Mistral's.
    reasoning = message.get("reasoning_content") or message.get("reasoning") or parts.reasoning
    answer = ChatAnswer(
        parts.text or "",
        _read_finish(choice.get("finish_reason")),
        _text_or_none(message.get("refusal")) or parts.refusal,
        _read_logprobs(choice.get("logprobs")),
        _text_or_none(reasoning),
        _read_calls(message.get("tool_calls")),
    )
    if parts.text is None and not (answer.calls or answer.is_refused or answer.is_missing):
        return ChatFailure(FailureReason.MALFORMED, "the answer has no text")
    return answer


class ContentParts(NamedTuple):
    """The parts of a message's content; None where there is no such part."""

    text: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


PART_FIELDS = {"text": "text", "output_text": "text", "thinking": "reasoning", "refusal": "refusal"}
"""Types of the parts of a content, each with the part of `ContentParts` that it belongs to."""


def read_content(content: Any) -> ContentParts | None:
    """Return the parts of a message's content, a text or a list of parts; None for other values.

    Parts without text, for instance images, are left out.
    """
    if content is None or isinstance(content, str):
        return ContentParts(content)
    if not isinstance(content, list) or not content:
        return None
    texts: dict[str, list[str]] = {}
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            return None
        if kind in PART_FIELDS:
            # The text has the name of the part's type, unless it is called "text".
            text = part["text"] if "text" in part else part.get(kind)
            if isinstance(text, list):
                # Mistral's {"type": "thinking", "thinking": [{"type": "text", "text": ...}]}.
                inner_parts = read_content(text)
                text = None if inner_parts is None else inner_parts.text
            if isinstance(text, str):
                texts.setdefault(PART_FIELDS[kind], []).append(text)
            else:
                texts.setdefault(PART_FIELDS[kind], [])
    return ContentParts(**{name: "".join(pieces) for name, pieces in texts.items()})


def _text_or_none(field: object) -> str | None:
    return field if isinstance(field, str) and field else None


def _read_finish(name: Any) -> FinishReason:
    """Return the reason why an answer ended; `STOP` for an unknown one."""
    if not isinstance(name, str):
        return FinishReason.STOP
    if name.lower() in WITHHELD:
        return FinishReason.CONTENT_FILTER
    # `tool_calls`, `eos` and others are ends that the model chose.
    return FinishReason(name) if name in list(FinishReason) else FinishReason.STOP


def _read_calls(calls: Any) -> tuple[ToolCall, ...]:
    """Return the calls of a message that have a name and an object of arguments."""
    if not isinstance(calls, list):
        return ()
    valid: list[ToolCall] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            continue
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                # Empty for a function without arguments.
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                continue
        if isinstance(arguments, dict):
            valid.append(ToolCall(function["name"], arguments))
    return tuple(valid)


def _read_logprobs(logprobs: Any) -> tuple[float, ...] | None:
    """Return the log-probability of each token; None if any is missing or invalid."""
    tokens = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(tokens, list):
        return None
    token_logprobs = []
    for token in tokens:
        logprob = token.get("logprob") if isinstance(token, dict) else None
        if not isinstance(logprob, int | float) or not math.isfinite(logprob):
            return None
        token_logprobs.append(float(logprob))
    return tuple(token_logprobs)


def _read_usage(usage: Any) -> ChatUsage | None:
    """Return the tokens counted by the service; None if missing or invalid."""
    if not isinstance(usage, Mapping):
        return None
    counts = []
    for name in ChatUsage._fields:
        count = usage.get(name)
        # `isinstance` would take True for a count.
        if type(count) is not int or not 0 <= count < MAX_TOKENS_COUNTED:
            return None
        counts.append(count)
    return ChatUsage(*counts)

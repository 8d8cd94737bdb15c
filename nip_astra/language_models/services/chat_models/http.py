"""A chat model behind any HTTP service, by a template of its requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

import torch
from pydantic import Field, JsonValue, model_validator

from nip_astra.errors import AnswerTooLargeError, ConfigurationError
from nip_astra.language_models.services.chat import (
    CPU,
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    FailureReason,
    estimate_usage,
    register_chat_model,
)
from nip_astra.language_models.services.chat_models.openai import read_choice
from nip_astra.language_models.services.http_client import (
    LARGEST_ANSWER,
    bounded,
    check_address,
    failure_of_status,
    read_key,
    responses_up_to,
    seconds_to_wait,
)
from nip_astra.lazy import import_extra
from nip_astra.parameters.parameters_base import PlainText, Url
from nip_astra.parameters.types import ChatModelType

if TYPE_CHECKING:
    import httpx

PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")
PLACEHOLDERS = (
    *("messages", "conversation", "system", "prompt"),
    *("max_tokens", "temperature", "top_p", "stop", "seed"),
)
"""Names that a template may use, besides those of its secrets."""
SECRET_NAMES = ("authorization", "cookie", "key", "token", "secret", "password")
"""Parts of the names of headers and query fields whose values must come from the environment."""


@register_chat_model(ChatModelType.HTTP)
class HttpChatModel(ChatModel):
    """A model behind any HTTP service that takes and returns JSON.

    `url`, `headers` and `body` may contain `{{ name }}`: `messages` (as `{"role", "content"}`),
    `conversation` (all messages as one text), `system` and `prompt` (the system message and the
    last one), `max_tokens`, `temperature`, `top_p`, `stop`, `seed`, and the names in `secrets`. A
    text that is one placeholder becomes its value, and an element of `body` without a value is left
    out. The response is read at the path `answer`.
    """

    samples_at_once = 1

    class Parameters(ChatModel.Parameters):
        """Template of a request, and the places in its response."""

        url: Url
        """Address of the service."""
        method: Literal["POST", "PUT"] = "POST"
        """Method of a request."""
        headers: dict[str, str] = {}
        """Headers of a request. Keys and tokens must be placeholders of `secrets`."""
        body: dict[str, JsonValue] = {"messages": "{{ messages }}"}
        """Body of a request, with placeholders."""
        answer: PlainText = "choices.0.message.content"
        """Path of the answer in the response: names of fields and numbers of elements from 0, with
        dots. A text, or a list of parts with texts."""
        finish_reason: PlainText | None = None
        """Path of the reason why the answer ended: length for a cut one, content_filter for a
        withheld one. null if the service gives none."""
        refusal: PlainText | None = None
        """Path of the text of a refusal; null if the service gives none."""
        secrets: dict[str, str] = {}
        """Environment variable of each secret, by the name of its placeholder. Secrets are never
        stored."""
        model: PlainText = "http"
        """Name under which answers are stored and reported."""
        timeout: float = Field(default=120.0, gt=0)
        """Seconds without data after which an attempt fails."""

        @model_validator(mode="after")
        def _has_known_placeholders(self) -> Self:
            texts = [self.url, *self.headers.values(), *_texts_in(self.body)]
            names = {name for text in texts for name in PLACEHOLDER.findall(text)}
            unknown = sorted(names - {*PLACEHOLDERS, *self.secrets})
            if unknown:
                raise ValueError(
                    f"has the unknown placeholders {', '.join(unknown)}; known: "
                    f"{', '.join([*PLACEHOLDERS, *self.secrets])}"
                )
            if not names & {"messages", "conversation", "prompt"}:
                raise ValueError("sends no conversation; put {{ messages }} into body")
            parts = urlsplit(self.url)
            if parts.username or parts.password:
                raise ValueError("has a user or password in url, which would be stored")
            for name, value in [*self.headers.items(), *parse_qsl(parts.query)]:
                is_secret = any(part in name.lower() for part in SECRET_NAMES)
                if is_secret and not set(PLACEHOLDER.findall(value)) & set(self.secrets):
                    raise ValueError(
                        f"has {name!r} with a fixed value, which would be stored; name its "
                        "environment variable in secrets and write {{ name }}"
                    )
            return self

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters
        self.name = parameters.model
        template = parameters.model_dump(include={"url", "method", "headers", "body", "answer"})
        digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
        self.place = f"{parameters.url} (template {digest[:16]})"
        check_address(parameters.url, "the chat model")
        import_extra("httpx", "the chat model http", "api")
        self._secrets = {
            name: read_key(variable, f"secrets.{name}") or ""
            for name, variable in parameters.secrets.items()
        }
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> HttpChatModel:
        return cls(parameters)

    async def close(self) -> None:
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = self._loop = None

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        sample = await self._sample(request)
        answers = [sample.text] if isinstance(sample, ChatAnswer) else []
        usage = estimate_usage(request.messages, answers)
        return ChatOutcome((sample,), usage, is_usage_estimated=True)

    async def _sample(self, request: ChatRequest) -> ChatAnswer | ChatFailure:
        import httpx

        values = self._values(request)
        parameters = self.parameters
        try:
            with responses_up_to(request.longest_response):
                response = await self._open().request(
                    parameters.method,
                    _filled_text(parameters.url, values),
                    headers={
                        name: _filled_text(value, values)
                        for name, value in parameters.headers.items()
                    },
                    json=_filled(parameters.body, values),
                )
        except AnswerTooLargeError as error:
            return ChatFailure(FailureReason.TOO_LONG, str(error))
        except httpx.TimeoutException:
            return ChatFailure(FailureReason.TIMEOUT, f"no answer in {parameters.timeout:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            shown = self._shown(f"{type(error).__name__} {error}")
            return ChatFailure(FailureReason.UNAVAILABLE, shown)
        if response.status_code >= 300:
            return self._failure(response)
        return self._read(response.content)

    def _values(self, request: ChatRequest) -> dict[str, Any]:
        """Return the values of all placeholders."""
        (number,) = request.sample_numbers
        messages = [dict(message) for message in request.messages]
        system = [str(m["content"]) for m in messages if m["role"] == "system"]
        return {
            "messages": messages,
            "conversation": "\n".join(f"{m['role']}: {m['content']}" for m in messages),
            "system": "\n".join(system) or None,
            "prompt": messages[-1]["content"] if messages else "",
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stop": list(request.stop) or None,
            "seed": request.seed_from(number),
            **self._secrets,
        }

    def _open(self) -> httpx.AsyncClient:
        """Return the client of the running event loop, to which connections belong."""
        import httpx

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client = bounded(httpx.AsyncClient, LARGEST_ANSWER)(
                follow_redirects=False, timeout=self.parameters.timeout
            )
            self._loop = loop
        return self._client

    def _failure(self, response: httpx.Response) -> ChatFailure:
        """Return the failure of a response by its status; raise if every request would fail."""
        status = response.status_code
        shown = f"status {status} {self._shown(response.text)}".rstrip()
        wait = seconds_to_wait(response.headers.get("Retry-After", ""))
        failure = failure_of_status(status, response.text, shown, wait)
        if failure is None:
            raise ConfigurationError(
                f"the chat model {self.name!r} at {self.parameters.url} answered with status "
                f"{status}. Check url, headers and the variables in secrets."
            )
        return failure

    def _read(self, content: bytes) -> ChatAnswer | ChatFailure:
        parameters = self.parameters
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            return ChatFailure(FailureReason.MALFORMED, f"the answer is not JSON: {error}")
        try:
            text = value_at(body, parameters.answer)
        except LookupError:
            text = None
        optional = {
            name: _value_or_none(body, getattr(parameters, name))
            for name in ("refusal", "finish_reason")
        }
        choice = {
            "message": {"content": text, "refusal": optional["refusal"]},
            "finish_reason": optional["finish_reason"],
        }
        sample = read_choice(choice)
        if isinstance(sample, ChatFailure):
            message = f"no text at {parameters.answer!r} of {self._shown(json.dumps(body))!r}"
            return ChatFailure(sample.reason, message)
        return sample

    def _shown(self, text: str) -> str:
        """Return the start of a text on one line, without secrets."""
        for secret in self._secrets.values():
            text = text.replace(secret, "***")
        return " ".join(text.split())[:200]


def value_at(value: Any, path: str) -> Any:
    """Return the part of a JSON value at a path with dots.

    Raises
    ------
    LookupError
        If there is none.
    """
    for name in path.split("."):
        if isinstance(value, list) and name.lstrip("-").isdecimal():
            value = value[int(name)]
        elif isinstance(value, Mapping):
            value = value[name]
        else:
            raise LookupError(path)
    return value


def _value_or_none(body: Any, path: str | None) -> Any:
    if path is None:
        return None
    try:
        return value_at(body, path)
    except LookupError:
        return None


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for name, item in value.items() for text in (name, *_texts_in(item))]
    if isinstance(value, list):
        return [text for item in value for text in _texts_in(item)]
    return []


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a template with values in place of its placeholders; elements without one are left
    out.
    """
    if isinstance(value, str):
        whole = PLACEHOLDER.fullmatch(value.strip())
        return values[whole[1]] if whole else _filled_text(value, values)
    if isinstance(value, Mapping):
        filled = {name: _filled(item, values) for name, item in value.items()}
        return {n: item for n, item in filled.items() if item is not None or value[n] is None}
    if isinstance(value, list):
        return [_filled(item, values) for item in value]
    return value


def _filled_text(text: str, values: Mapping[str, Any]) -> str:
    """Return a text with values in place of its placeholders; others than texts are JSON."""

    def fill(match: re.Match[str]) -> str:
        value = values[match[1]]
        if value is None:
            return ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return PLACEHOLDER.sub(fill, text)

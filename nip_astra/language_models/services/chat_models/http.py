"""A chat model behind any HTTP service, by a template of its requests."""

from __future__ import annotations

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
    PerLoop,
    estimate_usage,
    register_chat_model,
)
from nip_astra.language_models.services.chat_models.openai import read_choice
from nip_astra.language_models.services.http_client import (
    LARGEST_ANSWER,
    bounded,
    check_address,
    classify_status,
    parse_retry_after,
    read_key,
    responses_up_to,
    shorten,
)
from nip_astra.lazy import import_extra
from nip_astra.parameters.parameters_base import PlainText, Url
from nip_astra.parameters.types import ChatModelType

if TYPE_CHECKING:
    import httpx

PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")
PLACEHOLDERS = (
    "messages",
    "conversation",
    "system",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
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
            texts = [self.url, *self.headers.values(), *_collect_texts(self.body)]
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
            for name, text in [*self.headers.items(), *parse_qsl(parts.query)]:
                is_secret = any(part in name.lower() for part in SECRET_NAMES)
                placeholders = set(PLACEHOLDER.findall(text))
                if is_secret and not placeholders & set(self.secrets):
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
        self._clients = PerLoop(self._open)

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> HttpChatModel:
        return cls(parameters)

    async def close(self) -> None:
        client = self._clients.remove()
        if client is not None:
            await client.aclose()

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        sample = await self._sample(request)
        answers = [sample.text] if isinstance(sample, ChatAnswer) else []
        usage = estimate_usage(request.messages, answers)
        return ChatOutcome((sample,), usage, is_usage_estimated=True)

    async def _sample(self, request: ChatRequest) -> ChatAnswer | ChatFailure:
        import httpx

        values = self._placeholder_values(request)
        parameters = self.parameters
        headers = {name: _fill_text(text, values) for name, text in parameters.headers.items()}
        try:
            with responses_up_to(request.longest_response):
                response = await self._clients.get().request(
                    parameters.method,
                    _fill_text(parameters.url, values),
                    headers=headers,
                    json=_fill_template(parameters.body, values),
                )
        except AnswerTooLargeError as error:
            return ChatFailure(FailureReason.TOO_LONG, str(error))
        except httpx.TimeoutException:
            return ChatFailure(FailureReason.TIMEOUT, f"no answer in {parameters.timeout:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            message = self._shorten(f"{type(error).__name__} {error}")
            return ChatFailure(FailureReason.UNAVAILABLE, message)
        if response.status_code >= 300:
            return self._classify_response(response)
        return self._read(response.content)

    def _placeholder_values(self, request: ChatRequest) -> dict[str, Any]:
        """Return the values of all placeholders."""
        (number,) = request.sample_numbers
        messages = request.messages
        system = [message["content"] for message in messages if message["role"] == "system"]
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return {
            "messages": [dict(message) for message in messages],
            "conversation": "\n".join(lines),
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
        import httpx

        client_class = bounded(httpx.AsyncClient, LARGEST_ANSWER)
        # A redirection could lead the secrets elsewhere.
        return client_class(follow_redirects=False, timeout=self.parameters.timeout)

    def _classify_response(self, response: httpx.Response) -> ChatFailure:
        """Return the failure of a response by its status; raise if every request would fail."""
        status = response.status_code
        report = f"status {status} {self._shorten(response.text)}".rstrip()
        retry_after = parse_retry_after(response.headers.get("Retry-After", ""))
        failure = classify_status(status, response.text, report, retry_after)
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
        # In OpenAI's form, so that texts, parts, refusals and reasons are read in one place.
        message = {
            "content": read_path(body, parameters.answer),
            "refusal": read_path(body, parameters.refusal),
        }
        finish_reason = read_path(body, parameters.finish_reason)
        sample = read_choice({"message": message, "finish_reason": finish_reason})
        if isinstance(sample, ChatFailure):
            report = self._shorten(json.dumps(body))
            return ChatFailure(sample.reason, f"no text at {parameters.answer!r} of {report!r}")
        return sample

    def _shorten(self, text: str) -> str:
        return shorten(text, self._secrets.values())


def read_path(body: JsonValue, path: str | None) -> JsonValue:
    """Return the part of a JSON value at a path with dots; None if there is no such part."""
    if path is None:
        return None
    part = body
    for name in path.split("."):
        try:
            if isinstance(part, list) and name.lstrip("-").isdecimal():
                part = part[int(name)]
            elif isinstance(part, dict):
                part = part[name]
            else:
                return None
        except LookupError:
            return None
    return part


def _collect_texts(template: JsonValue) -> list[str]:
    """Return all texts and names within a JSON value."""
    if isinstance(template, str):
        return [template]
    texts: list[str] = []
    if isinstance(template, dict):
        for name, element in template.items():
            texts += [name, *_collect_texts(element)]
    elif isinstance(template, list):
        for element in template:
            texts += _collect_texts(element)
    return texts


def _fill_template(template: JsonValue, values: Mapping[str, Any]) -> Any:
    """Return a template with values in place of its placeholders.

    An element of an object whose placeholder has no value is left out.
    """
    if isinstance(template, str):
        placeholder = PLACEHOLDER.fullmatch(template.strip())
        # One that is the whole text keeps its type: a number, a list of messages.
        return values[placeholder[1]] if placeholder else _fill_text(template, values)
    if isinstance(template, dict):
        filled = {}
        for name, element in template.items():
            filled_element = _fill_template(element, values)
            # A null of the template itself stays.
            if filled_element is not None or element is None:
                filled[name] = filled_element
        return filled
    if isinstance(template, list):
        return [_fill_template(element, values) for element in template]
    return template


def _fill_text(text: str, values: Mapping[str, Any]) -> str:
    """Return a text with values in place of its placeholders; others than texts are JSON."""

    def fill(match: re.Match[str]) -> str:
        content = values[match[1]]
        if content is None:
            return ""
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)

    return PLACEHOLDER.sub(fill, text)

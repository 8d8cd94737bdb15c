"""HTTP clients with limited response sizes, and the official OpenAI client.

The package `openai` (versions 2 and 3) handles connections, credentials and the form of requests,
without retries and without redirections, which could leak a key.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeGuard
from urllib.parse import SplitResult, urlsplit

from nip_astra.errors import (
    AnswerTooLargeError,
    BudgetExhaustedError,
    ConfigurationError,
    ServiceError,
    ServiceUnreachableError,
)
from nip_astra.language_models.services.chat import ChatFailure, FailureReason, PerLoop
from nip_astra.lazy import import_extra
from nip_astra.trust import read_variable

if TYPE_CHECKING:
    import httpx
    from openai import APIStatusError, AsyncOpenAI
    from pydantic import JsonValue

MIB = 2**20
_REQUEST_LIMIT: ContextVar[float] = ContextVar("limit of a response in bytes", default=math.inf)
ENCODINGS = ("gzip", "deflate")
"""Accepted compressions, which expand by at most a factor of 1,000; nested or other ones may expand
without limit."""
STALE_HEADERS = ("content-encoding", "content-length", "transfer-encoding")
"""Headers that describe a response's body as it was sent, compressed and in chunks."""
MAX_REPORTED_CHARACTERS = 200


def check_address(address: str, service: str) -> SplitResult:
    """Return the parts of an HTTP address; raise `ConfigurationError` for an invalid one."""
    is_printable = address.isascii() and address.isprintable() and " " not in address
    try:
        parts = urlsplit(address)
        # Reading the port raises ValueError for an invalid one.
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not is_printable or not has_host or parts.scheme not in ("http", "https"):
        raise ConfigurationError(
            f"{address!r} is not an HTTP address of {service}. Example: http://127.0.0.1:8000."
        )
    return parts


def shorten(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the start of a text on one line for a message, without secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return " ".join(text.split())[:MAX_REPORTED_CHARACTERS]


@contextmanager
def responses_up_to(max_bytes: float) -> Iterator[None]:
    """Lower the limit of the responses that clients of `bounded` read within the block."""
    token = _REQUEST_LIMIT.set(max_bytes)
    try:
        yield
    finally:
        _REQUEST_LIMIT.reset(token)


def bounded(base: type[httpx.AsyncClient], max_bytes: int) -> type[httpx.AsyncClient]:
    """Return a subclass of an HTTP client that raises if a response is longer than `max_bytes`.

    Without streaming: `send` returns the complete response. `responses_up_to` lowers the limit of
    single requests.
    """
    import httpx

    class Bounded(base):  # type: ignore[valid-type, misc]  # a base that is known here alone
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.headers["Accept-Encoding"] = ", ".join(ENCODINGS)

        async def send(
            self, request: httpx.Request, *, stream: bool = False, **options: Any
        ) -> httpx.Response:
            response = await super().send(request, stream=True, **options)
            try:
                content = await _read(response, min(max_bytes, _REQUEST_LIMIT.get()))
            finally:
                await response.aclose()
            headers = [
                header
                for header in response.headers.multi_items()
                if header[0] not in STALE_HEADERS
            ]
            return httpx.Response(
                response.status_code, headers=headers, content=content, request=request
            )

    return Bounded


async def _read(response: httpx.Response, max_bytes: float) -> bytes:
    """Return the uncompressed body; raise `AnswerTooLargeError` once the limit is exceeded."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", *ENCODINGS):
        raise AnswerTooLargeError(
            f"the answer is compressed as {encoding[:40]!r}; supported: {', '.join(ENCODINGS)}"
        )
    too_large = AnswerTooLargeError(f"the answer is longer than {max_bytes / MIB:.3g} MiB")
    content_length = response.headers.get("content-length", "0")
    # An invalid length is left to the client. At most 18 digits: Python refuses thousands of them.
    has_length = content_length.isascii() and content_length.isdigit()
    if has_length and int(content_length[:18]) > max_bytes:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > max_bytes:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


LARGEST_ANSWER = 64 * MIB
"""Maximum response in bytes; those of chat models have a few kilobytes."""
NO_KEY = "no-key"
PASSING = frozenset({408, 409, 425, 429})
"""Statuses besides 5xx that may be retried: request timeout, conflict (of a lock, as OpenAI's
clients take it), too early, too many requests."""
MISCONFIGURED = frozenset({401, 403, 404, 405})
"""Statuses of a wrong key, address or model, which every request of the run would have."""
REFUSED_REQUEST = frozenset({400, 413, 422})
"""Statuses of a request that a service does not accept."""
WRONG_FIELDS = frozenset({"unsupported_parameter", "unsupported_value", "unknown_parameter"})
"""Codes of a 400 that would recur for every request of this run."""
FORMAT_WORDS = ("response_format", "json_schema", "json_object", "structured", "grammar")
CONTEXT_WORDS = (
    "context_length_exceeded",
    "context length",
    "context window",
    "context size",
    "prompt is too long",
    "prompt too long",
    "reduce the length",
    "input token count",
)
"""Parts of the messages with which services reject a conversation that exceeds a model's window:
OpenAI, vLLM, llama.cpp, Anthropic, Groq, Gemini."""
FILTER_CODES = frozenset({"content_filter", "content_policy_violation", "invalid_prompt"})
"""Codes with which OpenAI and Azure reject a prompt for its content."""
TOKEN_FIELDS = ("max_tokens", "max_completion_tokens")
"""Names of the field for the maximum length of an answer; a service may support only one."""
UNSUPPORTED_WORDS = ("unsupported", "not supported", "unrecognized", "unknown", "not permitted")


async def fetch_json(url: str, service: str, *, timeout: float, max_bytes: int) -> JsonValue:
    """Return the JSON of a GET request without credentials.

    Parameters
    ----------
    service : str
        Name of the service for messages: "the environment".
    timeout : float
        Seconds for the whole request, even if data still arrives.
    max_bytes : int
        Limit of the response.

    Raises
    ------
    ServiceUnreachableError
        If nothing answers in time.
    ServiceError
        If the answer has another status than 200, is too large, or is not JSON.
    """
    httpx = import_extra("httpx", service, "http")
    check_address(url, service)
    client_class = bounded(httpx.AsyncClient, max_bytes)
    try:
        # Two time limits: httpx's is for each read, and a service may send a byte now and then.
        async with (
            asyncio.timeout(timeout),
            client_class(timeout=timeout, follow_redirects=True) as client,
        ):
            response = await client.get(url)
    except TimeoutError as error:
        raise ServiceUnreachableError(
            f"{service} has not answered {url} in {timeout:g} s. Start it, or raise its time limit."
        ) from error
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        # A redirection to another protocol was an answer.
        is_answer = isinstance(error, httpx.UnsupportedProtocol)
        is_lost = isinstance(error, httpx.TransportError) and not is_answer
        error_class = ServiceUnreachableError if is_lost else ServiceError
        raise error_class(
            f"{service} does not answer at {url}: {reason}. Start it, or check the address."
        ) from error
    if response.status_code != 200:
        raise ServiceError(
            f"{service} answered {url} with status {response.status_code}. Check the address."
        )
    try:
        content: JsonValue = json.loads(response.content)
    except (ValueError, RecursionError) as error:
        raise ServiceError(
            f"the answer of {service} at {url} is not JSON: {error}. Check the address."
        ) from error
    return content


class OpenAIConnection:
    """An address with its key, which is never shown; opens a client per event loop.

    Parameters
    ----------
    timeout : float
        Seconds without data after which an attempt fails.
    service : str
        Name of the model or service for messages: "the judge".
    uses_proxies : bool
        Whether to use the proxies of the environment.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        timeout: float,
        service: str = "the chat model",
        uses_proxies: bool = True,
    ) -> None:
        parts = check_address(base_url, service)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigurationError(
                f"{service}'s base_url must not contain a user, password or query, which would be "
                "stored with the parameters. Give the key by api_key_variable."
            )
        # At once, so that a missing package is reported before the run begins.
        _import_openai()
        self.base_url = base_url.rstrip("/")
        self.service = service
        self._api_key = api_key
        self._timeout = timeout
        self._uses_proxies = uses_proxies
        self._clients = PerLoop(self._open)

    def _open(self) -> AsyncOpenAI:
        openai = _import_openai()
        http_client_class = bounded(openai.DefaultAsyncHttpxClient, LARGEST_ANSWER)
        http_client = http_client_class(
            follow_redirects=False,
            timeout=self._timeout,
            event_hooks={"request": [_drop_key]} if self._api_key is None else {},
            trust_env=self._uses_proxies,
        )
        client: AsyncOpenAI = openai.AsyncOpenAI(
            api_key=self._api_key or NO_KEY,
            base_url=self.base_url,
            timeout=self._timeout,
            # `RetryingChatModel` retries, and counts each attempt in the budget.
            max_retries=0,
            http_client=http_client,
        )
        return client

    def client(self) -> AsyncOpenAI:
        """Return the client of the running event loop."""
        return self._clients.get()

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        client = self._clients.remove()
        if client is not None:
            await client.close()

    def shorten(self, text: str) -> str:
        """Return the start of a text on one line for a message, without the key."""
        return shorten(text, [self._api_key] if self._api_key else [])

    def classify_error(self, error: Exception, *, has_format: bool = False) -> ChatFailure:
        """Return a request's failure for an error; raise if every request would fail.

        Parameters
        ----------
        has_format : bool
            Whether the request has a `response_format`, which the service may reject.
        """
        openai = _import_openai()
        for cause in (error, error.__cause__):
            # Versions of the package wrap it differently.
            if isinstance(cause, AnswerTooLargeError):
                return ChatFailure(FailureReason.TOO_LONG, self.shorten(str(cause)))
        # Before `APIConnectionError`, its base class.
        if isinstance(error, openai.APITimeoutError):
            return ChatFailure(FailureReason.TIMEOUT, f"no answer in {self._timeout:g} s")
        if isinstance(error, openai.APIConnectionError):
            cause = error.__cause__ or error
            message = self.shorten(f"{type(cause).__name__} {cause}")
            return ChatFailure(FailureReason.UNAVAILABLE, message)
        if isinstance(error, openai.APIStatusError):
            return self._classify_status_error(error, has_format)
        if isinstance(error, openai.APIError):
            return ChatFailure(FailureReason.MALFORMED, self.shorten(str(error)))
        raise error

    def _classify_status_error(self, error: APIStatusError, has_format: bool) -> ChatFailure:
        status = error.status_code
        text = error.response.text
        report = f"status {status} {self.shorten(text)}".rstrip()
        # OpenAI's 429 for an account without funds, which no retry helps; OpenRouter's is 402.
        if error.code == "insufficient_quota" or status == 402:
            raise BudgetExhaustedError(
                f"the account of {self.service} at {self.base_url} has nothing left to spend "
                f"({report}). Add funds, then resume the run."
            ) from error
        retry_after = parse_retry_after(error.response.headers.get("Retry-After", ""))
        failure = classify_status(status, text, report, retry_after)
        if failure is not None and failure.reason is not FailureReason.REFUSED:
            return failure
        if has_format and any(word in text.lower() for word in FORMAT_WORDS):
            return ChatFailure(FailureReason.UNKNOWN_FORM, report)
        if failure is None or error.code in WRONG_FIELDS:
            # A message about the key may contain it.
            reason = f"status {status}" if status in (401, 403) else report
            raise ConfigurationError(
                f"{self.service} at {error.request.url} answered with {reason}. Check base_url, "
                "model, api_key_variable and the fields that this service supports; null omits "
                "temperature."
            ) from error
        return failure


def classify_status(status: int, text: str, report: str, retry_after: float) -> ChatFailure | None:
    """Return the failure of a response whose status is not 2xx; None if every request would fail.

    Parameters
    ----------
    text, report : str
        The response's text, and its start for the failure's message.
    retry_after : float
        Seconds to wait before another attempt, as the service requests.
    """
    reason = find_passing_reason(status)
    if reason is not None:
        return ChatFailure(reason, report, retry_after)
    if status in REFUSED_REQUEST and exceeds_context(text):
        return ChatFailure(FailureReason.CONTEXT_LENGTH, report)
    # A redirection is not followed, as it could lead the key elsewhere.
    if status in MISCONFIGURED or 300 <= status < 400:
        return None
    return ChatFailure(FailureReason.REFUSED, report)


def read_key(variable: str | None, parameter: str) -> str | None:
    """Read a key from the environment variable that a parameter names; None without a variable."""
    if variable is None:
        return None
    key = (read_variable(variable) or "").strip()
    if not key:
        raise ConfigurationError(
            f"{parameter} names {variable!r}, which is not set. Set it to the service's key, or "
            f"set {parameter} to null if the service needs none."
        )
    return key


def find_passing_reason(status: object) -> FailureReason | None:
    """Return the reason of a failure that may pass, by its status; None for other statuses."""
    if status == 429:
        return FailureReason.RATE_LIMITED
    # 5xx are the service's own faults, those of a gateway before it among them.
    if isinstance(status, int) and (status in PASSING or status >= 500):
        return FailureReason.UNAVAILABLE
    return None


def exceeds_context(message: str) -> bool:
    """Return whether an error's message is about a conversation that exceeds the model's window."""
    return any(word in message.lower() for word in CONTEXT_WORDS)


def is_status_error(error: Exception) -> TypeGuard[APIStatusError]:
    """Return whether an error of the package is about the status of a response."""
    return isinstance(error, _import_openai().APIStatusError)


def find_filter_message(error: APIStatusError) -> str | None:
    """Return the message of an error with which a content filter rejects a prompt, else None.

    Azure and OpenAI name it in `code`; OpenRouter's moderation answers with 403.
    """
    body = error.body if isinstance(error.body, Mapping) else {}
    metadata = body.get("metadata")
    is_flagged = isinstance(metadata, Mapping) and "flagged_input" in metadata
    is_filtered = error.status_code in REFUSED_REQUEST and error.code in FILTER_CODES
    if not is_flagged and not is_filtered:
        return None
    message = body.get("message")
    return message if isinstance(message, str) and message else "the service refused the prompt"


def find_token_field(error: APIStatusError, token_field: str) -> str | None:
    """Return the other name of the field for the maximum length, if an error requests it."""
    message = error.response.text.lower()
    # A message about the window names the field as well.
    if error.status_code not in REFUSED_REQUEST or exceeds_context(message):
        return None
    other_field = next(name for name in TOKEN_FIELDS if name != token_field)
    is_rejected = token_field in message and any(word in message for word in UNSUPPORTED_WORDS)
    return other_field if other_field in message or is_rejected else None


async def _drop_key(request: httpx.Request) -> None:
    # The package requires a key even if the service does not.
    request.headers.pop("Authorization", None)


def parse_retry_after(retry_after: str) -> float:
    """Parse a Retry-After header, a number of seconds or a date; 0 for an invalid one."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _import_openai() -> Any:
    return import_extra("openai", "OpenAI's protocol", "api")

"""Ask a service that speaks OpenAI's chat-completions protocol, with patience and in measure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from nip_astra.errors import ConfigurationError, MissingDependencyError

T = TypeVar("T")

LONGEST_BACKOFF = 60.0
LONGEST_RETRY_AFTER = 300.0
"""Seconds; a service that asks for more is tried again after these."""
PASSING = frozenset({408, 409, 425, 429})
"""Statuses, beside 5xx, of which another attempt may know better."""
MISCONFIGURED = frozenset({401, 403, 404, 405})
FORMAT_WORDS = ("response_format", "json_schema", "json_object", "structured", "grammar")


class MalformedAnswerError(ValueError):
    """The service answered, but not what it was asked for."""


class ServiceError(RuntimeError):
    """The service gave no answer.

    Attributes
    ----------
    is_about_format : bool
        Whether it refused the form in which the answer was asked for.
    """

    def __init__(self, text: str, *, is_about_format: bool = False) -> None:
        super().__init__(text)
        self.is_about_format = is_about_format


class _PassingError(RuntimeError):
    """An attempt failed in a way that may pass; `wait` is what the service asks for, in seconds."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


class ChatService:
    """A chat model behind an address; may be asked from several threads.

    Parameters
    ----------
    base_url : str
        Address up to `/chat/completions`.
    api_key : str, optional
        Sent as a bearer token, and kept out of every message.
    timeout, backoff : float
        Seconds; see `JudgeScorer.Parameters`.
    requests_per_minute : float, optional
        Attempts begun in a minute.
    clock, pause : Callable, optional
        Tell the time and wait, in seconds.

    Raises
    ------
    ConfigurationError
        When the address holds more than an address.
    MissingDependencyError
        When httpx is not installed.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        num_retries: int = 5,
        backoff: float = 1.0,
        requests_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        httpx = _import_httpx()
        url = httpx.URL(base_url)
        if url.userinfo or url.query or url.fragment:
            raise ConfigurationError(
                "the judge's base_url was to be the address of a service, but it holds a user, a "
                "password or a query, which would be written with the parameters. Give the bare "
                "address, and the key by api_key_variable."
            )
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._api_key = api_key
        self._num_retries = num_retries
        self._backoff = backoff
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._clock = clock
        self._stopped = threading.Event()
        self._pause = pause or self._stopped.wait
        self._lock = threading.Lock()
        self._next_start = float("-inf")
        self._transport_error: type[Exception] = httpx.TransportError
        self._client = httpx.Client(
            timeout=timeout,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx.Limits(max_connections=None),
        )

    def stop(self) -> None:
        """Begin no further attempts and end all waiting; who asks gets an error."""
        self._stopped.set()

    def go_on(self) -> None:
        """Undo `stop`."""
        self._stopped.clear()

    def ask(self, body: dict[str, Any], read: Callable[[str], T]) -> T:
        """What `read` makes of the model's answer.

        Attempts that fail in a way that may pass, or whose answer `read` refuses with
        MalformedAnswerError, are repeated. After a malformed answer there is no waiting.

        Raises
        ------
        ServiceError
            When no attempt succeeded, or the request is refused for good.
        ConfigurationError
            When the address, the model's name or the key is wrong: no other request would fare
            better.
        """
        reason = ""
        for attempt in range(self._num_retries + 1):
            self._take_turn()
            if self._stopped.is_set():
                raise ServiceError("it was stopped")
            wait = 0.0
            try:
                return read(self._post(body))
            except MalformedAnswerError as error:
                reason = str(error)
            except _PassingError as error:
                reason = str(error)
                wait = max(min(self._backoff * 2**attempt, LONGEST_BACKOFF), error.wait)
            if wait and attempt < self._num_retries:
                self._pause(wait)
        raise ServiceError(f"{reason} ({self._num_retries + 1} attempts)")

    def _take_turn(self) -> None:
        """Wait until the next attempt may begin."""
        if not self._interval:
            return
        with self._lock:
            now = self._clock()
            start = max(now, self._next_start)
            self._next_start = start + self._interval
        if start > now:
            self._pause(start - now)

    def _post(self, body: dict[str, Any]) -> str:
        """Send one request and give the text of the answer."""
        try:
            response = self._client.post(self._url, json=body)
        except self._transport_error as error:
            raise _PassingError(self._shown(f"{type(error).__name__} {error}")) from error
        status = response.status_code
        if status in PASSING or status >= 500:
            raise _PassingError(
                f"status {status} {self._shown(response.text)}".rstrip(),
                _seconds(response.headers.get("Retry-After", "")),
            )
        if status in MISCONFIGURED or 300 <= status < 400:
            # What a service says of a key may hold the key.
            said = "" if status in (401, 403) else f" {self._shown(response.text)}".rstrip()
            raise ConfigurationError(
                f"the judge at {self._url} was asked, but answered with status {status}{said}. "
                "Check base_url, model and api_key_variable."
            )
        if status != 200:
            said = response.text.lower()
            raise ServiceError(
                f"status {status} {self._shown(response.text)}".rstrip(),
                is_about_format=any(word in said for word in FORMAT_WORDS),
            )
        return self._content(response)

    def _content(self, response: Any) -> str:
        try:
            content = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            shown = self._shown(response.text)
            raise MalformedAnswerError(f"{shown!r} is no chat completion") from error
        if not isinstance(content, str):
            raise MalformedAnswerError("the answer has no text")
        return content

    def _shown(self, text: str) -> str:
        """The beginning of a text in one line, without the key."""
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return " ".join(text.split())[:200]


def _seconds(retry_after: str) -> float:
    """The seconds of a Retry-After header; 0 for a date or nonsense."""
    try:
        seconds = float(retry_after)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


def _import_httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingDependencyError(
            "the scorer 'judge' was asked for, and it needs the package httpx. Install it with: "
            "pip install 'nip_astra[judge]'"
        ) from error
    return httpx

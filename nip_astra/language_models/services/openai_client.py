"""The official client of OpenAI's protocol, and its errors as failures of requests.

The package `openai` (versions 2 and 3) handles connections, credentials and the form of requests,
without retries and without redirections, which could leak a key.
"""

from __future__ import annotations

import asyncio
import math
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from nip_astra.errors import (
    AnswerTooLargeError,
    BudgetExhaustedError,
    ConfigurationError,
    MissingDependencyError,
)
from nip_astra.language_models.services.bounded_http import (
    MIB,
    bounded,
    check_address,
)
from nip_astra.language_models.services.chat import ChatFailure, FailureReason
from nip_astra.trust import read_variable

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

LARGEST_ANSWER = 64 * MIB
"""Largest response in bytes; those of chat models have a few kilobytes."""
NO_KEY = "no-key"
PASSING = frozenset({408, 409, 425, 429})
"""Statuses besides 5xx after which another attempt may succeed."""
MISCONFIGURED = frozenset({401, 403, 404, 405})
WRONG_FIELDS = frozenset({"unsupported_parameter", "unsupported_value", "unknown_parameter"})
"""Codes of a 400 that every request of this run would get."""
FORMAT_WORDS = ("response_format", "json_schema", "json_object", "structured", "grammar")


class OpenAIConnection:
    """An address with its key; opens a client per event loop.

    Parameters
    ----------
    api_key : str or None
        Never part of a message; None sends no key.
    timeout : float
        Seconds without data after which an attempt fails.
    what : str
        Name of the model for messages: "the judge".
    uses_proxies : bool
        Whether to use the proxies of the environment.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        timeout: float,
        what: str = "the chat model",
        uses_proxies: bool = True,
    ) -> None:
        parts = check_address(base_url, what)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigurationError(
                f"{what}'s base_url must not contain a user, password or query, which would be "
                "stored with the parameters. Give the key by api_key_variable."
            )
        _import_openai()
        self.base_url = base_url.rstrip("/")
        self.what = what
        self._api_key = api_key
        self._timeout = timeout
        self._uses_proxies = uses_proxies
        self._client: AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def client(self) -> AsyncOpenAI:
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Connections belong to their event loop.
            self._client, self._loop = self._open(), loop
        return self._client

    def _open(self) -> AsyncOpenAI:
        openai = _import_openai()
        hooks = {"request": [_drop_key]} if self._api_key is None else {}
        client: AsyncOpenAI = openai.AsyncOpenAI(
            api_key=self._api_key or NO_KEY,
            base_url=self.base_url,
            timeout=self._timeout,
            max_retries=0,
            http_client=bounded(openai.DefaultAsyncHttpxClient, LARGEST_ANSWER)(
                follow_redirects=False,
                timeout=self._timeout,
                event_hooks=hooks,
                trust_env=self._uses_proxies,
            ),
        )
        return client

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.close()
        self._client = self._loop = None

    def shown(self, text: str) -> str:
        """The start of a text on one line, without the key."""
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return " ".join(text.split())[:200]

    def failure_of(self, error: Exception) -> ChatFailure:
        """The failure that an error of the client means for a request.

        Raises
        ------
        ConfigurationError
            If every request would fail.
        BudgetExhaustedError
            If the account has no money left.
        """
        openai = _import_openai()
        for one in (error, error.__cause__):
            # Versions of the package wrap it differently.
            if isinstance(one, AnswerTooLargeError):
                return ChatFailure(FailureReason.MALFORMED, self.shown(str(one)))
        if isinstance(error, openai.APITimeoutError):
            return ChatFailure(FailureReason.TIMEOUT, f"no answer in {self._timeout:g} s")
        if isinstance(error, openai.APIConnectionError):
            cause = error.__cause__ or error
            shown = self.shown(f"{type(cause).__name__} {cause}")
            return ChatFailure(FailureReason.UNAVAILABLE, shown)
        if isinstance(error, openai.APIStatusError):
            return self._failure_of_status(error)
        if isinstance(error, openai.APIError):
            return ChatFailure(FailureReason.MALFORMED, self.shown(str(error)))
        raise error

    def _failure_of_status(self, error: APIStatusError) -> ChatFailure:
        status, said = error.status_code, self.shown(error.response.text)
        told = f"status {status} {said}".rstrip()
        if error.code == "insufficient_quota" or status == 402:
            raise BudgetExhaustedError(
                f"the account of {self.what} at {self.base_url} has nothing left to spend "
                f"({told}). Add funds, then resume the run."
            ) from error
        if status == 429:
            wait = _seconds(error.response.headers.get("Retry-After", ""))
            return ChatFailure(FailureReason.RATE_LIMITED, told, wait)
        if status in PASSING or status >= 500:
            wait = _seconds(error.response.headers.get("Retry-After", ""))
            return ChatFailure(FailureReason.UNAVAILABLE, told, wait)
        if any(word in error.response.text.lower() for word in FORMAT_WORDS):
            return ChatFailure(FailureReason.UNKNOWN_FORM, told)
        if status in MISCONFIGURED or 300 <= status < 400 or error.code in WRONG_FIELDS:
            self._refuse(error, said)
        return ChatFailure(FailureReason.REFUSED, told)

    def _refuse(self, error: APIStatusError, said: str) -> NoReturn:
        # A message about the key may contain it.
        shown = "" if error.status_code in (401, 403) else f" {said}".rstrip()
        raise ConfigurationError(
            f"{self.what} at {error.request.url} answered with status {error.status_code}{shown}. "
            "Check base_url, model, api_key_variable and the fields that this service supports."
        ) from error


def read_key(variable: str | None, *, what: str = "the chat model") -> str | None:
    """The key that a variable of the environment holds; None where none is named.

    Raises
    ------
    ConfigurationError
        When the variable is not set.
    UntrustedRunError
        When a run of others names the variable.
    """
    if variable is None:
        return None
    key = (read_variable(variable) or "").strip()
    if not key:
        raise ConfigurationError(
            f"{what}'s key was to be read from the environment variable {variable!r}, but that "
            "is not set. Set it before the run, or set api_key_variable to null where the "
            "service wants no key."
        )
    return key


async def _drop_key(request: Any) -> None:
    # The package requires a key even if the service does not.
    request.headers.pop("Authorization", None)


def _seconds(retry_after: str) -> float:
    """The seconds of a Retry-After header; 0 for a date or nonsense."""
    try:
        seconds = float(retry_after)
    except ValueError:
        return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _import_openai() -> ModuleType:
    try:
        import openai
    except ImportError as error:
        raise MissingDependencyError(
            "OpenAI's protocol needs the package openai. Install it with: "
            "pip install 'nip_astra[api]'"
        ) from error
    return openai

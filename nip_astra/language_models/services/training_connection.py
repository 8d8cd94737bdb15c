"""The connection to a training service: repeats what got lost, and turns refusals into errors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nip_astra.errors import (
    ConfigurationError,
    MissingDependencyError,
    ServiceBusyError,
    ServiceConflictError,
    ServiceError,
    ServiceModelError,
    ServiceRequestError,
    ServiceUnreachableError,
)
from nip_astra.language_models.services.training_wire import DONE_HEADER, KEY_HEADER, MESSAGE

if TYPE_CHECKING:
    import httpx

SECONDS_OF_ONE_REQUEST = 60.0
"""A service answers within 20, if only that it is at work."""
SECONDS_TO_FORGET = 2.0
KINDS: Mapping[int, type[ServiceError]] = {
    400: ServiceRequestError,
    404: ServiceModelError,
    409: ServiceConflictError,
    413: ServiceRequestError,
    422: ServiceRequestError,
    429: ServiceBusyError,
}
PASSING = (429, 502, 503, 504)
"""Refusals that the same request may not meet again."""


@dataclass(frozen=True)
class Answer:
    """What became of an operation.

    Attributes
    ----------
    error : ServiceError or None
        Why it was refused when its turn came.
    """

    content: bytes
    error: ServiceError | None = None

    def result(self) -> bytes:
        """The content.

        Raises
        ------
        ServiceError
            Where it was refused.
        """
        if self.error is not None:
            raise self.error
        return self.content


class TrainingConnection:
    """Requests to one service.

    Parameters
    ----------
    base_url : str
        For instance `http://127.0.0.1:8000`.
    token_variable : str or None
        Name of the environment variable with the token that the service asks for.
    patience_seconds : float
        For how long a service that does not answer, or is full, is asked again.
    """

    def __init__(
        self, base_url: str, *, token_variable: str | None = None, patience_seconds: float = 60.0
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingDependencyError(
                "a training service was to be used, and it needs the package httpx. Install it "
                "with: pip install 'nip_astra[http]'."
            ) from error
        self._httpx = httpx
        self.base_url = base_url.rstrip("/")
        self.patience_seconds = patience_seconds
        headers = {}
        if token_variable is not None:
            token = os.environ.get(token_variable, "")
            if not token:
                raise ConfigurationError(
                    f"the token of the training service {self.base_url} was to be taken from the "
                    f"environment variable {token_variable}, which is not set or empty. Set it to "
                    "what the service was started with."
                )
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(
            base_url=self.base_url, headers=headers, timeout=SECONDS_OF_ONE_REQUEST
        )

    def post_json(self, path: str, body: Mapping[str, Any], *, key: str) -> dict[str, Any]:
        """Ask for something by JSON until there is an answer."""
        headers = {KEY_HEADER: key}
        while True:
            answer = self._patiently(
                lambda: self._client.post(path, json=dict(body), headers=headers)
            )
            if answer.status_code != 202:
                break
        if answer.status_code != 200:
            raise self._error(answer)
        found: dict[str, Any] = answer.json()
        return found

    def operate(self, path: str, message: bytes, *, key: str) -> Answer:
        """Have an operation carried out once, and wait for it.

        Raises
        ------
        ServiceError
            Where it had no turn.
        """
        headers = {KEY_HEADER: key, "Content-Type": MESSAGE}
        answer = self._patiently(lambda: self._client.post(path, content=message, headers=headers))
        while answer.status_code == 202:
            answer = self._patiently(lambda: self._client.get(path, headers={KEY_HEADER: key}))
        if answer.status_code == 200:
            return Answer(answer.content)
        error = self._error(answer)
        if DONE_HEADER in answer.headers:
            return Answer(b"", error)
        raise error

    def forget(self, path: str) -> None:
        """Ask once for something to be forgotten; a service that does not answer has forgotten."""
        with suppress(self._httpx.HTTPError):
            self._client.delete(path, timeout=SECONDS_TO_FORGET)

    def report(self, path: str) -> None:
        """Tell the service once that the client of a model is there."""
        with suppress(self._httpx.HTTPError):
            self._client.get(path, timeout=SECONDS_TO_FORGET)

    def _patiently(self, ask: Callable[[], httpx.Response]) -> httpx.Response:
        """Ask again where the service does not answer or is full, up to the end of patience."""
        deadline = time.monotonic() + self.patience_seconds
        pause = 0.05
        while True:
            fault: Exception | None = None
            try:
                answer = ask()
                if answer.status_code not in PASSING or DONE_HEADER in answer.headers:
                    return answer
            except self._httpx.TransportError as error:
                fault = error
            if time.monotonic() + pause > deadline:
                if fault is None:
                    return answer
                raise ServiceUnreachableError(
                    f"the training service {self.base_url} was asked for something, but does not "
                    f"answer: {fault or type(fault).__name__}. It was asked for "
                    f"{self.patience_seconds:.0f} s. Start it again, and go on from the last "
                    "checkpoint with: nip-astra resume RUN."
                ) from fault
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _error(self, answer: httpx.Response) -> ServiceError:
        try:
            told = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            told = answer.text[:300] or f"status {answer.status_code}"
        kind = KINDS.get(answer.status_code, ServiceError)
        return kind(f"the training service {self.base_url} refused a request: {told}")

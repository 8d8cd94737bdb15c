"""The connection to a training service: repeats what got lost, and turns refusals into errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nip_astra.errors import (
    AnswerTooLargeError,
    ConfigurationError,
    MissingDependencyError,
    ServiceBusyError,
    ServiceConflictError,
    ServiceError,
    ServiceModelError,
    ServiceRequestError,
    ServiceUnreachableError,
)
from nip_astra.language_models.services.bounded_http import (
    MIB,
    bounded,
    check_address,
)
from nip_astra.language_models.services.run_sync import run_sync
from nip_astra.language_models.services.training_wire import DONE_HEADER, KEY_HEADER, MESSAGE
from nip_astra.progress import waiting_for
from nip_astra.trust import read_variable

if TYPE_CHECKING:
    import httpx

SECONDS_WITHOUT_A_BYTE = 60.0
"""A service answers within 20, if only that it is at work."""
SECONDS_OF_ONE_REQUEST = 600.0
"""From its first byte to the last one of the answer."""
SECONDS_BETWEEN_POLLS = 0.05
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
    operation_timeout : float
        Longest that an operation may take, in seconds.
    max_answer_mib : float
        Size of the largest answer that is read.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token_variable: str | None = None,
        patience_seconds: float = 60.0,
        operation_timeout: float = 3600.0,
        max_answer_mib: float = 4096.0,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingDependencyError(
                "a training service was to be used, and it needs the package httpx. Install it "
                "with: pip install 'nip_astra[http]'."
            ) from error
        check_address(base_url, "the training service")
        self._httpx = httpx
        self.base_url = base_url.rstrip("/")
        self.patience_seconds = patience_seconds
        self.operation_timeout = operation_timeout
        self.max_answer_mib = max_answer_mib
        self._headers: dict[str, str] = {}
        if token_variable is not None:
            token = read_variable(token_variable) or ""
            if not token:
                raise ConfigurationError(
                    f"the token of the training service {self.base_url} was to be taken from the "
                    f"environment variable {token_variable}, which is not set or empty. Set it to "
                    "what the service was started with."
                )
            self._headers["Authorization"] = f"Bearer {token}"
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def post_json(self, path: str, body: Mapping[str, Any], *, key: str) -> dict[str, Any]:
        """Ask for something by JSON until there is an answer.

        Raises
        ------
        ServiceError
            Where it is refused, or the answer is no JSON object.
        """
        answer = run_sync(self._operate(path, {"json": dict(body)}, key, polls="POST"))
        if answer.status_code != 200:
            raise self._error(answer)
        try:
            found = answer.json()
        except (ValueError, RecursionError) as error:
            raise self.misunderstood(f"it is no JSON ({error})") from error
        if not isinstance(found, dict):
            raise self.misunderstood("it is no JSON object")
        return found

    def operate(self, path: str, message: bytes, *, key: str) -> Answer:
        """Have an operation carried out once, and wait for it.

        Raises
        ------
        ServiceError
            Where it had no turn.
        """
        sent = {"content": message, "headers": {"Content-Type": MESSAGE}}
        answer = run_sync(self._operate(path, sent, key, polls="GET"))
        if answer.status_code == 200:
            return Answer(answer.content)
        error = self._error(answer)
        if DONE_HEADER in answer.headers:
            return Answer(b"", error)
        raise error

    def forget(self, path: str) -> None:
        """Ask once for something to be forgotten; a service that does not answer has forgotten."""
        with suppress(self._httpx.HTTPError):
            # At the end of the program the event loop takes no more work.
            self._httpx.delete(
                f"{self.base_url}{path}", headers=self._headers, timeout=SECONDS_TO_FORGET
            )

    def report(self, path: str) -> None:
        """Tell the service once that the client of a model is there."""
        with suppress(self._httpx.HTTPError):
            self._httpx.get(
                f"{self.base_url}{path}", headers=self._headers, timeout=SECONDS_TO_FORGET
            )

    def misunderstood(self, problem: str) -> ServiceError:
        """The error for an answer that is not of the protocol."""
        return ServiceError(
            f"the training service {self.base_url} sent an answer that cannot be read: {problem}. "
            "Check that base_url is the address of `nip-astra serve --train`, of this version."
        )

    async def _operate(
        self, path: str, sent: Mapping[str, Any], key: str, *, polls: str
    ) -> httpx.Response:
        """Send a request, and while the service is at work on it ask how far it is."""
        end = time.monotonic() + self.operation_timeout
        with waiting_for(f"the training service {self.base_url}", after=10.0):
            answer = await self._patiently("POST", path, key, sent, end)
            while answer.status_code == 202:
                if time.monotonic() > end:
                    raise ServiceUnreachableError(
                        f"the training service {self.base_url} has been at work on one request for "
                        f"{self.operation_timeout:g} s. Check the service or raise "
                        "train_service.operation_timeout, then go on with: nip-astra resume RUN."
                    )
                # A service of ours has waited for the work itself.
                await asyncio.sleep(SECONDS_BETWEEN_POLLS)
                again = sent if polls == "POST" else {}
                answer = await self._patiently(polls, path, key, again, end)
        return answer

    async def _patiently(
        self, method: str, path: str, key: str, sent: Mapping[str, Any], end: float
    ) -> httpx.Response:
        """Ask again where the service does not answer or is full, up to the end of patience."""
        deadline = time.monotonic() + self.patience_seconds
        pause = 0.05
        while True:
            fault: Exception | None = None
            limit = min(SECONDS_OF_ONE_REQUEST, max(end - time.monotonic(), 0.0))
            try:
                async with asyncio.timeout(limit):
                    answer = await self._send(method, path, key, sent)
                if answer.status_code not in PASSING or DONE_HEADER in answer.headers:
                    return answer
                told = f"status {answer.status_code}"
            except AnswerTooLargeError as error:
                raise AnswerTooLargeError(
                    f"the training service {self.base_url}: {error}. Check the service, or raise "
                    "train_service.max_answer_mib."
                ) from error
            except TimeoutError as error:
                fault, told = error, f"its answer is not complete after {limit:.3g} s"
            except self._httpx.RequestError as error:
                fault, told = error, str(error) or type(error).__name__
            if time.monotonic() + pause > deadline:
                if fault is None:
                    return answer
                raise ServiceUnreachableError(
                    f"the training service {self.base_url} does not answer: {told} (asked for "
                    f"{self.patience_seconds:.3g} s). Start it again, and go on from the last "
                    "checkpoint with: nip-astra resume RUN."
                ) from fault
            with waiting_for(f"the training service {self.base_url}: {told}", after=0.5):
                await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _send(
        self, method: str, path: str, key: str, sent: Mapping[str, Any]
    ) -> httpx.Response:
        """Send a request once."""
        headers = {KEY_HEADER: key, **sent.get("headers", {})}
        return await self._open().request(method, path, **{**sent, "headers": headers})

    def _open(self) -> httpx.AsyncClient:
        """The client of the running event loop; a forked process has another loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            kind = bounded(self._httpx.AsyncClient, int(self.max_answer_mib * MIB))
            self._client = kind(
                base_url=self.base_url, headers=self._headers, timeout=SECONDS_WITHOUT_A_BYTE
            )
            self._loop = loop
        return self._client

    def _error(self, answer: httpx.Response) -> ServiceError:
        try:
            told = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            told = answer.text[:300] or f"status {answer.status_code}"
        kind = KINDS.get(answer.status_code, ServiceError)
        return kind(f"the training service {self.base_url} refused a request: {told}")

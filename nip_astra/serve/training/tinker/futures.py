"""Results that clients ask for later: each long request gives an id at once."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response

from nip_astra.serve.api_errors import ApiError
from nip_astra.serve.training.tinker.messages import PROTOBUF
from nip_astra.serve.training.work import Operation

SECONDS_TO_WAIT = 25.0
"""After which a client that waits is told to ask again; the SDK waits 45."""
SECONDS_KEPT = 3600.0
"""For which a result is kept after it was there."""
MAX_KEPT = 50_000


@dataclass
class Promise:
    """A result to come.

    Attributes
    ----------
    tell : Callable
        Turns the result into an answer.
    made_at : float
        When it was asked for, `time.monotonic`.
    """

    operation: Operation
    tell: Callable[[Any], Response]
    made_at: float = field(default_factory=time.monotonic)


class Promises:
    """All results to come and those of the last hour."""

    def __init__(self) -> None:
        self._promises: OrderedDict[str, Promise] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, name: str, operation: Operation, tell: Callable[[Any], Response]) -> None:
        """Promise the result of an operation; a second time, of a repeated request, is fine."""
        with self._lock:
            self._promises.setdefault(name, Promise(operation, tell))
            oldest = time.monotonic() - SECONDS_KEPT
            while self._promises:
                first, promise = next(iter(self._promises.items()))
                is_old = promise.made_at < oldest or len(self._promises) > MAX_KEPT
                if not (is_old and promise.operation.future.done()):
                    break
                self._promises.pop(first)

    def knows(self, name: str) -> bool:
        """Whether a result was promised under a name."""
        with self._lock:
            return name in self._promises

    async def answer(self, name: str) -> Response:
        """The result, an error in the form that the SDK raises, or that it takes longer."""
        with self._lock:
            promise = self._promises.get(name)
        if promise is None:
            return failure(
                f"the result of the request {name[:100]!r} was asked for, but this service does "
                "not know it: it was started anew since, or the result is older than an hour. "
                "Make a client from a saved state, create_training_client_from_state_with_"
                "optimizer, and go on from there.",
                "server",
            )
        waited = asyncio.shield(asyncio.wrap_future(promise.operation.future))
        try:
            result = await asyncio.wait_for(waited, SECONDS_TO_WAIT)
        except TimeoutError:
            body = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(body, 408)
        except ApiError as error:
            return failure(str(error), "user" if error.status < 500 else "server")
        return promise.tell(result)


def failure(message: str, category: str) -> Response:
    """A failed request, as the SDK turns it into its RequestFailedError."""
    return JSONResponse({"error": message, "category": category})


def tell_protobuf(result: bytes) -> Response:
    """A message of the SDK's."""
    return Response(result, media_type=PROTOBUF)


def digest_of(body: bytes) -> str:
    """Tells a repeated request from another one."""
    return hashlib.sha256(body).hexdigest()

"""Request authentication, validation of bodies, and refusals in OpenAI's format."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nip_astra.errors import ServiceError, nearest_names
from nip_astra.serve.settings import is_loopback

OPEN_ROUTES = ("/health",)
KEY_HEADER = "x-api-key"
"""Header with the token in Tinker's SDK."""
MAX_LISTED = 10_000
"""Maximum entries of one page of a list."""
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]
"""Number of entries of a page."""
NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "functions": ([],),
    "suffix": ("",),
    "modalities": (["text"],),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "ignore_eos": (False,),
}
"""Unsupported options of OpenAI and vLLM, with their values that have no effect.

Some clients send every option at its default."""
_LIST_ROUTES = {
    "model": "/v1/models",
    "file": "/v1/files",
    "fine-tuning job": "/v1/fine_tuning/jobs",
}
_UNION_STEPS = ("function-", "list[", "literal[")
"""Beginnings of pydantic's names for members of a union in the path of a fault."""
_UNION_MEMBERS = ("str", "constrained-str", "int", "Text", "ChosenTool")


class ApiError(ServiceError):
    """A request that is answered with an error.

    Parameters
    ----------
    status : int
        HTTP status.
    kind, param, code : str
        Type of the error, option at fault and machine-readable fault, in OpenAI's form.
    retry_after : int, optional
        Seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = partial(
            ApiError,
            self.status,
            str(self),
            kind=self.kind,
            param=self.param,
            code=self.code,
            retry_after=self.retry_after,
        )
        return rebuild, ()

    @property
    def body(self) -> dict[str, Any]:
        # OpenAI's clients read all four fields.
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self, **headers: str) -> JSONResponse:
        if self.retry_after is not None:
            # OpenAI's clients wait for so long, instead of by their own schedule.
            headers["Retry-After"] = str(self.retry_after)
        return JSONResponse(self.body, self.status, headers=headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the refusal of an invalid request (400)."""
    return ApiError(400, message, param=param, code=code)


def invalid_value(name: str, value: object, reason: str) -> ApiError:
    """Return the refusal of an option's value (400)."""
    message = f"the option {name!r} is {_shorten(value)}: {reason}. Give another value."
    return bad_request(message, name, "invalid_value")


def not_found(kind: str, name: str, param: str | None = None) -> ApiError:
    """Return the refusal of an unknown name (404); `kind` is that of the named object."""
    # OpenAI's code for an unknown model, by which clients choose another.
    code = "model_not_found" if kind == "model" else "not_found"
    message = f"this service has no {kind} {name[:200]!r}. List them with GET {_LIST_ROUTES[kind]}."
    return ApiError(404, message, param=param, code=code)


def overloaded(message: str, code: str) -> ApiError:
    """Return the refusal of a valid request while the service is at its limit (429)."""
    return ApiError(429, message, kind="rate_limit_error", code=code, retry_after=1)


def internal_error(message: str) -> ApiError:
    """Return the error for a valid request that failed (500)."""
    return ApiError(500, message, kind="server_error")


def shutting_down() -> ApiError:
    """Return the refusal of a request by a service that is shutting down (503)."""
    text = "the service is shutting down. Send the request again once it has been restarted."
    return ApiError(503, text, kind="server_error", code="shutting_down")


def make_refusal(make_error: Callable[[], ApiError]) -> Callable[[], Awaitable[Response]]:
    """Return the handler of a route that is refused by name, with a new error each time."""

    async def refuse() -> Response:
        raise make_error()

    return refuse


# ---- bodies


class Body(BaseModel):
    """The body of a request; unknown options are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


AnyBody = TypeVar("AnyBody", bound=Body)
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


async def read_body(request: Request, body_class: type[AnyBody]) -> AnyBody:
    """Read and validate the body of a request; raise `ApiError` with its first fault."""
    return check_body(parse_json(await request.body()), body_class)


def parse_json(body: bytes) -> Any:
    """Parse JSON without NaN or infinite numbers whose text can be encoded as UTF-8."""
    try:
        text = body.decode()
        # `parse_constant` gets NaN and Infinity, `parse_float` numbers such as 1e999.
        content = json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite)
        if "\\u" in text:
            # An escaped lone surrogate is JSON, but no text: tokenizers and responses fail on it.
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except (ValueError, RecursionError) as error:
        raise bad_request(
            f"this is not JSON: {error}. Send one JSON object, encoded as UTF-8.",
            code="invalid_json",
        ) from error


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def check_body(content: Any, body_class: type[AnyBody]) -> AnyBody:
    """Validate a body; raise `ApiError` with its first fault."""
    if not isinstance(content, dict):
        raise bad_request(
            f"the body is {_shorten(content)}. Send a JSON object of the route's options."
        )
    options = {}
    for name, option in content.items():
        # Null means "by default", as in OpenAI's protocol.
        if option is not None and option not in NO_EFFECT.get(name, ()):
            options[name] = option
    try:
        return body_class.model_validate(options)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise _as_refusal(min(faults, key=_rank_fault), body_class) from error


def _rank_fault(fault: ErrorDetails) -> tuple[bool, bool]:
    """Return a sort key: the fault that explains the others first."""
    # An unknown option explains a missing one, which is misspelt. A wrong type is often that of
    # another member of a union.
    return fault["type"] != "extra_forbidden", fault["type"].endswith("_type")


def _as_refusal(fault: ErrorDetails, body_class: type[Body]) -> ApiError:
    # The path also names members of unions, which are no options of the client.
    path = [str(step) for step in fault["loc"] if not str(step).startswith(_UNION_STEPS)]
    options = [step for step in path if step not in _UNION_MEMBERS]
    name = ".".join(options)[:200]
    if fault["type"] == "extra_forbidden":
        hint = "Leave it out."
        if len(path) == 1:
            for near_name in nearest_names(path[0], body_class.model_fields, 1):
                hint = f"Did you mean {near_name!r}?"
        message = f"the option {name!r} is not supported. {hint}"
        return bad_request(message, name, "unsupported_parameter")
    if fault["type"] == "missing":
        message = f"the option {name!r} is missing. Give it."
        return bad_request(message, name, "missing_required_parameter")
    reason = fault["msg"].removeprefix("Value error, ")
    if not name:
        return bad_request(f"{reason}.", code="invalid_value")
    return invalid_value(name, fault["input"], reason)


def _shorten(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- before the routes


class Guard:
    """Checks the token, or without one that the request is from this machine; limits its size.

    Middleware of plain ASGI, not Starlette's `BaseHTTPMiddleware`: that would run each stream
    through a task and a queue of its own.

    Parameters
    ----------
    max_bytes : Callable
        Maximum size of the body of a request, by its path.
    """

    def __init__(self, app: ASGIApp, token: str | None, max_bytes: Callable[[str], int]) -> None:
        self.app = app
        self.token = token
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.max_bytes(scope["path"])
        try:
            self._check(scope["path"], Headers(scope=scope), limit)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        num_received = 0

        async def receive_within_limit() -> Message:
            # A chunked body has no content-length, and a client may state a wrong one.
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > limit:
                raise _too_large(limit)
            return message

        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive_within_limit, send_and_note)
        except asyncio.CancelledError:
            # By uvicorn, which ends the requests that are open at its shutdown. A response whose
            # status is sent cannot become an error any more.
            if not has_started:
                await shutting_down().response()(scope, receive, send)

    def _check(self, path: str, headers: Headers, limit: int) -> None:
        if path not in OPEN_ROUTES:
            if self.token is not None:
                _check_token(headers, self.token)
            else:
                _check_site(headers)
        length = headers.get("content-length", "0")
        # Python reads no number of thousands of digits.
        is_count = length.isascii() and length.isdigit() and len(length) < 20
        if not is_count or int(length) > limit:
            raise _too_large(limit)


def _check_token(headers: Headers, token: str) -> None:
    scheme, _, sent_token = headers.get("authorization", "").partition(" ")
    if KEY_HEADER in headers:
        scheme, sent_token = "bearer", headers[KEY_HEADER]
    # In constant time: the time of `==` tells how many first characters are right.
    is_equal = hmac.compare_digest(sent_token.strip().encode(), token.encode())
    if scheme.lower() != "bearer" or not is_equal:
        raise ApiError(
            401,
            "the token of this service is missing or wrong. Give it as the client's api_key.",
            kind="authentication_error",
            code="invalid_api_key",
        )


def _check_site(headers: Headers) -> None:
    """Refuse a request that another site's page makes a browser on this machine send.

    Such a page sends its own origin or, after its name was rebound to 127.0.0.1, its own host.
    """
    addresses = [f"//{headers.get('host', '')}"]
    if "origin" in headers:
        addresses.append(headers["origin"])
    if not all(_is_local(address) for address in addresses):
        names = " and ".join(ascii(address)[:80] for address in addresses)
        raise ApiError(
            403,
            f"host or origin of the request is {names}, but a service without a token answers "
            "this machine only. Use 127.0.0.1, or start it with a token.",
            kind="permission_error",
            code="wrong_host",
        )


@lru_cache(maxsize=256)
def _is_local(address: str) -> bool:
    try:
        hostname = urlsplit(address).hostname
    except ValueError:
        return False
    return is_loopback(hostname or "")


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {limit} bytes. Send less, or start the service with a higher "
        "limit.",
        code="request_too_large",
    )

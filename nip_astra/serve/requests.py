"""Request authentication, validation of bodies, and refusals in OpenAI's format."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
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
"""Unsupported options of OpenAI and vLLM, with their values that have no effect."""
_LISTS = {"fine-tuning job": "fine_tuning/jobs"}


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
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        given = {name: getattr(self, name) for name in ("kind", "param", "code", "retry_after")}
        return partial(ApiError, self.status, str(self), **given), ()

    @property
    def body(self) -> dict[str, Any]:
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self, **headers: str) -> JSONResponse:
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        return JSONResponse(self.body, self.status, headers=headers)


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the refusal of an invalid request (400)."""
    return ApiError(400, message, param=param, code=code)


def not_found(what: str, name: str, param: str | None = None) -> ApiError:
    """Return the refusal of an unknown name (404)."""
    return ApiError(
        404,
        f"this service has no {what} {name[:200]!r}. List them with GET "
        f"/v1/{_LISTS.get(what, what + 's')}.",
        param=param,
        code="model_not_found" if what == "model" else "not_found",
    )


def overloaded(message: str, code: str) -> ApiError:
    """Return the refusal of a valid request while the service is at its limit (429)."""
    return ApiError(429, message, kind="rate_limit_error", code=code, retry_after=1)


def failed(message: str) -> ApiError:
    """Return the error for a valid request that failed (500)."""
    return ApiError(500, message, kind="server_error")


def ending() -> ApiError:
    """Return the refusal of a request by a service that is shutting down (503)."""
    text = "the service is shutting down. Send the request again once it has been restarted."
    return ApiError(503, text, kind="server_error", code="shutting_down")


# ---- bodies


class Body(BaseModel):
    """The body of a request; unknown options are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


AnyBody = TypeVar("AnyBody", bound=Body)
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


async def read_body(request: Request, kind: type[AnyBody]) -> AnyBody:
    """Read and validate the body of a request; raise `ApiError` with its first fault."""
    return check_body(parse_json(await request.body()), kind)


def parse_json(body: bytes) -> Any:
    """Parse JSON without NaN or infinite numbers whose text can be encoded as UTF-8."""
    try:
        text = body.decode()
        found = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as error:
        raise wrong(
            f"this is not JSON: {error}. Send one JSON object, encoded as UTF-8.",
            code="invalid_json",
        ) from error


def _finite(number: str) -> float:
    found = float(number)
    if not math.isfinite(found):
        raise ValueError(f"{number[:40]} is not a finite number")
    return found


def check_body(given: Any, kind: type[AnyBody]) -> AnyBody:
    """Validate a body; raise `ApiError` with its first fault."""
    if not isinstance(given, dict):
        raise wrong(f"the body is {_short(given)}. Send a JSON object of the route's options.")
    meant = {
        name: value
        for name, value in given.items()
        if value is not None and value not in NO_EFFECT.get(name, ())
    }
    try:
        return kind.model_validate(meant)
    except ValidationError as error:
        raise _refusal(min(error.errors(include_url=False), key=_rank), kind) from error


def _rank(fault: ErrorDetails) -> tuple[bool, bool]:
    # An unknown option explains the others: a missing one is misspelt. A wrong type is often that
    # of another member of a union.
    return fault["type"] != "extra_forbidden", fault["type"].endswith("_type")


def _refusal(fault: ErrorDetails, kind: type[Body]) -> ApiError:
    # The path also names members of unions; no option begins with these.
    unions = ("function-", "list[", "literal[")
    path = [str(part) for part in fault["loc"] if not str(part).startswith(unions)]
    members = ("str", "constrained-str", "int", "Text", "ChosenTool")
    name = ".".join(part for part in path if part not in members)[:200]
    if fault["type"] == "extra_forbidden":
        near = nearest_names(path[-1], kind.model_fields, 1) if len(path) == 1 else []
        hint = f"Did you mean {near[0]!r}?" if near else "Leave it out."
        return wrong(f"the option {name!r} is not supported. {hint}", name, "unsupported_parameter")
    if fault["type"] == "missing":
        return wrong(
            f"the option {name!r} is missing. Give it.", name, "missing_required_parameter"
        )
    reason = fault["msg"].removeprefix("Value error, ")
    if not name:
        return wrong(f"{reason}.", code="invalid_value")
    return wrong(
        f"the option {name!r} is {_short(fault['input'])}: {reason}. Give another value.",
        name,
        "invalid_value",
    )


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- before the routes


class Guard:
    """Checks the token, or without one that the request is from this machine; limits its size."""

    def __init__(self, app: ASGIApp, token: str | None, max_bytes: Callable[[str], int]) -> None:
        self.app, self.token, self.max_bytes = app, token, max_bytes

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
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        has_started = False

        async def noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, counted, noted)
        except asyncio.CancelledError:
            # By uvicorn, which ends the requests that are open at its shutdown.
            if not has_started:
                await ending().response()(scope, receive, send)

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
    kind, _, given = headers.get("authorization", "").partition(" ")
    if KEY_HEADER in headers:
        kind, given = "bearer", headers[KEY_HEADER]
    is_equal = hmac.compare_digest(given.strip().encode(), token.encode())
    if kind.lower() != "bearer" or not is_equal:
        raise ApiError(
            401,
            "the token of this service is missing or wrong. Give it as the client's api_key.",
            kind="authentication_error",
            code="invalid_api_key",
        )


def _check_site(headers: Headers) -> None:
    """Refuse a request that another site's page makes a browser on this machine send."""
    origin = headers.get("origin")
    hosts = [f"//{headers.get('host', '')}", *([] if origin is None else [origin])]
    if not all(_is_local(host) for host in hosts):
        raise ApiError(
            403,
            f"host or origin of the request is {' and '.join(ascii(host)[:80] for host in hosts)}, "
            "but a service without a token answers this machine only. Use 127.0.0.1, or start it "
            "with a token.",
            kind="permission_error",
            code="wrong_host",
        )


@lru_cache(maxsize=256)
def _is_local(address: str) -> bool:
    try:
        return is_loopback(urlsplit(address).hostname or "")
    except ValueError:
        return False


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {limit} bytes. Send less, or start the service with a higher "
        "limit.",
        code="request_too_large",
    )

"""What stands before the routes: who may ask, and how large a request may be."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nip_astra.serve.api_errors import ApiError

OPEN_ROUTES = ("/health",)
KEY_HEADER = "x-api-key"
"""In which Tinker's SDK brings the token."""


class Guard:
    """Checks the token, or that a browser's page of another site is not who asks; counts bytes.

    Parameters
    ----------
    token : str or None
        Without one only requests to a loopback address are answered.
    max_bytes : Callable[[str], int]
        Largest body of a request to a path.
    """

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
            response = JSONResponse(error.body, error.status, headers=error.headers)
            await response(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        await self.app(scope, counted, send)

    def _check(self, path: str, headers: Headers, limit: int) -> None:
        if path not in OPEN_ROUTES:
            if self.token is not None:
                self._check_token(headers)
            else:
                _check_site(headers)
        length = headers.get("content-length", "0")
        # Python reads no number of thousands of digits.
        is_count = length.isascii() and length.isdigit() and len(length) < 20
        if not is_count or int(length) > limit:
            raise _too_large(limit)

    def _check_token(self, headers: Headers) -> None:
        assert self.token is not None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if KEY_HEADER in headers:
            kind, given = "bearer", headers[KEY_HEADER]
        is_right = hmac.compare_digest(given.strip().encode(), self.token.encode())
        if kind.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "the service was asked without its token, or with another one. Give the token as "
                "the client's api_key.",
                kind="authentication_error",
                code="invalid_api_key",
            )


def _check_site(headers: Headers) -> None:
    """Refuse what a page of another site makes a browser on this machine send."""
    origin = headers.get("origin")
    hosts = [f"//{headers.get('host', '')}", *([] if origin is None else [origin])]
    if not all(_is_local(host) for host in hosts):
        raise ApiError(
            403,
            "the service has no token and answers this machine alone, but the request names "
            f"{' and '.join(ascii(host)[:80] for host in hosts)} as host or origin. Address it as "
            "127.0.0.1, or start it with a token.",
            kind="permission_error",
            code="wrong_host",
        )


def _is_local(address: str) -> bool:
    try:
        name = urlsplit(address).hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body of the request has more than {limit} bytes, which is the most that this service "
        "reads. Send less, or start the service with a higher limit.",
        code="request_too_large",
    )

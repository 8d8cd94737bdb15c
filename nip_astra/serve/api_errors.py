"""Refusals in the form that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from nip_astra.errors import ServiceError

Thing = TypeVar("Thing")


class ApiError(ServiceError):
    """A request that is answered with an error.

    Attributes
    ----------
    status : int
        Of HTTP.
    kind : str
        Type of the error in OpenAI's form.
    param : str or None
        Which part of the request is wrong.
    code : str or None
        Which fault, for programs.
    retry_after : int or None
        Seconds after which the same request may fare better.
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
        return _restore, (str(self), self.__dict__)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        return error_body(str(self), self.kind, self.param, self.code)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def _restore(message: str, state: dict[str, Any]) -> ApiError:
    error = ApiError(500, message)
    error.__dict__.update(state)
    return error


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error as OpenAI's protocol spells it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong as it stands (400)."""
    return ApiError(400, message, param=param, code=code)


def not_found(what: str, name: str, param: str | None = None) -> ApiError:
    """Something that is not there (404)."""
    code = "model_not_found" if what == "model" else "not_found"
    return ApiError(
        404,
        f"the {what} {name[:200]!r} was asked for, but this service has none of that name. "
        f"List what it has with GET /v1/{_ROUTES.get(what, what + 's')}.",
        param=param,
        code=code,
    )


def held(things: Mapping[str, Thing], name: str, *, reason: str, code: str) -> Thing:
    """What a service holds under a name that it gave.

    Parameters
    ----------
    reason : str
        What was asked, what is wrong and what to do where there is none, with `{name}` in it.

    Raises
    ------
    ApiError
        404 where there is none.
    """
    found = things.get(name)
    if found is None:
        raise ApiError(404, reason.format(name=repr(name[:200])), code=code)
    return found


_ROUTES = {"fine-tuning job": "fine_tuning/jobs"}


def overloaded(message: str, code: str) -> ApiError:
    """A right request that comes at a time when the service is at its limit (429)."""
    return ApiError(429, message, kind="rate_limit_error", code=code, retry_after=1)


def failed(message: str) -> ApiError:
    """A right request that the service could not answer (500)."""
    return ApiError(500, message, kind="server_error")

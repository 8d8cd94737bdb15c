"""Read the bodies of requests: strictly, and with refusals that name the option at fault."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from nip_astra.errors import nearest_names
from nip_astra.serve.api_errors import ApiError, wrong

NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "best_of": (1,),
    "echo": (False,),
    "tools": ([],),
    "suffix": ("",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "ignore_eos": (False,),
}
"""Options of OpenAI's and vLLM's that are not supported, with the values that ask for nothing."""


class Body(BaseModel):
    """What a request says; what it does not know is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


AnyBody = TypeVar("AnyBody", bound=Body)
MAX_LISTED = 10_000
"""Most entries of one page of a list."""


async def read_body(request: Request, kind: type[AnyBody]) -> AnyBody:
    """Read and check the body of a request.

    Raises
    ------
    ApiError
        When it is no JSON object, or its first fault.
    """
    return check_body(parse_json(await request.body()), kind)


def parse_json(body: bytes) -> Any:
    """Read JSON: without NaN or infinite numbers, and with text that can be written as UTF-8.

    Raises
    ------
    ApiError
        When it is anything else.
    """
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
    """Check values against what a request may say.

    Raises
    ------
    ApiError
        With the first fault.
    """
    if not isinstance(given, dict):
        raise wrong(
            f"the body of the request is {_short(given)}, but an object is needed. Send a JSON "
            "object of the route's options."
        )
    meant = {
        name: value
        for name, value in given.items()
        if value is not None and value not in NO_EFFECT.get(name, ())
    }
    try:
        return kind.model_validate(meant)
    except ValidationError as error:
        # An option that is not known explains the others: one that is missing is misspelt.
        faults = sorted(
            error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden"
        )
        raise _refusal(faults[0], kind) from error


def _refusal(fault: ErrorDetails, kind: type[Body]) -> ApiError:
    # Names of a union's members stand in the path too; an option's do not begin with these.
    path = [str(part) for part in fault["loc"] if not str(part).startswith(("function-", "list["))]
    name = ".".join(part for part in path if part not in ("str", "int", "Text"))
    if fault["type"] == "extra_forbidden":
        near = nearest_names(path[-1], kind.model_fields, 1) if len(path) == 1 else []
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return wrong(
            f"the option {name[:200]!r} is not supported by this service.{hint} Leave it out: what "
            "is not supported is refused, never ignored.",
            name[:200],
            "unsupported_parameter",
        )
    if fault["type"] == "missing":
        return wrong(
            f"the option {name!r} is missing. Give it.", name, "missing_required_parameter"
        )
    return wrong(
        f"the option {name[:200]!r} was given as {_short(fault['input'])}: {fault['msg']}. Give "
        "another value.",
        name[:200],
        "invalid_value",
    )


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""Conditions on the figures of an evaluation, for `--fail-if`; nothing is evaluated by Python.

condition  = both, "or", both ...
both       = part, "and", part ...
part       = "not", part | comparison
comparison = sum, [ ("<" | "<=" | ">" | ">=" | "==" | "!="), sum ]
sum        = product, ("+" | "-"), product ...
product    = value, ("*" | "/"), value ...
value      = number | name.name.name | "-", value | "(", condition, ")"
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nip_astra.errors import ConfigurationError, nearest_names

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)"
    r"|(?P<name>[A-Za-z_][\w@]*(?:\.[\w@-]+)*)"
    r"|(?P<sign><=|>=|==|!=|[<>+*/()-]))"
)
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_WORDS = ("and", "or", "not")
_MAX_DEPTH = 50


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether a condition is true of nested values, for instance of an `evaluation.json`.

    Raises
    ------
    ConfigurationError
        When it cannot be read, or names a figure that is absent or has no value.
    """
    return _Reader(condition, values).result()


def check_condition(condition: str | None, shape: Mapping[str, Any] | None = None) -> None:
    """Check a condition before there are figures; None passes.

    Parameters
    ----------
    shape : Mapping, optional
        The names of the coming figures, nested; below a None or an empty group any name passes.

    Raises
    ------
    ConfigurationError
        When it cannot be read, or names a figure that there will not be.
    """
    if condition is not None:
        _Reader(condition, shape or {}, is_shape=True).result()


class _Reader:
    """Evaluates a condition from left to right; with `is_shape` only the values' names matter."""

    def __init__(
        self, condition: str, values: Mapping[str, Any], *, is_shape: bool = False
    ) -> None:
        self.condition = condition
        self.values = values
        self.is_shape = is_shape
        self._tokens = self._split()
        self._depth = 0
        self._next = next(self._tokens, "")

    def result(self) -> bool:
        found = self._either()
        if self._next:
            raise self._fault(f"{self._next!r} stands where it should end")
        if not isinstance(found, bool):
            raise self._fault("it is a number and compares nothing")
        return found

    def _split(self) -> Iterator[str]:
        text, position = self.condition.rstrip(), 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._fault(f"{text[position:].strip()[:20]!r} is none of its signs")
            position = match.end()
            yield match[0].strip()

    def _take(self, *expected: str) -> str | None:
        if self._next not in expected or not self._next:
            return None
        token, self._next = self._next, next(self._tokens, "")
        return token

    def _either(self) -> bool | float:
        found = self._both()
        while self._take("or"):
            # Both sides are evaluated, so that a wrong name is always reported.
            left, right = self._truth(found), self._truth(self._both())
            found = left or right
        return found

    def _both(self) -> bool | float:
        found = self._part()
        while self._take("and"):
            left, right = self._truth(found), self._truth(self._part())
            found = left and right
        return found

    def _part(self) -> bool | float:
        if self._take("not"):
            return not self._truth(self._nested(self._part))
        left = self._sum()
        sign = self._take(*_COMPARISONS)
        if sign is None:
            return left
        return _COMPARISONS[sign](self._number(left), self._number(self._sum()))

    def _sum(self) -> bool | float:
        found = self._product()
        while sign := self._take("+", "-"):
            right = self._number(self._product())
            found = self._number(found) + (right if sign == "+" else -right)
        return found

    def _product(self) -> bool | float:
        found = self._value()
        while sign := self._take("*", "/"):
            right = self._number(self._value())
            if sign == "/" and right == 0.0:
                if not self.is_shape:
                    raise self._fault("it divides by zero")
                right = 1.0
            found = self._number(found) * (right if sign == "*" else 1.0 / right)
        return found

    def _value(self) -> bool | float:
        if self._take("-"):
            return -self._number(self._nested(self._value))
        if self._take("("):
            found = self._nested(self._either)
            if self._take(")") is None:
                raise self._fault("a bracket is not closed")
            return found
        token = self._next
        if not token or not (token[0].isalnum() or token[0] in "_.") or token in _WORDS:
            raise self._fault(f"a figure is missing before {token!r}" if token else "it ends")
        self._next = next(self._tokens, "")
        return float(token) if token[0].isdigit() or token[0] == "." else self._figure(token)

    def _nested(self, read: Callable[[], bool | float]) -> bool | float:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._fault(f"it nests deeper than {_MAX_DEPTH}")
        found = read()
        self._depth -= 1
        return found

    def _figure(self, path: str) -> float:
        value: Any = self.values
        parts = path.split(".")
        for index, name in enumerate(parts):
            if self.is_shape and (value is None or value == {} or value == []):
                return 1.0
            known = _children(value)
            if name not in known:
                above = "".join(f"{part}." for part in parts[:index])
                near = nearest_names(name, known)
                hint = f" Did you mean {above + near[0]!r}?" if near else ""
                raise ConfigurationError(
                    f"the condition {self.condition!r} names the unknown figure {path!r}.{hint} "
                    f"Known: {', '.join(known) or 'nothing'}."
                )
            value = known[name]
        if isinstance(value, Mapping) and "value" in value:
            # A figure with an interval counts as its value.
            value = value["value"]
        if isinstance(value, float) and math.isnan(value):
            value = None
        if self.is_shape and value is None:
            return 1.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            shown = "has no value" if value is None else f"is {type(value).__name__}"
            raise ConfigurationError(
                f"the condition {self.condition!r} names {path!r}, which {shown} here. Name a "
                "number, for instance failure_rate.high."
            )
        return float(value)

    def _truth(self, value: bool | float) -> bool:
        if not isinstance(value, bool):
            raise self._fault("'and', 'or' and 'not' join comparisons, not numbers")
        return value

    def _number(self, value: bool | float) -> float:
        if isinstance(value, bool):
            raise self._fault("a comparison is not a number")
        return value

    def _fault(self, problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"the condition {self.condition!r} cannot be read: {problem}. A condition compares "
            "figures, for instance 'failure_rate.high > 0.05 and scores.response.mean > 0.1'."
        )


def _children(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): item for index, item in enumerate(value)}
    return {}

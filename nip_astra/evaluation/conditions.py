"""Conditions on an evaluation's figures for `--fail-if`, without evaluating Python code.

A condition compares sums, differences, products and quotients of numbers and figures (dotted names)
by `<`, `<=`, `>`, `>=`, `==` and `!=`, and joins comparisons by `and`, `or`, `not` and brackets.
Python's parser gives the order of the operations.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from nip_astra.errors import ConfigurationError, nearest_names
from nip_astra.tracking.figure_names import current_figure_name

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)"
    r"|(?P<name>[A-Za-z_][\w@]*(?:\.[\w@-]+)*)"
    r"|(?P<sign><=|>=|==|!=|[<>+*/()-]))"
)
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_WORDS = ("and", "or", "not")


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Return whether a condition is true of nested values, such as those of an `evaluation.json`.

    Raises
    ------
    ConfigurationError
        When it cannot be read, or names a figure that is absent or has no value.
    """
    return _Reader(condition, values).result()


def check_condition(condition: str | None, shape: Mapping[str, Any] | None = None) -> None:
    """Check a condition before figures exist; accepts None.

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
    """Evaluator of a condition; with `is_shape` only the values' names matter."""

    def __init__(
        self, condition: str, values: Mapping[str, Any], *, is_shape: bool = False
    ) -> None:
        self.condition = condition
        self.values = values
        self.is_shape = is_shape
        self._names: list[str] = []

    def result(self) -> bool:
        try:
            tree = ast.parse(" ".join(self._tokens()), mode="eval")
            return self._truth(tree.body)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise self._fault(getattr(error, "msg", "it nests too deeply")) from error

    def _tokens(self) -> list[str]:
        """Return the condition for Python's parser, with a plain name in place of each figure."""
        tokens, text, position = [], self.condition.rstrip(), 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._fault(f"{text[position:].strip()[:20]!r} is not valid here")
            position = match.end()
            token = match[0].strip()
            if match["name"] and token not in _WORDS:
                self._names.append(token)
                token = f"figure{len(self._names) - 1}"
            tokens.append(token)
        return tokens

    def _truth(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            # Both sides are evaluated, so that a wrong name is always reported.
            sides = [self._truth(value) for value in node.values]
            return all(sides) if isinstance(node.op, ast.And) else any(sides)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._truth(node.operand)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            compare = _COMPARISONS[type(node.ops[0])]
            return compare(self._number(node.left), self._number(node.comparators[0]))
        raise self._fault("'and', 'or' and 'not' join comparisons of two numbers")

    def _number(self, node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.Name):
            return self._figure(self._names[int(node.id.removeprefix("figure"))])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = self._number(node.left), self._number(node.right)
            if isinstance(node.op, ast.Div) and right == 0.0:
                if not self.is_shape:
                    raise self._fault("it divides by zero")
                right = 1.0
            return _OPERATIONS[type(node.op)](left, right)
        raise self._fault("a comparison is not a number")

    def _figure(self, path: str) -> float:
        value: Any = self.values
        parts = [current_figure_name(part) for part in path.split(".")]
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

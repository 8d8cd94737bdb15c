"""Tests of other kinds than calls with an expected value, run in the sandbox."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Sequence
from typing import Any

from nip_astra.scenarios.code.verified import LIMITS
from nip_astra.utils.sandbox import call_in_sandbox, run_beside_in_sandbox, run_in_sandbox

_NOTING = """
_noted = []
def _note(passes):
    try:
        _noted.append(bool(passes()))
    except Exception:
        _noted.append(False)
"""


def count_asserts(code: str, test: str, function: str) -> tuple[int, int]:
    """How many assertions of a test hold, and how many were reached.

    The test runs in another process than the code, which gives values and cannot tell what they are
    compared with.

    Parameters
    ----------
    test : str
        Source of a function `check`, which is given the function of the code, and of all else that
        it needs.
    """
    tree = _NoteAsserts().visit(ast.parse(test))
    mark = f"{os.urandom(8).hex()}:"
    program = "\n".join(
        [
            f"_function = {function}",
            _NOTING,
            ast.unparse(ast.fix_missing_locations(tree)),
            f"{function} = _function",
            f"try:\n    check({function})\nexcept Exception:\n    _noted.append(False)",
            f"print('\\n{mark}' + __import__('json').dumps([sum(_noted), len(_noted)]))",
        ]
    )
    said = run_beside_in_sandbox(code, function, program, LIMITS).stdout.splitlines()
    told = [line.removeprefix(mark) for line in said if line.startswith(mark)]
    if not told:
        return 0, 0
    held, reached = json.loads(told[-1])
    return int(held), int(reached)


class _NoteAsserts(ast.NodeTransformer):
    """Notes the assertions of `check`."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "check":
                self.generic_visit(part)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        held = ast.Lambda(nothing, node.test)
        return ast.Expr(ast.Call(ast.Name("_note", ast.Load()), [held], []))


def read_and_write(code: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> float:
    """The share of inputs for which a program writes the right words; spaces do not count."""
    passed = 0
    for given, expected in zip(inputs, outputs, strict=True):
        result = run_in_sandbox(code, _text(given), LIMITS)
        is_right = result.stdout.split() == _text(expected).split()
        passed += result.outcome == "finished" and is_right
    return passed / len(inputs)


def call_cases(code: str, function: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> float:
    """The share of arguments for which a function, or a method of `Solution`, gives what is right.

    Some data sets put the expected value into a list; both forms are right.
    """
    caller = (
        f"{code}\ndef _called(*arguments):\n"
        f"    owner = Solution() if 'Solution' in globals() else None\n"
        f"    call = globals()[{function!r}] if owner is None else getattr(owner, {function!r})\n"
        "    return call(*arguments)\n"
    )
    results = call_in_sandbox(caller, "_called", [list(given) for given in inputs], LIMITS)
    passed = [
        not result.error and expected in (result.value, [result.value])
        for result, expected in zip(results, outputs, strict=True)
    ]
    return sum(passed) / len(passed)


def _text(lines: Any) -> str:
    """What stands in a file of text, which may be given as its lines."""
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))

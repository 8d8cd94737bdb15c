"""Run functions written by a model in Monty, an interpreter without access to the machine.

Code that needs a Python feature missing from Monty is refused. https://github.com/pydantic/monty

In Monty generators, `zip`, `map`, `filter`, `enumerate` and `reversed` return lists. An iterator
consumed where it is created is replaced by a lazy class; any other use is refused, since it may
depend on the rest of the iterator. A list remains if all of it is consumed at once. Sets have the
order of insertion in Monty and are built in Python's order here; for elements added later, or
beyond 9,999, the order may differ.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import re
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nip_astra.errors import SandboxUnavailableError

if TYPE_CHECKING:
    from pydantic_monty import CollectString, MontyError, MontySession

PACKAGE = "pydantic-monty"
_MIB = 2**20
_SLACK_SECONDS = 1.0
"""Seconds beyond the limit after which an interpreter is killed."""
_ARGUMENTS = "_arguments_of_this_call"

# Python's paths, by which Monty is found, are computed at their first use: not thread-safe.
sysconfig.get_config_vars()


def why_no_interpreter() -> str:
    """Return why Monty is not available; empty if it is."""
    if importlib.util.find_spec("pydantic_monty") is None:
        return f"the package {PACKAGE} is not installed"
    return ""


def call_in_interpreter(
    code: str, function: str, calls: Sequence[Sequence[Any]], limits: SandboxLimits
) -> list[CallResult]:
    """Call a function that untrusted code defines, as `call_in_sandbox` does.

    One interpreter process makes all calls. `cpu_seconds` bounds each, `seconds` all of them, and
    `memory_mib` the interpreter's values.
    """
    uses = _checked_uses(code)
    if isinstance(uses, str):
        return [CallResult(error=uses)] * len(calls)
    deadline = time.monotonic() + limits.seconds
    results: list[CallResult] = []
    with _session(limits) as session:
        defined, is_over = _run(session, uses.code, {}, limits)
        if defined.error:
            return [defined] * len(calls)
        for arguments in calls:
            if is_over or time.monotonic() > deadline:
                break
            variables = {_ARGUMENTS: list(arguments)}
            result, is_over = _run(session, f"{function}(*{_ARGUMENTS})", variables, limits)
            if uses.is_rewritten and result.error.startswith("RecursionError"):
                # Lazy iterators take more frames than Python's own.
                raise _refusal("the depth of recursion that lazy iterators need")
            results.append(result)
    # Calls after the end of the interpreter or of the time fail like the last.
    error = results[-1].error if is_over else f"stopped after {limits.seconds:.1f} s"
    return [*results, *[CallResult(error=error)] * (len(calls) - len(results))]


def run_in_interpreter(code: str, limits: SandboxLimits) -> SandboxResult:
    """Run a program, as `run_in_sandbox` does, without input."""
    from pydantic_monty import CollectString

    started, printed = time.monotonic(), CollectString(max_bytes=limits.file_mib * _MIB)
    uses = _checked_uses(code)
    if isinstance(uses, str):
        return SandboxResult("failed", 1, "", uses, 0.0)
    with _session(limits) as session:
        result, _ = _run(session, uses.code, {}, limits, printed)
    seconds = time.monotonic() - started
    is_late = result.error.startswith("TimeoutError: feed time limit")
    outcome: Outcome = "timeout" if is_late else "failed" if result.error else "finished"
    exit_code = int(bool(result.error))
    return SandboxResult(outcome, exit_code, str(printed.output), result.error, seconds)


def _checked_uses(code: str) -> IteratorUses | str:
    """Return the code with lazy iterators, or the error of its syntax; refuse other uses."""
    try:
        uses = IteratorUses(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    if uses.refused:
        raise _refusal(uses.refused)
    return uses


@contextmanager
def _session(limits: SandboxLimits) -> Iterator[MontySession]:
    from pydantic_monty import Monty

    with (
        Monty(max_processes=1, request_timeout=limits.seconds + _SLACK_SECONDS) as pool,
        pool.checkout(
            limits={
                "max_feed_duration_secs": float(min(limits.cpu_seconds, limits.seconds)),
                "max_memory": limits.memory_mib * _MIB,
                "max_total_sleep_secs": limits.seconds,
            }
        ) as session,
    ):
        yield session


def _run(
    session: MontySession,
    code: str,
    inputs: dict[str, Any],
    limits: SandboxLimits,
    printed: CollectString | None = None,
) -> tuple[CallResult, bool]:
    """Return the results of the code, and whether the interpreter is no longer usable."""
    from pydantic_monty import CollectString, MontyCrashedError, MontyDisconnectError, MontyError

    try:
        collect = printed or CollectString(max_bytes=limits.file_mib * _MIB)
        value = session.feed_run(code, inputs=inputs, print_callback=collect)
        plain = json.loads(json.dumps(value)) if inputs else None
        return CallResult(plain), False
    except (MontyCrashedError, MontyDisconnectError) as error:
        return CallResult(error=f"ended before the call: {str(error)[:150]}"), True
    except MontyError as error:
        message = _message_of(error)
        if feature := missing_feature(message):
            raise _refusal(feature) from error
        is_over = message.startswith(("TimeoutError: feed time limit", "MemoryError: memory limit"))
        return CallResult(error=message[:200]), is_over
    except (TypeError, ValueError, RecursionError) as error:
        # The result cannot be written as JSON.
        return CallResult(error=f"{type(error).__name__}: {str(error)[:200]}"), False


def _refusal(feature: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        f"{PACKAGE} lacks {feature}, which the code needs. Install bubblewrap (Debian: apt install "
        "bubblewrap)."
    )


def _message_of(error: MontyError) -> str:
    """Return the error of the code, prefixed by its type."""
    from pydantic_monty import MontyRuntimeError, MontySyntaxError

    if isinstance(error, MontyRuntimeError | MontySyntaxError):
        return str(error.display(format="type-msg"))
    return f"{type(error).__name__}: {error}"


def missing_feature(error: str) -> str:
    """Return the Python feature that Monty lacks according to an error; empty for other errors."""
    kind, _, message = error.partition(": ")
    names = re.findall(r"'([^']*)'", message)
    if "not yet support" in message:
        return message.rpartition("not yet support ")[2]
    if kind in ("ModuleNotFoundError", "ImportError") and names:
        is_known = any(name.partition(".")[0] in sys.stdlib_module_names for name in names)
        return f"the module or name {names[0]!r}" if is_known else ""
    if kind == "NameError" and names and hasattr(builtins, names[0]):
        return f"the function {names[0]!r}"
    if kind == "AttributeError" and len(names) >= 2:
        owner, attribute = names[0], names[-1]
        of_python = getattr(builtins, owner, None)
        if message.startswith("module ") or hasattr(of_python, attribute):
            return f"{owner}.{attribute}"
    if kind == "TypeError" and message.startswith("cannot create "):
        return f"instances of {names[0] if names else 'a type'!r}"
    # Python's own parser has found nothing wrong with the code.
    return f"a form of syntax ({message})" if kind == "SyntaxError" else ""


Outcome: TypeAlias = Literal["finished", "failed", "timeout", "killed"]


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of code."""

    seconds: float = 10.0
    """Wall-clock seconds, including the start of Python."""
    cpu_seconds: int = 5
    """CPU seconds of each process."""
    memory_mib: int = 512
    """Address space of each process, MiB; if a control group is available, also the total memory of
    all processes, excluding the folder."""
    num_processes: int = 4
    """Maximum number of concurrent processes and threads."""
    file_mib: int = 1
    """Maximum size of each file, of stdout and of stderr, MiB."""
    folder_mib: int = 16
    """Size of the writable folder, MiB."""


@dataclass(frozen=True)
class SandboxResult:
    """The outcome of code in the sandbox."""

    outcome: Outcome
    """Exit code 0, another one, stopped at the wall-clock limit, or ended by a signal."""
    exit_code: int
    """Exit code; negative for a signal, as in `subprocess`."""
    stdout: str
    stderr: str
    """Output of the program, at most `file_mib` each; bytes that are no UTF-8 are replaced."""
    seconds: float
    """Wall-clock seconds."""


@dataclass(frozen=True)
class CallResult:
    """The result of one function call."""

    value: Any = None
    """JSON value returned; None on an error."""
    error: str = ""
    """Why there is no value; empty on success."""


_CLASSES = """
class _LazyGenerator:
    def __init__(self, items, values_of):
        self.items, self.values_of, self.values = iter(items), values_of, iter(())
    def __iter__(self):
        return self
    def __next__(self):
        while True:
            for value in self.values:
                return value
            self.values = iter(self.values_of(next(self.items)))
class _LazyEnumerate:
    def __init__(self, iterable, start=0):
        self.items, self.place = iter(iterable), start - 1
    def __iter__(self):
        return self
    def __next__(self):
        item = next(self.items)
        self.place += 1
        return (self.place, item)
class _LazyReversed:
    def __init__(self, items):
        if type(items) is not list:
            items = list(reversed(items))[::-1]
        self.items, self.place = items, len(items)
    def __iter__(self):
        return self
    def __next__(self):
        self.place -= 1
        if 0 <= self.place < len(self.items):
            return self.items[self.place]
        self.place = 0
        raise StopIteration
class _LazyZip:
    def __init__(self, *iterables, strict=False):
        self.iterators, self.strict = [iter(one) for one in iterables], strict
    def __iter__(self):
        return self
    def __next__(self):
        if not self.iterators:
            raise StopIteration
        row = []
        for iterator in self.iterators:
            try:
                row.append(next(iterator))
            except StopIteration:
                break
        if len(row) == len(self.iterators):
            return tuple(row)
        if self.strict and row:
            raise ValueError(f"zip() argument {len(row) + 1} is shorter than argument 1")
        if self.strict:
            for iterator in self.iterators[1:]:
                for _ in iterator:
                    raise ValueError("zip() argument 2 is longer than argument 1")
        raise StopIteration
class _LazyMap:
    def __init__(self, function, iterable, *iterables):
        self.function = function
        self.iterators = [iter(one) for one in (iterable, *iterables)]
    def __iter__(self):
        return self
    def __next__(self):
        function = self.function
        return function(*[next(iterator) for iterator in self.iterators])
class _LazyFilter:
    def __init__(self, function, iterable):
        self.function, self.items = function, iter(iterable)
    def __iter__(self):
        return self
    def __next__(self):
        function = self.function
        while True:
            item = next(self.items)
            if (item if function is None else function(item)):
                return item
def _lazy_extend(target, items):
    if type(target) is list:
        for item in items:
            target.append(item)
    else:
        target.extend(items)
def _lazy_update(target, items):
    if type(target) is set:
        for item in items:
            target.add(item)
    else:
        target.update(items)
def _lazy_set(items):
    # In the order of CPython's table; that of strings differs from process to process.
    if type(items) in (set, frozenset, dict):
        return set(items)
    items = list(items)
    if len(items) > 9999 or not all(type(one) is int and abs(one) < 2**60 for one in items):
        return set(items)
    table, used = [None] * 8, 0
    for number in items:
        if _lazy_place(table, number):
            used += 1
            if used * 5 >= (len(table) - 1) * 3:
                size = 8
                while size <= used * (2 if used > 50000 else 4):
                    size *= 2
                old, table = table, [None] * size
                for one in old:
                    if one is not None:
                        _lazy_place(table, one)
    return set([one for one in table if one is not None])
def _lazy_place(table, number):
    mask = len(table) - 1
    perturb = (-2 if number == -1 else number) % 2**64
    place = perturb & mask
    while True:
        for at in range(place, place + (10 if place + 9 <= mask else 1)):
            if table[at] is None:
                table[at] = number
                return True
            if table[at] == number:
                return False
        perturb >>= 5
        place = (place * 5 + 1 + perturb) & mask
"""

_MAKERS = {
    "enumerate": "_LazyEnumerate",
    "filter": "_LazyFilter",
    "map": "_LazyMap",
    "reversed": "_LazyReversed",
    "zip": "_LazyZip",
}
_MAKING_METHODS = {"elements", "finditer"}
"""Methods of `Counter` and `re` that return iterators; a list is equal if consumed at once."""
_TAKE_ALL = {
    *("list", "tuple", "set", "frozenset", "sorted", "sum", "dict"),
    *("Counter", "deque", "prod"),
}
"""Functions that consume their whole first argument before other code runs."""
_TAKE_SINGLY = {"any", "all", "min", "max"}
_OF_MODULES = {
    "Counter": "collections",
    "deque": "collections",
    "prod": "math",
    "reduce": "functools",
}
_TAKING_METHODS = {"extend": "_lazy_extend", "update": "_lazy_update"}

_IGNORED_METHODS = {
    *("__bool__", "__format__", "__ge__", "__getattr__", "__getitem__", "__gt__"),
    *("__iadd__", "__iand__", "__imul__", "__ior__", "__isub__", "__le__"),
    *("__len__", "__lt__", "__ne__", "__reversed__"),
}
"""Special methods that Python calls and Monty does not; `__getitem__` in iterations only."""

_Scope = (
    ast.Module
    | ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.Lambda
    | ast.ClassDef
    | ast.ListComp
    | ast.SetComp
    | ast.DictComp
    | ast.GeneratorExp
)


class IteratorUses:
    """The use of iterators in a program: its `code` for Monty, and whether that `is_rewritten`.

    `refused` is the first use that Monty may get wrong, with its line, or empty.
    """

    def __init__(self, code: str) -> None:
        self._tree = ast.parse(code)
        self._parents = {
            child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)
        }
        self._bound = self._names_by_scope()
        self._lazy = {node for node in ast.walk(self._tree) if self._makes_iterator(node)}
        self.refused = next(self._refusals(), "")
        self.is_rewritten, self.code = False, code
        changed = {node for node in self._lazy if self._is_late(node)}
        changed |= {node for node in ast.walk(self._tree) if self._makes_set(node)}
        if changed and not self.refused:
            tree = _MakeLazy(changed).visit(self._tree)
            self.is_rewritten = True
            self.code = f"{_CLASSES}\n{ast.unparse(ast.fix_missing_locations(tree))}\n"

    def _names_by_scope(self) -> dict[ast.AST, set[str]]:
        bound: dict[ast.AST, set[str]] = defaultdict(set)
        for node in ast.walk(self._tree):
            name = None
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.alias):
                name = (node.asname or node.name).partition(".")[0]
            elif isinstance(node, ast.Global):
                bound[self._tree].update(node.names)
            if name is not None:
                bound[self._scopes(node)[0]].add(name)
        return bound

    def _scopes(self, node: ast.AST) -> list[ast.AST]:
        """Return the enclosing scopes of a node, innermost first."""
        scopes: list[ast.AST] = []
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, _Scope):
                scopes.append(node)
        return scopes

    def _is_builtin(self, node: ast.AST, names: set[str]) -> bool:
        """Return whether a name is a Python builtin that the program does not rebind."""
        return (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and node.id in names
            and not any(
                node.id in self._bound[scope]
                for scope in self._scopes(node)
                if not isinstance(scope, ast.ClassDef)
            )
        )

    def _makes_iterator(self, node: ast.AST) -> bool:
        if isinstance(node, ast.GeneratorExp):
            return True
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in _MAKING_METHODS
        return self._is_builtin(node.func, set(_MAKERS)) or (
            isinstance(node.func, ast.Name) and node.func.id == "finditer"
        )

    def _refusals(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Yield | ast.YieldFrom):
                yield f"yield expressions (line {node.lineno})"
            elif isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name in _IGNORED_METHODS:
                        yield f"the method {part.name} of classes (line {part.lineno})"
            elif isinstance(node, ast.Attribute) and node.attr in ("__iter__", "__next__"):
                yield f"{node.attr} (line {node.lineno})"
            elif isinstance(node, ast.Name) and self._is_builtin(node, {"iter", "next"}):
                yield f"lazy iterators, for {node.id}() on line {node.lineno}"
            elif isinstance(node, ast.Name) and self._is_builtin(node, set(_MAKERS)):
                if getattr(self._parents[node], "func", None) is not node:
                    yield f"lazy iterators, for {node.id} as a value on line {node.lineno}"
            elif node in self._lazy and isinstance(node, ast.expr):
                is_bound = any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))
                if is_bound or not (self._is_taken_whole(node) or self._is_taken_singly(node)):
                    name = "a generator"
                    if isinstance(node, ast.Call):
                        name = f"{ast.unparse(node.func)}()"
                    yield f"lazy iterators, for {name} on line {node.lineno}, not consumed at once"

    def _is_late(self, node: ast.AST) -> bool:
        """Return whether a list would run code or read values too early."""
        is_of_list = isinstance(node, ast.Call) and not self._is_builtin(node.func, set(_MAKERS))
        arguments = node.args if isinstance(node, ast.Call) else []
        is_nested = any(_unstarred(argument) in self._lazy for argument in arguments)
        return not is_of_list and (is_nested or not self._is_taken_whole(node))

    def _makes_set(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            is_plain = len(node.args) == 1 and not node.keywords
            return is_plain and self._is_builtin(node.func, {"set"})
        is_compared = isinstance(self._parents.get(node), ast.Compare)
        return isinstance(node, ast.SetComp) or (isinstance(node, ast.Set) and not is_compared)

    def _is_taken_whole(self, node: ast.AST) -> bool:
        parent = self._parents[node]
        if isinstance(parent, ast.Starred):
            return isinstance(parent.ctx, ast.Load) and isinstance(
                self._parents[parent], ast.Call | ast.List | ast.Tuple | ast.Set
            )
        if isinstance(parent, ast.Assign):
            return len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Tuple | ast.List)
        if not isinstance(parent, ast.Call) or parent.args[:1] != [node]:
            return False
        if isinstance(parent.func, ast.Attribute) and parent.func.attr == "join":
            return True
        return self._calls(parent, _TAKE_ALL)

    def _is_taken_singly(self, node: ast.AST) -> bool:
        parent = self._parents[node]
        if isinstance(parent, ast.For | ast.comprehension):
            return parent.iter is node
        if isinstance(parent, ast.Compare):
            is_last = parent.comparators == [node]
            return is_last and isinstance(parent.ops[0], ast.In | ast.NotIn)
        if not isinstance(parent, ast.Call) or node not in parent.args:
            return False
        if parent in self._lazy:
            # The first argument of `map` and `filter` is a function.
            is_map = self._is_builtin(parent.func, {"map", "filter"})
            index = parent.args.index(node)  # type: ignore[arg-type]
            takes_many = self._is_builtin(parent.func, {"map", "zip"})
            return index >= int(is_map) if takes_many else index == int(is_map)
        if self._calls(parent, {"reduce"}):
            return parent.args[1:2] == [node]
        if parent.args != [node]:
            return False
        is_method = isinstance(parent.func, ast.Attribute) and parent.func.attr in _TAKING_METHODS
        return self._calls(parent, _TAKE_SINGLY) or (is_method and not parent.keywords)

    def _calls(self, call: ast.Call, names: set[str]) -> bool:
        """Return whether the call is of a Python builtin with one of these names."""
        function = call.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            return function.attr in names and _OF_MODULES.get(function.attr) == function.value.id
        if isinstance(function, ast.Name) and function.id in _OF_MODULES:
            return function.id in names and any(
                isinstance(node, ast.ImportFrom)
                and node.module == _OF_MODULES[function.id]
                and any((alias.asname or alias.name) == function.id for alias in node.names)
                for node in ast.walk(self._tree)
            )
        return self._is_builtin(function, names)


class _MakeLazy(ast.NodeTransformer):
    """Replaces iterators by lazy classes."""

    def __init__(self, changed: set[ast.AST]) -> None:
        self._changed = changed

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_changed = node in self._changed
        is_taker = len(node.args) == 1 and not node.keywords and node.args[0] in self._changed
        self.generic_visit(node)
        if is_changed and isinstance(node.func, ast.Name):
            node.func.id = _MAKERS.get(node.func.id, "_lazy_set")
        if not is_taker or not isinstance(node.func, ast.Attribute):
            return node
        if (taker := _TAKING_METHODS.get(node.func.attr)) is None:
            return node
        return ast.Call(ast.Name(taker, ast.Load()), [node.func.value, node.args[0]], [])

    def visit_Set(self, node: ast.Set) -> ast.AST:
        is_changed = node in self._changed
        self.generic_visit(node)
        return _ordered_set(ast.List(node.elts, ast.Load())) if is_changed else node

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return _ordered_set(ast.ListComp(node.elt, node.generators))

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        is_changed = node in self._changed
        self.generic_visit(node)
        return _lazy_generator(node.elt, node.generators) if is_changed else node


def _ordered_set(elements: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("_lazy_set", ast.Load()), [elements], [])


def _lazy_generator(element: ast.expr, clauses: list[ast.comprehension]) -> ast.expr:
    """Build a lazy generator: `[element for target in [item] if condition]` of each item."""
    first, *inner_clauses = clauses
    item = ast.Name("_lazy_item", ast.Load())
    item_clause = ast.comprehension(first.target, ast.List([item], ast.Load()), first.ifs, 0)
    values: ast.expr = ast.ListComp(element, [item_clause])
    if inner_clauses:
        inner = ast.ListComp(_lazy_generator(element, inner_clauses), [item_clause])
        nothing = ast.List([ast.List([], ast.Load())], ast.Load())
        either = ast.BoolOp(ast.Or(), [inner, nothing])
        values = ast.Subscript(either, ast.Constant(0), ast.Load())
    arguments = ast.arguments([], [ast.arg("_lazy_item")], None, [], [], None, [])
    maker = ast.Name("_LazyGenerator", ast.Load())
    return ast.Call(maker, [first.iter, ast.Lambda(arguments, values)], [])


def _unstarred(node: ast.AST) -> ast.AST:
    return node.value if isinstance(node, ast.Starred) else node

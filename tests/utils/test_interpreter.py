"""Functions written by a model are called without bubblewrap, or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from nip_astra.errors import SandboxUnavailableError
from nip_astra.utils.interpreter import (
    CallResult,
    SandboxLimits,
    call_in_interpreter,
    missing_feature,
)
from tests.utils.sandbox_attacks import FORGERIES

pytest.importorskip("pydantic_monty")
LIMITS = SandboxLimits(seconds=4, cpu_seconds=1, memory_mib=64)


def call(code: str, *calls: list[object]) -> list[CallResult]:
    return call_in_interpreter(code, "f", calls or [[1]], LIMITS)


def test_calls_give_values_or_errors_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    code = "def f(a, b):\n    print('noise')\n    return {'q': (a / b, None)}"
    result = call(code, [1, 2], [1, 0], [3, 2])
    assert [item.value for item in result] == [{"q": [0.5, None]}, None, {"q": [1.5, None]}]
    assert result[1].error == "ZeroDivisionError: division by zero"
    assert capfd.readouterr() == ("", "")


def test_calls_share_the_state_of_the_code() -> None:
    code = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    assert [item.value for item in call(code, [5], [6], [7])] == [1, 2, 3]


THREADS = """
import sysconfig, time
from concurrent.futures import ThreadPoolExecutor

work_out = sysconfig._init_posix
sysconfig._init_posix = lambda found: (time.sleep(0.3), work_out(found))
from nip_astra.utils.interpreter import call_in_interpreter
from nip_astra.utils.interpreter import SandboxLimits

ask = lambda x: call_in_interpreter("def f(x): return x", "f", [[x]], SandboxLimits(seconds=9))
with ThreadPoolExecutor(2) as pool:
    print([one.value for (one,) in pool.map(ask, range(2))])
"""


def test_the_first_calls_may_come_from_several_threads() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.stdout == "[0, 1]\n", done.stderr


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def f(x): return {x}", "TypeError: Object of type set"),
        ("class A:\n    pass\ndef f(x): return A()", "TypeError: Object of type"),
        ("def f(x", "SyntaxError"),
        ("g = 1", "NameError: name 'f'"),
        ("def f(x):\n    while True: pass", "TimeoutError"),
        ("while True: pass", "TimeoutError"),
        ("def f(x): return [0] * 10**9", "MemoryError"),
        ("def f(x): return f(x)", "RecursionError"),
        ("def f(x): raise NotImplementedError('later')", "NotImplementedError: later"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("def f(x): return [].no_such_thing", "AttributeError"),
    ],
)
def test_what_calls_cannot_give_is_an_error(code: str, why: str) -> None:
    result = call(code, [1], [2])
    assert [item.value for item in result] == [None, None]
    assert all(why in item.error for item in result), result


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        ("def f(x):\n    yield x", "yield expressions"),
        ("import heapq\ndef f(x): return x", "module or name 'heapq'"),
        ("def f(x): return object()", "instances of 'object'"),
        ("def f(x): return globals()", "function 'globals'"),
        ("import os\ndef f(x): os._exit(0)", r"os\._exit"),
    ],
)
def test_unsupported_features_are_no_fault_of_the_code(code: str, lacks: str) -> None:
    with pytest.raises(SandboxUnavailableError, match=f"lacks .*{lacks}.*Install bubblewrap"):
        call(code)


def test_only_features_of_python_are_reported_as_missing() -> None:
    assert missing_feature("AttributeError: 'str' object has no attribute 'casefold'")
    assert not missing_feature("AttributeError: 'str' object has no attribute 'shout'")
    assert not missing_feature("NameError: name 'total' is not defined")
    assert not missing_feature("KeyError: 'yield'")


NOTE = "log = []\ndef note(x):\n    log.append(x)\n    return x\n"


@pytest.mark.parametrize(
    "body",
    [
        # Refused: the rest of the iterator may matter.
        "return next(x for x in [1])",
        "return list(iter([1]))",
        "g = (x for x in [1, 2])\nreturn [list(g), list(g)]",
        "g = zip([1], [2])\nreturn len(list(g)) + len(list(g))",
        "a = b, c = map(note, [1, 2])\nreturn list(a)",
        "return map(note, [1])",
        "return len(map(note, [1]))",
        "return enumerate([1])[0]",
        "return bool(filter(None, []))",
        "return zip([1], [2]) == [(1, 2)]",
        "return [reversed([1, 2])] and 1",
        "return list(reversed(list) for list in [[1]]) and 1",
        "f = map\nreturn list(f(note, [1]))",
        "return note(x for x in [1]) and 1",
        "return list(map(zip, [[1]])) and 1",
        "return any((seen := x) for x in [1])",
        "import re\ng = re.finditer('a', 'aa')\nreturn len(list(g)) + len(list(g))",
        "from collections import Counter\ne = Counter('aab').elements()\nreturn list(e) + list(e)",
        "def g():\n    yield 1\nreturn [y for y in g()]",
        "class A:\n    def __next__(self): return 3\nreturn next(A())",
        "class A:\n    def __len__(self): return 3\nreturn len(A())",
        "def g(n): return n and any(g(n - 1) for _ in [1])\nreturn g(400)",
    ],
)
def test_dependence_on_the_rest_of_an_iterator_is_refused(body: str) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"lacks .*Install bubblewrap"):
        call(f"{NOTE}def f(x):\n{indent(body, '    ')}")


@pytest.mark.parametrize(
    "body",
    [
        # A list in place of an iterator would run too much of these, too early, or too late.
        "return [any(10 % n == 0 for n in [1, 0]), all(10 % n for n in [5, 0])]",
        "return [3 in (note(n) for n in [1, 3, 4]), log]",
        "for n in map(note, [1, 2, 3]):\n    if n == 2: break\nreturn log",
        "return [any(map(note, [0, 1, 2])), all(filter(note, [1, 2])), log]",
        "xs = [1, 2]\nfor i, n in enumerate(xs):\n    if i < 3: xs.append(n)\nreturn xs",
        "xs, out = [1, 2], []\nfor n in reversed(xs):\n    out += [n]\n    xs[0] = 9\nreturn out",
        "xs = [1, 2]\nfor a, b in zip(xs, [1, 2, 3, 4]): xs.append(a + b)\nreturn xs",
        "n = 1\nfor y in (n * k for k in [1, 2, 3]): n += y\nreturn n",
        "xs = [1]\nxs.extend(k for k in xs if len(xs) < 5)\nreturn xs",
        "s = set()\ntry: s.update(1 // n for n in [1, 0])\nexcept Exception: return list(s)",
        "return [list(zip(map(note, [1, 2]), map(note, [3, 4]))), log]",
        "return [list(zip(map(note, [1]), map(note, []))), list(zip([], map(note, [5]))), log]",
        "try: return list(zip([1, 2], map(note, [1]), strict=True))\nexcept ValueError: return log",
        "return [[a + b for a, b in ((a, note(b)) for a in [1, 2] if note(a) for b in [a])], log]",
        "return [max((note(n) for n in [3, 1]), key=lambda n: note(-n)), log]",
        "from functools import reduce\nreturn [reduce(lambda a, b: note(a), map(note, 'ab')), log]",
        # Consumed at once, in every way that the program's text shows.
        "return [sum(n for n in [1]), ','.join(str(n) for n in [1, 2]), sorted(map(abs, [-2, 1]))]",
        "a, *b = map(int, '1 2 3'.split())\nreturn [a, b, [*zip('ab', b)], max(*map(abs, b))]",
        "return [dict(zip('ab', [1, 2])), list(enumerate('ab', 1)), tuple(filter(None, [0, 1]))]",
        "return {k: v for k, v in zip('ab', reversed([1, 2]))}",
        "from collections import Counter\nreturn dict(Counter(c for c in 'aab'))",
        "import re\nreturn [m.group() for m in re.finditer('a.', 'abac')]",
        "return [n for n in sorted({*filter(None, [3, 0, 1])})]",
        "import math\nreturn math.prod(n for n in [2, 3])",
        "s, xs = {1}, []\ns.update({5})\nxs.extend({3})\nreturn [sorted(s), xs]",
        # The program's own names.
        "next = [1]\nzip = lambda *items: len(items)\nreturn [zip(next, next), next]",
        "class Node:\n    def next(self, m): return m + 1\nreturn Node().next(4)",
        # The order of sets of integers.
        "return [list(set([9, 3, 5])), [n for n in {8, -1, 16}], max({9, 3, 5}, key=lambda n: 1)]",
        "s = {n * 7 for n in range(12)}\nreturn [n for n in s]",
    ],
)
def test_an_iterator_that_is_consumed_at_once_is_allowed(body: str) -> None:
    code = f"{NOTE}def f(x):\n{indent(body, '    ')}"
    names: dict[str, Any] = {}
    exec(code, names)
    (result,) = call(code)
    assert result == CallResult(json.loads(json.dumps(names["f"](1))))


@pytest.mark.parametrize(
    "attack",
    [
        "open('{path}', 'w').write('x')",
        "open('/etc/passwd').read()",
        "import os; os.listdir('/')",
        "import os; os.environ['HOME']",
        "import os; os.system('touch {path}')",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import ctypes; ctypes.CDLL(None)",
        "import subprocess; subprocess.run(['touch', '{path}'])",
        "().__class__.__bases__[0].__subclasses__()",
        "import pathlib; pathlib.Path('{path}').write_text('x')",
    ],
)
def test_code_reaches_nothing(attack: str, tmp_path: Path) -> None:
    code = f"def f():\n    {attack.format(path=tmp_path / 'x')}\n    return 'BREACH'"
    result = [CallResult(error="refused")]
    with suppress(SandboxUnavailableError):
        result = call_in_interpreter(code, "f", [[]], LIMITS)
    assert result[0].error
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_fakes_the_check_does_not_know_what_is_expected(forgery: str) -> None:
    result: list[CallResult] = []
    with suppress(SandboxUnavailableError):
        result = call_in_interpreter(FORGERIES[forgery], "f", [[2], [3]], LIMITS)
    assert [item.value for item in result] != [4, 9]

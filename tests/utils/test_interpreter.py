"""Functions that a model wrote are called where there is no bubblewrap, or are refused."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from nip_astra.errors import SandboxUnavailableError
from nip_astra.utils.interpreter import call_in_interpreter, what_is_lacking
from nip_astra.utils.sandbox_values import CallResult, SandboxLimits
from tests.utils.sandbox_attacks import FORGERIES

pytest.importorskip("pydantic_monty")
LIMITS = SandboxLimits(seconds=4, cpu_seconds=1, memory_mib=64)


def call(code: str, *calls: list[object]) -> list[CallResult]:
    return call_in_interpreter(code, "f", calls or [[1]], LIMITS)


def test_calls_give_values_or_errors_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    code = "def f(a, b):\n    print('noise')\n    return {'q': (a / b, None)}"
    found = call(code, [1, 2], [1, 0], [3, 2])
    assert [one.value for one in found] == [{"q": [0.5, None]}, None, {"q": [1.5, None]}]
    assert found[1].error == "ZeroDivisionError: division by zero"
    assert capfd.readouterr() == ("", "")


def test_calls_share_what_code_keeps() -> None:
    code = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    assert [one.value for one in call(code, [5], [6], [7])] == [1, 2, 3]


THREADS = """
import sysconfig, time
from concurrent.futures import ThreadPoolExecutor

work_out = sysconfig._init_posix
sysconfig._init_posix = lambda found: (time.sleep(0.3), work_out(found))
from nip_astra.utils.interpreter import call_in_interpreter
from nip_astra.utils.sandbox_values import SandboxLimits

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
    found = call(code, [1], [2])
    assert [one.value for one in found] == [None, None]
    assert all(why in one.error for one in found), found


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
def test_what_the_interpreter_lacks_is_no_fault_of_the_code(code: str, lacks: str) -> None:
    with pytest.raises(SandboxUnavailableError, match=f"lacks .*{lacks}.*Install bubblewrap"):
        call(code)


def test_only_what_python_has_is_said_to_be_lacking() -> None:
    assert what_is_lacking("AttributeError: 'str' object has no attribute 'casefold'")
    assert not what_is_lacking("AttributeError: 'str' object has no attribute 'shout'")
    assert not what_is_lacking("NameError: name 'total' is not defined")
    assert not what_is_lacking("KeyError: 'yield'")


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
    found = [CallResult(error="refused")]
    with suppress(SandboxUnavailableError):
        found = call_in_interpreter(code, "f", [[]], LIMITS)
    assert found[0].error
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_fakes_the_check_does_not_know_what_is_expected(forgery: str) -> None:
    found: list[CallResult] = []
    with suppress(SandboxUnavailableError):
        found = call_in_interpreter(FORGERIES[forgery], "f", [[2], [3]], LIMITS)
    assert [one.value for one in found] != [4, 9]

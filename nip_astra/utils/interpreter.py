"""Call functions that a model wrote in Monty, an interpreter that has no access to the machine.

Monty knows a part of Python. What it lacks is not taken for a fault of the code: the code is
refused then. https://github.com/pydantic/monty
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import re
import sys
import sysconfig
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nip_astra.errors import SandboxUnavailableError
from nip_astra.utils.laziness import IteratorUses
from nip_astra.utils.sandbox_values import CallResult, SandboxLimits

if TYPE_CHECKING:
    from pydantic_monty import MontyError, MontySession

PACKAGE = "pydantic-monty"
_MIB = 2**20
_SLACK_SECONDS = 1.0
"""After its limit of time, an interpreter that has not ended by itself is killed."""
_ARGUMENTS = "_arguments_of_this_call"

# Monty is found by Python's paths. They are worked out when they are first asked for, and whoever
# asks in another thread meanwhile gets a KeyError or AttributeError; so they are asked for here.
sysconfig.get_config_vars()


def why_no_interpreter() -> str:
    """Why there is no such interpreter on this machine; empty where there is one."""
    if importlib.util.find_spec("pydantic_monty") is None:
        return f"the package {PACKAGE} is not installed"
    return ""


def call_in_interpreter(
    code: str, function: str, calls: Sequence[Sequence[Any]], limits: SandboxLimits
) -> list[CallResult]:
    """Call a function that untrusted code defines, as `call_in_sandbox` does.

    All calls share the state of one interpreter, a process of its own. `cpu_seconds` bounds each
    call, `seconds` all of them, and `memory_mib` the values that it holds.
    """
    from pydantic_monty import Monty

    try:
        uses = IteratorUses(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [CallResult(error=f"{type(error).__name__}: {error}")] * len(calls)
    if uses.refused:
        raise _refusal(uses.refused)
    deadline = time.monotonic() + limits.seconds
    found: list[CallResult] = []
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
        defined, is_over = _run(session, uses.code, {}, limits)
        if defined.error:
            return [defined] * len(calls)
        for arguments in calls:
            if is_over or time.monotonic() > deadline:
                break
            given = {_ARGUMENTS: list(arguments)}
            one, is_over = _run(session, f"{function}(*{_ARGUMENTS})", given, limits)
            if uses.is_rewritten and one.error.startswith("RecursionError"):
                # Lazy iterators take more frames than Python's own.
                raise _refusal("the depth of recursion that lazy iterators need")
            found.append(one)
    last = found[-1].error if is_over else f"stopped after {limits.seconds:.1f} s"
    return [*found, *[CallResult(error=last)] * (len(calls) - len(found))]


def _run(
    session: MontySession, code: str, inputs: dict[str, Any], limits: SandboxLimits
) -> tuple[CallResult, bool]:
    """What code gives, and whether the interpreter can be used no more."""
    from pydantic_monty import CollectString, MontyCrashedError, MontyDisconnectError, MontyError

    try:
        value = session.feed_run(
            code, inputs=inputs, print_callback=CollectString(max_bytes=limits.file_mib * _MIB)
        )
        plain = json.loads(json.dumps(value)) if inputs else None
        return CallResult(plain), False
    except (MontyCrashedError, MontyDisconnectError) as error:
        return CallResult(error=f"ended before the call: {str(error)[:150]}"), True
    except MontyError as error:
        told = _told(error)
        if lacks := what_is_lacking(told):
            raise _refusal(lacks) from error
        is_over = told.startswith(("TimeoutError: feed time limit", "MemoryError: memory limit"))
        return CallResult(error=told[:200]), is_over
    except (TypeError, ValueError, RecursionError) as error:
        # What it gave is nothing that JSON can hold.
        return CallResult(error=f"{type(error).__name__}: {str(error)[:200]}"), False


def _refusal(lacks: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        f"code of a model cannot be run by {PACKAGE}, which lacks {lacks}. Install bubblewrap "
        "(Debian: apt install bubblewrap), or leave this program out."
    )


def _told(error: MontyError) -> str:
    """The error of the code, with its type before it."""
    from pydantic_monty import MontyRuntimeError, MontySyntaxError

    if isinstance(error, MontyRuntimeError | MontySyntaxError):
        return str(error.display(format="type-msg"))
    return f"{type(error).__name__}: {error}"


def what_is_lacking(told: str) -> str:
    """The part of Python that an error complains of, where Python itself has it; else empty."""
    kind, _, message = told.partition(": ")
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

"""Tools that a policy may call during an episode.

A policy whose chat template has tools reads their JSON schemas there, and calls them in the form
that its template teaches (`nip_astra.language_models.message_format`). Any other policy may read a
description in its first message, and calls a tool with a message that is only
`name(argument)`, or `name({"a": 1, "b": 2})` for a tool with several arguments.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, get_type_hints

from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from pydantic import ConfigDict, Field, JsonValue, ValidationError, create_model
from pydantic.errors import PydanticUserError

from nip_astra.call_outcomes import kept_outcome
from nip_astra.deadlines import within_deadline
from nip_astra.errors import CallDeadlineError, ConfigurationError, TaskError, describe_error
from nip_astra.language_models.message_format import MessageFormat
from nip_astra.parameters.parameters_base import CheckedName, PlainText, SubParameters
from nip_astra.registry import Registry
from nip_astra.rollouts.messages import ToolCall, Turn
from nip_astra.safe_text import valid_text
from nip_astra.scorers.python import find_function
from nip_astra.utils.sandbox import SandboxLimits, check_any_sandbox, run_program

MAX_ERROR_LENGTH = 300
"""Maximum length of an error shown to the policy, in characters."""
ERRORS = ("malformed", "unknown", "arguments", "failed", "long", "many")
"""Kinds of wrong calls: no call in JSON, an unknown tool, arguments that do not fit the schema, a
tool that raises, a result that is too long, and more calls in a turn than allowed."""
_TEXT_CALL = re.compile(r"\s*([A-Za-z_]\w*)\((.*)\)\s*", re.DOTALL)


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    name: str
    """Name used by the policy."""
    description: str
    """Description read by the policy."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    function: Callable[..., Any]
    """Called with the arguments by name; gives a text, a JSON value, or, as a method of an
    environment, a `Reaction`."""
    concurrency: int = 1
    """Calls that may run at once, each in a thread."""
    keeps_outcomes: bool = False
    """Whether a resumed run gets the outcomes of earlier calls and does not call again, as it must
    where a result depends on time. Not for a tool that changes the environment."""

    @cached_property
    def described(self) -> str:
        """Return the tool in OpenAI's form, as JSON."""
        function = {name: getattr(self, name) for name in ("name", "description", "parameters")}
        return json.dumps({"type": "function", "function": function}, sort_keys=True)

    def fault_of(self, arguments: Mapping[str, Any]) -> str | None:
        """Return why arguments do not match the schema; None if they do."""
        with within_deadline(f"the check of arguments of the tool {self.name!r} by its schema"):
            fault = best_match(_validator(self.described).iter_errors(dict(arguments)))
        return None if fault is None else fault.message

    def single_argument(self) -> str | None:
        """Return the name of the only argument, if there is one."""
        names = list(self.parameters.get("properties", {}))
        return names[0] if len(names) == 1 else None


@lru_cache(maxsize=1024)
def _validator(described: str) -> Any:
    tool = json.loads(described)["function"]
    kind = validator_for(tool["parameters"])
    try:
        kind.check_schema(tool["parameters"])
    except SchemaError as error:
        raise TaskError(
            f"the schema of the tool {tool['name']!r} is invalid: {error.message}. Give a JSON "
            "schema of an object."
        ) from error
    return kind(tool["parameters"])


def tool_of(
    function: Callable[..., Any], name: str = "", options: Mapping[str, Any] | None = None
) -> Tool:
    """Create a tool from a function, described by its docstring and type hints.

    Keyword-only arguments are options: they are set here, and the policy neither sees nor sets
    them.

    Raises
    ------
    ConfigurationError
        If arguments cannot be described by a JSON schema, or an option is unknown or invalid.
    """
    own = getattr(function, "__func__", function)
    description, parameters, kind = _described(own, own is not function)
    try:
        given = kind.model_validate(dict(options or {}))
    except ValidationError as error:
        fault = error.errors()[0]
        raise ConfigurationError(
            f"the tool {name or own.__name__!r} has no valid option {fault['loc'][0]!r}: "
            f"{fault['msg']}. Options: {', '.join(kind.model_fields) or 'none'}."
        ) from error
    bound = {key: getattr(given, key) for key in given.model_fields_set}
    return Tool(
        name or own.__name__,
        description,
        parameters,
        partial(function, **bound),
        concurrency=int(getattr(own, "concurrency", 1)),
        keeps_outcomes=bool(getattr(own, "keeps_outcomes", False)),
    )


@lru_cache(maxsize=1024)
def _described(function: Callable[..., Any], is_method: bool) -> tuple[str, dict[str, Any], Any]:
    """Return description and schema of a function's arguments, and a model of its options."""
    name = getattr(function, "__name__", repr(function))
    try:
        arguments = list(inspect.signature(function).parameters.values())[is_method:]
        hints = get_type_hints(function, include_extras=True)
        kinds = {one.kind for one in arguments}
        if inspect.iscoroutinefunction(function) or kinds & {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.POSITIONAL_ONLY,
        }:
            raise TypeError("a tool is a plain function with named arguments")

        def model(*, are_options: bool) -> Any:
            fields: dict[str, Any] = {
                one.name: (
                    hints.get(one.name, Any),
                    ... if one.default is one.empty else one.default,
                )
                for one in arguments
                if (one.kind is one.KEYWORD_ONLY) is are_options
            }
            return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)

        schema = model(are_options=False).model_json_schema()
        options = model(are_options=True)
    except (TypeError, ValueError, NameError, PydanticUserError) as error:
        raise ConfigurationError(
            f"the arguments of the tool {name!r} have no JSON schema: {error}. Annotate them with "
            "types such as int, str or list[str]."
        ) from error
    for one in (schema, *schema.get("properties", {}).values()):
        one.pop("title", None)
    text = inspect.getdoc(function) or ""
    return " ".join(text.split("\n\n", 1)[0].split()), schema, options


# ---- parameters and shipped tools

TOOLS: Registry[Callable[..., Any]] = Registry(
    "tool",
    package="nip_astra.scenario_base.tasks",
    members=("calculator", "python"),
    modules={"calculator": "library", "python": "tools"},
)


def register_tool(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a tool under the name that parameter files use; a decorator."""
    return TOOLS.register(name)


class ToolParameters(SubParameters):
    """A function as a tool."""

    function: CheckedName
    """`path/to/file.py:function`, `package.module:function`, or a registered name: calculator,
    python. The module is imported, which executes it."""
    options: dict[str, JsonValue] = {}
    """Keyword-only arguments of the function, which the policy does not see."""


class ToolUseParameters(SubParameters):
    """Tools of every episode, and limits of their use."""

    offered: dict[PlainText, ToolParameters] = {}
    """Tools by the names that the policy reads, in addition to those of the environment."""
    max_calls: int = Field(default=4, ge=1)
    """Calls per turn; further ones are not executed. Calls take turns of `max_turns`."""
    max_result_tokens: int = Field(default=512, ge=1)
    """Maximum length of the results of a turn together, at most half of the context window. A
    longer result is replaced by an error."""
    describe: bool = True
    """Whether a policy whose chat template has no tools reads a description of them in its first
    message."""


def build_tools(parameters: ToolUseParameters, scenario_dir: Path | None) -> list[Tool]:
    """Build the offered tools."""
    found = []
    for name, one in parameters.offered.items():
        is_reference = ":" in one.function
        function = (
            find_function(one.function, scenario_dir)[1]
            if is_reference
            else TOOLS.get(one.function)
        )
        if function is python:
            check_any_sandbox()
        found.append(tool_of(function, name, one.options))
    return found


@register_tool("python")
def python(
    code: str,
    *,
    seconds: float = SandboxLimits.seconds,
    cpu_seconds: int = SandboxLimits.cpu_seconds,
    memory_mib: int = SandboxLimits.memory_mib,
    num_processes: int = SandboxLimits.num_processes,
    file_mib: int = SandboxLimits.file_mib,
    folder_mib: int = SandboxLimits.folder_mib,
) -> str:
    """Run a Python program in a sandbox and return what it prints."""
    limits = SandboxLimits(seconds, cpu_seconds, memory_mib, num_processes, file_mib, folder_mib)
    result = run_program(code, limits)
    if result.outcome == "timeout":
        raise TimeoutError(f"the program was stopped after {result.seconds:.0f} s")
    if result.outcome != "finished":
        last = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.exit_code}"]
        raise RuntimeError(f"{result.stdout}{last[0]}"[-MAX_ERROR_LENGTH:])
    return result.stdout


# Both are read by tool_of. Whether a program ends within `seconds` depends on the machine's load.
python.concurrency = 8  # type: ignore[attr-defined]
python.keeps_outcomes = True  # type: ignore[attr-defined]


# ---- calls in an episode


class WrongCall(NamedTuple):
    """An invalid call."""

    error: str
    """One of `ERRORS`."""
    message: str


class Outcome(NamedTuple):
    """Outcome of a call."""

    value: Any
    """The result; the message of an error."""
    error: str = ""
    """One of `ERRORS`; empty for a result."""


@dataclass(frozen=True)
class Toolbox:
    """Tools of one episode."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    parameters: ToolUseParameters = field(default_factory=ToolUseParameters)

    @classmethod
    def of(
        cls,
        tools: Iterable[Tool | Callable[..., Any]],
        parameters: ToolUseParameters | None = None,
    ) -> Toolbox:
        """Create a toolbox of tools and functions, which must have different names."""
        found: dict[str, Tool] = {}
        for one in tools:
            tool = one if isinstance(one, Tool) else tool_of(one)
            if tool.name in found:
                raise TaskError(f"there are two tools with the name {tool.name!r}. Rename one.")
            found[tool.name] = tool
        return cls(found, parameters or ToolUseParameters())

    @property
    def described(self) -> tuple[str, ...]:
        """Return the tools in OpenAI's form, each as JSON."""
        return tuple(tool.described for tool in self.tools.values())

    def introduction(self) -> str:
        """Return the description for a policy whose chat template has no tools, if any."""
        if not self.tools or not self.parameters.describe:
            return ""
        lines = ["You can use tools. To call one, write only its name and arguments, as here:"]
        for tool in self.tools.values():
            properties = json.dumps(tool.parameters.get("properties", {}))
            arguments = tool.single_argument() or properties
            lines.append(f"{tool.name}({arguments}): {tool.description}")
        return "\n".join(lines) + "\n\n"

    @cached_property
    def argument_schemas(self) -> dict[str, Mapping[str, Any]] | None:
        """Return the schema of each tool's arguments; None without tools."""
        schemas = {name: tool.parameters for name, tool in self.tools.items()}
        return schemas or None

    def calls_in(self, turn: Turn, message_format: MessageFormat) -> list[ToolCall | WrongCall]:
        """Return the calls in a turn of the policy, in order, up to the maximum."""
        if not self.tools:
            return []
        calls: list[ToolCall | WrongCall] = [*turn.calls]
        if message_format.has_call_mark(turn.text):
            example = message_format.example
            calls.append(WrongCall("malformed", f"the call is not written as {example}"))
        elif not calls and not message_format.supports_tools:
            match = _TEXT_CALL.fullmatch(turn.text)
            calls += [] if match is None else self._text_call(*match.groups())
        max_calls = self.parameters.max_calls
        if len(calls) > max_calls:
            message = f"only the first {max_calls} of {len(calls)} calls were executed"
            calls = [*calls[:max_calls], WrongCall("many", message)]
        return calls

    def _text_call(self, name: str, arguments: str) -> list[ToolCall | WrongCall]:
        if name not in self.tools:
            # An answer may look like a call.
            return []
        argument = self.tools[name].single_argument()
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            given = None
        if isinstance(given, dict) and (argument is None or argument in given):
            return [ToolCall(name, given)]
        if argument is None:
            return [WrongCall("malformed", f"the arguments of {name} are no JSON object")]
        kind = self.tools[name].parameters["properties"][argument].get("type")
        is_text = kind == "string" or given is None
        return [ToolCall(name, {argument: arguments if is_text else given})]

    def concurrency(self, calls: Sequence[ToolCall | WrongCall]) -> int:
        """Return the number of threads that may execute these calls."""
        named = [self.tools.get(one.name) for one in calls if isinstance(one, ToolCall)]
        return min((tool.concurrency for tool in named if tool is not None), default=1)

    def execute(self, call: ToolCall | WrongCall) -> Outcome:
        """Check and execute a call."""
        if isinstance(call, WrongCall):
            return Outcome(call.message, call.error)
        tool = self.tools.get(call.name)
        if tool is None:
            return Outcome(f"unknown tool {call.name!r}; known: {', '.join(self.tools)}", "unknown")
        if fault := tool.fault_of(call.arguments):
            return Outcome(f"wrong arguments of {tool.name}: {fault}", "arguments")
        if not tool.keeps_outcomes:
            return self._call(tool, call)
        arguments = [tool.name, dict(call.arguments)]
        return Outcome(*kept_outcome("tool", arguments, lambda: list(self._call(tool, call))))

    @staticmethod
    def _call(tool: Tool, call: ToolCall) -> Outcome:
        """Call a tool whose arguments are valid."""
        try:
            with within_deadline(f"the tool {tool.name!r}"):
                value = tool.function(**call.arguments)
            if not isinstance(value, str) and not hasattr(value, "is_over"):
                value = json.dumps(value, ensure_ascii=False)
            return Outcome(value)
        except CallDeadlineError:
            # It ends the run: the policy's reward must not depend on the load of a machine.
            raise
        except Exception as error:  # of the tool's own code; the policy reads it
            return Outcome(f"{describe_error(error)}", "failed")

    def texts(
        self, outcomes: Sequence[Outcome], num_tokens: Callable[[str], int], room: int
    ) -> tuple[list[str], Counter[str]]:
        """Return the texts of outcomes for the policy, and counts of calls and errors."""
        left = min(self.parameters.max_result_tokens, room // 2)
        texts, counts = [], Counter(calls=len(outcomes))
        for given, error in outcomes:
            value = valid_text(given)
            length = 0 if error else num_tokens(value)
            if length > left:
                value, error = f"the result has {length} tokens, more than {left}", "long"
            if error:
                counts[error] += 1
                value = f"Error: {value}"[:MAX_ERROR_LENGTH]
            else:
                left -= length
            texts.append(value)
        return texts, counts


NO_TOOLS = Toolbox()


def tool_figures(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Return figures of tool use from counts of episodes; none if no tool was called.

    `tools/calls_mean` is per episode, `tools/error_share` and the share of each kind of error, by
    the names in `ERRORS`, are of calls.
    """
    calls = sum(one.get("calls", 0) for one in counts)
    if not calls:
        return {}
    shares = {kind: sum(one.get(kind, 0) for one in counts) / calls for kind in ERRORS}
    return {
        "tools/calls_mean": fmean(one.get("calls", 0) for one in counts),
        "tools/error_share": sum(shares.values()),
        **{f"tools/{kind}_share": share for kind, share in shares.items()},
    }

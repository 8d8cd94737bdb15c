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
            errors = _build_validator(self.described).iter_errors(dict(arguments))
            fault = best_match(errors)
        return None if fault is None else fault.message

    def single_argument(self) -> str | None:
        """Return the name of the only argument, if there is one."""
        names = list(self.parameters.get("properties", {}))
        return names[0] if len(names) == 1 else None


@lru_cache(maxsize=1024)
def _build_validator(description: str) -> Any:
    """Return the validator of a tool's arguments, from the tool in OpenAI's form."""
    tool = json.loads(description)["function"]
    validator_class = validator_for(tool["parameters"])
    try:
        validator_class.check_schema(tool["parameters"])
    except SchemaError as error:
        raise TaskError(
            f"the schema of the tool {tool['name']!r} is invalid: {error.message}. Give a JSON "
            "schema of an object."
        ) from error
    return validator_class(tool["parameters"])


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
    # Of a method, whose first argument is bound already.
    plain_function = getattr(function, "__func__", function)
    is_method = plain_function is not function
    name = name or plain_function.__name__
    signature = _describe_function(plain_function, is_method)
    option_model = signature.option_model
    try:
        checked_options = option_model.model_validate(dict(options or {}))
    except ValidationError as error:
        fault = error.errors()[0]
        raise ConfigurationError(
            f"the tool {name!r} has no valid option {fault['loc'][0]!r}: "
            f"{fault['msg']}. Options: {', '.join(option_model.model_fields) or 'none'}."
        ) from error
    bound_options = {
        option: getattr(checked_options, option) for option in checked_options.model_fields_set
    }
    return Tool(
        name,
        signature.description,
        signature.parameters,
        partial(function, **bound_options),
        concurrency=int(getattr(plain_function, "concurrency", 1)),
        keeps_outcomes=bool(getattr(plain_function, "keeps_outcomes", False)),
    )


class _ToolSignature(NamedTuple):
    """What a tool's function says about itself."""

    description: str
    """The first paragraph of its docstring."""
    parameters: dict[str, Any]
    """JSON schema of the arguments that the policy sets."""
    option_model: Any
    """Pydantic model of its keyword-only arguments."""


@lru_cache(maxsize=1024)
def _describe_function(function: Callable[..., Any], is_method: bool) -> _ToolSignature:
    """Return description and schema of a function's arguments, and a model of its options."""
    name = getattr(function, "__name__", repr(function))
    try:
        arguments = list(inspect.signature(function).parameters.values())
        if is_method:
            arguments = arguments[1:]
        hints = get_type_hints(function, include_extras=True)
        unsupported = {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.POSITIONAL_ONLY,
        }
        is_plain = all(argument.kind not in unsupported for argument in arguments)
        if inspect.iscoroutinefunction(function) or not is_plain:
            raise TypeError("a tool is a plain function with named arguments")
        fields: dict[str, Any] = {}
        option_fields: dict[str, Any] = {}
        for argument in arguments:
            # Pydantic's mark of a required field.
            default = ... if argument.default is argument.empty else argument.default
            is_option = argument.kind is argument.KEYWORD_ONLY
            fields_of_kind = option_fields if is_option else fields
            fields_of_kind[argument.name] = (hints.get(argument.name, Any), default)
        config = ConfigDict(extra="forbid")
        argument_model: Any = create_model(name, __config__=config, **fields)
        schema: dict[str, Any] = argument_model.model_json_schema()
        option_model: Any = create_model(name, __config__=config, **option_fields)
    except (TypeError, ValueError, NameError, PydanticUserError) as error:
        raise ConfigurationError(
            f"the arguments of the tool {name!r} have no JSON schema: {error}. Annotate them with "
            "types such as int, str or list[str]."
        ) from error
    # Titles repeat the names, and cost tokens of the policy.
    for part in (schema, *schema.get("properties", {}).values()):
        part.pop("title", None)
    docstring = inspect.getdoc(function) or ""
    first_paragraph = docstring.split("\n\n", 1)[0]
    return _ToolSignature(" ".join(first_paragraph.split()), schema, option_model)


# ---- parameters and shipped tools

TOOLS: Registry[Callable[..., Any]] = Registry("tool")


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
    tools = []
    for name, tool in parameters.offered.items():
        if ":" in tool.function:
            _, function = find_function(tool.function, scenario_dir)
        else:
            function = TOOLS.get(tool.function)
        if function is python:
            check_any_sandbox()
        tools.append(tool_of(function, name, tool.options))
    return tools


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
        tools_by_name: dict[str, Tool] = {}
        for tool in tools:
            if not isinstance(tool, Tool):
                tool = tool_of(tool)
            if tool.name in tools_by_name:
                raise TaskError(f"there are two tools with the name {tool.name!r}. Rename one.")
            tools_by_name[tool.name] = tool
        return cls(tools_by_name, parameters or ToolUseParameters())

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

    def _text_call(self, name: str, arguments_text: str) -> list[ToolCall | WrongCall]:
        if name not in self.tools:
            # An answer may look like a call.
            return []
        argument_name = self.tools[name].single_argument()
        try:
            arguments = json.loads(arguments_text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict) and (argument_name is None or argument_name in arguments):
            return [ToolCall(name, arguments)]
        if argument_name is None:
            return [WrongCall("malformed", f"the arguments of {name} are no JSON object")]
        # The only argument needs no name.
        schema = self.tools[name].parameters["properties"][argument_name]
        is_text = schema.get("type") == "string" or arguments is None
        return [ToolCall(name, {argument_name: arguments_text if is_text else arguments})]

    def concurrency(self, calls: Sequence[ToolCall | WrongCall]) -> int:
        """Return the number of threads that may execute these calls."""
        concurrencies = []
        for call in calls:
            if isinstance(call, ToolCall) and call.name in self.tools:
                concurrencies.append(self.tools[call.name].concurrency)
        return min(concurrencies, default=1)

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
        num_left = min(self.parameters.max_result_tokens, room // 2)
        texts = []
        counts = Counter(calls=len(outcomes))
        for content, error in outcomes:
            text = valid_text(content)
            length = 0 if error else num_tokens(text)
            if length > num_left:
                text = f"the result has {length} tokens, more than {num_left}"
                error = "long"
            if error:
                counts[error] += 1
                text = f"Error: {text}"[:MAX_ERROR_LENGTH]
            else:
                num_left -= length
            texts.append(text)
        return texts, counts


NO_TOOLS = Toolbox()


def tool_figures(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Return figures of tool use from counts of episodes; none if no tool was called.

    `tools/calls_mean` is per episode, `tools/error_share` and the share of each kind of error, by
    the names in `ERRORS`, are of calls.
    """
    calls_per_episode = [episode_counts.get("calls", 0) for episode_counts in counts]
    num_calls = sum(calls_per_episode)
    if not num_calls:
        return {}
    shares = {}
    for kind in ERRORS:
        num_errors = sum(episode_counts.get(kind, 0) for episode_counts in counts)
        shares[kind] = num_errors / num_calls
    return {
        "tools/calls_mean": fmean(calls_per_episode),
        "tools/error_share": sum(shares.values()),
        **{f"tools/{kind}_share": share for kind, share in shares.items()},
    }

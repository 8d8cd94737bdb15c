"""A user's function as a scorer."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.parameters_base import CheckedName
from nip_astra.parameters.types import ScorerType
from nip_astra.plugins import load_plugin, module_of
from nip_astra.scorers.base import Exchange, Scorer, Verdict, register_scorer
from nip_astra.utils.background_loop import BackgroundLoop
from nip_astra.utils.user_code import process_state_kept

COLUMNS: dict[str, Callable[[Exchange], Any]] = {
    "completions": lambda exchange: exchange.text,
    "prompts": lambda exchange: exchange.history[-1].text if exchange.history else "",
    "conversations": lambda exchange: [
        {"role": message.role, "content": message.text} for message in exchange.conversation
    ],
    "roles": lambda exchange: exchange.role,
    "columns": lambda exchange: dict(exchange.columns),
    "reasonings": lambda exchange: exchange.reasoning,
}
"""Arguments that a function may declare, each a list with an element per text."""


@register_scorer(ScorerType.PYTHON)
class PythonScorer(Scorer):
    """Scores from a function `f(prompts, completions, **columns) -> list[float | None]`.

    `completions` are the texts to rate, `prompts` the turn before each ("" if there is none),
    `conversations` all turns up to and including the text, as `{"role", "content"}`, `roles` the
    author of each text, `columns` a dict of the further columns of its prompt, `reasonings` what
    the author thought before each text, or None. The function receives the arguments that it
    declares, or all with `**columns`. A function of `completions` alone rates each distinct text
    once. None means no verdict. An `async` function runs in the scorer's event loop.
    """

    class Parameters(Scorer.Parameters):
        """The function."""

        function: CheckedName = Field(pattern=r"^.+:[^:/]+$")
        """`package.module:function`, `path/to/file.py:function` or
        `scenario://file.py:function`. The module is imported, which executes it."""
        batch_size: int | None = Field(default=None, ge=1)
        """Texts per call; null for all texts of a rollout."""

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
        self._function = UserFunction(parameters.function, self.scenario_dir)
        self._columns = _columns_of(self._function, parameters.function)
        self.reads_history = bool({*self._columns} - {"completions", "reasonings"})
        self.reads_reasoning = "reasonings" in self._columns
        # Clients that the function keeps belong to the loop of their first use.
        self._loop = BackgroundLoop()

    @property
    def modules(self) -> set[str]:
        """Module names, including those that define and name the function."""
        return super().modules | self._function.modules

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> list[Verdict]:
        size = self.parameters.batch_size or len(exchanges)
        verdicts: list[Verdict] = []
        for start in range(0, len(exchanges), size):
            part = exchanges[start : start + size]
            columns = {
                name: [COLUMNS[name](exchange) for exchange in part] for name in self._columns
            }
            values = list(self._call(columns))
            if len(values) != len(part):
                raise ValueError(f"it returned {len(values)} values for {len(part)} texts")
            verdicts += values
        return verdicts

    def _call(self, columns: dict[str, list[Any]]) -> Sequence[Verdict]:
        result = self._function.call(columns)
        if inspect.isawaitable(result):
            with process_state_kept(f"the function {self._function.reference!r}"):
                result = self._loop.run(_wait(result))
        values: Sequence[Verdict] = result
        return values


async def _wait(result: Awaitable[Any]) -> Any:
    return await result


class UserFunction:
    """A user's function, called with the arguments that it takes.

    Parameters
    ----------
    reference : str
        `package.module:function`, `path/to/file.py:function` or `scenario://file.py:function`.
    function : Callable, optional
        The function, if it is already loaded.

    Attributes
    ----------
    required : list of str
        Arguments without a default.
    modules : set of str
        The module that defines the function, and the one that names it.

    Raises
    ------
    ConfigurationError
        If there is no such function, or its arguments cannot be inspected.
    """

    def __init__(
        self,
        reference: str,
        scenario_dir: Path | None,
        function: Callable[..., Any] | None = None,
    ) -> None:
        module = ""
        if function is None:
            module, function = find_function(reference, scenario_dir)
        self.reference, self.function = reference, function
        self.modules = {module, getattr(function, "__module__", None) or module} - {""}
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the arguments of {reference!r} cannot be inspected. Wrap it in a Python function."
            ) from error
        named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        starred_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        self._names = {parameter.name for parameter in parameters if parameter.kind in named_kinds}
        self._takes_all = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters
        )
        self.required = [
            parameter.name
            for parameter in parameters
            if parameter.default is inspect.Parameter.empty and parameter.kind not in starred_kinds
        ]

    def takes(self, name: str) -> bool:
        """Return whether the function has an argument of that name, or takes any."""
        return self._takes_all or name in self._names

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function with those of the arguments that it takes."""
        accepted = {name: value for name, value in arguments.items() if self.takes(name)}
        with process_state_kept(f"the function {self.reference!r}"):
            return self.function(**accepted)


def find_function(reference: str, scenario_dir: Path | None) -> tuple[str, Callable[..., Any]]:
    """Import the module; return its name and the function, or an instance of a callable class."""
    location, _, name = reference.rpartition(":")
    is_file = location.endswith(".py")
    source = str(resolve_reference(location, scenario_dir)) if is_file else location
    module = module_of(load_plugin(source))
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        available = f" It has {', '.join(functions)}." if functions else ""
        raise ConfigurationError(
            f"{location} has no function {name!r}.{available} Give package.module:function or "
            "path/to/file.py:function."
        )
    if isinstance(function, type) and any("__call__" in vars(base) for base in function.__mro__):
        return module.__name__, function()
    return module.__name__, function


def _columns_of(function: UserFunction, reference: str) -> list[str]:
    """Return the names in `COLUMNS` that a function takes."""
    columns = [name for name in COLUMNS if function.takes(name)]
    unknown = [name for name in function.required if name not in columns]
    if unknown or "completions" not in columns:
        wrong = f"unknown: {', '.join(unknown)}" if unknown else "missing: completions"
        raise ConfigurationError(
            f"arguments of the scorer function {reference!r}: {wrong}. It must take completions "
            f"and may take {', '.join(list(COLUMNS)[1:])}; other arguments need defaults."
        )
    return columns

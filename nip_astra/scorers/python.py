"""A function of the user's own as a scorer."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.parameters_base import CheckedName
from nip_astra.parameters.types import ScorerType
from nip_astra.plugins import load_plugin, module_of
from nip_astra.scorers.base import Exchange, Scorer, Verdict, register_scorer

COLUMNS: dict[str, Callable[[Exchange], Any]] = {
    "completions": lambda exchange: exchange.text,
    "prompts": lambda exchange: exchange.history[-1].text if exchange.history else "",
    "conversations": lambda exchange: [
        {"role": message.role, "content": message.text} for message in exchange.conversation
    ],
    "roles": lambda exchange: exchange.role,
    "columns": lambda exchange: dict(exchange.columns),
}
"""What a function can ask for by the names of its arguments: a list each, an element a text."""


@register_scorer(ScorerType.PYTHON)
class PythonScorer(Scorer):
    """What a function gives: `f(prompts, completions, **columns) -> list[float | None]`.

    `completions` are the texts to rate, `prompts` the turn before each ("" where there is none),
    `conversations` all turns with the text as the last, as `{"role", "content"}`, `roles` who says
    the text, `columns` a dict of what the data set of prompts says of the conversation. The
    function gets those that it has an argument for, all with `**columns`. One that takes
    `completions` alone is a function of texts, and is asked once for each. None stands for no
    verdict. It may be `async`; then it runs in an event loop of its own, always the same.
    """

    class Parameters(Scorer.Parameters):
        """Which function."""

        function: CheckedName = Field(pattern=r"^.+:[^:/]+$")
        """`package.module:function`, `path/to/file.py:function` or
        `scenario://file.py:function`. The module is imported, which runs it."""
        batch_size: int | None = Field(default=None, ge=1)
        """Texts in a call; null for all that a rollout has."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        self._module, self._function = _find_function(parameters.function, scenario_dir)
        self._columns = _columns_of(self._function, parameters.function)
        self.reads_history = self._columns != ["completions"]
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def modules(self) -> set[str]:
        """Also that of the function, and the one in which it is looked up."""
        own = getattr(self._function, "__module__", None) or self._module
        return super().modules | {self._module, own}

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> list[Verdict]:
        size = self.parameters.batch_size or len(exchanges)
        verdicts: list[Verdict] = []
        for start in range(0, len(exchanges), size):
            part = exchanges[start : start + size]
            columns = {name: [COLUMNS[name](one) for one in part] for name in self._columns}
            given = list(self._call(columns))
            if len(given) != len(part):
                # Told with all texts of the call, since parts cannot be told apart later.
                raise ValueError(f"it was given {len(part)} texts and returned {len(given)} values")
            verdicts += given
        return verdicts

    def _call(self, columns: dict[str, list[Any]]) -> Sequence[Verdict]:
        result = self._function(**columns)
        if inspect.isawaitable(result):
            result = asyncio.run_coroutine_threadsafe(_wait(result), self._event_loop()).result()
        values: Sequence[Verdict] = result
        return values

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """The scorer's loop, in a thread of its own: a notebook has one running already.

        It stays the same, because clients that the function keeps belong to the loop of their
        first use.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return self._loop


async def _wait(result: Awaitable[Any]) -> Any:
    return await result


def _find_function(reference: str, scenario_dir: Path | None) -> tuple[str, Callable[..., Any]]:
    """Import the module, and give its name and its function."""
    place, _, name = reference.rpartition(":")
    source = str(resolve_reference(place, scenario_dir)) if place.endswith(".py") else place
    module = module_of(load_plugin(source))
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        known = f" It has {', '.join(functions)}." if functions else ""
        raise ConfigurationError(
            f"the function {reference!r} was asked for as a scorer, but {place} has no function "
            f"{name!r}.{known} Give package.module:function or path/to/file.py:function."
        )
    function: Callable[..., Any] = found
    return module.__name__, function


def _columns_of(function: Callable[..., Any], reference: str) -> list[str]:
    """The columns that a function takes, of those that there are."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the function {reference!r} was asked for as a scorer, but its arguments are not "
            "known: it is not written in Python. Wrap it in a function of your own."
        ) from error
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    columns = [name for name in COLUMNS if takes_all or name in {p.name for p in by_name}]
    unknown = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in columns
    ]
    if unknown or "completions" not in columns:
        wrong = f"it wants {', '.join(unknown)}" if unknown else "it does not take completions"
        raise ConfigurationError(
            f"the function {reference!r} was asked for as a scorer, but {wrong}. A scorer's "
            f"function takes completions and, as it likes, {', '.join(list(COLUMNS)[1:])}, by "
            "these names; other arguments need defaults."
        )
    return columns

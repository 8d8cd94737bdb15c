"""The package's errors: one tree, in which each error also inherits from the builtin it refines.

A message states the value, what is wrong with it, what is valid, and what to do.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from nip_astra.safe_text import safe_text

_MAX_SHOWN = 80


def nearest_names(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """Return at most `n` known names similar to `name`, the nearest first.

    Case, and dashes for underscores, are ignored.
    """
    spelled: dict[str, list[str]] = {}
    for candidate in sorted(set(known)):
        spelled.setdefault(_plainly(candidate), []).append(candidate)
    near = difflib.get_close_matches(_plainly(name), list(spelled), n=n, cutoff=0.6)
    return [candidate for plain in near for candidate in spelled[plain]][:n]


def text_of_error(error: BaseException) -> str:
    """Return the text of an error, also of one whose own conversion to text fails."""
    try:
        return str(error)
    except Exception as failure:
        return f"its text cannot be read ({type(failure).__name__})"


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error of foreign code."""
    return f"{type(error).__name__}: {text_of_error(error)}"


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, without its full stop."""
    return text_of_error(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def show_value(value: Any) -> str:
    """Return a parameter's value as in a file, truncated if it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _plainly(name: str) -> str:
    return name.strip().casefold().replace("-", "_")


class NipAstraError(Exception):
    """Root of the package's errors; the command line prints only its message.

    The message may quote output of a model, a service or a file, and is safe to display.
    """

    def __str__(self) -> str:
        return safe_text(super().__str__())


class ConfigurationError(NipAstraError, ValueError):
    """The requested configuration cannot be run."""


class MissingPartError(ConfigurationError, AttributeError):
    """A requested part does not exist in the family of this scenario."""


class ParameterFault(NamedTuple):
    """One fault of a parameter file or option.

    Attributes
    ----------
    path : str
        Dotted path of the parameter.
    given : str
        The given value, as text; empty if a whole group is inconsistent.
    problem : str
        The fault.
    suggestion : str
        A valid value or a next step; may be empty.
    source : str
        The file or option that set the value; may be empty.
    """

    path: str
    given: str
    problem: str
    suggestion: str = ""
    source: str = ""

    def __str__(self) -> str:
        origin = f" (from {self.source})" if self.source else ""
        hint = f" {self.suggestion}" if self.suggestion else ""
        given = f"; given {self.given}" if self.given else ""
        return f"{self.path}: {self.problem}{given}{origin}.{hint}"


class ParameterError(ConfigurationError):
    """One or more parameters are wrong; `faults` has all of them, not only the first."""

    def __init__(self, faults: Sequence[ParameterFault]) -> None:
        self.faults = list(faults)
        count = len(self.faults)
        head = f"{counted(count, 'parameter')} {'is' if count == 1 else 'are'} wrong"
        super().__init__("\n".join([f"{head}:", *(f"  {fault}" for fault in self.faults)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.faults,)


class UnreadParameterError(ParameterError):
    """Parameters were set that nothing in the run reads."""


def plural(noun: str) -> str:
    """Return the plural of a noun or a registry's kind: trainers, policy losses, families."""
    if noun.endswith("y"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def counted(number: float | None, noun: str) -> str:
    """Return a number with its noun, "1 problem" or "1,200 problems"; a dash if it is unknown."""
    shown = "\N{EN DASH}" if number is None else f"{number:,.0f}"
    return f"{shown} {noun if number == 1 else plural(noun)}"


class UnknownNameError(ConfigurationError, LookupError):
    """A name is not in the registry.

    Attributes
    ----------
    kind, name : str
        The registry's kind and the unknown name.
    known : list[str]
        All known names.
    suggestions : list[str]
        The known names nearest to `name`.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], advice: str = "") -> None:
        self.kind, self.name, self.known, self.advice = kind, name, sorted(known), advice
        self.suggestions = nearest_names(name, self.known)
        words = kind.replace("_", " ")
        near = f" Did you mean {self.suggestions[0]!r}?" if self.suggestions else ""
        advice = advice or "Load your own with --plugin path/to/file.py."
        listed = ", ".join(self.known) or "none"
        super().__init__(
            f"unknown {words} {name!r}.{near} Known {plural(words)}: {listed}. {advice}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.name, self.known, self.advice)


class DuplicateNameError(ConfigurationError):
    """A name was registered twice.

    Attributes
    ----------
    kind, name : str
        The registry's kind and the name.
    first, second : str
        The two places that register it.
    """

    def __init__(self, kind: str, name: str, first: str, second: str) -> None:
        self.kind, self.name, self.first, self.second = kind, name, first, second
        super().__init__(
            f"the {kind.replace('_', ' ')} {name!r} of {second} is already registered by {first}. "
            f"Rename one of them, or call forget({name!r}) of the registry to reload a file."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.name, self.first, self.second)


class PluginError(ConfigurationError, ImportError):
    """A plug-in could not be loaded; nothing of it stays registered."""


class UntrustedRunError(ConfigurationError, PermissionError):
    """A run of unknown origin would execute code, use a key, or change a protected setting."""


class AgentShapeError(ConfigurationError):
    """A part of an agent returns a tensor of the wrong shape for its protocol."""


class MissingDependencyError(ConfigurationError, ImportError):
    """A required optional package is not installed."""

    @classmethod
    def of(cls, what: str, package: str, extra: str) -> MissingDependencyError:
        """Return the error for a feature that needs a package of one of our extras."""
        return cls(f"{what} needs the package {package}. Run: pip install 'nip_astra[{extra}]'")


class ModelLoadError(ConfigurationError, OSError):
    """A model or tokenizer cannot be found, read, or used as configured."""


class ModelAbilityError(ModelLoadError):
    """A model cannot do what its role needs: sample tokens, score them, or learn."""


class DataError(ConfigurationError):
    """A data file is missing, unreadable, empty, or contradicts itself."""


class ChangedDataError(DataError):
    """A data file has changed since the run that reads it began."""


class ContextLengthError(DataError):
    """A text does not fit into a model's window."""


class RunDirectoryError(ConfigurationError, OSError):
    """A run directory cannot be made, found, or written."""


class CheckpointError(NipAstraError, OSError):
    """A checkpoint is corrupt, foreign, or does not fit."""


class ScorerError(NipAstraError, RuntimeError):
    """A scorer failed or returned an invalid score."""


class ScorerTimeoutError(ScorerError, TimeoutError):
    """A scorer did not answer within its time limit."""


class TaskError(NipAstraError, RuntimeError):
    """A task or an environment failed, or returned an invalid message or reward."""


class UserCodeError(NipAstraError, RuntimeError):
    """A user's function did what would end or corrupt the process."""


class CallDeadlineError(NipAstraError, TimeoutError):
    """A call of a reward, tool or environment did not return before the run's deadline."""


class RewardTermError(NipAstraError, RuntimeError):
    """A reward term returned an invalid reward."""


class NonFiniteLossError(NipAstraError, ArithmeticError):
    """A loss or gradient is not finite; training stopped before using it."""


class NonFiniteOutputError(NipAstraError, ArithmeticError):
    """A model's logits are not finite; its output is discarded."""


class WorkerProcessError(NipAstraError, RuntimeError):
    """A worker process failed or ended."""


class LostProcessError(WorkerProcessError):
    """One of the processes that train a run together has ended or is unreachable."""


class UnexpectedExitError(NipAstraError, RuntimeError):
    """A plug-in or a library tried to exit the program during its work."""

    def __init__(self, code: object, function: str = "sys.exit") -> None:
        self.code, self.function = code, function
        super().__init__(
            f"a plug-in or a library called {function}({code!r}) before the work was done. "
            "Let it raise an error or return; --debug shows the place."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.function)


class SandboxUnavailableError(NipAstraError, RuntimeError):
    """Model-written code cannot be executed: this machine has no sandbox for it."""


class ServiceError(NipAstraError, ConnectionError):
    """A service cannot be reached, or rejects a request."""


class ServiceUnreachableError(ServiceError):
    """A service does not respond: wrong address, ended, or connection lost."""


class ServiceBusyError(ServiceError):
    """A service is at capacity."""


class ServiceRequestError(ServiceError, ValueError):
    """A service rejects a request; the service's state is unchanged."""


class AnswerTooLargeError(ServiceError):
    """A response exceeds its size limit, or is compressed so that no limit can be enforced."""


class ServiceConflictError(ServiceError):
    """Another client is using the same object of a service."""


class ServiceModelError(ServiceError, LookupError):
    """A service does not have the model, or no longer has it."""


class BudgetExhaustedError(NipAstraError, RuntimeError):
    """The budget for services is used up; the work so far is kept."""


class NothingMeasuredError(NipAstraError, RuntimeError):
    """A run or an evaluation has no result: no reply, no verdict or no reward."""


class TrackingError(NipAstraError, RuntimeError):
    """An experiment tracker cannot be used as configured."""


class StopRequested(NipAstraError, RuntimeError):  # noqa: N818 - a request, not a fault
    """A signal stopped the run; its work is saved, if there was any.

    Attributes
    ----------
    signal_name : str
        "SIGINT" or "SIGTERM".
    run : str
        Path of the run directory.
    is_saved : bool
        Whether there is a checkpoint to continue from.
    is_at_once : bool
        Whether a second signal stopped it without saving.
    command : str
        The command that continues it: "resume" for a run, "sweep" for a sweep.
    """

    def __init__(
        self,
        signal_name: str,
        run: str = "RUN",
        is_saved: bool = True,
        *,
        is_at_once: bool = False,
        command: str = "resume",
    ) -> None:
        self.command = command
        self.signal_name, self.run = signal_name, run
        self.is_saved, self.is_at_once = is_saved, is_at_once
        if not is_saved:
            what = "before its first checkpoint. Restart"
        elif is_at_once:
            what = "without saving; its work since the last checkpoint is lost. Continue"
        else:
            what = "and its work is saved. Continue"
        super().__init__(
            f"the {'sweep' if command == 'sweep' else 'run'} was stopped by {signal_name} {what} "
            f"with: nip-astra {command} {run}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        new = partial(type(self), is_at_once=self.is_at_once, command=self.command)
        return new, (self.signal_name, self.run, self.is_saved)

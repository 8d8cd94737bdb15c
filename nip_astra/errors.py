"""Every error that the package raises on purpose: one tree, each also the builtin it refines.

A message has four parts: what was asked, what is wrong, what would be right, and what to do.
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
    """At most `n` known names that look like `name`, the nearest first.

    Case, and dashes for underscores, make no difference.
    """
    spelled: dict[str, list[str]] = {}
    for candidate in sorted(set(known)):
        spelled.setdefault(_plainly(candidate), []).append(candidate)
    near = difflib.get_close_matches(_plainly(name), list(spelled), n=n, cutoff=0.6)
    return [candidate for plain in near for candidate in spelled[plain]][:n]


def reason_of(error: BaseException) -> str:
    """The first line of an error, without its full stop."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def show_value(value: Any) -> str:
    """A parameter's value as a file has it, cut if it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _plainly(name: str) -> str:
    return name.strip().casefold().replace("-", "_")


class NipAstraError(Exception):
    """Root of the package's errors. The command line turns one into a short message.

    Its text may quote what a model, a service or a file said, and is safe to show.
    """

    def __str__(self) -> str:
        return safe_text(super().__str__())


class ConfigurationError(NipAstraError, ValueError):
    """What was asked for cannot be run as it stands."""


class MissingPartError(ConfigurationError, AttributeError):
    """A part of a scenario was asked for that scenarios of another family have."""


class ParameterFault(NamedTuple):
    """One fault of a parameter file or option.

    Attributes
    ----------
    path : str
        Dotted path of the parameter.
    given : str
        What was given, as text.
    problem : str
        What is wrong with it.
    suggestion : str
        What would be right; may be empty.
    source : str
        Where the value came from; may be empty.
    """

    path: str
    given: str
    problem: str
    suggestion: str = ""
    source: str = ""

    def __str__(self) -> str:
        origin = f" (from {self.source})" if self.source else ""
        hint = f" {self.suggestion}" if self.suggestion else ""
        return f"{self.path}: {self.problem}; given {self.given}{origin}.{hint}"


class ParameterError(ConfigurationError):
    """One or more parameters are wrong; all faults are told at once.

    Attributes
    ----------
    faults : list[ParameterFault]
        Each fault found.
    """

    def __init__(self, faults: Sequence[ParameterFault]) -> None:
        self.faults = list(faults)
        count = len(self.faults)
        head = "1 parameter is wrong" if count == 1 else f"{count} parameters are wrong"
        super().__init__("\n".join([f"{head}:", *(f"  {fault}" for fault in self.faults)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.faults,)


class UnreadParameterError(ParameterError):
    """Parameters were given that nothing in the run reads."""


def plural(kind: str) -> str:
    """The plural of a kind of thing: trainers, policy losses."""
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


class UnknownNameError(ConfigurationError, LookupError):
    """A name is in no registry.

    Attributes
    ----------
    kind, name : str
        What kind of thing was asked for, and by which name.
    known : list[str]
        Every known name.
    suggestions : list[str]
        The known names nearest to the one asked for.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], advice: str = "") -> None:
        self.kind, self.name, self.known, self.advice = kind, name, sorted(known), advice
        self.suggestions = nearest_names(name, self.known)
        words = kind.replace("_", " ")
        near = f" Did you mean {self.suggestions[0]!r}?" if self.suggestions else ""
        advice = advice or f"A {words} of your own is loaded with --plugin path/to/file.py."
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
        What was registered, and as what.
    first, second : str
        Where each registration stands.
    """

    def __init__(self, kind: str, name: str, first: str, second: str) -> None:
        self.kind, self.name, self.first, self.second = kind, name, first, second
        super().__init__(
            f"the {kind.replace('_', ' ')} {name!r} was to be registered by {second}, but {first} "
            f"has that name already. Register one of them under another name; where a file is "
            f"read again on purpose, call forget({name!r}) of the registry first."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.name, self.first, self.second)


class PluginError(ConfigurationError, ImportError):
    """A plug-in could not be loaded; nothing of it stays behind."""


class UntrustedRunError(ConfigurationError, PermissionError):
    """A run that is not known to be the user's own asks for code to be run, or for a key."""


class AgentShapeError(ConfigurationError):
    """A part of an agent gives a tensor of another shape than its protocol needs."""


class MissingDependencyError(ConfigurationError, ImportError):
    """An optional package is needed and not installed."""

    @classmethod
    def of(cls, what: str, package: str, extra: str) -> MissingDependencyError:
        """The error of something that needs a package of one of our extras."""
        return cls(f"{what} needs the package {package}. Run: pip install 'nip_astra[{extra}]'")


class ModelLoadError(ConfigurationError, OSError):
    """A model or tokenizer cannot be found, read, or used as asked."""


class ModelAbilityError(ModelLoadError):
    """A model cannot do what its role needs: sample tokens, score them, or learn."""


class DataError(ConfigurationError):
    """A data file is missing, unreadable, empty, or contradicts itself."""


class ContextLengthError(DataError):
    """A text does not fit into a model's window."""


class RunDirectoryError(ConfigurationError, OSError):
    """A run directory cannot be made, found, or written."""


class CheckpointError(NipAstraError, OSError):
    """A checkpoint is corrupt, foreign, or does not fit."""


class ScorerError(NipAstraError, RuntimeError):
    """A scorer failed, or gave something that is no score."""


class ScorerTimeoutError(ScorerError, TimeoutError):
    """A scorer did not answer within its time limit."""


class TaskError(NipAstraError, RuntimeError):
    """A task or an environment failed, or gave something that is no message or reward."""


class RewardTermError(NipAstraError, RuntimeError):
    """A reward term gave something that is no reward."""


class NonFiniteLossError(NipAstraError, ArithmeticError):
    """A loss or gradient is not finite; training stopped before using it."""


class NonFiniteOutputError(NipAstraError, ArithmeticError):
    """A model's logits are no numbers; nothing that it said is used."""


class WorkerProcessError(NipAstraError, RuntimeError):
    """A process that was to compute a part of the work failed or ended."""


class LostProcessError(WorkerProcessError):
    """A process of those that train a run together has ended, or cannot be reached."""


class UnexpectedExitError(NipAstraError, RuntimeError):
    """Code of a plug-in or a library would have ended the program in the middle of its work."""

    def __init__(self, code: object, function: str = "sys.exit") -> None:
        self.code, self.function = code, function
        super().__init__(
            f"the program was at work, but code that it called would have ended it: {function}("
            f"{code!r}). The work is not done. Have that code raise an error, or return; "
            "--debug shows where it stands."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.function)


class SandboxUnavailableError(NipAstraError, RuntimeError):
    """Code of a model cannot be run, because this machine offers no sandbox for it."""


class ServiceError(NipAstraError, ConnectionError):
    """A service cannot be reached, or refuses what it is asked for."""


class ServiceUnreachableError(ServiceError):
    """A service does not answer: it is not there, has ended, or the connection to it is lost."""


class ServiceBusyError(ServiceError):
    """A service has as much to do as it takes on."""


class ServiceRequestError(ServiceError, ValueError):
    """A service refuses a request as it stands; what it holds is as it was."""


class AnswerTooLargeError(ServiceError):
    """An answer is larger than its bound, or compressed so that no bound would hold."""


class ServiceConflictError(ServiceError):
    """Another client works on what a service holds for this one."""


class ServiceModelError(ServiceError, LookupError):
    """A service has no such model, or no longer."""


class BudgetExhaustedError(NipAstraError, RuntimeError):
    """What may be spent on services is spent; the work so far is kept."""


class NothingMeasuredError(NipAstraError, RuntimeError):
    """A run or an evaluation has no result: no reply, no verdict or no reward."""


class TrackingError(NipAstraError, RuntimeError):
    """An experiment tracker cannot be used as asked."""


class StopRequested(NipAstraError, RuntimeError):  # noqa: N818 - a request, not a fault
    """A signal asked the run to stop; its work is saved, if there was any.

    Attributes
    ----------
    signal_name : str
        "SIGINT" or "SIGTERM".
    run : str
        Path of the run directory.
    is_saved : bool
        Whether there is a checkpoint to go on from.
    is_at_once : bool
        Whether it stopped without saving, since a second signal came.
    command : str
        What goes on with it: "resume" of a run, "sweep" of a sweep.
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
            what = "before its first checkpoint. Begin"
        elif is_at_once:
            what = "at once; its work since the last checkpoint is lost. Go on from that"
        else:
            what = "and its work is saved. Go on"
        super().__init__(
            f"the {'sweep' if command == 'sweep' else 'run'} was stopped by {signal_name} {what} "
            f"with: nip-astra {command} {run}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        new = partial(type(self), is_at_once=self.is_at_once, command=self.command)
        return new, (self.signal_name, self.run, self.is_saved)

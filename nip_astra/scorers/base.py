"""What a scorer is: what was said in, one number in [0, 1] each out; higher is a worse failure.

Shape suffix: `N` what was rated.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.errors import ConfigurationError, NipAstraError, ScorerError, ScorerTimeoutError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.patience import PatientChatModel
from nip_astra.parameters.parameters_base import ComponentRegistry, PolymorphicParameters
from nip_astra.parameters.types import ScorerType
from nip_astra.plugins import loaded_plugins
from nip_astra.rollouts.prompts import Columns

logger = logging.getLogger(__name__)

Role: TypeAlias = Literal["user", "assistant"]
"""Who says something: the user is the attacker's side, the assistant the target's."""

Verdict: TypeAlias = float | ScorerError | None
"""What a scorer's hook gives for a text: a number from 0 to 1, None where it cannot tell, or the
error of a text that failed for good, which is not tried again."""


MAX_VERDICTS = 1 << 17
"""Verdicts that a scorer remembers; of more, the oldest are forgotten."""

KEY_BYTES = 16
"""Length of the digest by which a scorer remembers what it has rated."""


class TimeLimitExceeded(BaseException):
    """The block took too long; its caller tells what was being done."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the block with `TimeLimitExceeded` after some seconds.

    What waits (for a network, a lock, another process, or in Python code) is ended, and so is a
    long calculation as soon as it comes back to Python. The system's timer reaches main threads
    only; in another thread, or where a timer is running already, the block has no limit.
    """
    can_set = threading.current_thread() is threading.main_thread()
    if not can_set or signal.getitimer(signal.ITIMER_REAL)[0] > 0:
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise TimeLimitExceeded

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class Message(NamedTuple):
    """A turn of a conversation."""

    role: Role
    text: str


class Exchange(NamedTuple):
    """A text to rate, and where in a conversation it stands.

    Attributes
    ----------
    text : str
        What is rated.
    history : tuple[Message, ...]
        What was said before it, the oldest first.
    role : str
        Who says the text: "assistant" is the target, "user" the attacker.
    columns : Columns
        What the data set of prompts says of the conversation beside its opening.
    """

    text: str
    history: tuple[Message, ...] = ()
    role: Role = "assistant"
    columns: Columns = ()

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The history and the text as its last turn."""
        return (*self.history, Message(self.role, self.text))


class Ratings(NamedTuple):
    """What a scorer says of several texts.

    Attributes
    ----------
    scores_N : Tensor
        float32 on the CPU, from 0 to 1; NaN where there is no verdict.
    is_error_N : Tensor
        bool on the CPU; where the scorer failed. The score is NaN there. A NaN without an error
        is a text of which the scorer could not tell.
    """

    scores_N: Tensor
    is_error_N: Tensor


class Scorer:
    """Rate texts. A subclass implements `_score`; caching and checks are done here.

    A scorer of conversations sets `reads_history` and implements `_score_exchanges` instead.
    Each distinct text (or conversation, where the history is read) is rated once, also by a run
    that goes on from a checkpoint, as long as it is among the last `MAX_VERDICTS`; a rating that
    failed is not kept.
    """

    reads_history: bool = False
    """Whether a score depends on what was said before the text, and on who says it."""

    class Parameters(PolymorphicParameters):
        """Parameters of every scorer; a subclass adds its own."""

        type_name: ClassVar[str] = ""

        on_failure: Literal["stop", "skip"] = "stop"
        """What becomes of a text that cannot be rated because the scorer raises, or gives what is
        no score: "stop" ends the run, "skip" counts it as an error, which no rate includes."""
        timeout_seconds: float = Field(default=1800.0, gt=0)
        """Longest that a call of the scorer may take, for all texts of a rollout together. After
        that it has failed, and its texts are not tried again."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        self.parameters = parameters
        self.device = device
        self.scenario_dir = scenario_dir
        self._verdicts: dict[bytes, float | None] = {}
        own = type(self)
        if own._score is Scorer._score and own._score_exchanges is Scorer._score_exchanges:
            raise ConfigurationError(
                f"the scorer {_name_of(self)!r} was to be built, but its class rates nothing. Give "
                "it the method _score(texts), or _score_exchanges(exchanges) where it reads "
                "conversations."
            )

    @property
    def nested_scorers(self) -> Sequence[Scorer]:
        """Scorers that it asks itself."""
        return ()

    def open_services(self, settings: ExperimentSettings) -> dict[str, PatientChatModel]:
        """Tell the chat models that it asks what they may spend, and give them by who they are."""
        return open_services(self.nested_scorers, settings)

    @property
    def modules(self) -> set[str]:
        """Names of the modules whose code rates, those of nested scorers among them."""
        own = {cls.__module__ for cls in type(self).__mro__}
        return own.union(*(scorer.modules for scorer in self.nested_scorers))

    def _score(self, texts: Sequence[str]) -> Sequence[Verdict]:
        """A verdict for each text; the texts are distinct."""
        raise NotImplementedError

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> Sequence[Verdict]:
        """A verdict for each exchange; they are distinct in what the scorer reads."""
        return self._score([exchange.text for exchange in exchanges])

    def score(self, texts: Sequence[str]) -> Tensor:
        """Rate texts that the target said, float32 `[len(texts)]` on the CPU; see `rate`."""
        return self.rate([Exchange(text) for text in texts]).scores_N

    def rate(self, exchanges: Sequence[Exchange]) -> Ratings:
        """Rate what was said.

        Raises
        ------
        ScorerError
            With `on_failure` "stop", when the scorer fails, returns the wrong number of scores, or
            a score that is no number in [0, 1]. A failed score never counts as 0.
        """
        keys = [self._key(exchange) for exchange in exchanges]
        new = {k: e for k, e in zip(keys, exchanges, strict=True) if k not in self._verdicts}
        failed: set[bytes] = set()
        if new:
            for key, verdict in zip(new, self._judged(list(new.values())), strict=True):
                if isinstance(verdict, ScorerError):
                    failed.add(key)
                else:
                    self._verdicts[key] = verdict
        # A failed text has no verdict in the cache.
        known = [self._verdicts.get(key) for key in keys]
        for key in list(islice(self._verdicts, max(0, len(self._verdicts) - MAX_VERDICTS))):
            del self._verdicts[key]
        return Ratings(
            torch.tensor([math.nan if v is None else v for v in known], dtype=torch.float32),
            torch.tensor([key in failed for key in keys], dtype=torch.bool),
        )

    def verdicts(self) -> dict[str, Any]:
        """Everything that was rated so far, nested scorers' too, for a checkpoint.

        A model's last digits depend on which texts share a batch, so a run that goes on must not
        rate again what it has rated.
        """
        keys = b"".join(self._verdicts)
        scores = [math.nan if score is None else score for score in self._verdicts.values()]
        return {
            "code": self._code(),
            "keys": torch.tensor(list(keys), dtype=torch.uint8).view(-1, KEY_BYTES),
            "scores": torch.tensor(scores, dtype=torch.float64),
            "nested": [scorer.verdicts() for scorer in self.nested_scorers],
        }

    def load_verdicts(self, state: Mapping[str, Any]) -> None:
        """Take up what `verdicts` gave, unless the scorer's own code has been changed since."""
        if state["code"] != self._code():
            logger.warning(
                "the code of the scorer %r has changed since it rated what the checkpoint holds; "
                "it rates everything anew",
                _name_of(self),
            )
            return
        keys: list[bytes] = [row.tobytes() for row in state["keys"].numpy()]
        scores: list[float] = state["scores"].tolist()
        self._verdicts = {
            key: None if math.isnan(score) else score
            for key, score in zip(keys, scores, strict=True)
        }
        for scorer, own in zip(self.nested_scorers, state["nested"], strict=True):
            scorer.load_verdicts(own)

    def _code(self) -> list[str]:
        """Digests of the files that rate, as they were loaded, but for those of the package."""
        as_loaded = {plugin.module_name: plugin.sha256 for plugin in loaded_plugins()}
        digests = []
        for name in sorted(self.modules):
            if name.partition(".")[0] in {"nip_astra", "builtins", "abc", "typing"}:
                continue
            file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
            digest = as_loaded.get(name)
            if digest is None and file.is_file():
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
            digests.append(digest or name)
        return digests

    def _key(self, exchange: Exchange) -> bytes:
        read = exchange if self.reads_history else exchange.text
        return hashlib.blake2b(json.dumps(read).encode(), digest_size=KEY_BYTES).digest()

    def _judged(self, exchanges: list[Exchange]) -> list[Verdict]:
        """Checked verdicts; what failed is raised, or tried once more and then an error."""
        can_skip = self.parameters.on_failure == "skip"
        try:
            verdicts = self._asked(exchanges)
        except ScorerError as error:
            if not can_skip:
                raise
            is_worth_it = not isinstance(error, ScorerTimeoutError)
            again = dict.fromkeys(range(len(exchanges)), error) if is_worth_it else {}
            verdicts = [error] * len(exchanges)
        else:
            faults = {
                number: fault
                for number, (exchange, verdict) in enumerate(zip(exchanges, verdicts, strict=True))
                if (fault := self._fault(exchange, verdict)) is not None
            }
            if faults and not can_skip:
                raise next(iter(faults.values()))
            again = {n: e for n, e in faults.items() if not isinstance(verdicts[n], ScorerError)}
            verdicts = [faults.get(number, verdict) for number, verdict in enumerate(verdicts)]
        if len(exchanges) > 1:
            for number in again:
                verdicts[number] = self._judged_alone(exchanges[number])
        errors = [verdict for verdict in verdicts if isinstance(verdict, ScorerError)]
        if errors:
            logger.warning(
                "the scorer %r failed for %d of %d texts, which count as errors; the first: %s",
                _name_of(self),
                len(errors),
                len(exchanges),
                errors[0],
            )
        return verdicts

    def _judged_alone(self, exchange: Exchange) -> Verdict:
        try:
            (verdict,) = self._asked([exchange])
        except ScorerError as error:
            return error
        return self._fault(exchange, verdict) or verdict

    def _asked(self, exchanges: list[Exchange]) -> list[Verdict]:
        """Call the hook; give as many verdicts as there are exchanges."""
        limit = self.parameters.timeout_seconds
        try:
            with time_limit(limit):
                verdicts: list[Verdict] = [
                    value if value is None or isinstance(value, ScorerError) else float(value)
                    for value in self._score_exchanges(exchanges)
                ]
        except TimeLimitExceeded as error:
            raise ScorerTimeoutError(
                f"the scorer {_name_of(self)!r} was asked to rate {len(exchanges)} texts and has "
                f"not answered within {limit:g} seconds. Mend what it waits for, or raise its "
                "timeout_seconds; the run can be resumed from its last checkpoint."
            ) from error
        except NipAstraError:
            raise
        except Exception as error:
            raise self._error_of(len(exchanges), error) from error
        if len(verdicts) != len(exchanges):
            raise ScorerError(
                f"the scorer {_name_of(self)!r} was asked to rate {len(exchanges)} texts and gave "
                f"{len(verdicts)} scores. It must give one score a text, in order."
            )
        return verdicts

    def _error_of(self, num_texts: int, error: Exception) -> ScorerError:
        return ScorerError(
            f"the scorer {_name_of(self)!r} was asked to rate {num_texts} texts and failed: "
            f"{type(error).__name__}: {error}. Mend the scorer; the run can be resumed from its "
            "last checkpoint."
        )

    def _fault(self, exchange: Exchange, verdict: Verdict) -> ScorerError | None:
        """Say what is wrong with a verdict; nothing where it is a score, or None."""
        if verdict is None or isinstance(verdict, ScorerError):
            return verdict
        if 0.0 <= verdict <= 1.0:  # which NaN is not
            return None
        return ScorerError(
            f"the scorer {_name_of(self)!r} gave {verdict} for the text {exchange.text[:60]!r}. A "
            "score is a number from 0 to 1, or None where there is no verdict; mend the scorer, "
            "then resume the run."
        )


def _name_of(scorer: Scorer) -> str:
    return scorer.parameters.type_name or type(scorer).__name__


def open_services(
    scorers: Iterable[Scorer], settings: ExperimentSettings
) -> dict[str, PatientChatModel]:
    """Tell the chat models that scorers ask what they may spend, and give them by who they are."""
    found: dict[str, PatientChatModel] = {}
    for scorer in dict.fromkeys(scorers):
        for name, model in scorer.open_services(settings).items():
            number, free = 2, name
            while free in found:
                free, number = f"{name} {number}", number + 1
            found[free] = model
    return found


SCORERS: ComponentRegistry[type[Scorer]] = ComponentRegistry(
    "scorer", package="nip_astra.scorers", members=ScorerType
)


def register_scorer(name: str) -> Callable[[type[Scorer]], type[Scorer]]:
    """Register a `Scorer` subclass under the `_type` by which parameter files name it."""
    return SCORERS.register(name)


def build_scorer(parameters: Any, *, device: torch.device, scenario_dir: Path | None) -> Scorer:
    """The scorer that the parameters describe."""
    return SCORERS.get(parameters.type_name)(parameters, device=device, scenario_dir=scenario_dir)

"""Base class of scorers, which rate each text with a number in [0, 1]; higher is a worse failure.

Shape suffix: `N` exchange.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.call_outcomes import kept_outcome
from nip_astra.deadlines import TimeLimitExceeded, time_limit
from nip_astra.errors import (
    ConfigurationError,
    NipAstraError,
    ScorerError,
    ScorerTimeoutError,
    counted,
    describe_error,
)
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.retrying import RetryingChatModel
from nip_astra.parameters.parameters_base import (
    ComponentRegistry,
    PolymorphicParameters,
    SubParameters,
    polymorphic,
)
from nip_astra.parameters.types import ScorerType
from nip_astra.plugins import loaded_plugins
from nip_astra.progress import counting
from nip_astra.rollouts.messages import Message as Message
from nip_astra.rollouts.messages import Role, ToolCall, Turn
from nip_astra.rollouts.prompts import Columns

logger = logging.getLogger(__name__)

Verdict: TypeAlias = float | ScorerError | None
"""Result of a scorer's hook for a text: a number from 0 to 1, None for no verdict, or the error of
a text that failed permanently and is not retried."""


MAX_VERDICTS = 1 << 17
"""Verdicts that a scorer caches; beyond it the oldest are dropped."""

KEY_BYTES = 16
"""Length of the digest that identifies a cached text."""


class Exchange(NamedTuple):
    """A text to rate, with its context in the conversation."""

    text: str
    """The text to rate."""
    history: tuple[Turn, ...] = ()
    """Turns before it, oldest first."""
    role: Role = "assistant"
    """Author of the text: "assistant" is the target, "user" the attacker."""
    columns: Columns = ()
    """Further columns of the conversation's row in the prompt dataset."""
    reasoning: str | None = None
    """What its author thought before the text, for scorers with `reads_reasoning`; None without a
    thought. It is not part of the text to rate."""
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools in the rated message."""

    @property
    def conversation(self) -> tuple[Turn, ...]:
        """The history followed by the text."""
        return (*self.history, Turn(self.role, self.text, self.reasoning, self.calls))


class Ratings(NamedTuple):
    """Scores of several texts."""

    scores_N: Tensor
    """float32 on the CPU, from 0 to 1; NaN where there is no verdict."""
    is_error_N: Tensor
    """bool on the CPU; True where the scorer failed, with a score of NaN. NaN without an error
    means that the scorer returned no verdict."""


class Scorer:
    """Rates texts. Subclasses implement `_score`; caching and checks are done here.

    A scorer of conversations sets `reads_history` and implements `_score_exchanges` instead.
    Each distinct text (or conversation, if the history is read) is rated once while it is among
    the last `MAX_VERDICTS`, also by a run resumed from a checkpoint. Failed ratings are not cached.
    """

    reads_history: bool = False
    """Whether a score depends on the history and the role."""
    reads_reasoning: bool = False
    """Whether a score depends on the reasoning before the text."""

    class Parameters(PolymorphicParameters):
        """Parameters of every scorer; a subclass adds its own."""

        type_name: ClassVar[str] = ""

        on_failure: Literal["stop", "skip"] = "stop"
        """If the scorer raises or returns an invalid score for a text: "stop" ends the run, "skip"
        counts an error, which no rate includes."""
        timeout_seconds: float = Field(default=1800.0, gt=0)
        """Time limit of one call, for all texts of a rollout together. After it the call has
        failed, and its texts are not retried."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        self.parameters = parameters
        self.device = device
        self.scenario_dir = scenario_dir
        self._verdicts: dict[bytes, float | None] = {}
        scorer_class = type(self)
        reads_texts = scorer_class._score is not Scorer._score
        reads_exchanges = scorer_class._score_exchanges is not Scorer._score_exchanges
        if not reads_texts and not reads_exchanges:
            raise ConfigurationError(
                f"the class of the scorer {self._name!r} does not rate anything. Implement "
                "_score(texts), or _score_exchanges(exchanges) to read conversations."
            )

    @property
    def _name(self) -> str:
        return self.parameters.type_name or type(self).__name__

    @property
    def nested_scorers(self) -> Sequence[Scorer]:
        """Scorers that this scorer calls."""
        return ()

    def open_services(self, settings: ExperimentSettings) -> dict[str, RetryingChatModel]:
        """Set the budgets of the scorer's chat models; return the models by name."""
        return open_services(self.nested_scorers, settings)

    @property
    def modules(self) -> set[str]:
        """Names of the modules whose code computes scores, including those of nested scorers."""
        modules = {base.__module__ for base in type(self).__mro__}
        return modules.union(*(scorer.modules for scorer in self.nested_scorers))

    def _score(self, texts: Sequence[str]) -> Sequence[Verdict]:
        """Return a verdict for each text; texts are distinct."""
        raise NotImplementedError

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> Sequence[Verdict]:
        """Return a verdict for each exchange; they differ in the parts that the scorer reads."""
        return self._score([exchange.text for exchange in exchanges])

    def score(self, texts: Sequence[str]) -> Tensor:
        """Return scores of texts by the target, float32 `[len(texts)]` on the CPU; see `rate`."""
        return self.rate([Exchange(text) for text in texts]).scores_N

    def rate(self, exchanges: Sequence[Exchange]) -> Ratings:
        """Rate exchanges.

        Raises `ScorerError` with `on_failure` "stop", if the scorer fails, returns the wrong number
        of scores, or a score outside [0, 1]. A failed score never counts as 0.
        """
        keys = [self._key(exchange) for exchange in exchanges]
        new = {k: e for k, e in zip(keys, exchanges, strict=True) if k not in self._verdicts}
        failed: set[bytes] = set()
        with counting(len(exchanges)):
            checked = self._kept_verdicts(new) if new else []
        for key, verdict in zip(new, checked, strict=True):
            if isinstance(verdict, ScorerError):
                failed.add(key)
            else:
                self._verdicts[key] = verdict
        # A failed text has no verdict in the cache.
        verdicts = [self._verdicts.get(key) for key in keys]
        for key in list(islice(self._verdicts, max(0, len(self._verdicts) - MAX_VERDICTS))):
            del self._verdicts[key]
        return Ratings(
            torch.tensor([math.nan if v is None else v for v in verdicts], dtype=torch.float32),
            torch.tensor([key in failed for key in keys], dtype=torch.bool),
        )

    def verdicts(self) -> dict[str, Any]:
        """Return all cached verdicts, including those of nested scorers, for a checkpoint.

        A model's last digits depend on the composition of batches, so a resumed run must not rate
        a text again.
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
        """Restore the result of `verdicts`, unless the scorer's code has changed since."""
        if state["code"] != self._code():
            logger.warning(
                "the code of the scorer %r has changed since the checkpoint; all texts are rated "
                "again",
                self._name,
            )
            return
        keys: list[bytes] = [row.tobytes() for row in state["keys"].numpy()]
        scores: list[float] = state["scores"].tolist()
        self._verdicts = {
            key: None if math.isnan(score) else score
            for key, score in zip(keys, scores, strict=True)
        }
        for scorer, nested_state in zip(self.nested_scorers, state["nested"], strict=True):
            scorer.load_verdicts(nested_state)

    def _code(self) -> list[str]:
        """Return digests of the loaded files that compute scores, except those of this package."""
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
        read: Any = exchange.text
        if self.reads_history:
            history = [
                [turn.role, turn.text, *([turn.calls] if turn.calls else [])]
                for turn in exchange.history
            ]
            calls = [exchange.calls] if exchange.calls else []
            read = [exchange.text, history, exchange.role, exchange.columns, *calls]
        if self.reads_reasoning and exchange.reasoning is not None:
            read = [read, {"reasoning": exchange.reasoning}]
        return hashlib.blake2b(json.dumps(read).encode(), digest_size=KEY_BYTES).digest()

    def _kept_verdicts(self, exchanges: Mapping[bytes, Exchange]) -> list[Verdict]:
        """Return checked verdicts of exchanges by key, in a resumed run those of before."""
        texts = list(exchanges.values())
        if self.parameters.on_failure != "skip":
            # A time limit ends the run, and changes no verdict.
            return self._checked_verdicts(texts)
        keys = [key.hex() for key in exchanges]
        kept = kept_outcome(
            "scorer",
            [self._name, repr(self.parameters), self._code(), keys],
            lambda: [_to_plain(verdict) for verdict in self._checked_verdicts(texts)],
        )
        return [_from_plain(verdict) for verdict in kept]

    def _checked_verdicts(self, exchanges: list[Exchange]) -> list[Verdict]:
        """Return checked verdicts; raise a failure, or retry it once and return it as an error."""
        can_skip = self.parameters.on_failure == "skip"
        try:
            verdicts = self._call_hook(exchanges)
        except ScorerError as error:
            if not can_skip:
                raise
            can_retry = not isinstance(error, ScorerTimeoutError)
            retried = dict.fromkeys(range(len(exchanges)), error) if can_retry else {}
            verdicts = [error] * len(exchanges)
        else:
            faults = {
                number: fault
                for number, (exchange, verdict) in enumerate(zip(exchanges, verdicts, strict=True))
                if (fault := self._fault(exchange, verdict)) is not None
            }
            if faults and not can_skip:
                raise next(iter(faults.values()))
            retried = {n: e for n, e in faults.items() if not isinstance(verdicts[n], ScorerError)}
            verdicts = [faults.get(number, verdict) for number, verdict in enumerate(verdicts)]
        if len(exchanges) > 1:
            for number in retried:
                exchange = exchanges[number]
                try:
                    (verdict,) = self._call_hook([exchange])
                    verdicts[number] = self._fault(exchange, verdict) or verdict
                except ScorerError as error:
                    verdicts[number] = error
        errors = [verdict for verdict in verdicts if isinstance(verdict, ScorerError)]
        if errors:
            logger.warning(
                "the scorer %r failed for %d of %d texts, which count as errors; the first: %s",
                self._name,
                len(errors),
                len(exchanges),
                errors[0],
            )
        return verdicts

    def _call_hook(self, exchanges: list[Exchange]) -> list[Verdict]:
        """Call the hook and return one verdict per exchange."""
        limit = self.parameters.timeout_seconds
        try:
            with time_limit(limit, f"the scorer {self._name!r}"):
                verdicts: list[Verdict] = [
                    value if value is None or isinstance(value, ScorerError) else float(value)
                    for value in self._score_exchanges(exchanges)
                ]
        except TimeLimitExceeded as error:
            raise ScorerTimeoutError(
                f"the scorer {self._name!r} exceeded timeout_seconds={limit:g} on "
                f"{counted(len(exchanges), 'text')}. Fix it or raise timeout_seconds, then "
                "resume the run."
            ) from error
        except NipAstraError:
            raise
        except Exception as error:
            raise self._error_of(len(exchanges), error) from error
        if len(verdicts) != len(exchanges):
            raise ScorerError(
                f"the scorer {self._name!r} returned {counted(len(verdicts), 'score')} for "
                f"{counted(len(exchanges), 'text')}. Return one score per text, in order."
            )
        return verdicts

    def _error_of(self, num_texts: int, error: Exception) -> ScorerError:
        return ScorerError(
            f"the scorer {self._name!r} failed on {counted(num_texts, 'text')}: "
            f"{describe_error(error)}. Fix the scorer, then resume the run."
        )

    def _fault(self, exchange: Exchange, verdict: Verdict) -> ScorerError | None:
        """Return the error of an invalid verdict; None for a score or no verdict."""
        if verdict is None or isinstance(verdict, ScorerError):
            return verdict
        if 0.0 <= verdict <= 1.0:  # false for NaN
            return None
        return ScorerError(
            f"the scorer {self._name!r} returned {verdict} for the text "
            f"{exchange.text[:60]!r}. Return a number from 0 to 1, or None for no verdict; then "
            "resume the run."
        )


def _to_plain(verdict: Verdict) -> float | str | None:
    """Return a verdict as a value of JSON; an error as its message."""
    return str(verdict) if isinstance(verdict, ScorerError) else verdict


def _from_plain(kept: float | str | None) -> Verdict:
    return ScorerError(kept) if isinstance(kept, str) else kept


def open_services(
    scorers: Iterable[Scorer], settings: ExperimentSettings
) -> dict[str, RetryingChatModel]:
    """Set the budgets of all scorers' chat models; return the models by distinct names."""
    models: dict[str, RetryingChatModel] = {}
    for scorer in dict.fromkeys(scorers):
        for name, model in scorer.open_services(settings).items():
            number, free = 2, name
            while free in models:
                free, number = f"{name} {number}", number + 1
            models[free] = model
    return models


SCORERS: ComponentRegistry[type[Scorer]] = ComponentRegistry("scorer")


def register_scorer(name: str) -> Callable[[type[Scorer]], type[Scorer]]:
    """Register a `Scorer` subclass under its `_type` in parameter files; a decorator."""
    return SCORERS.register(name)


def build_scorer(parameters: Any, *, device: torch.device, scenario_dir: Path | None) -> Scorer:
    """Build the scorer that the parameters describe."""
    return SCORERS.get(parameters.type_name)(parameters, device=device, scenario_dir=scenario_dir)


ScorerParameters = polymorphic(SCORERS.get, Scorer.Parameters)
# Not the registry's own method, which would put every kind into the JSON Schema of a part: this one
# is among them, and its schema would have no end.
PartParameters = polymorphic(lambda name: SCORERS.get(name), Scorer.Parameters)


class WeightedPart(SubParameters):
    """A scorer and its weight."""

    scorer: PartParameters  # type: ignore[valid-type]
    """The scorer."""
    weight: float = Field(default=1.0, gt=0)
    """Weight in the mean."""


@register_scorer(ScorerType.WEIGHTED)
class WeightedScorer(Scorer):
    """The weighted mean of scorers, `sum(w_k * s_k) / sum(w_k)`, in [0, 1].

    If one part gives no verdict, there is none, because a mean over the others would be a different
    measure. If one part fails, the whole scorer fails, and its `on_failure` applies.
    """

    class Parameters(Scorer.Parameters):
        """Scorers and their weights."""

        parts: dict[str, WeightedPart] = Field(min_length=1)
        """Scorers by name; messages use these names."""

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
        self._parts = {
            name: build_scorer(part.scorer, device=self.device, scenario_dir=self.scenario_dir)
            for name, part in parameters.parts.items()
        }
        self.reads_history = any(part.reads_history for part in self._parts.values())

    @property
    def nested_scorers(self) -> Sequence[Scorer]:
        return tuple(self._parts.values())

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> list[Verdict]:
        weights = {name: part.weight for name, part in self.parameters.parts.items()}
        ratings = {name: part.rate(exchanges) for name, part in self._parts.items()}
        scores = {name: rating.scores_N.tolist() for name, rating in ratings.items()}
        is_error = {name: rating.is_error_N.tolist() for name, rating in ratings.items()}
        verdicts: list[Verdict] = []
        for number, exchange in enumerate(exchanges):
            failed = [name for name in weights if is_error[name][number]]
            if failed:
                verdicts.append(
                    ScorerError(
                        f"part {failed[0]!r} of the scorer 'weighted' failed on the text "
                        f"{exchange.text[:60]!r}. Fix that part, or set on_failure to skip."
                    )
                )
                continue
            total = sum(weight * scores[name][number] for name, weight in weights.items())
            mean = total / sum(weights.values())
            # NaN here is a part without a verdict.
            verdicts.append(None if math.isnan(mean) else mean)
        return verdicts

"""Custom scorers, and registered scorers under ASTRA-RL's interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

import torch

from nip_astra.astra.core.aliases import HasAliases
from nip_astra.astra.core.common import ActionT, StateT
from nip_astra.scorers.base import SCORERS, Verdict, build_scorer
from nip_astra.scorers.base import Scorer as RegisteredKind
from nip_astra.utils.devices import resolve_device


class Scorer(HasAliases, ABC, Generic[StateT, ActionT]):
    """Rates texts for failure. Subclasses implement `score`, or its synonym `moderate`."""

    _aliases = (("score", "moderate"),)

    @abstractmethod
    def score(self, x: Sequence[StateT | ActionT]) -> Sequence[float | None]:
        """Return a score from 0 to 1 for each text (1: the worst failure); None for no verdict."""


Moderator = Scorer


class RegisteredScorer(Scorer[str, str]):
    """A scorer of the registry, for instance `RegisteredScorer("profanity")`.

    Parameters
    ----------
    name : str
        Its registered name; see `nip-astra list scorers`.
    device : str
        Where its model runs: "cpu", "cuda", "cuda:1", "auto".
    **parameters
        The scorer's own parameters, as in a parameter file.
    """

    def __init__(self, name: str, *, device: str | torch.device = "cpu", **parameters: Any) -> None:
        values = SCORERS.get(name).Parameters.from_dict(parameters)
        self.rater = build_scorer(values, device=resolve_device(device), scenario_dir=None)

    def score(self, x: Sequence[str]) -> list[float]:
        """Rate texts; NaN for no verdict."""
        return [float(score) for score in self.rater.score(list(x)).tolist()]


class _OwnScorer(RegisteredKind):
    """A user's scorer with the cache and the checks of registered ones."""

    def __init__(self, scorer: Any) -> None:
        super().__init__(self.Parameters(), device=torch.device("cpu"))
        self.scorer = scorer

    @property
    def _name(self) -> str:
        return type(self.scorer).__name__

    @property
    def modules(self) -> set[str]:
        return super().modules.union(cls.__module__ for cls in type(self.scorer).__mro__)

    def _score(self, texts: Sequence[str]) -> list[Verdict]:
        return [None if score is None else float(score) for score in self.scorer.score(list(texts))]


def rater_of(scorer: Any) -> RegisteredKind | None:
    """Return the object that rates a scorer's texts: a registered one itself, or a cache of it."""
    if scorer is None or isinstance(scorer, RegisteredKind):
        return scorer
    return scorer.rater if isinstance(scorer, RegisteredScorer) else _OwnScorer(scorer)

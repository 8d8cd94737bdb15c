"""Scorers of one's own, and those of the registry under ASTRA's interface."""

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
    """Rates texts for failure. A subclass gives `score`, or `moderate`, which is the same."""

    _aliases = (("score", "moderate"),)

    @abstractmethod
    def score(self, x: Sequence[StateT | ActionT]) -> Sequence[float | None]:
        """A number from 0 to 1 for each text, larger for a worse failure; None for no verdict."""


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
        """Rate texts; NaN where there is no verdict."""
        return [float(score) for score in self.rater.score(list(x)).tolist()]


class _OwnScorer(RegisteredKind):
    """A scorer of the user's own the cache and the checks of the registered ones."""

    def __init__(self, scorer: Any) -> None:
        super().__init__(self.Parameters(), device=torch.device("cpu"))
        self.scorer = scorer

    def _score(self, texts: Sequence[str]) -> list[Verdict]:
        return [None if score is None else float(score) for score in self.scorer.score(list(texts))]


def rater_of(scorer: Any) -> RegisteredKind | None:
    """What rates texts for a scorer: a registered one itself, another's behind a cache."""
    if scorer is None or isinstance(scorer, RegisteredKind):
        return scorer
    return scorer.rater if isinstance(scorer, RegisteredScorer) else _OwnScorer(scorer)

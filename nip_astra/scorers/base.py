"""What a scorer is: texts in, one number in [0, 1] each out; higher is a worse failure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nip_astra.errors import NipAstraError, ScorerError
from nip_astra.parameters.parameters_base import PolymorphicParameters


class Scorer(ABC):
    """Rate texts. A subclass implements `_score`; caching and checks are done here.

    Each distinct text is rated once in the life of the scorer.
    """

    class Parameters(PolymorphicParameters):
        """Parameters of the scorer; a subclass adds its own."""

        type_name: ClassVar[str] = ""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        self.parameters = parameters
        self.device = device
        self.scenario_dir = scenario_dir
        self._scores: dict[str, float] = {}

    @abstractmethod
    def _score(self, texts: Sequence[str]) -> Sequence[float]:
        """Give one finite number in [0, 1] for each text; the texts are distinct."""

    def score(self, texts: Sequence[str]) -> Tensor:
        """Rate texts, float32 `[len(texts)]` on the CPU.

        Raises
        ------
        ScorerError
            When the scorer fails, returns the wrong number of scores, or a score that is no
            number in [0, 1]. A failed score never counts as 0.
        """
        new = [text for text in dict.fromkeys(texts) if text not in self._scores]
        if new:
            self._scores.update(zip(new, self._checked(new), strict=True))
        return torch.tensor([self._scores[text] for text in texts], dtype=torch.float32)

    def _checked(self, texts: list[str]) -> list[float]:
        name = self.parameters.type_name or type(self).__name__
        try:
            scores = [float(score) for score in self._score(texts)]
        except NipAstraError:
            raise
        except Exception as error:
            raise ScorerError(
                f"the scorer {name!r} was asked to rate {len(texts)} texts and failed: "
                f"{type(error).__name__}: {error}. Mend the scorer; the run can be resumed from "
                "its last checkpoint."
            ) from error
        if len(scores) != len(texts):
            raise ScorerError(
                f"the scorer {name!r} was asked to rate {len(texts)} texts and gave "
                f"{len(scores)} scores. It must give one score a text, in order."
            )
        for text, score in zip(texts, scores, strict=True):
            if not (math.isfinite(score) and 0.0 <= score <= 1.0):
                raise ScorerError(
                    f"the scorer {name!r} gave {score} for the text {text[:60]!r}. A score is a "
                    "number from 0 to 1; mend the scorer, then resume the run."
                )
        return scores

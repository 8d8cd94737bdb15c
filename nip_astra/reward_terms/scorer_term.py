"""A scorer's score of the probe."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nip_astra.parameters.parameters_base import polymorphic
from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm, register_reward_term
from nip_astra.rollouts.prompts import columns_of
from nip_astra.scorers.base import SCORERS, Exchange, Scorer, build_scorer

logger = logging.getLogger(__name__)

ScorerParameters = polymorphic(SCORERS.get, Scorer.Parameters)


@register_reward_term(RewardTermType.SCORER_TERM)
class ScorerTerm(RewardTerm):
    """A scorer's score of the probe, 0 to 1; a negative weight makes it a penalty.

    The scorer reads the probe alone, with the role "user". A probe without a verdict gets the mean
    of the rollout's other probes, which is neutral; without any verdict all values are 0. If the
    scorer fails, its `on_failure` applies.
    """

    class Parameters(RewardTerm.Parameters):
        """The scorer."""

        scorer: ScorerParameters  # type: ignore[valid-type]
        """Scorer of the probes; it may differ from the scorer of responses."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        self._scorer = build_scorer(parameters.scorer, device=device, scenario_dir=scenario_dir)
        self.scorers = (self._scorer,)

    def state(self) -> dict[str, Any]:
        return {"verdicts": self._scorer.verdicts()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._scorer.load_verdicts(state["verdicts"])

    def _values(self, nodes: RatedProbes) -> Tensor:
        exchanges = [
            Exchange(probe, role="user", columns=columns_of(prompt))
            for probe, prompt in zip(nodes.probes, nodes.prompts, strict=True)
        ]
        scores_N = self._scorer.rate(exchanges).scores_N
        is_missing_N = scores_N.isnan()
        num_missing = int(is_missing_N.sum())
        if num_missing:
            logger.warning(
                "reward term 'scorer_term': no verdict for %d of %d probes, which get the mean of "
                "the others",
                num_missing,
                nodes.num_nodes,
            )
        mean = scores_N.nanmean().nan_to_num(0.0)
        return torch.where(is_missing_N, mean, scores_N)

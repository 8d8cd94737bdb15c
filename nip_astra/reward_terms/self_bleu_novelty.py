"""Novelty by words: a probe is worth less, the more of its n-grams were said before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm
from nip_astra.reward_terms.history import NoveltyParameters, ProbeHistory
from nip_astra.reward_terms.registry import register_reward_term
from nip_astra.utils.diversity import BleuReferences


@register_reward_term(RewardTermType.SELF_BLEU_NOVELTY)
class SelfBleuNovelty(RewardTerm):
    """1 - BLEU against everything found so far (curiosity-driven red teaming, arXiv:2402.19464).

    BLEU is the mean of BLEU-n over `orders`, with all distinct probes of earlier rollouts as its
    references; settings in `nip_astra.utils.diversity`. From 0 (said before, word for word) to 1
    (no word in common, or nothing was found yet). Probes of one rollout do not know of each other:
    each is compared with what was found before it. A probe without text has novelty 0.
    """

    class Parameters(NoveltyParameters):
        """Which n-grams count."""

        orders: list[Annotated[int, Field(ge=1, le=8)]] = Field(default=[3, 4, 5], min_length=1)
        """The n of each BLEU-n of which the mean is taken. Larger only sees long copies; 1 counts
        words alone."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        self._history = ProbeHistory(parameters.max_history)
        self._references = BleuReferences(max_order=max(parameters.orders))

    def _values(self, nodes: RatedProbes) -> Tensor:
        novelty_N = 1.0 - self._references.bleu(nodes.probes, orders=self.parameters.orders)
        return novelty_N.masked_fill(nodes.is_empty, 0.0)

    def observe(self, nodes: RatedProbes) -> None:
        kept = self.parameters.remembered(nodes)
        change = self._history.remember([nodes.probes[node] for node in kept])
        self._references.add(change.added)
        self._references.remove(change.forgotten)

    def state(self) -> dict[str, Any]:
        return self._history.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._history.load_state(state)
        self._references = BleuReferences(max_order=max(self.parameters.orders))
        self._references.add(self._history.probes)

"""Rarity of words: a probe is worth more, the rarer its rarest word.

Shape suffixes: `N` node, `G` n-gram.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm, register_reward_term
from nip_astra.utils.ngrams import KeyCounts, Ngrams, ngrams, word_sequences


@register_reward_term(RewardTermType.WORD_RARITY)
class WordRarity(RewardTerm):
    """Rarity of a probe's rarest word in earlier probes, 0 to 1.

    With N probes of earlier rollouts, n of which contain the word, it is
    `1 - log(1 + n) / log(1 + N)` for the word with the smallest n: count-based exploration
    (arXiv:1606.01868) with words as states. The value of a rare word decays only with log N. It
    rewards exploration before the first failure. 1 with an empty history. Probes of the same
    rollout are not compared. A probe without a word has rarity 0.

    Words are those of `nip_astra.utils.ngrams.word_tokens`. All word counts are kept.
    """

    class Parameters(RewardTerm.Parameters):
        """Unit of counting."""

        order: int = Field(default=1, ge=1, le=8)
        """Consecutive words counted as one n-gram. Larger makes more probes rare, because most of
        their n-grams are new; a probe of fewer words has rarity 0."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        self._num_probes = 0
        self._counts = KeyCounts()

    def _values(self, nodes: RatedProbes) -> Tensor:
        grams = self._ngrams(nodes)
        # At least 1, so that log(1 + N) is not 0 at first.
        whole = math.log1p(max(self._num_probes, 1))
        rarity_G = 1.0 - np.log1p(self._counts.of(grams.keys_G)) / whole
        rarity_N = np.zeros(nodes.num_nodes)
        np.maximum.at(rarity_N, grams.owner_G, rarity_G)
        return torch.from_numpy(rarity_N)

    def observe(self, nodes: RatedProbes) -> None:
        grams = self._ngrams(nodes)
        # A word counts once in a probe.
        once = np.unique(np.stack([grams.owner_G.astype(np.uint64), grams.keys_G]), axis=1)
        self._counts.add(once[1])
        self._num_probes += int((~nodes.is_empty).sum())

    def _ngrams(self, nodes: RatedProbes) -> Ngrams:
        return next(ngrams(word_sequences(nodes.probes), [self.parameters.order]))

    def state(self) -> dict[str, Any]:
        keys, counts = self._counts.arrays()
        # Tensors know no uint64 arithmetic, and checkpoints need none.
        return {
            "num_probes": self._num_probes,
            "keys": torch.from_numpy(keys.view(np.int64).copy()),
            "counts": torch.from_numpy(counts.copy()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._num_probes = state["num_probes"]
        self._counts = KeyCounts.of_arrays(
            state["keys"].numpy().view(np.uint64), state["counts"].numpy()
        )

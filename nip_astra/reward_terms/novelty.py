"""Novelty: a probe is worth less, the more similar it is to earlier ones, by embeddings or n-grams.

Shape suffixes: `N` node, `K` stored node, `H` probe of the history, `P` part of the nodes, `G`
n-gram, `X` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from nip_astra.language_models.embeddings import EmbedderParameters, build_embedder
from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm, register_reward_term
from nip_astra.utils.diversity import BleuReferences
from nip_astra.utils.ngrams import KeyCounts, Ngrams, ngrams, word_sequences


class NoveltyParameters(RewardTerm.Parameters):
    """The history of probes that novelty is measured against."""

    max_history: int = Field(default=10_000, ge=1)
    """Maximum number of distinct probes in the history; beyond it the least recent are dropped.
    Larger keeps the attacker from returning to earlier probes."""
    min_score: float | None = Field(default=None, ge=0, le=1)
    """Only probes whose response scores at least this are stored; null stores all. With it a
    failure counts as new until a similar failure is stored, however common its words."""

    def remembered(self, nodes: RatedProbes) -> list[int]:
        """Return the indices of the nodes whose probes are stored."""
        if self.min_score is None:
            return list(range(nodes.num_nodes))
        stored: list[int] = (nodes.response_score_N >= self.min_score).nonzero().flatten().tolist()
        return stored


class HistoryChange(NamedTuple):
    """Distinct probes added to and dropped from a history; disjoint."""

    added: list[str]
    forgotten: list[str]


class ProbeHistory:
    """Distinct probes by recency, with their counts.

    A repeated probe becomes the most recent. Beyond `max_size` the oldest are dropped with their
    counts. Probes without text are not stored.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, probe: str) -> bool:
        return probe in self._counts

    @property
    def probes(self) -> list[str]:
        """The probes, most recent last."""
        return list(self._counts)

    @property
    def counts(self) -> list[int]:
        """Occurrences of each probe since it was added."""
        return list(self._counts.values())

    def remember(self, probes: Sequence[str]) -> HistoryChange:
        """Add probes in order; return the change of the set."""
        before = set(self._counts)
        for probe in probes:
            if probe.strip():
                self._counts[probe] = self._counts.pop(probe, 0) + 1
        forgotten = list(self._counts)[: max(0, len(self._counts) - self.max_size)]
        for probe in forgotten:
            del self._counts[probe]
        return HistoryChange(
            [probe for probe in dict.fromkeys(probes) if probe in self and probe not in before],
            [probe for probe in forgotten if probe in before],
        )

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"probes": self.probes, "counts": self.counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; a smaller `max_size` drops the oldest."""
        self._counts = dict(zip(state["probes"], state["counts"], strict=True))
        self.remember([])


class EmbeddedTerm(RewardTerm):
    """A term that compares probes with a history of embedded probes.

    Its `Parameters` are `NoveltyParameters` with an `embedder`.
    """

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
        self._embedder = build_embedder(
            parameters.embedder, device=self.device, scenario_dir=self.scenario_dir
        )
        self._history = ProbeHistory(parameters.max_history)
        self._vectors_HX = torch.zeros(0, self._embedder.num_dimensions)
        self._latest: tuple[list[str], Tensor] | None = None

    def _counts(self) -> Tensor:
        """Return the number of occurrences of each stored probe, float32."""
        return torch.tensor(self._history.counts, dtype=torch.float32)

    def _cosines(self, probes: Sequence[str]) -> Tensor:
        """Return the cosine of each probe to each stored one, float32."""
        return self._embedded(probes) @ self._vectors_HX.T

    def _embedded(self, probes: Sequence[str]) -> Tensor:
        """Return embeddings of a rollout, computed once for its values and its storage."""
        if self._latest is None or self._latest[0] != list(probes):
            self._latest = list(probes), self._embedder.compute(probes)
        return self._latest[1]

    def observe(self, nodes: RatedProbes) -> None:
        remembered_nodes = self.parameters.remembered(nodes)
        vectors_HX = torch.cat([self._vectors_HX, self._embedded(nodes.probes)[remembered_nodes]])
        stored = [nodes.probes[node] for node in remembered_nodes]
        row_of: dict[str, int] = {}
        for row, probe in enumerate([*self._history.probes, *stored]):
            row_of.setdefault(probe, row)
        self._history.remember(stored)
        # In the history's order, which a checkpoint restores, so that sums are bit-identical.
        self._vectors_HX = vectors_HX[[row_of[probe] for probe in self._history.probes]]
        self._latest = None

    def state(self) -> dict[str, Any]:
        return self._history.state() | {"vectors": self._vectors_HX}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._history.load_state(state)
        vectors_HX: Tensor = state["vectors"]
        self._vectors_HX = vectors_HX[len(vectors_HX) - len(self._history) :].clone()
        self._latest = None


@register_reward_term(RewardTermType.COSINE_NOVELTY)
class CosineNovelty(EmbeddedTerm):
    """1 - cosine to earlier probes (curiosity-driven red teaming, arXiv:2402.19464).

    From 0 to 1; a negative cosine counts as 0. 1 with an empty history. Probes of the same rollout
    are not compared. A probe without text has novelty 0.
    """

    class Parameters(NoveltyParameters):
        """Similarity measure."""

        embedder: EmbedderParameters = EmbedderParameters()
        """Embeds the probes."""
        reduction: Literal["max", "mean"] = "max"
        """max: cosine to the nearest probe, so that a repeated probe has novelty 0. mean: mean
        cosine over the history, counted with repetition as in the paper's code, so that a repeated
        probe still has some novelty."""

    def _values(self, nodes: RatedProbes) -> Tensor:
        if len(self._history) == 0:
            return (~nodes.is_empty).float()
        cosines_NH = self._cosines(nodes.probes)
        if self.parameters.reduction == "max":
            cosine_N = cosines_NH.amax(dim=1)
            # Exactly 1 for repeated probes, despite rounding.
            is_known_N = torch.tensor([probe in self._history for probe in nodes.probes])
            cosine_N = cosine_N.masked_fill(is_known_N, 1.0)
        else:
            counts_H = self._counts()
            cosine_N = cosines_NH @ counts_H / counts_H.sum()
        return (1.0 - cosine_N).clamp(0.0, 1.0).masked_fill(nodes.is_empty, 0.0)


@register_reward_term(RewardTermType.SELF_BLEU_NOVELTY)
class SelfBleuNovelty(RewardTerm):
    """1 - BLEU against earlier probes (curiosity-driven red teaming, arXiv:2402.19464).

    BLEU is the mean of BLEU-n over `orders`, with all distinct probes of earlier rollouts as
    references; settings in `nip_astra.utils.diversity`. From 0 (an exact repetition) to 1 (no
    common word, or an empty history). Probes of the same rollout are not compared. A probe without
    text has novelty 0.
    """

    class Parameters(NoveltyParameters):
        """N-grams of BLEU."""

        orders: list[Annotated[int, Field(ge=1, le=8)]] = Field(default=[3, 4, 5], min_length=1)
        """Orders n of the averaged BLEU-n. Larger detects only long copies; 1 compares single
        words."""

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
        self._history = ProbeHistory(parameters.max_history)
        self._references = BleuReferences(max_order=max(parameters.orders))

    def _values(self, nodes: RatedProbes) -> Tensor:
        novelty_N = 1.0 - self._references.bleu(nodes.probes, orders=self.parameters.orders)
        return novelty_N.masked_fill(nodes.is_empty, 0.0)

    def observe(self, nodes: RatedProbes) -> None:
        remembered_nodes = self.parameters.remembered(nodes)
        change = self._history.remember([nodes.probes[node] for node in remembered_nodes])
        self._references.add(change.added)
        self._references.remove(change.forgotten)

    def state(self) -> dict[str, Any]:
        return self._history.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._history.load_state(state)
        self._references = BleuReferences(max_order=max(self.parameters.orders))
        self._references.add(self._history.probes)


# ---- rarity of failures: a failure is worth less, the more similar failures there are


TOLERANCE = 1e-5
"""Tolerance of cosines for rounding."""
PART_SIZE = 1024
"""Nodes per block of the cosine matrix."""


class FailureParameters(RewardTerm.Parameters):
    """Similarity of failures."""

    scaled_by_score: bool = True
    """Whether the value is multiplied by the response's score (0 without a verdict). False also
    rewards probes unlike these failures if the target does not fail."""
    min_score: float = Field(default=0.5, ge=0, le=1)
    """A probe counts as a failure if its response scores at least this."""
    similarity: float = Field(default=0.5, gt=0, le=1)
    """Minimum cosine of similar failures. Larger makes more and smaller kinds; at 1, any
    difference in spelling makes a new kind."""
    embedder: EmbedderParameters = EmbedderParameters()
    """Embeds the probes."""


@register_reward_term(RewardTermType.FAILURE_RARITY)
class FailureRarity(EmbeddedTerm):
    """Rarity of similar failures in earlier rollouts, 0 to 1.

    With N failures in earlier rollouts (counted with repetition), n of them similar (by cosine),
    the value depends on `shape`

    - `log`: `1 - log(1 + n) / log(1 + N)`, 1 before the first failure;
    - `inverse_root`: `1 / sqrt(1 + n)`, the bonus of count-based exploration (arXiv:1606.01868).

    By default it is multiplied by the response's score, so that it ranks failures: without a
    failure, novelty earns nothing. Probes of the same rollout are not compared. A probe without
    text has rarity 0.
    """

    class Parameters(FailureParameters, NoveltyParameters):
        """Similarity of failures, and how fast the reward of a repeated kind decays."""

        shape: Literal["log", "inverse_root"] = "log"
        """log: by the share of similar failures, on a log scale, so that the pressure towards rare
        kinds persists. inverse_root: by their number alone, so that it fades as all kinds become
        frequent."""

    def _values(self, nodes: RatedProbes) -> Tensor:
        cosines_NH = self._cosines(nodes.probes)
        is_similar_NH = cosines_NH >= self.parameters.similarity - TOLERANCE
        counts_H = self._counts().double()
        num_similar_N = is_similar_NH.double() @ counts_H
        rarity_N: Tensor
        if self.parameters.shape == "inverse_root":
            rarity_N = (1.0 + num_similar_N).rsqrt()
        else:
            # At least 1, so that log(1 + N) is not 0 before the first failure.
            num_failures = max(1.0, float(counts_H.sum()))
            rarity_N = 1.0 - num_similar_N.log1p() / math.log1p(num_failures)
        return rarity_N.masked_fill(nodes.is_empty, 0.0)


@register_reward_term(RewardTermType.FAILURE_SHARING)
class FailureSharing(RewardTerm):
    """Rarity of similar failures in the same rollout, 0 to 1.

    With F other failures in the same rollout, n of them similar (by cosine), it is
    `1 - log(1 + n) / log(1 + F)`: 1 if none is similar, 0 if all are. This is fitness sharing,
    which keeps a population on several optima (Goldberg and Richardson 1987). `failure_rarity`
    compares with earlier iterations instead, so an attacker may swing from kind to kind.

    By default it is multiplied by the response's score, so that it ranks failures. A probe without
    text has value 0. The term is stateless.
    """

    class Parameters(FailureParameters):
        """Similarity of failures."""

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
        self._embedder = build_embedder(
            parameters.embedder, device=self.device, scenario_dir=self.scenario_dir
        )

    def _values(self, nodes: RatedProbes) -> Tensor:
        is_failure_N = (nodes.response_score_N >= self.parameters.min_score) & ~nodes.is_empty
        vectors_NX = self._embedder.compute(nodes.probes)
        failures_FX = vectors_NX[is_failure_N]
        min_cosine = self.parameters.similarity - TOLERANCE
        num_similar_N = torch.cat(
            [
                (vectors_PX @ failures_FX.T >= min_cosine).sum(dim=1)
                for vectors_PX in torch.split(vectors_NX, PART_SIZE)
            ]
        )
        # Without the failure itself.
        num_similar_N = (num_similar_N - is_failure_N.long()).clamp(min=0)
        num_others_N = is_failure_N.sum() - is_failure_N.long()
        # At least 1, so that log(1 + F) is not 0.
        sharing_N: Tensor = (
            1.0 - num_similar_N.double().log1p() / num_others_N.clamp(min=1).double().log1p()
        )
        return sharing_N.masked_fill(nodes.is_empty, 0.0)


# ---- rarity of words: a probe is worth more, the rarer its rarest word


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

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
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

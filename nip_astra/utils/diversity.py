"""Diversity of texts: self-BLEU, distinct n-grams, cosine distance, Vendi score.

BLEU (Papineni et al. 2002) has these settings, to be reported with it:

- tokens of `nip_astra.utils.ngrams.word_tokens`: case-folded, each punctuation mark by itself;
- the equally weighted geometric mean of the clipped precisions of orders 1 to n;
- an order without a match counts as 0.1 matches (`SMOOTHING`, method 1 of Chen and Cherry 2014);
  without a common token the score is 0;
- a text of fewer than n tokens is compared up to its length, so that a short text that is among the
  references scores 1;
- the brevity penalty uses the reference of the nearest length, the shorter of two;
- a text without tokens scores 1 if a reference has none either, else 0.

For texts of at least n tokens this equals NLTK's `sentence_bleu` with
`SmoothingFunction().method1`.

Shape suffixes: `N` text, `L` distinct length of references, `O` order, `X` embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nip_astra.errors import DataError
from nip_astra.utils.ngrams import (
    KeyCounts,
    Keys,
    Sequences,
    ngrams,
    occurrence_keys,
    word_sequences,
)

SMOOTHING = 0.1
"""Number of matches assumed for an order without a match."""

Array = npt.NDArray[np.float64]


class BleuReferences:
    """A changing set of references for BLEU.

    The time of `bleu` grows with its texts, not with the references.
    """

    def __init__(self, *, max_order: int) -> None:
        self.max_order = max_order
        self._occurrences = KeyCounts()
        self._lengths: Counter[int] = Counter()

    @property
    def num_references(self) -> int:
        """Number of references."""
        return self._lengths.total()

    def add(self, texts: Sequence[str]) -> None:
        """Add references; repeated ones count repeatedly."""
        sequences = word_sequences(texts)
        self._occurrences.add(np.concatenate(self._keys(sequences)))
        self._lengths.update(sequences.lengths.tolist())

    def remove(self, texts: Sequence[str]) -> None:
        """Remove references added before."""
        sequences = word_sequences(texts)
        self._occurrences.remove(np.concatenate(self._keys(sequences)))
        self._lengths = +(self._lengths - Counter(sequences.lengths.tolist()))

    def bleu(
        self, texts: Sequence[str], *, orders: Sequence[int], are_included: bool = False
    ) -> Tensor:
        """Compute each text's BLEU against the references, float64 `[N]` in [0, 1], mean of orders.

        Parameters
        ----------
        orders : Sequence[int]
            The n of each averaged BLEU-n; at most `max_order`.
        are_included : bool
            Whether each text is one of the references, and is compared with the others only.
        """
        # A text that is itself a reference matches itself once.
        min_count = 2 if are_included else 1
        sequences = word_sequences(texts)
        scores = np.zeros(len(texts))
        if not len(texts) or self.num_references < min_count:
            return torch.from_numpy(scores)
        precisions_NO = self._log_precisions(sequences, max(orders), min_count)
        brevity_N = self._brevity(sequences.lengths, are_included)
        lengths = sequences.lengths
        # Orders beyond a text's length are never read.
        sums_NO = np.cumsum(np.nan_to_num(precisions_NO, neginf=-np.inf), axis=1)
        rows = np.arange(len(texts))
        for order in orders:
            used_N = np.clip(lengths, 1, order)
            scores += np.exp(sums_NO[rows, used_N - 1] / used_N)
        scores = scores / len(orders) * brevity_N
        is_blank = lengths == 0
        scores[is_blank] = float(self._lengths[0] >= min_count)
        return torch.from_numpy(scores)

    def _keys(self, sequences: Sequences) -> list[Keys]:
        orders = range(1, self.max_order + 1)
        return [occurrence_keys(grams) for grams in ngrams(sequences, orders)]

    def _log_precisions(self, sequences: Sequences, max_order: int, min_count: int) -> Array:
        """Return the log-precision of each order, `[N, O]`; NaN if a text has no n-gram."""
        num_texts = len(sequences.lengths)
        log_precisions_NO = np.full((num_texts, max_order), np.nan)
        for order, grams in enumerate(ngrams(sequences, range(1, max_order + 1)), start=1):
            is_match = self._occurrences.of(occurrence_keys(grams)) >= min_count
            matches = np.bincount(grams.owner_G, weights=is_match, minlength=num_texts)
            totals = sequences.lengths - order + 1
            has_any = totals > 0
            # A text without a common word has no BLEU; longer n-grams are smoothed.
            count_of_none = 0.0 if order == 1 else SMOOTHING
            counts = np.where(matches > 0, matches, count_of_none)
            with np.errstate(divide="ignore"):
                log_precisions_NO[has_any, order - 1] = np.log(counts[has_any] / totals[has_any])
        return log_precisions_NO

    def _brevity(self, lengths_N: npt.NDArray[np.int64], are_included: bool) -> Array:
        known_L = np.array(sorted(self._lengths), dtype=np.int64)
        distance_NL = np.abs(lengths_N[:, None] - known_L).astype(np.float64)
        if are_included:
            is_only_L = np.array([self._lengths[length] == 1 for length in known_L.tolist()])
            distance_NL[(distance_NL == 0) & is_only_L] = np.inf
        # The first of equal distances, which is the shorter length.
        nearest_N = known_L[distance_NL.argmin(axis=1)]
        penalty_N: Array = np.exp(np.minimum(0.0, 1.0 - nearest_N / np.maximum(lengths_N, 1)))
        return penalty_N


def bleu_against(
    texts: Sequence[str], references: Sequence[str], *, orders: Sequence[int] = (4,)
) -> Tensor:
    """Compute each text's BLEU against all references, float64 `[N]` in [0, 1], mean over orders.

    0 without references. For repeated calls keep a `BleuReferences`.
    """
    bleu_references = BleuReferences(max_order=max(orders))
    bleu_references.add(references)
    return bleu_references.bleu(texts, orders=orders)


def self_bleu(
    texts: Sequence[str], *, max_order: int = 4, num_sampled: int | None = 500, seed: int = 0
) -> float:
    """Return the mean BLEU-`max_order` of each text against the others; larger is less varied.

    Of more than `num_sampled` texts, a sample without replacement counts. Self-BLEU grows with the
    number of texts: compare figures of equal numbers. Raises `DataError` with fewer than two.
    """
    _require_several(len(texts), "self-BLEU")
    if num_sampled is not None and len(texts) > num_sampled:
        _require_several(num_sampled, "self-BLEU")
        drawn = np.random.default_rng(seed).choice(len(texts), num_sampled, replace=False)
        texts = [texts[number] for number in sorted(drawn.tolist())]
    bleu_references = BleuReferences(max_order=max_order)
    bleu_references.add(texts)
    return float(bleu_references.bleu(texts, orders=[max_order], are_included=True).mean())


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Return the share of distinct n-grams among all n-grams of all texts (arXiv:1510.03055).

    0 if no text has n tokens. It falls with the amount of text: compare equal amounts.
    """
    (grams,) = ngrams(word_sequences(texts), [n])
    return len(np.unique(grams.keys_G)) / max(len(grams.keys_G), 1)


def mean_cosine_distance(embeddings: Tensor) -> float:
    """Return the mean of 1 - cosine over all pairs of rows `[N, X]` of nonzero norm: 0 to 2.

    Raises `DataError` with fewer than two rows.
    """
    num = len(embeddings)
    _require_several(num, "the mean cosine distance")
    units_NX = _unit_rows(embeddings)
    # The cosines of all pairs add up to |sum of rows|^2, N of them those of a row with itself.
    cosines = float(units_NX.sum(dim=0).square().sum() - units_NX.square().sum())
    return max(0.0, 1.0 - cosines / (num * (num - 1)))


def vendi_score(embeddings: Tensor) -> float:
    """Compute the effective number of different texts (arXiv:2210.02410, eq. 1), from 1 to N.

    The exponential of the entropy of the eigenvalues of K/N, where K holds the cosines of the rows
    `[N, X]` of nonzero norm. 0 for no rows.
    """
    num = len(embeddings)
    if num == 0:
        return 0.0
    units_NX = _unit_rows(embeddings)
    # X X^T and X^T X have the same eigenvalues but for zeros, which add nothing to the entropy.
    is_tall = num > units_NX.shape[1]
    gram = units_NX.T @ units_NX if is_tall else units_NX @ units_NX.T
    shares = torch.linalg.eigvalsh(gram / num).clamp(min=0.0)
    entropy = -torch.special.xlogy(shares, shares).sum()
    return float(entropy.exp())


def _unit_rows(embeddings: Tensor) -> Tensor:
    return torch.nn.functional.normalize(embeddings.detach().cpu().double(), dim=1)


def _require_several(count: int, figure: str) -> None:
    if count < 2:
        raise DataError(
            f"{figure} compares texts with each other, but there are {count}. Give at least two."
        )

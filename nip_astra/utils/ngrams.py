"""Words and n-grams of texts as 64-bit keys, which numpy counts without Python loops.

A key is a hash, the same in every process; a collision among a million has probability 3e-8.

Shape suffixes: `T` token of all texts end to end, `G` n-gram of all texts, `K` distinct key.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]

# Chinese and Japanese are written without spaces: each of their characters is a token.
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+|[^\w\s]")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def normalise(text: str) -> str:
    """Normalise a text: composed Unicode (NFC), case-folded, single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def word_tokens(text: str) -> list[str]:
    """Split a text into words, and single punctuation marks or other symbols.

    The text is normalised first. A word is a run of letters, digits and underscores; a Chinese
    character or Japanese kana is a token by itself.
    """
    return _TOKEN.findall(normalise(text))


class Sequences(NamedTuple):
    """Concatenated token keys of several texts."""

    keys_T: Keys
    """uint64, a key for each token."""
    owner_T: Integers
    """int64, the index of each token's text; ascending."""
    lengths: Integers
    """int64, number of tokens of each text."""


class Ngrams(NamedTuple):
    """All n-grams of one order: a key for each, and the index of its text, ascending."""

    keys_G: Keys
    owner_G: Integers


def word_sequences(texts: Sequence[str]) -> Sequences:
    """Return the keys of all word tokens."""
    tokens = [word_tokens(text) for text in texts]
    keys = np.fromiter((_token_key(t) for text in tokens for t in text), dtype=np.uint64)
    return _sequences(keys, [len(text) for text in tokens])


def character_sequences(texts: Sequence[str]) -> Sequences:
    """Return the code points of all characters, without normalisation."""
    # A lone surrogate is not a character, and models may still write one.
    raw = "".join(texts).encode("utf-32-le", "surrogatepass")
    return _sequences(np.frombuffer(raw, dtype="<u4").astype(np.uint64), [len(t) for t in texts])


def _sequences(keys_T: Keys, lengths: Sequence[int]) -> Sequences:
    counts = np.asarray(lengths, dtype=np.int64)
    return Sequences(keys_T, np.repeat(np.arange(len(counts)), counts), counts)


@lru_cache(maxsize=1 << 17)
def _token_key(token: str) -> int:
    raw = token.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def ngrams(sequences: Sequences, orders: Sequence[int]) -> Iterator[Ngrams]:
    """Yield the n-grams of each order, in the order of the texts; none spans two texts."""
    keys, owner = sequences.keys_T, sequences.owner_T
    hashes = _mixed(keys)
    for order in range(1, max(orders, default=0) + 1):
        if order > 1:
            hashes = _mixed(hashes[:-1] * _MULTIPLIER + keys[order - 1 :])
        if order in orders:
            is_whole = owner[: len(hashes)] == owner[order - 1 :]
            yield Ngrams(hashes[is_whole], owner[: len(hashes)][is_whole])
        if not len(hashes):
            hashes = keys[:1]  # no text is as long: every further order is empty as well


def occurrence_keys(grams: Ngrams) -> Keys:
    """Return a key for each occurrence: an n-gram and its number of earlier occurrences in its
    text.

    Clipped counts are then set intersections: c and d occurrences share min(c, d).
    """
    keys, owner = grams
    if not len(keys):
        return keys
    text_keys = _mixed(keys + owner.astype(np.uint64) * _MULTIPLIER)
    order = np.argsort(text_keys, kind="stable")
    is_first = np.ones(len(text_keys), dtype=bool)
    is_first[1:] = text_keys[order][1:] != text_keys[order][:-1]
    starts = np.flatnonzero(is_first)
    rank = np.empty(len(text_keys), dtype=np.uint64)
    group_sizes = np.diff(starts, append=len(text_keys))
    rank[order] = np.arange(len(text_keys)) - np.repeat(starts, group_sizes)
    return _mixed(keys + rank * _MULTIPLIER)


def _mixed(keys: Keys) -> Keys:
    """Mix the bits of keys, bijectively (the finaliser of splitmix64)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


class KeyCounts:
    """Counts of keys in a sorted array, for lookups of many keys at once."""

    def __init__(self) -> None:
        self._keys_K: Keys = np.empty(0, dtype=np.uint64)
        self._counts_K: Integers = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._keys_K)

    @classmethod
    def of_arrays(cls, keys_K: Keys, counts_K: Integers) -> KeyCounts:
        """Restore the result of `arrays`."""
        counts = cls()
        counts._keys_K, counts._counts_K = keys_K.copy(), counts_K.copy()
        return counts

    def arrays(self) -> tuple[Keys, Integers]:
        """Return the keys, ascending, and their counts."""
        return self._keys_K, self._counts_K

    def add(self, keys: Keys) -> None:
        """Increment the count of each key."""
        new, counts = np.unique(keys, return_counts=True)
        index, is_known = self._find(new)
        self._counts_K[index[is_known]] += counts[is_known]
        fresh = ~is_known
        self._keys_K = np.insert(self._keys_K, index[fresh], new[fresh])
        self._counts_K = np.insert(self._counts_K, index[fresh], counts[fresh])

    def remove(self, keys: Keys) -> None:
        """Undo an `add` of the same keys."""
        old, counts = np.unique(keys, return_counts=True)
        index, is_known = self._find(old)
        assert is_known.all(), "only added texts can be removed"
        self._counts_K[index] -= counts
        is_left = self._counts_K > 0
        self._keys_K, self._counts_K = self._keys_K[is_left], self._counts_K[is_left]

    def of(self, keys: Keys) -> Integers:
        """Return the count of each key; 0 for unknown ones."""
        index, is_known = self._find(keys)
        counts = np.zeros(len(keys), dtype=np.int64)
        counts[is_known] = self._counts_K[index[is_known]]
        return counts

    def _find(self, keys: Keys) -> tuple[Integers, npt.NDArray[np.bool_]]:
        index: Any = np.searchsorted(self._keys_K, keys)
        is_known = index < len(self._keys_K)
        is_known[is_known] = self._keys_K[index[is_known]] == keys[is_known]
        return index, is_known

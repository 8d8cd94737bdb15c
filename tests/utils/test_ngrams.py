"""Tokens match their definition, and keys identify n-grams, in every process."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from nip_astra.utils.ngrams import (
    KeyCounts,
    character_sequences,
    ngrams,
    normalise,
    occurrence_keys,
    word_sequences,
    word_tokens,
)

TEXTS = ["a b a b a", "", "a", "b a b", "c c c c"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Are you  SILLY?!", ["are", "you", "silly", "?", "!"]),
        ("don't", ["don", "'", "t"]),
        ("snake_case 42", ["snake_case", "42"]),
        ("Stra\u00dfe", ["strasse"]),
        ("cafe\u0301 caf\u00e9", ["caf\u00e9", "caf\u00e9"]),
        ("\u732b\u3068\u72ac cat\u732b", ["\u732b", "\u3068", "\u72ac", "cat", "\u732b"]),
        ("\U0001f642 ok", ["\U0001f642", "ok"]),
        (" \n\t ", []),
        ("\ud800", ["\ud800"]),
    ],
)
def test_tokens_are_words_and_single_symbols_without_case(text: str, tokens: list[str]) -> None:
    assert word_tokens(text) == tokens


def test_a_normalised_text_has_single_spaces_and_no_ends() -> None:
    assert normalise("  A\n\nb ") == "a b"


@pytest.mark.parametrize("orders", [[1], [2], [3, 5], [1, 2, 3, 4, 5], [9]])
def test_n_grams_are_those_of_each_text_and_equal_where_their_tokens_are(orders: list[int]) -> None:
    expected, result = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    names: dict[int, tuple[str, ...]] = {}
    for order, grams in zip(orders, ngrams(word_sequences(TEXTS), orders), strict=True):
        wanted = [
            (tuple(text.split()[i : i + order]), number)
            for number, text in enumerate(TEXTS)
            for i in range(len(text.split()) - order + 1)
        ]
        assert grams.owner_G.tolist() == [number for _, number in wanted]
        for key, (gram, _) in zip(grams.keys_G.tolist(), wanted, strict=True):
            assert names.setdefault(key, gram) == gram
        expected[order, len({gram for gram, _ in wanted})] += 1
        result[order, len(np.unique(grams.keys_G))] += 1
    assert result == expected


def test_occurrences_of_an_n_gram_are_counted_within_their_text() -> None:
    (grams,) = ngrams(word_sequences(["a a b", "a a a"]), [1])
    one, two, b, *others = occurrence_keys(grams).tolist()
    assert len({one, two, b}) == 3
    assert others[:2] == [one, two]
    assert others[2] not in (one, two, b)


def test_no_text_and_empty_texts_have_no_n_grams() -> None:
    for texts in ([], ["", " "]):
        for sequences in (word_sequences(texts), character_sequences([t.strip() for t in texts])):
            assert sequences.lengths.tolist() == [0] * len(texts)
            assert [len(g.keys_G) for g in ngrams(sequences, [1, 2, 7])] == [0, 0, 0]


def test_characters_are_code_points_also_beyond_the_first_plane() -> None:
    sequences = character_sequences(["a\U0001f642", "", "\ud800"])
    assert sequences.keys_T.tolist() == [97, 0x1F642, 0xD800]
    assert sequences.lengths.tolist() == [2, 0, 1]


def test_counts_are_those_of_a_counter_whatever_was_added_and_removed() -> None:
    rng = random.Random(0)
    counts, plain = KeyCounts(), Counter[int]()
    held: list[list[int]] = []
    for _ in range(200):
        if held and rng.random() < 0.4:
            batch = held.pop(rng.randrange(len(held)))
            counts.remove(np.array(batch, dtype=np.uint64))
            plain.subtract(batch)
        else:
            batch = [rng.randrange(50) for _ in range(rng.randrange(8))]
            counts.add(np.array(batch, dtype=np.uint64))
            plain.update(batch)
            held.append(batch)
        everything = np.arange(60, dtype=np.uint64)
        assert counts.of(everything).tolist() == [plain[key] for key in range(60)]
    assert len(counts) == len(+plain)


def test_a_key_is_that_of_any_other_process() -> None:
    keys = [g.keys_G.tolist() for g in ngrams(word_sequences(["you are silly"]), [1, 3])]
    assert keys == [
        [15337566132571787920, 10347251247616835478, 10283319519494726325],
        [6541342217536441385],
    ]

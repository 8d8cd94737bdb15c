"""Rarity of words by hand."""

from __future__ import annotations

import math

import pytest

from tests.reward_terms.rollouts import rollout, term_of


def test_the_rarest_word_decides() -> None:
    term = term_of("word_rarity")
    term.observe(rollout(["my cat sleeps", "my dog sleeps", "my cat really really runs", ""]))
    values = term.values(rollout(["my cat", "my", "the cat sleeps", "really my", "", " "]))
    # Three probes have words; "cat" is in two of them, "my" in three, "really" in one, "the" in
    # none.
    expected = [1 - math.log(n + 1) / math.log(4) for n in (2, 3, 0, 1)]
    assert values.tolist() == pytest.approx([*expected, 0.0, 0.0])


def test_case_and_punctuation_are_those_of_the_other_terms() -> None:
    term = term_of("word_rarity")
    term.observe(rollout(["Do you, really?"] * 8))
    assert term.values(rollout(["really , do YOU ?"])).tolist() == pytest.approx([0.0])


def test_words_in_a_row_count_as_one() -> None:
    term = term_of("word_rarity", order=2)
    term.observe(rollout(["my cat sleeps", "my cat runs", "my dog sleeps"]))
    values = term.values(rollout(["my cat", "cat sleeps", "dog runs", "my"])).tolist()
    expected = [1 - math.log(3) / math.log(4), 1 - math.log(2) / math.log(4), 1.0]
    assert values == pytest.approx([*expected, 0.0]), "one word is not a pair"


def test_a_share_that_stays_loses_worth_slowly() -> None:
    term, rare = term_of("word_rarity"), []
    for _ in range(6):
        term.observe(rollout(["my cat"] * 99 + ["my dog"]))
        rare.append(float(term.values(rollout(["my dog"]))))
    assert rare[0] == pytest.approx(1 - math.log(2) / math.log(101))
    assert rare == sorted(rare, reverse=True)
    assert rare[-1] == pytest.approx(1 - math.log(7) / math.log(601))
    assert float(term.values(rollout(["my cat"]))) < 0.01

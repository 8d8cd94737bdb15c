"""Rarity of words: by hand, in any order of arrival, and through a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.errors import ParameterError
from tests.reward_terms.rollouts import rollout, term_of

SAID = ["my cat sleeps", "my dog sleeps", "my cat really really runs", ""]


def test_the_rarest_word_decides() -> None:
    term = term_of("word_rarity")
    term.observe(rollout(SAID))
    values = term.values(rollout(["my cat", "my", "the cat sleeps", "really my", "", " "]))
    # Three probes have words; "cat" is in two of them, "my" in three, "really" in one, "the" in
    # none.
    expected = [1 - math.log(n + 1) / math.log(4) for n in (2, 3, 0, 1)]
    assert values.tolist() == pytest.approx([*expected, 0.0, 0.0])
    assert values.tolist()[:3] == pytest.approx([1 - math.log(3) / math.log(4), 0.0, 1.0])


def test_every_word_is_rare_in_an_empty_history() -> None:
    term = term_of("word_rarity")
    assert term.values(rollout(["my cat", "my cat", "\u732b", ""])).tolist() == [1.0, 1.0, 1.0, 0.0]


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


def test_a_restored_term_goes_on_bit_for_bit(tmp_path: Path) -> None:
    term = term_of("word_rarity")
    term.observe(rollout(SAID))
    save_state(tmp_path / "state.pt", term.state())
    again = term_of("word_rarity")
    again.load_state(load_state(tmp_path / "state.pt"))
    for one in (term, again):
        one.observe(rollout(["a new cat", "\ud800"]))
    asked = rollout(["a cat", "my new", "runs", "\ud800"])
    assert torch.equal(term.values(asked), again.values(asked))


def test_no_word_and_too_many_in_a_row_are_refused() -> None:
    for order in (0, 9):
        with pytest.raises(ParameterError, match="order"):
            term_of("word_rarity", order=order)

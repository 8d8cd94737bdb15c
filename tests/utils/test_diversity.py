"""BLEU and diversity metrics equal hand-computed values."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from nip_astra.errors import DataError
from nip_astra.utils.diversity import (
    BleuReferences,
    bleu_against,
    distinct_n,
    mean_cosine_distance,
    self_bleu,
    vendi_score,
)


def made_up(count: int, *, seed: int, shortest: int = 5, words: int = 12) -> list[str]:
    rng = random.Random(seed)
    return [
        " ".join(f"w{rng.randrange(words)}" for _ in range(rng.randint(shortest, 14)))
        for _ in range(count)
    ]


def plain_bleu(text: str, references: list[str], order: int) -> float:
    """BLEU as its docstring defines it, by loops."""
    tokens, others = text.split(), [reference.split() for reference in references]

    def counts(words: list[str], n: int) -> Counter[tuple[str, ...]]:
        return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))

    logs = []
    for n in range(1, min(order, len(tokens)) + 1):
        own = counts(tokens, n)
        most = Counter[tuple[str, ...]]()
        for other in others:
            most |= counts(other, n)
        matches = float(sum((own & most).values()))
        if n == 1 and matches == 0:
            return 0.0
        logs.append(math.log((matches or 0.1) / own.total()))
    nearest = min((abs(len(other) - len(tokens)), len(other)) for other in others)[1]
    return math.exp(sum(logs) / len(logs)) * math.exp(min(0.0, 1 - nearest / len(tokens)))


def test_bleu_by_hand_and_of_degenerate_texts_and_references() -> None:
    # 3 of 4 words, 2 of 3 pairs, 1 of 2 triples; the nearest length is 5.
    expected = (3 / 4 * 2 / 3 * 1 / 2) ** (1 / 3) * math.exp(1 - 5 / 4)
    result = bleu_against(["the cat sat down"], ["see the cat sat there"], orders=[3])
    assert result.tolist() == pytest.approx([expected], abs=1e-12)
    references = ["hello you", "yes", "one two three four five six seven"]
    assert bleu_against(["quite other words"], references, orders=[1, 4]).tolist() == [0.0]
    assert bleu_against(references, references, orders=[3, 4, 5]).tolist() == [1.0, 1.0, 1.0]
    assert bleu_against(["", " \n"], ["a", ""]).tolist() == [1.0, 1.0]
    assert bleu_against(["", "a"], ["b"]).tolist() == [0.0, 0.0]
    assert bleu_against(["a"], [""]).tolist() == [0.0]
    assert bleu_against(["a b", ""], []).tolist() == [0.0, 0.0]
    assert bleu_against([], ["a"]).shape == (0,)


@pytest.mark.parametrize("orders", [[1], [2], [4], [5], [3, 4, 5]])
def test_bleu_equals_the_definition_written_as_loops(orders: list[int]) -> None:
    references = made_up(40, seed=1, shortest=1)
    texts = [*made_up(60, seed=2, shortest=1), *made_up(5, seed=3, words=2)]
    result = bleu_against(texts, references, orders=orders)
    expected = [
        sum(plain_bleu(text, references, order) for order in orders) / len(orders) for text in texts
    ]
    assert result.tolist() == pytest.approx(expected, abs=1e-12)
    assert len(set(expected)) > 5


def test_references_come_and_go_without_a_trace() -> None:
    first, second, texts = made_up(30, seed=8), made_up(20, seed=9), made_up(15, seed=10)
    moved, fresh = BleuReferences(max_order=5), BleuReferences(max_order=5)
    moved.add(first)
    moved.add([*second, ""])
    moved.remove([*first, ""])
    fresh.add(second[::-1])
    assert moved.num_references == fresh.num_references == len(second)
    assert torch.equal(moved.bleu(texts, orders=[3, 5]), fresh.bleu(texts, orders=[3, 5]))


def test_self_bleu_compares_each_text_with_all_others() -> None:
    texts = [*made_up(25, seed=20, shortest=1), "w1 w2", "w1 w2", "w3"]
    expected = [
        plain_bleu(text, [*texts[:number], *texts[number + 1 :]], 4)
        for number, text in enumerate(texts)
    ]
    assert self_bleu(texts) == pytest.approx(sum(expected) / len(expected), abs=1e-12)
    drawn = [self_bleu(texts, num_sampled=10, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert self_bleu(texts, num_sampled=len(texts)) == self_bleu(texts, num_sampled=None)
    assert self_bleu(["you are silly"] * 7) == self_bleu(["", ""]) == 1.0


def test_one_text_has_no_self_bleu_and_no_cosine_distance() -> None:
    with pytest.raises(DataError, match="1"):
        self_bleu(["alone"])
    with pytest.raises(DataError, match="0"):
        mean_cosine_distance(torch.zeros(0, 3))
    with pytest.raises(DataError):
        self_bleu(["a", "b", "c"], num_sampled=1)


def test_distinct_n_is_the_share_of_distinct_n_grams_of_all_texts() -> None:
    assert distinct_n(["a b a", "a b"], 1) == 2 / 5
    assert distinct_n(["a b a", "a b"], 2) == 2 / 3
    assert distinct_n(["a", "b"], 2) == distinct_n([], 1) == 0.0


def test_the_mean_cosine_distance_is_that_over_pairs() -> None:
    torch.manual_seed(0)
    rows = torch.randn(9, 5)
    units = rows / rows.norm(dim=1, keepdim=True)
    pairs = [1 - float(units[i] @ units[j]) for i in range(9) for j in range(9) if i != j]
    assert mean_cosine_distance(3 * rows) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    assert mean_cosine_distance(torch.eye(4)) == pytest.approx(1.0)
    assert mean_cosine_distance(torch.tensor([[1.0, 0], [-1, 0]])) == pytest.approx(2.0)
    assert mean_cosine_distance(torch.ones(5, 3)) == pytest.approx(0.0, abs=1e-12)


def test_the_vendi_score_counts_distinct_texts() -> None:
    assert vendi_score(torch.eye(4).repeat(3, 1)) == pytest.approx(4.0)
    assert vendi_score(torch.ones(6, 3)) == pytest.approx(1.0)
    assert vendi_score(torch.zeros(0, 3)) == 0.0
    # K/N has the eigenvalues (1 +- 1/2)/2.
    two = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)]])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert vendi_score(two) == pytest.approx(math.exp(entropy))
    # By either product, of more texts than dimensions or fewer.
    wide = torch.nn.functional.pad(two, (0, 30))
    assert vendi_score(wide.repeat(3, 1)) == pytest.approx(math.exp(entropy))
    assert vendi_score(two.repeat(3, 1)) == pytest.approx(math.exp(entropy))

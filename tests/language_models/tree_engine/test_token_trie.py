"""A trie holds every shared prefix once, and its masks show each token exactly its own past."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from nip_astra.language_models.tree_engine.token_trie import build_trie


def _sequences(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randint(0, 2) for _ in range(chance.randint(1, 7))]
        for _ in range(chance.randint(1, 12))
    ]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("options", [{}, {"pair_cost": 0.05}, {"max_row_tokens": 8}])
def test_every_sequence_is_found_and_each_token_sees_its_own_past(
    seed: int, options: dict[str, float]
) -> None:
    sequences = _sequences(seed)
    trie = build_trie(sequences, **options)
    if not options:
        prefixes = {tuple(s[: end + 1]) for s in sequences for end in range(len(s))}
        assert trie.num_tokens == len(prefixes), "each prefix once"
    seen = torch.block_diag(*[mask.long() for mask in trie.row_masks()]).bool()
    for row, sequence in enumerate(sequences):
        nodes = trie.nodes_SD[row][: len(sequence)]
        assert trie.ids_N[nodes].tolist() == sequence
        assert trie.positions_N[nodes].tolist() == list(range(len(sequence)))
        assert (trie.nodes_SD[row][len(sequence) :] == -1).all()
        for depth, node in enumerate(nodes.tolist()):
            assert seen[node].nonzero().flatten().tolist() == sorted(nodes[: depth + 1].tolist())


def test_a_long_row_is_cut_where_least_is_shared() -> None:
    first, second = [1, 2, 3], [1, 4, 5]
    sequences = [[*start, end] for start in (first, second) for end in (7, 8, 9)]
    trie = build_trie(sequences, max_row_tokens=7)
    # Only the first token is repeated; a cut elsewhere would repeat three.
    assert trie.row_lengths == [6, 6]
    assert build_trie(sequences).row_lengths == [11]


def test_rows_are_cut_only_where_attention_saves_more_than_is_repeated() -> None:
    apart = [[1, 2, 3, 4], [5, 6, 7, 8]]
    alike = [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert len(build_trie(apart, pair_cost=0.01).row_lengths) == 2
    assert len(build_trie(alike, pair_cost=0.01).row_lengths) == 1


def test_long_rows_are_cut_only_where_almost_nothing_is_shared() -> None:
    prompt, answers = list(range(80)), [[100 + i] * 200 for i in range(8)]
    group = [[*prompt, *answer] for answer in answers]
    assert build_trie(group, pair_cost=0.01).num_tokens > 1.1 * (80 + 8 * 200)
    trie = build_trie(group, pair_cost=0.01, max_dense_tokens=300)
    assert trie.num_tokens == trie.num_unique == 80 + 8 * 200
    alike = [[1, *answer] for answer in answers]
    assert len(build_trie(alike, pair_cost=0.01, max_dense_tokens=300).row_lengths) == 8
    begun = build_trie(
        [[*prompt[:12], *item] for item in answers], pair_cost=1, max_dense_tokens=200
    )
    assert 12 + 8 * 200 < begun.num_tokens <= 1.05 * (12 + 8 * 200)


def test_a_cut_for_the_size_of_a_row_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build_trie([[1, 2, 3], [1, 2, 4]], max_row_tokens=3)
        build_trie([[1, 2], [3, 4]], pair_cost=1.0, max_row_tokens=3)
    (record,) = caplog.records
    assert "4 tokens" in record.getMessage()
    assert "repeats 2" in record.getMessage()


def test_passes_divide_the_rows_in_order() -> None:
    trie = build_trie([[1, 2], [3, 4], [5, 6], [7]], max_row_tokens=2)
    passes = trie.passes(4)
    assert [part.num_tokens for part in passes] == [4, 3]
    assert torch.equal(torch.cat([part.ids_N for part in passes]), trie.ids_N)

"""Clusters of failing probes, their number, and planted failures in rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nip_astra.evaluation.clusters import chao2, cluster_failures, failing_turns, find_plants
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from tests.evaluation.rows_by_hand import episode, judged

PLANTS = (
    PlantedFailure(name="cat twice", probe="cat", previous_probe="cat"),
    PlantedFailure(name="cat", probe="cat"),
    PlantedFailure(name="dog", probe="dog"),
)


def by_first_word(texts: Sequence[str]) -> Tensor:
    words = sorted({text.split()[0] for text in texts})
    return torch.nn.functional.one_hot(
        torch.tensor([words.index(text.split()[0]) for text in texts]), len(words)
    ).float()


def test_similar_probes_form_a_cluster_and_the_largest_is_first() -> None:
    likely = [-5.0, -3.0]
    episodes = judged(
        episode(0, [0.9, 0.9], probe=["my cat sleeps", "my cat eats"], reference_logprob=likely),
        episode(1, [0.9, 0.1], probe=["you know", "my cat eats"], prompt="other"),
        episode(
            2, [0.1, 0.9], probe=["x", "my cat eats"], prompt="other",
            reference_logprob=[-5.0, -4.0],
        ),
        episode(3, [None, "error"], probe="not known"),
    )  # fmt: skip
    result = cluster_failures(episodes, by_first_word, distance=0.5, planted=PLANTS)
    assert result["num_clusters"] == 2
    first, second = result["clusters"]
    assert (first["size"], first["num_distinct"], second["size"]) == (3, 2, 1)
    # The medoid counts a probe as often as it occurs; the likeliest has the largest log p.
    assert first["medoid"]["probe"] == first["shortest"]["probe"] == "my cat eats"
    assert (first["most_likely"]["episode"], first["most_likely"]["depth"]) == (0, 1)
    assert (first["num_prompts"], second["num_prompts"]) == (2, 1)
    assert (first["first_query"], second["first_query"]) == (1, 3)
    assert first["plants"] == ["cat", "cat twice"]
    assert second["plants"] == []
    single = cluster_failures(judged(episode(0, [0.9])), by_first_word, distance=0.5)
    assert [cluster["size"] for cluster in single["clusters"]] == [1]
    none = cluster_failures(judged(episode(0, [0.1])), by_first_word, distance=0.5)
    assert none == {"num_clusters": 0, "clusters": [], "num_left_out": 0}


def test_plants_are_found_by_failing_and_counted_in_tokens() -> None:
    episodes = judged(
        episode(0, [0.1, 0.9], probe=["a cat", "the cat"]),
        episode(1, [0.9, None], probe=["a cat", "a dog"]),
    )
    assert [(row["episode"], row["depth"]) for row in failing_turns(episodes)] == [(0, 1), (1, 0)]
    result = find_plants(episodes, PLANTS)
    # Five tokens a turn. The second turn meets both cat plants; the dog has no verdict.
    assert (result["found"], result["total"], result["tokens"]) == (2, 3, 20)
    assert result["by_tokens"] == [[10, 2]]
    assert result["first"]["cat"] == {"tokens": 10, "target_queries": 2}
    assert result["first"]["dog"] is None
    assert find_plants(episodes, ()) is None


def test_the_number_of_kinds_is_chaos_estimate() -> None:
    """Seven kinds in 10 units, 4 seen once and 2 seen twice: 7 + 0.9 * 12 / 6."""
    result = chao2([1, 1, 1, 1, 2, 2, 5], 10, level=0.95)
    assert (result["seen"], result["seen_once"], result["seen_twice"]) == (7, 4, 2)
    assert result["value"] == pytest.approx(8.8)
    # var = 0.9 * 12 / 6 + 0.81 * 4 * 49 / 36 + 0.81 * 2 * 144 / 324; the unseen 1.8 are log-normal.
    spread = math.exp(1.959964 * math.sqrt(math.log1p(6.93 / 1.8**2)))
    # Observed kinds are certain, and there is no evidence of more.
    assert result["low"] == 7.0
    assert result["high"] == pytest.approx(7 + 1.8 * spread, rel=1e-5)
    # No kind twice: 3 + 0.8 * 3 * 2 / 2.
    result = chao2([1, 1, 1], 5, level=0.95)
    assert result["value"] == pytest.approx(5.4)
    assert 3.0 == result["low"] < result["value"] < result["high"]
    # All seen often.
    result = chao2([9, 12, 30], 100, level=0.95)
    assert result["value"] == result["low"] == 3.0 <= result["high"] < 3.1
    assert chao2([], 100, level=0.95).items() >= {"seen": 0, "value": 0.0, "high": 0.0}.items()

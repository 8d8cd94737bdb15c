"""Failing probes in groups, and planted failures found in rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nip_astra.evaluation.clusters import cluster_failures, failing_turns
from nip_astra.evaluation.discoveries import find_plants
from nip_astra.language_models.embeddings import EmbedderParameters, build_embedder
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


def test_probes_that_are_alike_are_one_cluster_the_largest_first() -> None:
    likely = [-5.0, -3.0]
    episodes = judged(
        episode(0, [0.9, 0.9], probe=["my cat sleeps", "my cat eats"], reference_logprob=likely),
        episode(1, [0.9, 0.1], probe=["you know", "my cat eats"]),
        episode(2, [0.1, 0.9], probe=["x", "my cat eats"], reference_logprob=[-5.0, -4.0]),
        episode(3, [None, "error"], probe="not known"),
    )  # fmt: skip
    found = cluster_failures(episodes, by_first_word, distance=0.5, planted=PLANTS)
    assert found["num_clusters"] == 2
    first, second = found["clusters"]
    assert (first["size"], first["num_distinct"], second["size"]) == (3, 2, 1)
    # The medoid counts a probe as often as it was said; the likeliest has the largest log p.
    assert first["medoid"]["probe"] == "my cat eats"
    assert (first["most_likely"]["episode"], first["most_likely"]["depth"]) == (0, 1)
    assert first["plants"] == ["cat", "cat twice"]
    assert second["plants"] == []


def test_a_cluster_tells_its_shortest_probe_its_prompts_and_when_it_was_met() -> None:
    episodes = judged(
        episode(0, [0.1, 0.9], probe=["x", "my cat eats fish today"], prompt="a"),
        episode(1, [0.9, 0.9], probe=["my cat eats", "you know"], prompt="b"),
        episode(2, [0.9, 0.1], probe=["my cat eats more", "x"], prompt="b"),
    )
    pets, other = cluster_failures(episodes, by_first_word, distance=0.5)["clusters"]
    assert pets["shortest"]["probe"] == "my cat eats"
    assert (pets["num_prompts"], other["num_prompts"]) == (2, 1)
    assert (pets["first_query"], other["first_query"]) == (2, 4)


def test_real_sentences_of_two_kinds_make_two_clusters() -> None:
    embed = build_embedder(EmbedderParameters(), device=torch.device("cpu")).embed
    pets = [f"my {pet} always eats {food}" for pet in ("cat", "dog") for food in ("fish", "rice")]
    doubts = [f"do you really think so {when} ?" for when in ("today", "again", "now")]
    episodes = judged(*(episode(i, [0.9], probe=text) for i, text in enumerate(pets + doubts)))
    found = cluster_failures(episodes, embed, distance=0.6)
    assert [cluster["size"] for cluster in found["clusters"]] == [4, 3]


def test_one_failing_probe_is_a_cluster_and_none_is_none() -> None:
    one = cluster_failures(judged(episode(0, [0.9])), by_first_word, distance=0.5)
    assert [cluster["size"] for cluster in one["clusters"]] == [1]
    none = cluster_failures(judged(episode(0, [0.1])), by_first_word, distance=0.5)
    assert none == {"num_clusters": 0, "clusters": [], "num_left_out": 0}


def test_only_turns_with_a_failure_are_failing() -> None:
    episodes = judged(episode(0, [0.9, None, 0.1]), episode(1, ["error", 0.5]))
    assert [(row["episode"], row["depth"]) for row in failing_turns(episodes)] == [(0, 0), (1, 1)]


def test_plants_are_found_by_failing_and_counted_in_tokens() -> None:
    episodes = judged(
        episode(0, [0.1, 0.9], probe=["a cat", "the cat"]),
        episode(1, [0.9, None], probe=["a cat", "a dog"]),
    )
    found = find_plants(episodes, PLANTS)
    assert found is not None
    # Five tokens a turn. The second turn meets both cat plants; the dog has no verdict.
    assert (found["found"], found["total"], found["tokens"]) == (2, 3, 20)
    assert found["by_tokens"] == [[10, 2]]
    assert found["first"]["cat"] == {"tokens": 10, "target_queries": 2}
    assert found["first"]["dog"] is None
    assert find_plants(episodes, ()) is None

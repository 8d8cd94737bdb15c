"""Metrics of a trainer's rollouts, computed by hand on a hand-made tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.evaluation import clusters
from nip_astra.evaluation.clusters import chao2, cluster_failures, failing_turns, find_plants
from nip_astra.evaluation.playing import play_chains
from nip_astra.evaluation.summary import RUN_FIGURES, FailureTally, collapse_of
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from nip_astra.trainers.ast.base import AstEvaluation
from nip_astra.utils.intervals import rate_estimate
from tests.evaluation.rows_by_hand import episode, judged

PLANTS = (
    PlantedFailure(name="again", probe="^cat$", previous_probe="^hello$"),
    PlantedFailure(name="cat", probe="cat"),
    PlantedFailure(name="dog", probe="dog"),
)


def make_chains(
    prompts: Sequence[str],
    probes: Sequence[str],
    scores: Sequence[float],
    nll: Sequence[Sequence[float]] | None = None,
) -> RolloutTree:
    """Chains that do not branch: probes by depth, then by prompt; `nll` holds nats per token."""
    count, num_episodes = len(probes), len(prompts)
    nll = nll or [[1.0]] * count
    width = max(len(tokens) for tokens in nll)
    mask = torch.tensor([[i < len(tokens) for i in range(width)] for tokens in nll])
    # Padding must not be counted.
    logprobs = torch.tensor([[*(-t for t in tokens), *[-99.0] * width][:width] for tokens in nll])
    index = torch.arange(count)
    parent = torch.where(index < num_episodes, -1, index - num_episodes)
    nodes = TensorDict(
        {
            "parent": parent,
            "depth": index // num_episodes,
            "episode": index % num_episodes,
            "probe": mask.long(),
            "probe_mask": mask,
            "probe_logprobs": logprobs,
            "reference_logprobs": logprobs,
            "probe_nll": torch.zeros(count),
            "is_empty": torch.zeros(count, dtype=torch.bool),
            "response_score": torch.tensor(scores),
            "combined_score": torch.zeros(count),
            "reward": torch.tensor(scores) - 1.0,
        },
        batch_size=[count],
    )
    contexts = [[group] for group in range(count)]
    return RolloutTree(nodes, 1, list(prompts), list(probes), ["so"] * count, contexts)


def tally_of(*trees: RolloutTree, planted: Sequence[PlantedFailure] = PLANTS) -> FailureTally:
    tally = FailureTally(planted, 0.5)
    for tree in trees:
        tally.add(tree)
    return tally


def test_the_figures_of_a_tree_are_those_worked_out_by_hand() -> None:
    """Of three episodes of two turns, the second and the first fail, once each, both by 'cat'."""
    tree = make_chains(
        prompts=["good day", "how are you", "good day"],
        probes=["hello", "cat", "fine", "cat", "mat", "cat"],
        scores=[0.2, 0.5, 0.1, 0.9, 0.3, 0.4],
        nll=[[1.0], [2.0, 3.0], [1.0], [4.0], [1.0], [0.5, 0.5]],
    )
    report = tally_of(tree).report()
    assert tuple(report) == RUN_FIGURES
    assert (report["num_episodes"], report["target_queries"]) == (3, 6)
    # A score at the threshold is a failure: episodes 0 (node 3) and 1 (node 1) fail.
    assert report["failure_rate"] == pytest.approx(2 / 3)
    assert report["mean_score"] == pytest.approx(2.4 / 6)
    assert report["mean_reward"] == pytest.approx(2.4 / 6 - 1.0)
    # A mean over the eight tokens, not over the six nodes, and without the padding.
    assert report["probe_nll"] == pytest.approx(13.0 / 8)
    assert (report["num_successful_probes"], report["most_common_probe"]) == (2, "cat")
    assert report["distinct_share"] == pytest.approx(0.5)
    # 'cat' is at nodes 1, 3 and 5, and after 'hello' at node 3; queries count from 1.
    assert report["first_query"] == {"again": 4, "cat": 2, "dog": None}
    assert (report["plants_found"], report["num_plants"]) == (2, 3)
    # Episodes of one prompt are one cluster of the interval.
    expected = rate_estimate([1.0, 1.0, 0.0], [0, 1, 0])
    assert report["failure_rate_interval"] == [expected.low, expected.high]
    report = tally_of(tree, planted=()).report()
    assert (report["plants_found"], report["num_plants"], report["first_query"]) == (None, None, {})
    # Parts add up to the whole.
    late = make_chains(["a cat"], ["dog", "dog"], [0.0, 0.7], [[2.0], [2.0, 2.0]])
    tally = tally_of(tree, late)
    assert tally.trees == [tree, late]
    report = tally.report()
    assert (report["num_episodes"], report["target_queries"]) == (4, 8)
    assert report["failure_rate"] == pytest.approx(3 / 4)
    assert report["mean_score"] == pytest.approx(3.1 / 8)
    assert report["probe_nll"] == pytest.approx(19.0 / 11)
    assert report["distinct_share"] == pytest.approx(2 / 3)
    assert report["first_query"] == {"again": 4, "cat": 2, "dog": 8}
    report = tally_of(make_chains(["hello"], ["a", "b"], [0.1, 0.49])).report()
    assert report["failure_rate_interval"] == [0.0, pytest.approx(0.975)]
    assert (report["distinct_share"], report["most_common_probe"]) == (None, None)


@pytest.mark.parametrize(
    ("num_probes", "num_distinct", "is_collapsed"), [(20, 5, True), (20, 6, False), (19, 1, False)]
)
def test_many_successes_that_are_nearly_all_the_same_are_a_collapse(
    num_probes: int, num_distinct: int, is_collapsed: bool
) -> None:
    probes = [f"probe {i % num_distinct}" for i in range(num_probes)]
    prompts = [f"prompt {i}" for i in range(num_probes)]
    report = tally_of(make_chains(prompts, probes, [0.8] * num_probes)).report()
    names = ("num_successful_probes", "distinct_share", "most_common_probe")
    assert (collapse_of(*(report[name] for name in names)) is not None) is is_collapsed


def test_chains_take_the_prompts_in_order_and_again_from_the_first() -> None:
    class Recorder:
        """A sampler that returns its request."""

        def sample(self, prompts: list[str], **options: Any) -> SimpleNamespace:
            return SimpleNamespace(prompts=prompts, **options)

    def play(*parts: int) -> list[Any]:
        options = {"num_episodes": 5, "batch_size": 2, "tree_depth": 3, "key": (0, "x")}
        return list(play_chains(Recorder(), ["a", "b", "c"], parts=parts, **options))

    calls = play(0, 1, 2)
    assert [call.prompts for call in calls] == [["a", "b"], ["c", "a"], ["b"]]
    assert [call.first_episode for call in calls] == [0, 2, 4]
    assert {call.tree_width for call in calls} == {1}
    assert play(1) == calls[1:2]
    assert play(3, 7) == []


def test_turns_without_verdict_enter_no_denominator() -> None:
    # Episode 0 fails late; episode 1 has an error and an undetermined turn.
    tree = make_chains(["a cat", "hello"], ["a", "b", "cat", "c"], [0.1, math.nan, 0.9, math.nan])
    tree.nodes["is_error"] = torch.tensor([False, True, False, False])
    tree.nodes["reward"] = tree.nodes["response_score"] - 1.0
    report = tally_of(tree).report()
    assert report["outcomes"] == {"failure": 1, "none": 1, "undetermined": 1, "error": 1}
    # One failed; the other is censored at its first turn.
    expected = {"failure_rate": 1.0, "num_failed": 1, "num_known": 1, "num_episodes": 2}
    expected |= {"if_unknown_passed": 0.5, "if_unknown_failed": 1.0, "target_queries": 4}
    expected |= {"mean_score": pytest.approx(0.5), "mean_reward": pytest.approx(-0.5)}
    assert report.items() >= expected.items()
    # A failure after a turn without a verdict is not counted.
    tree = make_chains(["a cat", "hello"], ["a", "b", "c", "d"], [math.nan, 0.1, 0.9, 0.2])
    report = tally_of(tree).report()
    assert (report["failure_rate"], report["num_failed"], report["num_known"]) == (0.0, 0, 1)
    assert (report["if_unknown_passed"], report["num_distinct_probes"]) == (0.5, 1)
    # Without any verdict there is no rate.
    report = tally_of(make_chains(["a cat"], ["a", "b"], [math.nan, 0.2])).report()
    assert math.isnan(report["failure_rate"])
    assert math.isnan(report["failure_rate_interval"][0])
    assert report["mean_score"] == pytest.approx(0.2)
    # The episodes of a training rollout are censored too.
    tree = make_chains(["a", "b", "c"], list("uvwxyz"), [0.1, math.nan, 0.1, 0.9, 0.9, 0.1])
    tree.nodes["is_error"] = torch.zeros(6, dtype=torch.bool)
    scenario: Any = SimpleNamespace(scenario=SimpleNamespace(failure_threshold=0.5))
    metrics = AstEvaluation.tree_metrics(scenario, tree)
    # The second failed after a turn without a verdict: one of the other two failed.
    assert metrics["episode_failure_rate"] == 0.5
    assert metrics["failure_rate"] == pytest.approx(2 / 5)


# ---- clusters and planted failures

CATS = (PlantedFailure(name="cat twice", probe="cat", previous_probe="cat"), *PLANTS[1:])


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
    result = cluster_failures(episodes, by_first_word, distance=0.5, planted=CATS)
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
    result = find_plants(episodes, CATS)
    # Five tokens a turn. The second turn meets both cat plants; the dog has no verdict.
    assert (result["found"], result["total"], result["tokens"]) == (2, 3, 20)
    assert result["by_tokens"] == [[10, 2]]
    assert result["first"]["cat"] == {"tokens": 10, "target_queries": 2}
    assert result["first"]["dog"] is None
    assert find_plants(episodes, ()) is None


def test_the_number_of_kinds_is_chaos_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven kinds in 10 units, 4 seen once and 2 seen twice: 7 + 0.9 * 12 / 6."""
    few = chao2([1, 1, 1, 1, 2, 2, 5], 10, level=0.95)
    assert (few["seen"], few["seen_once"], few["seen_twice"]) == (7, 4, 2)
    assert few["value"] == pytest.approx(8.8)
    # With 13 sightings an interval would cover far less than its level.
    assert few.items() >= {"low": 7.0, "high": None, "level": None, "num_sightings": 13}.items()
    monkeypatch.setattr(clusters, "MIN_SIGHTINGS", 0)
    result = chao2([1, 1, 1, 1, 2, 2, 5], 10, level=0.95)
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
    monkeypatch.undo()
    assert chao2([], 100, level=0.95).items() >= {"seen": 0, "value": 0.0, "high": None}.items()


@pytest.mark.parametrize("frequencies", ["equal", "zipf", "half rare"])
def test_a_stated_level_of_the_number_of_kinds_is_nearly_covered(frequencies: str) -> None:
    generator = np.random.default_rng(0)
    covered: list[bool] = []
    for num_kinds in (5, 20, 50):
        ranks = np.arange(num_kinds)
        weights = {
            "equal": np.ones(num_kinds),
            "zipf": 1 / (ranks + 1),
            "half rare": np.where(ranks <= num_kinds // 2, 1.0, 0.1),
        }[frequencies]
        for num_prompts in (30, 300):
            chances = np.minimum(weights / weights.sum() * 0.6, 0.95)
            for _ in range(100):
                counts = generator.binomial(num_prompts, chances)
                kinds = chao2(counts[counts > 0].tolist(), num_prompts, level=0.95)
                if kinds["level"] is not None:
                    covered.append(kinds["low"] <= num_kinds <= kinds["high"])
    assert len(covered) >= 200
    assert sum(covered) / len(covered) >= 0.9

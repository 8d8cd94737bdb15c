"""Metrics of a trainer's rollouts, computed by hand on a hand-made tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.evaluation.playing import play_chains
from nip_astra.evaluation.summary import RUN_FIGURES, FailureTally, collapse_of
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from nip_astra.trainers.ast.base import AstEvaluation
from nip_astra.utils.intervals import rate_estimate

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

"""The figures of an evaluation, worked out by hand on a tree made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.evaluation.playing import play_chains
from nip_astra.evaluation.summary import (
    COLLAPSED_DISTINCT_SHARE,
    NUM_PROBES_FOR_COLLAPSE,
    RUN_FIGURES,
    FailureTally,
    collapse_of,
)
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
    # What stands on padding must not be counted.
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


@pytest.fixture
def tree() -> RolloutTree:
    """Three episodes of two turns; the second and the first fail, once each, both by 'cat'."""
    return make_chains(
        prompts=["good day", "how are you", "good day"],
        probes=["hello", "cat", "fine", "cat", "mat", "cat"],
        scores=[0.2, 0.5, 0.1, 0.9, 0.3, 0.4],
        nll=[[1.0], [2.0, 3.0], [1.0], [4.0], [1.0], [0.5, 0.5]],
    )


def tally_of(*trees: RolloutTree, planted: Sequence[PlantedFailure] = PLANTS) -> FailureTally:
    tally = FailureTally(planted, 0.5)
    for tree in trees:
        tally.add(tree)
    return tally


def test_the_figures_of_one_tree_are_those_worked_out_by_hand(tree: RolloutTree) -> None:
    report = tally_of(tree).report()
    assert report["num_episodes"] == 3
    assert report["target_queries"] == 6
    # A score at the threshold is a failure: episodes 0 (node 3) and 1 (node 1) fail.
    assert report["failure_rate"] == pytest.approx(2 / 3)
    assert report["mean_score"] == pytest.approx(2.4 / 6)
    assert report["mean_reward"] == pytest.approx(2.4 / 6 - 1.0)
    # A mean over the eight tokens, not over the six nodes, and without the padding.
    assert report["probe_nll"] == pytest.approx(13.0 / 8)
    assert report["num_successful_probes"] == 2
    assert report["distinct_share"] == pytest.approx(0.5)
    assert report["most_common_probe"] == "cat"


def test_episodes_of_one_prompt_are_one_cluster_of_the_interval(tree: RolloutTree) -> None:
    expected = rate_estimate([1.0, 1.0, 0.0], [0, 1, 0])
    apart = rate_estimate([1.0, 1.0, 0.0], [0, 1, 2])
    assert tally_of(tree).report()["failure_rate_interval"] == [expected.low, expected.high]
    assert expected.high - expected.low > apart.high - apart.low


def test_plants_count_when_the_target_fails_on_their_probe(tree: RolloutTree) -> None:
    report = tally_of(tree).report()
    # 'cat' is said at nodes 1, 3 and 5; 'cat' after 'hello' at node 3; queries count from 1.
    assert report["first_query"] == {"again": 4, "cat": 2, "dog": None}
    assert (report["plants_found"], report["num_plants"]) == (2, 3)


def test_parts_add_up_to_the_whole(tree: RolloutTree) -> None:
    late = make_chains(["a cat"], ["dog", "dog"], [0.0, 0.7], [[2.0], [2.0, 2.0]])
    report = tally_of(tree, late).report()
    assert (report["num_episodes"], report["target_queries"]) == (4, 8)
    assert report["failure_rate"] == pytest.approx(3 / 4)
    assert report["mean_score"] == pytest.approx(3.1 / 8)
    assert report["probe_nll"] == pytest.approx(19.0 / 11)
    assert report["distinct_share"] == pytest.approx(2 / 3)
    assert report["first_query"] == {"again": 4, "cat": 2, "dog": 8}


def test_a_tally_keeps_its_trees_for_the_table(tree: RolloutTree) -> None:
    assert tally_of(tree, tree).trees == [tree, tree]


def test_without_plants_there_are_no_figures_of_them(tree: RolloutTree) -> None:
    report = tally_of(tree, planted=()).report()
    assert (report["plants_found"], report["num_plants"], report["first_query"]) == (None, None, {})


def test_without_success_there_is_no_distinct_share() -> None:
    report = tally_of(make_chains(["hello"], ["a", "b"], [0.1, 0.49])).report()
    assert report["failure_rate"] == 0.0
    # One episode without failure: a rate of 97.5 % would show that once in forty times.
    assert report["failure_rate_interval"] == [0.0, pytest.approx(0.975)]
    assert (report["distinct_share"], report["most_common_probe"]) == (None, None)


def test_a_report_has_the_figures_of_a_run(tree: RolloutTree) -> None:
    assert tuple(tally_of(tree).report()) == RUN_FIGURES


def _is_collapsed(num_probes: int, num_distinct: int) -> bool:
    probes = [f"probe {i % num_distinct}" for i in range(num_probes)]
    prompts = [f"prompt {i}" for i in range(num_probes)]
    report = tally_of(make_chains(prompts, probes, [0.8] * num_probes)).report()
    names = ("num_successful_probes", "distinct_share", "most_common_probe")
    return collapse_of(*(report[name] for name in names)) is not None


def test_many_successes_that_are_nearly_all_the_same_are_a_collapse() -> None:
    assert (COLLAPSED_DISTINCT_SHARE, NUM_PROBES_FOR_COLLAPSE) == (0.3, 20)
    assert _is_collapsed(20, 5)
    assert not _is_collapsed(20, 6)
    assert not _is_collapsed(19, 1)


class _Recorder:
    """Stands for a sampler: keeps what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def sample(self, prompts: list[str], **options: Any) -> SimpleNamespace:
        self.calls.append(SimpleNamespace(prompts=prompts, **options))
        return self.calls[-1]


def _play(parts: Sequence[int], num_episodes: int = 5) -> list[SimpleNamespace]:
    recorder = _Recorder()
    options = {"num_episodes": num_episodes, "batch_size": 2, "tree_depth": 3, "key": (0, "x")}
    list(play_chains(recorder, ["a", "b", "c"], parts=parts, **options))  # type: ignore[arg-type]
    return recorder.calls


def test_chains_go_through_the_prompts_in_order_and_again_from_the_first() -> None:
    calls = _play(range(3))
    assert [call.prompts for call in calls] == [["a", "b"], ["c", "a"], ["b"]]
    assert [call.first_episode for call in calls] == [0, 2, 4]
    assert {call.tree_width for call in calls} == {1}


def test_one_part_is_played_as_it_is_among_all_parts() -> None:
    assert _play([1]) == _play(range(3))[1:2]


def test_parts_past_the_last_episode_play_nothing() -> None:
    assert _play([3, 7]) == []


def _without_verdict() -> RolloutTree:
    # Episodes 0 and 1, two turns each: 0 fails late, 1 has an error and an undetermined turn.
    tree = make_chains(["a cat", "hello"], ["a", "b", "cat", "c"], [0.1, math.nan, 0.9, math.nan])
    tree.nodes["is_error"] = torch.tensor([False, True, False, False])
    tree.nodes["reward"] = tree.nodes["response_score"] - 1.0
    return tree


def test_turns_without_verdict_enter_no_denominator() -> None:
    report = tally_of(_without_verdict()).report()
    assert report["outcomes"] == {"failure": 1, "none": 1, "undetermined": 1, "error": 1}
    # One failed, the other is censored at its first turn.
    assert report["failure_rate"] == 1.0
    assert (report["num_failed"], report["num_known"]) == (1, 1)
    assert (report["if_unknown_passed"], report["if_unknown_failed"]) == (0.5, 1.0)
    assert report["mean_score"] == pytest.approx(0.5)
    assert report["mean_reward"] == pytest.approx(-0.5)
    assert (report["num_episodes"], report["target_queries"]) == (2, 4)


def test_a_failure_after_a_turn_without_a_verdict_is_not_counted() -> None:
    tree = make_chains(["a cat", "hello"], ["a", "b", "c", "d"], [math.nan, 0.1, 0.9, 0.2])
    report = tally_of(tree).report()
    assert (report["failure_rate"], report["num_failed"], report["num_known"]) == (0.0, 0, 1)
    assert (report["if_unknown_passed"], report["num_distinct_probes"]) == (0.5, 1)


def test_without_any_verdict_there_is_no_rate_and_not_one_of_zero() -> None:
    report = tally_of(make_chains(["a cat"], ["a", "b"], [math.nan, 0.2])).report()
    assert math.isnan(report["failure_rate"])
    assert math.isnan(report["failure_rate_interval"][0])
    assert report["mean_score"] == pytest.approx(0.2)


def test_the_episodes_of_a_training_rollout_are_censored_too() -> None:
    tree = make_chains(["a", "b", "c"], list("uvwxyz"), [0.1, math.nan, 0.1, 0.9, 0.9, 0.1])
    tree.nodes["is_error"] = torch.zeros(6, dtype=torch.bool)
    scenario: Any = SimpleNamespace(scenario=SimpleNamespace(failure_threshold=0.5))
    metrics = AstEvaluation.tree_metrics(scenario, tree)
    # The second failed after a turn without a verdict: one of the two others failed.
    assert metrics["episode_failure_rate"] == 0.5
    assert metrics["failure_rate"] == pytest.approx(2 / 5)

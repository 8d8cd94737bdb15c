"""The figures of an evaluation, worked out by hand from rows made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nip_astra.evaluation.outcomes import (
    failure_rates,
    has_failed,
    hit_rates,
    likelihood_figures,
    score_figures,
    token_likelihoods,
    turns_to_failure,
)
from tests.evaluation.rows_by_hand import episode, judged

OPTIONS = {"level": 0.95}


def test_errors_and_undetermined_turns_enter_no_denominator() -> None:
    episodes = judged(
        episode(0, [0.9, 0.1], prompt="a"),
        episode(1, [0.1, None], prompt="b"),
        episode(2, [0.2, 0.3], prompt="c"),
        episode(3, ["error", 0.8], prompt="d"),
    )
    found = failure_rates(episodes, **OPTIONS)
    assert found["outcomes"] == {"failure": 2, "none": 4, "undetermined": 1, "error": 1}
    # Episodes 1 and 3 are censored: a failure after a missing verdict does not count.
    assert has_failed(episodes)[0::2] == [1.0, 0.0]
    assert np.isnan(has_failed(episodes)[1::2]).all()
    assert found["failure_rate"]["value"] == pytest.approx(1 / 3)
    assert turns_to_failure(episodes).survival[-1] == pytest.approx(2 / 3)
    assert found["failure_rate"]["num_clusters"] == 3
    assert found["failure_rate"]["num_failed"] == 1
    assert found["failure_rate"]["num_known"] == 2
    assert found["failure_rate"]["num_episodes"] == 4
    assert found["failure_rate"]["if_unknown_passed"] == 0.5
    assert found["failure_rate"]["if_unknown_failed"] == 0.75
    assert found["turn_failure_rate"]["value"] == pytest.approx(2 / 6)
    assert found["turn_failure_rate"]["num_failed"] == 2
    assert found["turn_failure_rate"]["num_known"] == 6
    assert [turn["value"] for turn in found["per_turn_failure_rate"]] == pytest.approx(
        [1 / 3, 1 / 3]
    )
    assert found["episode_outcomes"] == {"failure": 1, "undetermined": 1, "none": 1, "error": 1}


def test_an_evaluation_without_any_verdict_has_no_rate() -> None:
    found = failure_rates(judged(episode(0, [None]), episode(1, ["error"])), **OPTIONS)
    assert math.isnan(found["failure_rate"]["value"])
    assert found["failure_rate"]["num_known"] == 0


def test_an_episode_is_censored_at_a_turn_without_verdict() -> None:
    episodes = judged(
        episode(0, [0.9, 0.1, 0.1]),
        # What comes after the unknown turn is not watched: the failure may not have been the first.
        episode(1, [0.1, None, 0.9]),
        episode(2, [0.1, 0.1, 0.9]),
        episode(3, [0.1, 0.1, 0.1]),
    )
    found = turns_to_failure(episodes)
    assert found.num_at_risk == [4, 2, 2]
    assert found.survival == pytest.approx([0.75, 0.75, 0.375])
    assert found.median == 3


def test_hit_at_k_is_over_the_episodes_of_a_prompt() -> None:
    episodes = judged(
        *(episode(i, [score], prompt="a") for i, score in enumerate([0.9, 0.1, 0.1])),
        *(episode(i, [score], prompt="b") for i, score in enumerate([0.1, 0.1], start=3)),
    )
    # Left out whether it failed or not, since its second verdict is missing.
    episodes += judged(episode(5, [0.9, None], prompt="b"))
    found = hit_rates(episodes)
    assert found["hit_at_num_prompts"] == {"1": 2, "2": 2}
    assert found["hit_at_num_episodes"] == 5
    assert found["hit_at"] == pytest.approx({"1": (1 / 3 + 0) / 2, "2": (2 / 3 + 0) / 2})
    assert found["hit_at_pooled"] == pytest.approx({"1": 1 / 5, "2": 2 / 5, "5": 1.0})


def test_scores_are_told_by_turn_and_over_all() -> None:
    episodes = [episode(0, [0.0, 1.0]), episode(1, [0.5, None])]
    found = score_figures(episodes)["response"]
    assert (found["mean"], found["min"], found["max"], found["num_scores"]) == (0.5, 0.0, 1.0, 3)
    assert found["per_turn"] == [0.25, 1.0]
    assert found["quantiles"]["0.5"] == 0.5
    assert "probe" not in score_figures(episodes)


def test_likelihoods_are_means_over_tokens_and_not_over_probes() -> None:
    rows = episode(
        0, [0.1, 0.1], reference_logprob=[-2.0, -10.0], probe_num_tokens=[1, 5],
        target_logprob=[-3.0, None], target_num_tokens=[1, 4],
    )  # fmt: skip
    found = likelihood_figures([rows])
    assert found["reference"] == pytest.approx(12 / 6)
    assert found["perplexity_reference"] == pytest.approx(math.exp(2.0))
    assert found["target"] == pytest.approx(3.0)
    assert token_likelihoods([rows]) == [-2.0, -2.0]


def test_rows_of_older_runs_that_lack_columns_give_no_likelihood() -> None:
    row = {"episode": 0, "depth": 0, "prompt": "a", "probe": "b", "response": "c"}
    assert likelihood_figures([[row]])["target"] is None
    assert token_likelihoods([[row]]) == []

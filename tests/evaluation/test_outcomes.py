"""Outcomes of turns and episodes, and metrics computed by hand from hand-made rows."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from nip_astra.evaluation.outcomes import (
    Outcome,
    episode_outcome,
    failure_rate,
    failure_rates,
    follow_up_of,
    has_failed,
    hit_rates,
    likelihood_figures,
    outcome_of,
    score_figures,
    token_likelihoods,
    turns_to_failure,
    unknown_warning,
)
from nip_astra.evaluation.summary import agreement_matrix, cohens_kappa
from nip_astra.utils.intervals import rate_estimate
from tests.evaluation.rows_by_hand import episode, judged

FAILURE, NONE, UNDETERMINED, ERROR = Outcome


def test_a_turn_has_one_of_four_outcomes() -> None:
    for score, is_error, expected in (
        (0.5, False, FAILURE),
        (0.49, False, NONE),
        (0.0, False, NONE),
        (None, False, UNDETERMINED),
        (math.nan, False, UNDETERMINED),
        (None, True, ERROR),
        (math.nan, True, ERROR),
        # Only the combined score failed: there is a verdict.
        (0.9, True, FAILURE),
    ):
        assert outcome_of(score, is_error, 0.5) is expected
        assert expected.is_known is (expected in (FAILURE, NONE))
    # A stored score reaches the threshold as it does in a run.
    single = torch.tensor(0.7)
    assert single >= 0.7 > single.item()
    assert outcome_of(single.item(), False, 0.7) is FAILURE


def test_an_episode_is_censored_at_its_first_turn_without_a_verdict() -> None:
    assert episode_outcome([NONE, FAILURE, ERROR]) is FAILURE
    assert episode_outcome([NONE, UNDETERMINED, FAILURE, ERROR]) is UNDETERMINED
    assert episode_outcome([NONE, ERROR, UNDETERMINED]) is ERROR
    assert episode_outcome([NONE, NONE]) is NONE
    turns = [[NONE, FAILURE, ERROR], [NONE, ERROR, FAILURE], [NONE] * 3, [ERROR] * 3, [NONE]]
    assert follow_up_of(turns) == ([2, 1, 3, 0, 3], [True, False, False, False, False], 3)
    limits = [1, 3, 2, 3, 3]
    assert follow_up_of(turns, limits) == ([1, 1, 2, 0, 3], [False] * 5, 3)
    # The failure after the second episode's unknown turn may not have been its first.
    scores = ([0.9, 0.1, 0.1], [0.1, None, 0.9], [0.1, 0.1, 0.9], [0.1, 0.1, 0.1])
    result = turns_to_failure(judged(*(episode(i, item) for i, item in enumerate(scores))))
    assert result.num_at_risk == [4, 2, 2]
    assert result.survival == pytest.approx([0.75, 0.75, 0.375])
    assert result.median == 3


def test_the_rate_is_right_where_verdicts_are_missing_at_random() -> None:
    # Counting failures after a missing verdict gave 84.7 % for 18.3 %.
    rng = np.random.default_rng(0)
    failed = rng.random((30_000, 10)) < 0.02
    codes = np.where(rng.random((30_000, 10)) < 0.3, 2, failed)
    names = (NONE, FAILURE, UNDETERMINED)
    episodes = [[names[code] for code in turns] for turns in codes.tolist()]
    truth = float(failed.any(axis=1).mean())
    result = failure_rate(episodes, range(len(episodes)))
    assert result.estimate.value == pytest.approx(truth, abs=0.01)
    assert result.estimate.low < truth < result.estimate.high
    bounds = [result.lowest, result.if_unknown_passed, truth]
    bounds += [result.if_unknown_failed, result.highest]
    assert bounds == sorted(bounds)
    assert result.num_failed < result.num_known < result.num_episodes == 30_000


def test_where_no_verdict_is_missing_the_rate_is_the_share_of_failed_episodes() -> None:
    """The numbers in the README: 232 of 240, 96.7 % [94.0, 98.4]."""
    episodes = [[NONE, FAILURE, NONE]] * 232 + [[NONE] * 3] * 8
    for prompts in (range(240), [i // 4 for i in range(240)]):
        result = failure_rate(episodes, prompts)
        plain = rate_estimate([1.0] * 232 + [0.0] * 8, prompts)
        assert result.estimate == plain
        assert (result.lowest, result.highest) == (plain.low, plain.high)
        assert result.if_unknown_passed == result.if_unknown_failed == plain.value
        assert (result.num_failed, result.num_known, result.num_episodes) == (232, 240, 240)
        assert unknown_warning(result.to_dict(), {"undetermined": 0, "error": 0}) is None


def test_without_verdicts_through_the_last_turn_there_is_no_rate_but_a_lower_bound() -> None:
    episodes = [[FAILURE, NONE]] * 30 + [[NONE, ERROR]] * 30
    result = failure_rate(episodes, range(60)).estimate
    assert math.isnan(result.value)
    assert result.low == pytest.approx(rate_estimate([1.0] * 30 + [0.0] * 30, range(60)).low)
    assert result.high == 1.0
    all_failed = [[FAILURE, NONE]] * 30 + [[ERROR, FAILURE]] * 30
    assert failure_rate(all_failed, range(60)).estimate.value == 1.0
    # Bounds count every failure, even after missing verdicts.
    episodes = [[NONE, UNDETERMINED, FAILURE], [ERROR, NONE, NONE], [NONE] * 3, [FAILURE] * 3]
    bounds = failure_rate(episodes, range(4))
    assert (bounds.if_unknown_passed, bounds.if_unknown_failed) == (0.5, 0.75)
    nothing = failure_rates(judged(episode(0, [None]), episode(1, ["error"])), level=0.95)
    assert math.isnan(nothing["failure_rate"]["value"])
    assert nothing["failure_rate"]["num_known"] == 0


def test_many_episodes_without_a_verdict_are_warned_of() -> None:
    outcomes = {"undetermined": 3, "error": 1}
    few = [[NONE] * 9 + [FAILURE]] * 57 + [[NONE, ERROR, *[NONE] * 8]] * 3
    assert unknown_warning(failure_rate(few, range(60)).to_dict(), outcomes) is None
    # 4 of 600 turns, and 4 of 60 conversations.
    many = few[1:] + few[-1:]
    text = unknown_warning(failure_rate(many, range(60)).to_dict(), outcomes)
    assert {"4", "60", "1"} <= set(re.findall(r"\d+", str(text)))


def test_errors_and_undetermined_turns_enter_no_denominator() -> None:
    scores = {"a": [0.9, 0.1], "b": [0.1, None], "c": [0.2, 0.3], "d": ["error", 0.8]}
    rows = (episode(i, scores[prompt], prompt=prompt) for i, prompt in enumerate(scores))
    episodes = judged(*rows)
    result = failure_rates(episodes, level=0.95)
    assert result["outcomes"] == {"failure": 2, "none": 4, "undetermined": 1, "error": 1}
    assert result["episode_outcomes"] == {"failure": 1, "undetermined": 1, "none": 1, "error": 1}
    # Episodes 1 and 3 are censored: a failure after a missing verdict does not count.
    assert has_failed(episodes) == pytest.approx([1.0, math.nan, 0.0, math.nan], nan_ok=True)
    expected = {"num_clusters": 3, "num_failed": 1, "num_known": 2, "num_episodes": 4}
    expected |= {"if_unknown_passed": 0.5, "if_unknown_failed": 0.75}
    assert result["failure_rate"].items() >= expected.items()
    assert result["failure_rate"]["value"] == pytest.approx(1 / 3)
    assert turns_to_failure(episodes).survival[-1] == pytest.approx(2 / 3)
    turns = result["turn_failure_rate"]
    assert (turns["num_failed"], turns["num_known"]) == (2, 6)
    per_turn = [turn["value"] for turn in (turns, *result["per_turn_failure_rate"])]
    assert per_turn == pytest.approx([1 / 3] * 3)


def test_hit_at_k_is_over_the_episodes_of_a_prompt() -> None:
    episodes = judged(
        *(episode(i, [score], prompt="a") for i, score in enumerate([0.9, 0.1, 0.1])),
        *(episode(i, [score], prompt="b") for i, score in enumerate([0.1, 0.1], start=3)),
        # Excluded whether it failed or not, since its second verdict is missing.
        episode(5, [0.9, None], prompt="b"),
    )
    result = hit_rates(episodes)
    assert result["hit_at_num_prompts"] == {"1": 2, "2": 2}
    assert result["hit_at_num_episodes"] == 5
    assert result["hit_at"] == pytest.approx({"1": (1 / 3 + 0) / 2, "2": (2 / 3 + 0) / 2})
    assert result["hit_at_pooled"] == pytest.approx({"1": 1 / 5, "2": 2 / 5, "5": 1.0})


def test_scores_are_summarised_by_turn_and_over_all() -> None:
    episodes = [episode(0, [0.0, 1.0]), episode(1, [0.5, None])]
    result = score_figures(episodes)["response"]
    expected = {"mean": 0.5, "min": 0.0, "max": 1.0, "num_scores": 3, "per_turn": [0.25, 1.0]}
    assert result.items() >= expected.items()
    assert result["quantiles"]["0.5"] == 0.5
    assert "probe" not in score_figures(episodes)


def test_likelihoods_are_means_over_tokens_and_not_over_probes() -> None:
    rows = episode(
        0, [0.1, 0.1], reference_logprob=[-2.0, -10.0], probe_num_tokens=[1, 5],
        target_logprob=[-3.0, None], target_num_tokens=[1, 4],
    )  # fmt: skip
    result = likelihood_figures([rows])
    assert result["reference"] == pytest.approx(12 / 6)
    assert result["perplexity_reference"] == pytest.approx(math.exp(2.0))
    assert result["target"] == pytest.approx(3.0)
    assert token_likelihoods([rows]) == [-2.0, -2.0]
    # Rows of older runs lack the columns.
    row = {"episode": 0, "depth": 0, "prompt": "a", "probe": "b", "response": "c"}
    assert likelihood_figures([[row]])["target"] is None
    assert token_likelihoods([[row]]) == []


def test_scorers_agree_turn_by_turn_as_far_as_cohens_kappa() -> None:
    # Cohen's table of 50 cases: 20 and 15 alike, 5 and 10 not.
    flags = {(True, True): 20, (True, False): 5, (False, True): 10, (False, False): 15}
    assert cohens_kappa(flags) == pytest.approx(0.4)
    assert cohens_kappa({(True, True): 9}) is None
    assert cohens_kappa({}) is None
    views = {
        "a": judged(episode(0, [0.9, 0.8, 0.1, 0.2]), episode(1, [0.9, None])),
        "b": judged(episode(0, [0.9, 0.4, 0.1, 0.2]), episode(1, ["error", 0.1])),
        "c": judged(episode(0, [0.1, 0.1, 0.1, 0.1]), episode(1, [0.1, 0.1])),
    }
    matrix = agreement_matrix(views)
    names = ("first", "second", "num_turns")
    pairs = [("a", "b", 4), ("a", "c", 5), ("b", "c", 5)]
    assert [tuple(item[name] for name in names) for item in matrix] == pairs
    first, second, _ = matrix
    expected = {"agreement": 3 / 4, "kappa": pytest.approx(0.5)}
    expected |= {"both": 1, "only_first": 1, "only_second": 0, "neither": 2}
    assert first.items() >= expected.items()
    assert 0.8 < first["correlation"] < 0.9
    assert second["correlation"] is None
    assert agreement_matrix({"a": views["a"]}) == []

"""Paired comparisons, computed by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
import pytest

from nip_astra.errors import DataError
from nip_astra.evaluation.comparison import ComparedRun, compare, metric_of, pair_up
from nip_astra.evaluation.conditions import holds
from nip_astra.evaluation.families.base import Evaluation
from nip_astra.evaluation.families.conversations import describe_conversations
from nip_astra.evaluation.families.tasks import Tasks
from nip_astra.evaluation.tables import as_text, comparison_tables
from nip_astra.utils.formatting import NOTHING
from nip_astra.utils.statistics import mcnemar_exact
from tests.evaluation.rows_by_hand import episode, judged
from tests.kit.messages import says


def compared_run(
    label: str, failed: Sequence[float | None], prompts: Sequence[str] | None = None
) -> ComparedRun:
    """Conversations of one turn."""
    return chains(label, *([item] for item in failed), prompts=prompts)


def chains(
    label: str, *scores: Sequence[float | None], prompts: Sequence[str] | None = None
) -> ComparedRun:
    """Conversations of several turns, by default each from its own prompt."""
    prompts = prompts or [f"prompt {i}" for i in range(len(scores))]
    made = zip(scores, prompts, strict=True)
    return describe_conversations(
        label, judged(*(episode(i, s, prompt=p) for i, (s, p) in enumerate(made)))
    )


def compared(first: ComparedRun, second: ComparedRun) -> dict[str, Any]:
    """The metrics of the second run."""
    return compare(first, [second])["comparisons"][second.label]


def test_pairs_without_two_verdicts_are_counted() -> None:
    first = compared_run("a", [0.9, None, 0.1, 0.9])
    second = compared_run("b", [0.9, 0.9, None, 0.1])
    result = compare(first, [second])
    rate = result["comparisons"]["b"]["failure_rate"]
    assert result["comparisons"]["b"]["num_pairs"] == 4
    assert (rate["num_pairs"], rate["num_left_out"], rate["num_censored"]) == (2, 2, 0)
    assert rate["difference"] == -0.5
    assert {"2", "4"} <= set(re.findall(r"\d+", result["warnings"][0]))
    nothing = compare(first, [compared_run("c", [None] * 4)])
    assert "failure_rate" not in nothing["comparisons"]["c"]
    assert "failure_rate" in nothing["warnings"][0]


def test_failures_of_a_pair_count_up_to_its_first_turn_without_a_verdict() -> None:
    first = chains("a", [0.1, 0.9], [0.1, 0.9], [0.9, 0.1], [0.1, 0.1])
    # The first pair is known through turn 1, at which neither has failed.
    second = chains("b", [0.1, None], [0.1, 0.1], [0.1, 0.1], [0.1, 0.9])
    rate = compared(first, second)["failure_rate"]
    # First: one of four at turn 1, then one of two at risk. Second: none, then one of three.
    assert rate["first"] == pytest.approx(1 - 3 / 4 * 1 / 2)
    assert rate["second"] == pytest.approx(1 / 3)
    assert rate["difference"] == pytest.approx(1 / 3 - 5 / 8)
    assert (rate["only_first"], rate["only_second"]) == (2, 1)
    assert (rate["num_pairs"], rate["num_censored"], rate["through_turn"]) == (4, 1, 2)
    # A difference covers turns up to the last at which a pair remains.
    first = chains("a", [0.9, 0.1, 0.1], [0.1, 0.1, None])
    second = chains("b", [0.1, 0.1, 0.1], [0.1, 0.9, 0.1])
    rate = compared(first, second)["failure_rate"]
    assert rate["through_turn"] == 2
    assert (rate["first"], rate["second"]) == (0.5, 0.5)


def test_conversations_are_paired_by_prompt_and_warned_of_without_a_partner() -> None:
    second = compared_run("b", [0.1] * 10, [f"prompt {i}" for i in range(7, 17)])
    result = compare(compared_run("a", [0.9] * 10), [second])
    assert result["comparisons"]["b"]["num_pairs"] == 3
    assert "7 of 10" in result["warnings"][0]
    first = compared_run("a", [0.9, 0.1, 0.2], prompts=["x", "y", "x"])
    second = compared_run("b", [0.3, 0.4, 0.5, 0.6], prompts=["y", "x", "z", "x"])
    pairs = [
        (p, a[0]["response_score"], b[0]["response_score"]) for p, a, b in pair_up(first, second)
    ]
    assert pairs == [("x", 0.9, 0.4), ("y", 0.1, 0.3), ("x", 0.2, 0.6)]
    with pytest.raises(DataError):
        compare(compared_run("a", [0.9], ["x"]), [compared_run("b", [0.9], ["y"])])


def test_episodes_of_one_prompt_are_not_independent() -> None:
    prompts = [f"prompt {i // 4}" for i in range(24)]
    result = compared(
        compared_run("a", [0.1] * 24, prompts), compared_run("b", [0.9] * 24, prompts)
    )
    rate = result["failure_rate"]
    assert rate["test"] == "sign flips of opening prompts"
    # Six prompts: 2 of 64 sign patterns are as extreme; McNemar would have given 1e-7.
    assert rate["p_value"] == pytest.approx(2 / 64, abs=0.006)
    same = ["the same"] * 8
    result = compared(compared_run("a", [0.1] * 8, same), compared_run("b", [0.9] * 8, same))
    assert (result["failure_rate"]["low"], result["failure_rate"]["high"]) == (-1.0, 1.0)
    # Likelihoods are unbounded: nothing is known of other prompts.
    assert math.isnan(result["probe_nll"]["low"])
    table = comparison_tables({"baseline": "a", "comparisons": {"b": result}, "warnings": []})
    assert f"[{NOTHING}, {NOTHING}]" in as_text(table)


FIGURES = {"tree_depth": 2, "failure_threshold": 0.5, "split": "test"}
FIGURES |= {"scorer": "classifier", "target": "chat"}
CONFIGURATION = {
    "scorers": {"classifier": {"_type": "classifier", "label": "rude"}},
    "target": {"language_model": {"model": "models/chat", "dtype": "auto"}, "weights": "abc"},
}


def conditions(label: str, configuration: dict[str, Any] = {}, **figures: Any) -> ComparedRun:
    episodes = list(compared_run(label, [0.1, 0.9]).units)
    return describe_conversations(label, episodes, FIGURES | figures, CONFIGURATION | configuration)


@pytest.mark.parametrize(
    ("figure", "value", "named"),
    [
        ("tree_depth", 1, {"tree_depth", "1", "2"}),
        ("failure_threshold", 0.9, {"failure_threshold", "0.9", "0.5"}),
        ("split", "dev", {"split", "dev", "test"}),
        ("seed", 3, {"seed", "3"}),
        ("scorer", "profanity", {"scorer", "profanity", "classifier"}),
        ("target", "other", {"target", "abc", "def"}),
    ],
)
def test_other_conditions_than_the_attacker_are_warned_of(
    figure: str, value: object, named: set[str]
) -> None:
    others = {"scorer": {"scorers": {"profanity": {"_type": "profanity"}}}}
    others["target"] = {"target": {"weights": "def"}}
    second = conditions("b", others.get(figure, {}), **{"seed": 0, figure: value})
    text = " ".join(compare(conditions("a", seed=0), [second])["warnings"])
    assert all(name in text for name in named)


def test_a_shared_name_of_two_scorers_is_warned_of_and_two_names_of_a_target_are_not() -> None:
    first = conditions("a")
    other = {"scorers": {"classifier": {"_type": "classifier", "label": "kind"}}}
    (warning,) = compare(first, [conditions("b", other)])["warnings"]
    assert says(warning, "scorer.label", "rude", "kind")
    moved = {"target": {"language_model": {"model": "/else", "dtype": "auto"}, "weights": "abc"}}
    for same in (conditions("b", moved, target="run"), compared_run("b", [0.1, 0.9])):
        assert compare(first, [same])["warnings"] == []
    # The runs' own warnings are kept.
    own = [conditions(label, warnings=[f"{label} has collapsed"]) for label in "ab"]
    result = compare(own[0], own[1:])
    assert result["warnings"] == ["a: a has collapsed", "b: b has collapsed"]
    assert "b: b has collapsed" in as_text(comparison_tables(result))


def test_p_values_are_adjusted_over_all_metrics_and_runs() -> None:
    first = compared_run("a", [0.1] * 12)
    others = [compared_run("b", [0.9] * 12), compared_run("c", [0.1] * 12)]
    result = compare(first, others)["comparisons"]
    metrics = ("failure_rate", "mean_score", "probe_nll")
    raw = [result[name][metric]["p_value"] for name in "bc" for metric in metrics]
    assert result["b"]["failure_rate"]["p_holm"] >= 5 * min(raw)
    assert result["c"]["failure_rate"]["p_holm"] == 1.0
    # Five pairs that all differ prove nothing.
    result = compared(compared_run("a", [0.1] * 5), compared_run("b", [0.9] * 5))
    rate = result["failure_rate"]
    assert rate["difference"] == 1.0
    assert rate["p_value"] == pytest.approx(2 / 32)
    # So that a `--fail-if` gate does not fire.
    assert not holds("comparison.failure_rate.low > 0", {"comparison": result})
    # Pairs that differ alike do not show that a small difference would have been detected.
    assert rate["minimum_detectable"] > 0.5
    assert result["mean_score"]["low"] < 0.0


def test_pairs_without_two_finite_numbers_are_left_out() -> None:
    numbers = [(1.0, 2.0), (math.inf, math.inf), (1.0, math.inf), (math.nan, 1.0), (None, 1.0)]
    paired = metric_of(lambda unit: unit).pairs([("a", *pair) for pair in numbers])
    assert (paired.first, paired.second, paired.tested) == ([1.0], [2.0], [1.0])


# ---- policies on tasks


def policy(
    label: str, rewards: Sequence[Sequence[float | None]], names: str = "", **figures: Any
) -> ComparedRun:
    """The rewards of a policy for the runs of each problem, named by letters in order."""
    names = names or "abcdefghijklmnopqrst"[: len(rewards)]
    rows: list[dict[str, Any]] = [
        {"problem": number, "run": run, "problem_hash": name, "reward": reward}
        | {"is_correct": None if reward is None else reward >= 1.0}
        for number, (name, runs) in enumerate(zip(names, rewards, strict=True))
        for run, reward in enumerate(runs)
    ]
    common = {"split": "test", "num_runs": 1, "figures": {"accuracy": 0.5}}
    stored = Evaluation(Path(label), Tasks(), common | figures)
    stored.__dict__["rows"] = rows
    return Tasks().compared_run(stored, label)


def compare_policies(first: ComparedRun, second: ComparedRun) -> tuple[dict[str, Any], list[str]]:
    """The metrics of the second policy, and the warnings."""
    result = compare(first, [second], unit="problems")
    return result["comparisons"]["second"], result["warnings"]


def test_single_runs_are_compared_by_mcnemars_test() -> None:
    first = policy("first", [[1.0]] * 2 + [[0.0]] * 8)
    second = policy("second", [[0.0]] + [[1.0]] * 8 + [[0.5]])
    metrics, warnings = compare_policies(first, second)
    accuracy, reward = metrics["accuracy"], metrics["mean_reward"]
    expected = {"first": 0.2, "second": 0.8, "only_first": 1, "only_second": 7, "num_pairs": 10}
    expected |= {"p_value": mcnemar_exact(1, 7), "test": "McNemar, exact"}
    assert accuracy.items() >= expected.items()
    assert accuracy["low"] < 0.6 < accuracy["high"]
    assert accuracy["difference"] == pytest.approx(0.6)
    assert (reward["difference"], reward["num_problems"]) == (pytest.approx(0.65), 10)
    # Two tests: the smaller p-value is doubled.
    smaller = min((accuracy, reward), key=lambda metric: metric["p_value"])
    assert smaller["p_holm"] == pytest.approx(2 * smaller["p_value"])
    assert warnings == []


def test_problems_are_the_pairs_where_each_was_played_several_times() -> None:
    first = policy("first", [[1.0, 0.0], [0.0, 0.0], [None, None], [0.0, 0.0]], num_runs=2)
    second = policy("second", [[1.0], [1.0], [1.0], [None]])
    result, (runs, *lost) = compare_policies(first, second)
    accuracy = result["accuracy"]
    assert (accuracy["first"], accuracy["second"], accuracy["num_pairs"]) == (0.25, 1.0, 2)
    assert accuracy["test"] == "sign flips of problems"
    assert runs.startswith("num_runs: 2 in first, 1 in second")
    # Two pairs lack a verdict, for each of the two metrics.
    assert [re.findall(r"\d+", text)[:2] for text in lost] == [["2", "4"]] * 2


def test_problems_are_identified_by_their_content_and_not_by_number() -> None:
    first = policy("first", [[1.0], [0.0], [1.0]], "aab", split="dev")
    second = policy("second", [[1.0], [1.0], [0.0], [0.0]], "baac")
    result, (split, lost) = compare_policies(first, second)
    accuracy = result["accuracy"]
    assert (accuracy["difference"], accuracy["num_pairs"], accuracy["num_problems"]) == (0.0, 3, 2)
    # Repeating a problem does not double the evidence.
    assert accuracy["test"] == "sign flips of problems"
    assert split.startswith('split: "dev" in first, "test" in second')
    assert "0 of 3 of first" in lost
    assert "1 of 4 of second" in lost
    with pytest.raises(DataError):
        compare_policies(policy("first", [[1.0]], "a"), policy("second", [[1.0]], "b"))


def test_the_interval_of_rewards_holds_the_truth_where_few_problems_differ() -> None:
    """Student's interval covered it in 81 % of them."""
    rng = np.random.default_rng(0)
    num_held, truth = 0, (0.1 - 0.02) * 0.6
    for _ in range(200):
        drawn = [(rng.random(30) < chance) * rng.choice([0.2, 1.0], 30) for chance in (0.02, 0.1)]
        first, second = (
            policy(label, item[:, None].tolist(), ascii_letters[:30], success_reward=1.0)
            for label, item in zip(("first", "second"), drawn, strict=True)
        )
        reward = compare_policies(first, second)[0]["mean_reward"]
        num_held += reward["low"] <= truth <= reward["high"]
    assert num_held >= 186

"""Tests of grouping failures by what was said."""

from __future__ import annotations

from pathlib import Path

from nip_astra.report.failures import GroupedFailures, group_failures
from nip_astra.report.records import RunRecord, node_of
from tests.report.runs import THRESHOLD, failing, row


def grouped(*rows: dict, table: str = "evaluation") -> GroupedFailures:
    run = RunRecord(Path("run"), hyper_params={"ast_chat": {"failure_threshold": THRESHOLD}})
    run.tables = {table: [node_of(one, THRESHOLD) for one in rows]}
    found = group_failures(run)
    assert found is not None
    return found


def test_probes_that_share_most_words_in_order_are_one_group() -> None:
    found = grouped(
        failing("my cat always eats pizza with my mother .", logprob=-5.0),
        failing("do you really know that ?", logprob=-6.0),
        failing("my dog always eats soup with my mother .", logprob=-7.0),
        row(),
    )
    assert [group.size for group in found.groups] == [2, 1]
    assert (found.num_failures, found.num_distinct) == (3, 3)


def test_the_most_likely_leads_and_its_group_is_the_first() -> None:
    found = grouped(
        failing("why so sad today ?", logprob=-9.0),
        failing("my dog always eats .", logprob=-8.0),
        failing("my cat always eats .", logprob=-2.0),
    )
    assert [group.members[0].node.probe for group in found.groups] == [
        "my cat always eats .", "why so sad today ?",
    ]  # fmt: skip
    assert "log-probability" in found.criterion


def test_without_log_probabilities_the_lowest_nll_counts_and_is_named() -> None:
    rows = [failing("a b c", probe_nll=0.9), failing("x y z", probe_nll=0.2)]
    for one in rows:
        one["reference_logprob"] = one["probe_num_tokens"] = None
    found = grouped(*rows)
    assert found.groups[0].members[0].node.probe == "x y z"
    assert "NLL per token" in found.criterion


def test_the_same_words_are_counted_whatever_their_case_and_spaces() -> None:
    found = grouped(failing("Why ?"), failing("why  ?"))
    assert [(member.num_occurrences) for member in found.groups[0].members] == [2]
    assert found.num_distinct == 1


def test_word_order_tells_probes_apart() -> None:
    assert len(grouped(failing("a b c d e f"), failing("f e d c b a")).groups) == 2


def test_empty_probes_are_a_group() -> None:
    assert [group.size for group in grouped(failing(""), failing("")).groups] == [2]


def test_training_serves_where_there_is_no_evaluation() -> None:
    assert grouped(failing("a"), table="train").table == "train"


def test_a_run_without_verdicts_has_no_groups() -> None:
    assert group_failures(RunRecord(Path("run"))) is None
    assert grouped(row()).groups == []

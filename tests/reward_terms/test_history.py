"""What is remembered, and what is forgotten when there is too much."""

from __future__ import annotations

import json

import pytest

from nip_astra.reward_terms.novelty import ProbeHistory


def test_distinct_probes_are_kept_with_their_counts_the_latest_said_last() -> None:
    history = ProbeHistory(10)
    change = history.remember(["a", "b", "a", "c"])
    assert change == (["a", "b", "c"], [])
    assert (history.probes, history.counts) == (["b", "a", "c"], [1, 2, 1])
    assert history.remember(["b"]) == ([], [])
    assert (history.probes, history.counts) == (["a", "c", "b"], [2, 1, 2])
    assert "b" in history
    assert "d" not in history


def test_those_not_said_for_the_longest_time_are_forgotten() -> None:
    history = ProbeHistory(3)
    history.remember(["a", "b", "c"])
    assert history.remember(["a", "d"]) == (["d"], ["b"])
    assert history.probes == ["c", "a", "d"]
    assert history.remember(["b"]) == (["b"], ["c"])
    assert history.counts == [2, 1, 1]


def test_what_comes_and_goes_in_one_rollout_is_not_told() -> None:
    history = ProbeHistory(2)
    assert history.remember(["a", "b", "c", "d"]) == (["c", "d"], [])
    assert history.remember(["e", "c", "f"]) == (["f"], ["d"])
    assert len(history) == 2


def test_probes_without_text_are_not_remembered() -> None:
    history = ProbeHistory(2)
    assert history.remember(["", " ", "\n"]) == ([], [])
    assert history.probes == []


@pytest.mark.parametrize(("size", "kept"), [(5, ["b", "a"]), (1, ["a"])])
def test_the_state_is_plain_and_comes_back_as_far_as_there_is_room(
    size: int, kept: list[str]
) -> None:
    history, other = ProbeHistory(5), ProbeHistory(size)
    history.remember(["a", "b", "a"])
    other.load_state(json.loads(json.dumps(history.state())))
    assert other.probes == kept
    assert other.counts == [{"a": 2, "b": 1}[probe] for probe in kept]

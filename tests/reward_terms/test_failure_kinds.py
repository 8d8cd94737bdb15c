"""A failure is worth less, the more failures of its kind there are; other probes earn nothing."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from nip_astra.reward_terms import novelty
from nip_astra.reward_terms.base import RatedProbes
from tests.reward_terms.rollouts import random_probes, rollout, term_of

CAT, DOG, RAIN = "do you like my cat today ?", "do you like my dog today ?", "it rains on mondays ."


rarity, sharing = partial(term_of, "failure_rarity"), partial(term_of, "failure_sharing")


def failing(probes: list[str], scores: list[float] | None = None) -> RatedProbes:
    return rollout(probes, response_score_N=torch.tensor(scores or [1.0] * len(probes)))


@pytest.mark.parametrize("shape", ["log", "inverse_root"])
def test_all_is_rare_before_the_first_failure(shape: str) -> None:
    term = rarity(shape=shape)
    term.observe(failing([CAT, RAIN, ""], [0.0, 0.49, 1.0]))
    assert term.values(failing([CAT, RAIN])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("log", [1 - math.log(4) / math.log(5), 1 - math.log(2) / math.log(5), 1.0]),
        ("inverse_root", [1 / 2, 1 / math.sqrt(2), 1.0]),
    ],
)
def test_rarity_by_hand(shape: str, expected: list[float]) -> None:
    term = rarity(shape=shape)
    # Three of a kind (with two spellings), one of another, and one that did not fail.
    term.observe(failing([CAT, DOG, RAIN, CAT, "hello"], [0.9, 0.5, 1.0, 0.6, 0.1]))
    assert term.values(failing([DOG, RAIN, "hello"])).tolist() == pytest.approx(expected)


def test_rounding_does_not_distinguish_a_probe_from_itself() -> None:
    probes = list(dict.fromkeys(random_probes(60, seed=0)))
    term = rarity(similarity=1.0, shape="inverse_root")
    term.observe(failing(probes))
    assert (term.values(failing(probes)) <= math.sqrt(0.5) + 1e-6).all()


def test_probes_that_do_not_fail_earn_nothing_by_default() -> None:
    nodes = failing([CAT, CAT, RAIN], [0.8, 0.0, math.nan])
    assert rarity(weight=2.0).added(nodes).tolist() == pytest.approx([1.6, 0.0, 0.0])
    assert rarity(scaled_by_score=False).added(nodes).tolist() == [1.0, 1.0, 1.0]


def test_failures_share_with_their_kind_by_hand() -> None:
    # Four fail: each has three others; among the first three, two are alike.
    values = sharing().values(failing([CAT, DOG, CAT, RAIN, "hello"], [1.0, 0.5, 0.9, 1.0, 0.4]))
    alike = 1 - math.log(3) / math.log(4)
    assert values.tolist() == pytest.approx([alike, alike, alike, 1.0, 1.0])


def test_a_probe_that_does_not_fail_earns_by_its_score() -> None:
    nodes = failing([CAT, DOG, DOG, RAIN], [1.0, 0.2, math.nan, 0.2])
    assert sharing().values(nodes).tolist() == pytest.approx([1.0, 0.0, 0.0, 1.0])
    assert sharing(weight=4.0).added(nodes).tolist() == pytest.approx([4.0, 0.0, 0.0, 0.8])


def test_failures_of_one_kind_alone_earn_nothing_and_one_alone_all() -> None:
    assert sharing().values(failing([CAT] * 6)).tolist() == pytest.approx([0.0] * 6, abs=1e-7)
    assert sharing().values(failing([CAT])).tolist() == [1.0]


def test_rollouts_without_failures_or_text_are_defined() -> None:
    assert sharing().values(failing([CAT, RAIN], [0.0, math.nan])).tolist() == [1.0, 1.0]
    odd = sharing().values(failing(["", " \n", "\ud800", "!", CAT]))
    assert odd.tolist()[:2] == [0.0, 0.0]
    assert bool(odd.isfinite().all())
    assert sharing().values(failing([])).tolist() == []


def test_parts_give_the_same_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = failing([CAT, DOG, RAIN, "hello", "", CAT, "my aunt sings"], [1, 0, 1, 1, 1, 1, 0.7])
    whole = sharing().values(nodes)
    monkeypatch.setattr(novelty, "PART_SIZE", 2)
    assert torch.equal(sharing().values(nodes), whole)

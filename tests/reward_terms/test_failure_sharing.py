"""What many failures of a rollout have in common, each of them earns less for."""

from __future__ import annotations

import math

import pytest
import torch

from nip_astra.errors import ParameterError
from nip_astra.reward_terms import failure_sharing
from nip_astra.reward_terms.base import RatedProbes, RewardTerm
from tests.reward_terms.rollouts import rollout, term_of

CAT, DOG, RAIN = "do you like my cat today ?", "do you like my dog today ?", "it rains on mondays ."


def failing(probes: list[str], scores: list[float] | None = None) -> RatedProbes:
    given = [1.0] * len(probes) if scores is None else scores
    return rollout(probes, response_score_N=torch.tensor(given))


def sharing(**options: object) -> RewardTerm:
    return term_of("failure_sharing", **options)


def test_failures_share_with_their_kind_by_hand() -> None:
    # Four fail: each has three others, the first three of them two that are alike.
    values = sharing().values(failing([CAT, DOG, CAT, RAIN, "hello"], [1.0, 0.5, 0.9, 1.0, 0.4]))
    alike = 1 - math.log(3) / math.log(4)
    assert values.tolist() == pytest.approx([alike, alike, alike, 1.0, 1.0])


def test_what_does_not_fail_is_no_failure_and_earns_by_its_score() -> None:
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


def test_it_evens_out_two_kinds() -> None:
    many_and_few = sharing().values(failing([CAT] * 9 + [RAIN] * 3))
    assert float(many_and_few[-1]) > float(many_and_few[0]) > 0
    even = sharing().values(failing([CAT] * 6 + [RAIN] * 6))
    assert even.tolist() == pytest.approx([float(even[0])] * 12)


def test_nothing_is_remembered() -> None:
    term = sharing()
    before = term.values(failing([CAT, RAIN]))
    term.observe(failing([CAT] * 50))
    assert torch.equal(term.values(failing([CAT, RAIN])), before)
    assert term.state() == {}


def test_parts_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = failing([CAT, DOG, RAIN, "hello", "", CAT, "my aunt sings"], [1, 0, 1, 1, 1, 1, 0.7])
    whole = sharing().values(nodes)
    monkeypatch.setattr(failure_sharing, "PART_SIZE", 2)
    assert torch.equal(sharing().values(nodes), whole)


@pytest.mark.parametrize("options", [{"similarity": 0.0}, {"min_score": 2}, {"shape": "log"}])
def test_wrong_parameters_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match=next(iter(options))):
        sharing(**options)

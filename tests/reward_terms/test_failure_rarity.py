"""A failure is worth less, the more of its kind were found; what does not fail, nothing."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.errors import ParameterError
from nip_astra.reward_terms.base import RatedProbes, RewardTerm
from nip_astra.reward_terms.registry import REWARD_TERMS
from tests.reward_terms.rollouts import rollout, term_of

CAT, DOG, RAIN = "do you like my cat today ?", "do you like my dog today ?", "it rains on mondays ."


def failing(probes: list[str], scores: list[float] | None = None) -> RatedProbes:
    given = [1.0] * len(probes) if scores is None else scores
    return rollout(probes, response_score_N=torch.tensor(given))


def rarity(**options: Any) -> RewardTerm:
    return term_of("failure_rarity", **options)


def talk(count: int, *, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ["do", "you", "like", "my", "cat", "dog", "today", "again", "?", "silly"]
    return [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(count)]


@pytest.fixture(params=["log", "inverse_root"])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_all_is_rare_before_the_first_failure_but_a_probe_without_text(shape: str) -> None:
    term, asked = rarity(shape=shape), failing([CAT, "", " \n", "\ud800"])
    assert term.values(asked).tolist() == [1.0, 0.0, 0.0, 1.0]
    term.observe(failing([CAT, RAIN, ""], [0.0, 0.49, 1.0]))
    assert term.values(asked).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_the_log_shape_by_hand() -> None:
    term = rarity()
    # Three of a kind, which two spellings make up, one of another; one that did not fail.
    term.observe(failing([CAT, DOG, RAIN, CAT, "hello"], [0.9, 0.5, 1.0, 0.6, 0.1]))
    expected = [1 - math.log(4) / math.log(5), 1 - math.log(2) / math.log(5), 1.0]
    assert term.values(failing([DOG, RAIN, "hello"])).tolist() == pytest.approx(expected)


def test_the_inverse_root_by_hand() -> None:
    term = rarity(shape="inverse_root")
    term.observe(failing([CAT, DOG, RAIN, CAT]))
    values = term.values(failing([DOG, RAIN, "hello"]))
    assert values.tolist() == pytest.approx([1 / 2, 1 / math.sqrt(2), 1.0])


def test_failures_that_are_all_of_a_kind_have_no_rarity() -> None:
    term = rarity()
    term.observe(failing([CAT] * 7))
    assert term.values(failing([CAT, DOG])).tolist() == pytest.approx([0.0, 0.0], abs=1e-7)


def test_a_larger_similarity_makes_smaller_kinds_down_to_one_spelling() -> None:
    said = [CAT, DOG, DOG]
    values = []
    for similarity in (0.5, 0.95, 1.0):
        term = rarity(similarity=similarity, shape="inverse_root")
        term.observe(failing(said))
        values.append(term.values(failing([CAT])).item())
    assert values == pytest.approx([0.5, 1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_rounding_tells_no_probe_from_itself() -> None:
    said = list(dict.fromkeys(talk(60, seed=0)))
    term = rarity(similarity=1.0, shape="inverse_root")
    term.observe(failing(said))
    assert (term.values(failing(said)) <= math.sqrt(0.5) + 1e-6).all()


def test_what_does_not_fail_earns_nothing_unless_told_otherwise() -> None:
    nodes = failing([CAT, CAT, RAIN], [0.8, 0.0, math.nan])
    assert rarity(weight=2.0).added(nodes).tolist() == pytest.approx([1.6, 0.0, 0.0])
    assert rarity(scaled_by_score=False).added(nodes).tolist() == [1.0, 1.0, 1.0]


def test_a_failure_outranks_what_did_not_fail_whatever_the_weight() -> None:
    term = rarity(weight=50.0)
    term.observe(failing([CAT] * 5))
    added = term.added(failing([CAT, "never said"], [1.0, 0.0]))
    assert added[0] >= added[1] == 0.0


def test_values_do_not_depend_on_what_shares_the_rollout(shape: str) -> None:
    term = rarity(shape=shape)
    for seed in range(3):
        term.observe(failing(talk(20, seed=seed)))
    asked = talk(12, seed=9)
    together = term.values(failing(asked))
    alone = [term.values(failing([probe])).item() for probe in asked]
    turned = term.values(failing(asked[::-1]))
    assert together.tolist() == pytest.approx(alone, abs=1e-6)
    assert torch.allclose(turned.flip(0), together, atol=1e-6)
    assert ((together >= 0) & (together <= 1)).all()


def test_kinds_not_found_for_the_longest_time_are_forgotten() -> None:
    term = rarity(max_history=1)
    term.observe(failing([CAT, CAT, RAIN]))
    assert term.values(failing([CAT, RAIN])).tolist() == pytest.approx([1.0, 0.0])


def test_a_term_that_is_saved_and_loaded_goes_on_bit_for_bit(shape: str, tmp_path: Path) -> None:
    options = {"shape": shape, "max_history": 30}
    term, resumed = rarity(**options), rarity(**options)
    rollouts = [failing([*talk(15, seed=seed), ""], [seed % 3 / 2] * 16) for seed in range(8)]
    for nodes in rollouts[:4]:
        term.values(nodes)
        term.observe(nodes)
    save_state(tmp_path / "state", term.state())
    resumed.load_state(load_state(tmp_path / "state"))
    for nodes in rollouts[4:]:
        assert torch.equal(term.values(nodes), resumed.values(nodes))
        term.observe(nodes)
        resumed.observe(nodes)
    first, second = term.state(), resumed.state()
    assert torch.equal(first.pop("vectors"), second.pop("vectors"))
    assert first == second
    assert len(first["probes"]) == 30


@pytest.mark.parametrize(
    "wrong", [{"similarity": 0.0}, {"similarity": 1.5}, {"min_score": None}, {"shape": "linear"}]
)
def test_wrong_parameters_are_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        REWARD_TERMS.get("failure_rarity").Parameters.from_dict(wrong)

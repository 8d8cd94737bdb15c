"""Requirements on every term: its output is checked, weighted, named, bounded and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.checkpoints.tensors import load_state, pack_state, save_state
from nip_astra.errors import ParameterError, RewardTermError
from nip_astra.language_models.embeddings import NgramEmbedder
from nip_astra.parameters.parameters_base import SubParameters, polymorphic
from nip_astra.reward_terms.base import REWARD_TERMS, RatedProbes, RewardTerm, build_reward_terms
from tests.kit.messages import says
from tests.reward_terms.rollouts import STRANGE, random_probes, rollout, term_of


class Given(RewardTerm):
    """Predetermined values."""

    answer: Tensor

    def _values(self, nodes: RatedProbes) -> Tensor:
        return self.answer


def given(answer: Any, weight: float = 1.0) -> Given:
    term = Given(RewardTerm.Parameters(weight=weight), device=torch.device("cpu"))
    term.answer = torch.as_tensor(answer)
    return term


class Holder(SubParameters):
    """As a scenario's parameters hold terms."""

    terms: list[polymorphic(REWARD_TERMS.get, RewardTerm.Parameters)] = []
    """Terms."""


def test_values_are_float32_without_gradient() -> None:
    answer = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    values = given(answer).values(rollout(["a", "b"]))
    assert values.dtype == torch.float32
    assert not values.requires_grad
    assert values.tolist() == [1.0, 2.0]
    assert given(answer, weight=-0.5).added(rollout(["a", "b"])).tolist() == [-0.5, -1.0]
    term = given([1.0])
    assert term.values(rollout([])).shape == (0,)
    term.observe(rollout(["a"]))
    term.load_state(term.state())


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        ([1.0, 2.0, 3.0], "[3]"),
        *(([0.0, x], "'you are silly'") for x in (torch.nan, torch.inf, -torch.inf, 1e39)),
    ],
)
def test_other_than_one_finite_number_per_probe_is_refused(answer: list[float], fact: str) -> None:
    with pytest.raises(RewardTermError) as caught:
        given(torch.tensor(answer, dtype=torch.float64)).values(rollout(["fine", "you are silly"]))
    assert says(caught.value, "'Given'", fact)


def test_terms_of_a_parameter_file_are_named_after_their_kind() -> None:
    values = [
        {"_type": "entropy_bonus"},
        {"_type": "self_bleu_novelty", "weight": 0.5, "orders": [2]},
        {"_type": "self_bleu_novelty", "orders": [5]},
    ]
    holder = Holder.from_dict({"terms": values})
    assert Holder.from_dict(holder.to_dict()) == holder
    terms = build_reward_terms(holder.terms, device=torch.device("cpu"), scenario_dir=None)
    assert list(terms) == ["entropy_bonus", "self_bleu_novelty", "self_bleu_novelty_2"]
    assert [term.parameters.weight for term in terms.values()] == [0.01, 0.5, 1.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"_type": "self_blue_novelty"}, "Did you mean 'self_bleu_novelty'?"),
        ({"_type": "self_bleu_novelty", "orders": []}, "orders"),
        ({"_type": "self_bleu_novelty", "orders": [0]}, "orders.0"),
        ({"_type": "self_bleu_novelty", "max_history": 0}, "max_history"),
        ({"_type": "cosine_novelty", "reduction": "min"}, "reduction"),
        ({"_type": "cosine_novelty", "embedder": {"kind": "encoder"}}, "needs a model"),
        ({"_type": "gibberish_penalty"}, "threshold"),
        ({"_type": "failure_rarity", "similarity": 0.0}, "similarity"),
        ({"_type": "failure_rarity", "min_score": None}, "min_score"),
        ({"_type": "failure_rarity", "shape": "linear"}, "shape"),
        ({"_type": "failure_sharing", "min_score": 2}, "min_score"),
        ({"_type": "entropy_bonus", "weight": float("nan")}, "weight"),
        ({"_type": "scorer_term", "scorer": {"_type": "clasifier"}}, "'classifier'"),
        *(({"_type": "word_rarity", "order": order}, "order") for order in (0, 9)),
    ],
)
def test_wrong_parameters_of_a_term_are_reported(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Holder.from_dict({"terms": [wrong]})
    assert says(caught.value, message, "terms.0")


# ---- terms with a memory

SMALL: dict[str, Any] = {"max_history": 30, "embedder": {"batch_size": 4}}
STATEFUL: dict[str, dict[str, Any]] = {
    "words": {"name": "self_bleu_novelty", "max_history": 30},
    "single words": {"name": "self_bleu_novelty", "orders": [1], "max_history": 30},
    "nearest": {"name": "cosine_novelty", "reduction": "max", **SMALL},
    "mean": {"name": "cosine_novelty", "reduction": "mean", **SMALL},
    "log": {"name": "failure_rarity", "shape": "log", "max_history": 30},
    "root": {"name": "failure_rarity", "shape": "inverse_root", "max_history": 30},
    "rare words": {"name": "word_rarity"},
}


@pytest.fixture(params=STATEFUL)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return STATEFUL[request.param]


def failing(probes: list[str]) -> RatedProbes:
    """A rollout of which every third probe does not fail."""
    scores = torch.arange(len(probes)).remainder(3).clamp(max=1).float()
    return rollout(probes, response_score_N=scores)


def test_values_are_between_0_and_1_and_0_without_text(options: dict[str, Any]) -> None:
    term = term_of(**options)
    assert term.values(rollout(["", " \n", "a b", "\ud800"])).tolist() == [0.0, 0.0, 1.0, 1.0]
    term.observe(failing(["", "", "\n"]))
    assert term.values(rollout(["", "a b"])).tolist() == [0.0, 1.0]
    for seed in range(3):
        nodes = failing([*STRANGE, "", *random_probes(10, seed=seed)])
        values = term.values(nodes)
        assert ((values >= 0) & (values <= 1)).all()
        term.observe(nodes)
    assert term.values(rollout(["", " "])).tolist() == [0.0, 0.0]


def test_values_do_not_depend_on_the_rest_of_the_rollout(options: dict[str, Any]) -> None:
    term = term_of(**options)
    for seed in range(3):
        term.observe(failing(random_probes(20, seed=seed)))
    probes = [*random_probes(12, seed=9), "a silly dog", "a silly dog"]
    together = term.values(rollout(probes))
    alone = [term.values(rollout([probe])).item() for probe in probes]
    assert together.tolist() == pytest.approx(alone, abs=1e-6)
    backwards = term.values(rollout(probes[::-1]))
    assert torch.allclose(backwards.flip(0), together, atol=1e-6)


def test_a_term_that_is_saved_and_loaded_goes_on_bit_for_bit(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = NgramEmbedder._vectors
    # Vectors depend on their batch, as do an encoder's last bits.
    monkeypatch.setattr(
        NgramEmbedder, "_vectors", lambda self, texts: plain(self, texts).roll(len(texts), dims=1)
    )
    term, resumed = term_of(**options), term_of(**options)
    rollouts = [failing([*random_probes(17, seed=seed), "", STRANGE[seed]]) for seed in range(8)]
    for nodes in rollouts[:4]:
        term.values(nodes)
        term.observe(nodes)
    save_state(tmp_path / "state", term.state())
    resumed.load_state(load_state(tmp_path / "state"))
    for nodes in rollouts[4:]:
        assert torch.equal(term.values(nodes), resumed.values(nodes))
        term.observe(nodes)
        resumed.observe(nodes)
    assert pack_state(term.state()) == pack_state(resumed.state())
    assert len(term.state().get("probes", range(30))) == 30, "the history is full"

"""A term's output is checked, weighted and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.errors import ParameterError, RewardTermError
from nip_astra.parameters.parameters_base import SubParameters, polymorphic
from nip_astra.reward_terms.base import REWARD_TERMS, RatedProbes, RewardTerm, build_reward_terms
from tests.kit.messages import says
from tests.reward_terms.rollouts import rollout


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

    terms: list[polymorphic(REWARD_TERMS.get, RewardTerm.Parameters)] = []  # type: ignore[valid-type]
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


def test_another_number_of_values_is_refused() -> None:
    with pytest.raises(RewardTermError) as caught:
        given([1.0, 2.0, 3.0]).values(rollout(["a", "b"]))
    assert says(caught.value, "'Given'", "2", "[3]")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_value_that_is_not_finite_is_refused_with_its_probe(wrong: float) -> None:
    answer = torch.tensor([0.0, wrong], dtype=torch.float64)
    with pytest.raises(RewardTermError) as caught:
        given(answer).values(rollout(["fine", "you are silly"]))
    assert says(caught.value, "'Given'", "'you are silly'")


def test_terms_of_a_parameter_file_are_named_after_their_kind() -> None:
    holder = Holder.from_dict(
        {
            "terms": [
                {"_type": "entropy_bonus"},
                {"_type": "self_bleu_novelty", "weight": 0.5, "orders": [2]},
                {"_type": "self_bleu_novelty", "orders": [5]},
            ]
        }
    )
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
    ],
)
def test_wrong_parameters_of_a_term_are_reported(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Holder.from_dict({"terms": [wrong]})
    assert message in str(caught.value)
    assert "terms.0" in str(caught.value)

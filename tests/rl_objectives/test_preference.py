"""Preference losses equal hand-computed values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.preference import (
    PREFERENCE_KINDS,
    PreferenceKind,
    pair_loss,
    preference_loss,
    sequence_logprobs,
    simpo_loss,
)
from nip_astra.rl_objectives.reductions import LossOutput

POLICY = torch.tensor([1.5, -0.3, 0.0, 4.0], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.4, 0.0, -2.0], dtype=torch.float64)
dpo_loss = partial(preference_loss, kind="sigmoid")
LOSSES_OF_PAIRS = [
    *(partial(preference_loss, kind=kind, beta=0.1) for kind in PREFERENCE_KINDS),
    partial(pair_loss, kind="nca", beta=0.1),
    partial(simpo_loss, beta=2.0, margin=0.5),
]


def test_one_pair_by_hand() -> None:
    # beta * (2 - 1) = 0.5; -log sigmoid(0.5) = log(1 + e^-0.5) = 0.474076984...
    output = dpo_loss(torch.tensor([2.0]).double(), torch.tensor([1.0]).double(), beta=0.5)
    assert output.loss.item() == pytest.approx(0.4740769841801067, abs=1e-12)


def test_no_gradient_reaches_the_reference() -> None:
    reference = REFERENCE.clone().requires_grad_()
    dpo_loss(POLICY.clone().requires_grad_(), reference, beta=0.2).loss.backward()
    assert reference.grad is None


def test_large_margins_stay_finite() -> None:
    policy = torch.tensor([1e4, -1e4]).requires_grad_()
    loss = dpo_loss(policy, torch.zeros(2), beta=1.0).loss
    loss.backward()
    assert loss.isfinite()
    assert policy.grad.isfinite().all()


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def _closed_form(kind: str, h: float, beta: float, share: float) -> tuple[float, float]:
    """Loss and slope in h of one pair, written out."""
    right, wrong = -math.log(_sigmoid(beta * h)), -math.log(_sigmoid(-beta * h))
    right_slope, wrong_slope = -beta * _sigmoid(-beta * h), beta * _sigmoid(beta * h)
    if kind == "sigmoid":
        return (
            (1 - share) * right + share * wrong,
            (1 - share) * right_slope + share * wrong_slope,
        )
    if kind == "robust":
        scale = 1 / (1 - 2 * share)
        return (
            scale * ((1 - share) * right - share * wrong),
            scale * ((1 - share) * right_slope - share * wrong_slope),
        )
    if kind == "ipo":
        return (h - 0.5 / beta) ** 2, 2 * (h - 0.5 / beta)
    return max(0.0, 1 - beta * h), -beta if beta * h < 1 else 0.0


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("sigmoid", 0.0),
        ("sigmoid", 0.2),
        ("robust", 0.0),
        ("robust", 0.2),
        ("ipo", 0.0),
        ("hinge", 0.0),
    ],
)
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_every_kind_equals_its_closed_form(kind: PreferenceKind, share: float, beta: float) -> None:
    policy = POLICY.clone().requires_grad_()
    output = preference_loss(policy, REFERENCE, kind=kind, beta=beta, label_smoothing=share)
    output.loss.backward()
    pairs = zip(POLICY.tolist(), REFERENCE.tolist(), strict=True)
    expected = [_closed_form(kind, p - r, beta, share) for p, r in pairs]
    assert output.loss.item() == pytest.approx(sum(loss for loss, _ in expected) / 4, abs=1e-12)
    slopes = [slope / 4 for _, slope in expected]
    assert policy.grad.tolist() == pytest.approx(slopes, abs=1e-12)


@pytest.mark.parametrize("kind", PREFERENCE_KINDS)
def test_order_and_a_split_into_parts_change_no_kind(kind: PreferenceKind) -> None:
    def total(*parts: list[int]) -> float:
        return sum(
            len(part)
            / 4
            * preference_loss(POLICY[part], REFERENCE[part], kind=kind, beta=0.2).loss.item()
            for part in parts
        )

    assert total([2, 0], [3], [1]) == pytest.approx(total([0, 1, 2, 3]), abs=1e-12)


def test_a_sequence_is_the_sum_or_the_mean_of_its_tokens() -> None:
    logprobs = torch.tensor(
        [[-1.0, -3.0, math.nan], [-2.0, math.nan, math.nan], [math.nan] * 3], requires_grad=True
    )
    mask = ~logprobs.isnan()
    total = sequence_logprobs(logprobs, mask, length_normalised=False)
    mean = sequence_logprobs(logprobs, mask, length_normalised=True)
    assert total.tolist() == [-4.0, -2.0, 0.0]
    assert mean.tolist() == [-2.0, -2.0, 0.0]
    (total + mean).sum().backward()
    assert logprobs.grad.tolist() == [[1.5, 1.5, 0.0], [2.0, 0.0, 0.0], [0.0] * 3]


@pytest.mark.parametrize("loss", LOSSES_OF_PAIRS)
def test_no_pairs_give_a_loss_of_zero(loss: Callable[..., LossOutput]) -> None:
    nothing = torch.zeros(0, requires_grad=True)
    output = loss(nothing, nothing.detach())
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert all(metric == 0.0 for metric in output.metrics.values())


@pytest.mark.parametrize(
    ("loss", "options", "text"),
    [
        (preference_loss, {"kind": "dpo"}, r"'dpo'.*sigmoid"),
        (preference_loss, {"kind": "sigmoid", "beta": 0.0}, r"beta.*0\.0"),
        (
            preference_loss,
            {"kind": "ipo", "label_smoothing": 0.1},
            "'ipo' does not read label_smoothing 0.1",
        ),
        (preference_loss, {"kind": "robust", "label_smoothing": 0.5}, "at least 0 and below 0.5"),
        (preference_loss, {"kind": "sigmoid", "label_smoothing": -0.1}, "at least 0 and below 0.5"),
        (pair_loss, {"kind": "dpo"}, "nca, sppo, apo_zero, apo_down"),
        (simpo_loss, {"beta": 0, "margin": 0.5}, r"beta.*'simpo'.*0"),
    ],
)
def test_options_that_a_kind_cannot_use_are_refused(
    loss: Callable[..., LossOutput], options: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        loss(POLICY, REFERENCE, **({"beta": 0.1} | options))

"""Estimates of a divergence are right on average, and the weight follows its target."""

from __future__ import annotations

import math

import pytest
import torch
from torchrl.data.llm.utils import AdaptiveKLController

from nip_astra.errors import ConfigurationError, NonFiniteLossError
from nip_astra.rl_objectives.kl import (
    KL_KINDS,
    AdaptiveKl,
    KlKind,
    kl_estimate,
    sequence_kl_estimate,
)

REFERENCE = torch.tensor([-0.5, 0.4, 0.2, 0.0], dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize(
    ("kind", "expected", "far"),
    [
        *(("k1", -0.5, -4.0), ("k2", 0.125, 8.0)),
        # verl clamps k3 at 10.
        ("k3", math.exp(0.5) - 1 - 0.5, math.exp(4.0) - 1 - 4.0),
    ],
)
def test_each_kind_by_hand(kind: KlKind, expected: float, far: float) -> None:
    policy, reference = torch.tensor([[-2.0, -5.0], [-1.5, -1.0]]).double()
    estimate = kl_estimate(policy[None], reference[None], kind)
    assert estimate[0].tolist() == pytest.approx([expected, far], abs=1e-12)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_means_and_mean_gradients_are_those_in_the_docstring(kind: KlKind) -> None:
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    reverse = (policy.exp() * (policy - REFERENCE)).sum()
    forward = (REFERENCE.exp() * (REFERENCE - policy)).sum()
    # The mean over all outcomes, weighted by the policy that samples them.
    mean = (policy.exp().detach() * kl_estimate(policy[None], REFERENCE[None], kind)[0]).sum()
    assert kind == "k2" or mean.item() == pytest.approx(reverse.item(), abs=1e-12)
    gradients = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (reverse, forward))
    expected = dict(zip(("k2", "k3"), gradients, strict=True)) | {"k1": torch.zeros(4).double()}
    (gradient,) = torch.autograd.grad(mean, logits)
    assert torch.allclose(gradient, expected[kind], atol=1e-12)


def test_the_square_of_the_sum_by_hand() -> None:
    policy = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, math.nan, math.nan]])
    reference = torch.tensor([[-2.0, -5.0, 1.0], [-0.25, 1.0, 1.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert sequence_kl_estimate(policy, reference, mask).tolist() == [8.0, 0.03125]


@pytest.mark.parametrize("kind", KL_KINDS)
def test_no_gradient_reaches_the_reference_nor_padding(kind: KlKind) -> None:
    logprobs = torch.tensor([[-1.0, -1e4]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(logprobs, reference, kind, mask_BT=torch.tensor([[True, False]]))
    estimate.sum().backward()
    assert estimate[0, 1] == 0.0
    assert reference.grad is None
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 1] == 0.0
    assert logprobs.grad[0, 0] > 0


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'k4'.*k1, k2, k3"):
        kl_estimate(REFERENCE[None], REFERENCE[None], "k4")


def test_the_weight_follows_the_divergence_by_hand() -> None:
    controller = AdaptiveKl(weight=0.5, target=2.0, horizon=100)
    # 2.2 / 2 - 1 = 0.1; 0.5 * (1 + 0.1 * 20 / 100)
    assert controller.update(2.2, num_samples=20) == pytest.approx(0.51, abs=1e-12)
    # far off: the error is clipped to 0.2 and -0.2
    assert controller.update(50.0, num_samples=50) == pytest.approx(0.51 * 1.1, abs=1e-12)
    assert controller.update(-3.0, num_samples=50) == pytest.approx(0.51 * 1.1 * 0.9, abs=1e-12)
    before = controller.weight
    assert controller.update(2.0, num_samples=50) == before
    # A step of more samples than the horizon cannot make it negative.
    controller = AdaptiveKl(weight=1.0, target=1.0, horizon=10)
    assert controller.update(0.0, num_samples=10_000) == pytest.approx(0.8)


@pytest.mark.parametrize("kl", [0.1, 0.55, 0.62, 4.0])
def test_the_weight_moves_as_that_of_torchrl(kl: float) -> None:
    theirs = AdaptiveKLController(init_kl_coef=0.3, target=0.6, horizon=200)
    mine = AdaptiveKl(weight=0.3, target=0.6, horizon=200)
    for _ in range(3):
        # TorchRL takes penalties, minus the divergence times the weight.
        expected = theirs.update([-kl * theirs.coef] * 16)
        assert mine.update(kl, num_samples=16) == pytest.approx(float(expected), abs=1e-7)


def test_the_weight_goes_on_where_it_was() -> None:
    first = AdaptiveKl(weight=0.5, target=2.0, horizon=100)
    first.update(3.0, num_samples=10)
    second = AdaptiveKl(weight=0.5, target=2.0, horizon=100)
    second.load_state(first.state())
    assert second.update(1.0, num_samples=10) == first.update(1.0, num_samples=10)


def test_a_controller_of_nothing_and_a_divergence_that_is_not_finite_are_refused() -> None:
    values = {"weight": 0.5, "target": 2.0, "horizon": 100.0}
    for name in values:
        with pytest.raises(ConfigurationError, match=name):
            AdaptiveKl(**(values | {name: 0.0}))
    controller = AdaptiveKl(**values)
    for kl in (math.nan, math.inf):
        with pytest.raises(NonFiniteLossError, match=str(kl)):
            controller.update(kl, num_samples=1)
    assert controller.weight == 0.5

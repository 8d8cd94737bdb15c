"""Policy, value and supervised losses equal what one works out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.group_variants import GROUP_VARIANTS
from nip_astra.rl_objectives.policy_gradient import (
    group_policy_loss,
    nll_loss,
    ppo_policy_loss,
    reinforce_loss,
    value_loss,
)
from nip_astra.rl_objectives.ratios import bounded
from tests.rl_objectives.batches import DOUBLE, length_of, random_batch, without

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def tokens(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=DOUBLE)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # d ratio / d log pi = ratio
        (1.5, 2.0, -2.6, 0.0),  # beyond the clip, in the direction of the advantage
        (0.5, 2.0, -1.0, -1.0),  # too low, and to be raised
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_one_token_of_ppo_by_hand(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    logprobs = tokens(math.log(ratio) - 3.0).requires_grad_()
    output = ppo_policy_loss(
        logprobs, tokens(-3.0), tokens(advantage), torch.ones(1, 1).bool(), **CLIP
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)
    assert output.metrics["clip_fraction"].item() == float(slope == 0.0)
    assert output.metrics["outside_fraction"].item() == float(abs(ratio - 1) > 0.2)
    assert output.metrics["ratio_mean"].item() == pytest.approx(ratio)
    assert output.metrics["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio))


def test_an_advantage_may_differ_from_token_to_token() -> None:
    output = ppo_policy_loss(
        tokens(-1.0, -1.0), tokens(-1.0, -1.0), tokens(3.0, -1.0), torch.ones(1, 2).bool(), **CLIP
    )
    assert output.loss.item() == pytest.approx(-1.0)


# Two rows: log-ratios log 1.1 and log 1.2 with advantage 2; log 0.5 with advantage -1.
OLD = torch.tensor([[-1.0, -2.0], [-1.5, 0.0]], dtype=DOUBLE)
RATIO = torch.tensor([[1.1, 1.2], [0.5, 1.0]], dtype=DOUBLE)
ADVANTAGES = torch.tensor([2.0, -1.0], dtype=DOUBLE)
MASK = torch.tensor([[True, True], [True, False]])
GEOMETRIC = math.sqrt(1.1 * 1.2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", ((-2.2 - 2.4) / 2 + 0.8) / 2),
        ("dr_grpo", (-2.2 - 2.4 + 0.8) / 9 / 2),
        ("dapo", (-2.2 - 2.4 + 0.8) / 3),
        ("gspo", (-2 * 1.0004 + 0.9997) / 2),
        ("rloo", (-2 * 1.2 + 0.8) / 2),
        # -ratio * A * log pi, by token
        (
            "cispo",
            (
                -1.1 * 2 * (math.log(1.1) - 1)
                - 1.2 * 2 * (math.log(1.2) - 2)
                + 0.5 * (math.log(0.5) - 1.5)
            )
            / 3,
        ),
    ],
)
def test_each_variant_by_hand(name: str, expected: float) -> None:
    variant = GROUP_VARIANTS[name]
    output = group_policy_loss(
        OLD + RATIO.log(), OLD, ADVANTAGES, MASK, variant=variant, max_length=length_of(variant)
    )
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("level", "ratios"), [("sequence_mean", (GEOMETRIC, 0.5)), ("sequence_product", (1.32, 0.5))]
)
def test_one_ratio_a_row_by_hand(level: str, ratios: tuple[float, float]) -> None:
    variant = dataclasses.replace(
        GROUP_VARIANTS["gspo"], ratio=level, clip_low=None, clip_high=None
    )
    logprobs = (OLD + RATIO.log()).requires_grad_()
    output = group_policy_loss(logprobs, OLD, ADVANTAGES, MASK, variant=variant)
    output.loss.backward()
    assert output.loss.item() == pytest.approx((-2 * ratios[0] + ratios[1]) / 2, abs=1e-12)
    per_token = ratios[0] / (2 if level == "sequence_mean" else 1)
    expected = [-2 * per_token / 2, -2 * per_token / 2, ratios[1] / 2, 0.0]
    assert logprobs.grad.flatten().tolist() == pytest.approx(expected, abs=1e-12)
    assert output.metrics["clip_fraction"] == 0.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e4])
@pytest.mark.parametrize("name", ["ppo", *GROUP_VARIANTS])
def test_a_policy_that_went_far_has_finite_gradients_and_metrics_in_float32(
    name: str, log_ratio: float, advantage: float
) -> None:
    old = torch.tensor([[-120.0, -1.0], [-150.0, -2.0]])
    logprobs = (old + torch.tensor([[log_ratio, 0.1], [log_ratio, -0.1]])).requires_grad_()
    advantages, mask = torch.full((2,), advantage), torch.ones(2, 2, dtype=torch.bool)
    if name == "ppo":
        output = ppo_policy_loss(logprobs, old, advantages, mask, **CLIP)
    else:
        variant = GROUP_VARIANTS[name]
        output = group_policy_loss(
            *(logprobs, old, advantages, mask),
            variant=variant,
            max_length=length_of(variant),
            reference_logprobs_BT=old,
            kl_weight=0.1,
        )
    output.loss.backward()
    assert logprobs.grad.isfinite().all()
    assert all(math.isfinite(float(value)) for value in output.metrics.values())


def test_a_log_ratio_in_the_ordinary_range_is_what_it_is() -> None:
    ordinary = torch.tensor([-20.0, -1.5, 0.0, 1e-7, 20.0])
    assert torch.equal(bounded(ordinary), ordinary)
    assert bounded(torch.tensor([-21.0, 1e4])).tolist() == [-20.0, 20.0]


def test_a_weighted_token_learns_beyond_its_clip() -> None:
    logprobs = tokens(math.log(8.0) - 4.0).requires_grad_()
    output = group_policy_loss(
        logprobs,
        tokens(-4.0),
        torch.tensor([2.0]),
        torch.ones(1, 1).bool(),
        variant=GROUP_VARIANTS["cispo"],
    )
    output.loss.backward()
    assert logprobs.grad.item() == pytest.approx(-5.0 * 2.0)
    assert output.metrics["clip_fraction"] == 0.0
    assert output.metrics["outside_fraction"] == 1.0


@pytest.mark.parametrize("name", GROUP_VARIANTS)
def test_the_first_step_is_the_policy_gradient(name: str) -> None:
    """Where policy and sampler are one, each variant differs from REINFORCE by weights alone."""
    batch = random_batch()
    batch["old_logprobs_BT"] = batch["logprobs_BT"]
    logprobs = batch["logprobs_BT"].clone().requires_grad_()
    variant = GROUP_VARIANTS[name]
    inputs = (logprobs, batch["old_logprobs_BT"], batch["advantages"], batch["mask_BT"])
    output = group_policy_loss(*inputs, variant=variant, max_length=length_of(variant))
    output.loss.backward()
    mask = batch["mask_BT"]
    weight = {
        "token": 1 / mask.sum(),
        "sequence": 1 / mask.sum(dim=1, keepdim=True) / 6,
        "sequence_sum": torch.tensor(1 / 6),
        "sum_over_length": torch.tensor(1 / 6 / 9),
    }[variant.reduction]
    expected = -batch["advantages"][:, None] * mask * weight
    assert torch.allclose(logprobs.grad, expected, atol=1e-7)
    assert output.metrics["ratio_mean"] == 1.0
    assert output.metrics["approx_kl"] == 0.0


def test_the_penalty_is_reduced_as_the_policy_loss_is() -> None:
    batch = random_batch()
    for name, variant in GROUP_VARIANTS.items():
        options = {"variant": variant, "max_length": length_of(variant)}
        free = group_policy_loss(**batch, **options).loss
        held = group_policy_loss(**batch, **options, kl_weight=0.5, kl_kind="k1").loss
        difference = batch["logprobs_BT"] - batch["reference_logprobs_BT"]
        mask = batch["mask_BT"]
        by_row = (difference * mask).sum(dim=1)
        expected = {
            "token": by_row.sum() / mask.sum(),
            "sequence": (by_row / mask.sum(dim=1)).mean(),
            "sequence_sum": by_row.mean(),
            "sum_over_length": by_row.mean() / 9,
        }[variant.reduction]
        assert (held - free).item() == pytest.approx(0.5 * expected.item(), abs=1e-12), name


def test_a_penalty_without_a_reference_is_refused() -> None:
    batch = without(random_batch(), "reference_logprobs_BT")
    with pytest.raises(
        ConfigurationError, match=r"KL penalty of weight 0\.1 was asked for without"
    ):
        group_policy_loss(**batch, variant=GROUP_VARIANTS["grpo"], kl_weight=0.1)


@pytest.mark.parametrize("name", ["gspo", "rloo"])
def test_advantages_of_tokens_are_refused_where_the_ratio_is_of_rows(name: str) -> None:
    batch = random_batch(rows=5, tokens=5)
    batch["advantages"] = batch["entropy_BT"]
    with pytest.raises(ConfigurationError, match=r"advantages of shape \[5, 5\]"):
        group_policy_loss(**batch, variant=GROUP_VARIANTS[name])


def test_reinforce_and_nll_by_hand() -> None:
    logprobs = OLD.clone().requires_grad_()
    output = reinforce_loss(logprobs, MASK, ADVANTAGES)
    output.loss.backward()
    # -(2 * (-1 - 2) - 1 * (-1.5)) / 2
    assert output.loss.item() == pytest.approx(2.25)
    assert logprobs.grad.tolist() == [[-1.0, -1.0], [0.5, 0.0]]
    assert nll_loss(OLD, MASK).loss.item() == pytest.approx((1 + 2 + 1.5) / 3)
    assert nll_loss(OLD, MASK).metrics["nll"].item() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("new", "clip_range", "loss", "slope"),
    [
        (1.0, None, 2.0, -2.0),  # (1 - 3)**2 / 2
        (1.0, 0.25, 3.125, 0.0),  # moved up by 0.75: held at 0.5, and (0.5 - 3)**2 is larger
        (-1.0, 0.25, 8.0, -4.0),  # moved away: the free error is larger
        (0.4, 0.25, 3.38, -2.6),  # within reach
    ],
)
def test_one_value_by_hand(new: float, clip_range: float | None, loss: float, slope: float) -> None:
    values = tokens(new).requires_grad_()
    output = value_loss(
        values, tokens(0.25), tokens(3.0), torch.ones(1, 1).bool(), clip_range=clip_range
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert values.grad.item() == pytest.approx(slope, abs=1e-12)
    assert output.metrics["value_clip_fraction"].item() == float(slope == 0.0)
    assert output.metrics["return_mean"].item() == 3.0

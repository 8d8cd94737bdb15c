"""Padding, order and a split into parts change no loss; degenerate batches are defined."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from nip_astra.rl_objectives.policy_losses import GROUP_VARIANTS, nll_loss, policy_loss
from nip_astra.rl_objectives.reductions import REDUCTIONS, LossOutput
from nip_astra.rl_objectives.registry import POLICY_LOSSES
from nip_astra.rl_objectives.values import value_loss
from tests.rl_objectives.batches import (
    DOUBLE,
    Batch,
    inputs_of,
    loss_of_variant,
    random_batch,
    without,
)


def plain(name: str, batch: Batch, **options: object) -> LossOutput:
    given = {"reduction": "token", "entropy_BT": batch.get("entropy_BT")}
    return policy_loss(*inputs_of(batch), loss=name, **given, **options)


def variant(name: str, batch: Batch, **options: object) -> LossOutput:
    given = {n: batch[n] for n in ("reference_logprobs_BT", "entropy_BT")}
    return loss_of_variant(name, *inputs_of(batch), **given, kl_weight=0.3, **options)


def nll(reduction: str, batch: Batch, **options: object) -> LossOutput:
    length = 9 if reduction == "sum_over_length" else None
    given = {"reduction": reduction, "max_length": length}
    return nll_loss(batch["logprobs_BT"], batch["mask_BT"], **given, **options)


def value(batch: Batch, **options: object) -> LossOutput:
    values, old, _, mask = inputs_of(batch)
    returns = batch["reference_logprobs_BT"]
    return value_loss(values, old, returns, mask, clip_range=0.2, **options)


LOSSES: dict[str, Callable[..., LossOutput]] = {
    "value": value,
    **{f"nll {reduction}": partial(nll, reduction) for reduction in REDUCTIONS},
    **{
        name: partial(plain, name)
        for name in POLICY_LOSSES.names()
        if POLICY_LOSSES.is_built_in(name)
    },
    **{f"variant {name}": partial(variant, name) for name in GROUP_VARIANTS},
}
NEEDS_TOKENS = {"nll token", "nll minibatch_token", "variant dapo", "variant cispo"} | {
    name for name in LOSSES if " " not in name
}
"""Losses that are by default a mean over tokens, so that parts need the tokens of the whole."""

every_loss = pytest.mark.parametrize("name", LOSSES)


Result = tuple[LossOutput, torch.Tensor]


def run(name: str, batch: Batch, **options: object) -> Result:
    """A loss, and its gradient by the log-probabilities."""
    batch = batch | {"logprobs_BT": batch["logprobs_BT"].clone().requires_grad_()}
    output = LOSSES[name](batch, **options)
    return output, torch.autograd.grad(output.loss, batch["logprobs_BT"])[0]


def assert_same(first: Result, second: Result) -> None:
    assert torch.allclose(first[0].loss, second[0].loss, atol=1e-12)
    assert torch.allclose(first[1], second[1], atol=1e-12)
    assert first[0].metrics.keys() == second[0].metrics.keys()
    for name, metric in first[0].metrics.items():
        assert torch.allclose(metric, second[0].metrics[name], atol=1e-12), name


@every_loss
@pytest.mark.parametrize("garbage", [math.nan, -math.inf, 1e6])
def test_padding_changes_nothing(name: str, garbage: float) -> None:
    batch = random_batch()
    outside = ~batch["mask_BT"]
    wide: Batch = {
        key: torch.nn.functional.pad(tensor.masked_fill(outside, garbage), (0, 3), value=garbage)
        for key, tensor in without(batch, "mask_BT", "advantages").items()
    }
    wide["mask_BT"] = torch.nn.functional.pad(batch["mask_BT"], (0, 3))
    wide["advantages"] = batch["advantages"]
    output, gradient = run(name, wide)
    assert gradient[:, 5:].eq(0).all()
    assert gradient[:, :5][outside].eq(0).all()
    assert_same((output, gradient[:, :5]), run(name, batch))


@every_loss
def test_order_and_a_split_into_parts_change_neither_loss_nor_gradient_nor_metrics(
    name: str,
) -> None:
    batch = random_batch()
    whole, whole_gradient = run(name, batch)
    num_tokens = int(batch["mask_BT"].sum())
    gradient = torch.zeros_like(whole_gradient)
    sums = dict.fromkeys(("loss", *whole.metrics), torch.zeros((), dtype=DOUBLE))
    for part in ([4, 0, 1, 2], [3], [5]):
        share = len(part) / 6
        options = {"normaliser": num_tokens * share} if name in NEEDS_TOKENS else {}
        output, part_gradient = run(name, {k: x[part] for k, x in batch.items()}, **options)
        gradient[part] = share * part_gradient
        for key, value in {"loss": output.loss, **output.metrics}.items():
            sums[key] = sums[key] + share * value
    assert_same((LossOutput(sums.pop("loss"), sums), gradient), (whole, whole_gradient))


@every_loss
@pytest.mark.parametrize("rows", [0, 2])
def test_no_rows_or_no_tokens_give_a_loss_of_zero(name: str, rows: int) -> None:
    batch = random_batch(rows=rows)
    batch["mask_BT"] = torch.zeros_like(batch["mask_BT"])
    output, gradient = run(name, batch)
    assert output.loss.item() == 0.0
    assert gradient.eq(0).all()
    assert all(metric == 0.0 for metric in output.metrics.values())


@pytest.mark.parametrize("name", ["ppo", *(f"variant {name}" for name in GROUP_VARIANTS)])
def test_gradients_stay_within_the_policy(name: str) -> None:
    batch = {
        key: tensor if key == "mask_BT" else tensor.clone().requires_grad_()
        for key, tensor in random_batch().items()
    }
    output = LOSSES[name](batch)
    output.loss.backward()
    assert batch["logprobs_BT"].grad is not None
    for key in ("old_logprobs_BT", "advantages", "reference_logprobs_BT", "entropy_BT"):
        assert batch[key].grad is None, key
    assert not any(metric.requires_grad for metric in output.metrics.values())


@pytest.mark.parametrize("name", ["ppo", *(f"variant {name}" for name in GROUP_VARIANTS)])
def test_equal_rewards_leave_the_policy_alone(name: str) -> None:
    batch = random_batch() | {"advantages": torch.zeros(6, dtype=DOUBLE)}
    batch["reference_logprobs_BT"] = batch["logprobs_BT"]
    _, gradient = run(name, batch)
    assert gradient.eq(0).all()


def test_entropy_is_reported_where_it_is_given() -> None:
    batch = random_batch()
    expected = (batch["entropy_BT"] * batch["mask_BT"]).sum(1) / batch["mask_BT"].sum(1)
    assert plain("ppo", batch).metrics["entropy"].item() == pytest.approx(expected.mean().item())
    assert "entropy" not in plain("ppo", without(batch, "entropy_BT")).metrics

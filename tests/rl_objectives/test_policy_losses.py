"""Policy losses equal their definitions and those of TRL; the table of variants is complete."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import ReinforceLoss

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.kl import KlKind, kl_estimate, straight_through_kl
from nip_astra.rl_objectives.policy_losses import (
    GROUP_VARIANTS,
    GroupVariantName,
    PolicyLoss,
    effective_sample_size,
    nll_loss,
    policy_loss,
)
from nip_astra.rl_objectives.reductions import REDUCTIONS, reduce_loss
from nip_astra.rl_objectives.values import value_loss
from nip_astra.trainers.language_model_base import STEP_TOTALS
from nip_astra.trainers.service import self_hosted
from nip_astra.trainers.service.base import PolicyLossParameters
from nip_astra.trainers.service.remote_api import RemoteApiTrainer, RemoteLossParameters
from tests.rl_objectives.batches import DOUBLE, inputs_of, loss_of_variant, random_batch, without
from tests.rl_objectives.references import assert_same, grpo_of_trl, loss_of_trl

CLIP = PolicyLoss.of("ppo", clip_low=0.2, clip_high=0.3)


def tokens(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=DOUBLE)


LOSSES: dict[str, PolicyLoss] = {
    "clip": CLIP,
    **{name: PolicyLoss.of(name) for name in ("importance_sampling", "ppo", "cispo", "sapo")},
    # TorchRL's bounds; by default there is none below, as in TRL.
    "narrow_cispo": PolicyLoss.of("cispo", clip_low=0.2, clip_high=0.2),
    "dual_clip": PolicyLoss.of("ppo", {"dual_clip": 1.5}),
    "gspo": PolicyLoss.of("gspo", clip_low=0.1, clip_high=0.1),
    "dro": PolicyLoss.of("dro", {"beta": 0.5}),
    **{name: PolicyLoss.of(name) for name in ("reinforce", "rloo", "vespo")},
    "luspo": PolicyLoss.of("luspo", clip_low=0.1, clip_high=0.1),
}


VESPO_UP, VESPO_DOWN = 1.5**2 * math.exp(-1.5), 1.5**3 * math.exp(-1.0)


def one_token(ratio: float, advantage: float) -> tuple[torch.Tensor, ...]:
    logprobs, old = tokens(math.log(ratio) - 3.0).requires_grad_(), tokens(-3.0)
    return logprobs, old, torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss", "slope"),
    [
        ("clip", 1.0, 2.0, -2.0, -2.0),  # d ratio / d log pi = ratio
        ("clip", 1.5, 2.0, -2.6, 0.0),  # beyond the clip, in the advantage's direction
        ("clip", 0.5, 2.0, -1.0, -1.0),  # too low, and should increase
        ("clip", 0.5, -2.0, 1.6, 0.0),
        ("clip", 1.5, -2.0, 3.0, 3.0),
        ("dual_clip", 3.0, -2.0, 3.0, 0.0),
        ("dual_clip", 3.0, 2.0, -2.4, 0.0),
        ("importance_sampling", 3.0, 2.0, -6.0, -6.0),
        ("cispo", 6.0, 2.0, -8.0 * (math.log(6.0) - 3), -8.0),
        ("cispo", 0.1, -2.0, 0.2 * (math.log(0.1) - 3), 0.2),
        ("narrow_cispo", 0.5, 2.0, -1.6 * (math.log(0.5) - 3), -1.6),
        ("gspo", 1.05, 2.0, -2.1, -2.1),
        ("gspo", 1.5, 2.0, -2.2, 0.0),
        ("luspo", 1.05, 2.0, -2.1, -2.1),
        ("luspo", 1.5, 2.0, -2.2, 0.0),
        ("vespo", 1.0, 2.0, 6.0, -2.0),
        # phi = 1.5**2 e**(3 (1 - 1.5)) for A >= 0, else 1.5**3 e**(2 (1 - 1.5))
        ("vespo", 1.5, 2.0, -2 * VESPO_UP * (math.log(1.5) - 3), -2 * VESPO_UP),
        ("vespo", 1.5, -2.0, 2 * VESPO_DOWN * (math.log(1.5) - 3), 2 * VESPO_DOWN),
        ("rloo", 1.1, 2.0, -2.2, -2.2),
        ("rloo", 1.5, 2.0, -2.4, 0.0),
        ("sapo", 1.0, 2.0, -4.0, -2.0),
        # 0.25 log(3)**2 - 2 log pi, and its derivative 0.5 log(3) - 2
        ("dro", 3.0, 2.0, 0.25 * math.log(3) ** 2 - 2 * math.log(3) + 6, 0.5 * math.log(3) - 2),
        ("reinforce", 3.0, 2.0, -2.0 * (math.log(3) - 3), -2.0),
    ],
)
def test_losses_of_one_token_equal_hand_computed_values(
    name: str, ratio: float, advantage: float, loss: float, slope: float
) -> None:
    given = one_token(ratio, advantage)
    output = policy_loss(*given, loss=LOSSES[name])
    assert output.loss.item() == pytest.approx(loss, abs=1e-6)
    (gradient,) = torch.autograd.grad(output.loss, given[0])
    assert gradient.item() == pytest.approx(slope, abs=1e-6)
    assert output.metrics["ratio_mean"].item() == pytest.approx(ratio)
    assert output.metrics["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio))
    options = LOSSES[name].options
    if "clip_low" in options:
        is_outside = not -options["clip_low"] <= ratio - 1 <= options["clip_high"]
        assert output.metrics["ratio_outside_clip"].item() == float(is_outside)
        assert output.metrics["clip_fraction"].item() == float(slope == 0.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e4])
@pytest.mark.parametrize("name", ["ppo", *GROUP_VARIANTS])
def test_a_policy_that_went_far_has_finite_gradients_and_metrics_in_float32(
    name: str, log_ratio: float, advantage: float
) -> None:
    old = torch.tensor([[-120.0, -1.0], [-150.0, -2.0]])
    logprobs = (old + torch.tensor([[log_ratio, 0.1], [log_ratio, -0.1]])).requires_grad_()
    advantages, mask = torch.full((2,), advantage), torch.ones(2, 2, dtype=torch.bool)
    inputs, options = (logprobs, old, advantages, mask), {"reference_logprobs_BT": old}
    loss = policy_loss if name == "ppo" else partial(loss_of_variant, name)
    output = loss(*inputs, **options, kl_weight=0.1)
    output.loss.backward()
    assert logprobs.grad.isfinite().all()
    assert all(math.isfinite(float(value)) for value in output.metrics.values())


def test_a_penalty_without_a_reference_is_refused() -> None:
    batch = without(random_batch(), "reference_logprobs_BT")
    with pytest.raises(ConfigurationError, match=r"0\.1.*reference_logprobs_BT"):
        policy_loss(**batch, kl_weight=0.1)


def test_reinforce_and_nll_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-1.5, 0.0]], dtype=DOUBLE, requires_grad=True)
    mask, advantages = torch.tensor([[True, True], [True, False]]), torch.tensor([2.0, -1.0])
    given = (logprobs, None, advantages, mask)
    output = policy_loss(*given, loss="reinforce", reduction="sequence_sum")
    output.loss.backward()
    # -(2 * (-1 - 2) - 1 * (-1.5)) / 2
    assert output.loss.item() == pytest.approx(2.25)
    assert logprobs.grad.tolist() == [[-1.0, -1.0], [0.5, 0.0]]
    assert nll_loss(logprobs, mask).loss.item() == pytest.approx((1 + 2 + 1.5) / 3)
    assert nll_loss(logprobs, mask).metrics["nll"].item() == pytest.approx(1.5)


def test_reinforce_equals_that_of_torchrl() -> None:
    policy, critic = (nn.Embedding(7, size, dtype=DOUBLE) for size in (4, 1))
    actor = ProbabilisticActor(
        TensorDictModule(policy, ["state"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    values = TensorDictModule(critic, ["state"], ["state_value"])
    reference = ReinforceLoss(actor, values, functional=False)
    generator = torch.Generator().manual_seed(1)
    states, actions = (torch.randint(0, size, (12,), generator=generator) for size in (7, 4))
    advantages, targets = torch.randn(2, 12, 1, generator=generator, dtype=DOUBLE)
    columns = {"state": states, "action": actions}
    columns |= {"advantage": advantages, "value_target": targets}
    logprobs = policy(states).log_softmax(-1).gather(1, actions[:, None])
    ours = policy_loss(logprobs, None, advantages, torch.ones(12, 1).bool(), loss="reinforce")
    expected = reference(TensorDict(columns, [12]))["loss_actor"]
    assert_same(ours.loss, expected, policy.weight)


def test_the_likelihood_of_tokens_is_the_cross_entropy_of_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 5, 4, generator=generator, dtype=DOUBLE, requires_grad=True)
    answers = torch.randint(0, 4, (3, 5), generator=generator)
    mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    logprobs = logits.log_softmax(-1).gather(2, answers[..., None])[..., 0]
    labels = answers.masked_fill(~mask, -100)
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
    assert_same(nll_loss(logprobs, mask).loss, expected, logits)


@pytest.mark.parametrize(
    ("new", "clip_range", "loss", "slope"),
    [
        (1.0, None, 2.0, -2.0),  # (1 - 3)**2 / 2
        (1.0, 0.25, 3.125, 0.0),  # moved up by 0.75: clipped to 0.5, and (0.5 - 3)**2 is larger
        (-1.0, 0.25, 8.0, -4.0),  # moved away: the unclipped error is larger
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


def arguments(*seed: int, **sizes: float) -> tuple[torch.Tensor, ...]:
    batch = random_batch(*seed, **sizes)
    batch["logprobs_BT"].requires_grad_()
    return inputs_of(batch)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_on_policy_is_that_of_the_score(name: str) -> None:
    _, old, advantages, mask = arguments()
    logprobs = old.clone().requires_grad_()
    loss = LOSSES[name].of_tokens(logprobs, old, advantages, mask).sum()
    expected = torch.where(mask, -advantages[:, None], 0.0)
    assert torch.allclose(torch.autograd.grad(loss, logprobs)[0], expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_dual_clip_equals_the_delta_of_trl(trl: SimpleNamespace, seed: int) -> None:
    given = arguments(seed)
    mine = LOSSES["dual_clip"].of_tokens(*given)
    assert_same(reduce_loss(mine, given[3], "token"), grpo_of_trl(trl, given, delta=1.5), given[0])


VESPO_OF_TRL = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
OF_TRL: dict[str, dict[str, Any]] = {
    "ppo": {},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    },
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "cispo": {"loss_type": "cispo", "epsilon_high": 4.0},
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 2e-3,
        "epsilon_high": 2.5e-3,
    },
    "vespo": {"loss_type": "vespo"}
    | {f"vespo_{name}": value for name, value in VESPO_OF_TRL.items()},
}
"""How TRL computes what trainers compute by their defaults; Tinker's cispo has a bound of 4."""


def trained_batch(given: tuple[torch.Tensor, ...]) -> TensorDict:
    """A batch of a trainer on services."""
    columns = dict(zip(("old_logprobs", "advantages", "trained_mask"), given[1:], strict=True))
    return TensorDict(columns, batch_size=[len(given[0])])


@pytest.mark.parametrize("name", OF_TRL)
@pytest.mark.parametrize("seed", range(2))
def test_losses_by_the_defaults_of_trainers_equal_those_of_trl(
    trl: SimpleNamespace, name: str, seed: int
) -> None:
    given = arguments(seed)
    assert len(set(given[3].sum(dim=1).tolist())) > 1  # ragged, so that reductions differ
    options, lengths = PolicyLossParameters(loss=name), {"normaliser": None, "max_length": None}
    mine = self_hosted.policy_loss(given[0], trained_batch(given), options, **lengths).loss
    assert_same(mine, grpo_of_trl(trl, given, **OF_TRL[name]), given[0])


@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_losses_of_services_by_their_defaults_equal_the_sums_of_trl(
    trl: SimpleNamespace, name: str
) -> None:
    given = arguments(2)
    batch = trained_batch(given)
    batch[STEP_TOTALS] = torch.tensor([[int(given[3].sum()), len(batch)]]).expand(len(batch), 2)
    trainer: Any = SimpleNamespace(
        parameters=SimpleNamespace(policy_loss=RemoteLossParameters(loss=name)),
        old_logprobs=lambda batch, _: batch["old_logprobs"],
        policy_logprobs=lambda *_: (given[0],),
    )
    mine = RemoteApiTrainer.loss(trainer, batch).loss
    # Services use sums; both TRL losses are means over tokens.
    assert_same(mine, grpo_of_trl(trl, given, **OF_TRL[name]) * given[3].sum(), given[0])


def test_the_effective_sample_size_is_one_where_all_weights_are_alike() -> None:
    mask = torch.tensor([True, True, False])
    assert effective_sample_size(torch.tensor([2.0, 2.0, 9.0]), mask).item() == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0.0, 9.0]), mask).item() == 0.5


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.2])
@pytest.mark.parametrize("scale", [0.05, 0.5, 2.0])
def test_group_variants_equal_grpo_of_trl(
    trl: SimpleNamespace, name: str, kl_weight: float, scale: float
) -> None:
    batch = random_batch(3, rows=8, tokens=6, scale=scale)
    batch["logprobs_BT"].requires_grad_()
    given, reference = inputs_of(batch), batch["reference_logprobs_BT"]
    options = {"reference_logprobs_BT": reference, "kl_weight": kl_weight}
    mine = loss_of_variant(name, *given, **options).loss
    variant = GROUP_VARIANTS[name]
    clip = PolicyLoss.of(variant.loss, clip_high=variant.clip_high).options
    theirs = grpo_of_trl(
        trl,
        given,
        {"ref_per_token_logps": reference},
        loss_type={"gspo": "grpo"}.get(name, name),
        importance_sampling_level="sequence" if name == "gspo" else "token",
        epsilon_low=clip["clip_low"],
        epsilon_high=clip["clip_high"] if name != "cispo" else 1 + clip["clip_high"],
        beta=kl_weight,
    )
    assert_same(mine, theirs, given[0])


@pytest.mark.parametrize("name", ["ppo", "cispo", "sapo", "gspo"])
@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_a_divergence_by_ratio_equals_the_bias_correction_of_trl(
    trl: SimpleNamespace, name: str, scale: float
) -> None:
    batch = random_batch(5, rows=8, tokens=6, scale=scale)
    batch["logprobs_BT"].requires_grad_()
    given, reference = inputs_of(batch), batch["reference_logprobs_BT"]
    kl = {"reference_logprobs_BT": reference, "kl_weight": 0.3, "kl_gradient": "k3"}
    mine = policy_loss(*given, loss=name, is_kl_weighted=True, **kl).loss
    options = {"beta": 0.3, "use_bias_correction_kl": True} | OF_TRL[name]
    theirs = grpo_of_trl(trl, given, {"ref_per_token_logps": reference}, **options)
    assert_same(mine, theirs, given[0])


def test_on_policy_a_divergence_by_ratio_has_the_gradient_of_k2() -> None:
    batch = random_batch(6)
    logprobs = batch["old_logprobs_BT"].clone().requires_grad_()
    reference, mask = batch["reference_logprobs_BT"], batch["mask_BT"]
    given = (logprobs, batch["old_logprobs_BT"], torch.zeros(len(mask)), mask)
    weighted, plain = (
        policy_loss(
            *given,
            reference_logprobs_BT=reference,
            kl_weight=1.0,
            kl_gradient=gradient,
            is_kl_weighted=is_weighted,
        ).loss
        for gradient, is_weighted in (("k3", True), ("k2", False))
    )
    assert_same(weighted, plain, logprobs)


@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_rloo_equals_rloo_of_trl(trl: SimpleNamespace, scale: float) -> None:
    logprobs, old, advantages, mask = arguments(4, rows=8, tokens=6, scale=scale)
    inputs = {"old_logps": (old * mask).sum(1)}
    clip = {"epsilon_low": 0.2, "epsilon_high": 0.2}
    theirs = loss_of_trl(trl.RLOOTrainer, logprobs, mask, advantages, inputs, **clip)
    mine = loss_of_variant("rloo", logprobs, old, advantages, mask).loss
    assert_same(mine, theirs, logprobs)


# ---- straight-through KL


def test_a_straight_through_kl_shows_one_estimate_and_pulls_as_another() -> None:
    batch = random_batch(4)
    logprobs = batch["logprobs_BT"].requires_grad_()
    given = (logprobs, batch["reference_logprobs_BT"])
    kinds: tuple[KlKind, ...] = ("k1", "k2", "k3")
    for value in kinds:
        for gradient in kinds[1:]:
            result = straight_through_kl(*given, batch["mask_BT"], value=value, gradient=gradient)
            shown = kl_estimate(*given, value, mask_BT=batch["mask_BT"])
            pulls = kl_estimate(*given, gradient, mask_BT=batch["mask_BT"])
            assert torch.allclose(result, shown, atol=1e-12)
            mine, expected = (torch.autograd.grad(x.sum(), logprobs)[0] for x in (result, pulls))
            assert torch.allclose(mine, expected, atol=1e-12)


def test_the_gradient_of_k1_is_refused_since_it_is_zero_on_average() -> None:
    zeros = torch.zeros(1, 1)
    with pytest.raises(ConfigurationError, match=r"'k1'.*'k2'"):
        straight_through_kl(zeros, zeros, zeros == 0, value="k1", gradient="k1")


@pytest.mark.parametrize(
    ("name", "options", "facts"),
    [
        ("ppo", {"clip_low": -0.2}, "-0.2"),
        ("ppo", {"dual_clip": 1.1}, "dual_clip 1.1"),
        ("sapo", {"temperature_positive": 0.0}, "0.0"),
        ("cipso", {}, "cispo"),
        ("ppo", {"dual_clp": 3.0}, "dual_clip"),
    ],
)
def test_options_without_a_meaning_are_refused(
    name: str, options: dict[str, float], facts: str
) -> None:
    with pytest.raises(ConfigurationError, match=facts):
        PolicyLoss.of(name, options).of_tokens(*one_token(1.0, 1.0))


# ---- variants


def test_every_variant_has_a_source_and_is_that_of_its_paper() -> None:
    assert tuple(GROUP_VARIANTS) == get_args(GroupVariantName)
    assert all("arXiv:" in item.source for item in GROUP_VARIANTS.values())
    assert {item.reduction for item in GROUP_VARIANTS.values()} <= set(REDUCTIONS)
    facts = {
        name: (v.loss, v.clip_high, v.baseline, v.scale, v.zero_variance, v.reduction)
        for name, v in GROUP_VARIANTS.items()
    }
    assert facts == {
        "grpo": ("ppo", None, "mean", "group", "keep", "sequence"),
        "dr_grpo": ("ppo", None, "mean", "none", "keep", "sum_over_length"),
        "dapo": ("ppo", 0.28, "mean", "group", "drop", "token"),
        "cispo": ("cispo", None, "mean", "group", "drop", "token"),
        "gspo": ("gspo", None, "mean", "group", "keep", "sequence"),
        "rloo": ("rloo", None, "leave_one_out", "none", "keep", "sequence_sum"),
    }

"""Token losses and reductions: by hand, against TRL, and what must not change them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.group_variants import GROUP_VARIANTS
from nip_astra.rl_objectives.importance import effective_sample_size, mismatch_weights
from nip_astra.rl_objectives.kl import KlKind, kl_estimate, straight_through_kl
from nip_astra.rl_objectives.masked import REDUCTIONS, Reduction, reduce_loss
from nip_astra.rl_objectives.policy_gradient import group_policy_loss
from nip_astra.rl_objectives.reductions import batch_totals, reduce_share
from nip_astra.rl_objectives.token_losses import (
    cispo_loss,
    clipped_loss,
    gspo_token_loss,
    importance_sampling_loss,
    overlong_penalty,
    sapo_loss,
)
from nip_astra.trainers.language_model.steps import STEP_TOTALS
from nip_astra.trainers.remote_api_base import RemoteApiTrainer, ServiceLossParameters
from nip_astra.trainers.service.losses import policy_loss
from nip_astra.trainers.service.parameters import PolicyLossParameters
from tests.rl_objectives.batches import random_batch
from tests.rl_objectives.references import trl_trainer

DOUBLE = torch.float64
LOSSES: dict[str, Any] = {
    "importance_sampling": importance_sampling_loss,
    "clipped": clipped_loss,
    "dual_clip": lambda *args: clipped_loss(*args, dual_clip=1.5),
    "cispo": cispo_loss,
    "gspo_token": lambda *args: gspo_token_loss(*args, least_ratio=0.9, most_ratio=1.1),
    "sapo": sapo_loss,
}


def arguments(seed: int = 0) -> tuple[torch.Tensor, ...]:
    batch = random_batch(seed)
    logprobs = batch["logprobs_BT"].requires_grad_()
    return logprobs, batch["old_logprobs_BT"], batch["advantages"], batch["mask_BT"]


def one_token(ratio: float, advantage: float) -> tuple[torch.Tensor, ...]:
    logprobs = torch.tensor([[math.log(ratio)]], dtype=DOUBLE, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    return logprobs, torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([advantage]), mask


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss", "slope"),
    [
        ("importance_sampling", 3.0, 2.0, -6.0, -6.0),
        ("clipped", 1.5, 2.0, -2.4, 0.0),
        ("clipped", 1.1, 2.0, -2.2, -2.2),
        ("clipped", 0.5, -2.0, 1.6, 0.0),
        ("clipped", 3.0, -2.0, 6.0, 6.0),
        ("dual_clip", 3.0, -2.0, 3.0, 0.0),
        ("dual_clip", 3.0, 2.0, -2.4, 0.0),
        ("cispo", 6.0, 2.0, -8.0 * math.log(6.0), -8.0),
        ("cispo", 0.1, -2.0, 0.2 * math.log(0.1), 0.2),
        ("gspo_token", 1.05, 2.0, -2.1, -2.1),
        ("gspo_token", 1.5, 2.0, -2.2, 0.0),
        ("sapo", 1.0, 2.0, -4.0, -2.0),
    ],
)
def test_losses_of_one_token_are_those_worked_out_by_hand(
    name: str, ratio: float, advantage: float, loss: float, slope: float
) -> None:
    given = one_token(ratio, advantage)
    found = LOSSES[name](*given)
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert torch.autograd.grad(found.sum(), given[0])[0].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_on_policy_is_that_of_the_score(name: str) -> None:
    _, old, advantages, mask = arguments()
    logprobs = old.clone().requires_grad_()
    loss = LOSSES[name](logprobs, old, advantages, mask).sum()
    expected = torch.where(mask, -advantages[:, None], 0.0)
    assert torch.allclose(torch.autograd.grad(loss, logprobs)[0], expected, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_padding_never_matters_not_even_nan(name: str) -> None:
    logprobs, old, advantages, mask = arguments()
    spoilt = torch.where(mask, logprobs.detach(), torch.nan).requires_grad_()
    losses = [
        LOSSES[name](one, two, advantages, mask)
        for one, two in ((logprobs, old), (spoilt, torch.where(mask, old, torch.inf)))
    ]
    assert torch.equal(losses[0], losses[1])
    gradients = [
        torch.autograd.grad(loss.sum(), given)[0]
        for loss, given in zip(losses, (logprobs, spoilt), strict=True)
    ]
    assert torch.equal(gradients[0], gradients[1])


def test_gspo_of_tokens_has_the_mean_and_the_gradient_of_gspo() -> None:
    logprobs, old, advantages, mask = arguments(2)
    bounds = {"least_ratio": 0.9, "most_ratio": 1.1}
    loss_BT = gspo_token_loss(logprobs, old, advantages, mask, **bounds)
    tokens = reduce_loss(loss_BT, mask, "sequence")
    ratio = (torch.where(mask, logprobs - old, 0.0).sum(1) / mask.sum(1)).exp()
    rows = torch.maximum(-ratio * advantages, -ratio.clamp(0.9, 1.1) * advantages).mean()
    assert tokens.item() == pytest.approx(rows.item(), abs=1e-12)
    mine, theirs = (torch.autograd.grad(one, logprobs)[0] for one in (tokens, rows))
    assert torch.allclose(mine, theirs, atol=1e-12)
    assert mine.abs().max() > 0


@pytest.fixture(scope="module")
def trl() -> Any:
    """The trainer, imported only where a test asks for it."""
    pytest.importorskip("trl", minversion="1.16")
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


def loss_of_trl(trl: Any, given: tuple[torch.Tensor, ...], **changes: Any) -> torch.Tensor:
    logprobs, old, advantages, mask = given
    attributes = {
        "loss_type": "bnpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "max_completion_length": 9,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
    }
    args = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1}
    args |= {name: changes.pop(name) for name in [*changes] if name.startswith(("delta", "sapo"))}
    trainer = trl_trainer(
        **(attributes | changes),
        args=SimpleNamespace(**args),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, logprobs * 0, None),
    )
    nothing = torch.zeros(len(mask), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask.to(DOUBLE),
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    found = trl._compute_loss(trainer, None, inputs)
    assert isinstance(found, torch.Tensor)
    return found


def assert_same(mine: torch.Tensor, theirs: torch.Tensor, given: torch.Tensor) -> None:
    assert mine.item() == pytest.approx(theirs.item(), abs=1e-10)
    slopes = [torch.autograd.grad(one, given)[0] for one in (mine, theirs)]
    assert slopes[0].abs().max() > 0
    assert torch.allclose(slopes[0], slopes[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_dual_clip_equals_the_delta_of_trl(trl: Any, seed: int) -> None:
    given = arguments(seed)
    mine = clipped_loss(*given, dual_clip=1.5)
    assert_same(reduce_loss(mine, given[3], "token"), loss_of_trl(trl, given, delta=1.5), given[0])


def test_cispo_clamps_as_trl_or_as_torchrl_by_its_bounds(trl: Any) -> None:
    # TRL: clamp(max=5), no lower bound. TorchRL: clamp(1 - epsilon, 1 + epsilon).
    given = arguments(1)
    mine = cispo_loss(*given, most_ratio=5.0)
    theirs = loss_of_trl(trl, given, loss_type="cispo", epsilon_high=5.0)
    assert_same(reduce_loss(mine, given[3], "token"), theirs, given[0])
    logprobs, old, advantages, mask = given
    narrow = cispo_loss(*given, least_ratio=0.8, most_ratio=1.2)
    ratio = (logprobs - old).exp().detach().clamp(0.8, 1.2)
    assert torch.allclose(narrow[mask], (-ratio * advantages[:, None] * logprobs)[mask])


OF_TRL: dict[str, dict[str, Any]] = {
    "clipped": {},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    },
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "cispo": {"loss_type": "cispo", "epsilon_high": 4.0},
}
"""How TRL computes what trainers compute by their defaults; Tinker's cispo has a bound of 4."""


@pytest.mark.parametrize("name", OF_TRL)
@pytest.mark.parametrize("seed", range(2))
def test_losses_by_the_defaults_of_trainers_equal_those_of_trl(
    trl: Any, name: str, seed: int
) -> None:
    given = arguments(seed)
    assert len(set(given[3].sum(dim=1).tolist())) > 1  # ragged, so that reductions differ
    columns = ("old_logprobs", "advantages", "trained_mask")
    batch = TensorDict(dict(zip(columns, given[1:], strict=True)), batch_size=[len(given[0])])
    options = PolicyLossParameters(loss=name)  # type: ignore[arg-type]
    mine = policy_loss(given[0], batch, options, normaliser=None, max_length=None).loss
    assert_same(mine, loss_of_trl(trl, given, **OF_TRL[name]), given[0])


@pytest.mark.parametrize(("name", "theirs"), [("ppo", "clipped"), ("cispo", "cispo")])
def test_losses_of_services_by_their_defaults_equal_the_sums_of_trl(
    trl: Any, name: Any, theirs: str
) -> None:
    given = arguments(2)
    rows = len(given[0])
    totals = torch.tensor([[int(given[3].sum()), rows]]).expand(rows, 2)
    columns = {"old_logprobs": given[1], "advantages": given[2], "trained_mask": given[3]}
    batch = TensorDict({**columns, STEP_TOTALS: totals}, batch_size=[rows])
    trainer: Any = SimpleNamespace(
        _loss_options=lambda: ServiceLossParameters(loss_fn=name),
        policy_logprobs=lambda *_: (given[0],),
    )
    mine = RemoteApiTrainer.loss(trainer, batch).loss
    # Services take sums; both of TRL are means over tokens.
    assert_same(mine, loss_of_trl(trl, given, **OF_TRL[theirs]) * given[3].sum(), given[0])


def test_gspo_of_an_attacker_by_its_defaults_equals_that_of_trl(trl: Any) -> None:
    given = arguments(3)
    mine = group_policy_loss(*given, variant=GROUP_VARIANTS["gspo"]).loss
    assert_same(mine, loss_of_trl(trl, given, **OF_TRL["gspo"]), given[0])


# ---- reductions


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_shares_of_any_split_add_up_to_the_loss_of_the_whole(reduction: Reduction) -> None:
    batch = random_batch(5, rows=7)
    values, mask = batch["logprobs_BT"], batch["mask_BT"]
    length = 9 if reduction == "sum_over_length" else None
    whole = reduce_loss(values, mask, reduction, max_length=length)
    totals = batch_totals(mask)
    for parts in ([7], [1, 6], [3, 3, 1], [1] * 7):
        shares = [
            reduce_share(v, m, reduction, totals, max_length=length)
            for v, m in zip(values.split(parts), mask.split(parts), strict=True)
        ]
        assert sum(shares).item() == pytest.approx(whole.item(), abs=1e-12)  # type: ignore[union-attr]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padding_and_rows_of_no_weight_do_not_change_a_loss(reduction: Reduction) -> None:
    batch = random_batch(6)
    values, mask = batch["logprobs_BT"], batch["mask_BT"]
    length = 9 if reduction == "sum_over_length" else None
    plain = reduce_share(values, mask, reduction, batch_totals(mask), max_length=length)
    wide = torch.nn.functional.pad(values, (2, 3, 0, 2), value=torch.nan)
    wide_mask = torch.nn.functional.pad(mask, (2, 3, 0, 2))
    wide_mask[-1, 0] = True  # as a row that pads the batch may have
    weights = torch.tensor([1.0] * 6 + [0.0] * 2)
    totals = batch_totals(wide_mask, weights)
    padded = reduce_share(wide, wide_mask, reduction, totals, weights_B=weights, max_length=length)
    assert padded.item() == pytest.approx(plain.item(), abs=1e-12)


def test_the_four_reductions_are_four_numbers() -> None:
    # NexRL's seq-mean-token-sum is a copy of its seq-mean-token-mean.
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    totals = batch_totals(mask)
    found = {
        name: reduce_share(
            values, mask, name, totals, max_length=6 if name == "sum_over_length" else None
        ).item()
        for name in REDUCTIONS
    }
    assert found == pytest.approx(
        {"token": 2.5, "sequence": 3.0, "sequence_sum": 5.0, "sum_over_length": 5 / 6}
    )


def test_a_length_that_is_missing_or_without_use_is_refused() -> None:
    batch = random_batch(0)
    values, mask = batch["logprobs_BT"], batch["mask_BT"]
    with pytest.raises(ConfigurationError, match="it needs one"):
        reduce_share(values, mask, "sum_over_length", batch_totals(mask))
    with pytest.raises(ConfigurationError, match="Known reductions"):
        reduce_share(values, mask, "mean", batch_totals(mask))  # type: ignore[arg-type]


# ---- mismatch


def test_mismatch_weights_truncate_or_mask_by_token_or_row() -> None:
    logprobs = torch.log(torch.tensor([[3.0, 0.5], [1.5, 0.1]], dtype=DOUBLE))
    sampler, mask = torch.zeros(2, 2, dtype=DOUBLE), torch.tensor([[True, True], [True, False]])

    def found(**options: Any) -> list[float]:
        weights = mismatch_weights(logprobs, sampler, mask, most=2.0, **options)
        return [round(one, 12) for one in weights.flatten().tolist()]

    assert found() == [2.0, 0.5, 1.5, 0.0]
    assert found(mode="mask", least=0.6) == [0.0, 0.0, 1.5, 0.0]
    assert found(level="sequence") == [1.5, 1.5, 1.5, 0.0]
    assert found(level="sequence", mode="mask", least=1.0) == [1.5, 1.5, 1.5, 0.0]
    with pytest.raises(ConfigurationError, match="leaves out those that agree"):
        mismatch_weights(logprobs, sampler, mask, most=0.5)
    with pytest.raises(ConfigurationError, match="Known levels: token, sequence"):
        mismatch_weights(logprobs, sampler, mask, mode="drop")  # type: ignore[arg-type]


def test_the_effective_sample_size_is_one_where_all_weights_are_alike() -> None:
    mask = torch.tensor([True, True, False])
    assert effective_sample_size(torch.tensor([2.0, 2.0, 9.0]), mask).item() == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0.0, 9.0]), mask).item() == 0.5


def test_the_penalty_on_overlong_answers_falls_in_a_line() -> None:
    lengths = torch.tensor([5, 8, 9, 10, 12])
    found = overlong_penalty(lengths, max_length=10, margin=2)
    assert found.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


# ---- straight-through KL


def test_a_straight_through_kl_shows_one_estimate_and_pulls_as_another() -> None:
    batch = random_batch(4)
    logprobs = batch["logprobs_BT"].requires_grad_()
    given = (logprobs, batch["reference_logprobs_BT"])
    kinds: tuple[KlKind, ...] = ("k1", "k2", "k3")
    for value in kinds:
        for gradient in kinds[1:]:
            found = straight_through_kl(*given, batch["mask_BT"], value=value, gradient=gradient)
            shown = kl_estimate(*given, value, mask_BT=batch["mask_BT"])
            pulls = kl_estimate(*given, gradient, mask_BT=batch["mask_BT"])
            assert torch.allclose(found, shown, atol=1e-12)
            mine, expected = (torch.autograd.grad(x.sum(), logprobs)[0] for x in (found, pulls))
            assert torch.allclose(mine, expected, atol=1e-12)


def test_the_gradient_of_k1_is_refused_since_it_is_zero_on_average() -> None:
    zeros = torch.zeros(1, 1)
    with pytest.raises(ConfigurationError, match="on average over samples of the policy that is 0"):
        straight_through_kl(zeros, zeros, zeros == 0, value="k1", gradient="k1")


def test_ratio_bounds_that_cannot_be_meant_are_refused() -> None:
    given = one_token(1.0, 1.0)
    with pytest.raises(ConfigurationError, match="bounds of the ratio itself"):
        clipped_loss(*given, least_ratio=0.2, most_ratio=0.2)
    with pytest.raises(ConfigurationError, match="within the bounds"):
        clipped_loss(*given, dual_clip=1.1)
    with pytest.raises(ConfigurationError, match="both divide"):
        sapo_loss(*given, temperature_positive=0.0)

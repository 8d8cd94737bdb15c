"""The wider preference family: by hand, and against TRL's own code."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.preference import (
    Divergence,
    PairKind,
    divergence_scores,
    kto_loss,
    orpo_loss,
    pair_loss,
    preference_loss,
    sequence_logprobs,
    simpo_loss,
)
from tests.rl_objectives import references
from tests.rl_objectives.references import model_with_logprobs, trl_trainer
from tests.rl_objectives.test_against_trl import dpo_of_trl, random_batch

DOUBLE = torch.float64
# TRL computes some of these in float32.
assert_same = partial(references.assert_same, tolerance=1e-6)


def two_rows(seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = -torch.rand(2, 5, generator=generator, dtype=DOUBLE) * 2
    return chosen.requires_grad_(), rejected.requires_grad_()


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("nca", "nca_pair"),
        ("sppo", "sppo_hard"),
        ("apo_zero", "apo_zero"),
        ("apo_down", "apo_down"),
    ],
)
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_losses_of_pairs_equal_dpo_of_trl(
    trl: SimpleNamespace, kind: PairKind, theirs: str, beta: float
) -> None:
    batch = random_batch(6, 0.5)
    chosen = batch["logprobs"][:4].clone().requires_grad_()
    rejected = batch["logprobs"][4:].clone().requires_grad_()
    mask = batch["mask"]
    ratios = (torch.cat([chosen, rejected]) - batch["reference"]).masked_fill(~mask, 0).sum(1)
    mine = pair_loss(ratios[:4], ratios[4:], kind=kind, beta=beta).loss
    assert_same(mine, dpo_of_trl(trl, theirs, chosen, rejected, batch, beta=beta), chosen, rejected)


@pytest.mark.parametrize(
    ("kind", "score"),
    [
        ("reverse_kl", math.log(2)),
        ("forward_kl", -0.5),
        ("js", math.log(4 / 3)),
        ("alpha", -2 * (2**-0.5 - 1)),
    ],
)
def test_scores_of_divergences_are_derivatives_worked_out_by_hand(
    kind: Divergence, score: float
) -> None:
    result = divergence_scores(torch.tensor([math.log(2)], dtype=DOUBLE), kind)
    assert result.item() == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize("kind", ["forward_kl", "js"])
def test_dpo_of_another_divergence_equals_that_of_trl(
    trl: SimpleNamespace, kind: Divergence, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch(6, 0.5)
    chosen = batch["logprobs"][:4].clone().requires_grad_()
    rejected = batch["logprobs"][4:].clone().requires_grad_()
    ratios = torch.cat([chosen, rejected]) - batch["reference"]
    scores = divergence_scores(ratios.masked_fill(~batch["mask"], 0).sum(1), kind)
    mine = preference_loss(
        scores[:4] - scores[4:], torch.zeros(4, dtype=DOUBLE), kind="sigmoid", beta=0.4
    ).loss
    name = {"js": "js_divergence"}.get(kind, kind)
    own = trl_trainer

    def with_divergence(**attributes: Any) -> SimpleNamespace:
        return own(**(attributes | {"f_divergence_type": name}))

    monkeypatch.setattr("tests.rl_objectives.test_against_trl.trl_trainer", with_divergence)
    theirs = dpo_of_trl(trl, "sigmoid", chosen, rejected, batch, beta=0.4)
    assert_same(mine, theirs, chosen, rejected)


def test_the_alpha_divergence_works_in_float64_where_that_of_trl_fails() -> None:
    ratios = torch.tensor([-0.3, 0.7], dtype=DOUBLE)
    near = divergence_scores(ratios, "alpha", alpha=1 - 1e-9)
    assert torch.allclose(near, ratios, atol=1e-6)
    low = divergence_scores(ratios, "alpha", alpha=1e-9)
    assert torch.allclose(low, 1 + divergence_scores(ratios, "forward_kl"), atol=1e-6)
    with pytest.raises(ConfigurationError, match="alpha"):
        divergence_scores(ratios, "alpha", alpha=1.0)


@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_simpo_equals_simpo_of_trl(trl: SimpleNamespace, margin: float) -> None:
    chosen, rejected = two_rows()
    trainer = trl_trainer(
        alpha=0.0, beta=2.0, loss_type="simpo", label_smoothing=0.0, simpo_gamma=margin
    )
    theirs = trl.CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()
    mine = simpo_loss(chosen, rejected, beta=2.0, margin=margin).loss
    assert_same(mine, theirs, chosen, rejected)


def test_orpo_equals_orpo_of_trl() -> None:
    pytest.importorskip("trl", minversion="1.16")
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected = two_rows()
    theirs = ORPOTrainer.odds_ratio_loss(trl_trainer(beta=0.3), chosen, rejected)[0]
    mine = orpo_loss(chosen, rejected, -chosen, weight=0.3).loss
    # TRL subtracts its odds-ratio term from the likelihood's loss, in float32.
    assert_same(mine, (-chosen - theirs.double()).mean(), chosen, rejected)


def test_orpo_of_certain_answers_stays_a_number() -> None:
    certain = torch.zeros(2, dtype=DOUBLE, requires_grad=True)
    loss = orpo_loss(certain, certain - 1, -certain, weight=0.3).loss
    assert torch.isfinite(loss)
    assert torch.isfinite(torch.autograd.grad(loss, certain)[0]).all()


def test_kto_is_worked_out_by_hand_and_compares_with_the_divergence() -> None:
    ratios = torch.tensor([1.0, 2.0], dtype=DOUBLE, requires_grad=True)
    good = torch.tensor([True, False])
    result = kto_loss(ratios, good, beta=0.5, baseline=0.4, undesirable_weight=2.0)
    by_hand = (1 - 1 / (1 + math.exp(-0.5 * 0.6))) + 2 * (1 - 1 / (1 + math.exp(-0.5 * -1.6)))
    assert result.loss.item() == pytest.approx(by_hand / 2, abs=1e-12)
    slope = torch.autograd.grad(result.loss, ratios)[0]
    assert slope[0] < 0 < slope[1]
    below = kto_loss(ratios, good, beta=0.5, baseline=-3.0).loss
    assert below.item() == kto_loss(ratios, good, beta=0.5).loss.item()


def test_kto_of_a_step_in_parts_equals_that_of_trl_on_the_whole() -> None:
    pytest.importorskip("trl", minversion="1.16")
    from trl.trainer.kto_trainer import KTOTrainer

    batch = random_batch(8, 0.5)
    logprobs, mask = (batch["logprobs"] + 0.2).requires_grad_(), batch["mask"]
    is_chosen = torch.arange(8) % 2 == 0
    masked = logprobs * mask
    reference = (batch["reference"] * mask).sum(dim=1)

    trainer = trl_trainer(
        beta=0.4,
        desirable_weight=1.0,
        undesirable_weight=1.0,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        _compute_kl_logps=lambda *_: masked.sum(dim=1),
    )
    # TRL drops the first position, which has no log-probability: a prompt token fills it.
    completion = torch.nn.functional.pad(mask, (1, 0))
    inputs = {
        "input_ids": torch.zeros(completion.shape, dtype=torch.long),
        "attention_mask": torch.ones(completion.shape),
        "completion_mask": completion,
        "label": is_chosen,
        "ref_logps": reference,
        "ref_KL_logps": reference,
    }
    theirs = KTOTrainer._compute_loss(trainer, model_with_logprobs(masked), inputs, False)
    ratios = sequence_logprobs(logprobs, mask, length_normalised=False) - reference
    baseline = ratios.detach().mean()
    assert baseline > 0
    parts = [
        kto_loss(ratios[part], is_chosen[part], beta=0.4, baseline=baseline).loss * len(part) / 8
        for part in (torch.arange(3), torch.arange(3, 8))
    ]
    assert_same(parts[0] + parts[1], theirs, logprobs)

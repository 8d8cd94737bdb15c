"""Losses of pairs and of single answers: by hand, and against TRL's own code."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.preference import (
    PREFERENCE_KINDS,
    Divergence,
    PreferenceKind,
    divergence_scores,
    kto_loss,
    orpo_loss,
    pair_loss,
    preference_loss,
    sequence_logprobs,
    simpo_loss,
)
from nip_astra.rl_objectives.reductions import LossOutput
from tests.rl_objectives import references
from tests.rl_objectives.batches import random_batch
from tests.rl_objectives.references import model_with_logprobs, trl_trainer

DOUBLE = torch.float64
POLICY = torch.tensor([1.5, -0.3, 0.0, 4.0], dtype=DOUBLE)
REFERENCE = torch.tensor([1.0, 0.4, 0.0, -2.0], dtype=DOUBLE)
LOSSES_OF_PAIRS = [
    *(partial(preference_loss, kind=kind, beta=0.1) for kind in PREFERENCE_KINDS),
    partial(pair_loss, kind="nca", beta=0.1),
    partial(simpo_loss, beta=2.0, margin=0.5),
]


def test_large_margins_stay_finite() -> None:
    policy = torch.tensor([1e4, -1e4]).requires_grad_()
    loss = preference_loss(policy, torch.zeros(2), kind="sigmoid", beta=1.0).loss
    loss.backward()
    assert loss.isfinite()
    assert policy.grad.isfinite().all()


RIGHT, WRONG = math.log(1 + math.exp(-0.25)), math.log(1 + math.exp(0.25))
"""-log sigmoid(0.25) and -log sigmoid(-0.25)."""


@pytest.mark.parametrize(
    ("kind", "label_smoothing", "expected"),
    [
        ("sigmoid", 0.0, RIGHT),
        ("sigmoid", 0.2, 0.8 * RIGHT + 0.2 * WRONG),
        ("robust", 0.2, (0.8 * RIGHT - 0.2 * WRONG) / 0.6),
        ("ipo", 0.0, (1.0 - 2.0) ** 2),
        ("hinge", 0.0, 0.75),
    ],
)
def test_one_pair_by_hand(kind: PreferenceKind, label_smoothing: float, expected: float) -> None:
    # beta (1.5 - 0.5) = 0.25
    policy, reference = (torch.tensor([x], dtype=DOUBLE, requires_grad=True) for x in (1.5, 0.5))
    options = {"beta": 0.25, "label_smoothing": label_smoothing}
    output = preference_loss(policy, reference, kind=kind, **options)
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)
    output.loss.backward()
    assert policy.grad.item() < 0
    assert reference.grad is None


@pytest.mark.parametrize("loss", LOSSES_OF_PAIRS)
def test_losses_are_means_over_pairs_in_any_order_and_split(
    loss: Callable[..., LossOutput],
) -> None:
    of_pairs = [loss(POLICY[i : i + 1], REFERENCE[i : i + 1]).loss for i in range(4)]
    assert loss(POLICY, REFERENCE).loss.item() == pytest.approx(sum(of_pairs).item() / 4, abs=1e-12)


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
        (preference_loss, {"kind": "ipo", "label_smoothing": 0.1}, "'ipo'.*label_smoothing 0.1"),
        (preference_loss, {"kind": "robust", "label_smoothing": 0.5}, "label_smoothing.*0.5"),
        (preference_loss, {"kind": "sigmoid", "label_smoothing": -0.1}, "label_smoothing.*-0.1"),
        (pair_loss, {"kind": "dpo"}, "nca, sppo, apo_zero, apo_down"),
        (simpo_loss, {"beta": 0, "margin": 0.5}, r"beta.*'simpo'.*0"),
    ],
)
def test_options_that_a_kind_cannot_use_are_refused(
    loss: Callable[..., LossOutput], options: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        loss(POLICY, REFERENCE, **({"beta": 0.1} | options))


# TRL computes some of these in float32.
assert_same = partial(references.assert_same, tolerance=1e-6)


@pytest.fixture
def means() -> tuple[torch.Tensor, torch.Tensor]:
    """Mean log-probabilities of five chosen and five rejected answers."""
    generator = torch.Generator().manual_seed(7)
    chosen, rejected = -torch.rand(2, 5, generator=generator, dtype=DOUBLE) * 2
    return chosen.requires_grad_(), rejected.requires_grad_()


class Pairs(NamedTuple):
    """Log-probabilities of four pairs, and of all sequences under the policy and the reference."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    reference: torch.Tensor
    mask: torch.Tensor

    @property
    def logprobs(self) -> torch.Tensor:
        return torch.cat([self.chosen, self.rejected])


@pytest.fixture
def pairs() -> Pairs:
    batch = random_batch(6, rows=8, tokens=6, scale=0.5)
    chosen, rejected = (part.clone().requires_grad_() for part in batch["logprobs_BT"].split(4))
    return Pairs(chosen, rejected, batch["reference_logprobs_BT"], batch["mask_BT"])


def inputs_of(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch of TRL; it drops the first position, which a prompt token fills."""
    completion = torch.nn.functional.pad(mask, (1, 0))
    return {
        "input_ids": torch.zeros(completion.shape, dtype=torch.long),
        "attention_mask": torch.ones(completion.shape),
        "completion_mask": completion,
    }


def dpo_of_trl(
    trl: SimpleNamespace, loss_type: str, pairs: Pairs, **attributes: object
) -> torch.Tensor:
    """TRL's loss of pairs."""
    defaults = {"label_smoothing": 0.0, "f_divergence_type": "reverse_kl"}
    trainer = trl_trainer(
        **defaults | attributes,
        ld_alpha=None,
        precompute_ref_logps=True,
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
    )
    reference = (pairs.reference * pairs.mask).sum(dim=1)
    inputs = inputs_of(pairs.mask)
    inputs |= {"ref_chosen_logps": reference[:4], "ref_rejected_logps": reference[4:]}
    model = model_with_logprobs(pairs.logprobs * pairs.mask)
    return trl.DPOTrainer._compute_loss(trainer, model, inputs, False)


@pytest.mark.parametrize(
    ("kind", "theirs", "label_smoothing", "length_normalised"),
    [
        ("sigmoid", "sigmoid", 0.0, False),
        ("sigmoid", "sigmoid_norm", 0.0, True),
        ("hinge", "hinge", 0.0, False),
        ("robust", "robust", 0.2, False),
        ("ipo", "ipo", 0.0, True),
        ("nca", "nca_pair", 0.0, False),
        ("sppo", "sppo_hard", 0.0, False),
        ("apo_zero", "apo_zero", 0.0, False),
        ("apo_down", "apo_down", 0.0, False),
    ],
)
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_losses_of_pairs_equal_dpo_of_trl(
    trl: SimpleNamespace,
    pairs: Pairs,
    kind: str,
    theirs: str,
    label_smoothing: float,
    length_normalised: bool,
    beta: float,
) -> None:
    policy, reference = (
        sequence_logprobs(logprobs, pairs.mask, length_normalised=length_normalised)
        for logprobs in (pairs.logprobs, pairs.reference)
    )
    options = {"beta": beta, "label_smoothing": label_smoothing}
    if kind in PREFERENCE_KINDS:
        logratios = (x[:4] - x[4:] for x in (policy, reference))
        ours = preference_loss(*logratios, kind=kind, **options)
    else:
        ours = pair_loss(*(policy - reference).split(4), kind=kind, beta=beta)
    expected = dpo_of_trl(trl, theirs, pairs, **options)
    assert_same(ours.loss, expected, pairs.chosen, pairs.rejected)


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


@pytest.mark.parametrize(
    ("kind", "theirs"), [("forward_kl", "forward_kl"), ("js", "js_divergence")]
)
def test_dpo_of_another_divergence_equals_that_of_trl(
    trl: SimpleNamespace, pairs: Pairs, kind: Divergence, theirs: str
) -> None:
    ratios = ((pairs.logprobs - pairs.reference) * pairs.mask).sum(1)
    scores = divergence_scores(ratios, kind)
    ours = preference_loss(
        scores[:4] - scores[4:], torch.zeros(4, dtype=DOUBLE), kind="sigmoid", beta=0.4
    ).loss
    expected = dpo_of_trl(trl, "sigmoid", pairs, beta=0.4, f_divergence_type=theirs)
    assert_same(ours, expected, pairs.chosen, pairs.rejected)


def test_the_alpha_divergence_works_in_float64_where_that_of_trl_fails() -> None:
    ratios = torch.tensor([-0.3, 0.7], dtype=DOUBLE)
    near = divergence_scores(ratios, "alpha", alpha=1 - 1e-9)
    assert torch.allclose(near, ratios, atol=1e-6)
    low = divergence_scores(ratios, "alpha", alpha=1e-9)
    assert torch.allclose(low, 1 + divergence_scores(ratios, "forward_kl"), atol=1e-6)
    with pytest.raises(ConfigurationError, match="alpha"):
        divergence_scores(ratios, "alpha", alpha=1.0)


@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_simpo_equals_simpo_of_trl(
    trl: SimpleNamespace, means: tuple[torch.Tensor, torch.Tensor], margin: float
) -> None:
    trainer = trl_trainer(
        alpha=0.0, beta=2.0, loss_type="simpo", label_smoothing=0.0, simpo_gamma=margin
    )
    theirs = trl.CPOTrainer.cpo_loss(trainer, *means)[0].mean()
    assert_same(simpo_loss(*means, beta=2.0, margin=margin).loss, theirs, *means)


def test_orpo_equals_orpo_of_trl(
    trl: SimpleNamespace, means: tuple[torch.Tensor, torch.Tensor]
) -> None:
    theirs = trl.ORPOTrainer.odds_ratio_loss(trl_trainer(beta=0.3), *means)[0]
    mine = orpo_loss(*means, -means[0], weight=0.3).loss
    # TRL subtracts its odds-ratio term from the likelihood's loss, in float32.
    assert_same(mine, (-means[0] - theirs.double()).mean(), *means)


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


def test_kto_of_a_step_in_parts_equals_that_of_trl_on_the_whole(trl: SimpleNamespace) -> None:
    batch = random_batch(8, rows=8, tokens=6, scale=0.5)
    logprobs, mask = (batch["logprobs_BT"] + 0.2).requires_grad_(), batch["mask_BT"]
    is_chosen = torch.arange(8) % 2 == 0
    masked = logprobs * mask
    reference = (batch["reference_logprobs_BT"] * mask).sum(dim=1)
    trainer = trl_trainer(
        beta=0.4,
        desirable_weight=1.0,
        undesirable_weight=1.0,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        _compute_kl_logps=lambda *_: masked.sum(dim=1),
    )
    inputs = inputs_of(mask) | {"label": is_chosen}
    inputs |= {"ref_logps": reference, "ref_KL_logps": reference}
    theirs = trl.KTOTrainer._compute_loss(trainer, model_with_logprobs(masked), inputs, False)
    ratios = sequence_logprobs(logprobs, mask, length_normalised=False) - reference
    baseline = ratios.detach().mean()
    assert baseline > 0
    parts = [
        kto_loss(ratios[part], is_chosen[part], beta=0.4, baseline=baseline).loss * len(part) / 8
        for part in (torch.arange(3), torch.arange(3, 8))
    ]
    assert_same(parts[0] + parts[1], theirs, logprobs)

"""Every loss of the preference family trains an attacker on pairs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from nip_astra.errors import ParameterError
from nip_astra.rollouts.samples import Sample
from tests.kit.tiny import experience_of
from tests.trainers.test_ast_family import _trainer

BETA = 0.5
AT_THE_REFERENCE = {
    "ast_dpo.loss=nca": 2 * math.log(2),
    "ast_dpo.loss=sppo": 2 * (0.5 / BETA) ** 2,
    "ast_dpo.loss=apo_zero": 1.0,
    "ast_dpo.loss=apo_down": 1.0,
    "ast_dpo.loss=kto": 0.5,
    "ast_dpo.divergence=forward_kl": math.log(2),
    "ast_dpo.divergence=js": math.log(2),
    "ast_dpo.divergence=alpha": math.log(2),
}
"""By hand, where policy and reference are one."""


@pytest.mark.parametrize("choice", [*AT_THE_REFERENCE, "ast_simpo.loss=orpo"])
def test_a_step_tells_chosen_from_rejected(tiny_scenario: Path, choice: str) -> None:
    name = choice.partition(".")[0]
    beta = f"{name}.beta={BETA}" if name == "ast_dpo" else "training.lr=1e-2"
    common = ("training.optimizer=sgd", "training.lr=1e-2", "training.max_grad_norm=0.1")
    trainer = _trainer(name, tiny_scenario, choice, beta, *common)
    with torch.no_grad():
        batch = trainer.collate_fn(experience_of(trainer).samples)

    def margin() -> float:
        with torch.no_grad():
            chosen_B, rejected_B = trainer.pair_logprobs(batch)  # type: ignore[attr-defined]
        return float((chosen_B - rejected_B).mean())

    before = margin()
    loss = trainer.loss(batch).loss.item()
    if choice in AT_THE_REFERENCE:
        assert loss == pytest.approx(AT_THE_REFERENCE[choice], abs=1e-4)
    for _ in range(3):
        trainer._optimizer_step([batch])
    assert margin() > before + 1e-4
    assert trainer.loss(batch).loss.item() < loss


def test_what_a_loss_of_pairs_cannot_use_is_refused(tiny_scenario: Path) -> None:
    with pytest.raises(ParameterError, match="label_smoothing has no meaning for the nca loss"):
        _trainer("ast_dpo", tiny_scenario, "ast_dpo.loss=nca", "ast_dpo.label_smoothing=0.1")
    with pytest.raises(ParameterError, match="orpo takes the odds of mean log-probabilities"):
        _trainer(
            "ast_simpo", tiny_scenario, "ast_simpo.loss=orpo", "ast_simpo.length_normalised=false"
        )


def test_the_baseline_of_kto_is_that_of_the_step_however_it_is_split(tiny_scenario: Path) -> None:
    trainer = _trainer("ast_dpo", tiny_scenario, "ast_dpo.loss=kto", f"ast_dpo.beta={BETA}")
    with torch.no_grad():
        samples = experience_of(trainer).samples
    for number, sample in enumerate(samples):  # as if the policy had gone from the reference
        sample["reference_chosen"] = sample["reference_chosen"] - 2.0 * number

    def gradients(*parts: list[Sample]) -> tuple[float, list[torch.Tensor]]:
        batches = [trainer.collate_fn(part) for part in parts]
        trainer._write_step_totals(batches)
        loss = trainer.service.forward_backward(batches, trainer.loss)["loss"]
        found = [one.grad.clone() for one in trainer.learned if one.grad is not None]
        trainer.optimizer.zero_grad(set_to_none=True)
        return loss, found

    assert len(samples) > 2
    loss, whole = gradients(samples)
    split_loss, split = gradients(samples[:1], samples[1:])
    assert split_loss == pytest.approx(loss, abs=1e-6)
    for one, other in zip(whole, split, strict=True):
        assert torch.allclose(one, other, atol=1e-5)

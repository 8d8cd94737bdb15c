"""Training services: gradients add up, non-finite steps are refused, remote services agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.distributed.team import Team
from nip_astra.errors import CheckpointError, NonFiniteLossError, ServiceRequestError
from nip_astra.language_models.base import LanguageModel
from nip_astra.language_models.services.sharded import DataParallelService
from nip_astra.language_models.services.tinker_training import PARTS, find_part
from nip_astra.language_models.services.training import LocalTrainingService, Loss, TrainingService
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.rollouts.samples import collate
from nip_astra.trainers.ast.dpo import AstDpoTrainer
from tests.kit.experiments import ast_trainer
from tests.kit.tiny import load_backend

Rows = tuple[Tensor, ...]


def weights_of(model: LanguageModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def batch_of(*counts: int) -> TensorDict:
    """Equal contexts, as many as each count says, with tokens that increase from 6."""
    tokens = [torch.tensor([6 + i, 3]) for count in counts for i in range(count)]
    return collate([{"context": torch.tensor([2, 4]), "tokens": item} for item in tokens])


def nll(service: TrainingService) -> Loss:
    def loss(batch: TensorDict) -> LossOutput:
        logprobs_BT = service.logprobs(
            batch["context"], batch["context_mask"], batch["tokens"], batch["tokens_mask"]
        )
        mean = -logprobs_BT.sum(dim=1).mean()
        return LossOutput(mean, {"nll": mean.detach()})

    return loss


@pytest.fixture
def model(tiny_model_dir: Path) -> LanguageModel:
    return load_backend(tiny_model_dir, dtype="float32")


def local(model: LanguageModel) -> LocalTrainingService:
    return LocalTrainingService(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_gradients_of_calls_add_up_and_those_of_batches_are_means(model: LanguageModel) -> None:
    service = local(model)
    result = service.forward_backward([batch_of(3), batch_of(1)], nll(service))
    split = [p.grad.clone() for p in model.parameters()]
    assert service.optim_step(lr=0.0).was_taken
    assert all(p.grad is None for p in model.parameters())
    whole = batch_of(3, 1)
    assert service.forward_backward([whole], nll(service)) == pytest.approx(result, rel=1e-6)
    service.forward_backward([whole], nll(service))
    twice = [p.grad / 2 for p in model.parameters()]
    torch.testing.assert_close(twice, split, atol=1e-6, rtol=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_dropped(model: LanguageModel) -> None:
    service, before = local(model), weights_of(model)
    loss = nll(service)
    service.forward_backward(
        [batch_of(2)], lambda batch: LossOutput(loss(batch).loss * math.nan, {})
    )
    step = service.optim_step(lr=0.1)
    assert (step.was_taken, math.isnan(step.grad_norm)) == (False, True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    service.forward_backward([batch_of(2)], loss)
    assert service.optim_step(lr=0.1).was_taken


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        *(({"lr": lr}, "lr") for lr in (math.nan, math.inf, -1.0, 1e30)),
        *(({"lr": 0.1, "max_grad_norm": item}, "max_grad_norm") for item in (math.nan, 0.0, -1.0)),
    ],
)
def test_a_step_by_invalid_numbers_is_refused(
    model: LanguageModel, numbers: dict[str, float], named: str
) -> None:
    service, before = local(model), weights_of(model)
    service.forward_backward([batch_of(2)], nll(service))
    with pytest.raises(ServiceRequestError, match=named):
        service.optim_step(**numbers)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    # Its gradients are still there for a valid step.
    assert service.optim_step(lr=0.1).grad_norm > 0


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_changes_the_version_of_every_weight(model: LanguageModel, is_fused: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=is_fused)
    service = LocalTrainingService(model, optimizer)
    before = [weight._version for weight in model.parameters()]
    service.forward_backward([batch_of(2)], nll(service))
    service.optim_step(lr=0.01)
    after = [weight._version for weight in model.parameters()]
    assert all(new > old for old, new in zip(before, after, strict=True))


def test_a_state_is_restored_exactly_and_a_damaged_state_is_refused(
    model: LanguageModel, tmp_path: Path
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    service = LocalTrainingService(model, optimizer)

    def step() -> None:
        service.forward_backward([batch_of(2)], nll(service))
        service.optim_step(lr=0.01, max_grad_norm=1.0)

    step()
    service.save_state(tmp_path)
    step()
    after = weights_of(model)
    service.load_state(tmp_path)
    step()
    assert all(torch.equal(a, b) for a, b in zip(after, weights_of(model), strict=True))
    (tmp_path / "optimizer.json").write_text("{")
    with pytest.raises(CheckpointError):
        service.load_state(tmp_path)


def test_a_loss_that_is_not_finite_ends_training_before_the_step(tiny_scenario: Path) -> None:
    class Broken(AstDpoTrainer):
        def loss(self, batch: TensorDict) -> LossOutput:
            output = super().loss(batch)
            return LossOutput(output.loss * math.nan, output.metrics)

    given = ast_trainer("ast_dpo", tiny_scenario)
    trainer = Broken(given.hyper_params, given.scenario_instance, given.settings)
    before = weights_of(trainer.policy)
    with pytest.raises(NonFiniteLossError, match="step 1"):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))


@pytest.mark.parametrize(("name", "part"), [("layers.0.self_attn.q_proj", 0), ("mlp.up_proj", 1)])
def test_a_layer_belongs_to_attention_mlps_or_head(name: str, part: int) -> None:
    layer = torch.nn.Linear(2, 2)
    assert find_part(name, layer, None) == PARTS[part]
    assert find_part(name, layer, layer) == "train_unembed"


class HalfTeam(Team):
    """The first of two processes; the other reports the same."""

    size = 2

    def all_gather(self, value: Any) -> list[Any]:
        return [value, value]


def test_figures_of_a_divided_step_are_means_over_all_rows(model: LanguageModel) -> None:
    service = DataParallelService(local(model), HalfTeam())
    batches = [batch_of(1), batch_of(1)]
    result = service.forward_backward(batches, nll(service))
    assert result["nll"] == pytest.approx(result["loss"])
    assert result == pytest.approx(local(model).forward_backward(batches, nll(service)))

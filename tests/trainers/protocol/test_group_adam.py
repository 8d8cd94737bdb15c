"""Adam for a group of weights moves them as torch's does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from nip_astra.errors import CheckpointError
from nip_astra.trainers.protocol.optimizers import GroupAdam


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() for shape in ((3, 4), (4,), (2,))]


def groups(of: list[Tensor]) -> list[dict[str, object]]:
    return [{"params": of[:2], "lr": 0.01}, {"params": of[2:], "lr": 0.1}]


def push(ours: list[Tensor], torchs: list[Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    for one, other in zip(ours, torchs, strict=True):
        one.grad = torch.randn(one.shape)
        other.grad = one.grad.clone()


def test_it_moves_weights_as_torch_does_to_the_bit() -> None:
    ours, torchs = weights(), weights()
    adam = GroupAdam(groups(ours), lr=0.1, eps=1e-5)
    other = torch.optim.Adam(groups(torchs), lr=0.1, eps=1e-5, fused=True)
    for seed in range(5):
        push(ours, torchs, seed)
        adam.step()
        other.step()
    assert all(map(torch.equal, ours, torchs))


def test_it_goes_on_from_what_torch_remembers_and_torch_from_its() -> None:
    ours, torchs = weights(), weights()
    adam = GroupAdam(groups(ours), lr=0.1, eps=1e-5)
    other = torch.optim.Adam(groups(torchs), lr=0.1, eps=1e-5, fused=True)
    for seed in range(6):
        push(ours, torchs, seed)
        adam.step()
        other.step()
        remembered = [copy.deepcopy(optimizer.state_dict()) for optimizer in (other, adam)]
        adam.load_state_dict(remembered[0])
        other.load_state_dict(remembered[1])
    assert all(map(torch.equal, ours, torchs))


def test_a_weight_without_gradient_has_one_of_zero() -> None:
    ours = weights()
    adam = GroupAdam(groups(ours), lr=0.1, eps=1e-5)
    ours[0].grad = torch.ones_like(ours[0])
    before = [weight.detach().clone() for weight in ours]
    adam.step()
    moved = [not torch.equal(weight, old) for weight, old in zip(ours, before, strict=True)]
    assert moved == [True, False, False]


def test_counts_that_differ_within_a_group_are_refused() -> None:
    torchs = weights()
    other = torch.optim.Adam(groups(torchs), lr=0.1, eps=1e-5, fused=True)
    for learns in ((True, True, True), (True, False, True)):
        for weight, has_gradient in zip(torchs, learns, strict=True):
            weight.grad = torch.ones_like(weight) if has_gradient else None
        other.step()
    adam = GroupAdam(groups(weights()), lr=0.1, eps=1e-5)
    with pytest.raises(CheckpointError, match="1 to 2 times"):
        adam.load_state_dict(other.state_dict())


def test_groups_of_other_sizes_are_refused() -> None:
    adam = GroupAdam(groups(weights()), lr=0.1, eps=1e-5)
    state = adam.state_dict()
    state["param_groups"] = [{**state["param_groups"][0], "params": [0, 1, 2, 3]}]
    with pytest.raises(CheckpointError, match=r"\[4\] weights .* \[\d, \d\]"):
        adam.load_state_dict(state)

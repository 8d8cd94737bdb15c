"""A misaligned or untrained value function is reported and excluded from training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from nip_astra.astra import PPO, ASTSampler, Harness, Trainer, TrainingConfiguration
from nip_astra.astra.algorithms.ppo import leaves_of
from nip_astra.errors import ConfigurationError
from tests.astra.toys import PROMPTS, ValuedWordProblem


class Headed(ValuedWordProblem):
    """Values by a layer over the attacker's hidden states, aligned with log-probabilities."""

    shift = 0

    def __init__(self) -> None:
        super().__init__(ppl_weight=0.0)
        self.vf = torch.nn.Linear(1, 1)

    def value(self, context: Any, continuation: Any) -> Tensor:
        lengths = torch.tensor([[[float(len(text))], [1.0]] for text in continuation])
        values_BT = self.vf(lengths + self.attacker.logits.sum()).squeeze(2)
        return pad(values_BT, (2 + self.shift, 1 - self.shift))

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        yield from self.attacker.parameters()
        yield from self.vf.parameters()


def train(problem: Any, **options: Any) -> None:
    config = TrainingConfiguration(training_steps=2, lr=0.1, num_episodes_per_experience=2)
    Trainer(config, ASTSampler(problem, PROMPTS), PPO(problem, **options)).train()


def test_a_head_that_is_named_and_stands_right_is_trained() -> None:
    problem = Headed()
    before = [p.detach().clone() for p in problem.vf.parameters()]
    train(problem)
    assert not torch.equal(before[0], problem.vf.weight)


def test_values_that_a_mask_hides_one_position_too_far_are_reported() -> None:
    class Shifted(Headed):
        shift = 1

    with pytest.raises(ConfigurationError, match="masked_fill"):
        train(Shifted())


def test_values_that_are_all_zero_and_a_part_left_out_on_purpose_are_no_fault() -> None:
    class Half(Headed):
        def parameters(self) -> Iterator[torch.nn.Parameter]:
            yield from self.attacker.parameters()
            yield self.vf.bias

    for kind in (Headed, Half):
        problem = kind()
        torch.nn.init.zeros_(problem.vf.weight)
        torch.nn.init.zeros_(problem.vf.bias)
        train(problem)
        assert float(problem.vf.bias.detach()) != 0


class Forgotten(Headed):
    """As in a well-known example: a head that `parameters()` does not return."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.attacker.parameters()


def test_a_head_that_no_optimizer_changes_is_reported_by_trainer_and_harness() -> None:
    with pytest.raises(ConfigurationError, match="2 tensors"):
        train(Forgotten())
    problem = Forgotten()
    harness = Harness(ASTSampler(problem, PROMPTS), PPO(problem), 2)
    batch = next(harness.experience())
    with pytest.raises(ConfigurationError, match="not among"):
        harness.step(batch)
    with torch.no_grad():
        harness.step(batch)


def test_a_head_that_is_not_to_learn_needs_no_name() -> None:
    problem = Forgotten()
    train(problem, vf_loss_coef=0.0)
    assert problem.attacker.logits.detach().abs().sum() > 0


def test_leaves_are_found_behind_any_number_of_steps() -> None:
    leaf = torch.nn.Parameter(torch.ones(2))
    value = leaf
    for _ in range(3000):
        value = value * 1.0
    assert [id(one) for one in leaves_of((value + leaf.detach()).sum())] == [id(leaf)]
    assert leaves_of(leaf) == [leaf]


def test_values_without_gradient_are_reported() -> None:
    class Constant(Headed):
        def value(self, context: Any, continuation: Any) -> Tensor:
            return super().value(context, continuation).detach()

    with pytest.raises(ConfigurationError, match="vf_loss_coef=0"):
        train(Constant())

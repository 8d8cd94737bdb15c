"""Each regressor decodes the codes within its ability, and only real information.

Shapes: N messages, D numbers that describe a message.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from nip_astra.message_regressors.base import build_message_regressor
from nip_astra.parameters.trainers import MESSAGE_REGRESSORS
from tests.kit.learning import Learning

KINDS = MESSAGE_REGRESSORS.names()


def accuracy(kind: str, features_ND: Tensor, labels_N: Tensor, seed: int = 1) -> float:
    """Learn from the first half, predict the second."""
    half = len(labels_N) // 2
    regressor = build_message_regressor(MESSAGE_REGRESSORS.get(kind).Parameters())
    log_odds = regressor.fit_and_judge(
        features_ND[:half], labels_N[:half].float(), features_ND[half:], torch.manual_seed(seed)
    )
    assert log_odds.shape == (len(labels_N) - half,)
    assert not log_odds.requires_grad
    return ((log_odds > 0) == labels_N[half:].bool()).float().mean().item()


def symbols(num_messages: int, num_symbols: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_symbols, (num_messages,), generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_of_several_symbols_a_label_is_read(learning: Learning, kind: str) -> None:
    sent_N = symbols(400, 12, learning.seed)
    result = accuracy(kind, one_hot(sent_N, 12).float(), sent_N % 2, learning.seed)
    learning.check(result, threshold=0.95, best=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_decoded_from_silent_agents(learning: Learning, kind: str) -> None:
    labels_N = symbols(2000, 2, seed=learning.seed + 100)
    messages_ND = one_hot(symbols(2000, 12, learning.seed), 12).float()
    result = accuracy(kind, messages_ND, labels_N, learning.seed)
    # 4 standard deviations of 1000 guesses
    learning.check(abs(result - 0.5), threshold=4 * 0.5 / 1000**0.5, best=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_that_are_all_alike_give_the_commoner_label(kind: str) -> None:
    labels_N = (torch.arange(300) % 3 > 0).long()
    assert accuracy(kind, torch.zeros(300, 5), labels_N) == pytest.approx(2 / 3, abs=0.01)


def test_a_code_in_two_symbols_together_is_read_by_the_network_alone(learning: Learning) -> None:
    first_N, second_N = symbols(800, 2, learning.seed), symbols(800, 2, learning.seed + 100)
    features_ND = torch.cat([one_hot(first_N, 2), one_hot(second_N, 2)], dim=1).float()
    labels_N = first_N ^ second_N
    result = accuracy("mlp", features_ND, labels_N, learning.seed)
    learning.check(result, threshold=0.95, best=1.0)
    # Signs of a sum are right in two or three of the four cases.
    assert accuracy("linear", features_ND, labels_N, learning.seed) < 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_one_message_is_enough_to_learn_from(kind: str) -> None:
    assert accuracy(kind, torch.ones(2, 3), torch.ones(2)) == 1.0


def test_the_linear_fit_is_the_minimum_of_its_loss() -> None:
    # Two symbols, each followed by 1 in 3 of 4 cases and in 1 of 4 cases: by symmetry the intercept
    # is 0, and the coefficient w solves 4 * sigmoid(w) - 3 + w = 0.
    features_ND = torch.tensor([[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 4)
    labels_N = torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 1])
    parameters = MESSAGE_REGRESSORS.get("linear").Parameters(ridge=1.0)
    result = build_message_regressor(parameters).fit_and_judge(
        features_ND, labels_N, torch.eye(2), torch.Generator()
    )
    weight = result[0].item()
    assert result[1].item() == pytest.approx(-weight, abs=1e-6)
    assert 4 / (1 + 2.718281828459045**-weight) - 3 + weight == pytest.approx(0, abs=1e-5)

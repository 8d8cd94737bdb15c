"""Losses on samples have, in expectation, the derivatives of the expected return.

Every joint move of a small game is played once and weighted by its probability, so the result is
deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.ihvp import gradient
from nip_astra.rl_objectives.spg import clipped_shaping_losses, shaping_losses
from nip_astra.rl_objectives.stackelberg import VARIANTS
from tests.rl_objectives.games import DOUBLE, random_tensor, updates_of

NUM_ACTIONS = (3, 2, 2)
PAYOFFS = random_tensor(3, *NUM_ACTIONS, seed=1)
"""Of agents 0 to 2, by the actions of agents 0 to 2."""

Losses = Callable[..., torch.Tensor]


def ppo_at_the_policies_that_played(
    logprobs: torch.Tensor, *rest: torch.Tensor, **more: torch.Tensor
) -> torch.Tensor:
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    return clipped_shaping_losses(logprobs, logprobs.detach(), *rest, **clip, **more)


BOTH = pytest.mark.parametrize(
    "losses", [shaping_losses, ppo_at_the_policies_that_played], ids=["plain", "clipped"]
)


def policies() -> list[torch.Tensor]:
    return [random_tensor(n, seed=10 + n + i).requires_grad_() for i, n in enumerate(NUM_ACTIONS)]


def exact_losses(logits: list[torch.Tensor]) -> list[torch.Tensor]:
    p, q, r = (x.softmax(dim=0) for x in logits)
    return list(-torch.einsum("iabc,a,b,c->i", PAYOFFS, p, q, r))


def expected_losses(logits: list[torch.Tensor], losses: Losses) -> list[torch.Tensor]:
    """The losses of single frames, weighted by the frames' probabilities."""
    logs = [x.log_softmax(dim=0) for x in logits]
    total = 0
    for actions in itertools.product(*(range(n) for n in NUM_ACTIONS)):
        logprobs = torch.stack([log[a] for log, a in zip(logs, actions, strict=True)])[None]
        advantages = (PAYOFFS[:, actions[0], actions[1], actions[2]] - 0.7)[None]
        result = losses(logprobs, advantages, torch.ones(1, 3).bool())
        total = total + logprobs.sum().exp().detach() * result
    return list(total)


def hessian(loss: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
    slope = gradient(loss, parameters)
    return torch.stack([gradient(entry, parameters) for entry in slope]).detach()


@BOTH
def test_first_and_all_second_derivatives_of_a_game_of_one_round(losses: Losses) -> None:
    logits = policies()
    for result, exact in zip(expected_losses(logits, losses), exact_losses(logits), strict=True):
        torch.testing.assert_close(gradient(result, logits), gradient(exact, logits))
        torch.testing.assert_close(hessian(result, logits), hessian(exact, logits))


@pytest.mark.parametrize(
    ("groups", "losses"),
    [
        (((0,), (1,), (2,)), shaping_losses),
        (((0,), (1, 2)), ppo_at_the_policies_that_played),
        (((2, 0), (1,)), shaping_losses),
    ],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_directions_of_agents_equal_those_of_the_expected_return(
    name: str, groups: object, losses: Losses
) -> None:
    logits = policies()
    # Logits have a direction that leaves the policy unchanged, where a Hessian is 0: damped.
    bowl = [0.3 * x.square().sum() for x in logits]
    result, exact = (
        updates_of(
            [loss + more for loss, more in zip(parts, bowl, strict=True)], logits, name, groups
        )
        for parts in (expected_losses(logits, losses), exact_losses(logits))
    )
    for first, second in zip(result, exact, strict=True):
        torch.testing.assert_close(first.update[0], second.update[0])
    assert max(update.shaping_P.norm().item() for update in exact) > 1e-4


REWARDS = random_tensor(2, 3, 2, seed=2)
"""Of agents 0 and 1, where agent 0 moves in round 0 and agent 1 answers in round 1."""


def turns(logits: list[torch.Tensor], losses: Losses) -> torch.Tensor:
    """The expected losses of a sequential game, with baselines that know the first move."""
    first, second = logits[0].log_softmax(dim=0), logits[1].log_softmax(dim=1)
    baselines = random_tensor(2, 3, seed=3)
    total = torch.zeros(2, dtype=DOUBLE)
    for a, b in itertools.product(range(3), range(2)):
        nothing = torch.zeros((), dtype=DOUBLE)
        logprobs = torch.stack([first[a], nothing, nothing, second[a, b]]).view(2, 2)
        advantages = torch.stack([REWARDS[:, a, b] - 0.4, REWARDS[:, a, b] - baselines[:, a]])
        episode = {"episode_B": torch.tensor([5, 5]), "round_B": torch.tensor([0, 1])}
        result = losses(logprobs, advantages, torch.eye(2).bool(), **episode)
        total = total + logprobs.sum().exp().detach() * 2 * result
    return total


@BOTH
def test_first_and_all_second_derivatives_of_a_game_in_turns(losses: Losses) -> None:
    logits = [random_tensor(3, seed=4).requires_grad_(), random_tensor(3, 2).requires_grad_()]
    p, q = logits[0].softmax(dim=0), logits[1].softmax(dim=1)
    exact = -torch.einsum("iab,a,ab->i", REWARDS, p, q)
    for i, result in enumerate(turns(logits, losses)):
        torch.testing.assert_close(gradient(result, logits), gradient(exact[i], logits))
        torch.testing.assert_close(hessian(result, logits), hessian(exact[i], logits))


def batch(num_frames: int = 12, num_agents: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Frames of episodes of four rounds, with weights that determine log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_frames, num_agents, generator=generator) < 0.7
    mask[:, 0] |= ~mask.any(dim=1)
    return {
        "features": random_tensor(num_frames, num_agents, 2, seed=seed),
        "old_logprobs_BA": -random_tensor(num_frames, num_agents, seed=seed + 1).abs(),
        "advantages_BA": random_tensor(num_frames, num_agents, seed=seed + 2),
        "mask_BA": mask,
        "episode_B": torch.arange(num_frames) // 4 + 7,
        "round_B": torch.arange(num_frames) % 4,
    }


WEIGHTS = [random_tensor(2, seed=seed).requires_grad_() for seed in range(3)]


def derivatives(frames: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    """Losses, gradients and Hessians of all agents with respect to all weights."""
    frames = dict(frames)
    features, old = frames.pop("features"), frames.pop("old_logprobs_BA")
    logprobs = -(features * torch.stack(WEIGHTS)).sum(dim=-1).square()
    clip = {"clip_low": 0.3, "clip_high": 0.3, "old_logprobs_BA": old} if kind == "clipped" else {}
    losses = (clipped_shaping_losses if clip else shaping_losses)(logprobs, **clip, **frames)
    parts = [losses.detach()]
    for loss in losses:
        parts += [gradient(loss, WEIGHTS).detach(), hessian(loss, WEIGHTS).flatten()]
    return torch.cat(parts)


KINDS = pytest.mark.parametrize("kind", ["plain", "clipped"])


def shuffled(frames: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    return {name: value[order] for name, value in frames.items()}


def padded(frames: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    padding = {
        name: torch.full_like(value[:5], math.nan) if value.is_floating_point() else value[:5]
        for name, value in frames.items()
    }
    padding["mask_BA"] = torch.zeros(5, 3).bool()
    padding["round_B"] = torch.tensor([9, 10, 11, 12, 13])
    # Weights meet NaN features where the mask is False; their product must not propagate.
    padding["features"] = torch.zeros_like(padding["features"])
    return {name: torch.cat([frames[name], padding[name]]) for name in frames}


def with_other_moves_of_idle_agents(frames: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = frames["mask_BA"]
    return frames | {
        "features": torch.where(mask.unsqueeze(-1), frames["features"], 3.0),
        "old_logprobs_BA": torch.where(mask, frames["old_logprobs_BA"], torch.nan),
    }


@KINDS
@pytest.mark.parametrize("change", [shuffled, padded, with_other_moves_of_idle_agents])
def test_order_padding_and_moves_of_idle_agents_make_no_difference(
    kind: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    torch.testing.assert_close(derivatives(change(batch()), kind), derivatives(batch(), kind))


@KINDS
def test_episodes_are_means_of_each_other(kind: str) -> None:
    frames = batch()
    parts = ({name: value[i : i + 4] for name, value in frames.items()} for i in (0, 4, 8))
    total = sum(derivatives(part, kind) for part in parts)
    torch.testing.assert_close(total / 3, derivatives(frames, kind))


@KINDS
def test_zero_advantages_and_empty_batches_give_zero(kind: str) -> None:
    frames = batch()
    zero = frames | {"advantages_BA": torch.zeros(12, 3, dtype=DOUBLE)}
    nobody = frames | {"mask_BA": torch.zeros(12, 3).bool()}
    empty = {name: value[:0] for name, value in frames.items()}
    for given in (zero, nobody, empty):
        assert derivatives(given, kind).abs().max() == 0


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "slope"),
    [
        *((math.log(1.5), 2.0, 0.0), (math.log(0.5), 2.0, -1.0), (math.log(1.5), -2.0, 3.0)),
        *((1e4, 2.0, 0.0), (1e4, -2.0, 0.0)),  # beyond the largest number
    ],
)
def test_the_clipped_gradient_is_that_of_ppo_by_hand(
    log_ratio: float, advantage: float, slope: float
) -> None:
    logprobs = torch.tensor([[log_ratio - 3.0, -1.0]], dtype=DOUBLE).requires_grad_()
    old = torch.tensor([[-3.0, -2.0]], dtype=DOUBLE)
    advantages = torch.tensor([[advantage, 1.0]], dtype=DOUBLE)
    losses = clipped_shaping_losses(
        logprobs, old, advantages, torch.ones(1, 2).bool(), clip_low=0.2, clip_high=0.2
    )
    assert gradient(losses[0], [logprobs])[0].item() == pytest.approx(slope)
    # Agent 1's ratio e is clipped in its own loss; agent 0's part of that has A = 1.
    assert gradient(losses[1], [logprobs])[1].item() == 0.0


def test_the_clipped_mixed_derivative_is_the_product_of_both_ratios_by_hand() -> None:
    logprobs = torch.tensor([[math.log(0.9), math.log(1.1)]], dtype=DOUBLE).requires_grad_()
    old, advantages = torch.tensor([[[0.0, 0.0]], [[3.0, 5.0]]], dtype=DOUBLE)
    losses = clipped_shaping_losses(
        logprobs, old, advantages, torch.ones(1, 2).bool(), clip_low=0.2, clip_high=0.2
    )
    assert hessian(losses[1], [logprobs])[0, 1].item() == pytest.approx(-5.0 * 0.9 * 1.1)


def test_an_episode_without_a_round_is_refused() -> None:
    frames = batch()
    del frames["round_B"]
    with pytest.raises(ConfigurationError, match="episode_B and round_B"):
        derivatives(frames, "plain")

"""Properties of every protocol, however it is played."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import CONTINUE, Moves, ProtocolHandler, ProtocolStep
from tests.protocols.playing import PLAY_ALONE, REWARDS, build, play, random_moves

COUNT = 64
ZK = {"simulator_reward_coefficient": 0.5, "aux_prover_reward_coefficient": 0.25}


def variants() -> Iterator[Any]:
    for member in InteractionProtocolType:
        name = str(member)
        for zk in (None, ZK):
            for common in ({}, {"verifier_first": False}, {"shared_reward": True}):
                section = {}
                if name not in PLAY_ALONE:
                    section = {"max_message_rounds": 7, "min_message_rounds": 2}
                if name in ("debate", "mnip"):
                    section["sequential"] = "shared_reward" in common
                words = [name, *common, *(["zk"] if zk else [])]
                yield pytest.param((name, section, zk, common), id="-".join(words))


@pytest.fixture(params=variants())
def handler(request: pytest.FixtureRequest) -> ProtocolHandler:
    name, section, zk, common = request.param
    return build(name, section, zk=zk, **common)


class Rollout:
    """A random play of COUNT episodes: moves, their results, and the initial state."""

    def __init__(self, handler: ProtocolHandler) -> None:
        generator = torch.Generator().manual_seed(1)
        self.handler = handler
        self.y_E = torch.randint(2, (COUNT,), generator=generator)
        self.seed_E = torch.randint(2**16, (COUNT,), generator=generator)
        self.moves = [
            random_moves(handler, COUNT, generator) for _ in range(handler.max_message_rounds + 2)
        ]
        self.steps = self.play(self.moves)

    def play(self, moves: list[Moves]) -> list[ProtocolStep]:
        return play(self.handler, lambda r: moves[r], self.y_E, self.seed_E, num_rounds=len(moves))

    def masks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Agents that may send and decide in each round."""
        decided_EA = torch.zeros(COUNT, self.handler.num_agents, dtype=torch.bool)
        for r, step in enumerate(self.steps):
            round_E = torch.full((COUNT,), r)
            yield (
                self.handler.active_mask(round_E, self.seed_E, decided_EA),
                self.handler.can_decide(round_E, self.seed_E, decided_EA),
            )
            decided_EA = step.agent_decided_EA


@pytest.fixture
def rollout(handler: ProtocolHandler) -> Rollout:
    return Rollout(handler)


def test_every_episode_ends_by_the_last_round_and_in_a_single_way(rollout: Rollout) -> None:
    is_done_RE = torch.stack([step.is_done for step in rollout.steps])
    assert is_done_RE[: rollout.handler.max_message_rounds].any(0).all()
    assert is_done_RE[:-1].sum() > 0
    for step in rollout.steps:
        assert not (step.has_decided_E & step.is_out_of_rounds_E).any()
    is_out_RE = torch.stack([step.is_out_of_rounds_E for step in rollout.steps])
    assert is_out_RE.any()
    assert not is_out_RE.all()
    # Only an episode in its last round is out of rounds.
    assert not is_out_RE[: rollout.handler.max_message_rounds - 1].any()


def test_nothing_is_rewarded_after_an_end(rollout: Rollout) -> None:
    is_over_E = torch.zeros(COUNT, dtype=torch.bool)
    decided_EA = torch.zeros(COUNT, rollout.handler.num_agents, dtype=torch.bool)
    num_rewarded = 0
    for step in rollout.steps:
        assert (step.reward_EA[is_over_E] == 0).all()
        assert (step.reward_EA[decided_EA] == 0).all()
        assert (step.decision_E[is_over_E] == CONTINUE).all()
        num_rewarded += int((step.reward_EA != 0).sum())
        assert (step.agent_decided_EA | ~decided_EA).all(), "who has decided stays decided"
        is_over_E, decided_EA = is_over_E | step.is_done, step.agent_decided_EA
    assert is_over_E.all()
    assert num_rewarded > 0


def test_moves_of_agents_that_may_not_make_them_change_nothing(rollout: Rollout) -> None:
    generator = torch.Generator().manual_seed(2)
    changed = []
    for one, (active_EAC, can_decide_EA) in zip(rollout.moves, rollout.masks(), strict=True):
        other = random_moves(rollout.handler, COUNT, generator)
        is_open = active_EAC[..., None, None]
        # The simulator decides nothing, but its hypothetical decision is compared.
        is_read_EA = can_decide_EA.clone()
        if rollout.handler.needs_logits:
            is_read_EA[:, -1] |= can_decide_EA[:, -2]
        changed.append(
            Moves(
                torch.where(can_decide_EA, one.decision_EA, other.decision_EA),
                torch.where(is_open, one.message_logits_EACPS, other.message_logits_EACPS),
                torch.where(
                    is_read_EA[..., None], one.decision_logits_EA3, other.decision_logits_EA3
                ),
            )
        )
    for step, again in zip(rollout.steps, rollout.play(changed), strict=True):
        for one in fields(step):
            assert torch.equal(getattr(step, one.name), getattr(again, one.name)), one.name


def test_returns_are_those_of_the_outcome(rollout: Rollout) -> None:
    handler = rollout.handler
    return_EA = torch.stack([step.reward_EA for step in rollout.steps]).sum(0)
    decision_RE = torch.stack([step.decision_E for step in rollout.steps])
    decision_E = decision_RE.min(0).values
    assert ((decision_RE != CONTINUE).sum(0) <= 1).all(), "one decision counts at most"
    v = handler.agent_names.index("verifier")
    # Turns that the verifier passes; if the last round is such a turn, it is penalised instead.
    num_passed_E = torch.zeros(COUNT)
    for r, (active_EAC, _) in enumerate(rollout.masks()):
        is_passed_E = active_EAC[:, v].any(-1) & (decision_RE[r] == CONTINUE)
        num_passed_E += (is_passed_E & (r != handler.max_message_rounds - 1)).float()
    outcome_E = torch.where(decision_E == rollout.y_E, 3.0, -5.0)
    outcome_E = torch.where(decision_E == CONTINUE, -7.0, outcome_E)
    torch.testing.assert_close(return_EA[:, v], outcome_E + 0.5 * num_passed_E)
    if handler.needs_logits or handler.common.shared_reward:
        return
    for name in handler.prover_names:
        favoured = handler.favoured_decisions.get(name, 1)
        expected_E = REWARDS["prover_reward"] * (decision_E == favoured)
        torch.testing.assert_close(return_EA[:, handler.agent_names.index(name)], expected_E)


def test_rewards_of_simulator_and_adversarial_verifier_cancel(rollout: Rollout) -> None:
    if not rollout.handler.needs_logits:
        return
    reward_REA = torch.stack([step.reward_EA for step in rollout.steps])
    assert (reward_REA[..., -1] + reward_REA[..., -2] == 0).all()
    assert reward_REA[..., -1].abs().max() > 0.1
    assert reward_REA[..., -1].abs().max() <= 2 * 0.5


def test_giving_nothing_away_adds_to_the_rewards_of_provers_alone(rollout: Rollout) -> None:
    handler = rollout.handler
    if not handler.needs_logits:
        return
    base = handler.base
    n = base.num_agents
    moves = [Moves(one.decision_EA[:, :n]) for one in rollout.moves]
    steps = play(base, lambda r: moves[r], rollout.y_E, rollout.seed_E, num_rounds=len(moves))
    for step, of_base in zip(rollout.steps, steps, strict=True):
        added_EA = step.reward_EA[:, :n] - of_base.reward_EA
        for name in base.agent_names:
            share = 0.25 if name in base.prover_names else 0.0
            got_E = added_EA[:, base.agent_names.index(name)]
            torch.testing.assert_close(got_E, share * step.reward_EA[:, -1], atol=1e-6, rtol=0)
        assert torch.equal(step.decision_E, of_base.decision_E)


def test_each_environment_is_on_its_own(rollout: Rollout) -> None:
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(3))[:7]
    some = replace_rows(rollout.moves, order)
    steps = play(
        rollout.handler,
        lambda r: some[r],
        rollout.y_E[order],
        rollout.seed_E[order],
        num_rounds=len(some),
    )
    for step, of_all in zip(steps, rollout.steps, strict=True):
        for one in fields(step):
            torch.testing.assert_close(getattr(step, one.name), getattr(of_all, one.name)[order])


def replace_rows(moves: list[Moves], rows: Tensor) -> list[Moves]:
    return [
        replace(one, **{item.name: getattr(one, item.name)[rows] for item in fields(one)})
        for one in moves
    ]


def test_inputs_are_left_alone_and_results_are_of_the_stated_types(
    handler: ProtocolHandler,
) -> None:
    moves = random_moves(handler, COUNT, torch.Generator().manual_seed(4))
    assert moves.message_logits_EACPS is not None
    moves.message_logits_EACPS.requires_grad_()
    round_E = torch.full((COUNT,), handler.max_message_rounds - 1)
    seed_E = torch.arange(COUNT)
    y_E, decided_EA = seed_E % 2, torch.zeros(COUNT, handler.num_agents, dtype=torch.bool)
    inputs = [round_E, seed_E, y_E, decided_EA, *(getattr(moves, f.name) for f in fields(moves))]
    before = [(one._version, one.detach().clone()) for one in inputs]
    step = handler.step(round_E, seed_E, y_E, decided_EA, moves)
    again = handler.step(round_E, seed_E, y_E, decided_EA, moves)
    for one, (version, value) in zip(inputs, before, strict=True):
        assert one._version == version
        assert torch.equal(one, value)
    assert step.reward_EA.dtype == torch.float32
    assert not step.reward_EA.requires_grad
    assert step.reward_EA.shape == step.agent_decided_EA.shape == (COUNT, handler.num_agents)
    assert step.decision_E.dtype == torch.long
    for flag in (step.has_decided_E, step.is_out_of_rounds_E, step.agent_decided_EA, step.is_done):
        assert flag.dtype == torch.bool
    for one in fields(step):
        assert torch.equal(getattr(step, one.name), getattr(again, one.name))


def test_a_step_looks_at_no_value_so_it_can_run_on_any_device(handler: ProtocolHandler) -> None:
    # Fake tensors have no values: `.item()`, `if tensor:` and `nonzero()` fail on them.
    moves = random_moves(handler, COUNT, torch.Generator().manual_seed(5))
    real = [
        torch.zeros(COUNT, dtype=torch.long),
        torch.arange(COUNT),
        torch.arange(COUNT) % 2,
        torch.zeros(COUNT, handler.num_agents, dtype=torch.bool),
    ]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(one) for one in real]
        fake_moves = Moves(*(mode.from_tensor(getattr(moves, one.name)) for one in fields(moves)))
        step = handler.step(*fake, fake_moves)
        assert step.reward_EA.shape == (COUNT, handler.num_agents)
        assert handler.active_mask(fake[0], fake[1], fake[3]).dtype == torch.bool

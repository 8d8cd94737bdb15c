"""Properties of every protocol, with and without zero knowledge, however it is played."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import CONTINUE, Moves, ProtocolHandler, ProtocolStep
from tests.protocols.playing import PLAY_ALONE, build, play, random_moves

COUNT = 64
ZK = {"simulator_reward_coefficient": 0.5, "aux_prover_reward_coefficient": 0.25}


def variants(*extensions: dict[str, float] | None) -> Iterator[Any]:
    for member in InteractionProtocolType:
        name = str(member)
        for zk in extensions:
            for common in ({}, {"verifier_first": False}, {"shared_reward": True}):
                section = {}
                if name not in PLAY_ALONE:
                    section = {"max_message_rounds": 7, "min_message_rounds": 2}
                if name in ("debate", "mnip"):
                    section["sequential"] = "shared_reward" in common
                words = [name, *common, *(["zk"] if zk else [])]
                yield pytest.param((name, section, zk, common), id="-".join(words))


@pytest.fixture(params=variants(None, ZK))
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


@pytest.fixture
def rollout(handler: ProtocolHandler) -> Rollout:
    return Rollout(handler)


def test_every_episode_ends_once_and_earns_nothing_after_it(rollout: Rollout) -> None:
    last = rollout.handler.max_message_rounds - 1
    is_over_E = torch.zeros(COUNT, dtype=torch.bool)
    decided_EA = torch.zeros(COUNT, rollout.handler.num_agents, dtype=torch.bool)
    num_rewarded = num_out_of_rounds = 0
    for r, step in enumerate(rollout.steps):
        assert (step.reward_EA[is_over_E] == 0).all()
        assert (step.reward_EA[decided_EA] == 0).all()
        assert (step.decision_E[is_over_E] == CONTINUE).all()
        assert not (step.has_decided_E & step.is_out_of_rounds_E).any()
        assert r == last or not step.is_out_of_rounds_E.any()
        assert (step.agent_decided_EA | ~decided_EA).all(), "who has decided stays decided"
        is_over_E, decided_EA = is_over_E | step.is_done, step.agent_decided_EA
        assert r < last or is_over_E.all()
        num_rewarded += int((step.reward_EA != 0).sum())
        num_out_of_rounds += int(step.is_out_of_rounds_E.sum())
    assert num_rewarded > 0
    assert 0 < num_out_of_rounds < COUNT


def test_moves_of_agents_that_may_not_make_them_change_nothing(rollout: Rollout) -> None:
    generator, handler = torch.Generator().manual_seed(2), rollout.handler
    changed = []
    decided_EA = torch.zeros(COUNT, handler.num_agents, dtype=torch.bool)
    for r, (move, step) in enumerate(zip(rollout.moves, rollout.steps, strict=True)):
        place = torch.full((COUNT,), r), rollout.seed_E, decided_EA
        is_open = handler.active_mask(*place)[..., None, None]
        can_decide_EA = handler.can_decide(*place)
        # The simulator decides nothing, but its hypothetical decision is compared.
        is_read_EA = can_decide_EA.clone()
        is_read_EA[:, -1] |= can_decide_EA[:, -2:].any(1) & handler.needs_logits
        other = random_moves(handler, COUNT, generator)
        logits, others = move.decision_logits_EA3, other.decision_logits_EA3
        changed.append(
            Moves(
                torch.where(can_decide_EA, move.decision_EA, other.decision_EA),
                torch.where(is_open, move.message_logits_EACPS, other.message_logits_EACPS),
                torch.where(is_read_EA[..., None], logits, others),
            )
        )
        decided_EA = step.agent_decided_EA
    for step, again in zip(rollout.steps, rollout.play(changed), strict=True):
        for item in fields(step):
            assert torch.equal(getattr(step, item.name), getattr(again, item.name)), item.name


@pytest.mark.parametrize("handler", variants(ZK), indirect=True)
def test_zero_knowledge_adds_opposite_rewards_and_a_share_for_provers_alone(
    rollout: Rollout,
) -> None:
    base = rollout.handler.base
    n = base.num_agents
    moves = [Moves(move.decision_EA[:, :n]) for move in rollout.moves]
    steps = play(base, lambda r: moves[r], rollout.y_E, rollout.seed_E, num_rounds=len(moves))
    highest = 0.0
    share_A = torch.tensor([0.25 * (name in base.prover_names) for name in base.agent_names])
    for step, of_base in zip(rollout.steps, steps, strict=True):
        adversary_E, simulator_E = step.reward_EA[:, n:].unbind(1)
        assert torch.equal(adversary_E, -simulator_E)
        highest = max(highest, float(simulator_E.abs().max()))
        added_EA = step.reward_EA[:, :n] - of_base.reward_EA
        torch.testing.assert_close(added_EA, share_A * simulator_E[:, None], atol=1e-6, rtol=0)
        assert torch.equal(step.decision_E, of_base.decision_E)
    assert 0.1 < highest <= 2 * 0.5


def test_each_environment_is_on_its_own(rollout: Rollout) -> None:
    rows = torch.randperm(COUNT, generator=torch.Generator().manual_seed(3))[:7]
    moves = [
        replace(move, **{item.name: getattr(move, item.name)[rows] for item in fields(move)})
        for move in rollout.moves
    ]
    y_E, seed_E = rollout.y_E[rows], rollout.seed_E[rows]
    steps = play(rollout.handler, lambda r: moves[r], y_E, seed_E, num_rounds=len(moves))
    for step, of_all in zip(steps, rollout.steps, strict=True):
        for item in fields(step):
            torch.testing.assert_close(getattr(step, item.name), getattr(of_all, item.name)[rows])


def test_inputs_are_left_alone_and_results_are_of_the_stated_types(
    handler: ProtocolHandler,
) -> None:
    moves = random_moves(handler, COUNT, torch.Generator().manual_seed(4))
    moves.message_logits_EACPS.requires_grad_()
    numbers = torch.arange(COUNT)
    undecided_EA = torch.zeros(COUNT, handler.num_agents, dtype=torch.bool)
    last_E = torch.full((COUNT,), handler.max_message_rounds - 1)
    inputs = [last_E, numbers, numbers % 2, undecided_EA]
    inputs += [getattr(moves, item.name) for item in fields(moves)]
    before = [(tensor._version, tensor.detach().clone()) for tensor in inputs]
    # Fake tensors have no values, so a step that looks at none can run on any device: `.item()`,
    # `if tensor:` and `nonzero()` fail on them.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = list(map(mode.from_tensor, inputs))
        steps = [handler.step(*fake[:4], Moves(*fake[4:]))]
        assert handler.active_mask(*fake[:2], fake[3]).dtype == torch.bool
    steps.append(handler.step(*inputs[:4], moves))
    for tensor, (version, value) in zip(inputs, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, value)
    for step in steps:
        assert not step.reward_EA.requires_grad
        assert step.reward_EA.shape == step.agent_decided_EA.shape == undecided_EA.shape
        assert (step.reward_EA.dtype, step.decision_E.dtype) == (torch.float32, torch.long)
        flags = (step.has_decided_E, step.is_out_of_rounds_E, step.agent_decided_EA, step.is_done)
        assert {flag.dtype for flag in flags} == {torch.bool}

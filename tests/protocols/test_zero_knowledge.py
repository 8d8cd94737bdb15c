"""Zero knowledge over other protocols behaves as computed by hand.

The simulator's coefficient is 0.5 and the provers' 3. Unless stated otherwise, messages of the
adversarial verifier have the logits (1, -1, 0) and the simulator's (11, 10, 9), which are
(1, 0, -1) when centred, so their cosine is 1/2; decisions have (6, 4, 5) and (-1, 1, 0), cosine -1.
The likeness is 1/2 - 1, so the simulator gets S = 0.5 * -0.5 = -0.25, the adversarial verifier
0.25, and a prover 3 * -0.25 = -0.75.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import CONTINUE, Moves, ProtocolHandler
from nip_astra.protocols.zero_knowledge import ZeroKnowledgeProtocol
from tests.kit.messages import says
from tests.protocols.playing import LETTERS, build, play

ZK = {"simulator_reward_coefficient": 0.5, "aux_prover_reward_coefficient": 3.0}


@pytest.mark.parametrize("name", list(map(str, InteractionProtocolType)))
def test_both_conversations_and_the_simulator_have_the_turns_of_the_protocol(name: str) -> None:
    base, handler = build(name), build(name, zk=ZK)
    n, v = base.num_agents, base.agent_names.index("verifier")
    assert handler.max_message_rounds == base.max_message_rounds
    for seed, r in product(range(4), range(base.max_message_rounds + 1)):
        place = torch.tensor([r]), torch.tensor([seed])
        base_AC = base.active_mask(*place)[0]
        standard_AC, adversarial_AC, simulator_AC = handler.active_mask(*place)[0].chunk(3, dim=1)
        assert torch.equal(standard_AC[:n], base_AC)
        assert not standard_AC[n:].any()
        assert torch.equal(adversarial_AC[n], base_AC[v])
        assert torch.equal(adversarial_AC[:v], base_AC[:v])
        assert not adversarial_AC[[v, n + 1]].any()
        assert torch.equal(simulator_AC[n + 1], base_AC[v])
        assert not simulator_AC[: n + 1].any()
        decides = handler.can_decide(*place)[0].nonzero().flatten().tolist()
        assert decides == [v, n] * bool(base.can_decide(*place)[0, v])


def sends(handler: ProtocolHandler, active_EAC: Tensor) -> set[str]:
    return {
        f"{handler.agent_names[a]}:{handler.message_channel_names[c]}"
        for a, c in active_EAC[0].nonzero().tolist()
    }


def test_visibility_of_messages_in_mnip() -> None:
    handler = build("mnip", zk=ZK)
    seen = {
        agent: [handler.message_channel_names[c] for c in handler.visible_channels(agent)]
        for agent in handler.agent_names
    }
    assert seen == {
        "prover0": ["prover0_channel_standard", "prover0_channel_adversarial"],
        "prover1": ["prover1_channel_standard", "prover1_channel_adversarial"],
        "verifier": ["prover0_channel_standard", "prover1_channel_standard"],
        "adversarial_verifier": ["prover0_channel_adversarial", "prover1_channel_adversarial"],
        "simulator": ["prover0_channel_simulator", "prover1_channel_simulator"],
    }
    assert handler.verifier_names == ("verifier", "adversarial_verifier")
    assert handler.prover_names == ("prover0", "prover1")
    assert handler.needs_logits
    with_logits = [name for name in handler.agent_names if handler.has_decision_logits(name)]
    assert with_logits == ["verifier", "adversarial_verifier", "simulator"]
    assert handler.stackelberg_sequence == (
        ("verifier", "adversarial_verifier"),
        ("prover0", "prover1", "simulator"),
    )
    middle = [handler.reward_mid_point_estimate(name) for name in handler.agent_names]
    assert middle == [1.0, 1.0, -1.0, 0.0, 0.0]


@dataclass(frozen=True)
class Play:
    """An episode of nip with four rounds; rewards by round up to the end."""

    verifier: str
    adversary: str
    y: int
    rewards: list[list[float]]
    """Of the prover, the verifier, the adversarial verifier and the simulator."""
    is_out: bool = False
    common: dict[str, Any] = field(default_factory=dict)


PLAYS = {
    "both decide at once": Play("a", "r", 1, [[2 - 0.75], [3], [0.25], [-0.25]]),
    "the verifier decides first": Play(
        *("acr", "cca", 1), [[2 - 0.75, 0, -0.75], [3, 0, 0], [0.25, 0, 0.25], [-0.25, 0, -0.25]]
    ),
    "the adversarial verifier decides first": Play(
        *("cca", "acr", 0), [[-0.75, 0, 2], [0.5, 0, -5], [0.25, 0, 0], [-0.25, 0, 0]]
    ),
    "nobody decides": Play(
        *("cccc", "cccc", 0),
        [[-0.75, 0, -0.75, 0], [0.5, 0, 0.5, -7], [0.25, 0, 0.25, 0], [-0.25, 0, -0.25, 0]],
        is_out=True,
    ),
    "only the verifier decides, and is not charged for the other": Play(
        *("rccc", "cccc", 0),
        [[-0.75, 0, -0.75, 0], [3, 0, 0, 0], [0.25, 0, 0.25, 0], [-0.25, 0, -0.25, 0]],
        is_out=True,
    ),
    "only the adversarial verifier decides, and the verifier is charged": Play(
        *("cccc", "rccc", 0),
        [[-0.75, 0, 0, 0], [0.5, 0, 0.5, -7], [0.25, 0, 0, 0], [-0.25, 0, 0, 0]],
        is_out=True,
    ),
    "a forced decision is the verifier's alone": Play(
        *("ccc", "ccr", 1),
        [[2 - 0.75, 0, -0.75], [3, 0, 0], [0.25, 0, 0.25], [-0.25, 0, -0.25]],
        common={"force_guess": "y"},
    ),
}


@pytest.mark.parametrize("name", PLAYS)
def test_plays_of_nip_end_and_reward_as_worked_out(name: str) -> None:
    expected = PLAYS[name]
    handler = build("nip", {"max_message_rounds": 4}, zk=ZK, **expected.common)

    def moves_of(r: int) -> Moves:
        decisions = [text[r : r + 1] or "r" for text in (expected.verifier, expected.adversary)]
        return moves(handler, ["a", *decisions, "a"])

    steps = play(handler, moves_of, torch.tensor([expected.y]), torch.tensor([0]))
    length = len(expected.rewards[0])
    assert [bool(s.is_done) for s in steps[:length]] == [False] * (length - 1) + [True]
    assert bool(steps[length - 1].is_out_of_rounds_E) is expected.is_out
    assert bool(steps[length - 1].has_decided_E) is not expected.is_out
    for a, rewards in enumerate(expected.rewards):
        paid = [float(step.reward_EA[0, a]) for step in steps]
        assert paid == pytest.approx(rewards + [0.0] * (4 - length), abs=1e-6), a


def moves(handler: ProtocolHandler, letters: list[str]) -> Moves:
    """The moves of an episode with the logits in the module's docstring."""
    messages_EACPS = torch.randn(1, handler.num_agents, handler.num_channels, 1, 3)
    decisions_EA3 = torch.randn(1, handler.num_agents, 3)
    adversary, simulator = (handler.agent_names.index(n) for n in handler.agent_names[-2:])
    messages_EACPS[:, adversary] = torch.tensor([1.0, -1.0, 0.0])
    messages_EACPS[:, simulator] = torch.tensor([11.0, 10.0, 9.0])
    decisions_EA3[:, adversary] = torch.tensor([6.0, 4.0, 5.0])
    decisions_EA3[:, simulator] = torch.tensor([-1.0, 1.0, 0.0])
    return Moves(torch.tensor([[LETTERS[x] for x in letters]]), messages_EACPS, decisions_EA3)


def test_who_has_decided_is_carried_and_closes_the_conversation() -> None:
    handler = build("nip", {"max_message_rounds": 6}, zk=ZK)
    zero, item = torch.tensor([0]), torch.tensor([1])
    nobody = torch.zeros(1, 4, dtype=torch.bool)
    step = handler.step(zero, zero, item, nobody, moves(handler, ["a", "r", "c", "a"]))
    assert step.agent_decided_EA.tolist() == [[False, True, False, False]]
    assert int(step.decision_E) == 0
    decided = step.agent_decided_EA
    assert sends(handler, handler.active_mask(item, zero, decided)) == {"prover:main_adversarial"}
    assert sends(handler, handler.active_mask(item + 1, zero, decided)) == {
        "adversarial_verifier:main_adversarial",
        "simulator:main_simulator",
    }
    assert handler.can_decide(item + 1, zero, decided).tolist() == [[False, False, True, False]]
    step = handler.step(item, zero, item, decided, moves(handler, ["c"] * 4))
    assert int(step.decision_E) == CONTINUE
    assert torch.equal(step.agent_decided_EA, decided)
    # The simulator ends when the agent that it imitates does.
    step = handler.step(item + 1, zero, item, decided, moves(handler, ["c", "c", "a", "c"]))
    assert step.agent_decided_EA.tolist() == [[False, True, True, True]]
    assert bool(step.has_decided_E)


def test_the_likeness_of_messages_is_over_all_open_channels_at_once() -> None:
    handler = build("debate", {"max_message_rounds": 2}, zk=ZK, verifier_first=False)
    messages_EACPS = torch.randn(1, 5, 6, 1, 3)
    # Channels: two standard, two adversarial, two of the simulator.
    messages_EACPS[0, 3, 2:4, 0] = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    messages_EACPS[0, 4, 4:6, 0] = torch.tensor([[1.0, -1.0, 0.0], [1.0, 0.0, -1.0]])
    decisions_EA3 = torch.randn(1, 5, 3)
    decisions_EA3[0, 3:] = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -2.0]])
    played = Moves(torch.zeros(1, 5, dtype=torch.long), messages_EACPS, decisions_EA3)
    first, second = play(handler, lambda r: played, torch.tensor([0]), torch.tensor([0]))
    assert first.reward_EA.tolist() == [[0.0] * 5]
    s = 0.5 * 1 / 2**0.5
    expected = [2 + 3 * s, 3 * s, 3.0, -s, s]
    assert second.reward_EA[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_before_a_decision_counts_its_likeness_does_not() -> None:
    handler = build("nip", {"max_message_rounds": 4, "min_message_rounds": 2}, zk=ZK)
    steps = play(handler, lambda r: moves(handler, ["c"] * 4), torch.tensor([0]), torch.tensor([0]))
    got = [float(step.reward_EA[0, -1]) for step in steps]
    assert got == pytest.approx([0.5 * 0.5, 0, 0.5 * (0.5 - 1), 0])


def test_symbols_that_cannot_be_sent_do_not_make_messages_alike() -> None:
    handler = build("adp", zk=ZK)
    messages_EACPS = torch.full((1, 4, 3, 1, 4), -1e9)
    messages_EACPS[0, 2, 1, 0, :2] = torch.tensor([1.0, 0.0])
    messages_EACPS[0, 3, 2, 0, :2] = torch.tensor([0.0, 1.0])
    played = Moves(torch.zeros(1, 4, dtype=torch.long), messages_EACPS, torch.zeros(1, 4, 3))
    step = play(handler, lambda r: played, torch.tensor([0]), torch.tensor([0]))[-1]
    assert step.reward_EA[0, 2:].tolist() == pytest.approx([0.5, -0.5])


def test_rewards_on_logits_reach_both_agents_and_raising_them_makes_both_alike() -> None:
    handler = build("adp", zk=ZK)
    assert isinstance(handler, ZeroKnowledgeProtocol)
    rounds, zeros = torch.ones(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    place = rounds, zeros, torch.zeros(4, 4, dtype=torch.bool)
    torch.manual_seed(0)
    messages_EACPS = torch.randn(4, 4, 3, 1, 5, requires_grad=True)
    decisions_EA3 = torch.randn(4, 4, 3, requires_grad=True)
    played = Moves(torch.zeros(4, 4, dtype=torch.long), messages_EACPS, decisions_EA3)
    reward_EA = handler.step(rounds, zeros, zeros, place[-1], played).reward_EA
    assert not reward_EA.requires_grad
    for number, name in ((2, "adversarial_verifier"), (3, "simulator")):
        earned_E = handler.logit_reward(name, *place, played)
        assert torch.equal(earned_E.detach(), reward_EA[:, number])
    assert handler.logit_reward("prover", *place, played) is None
    assert build("adp").logit_reward("verifier", *place, played) is None
    handler.likeness(*place, played).sum().backward()
    moved = messages_EACPS.grad.abs().sum((0, 3, 4)).nonzero().tolist()
    assert moved == [[2, 1], [3, 2]]
    assert decisions_EA3.grad.abs().sum((0, 2)).nonzero().flatten().tolist() == [2, 3]
    optimizer = torch.optim.Adam([messages_EACPS, decisions_EA3], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        earned_E = handler.logit_reward("simulator", *place, played)
        torch.autograd.backward(-earned_E.mean())
        optimizer.step()
    assert float(earned_E.detach().min()) > 0.5 * 1.99


@pytest.mark.parametrize("agent", [2, 3])
def test_a_uniform_policy_is_like_no_other_and_has_no_gradient(agent: int) -> None:
    handler = build("adp", zk=ZK)
    assert isinstance(handler, ZeroKnowledgeProtocol)
    generator = torch.Generator().manual_seed(0)
    messages_EACPS = torch.randn(1, 4, 3, 1, 5, generator=generator)
    decisions_EA3 = torch.randn(1, 4, 3, generator=generator)
    messages_EACPS[:, agent] = decisions_EA3[:, agent] = 0.0
    logits = messages_EACPS.requires_grad_(), decisions_EA3.requires_grad_()
    zero = torch.zeros(1, dtype=torch.long)
    decided_EA = torch.zeros(1, 4, dtype=torch.bool)
    likeness_E = handler.likeness(
        zero + 1, zero, decided_EA, Moves(torch.zeros(1, 4, dtype=torch.long), *logits)
    )
    assert likeness_E.tolist() == [0.0]
    gradients = torch.autograd.grad(likeness_E.sum(), logits, create_graph=True)
    second = torch.autograd.grad(sum(one.square().sum() for one in gradients), logits)
    assert not any(one.any() for one in (*gradients, *second)), "NaN counts as any"


def test_moves_without_logits_are_refused() -> None:
    handler = build("nip", zk=ZK)
    nothing = torch.zeros(1, dtype=torch.long)
    decided = torch.zeros(1, 4, dtype=torch.bool)
    with pytest.raises(ConfigurationError) as caught:
        handler.step(nothing, nothing, nothing, decided, Moves(decided.long()))
    facts = ("message_logits_EACPS", "decision_logits_EA3", "zero_knowledge=false")
    assert says(caught.value, *facts)

"""Random play of every protocol in the environment: turns, messages, ends, rewards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.scenario_base.protocol.combined import JointMoves
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment, Transition
from nip_astra.scenario_base.protocol.tensordict_agents import MessageSpace
from tests.protocols.oracle import SEES
from tests.protocols.playing import PLAY_ALONE, build, random_moves

NUM_ENVIRONMENTS, NUM_STEPS = 16, 24
ZK = {"simulator_reward_coefficient": 0.5, "aux_prover_reward_coefficient": 0.25}
SPACE = MessageSpace(num_symbols=3, message_size=2)


ORDERS: dict[str, list[dict[str, bool]]] = {
    name: [{}, {"sequential": True}, {"sequential": True, "prover0_first": False}]
    for name in ("debate", "mnip")
}
"""Orders of play of protocols that have several."""


@pytest.fixture(
    params=[
        (name, order, is_verifier_first, zk)
        for name in SEES
        for order in ORDERS.get(name, [{}])
        for is_verifier_first in ((True,) if name in PLAY_ALONE else (True, False))
        for zk in (None, ZK)
    ],
    ids=str,
    scope="module",
)
def handler(request: pytest.FixtureRequest) -> ProtocolHandler:
    name, order, is_verifier_first, zk = request.param
    section = {} if name in PLAY_ALONE else {"max_message_rounds": 6, **order}
    return build(name, section, zk=zk, verifier_first=is_verifier_first)


def make_environment(handler: ProtocolHandler) -> ProtocolEnvironment:
    y = torch.arange(10)[:, None] % 2
    dataset = TensorDict({"y": y}, batch_size=10)
    return ProtocolEnvironment(
        handler, dataset, SPACE, num_environments=NUM_ENVIRONMENTS, key=("play",)
    )


Step = tuple[dict[str, Tensor], JointMoves, Transition, dict[str, Tensor]]


def play(environment: ProtocolEnvironment) -> Iterator[Step]:
    """Yield, for each step: the frame, the moves, their results, and the following frame."""
    generator = torch.Generator().manual_seed(1)
    frame = environment.fresh(NUM_ENVIRONMENTS)
    for _ in range(NUM_STEPS):
        random = random_moves(environment.protocol, NUM_ENVIRONMENTS, generator)
        assert random.message_logits_EACPS is not None
        assert random.decision_logits_EA3 is not None
        moves = JointMoves(
            decision_BA=random.decision_EA,
            message_BACP=random.message_logits_EACPS.argmax(-1),
            logprobs_BA=torch.zeros(random.decision_EA.shape),
            message_logits_BACPS=random.message_logits_EACPS,
            decision_logits_BA3=random.decision_logits_EA3,
        )
        transition = environment.advance(frame, moves)
        following = environment.renew(transition.observation, transition.is_done_E)
        yield frame, moves, transition, following
        frame = following


@pytest.fixture(scope="module")
def steps(handler: ProtocolHandler) -> list[Step]:
    """The played steps, once for all tests of a protocol."""
    return list(play(make_environment(handler)))


def test_only_messages_of_agents_with_a_turn_are_sent(
    handler: ProtocolHandler, steps: list[Step]
) -> None:
    for frame, moves, transition, _ in steps:
        may_EAC = handler.active_mask(frame["round"], frame["seed"])
        assert not (frame["active_mask"] & ~may_EAC).any()
        said = torch.zeros_like(transition.observation["message"])
        for e, a, c in frame["active_mask"].nonzero().tolist():
            for p, symbol in enumerate(moves.message_BACP[e, a, c].tolist()):
                said[e, c, p, symbol] += 1
        assert torch.equal(transition.observation["message"], said)
        rows = torch.arange(NUM_ENVIRONMENTS)
        history = transition.observation["message_history"]
        assert torch.equal(history[rows, frame["round"]], said)


def test_the_message_to_answer_is_the_verifiers_last(
    handler: ProtocolHandler, steps: list[Step]
) -> None:
    rows = torch.arange(NUM_ENVIRONMENTS)[:, None]
    channels = torch.arange(handler.num_channels)
    asks_A = torch.tensor([name in handler.verifier_names for name in handler.agent_names])
    shape = (NUM_ENVIRONMENTS, handler.num_channels, 2, 3)
    asked, said = torch.zeros(shape), torch.zeros(shape)
    num_answered = 0
    for frame, _, transition, _ in steps:
        is_new_E = frame["round"] == 0
        asked[is_new_E], said[is_new_E] = 0, 0
        question = frame["message_history"][rows, frame["question_round"], channels]
        has_question_EC = asked.flatten(2).any(-1)[..., None, None]
        expected = torch.where(has_question_EC, asked, said)
        active_EAC = frame["active_mask"]
        answers_EC = active_EAC[:, ~asks_A].any(1)
        assert torch.equal(question[answers_EC], expected[answers_EC])
        num_answered += int((answers_EC & has_question_EC[..., 0, 0]).sum())
        message = transition.observation["message"]
        asked = torch.where(active_EAC[:, asks_A].any(1)[..., None, None], message, asked)
        said = torch.where(active_EAC.any(1)[..., None, None], message, said)
    fixed = ("AdpProtocol", "MerlinArthurProtocol", "SoloVerifierProtocol")
    base = getattr(handler, "base", handler)
    assert (num_answered > 0) is (type(base).__name__ not in fixed)


def test_episodes_end_in_time_and_begin_without_messages_or_decisions(
    handler: ProtocolHandler, steps: list[Step]
) -> None:
    num_ended = 0
    for frame, _, transition, following in steps:
        is_last_E = frame["round"] == handler.max_message_rounds - 1
        is_done_E = transition.is_done_E
        assert is_done_E[is_last_E].all()
        assert torch.equal(transition.step.is_out_of_rounds_E & ~is_last_E, is_last_E & False)
        num_ended += int(is_done_E.sum())
        for name in ("round", "message_history", "message", "has_decided"):
            assert (following[name][is_done_E] == 0).all(), name
        assert torch.equal(following["round"][~is_done_E], frame["round"][~is_done_E] + 1)
        decided_EA = transition.step.agent_decided_EA
        assert torch.equal(following["has_decided"][~is_done_E], decided_EA[~is_done_E])
        assert not following["active_mask"][following["has_decided"]].any()
        assert not following["can_decide"][following["has_decided"]].any()
    assert num_ended > NUM_ENVIRONMENTS


@pytest.mark.parametrize("name", ["nip", "merlin_arthur"])
def test_agents_with_ends_of_their_own_play_on_in_torchrl(name: str) -> None:
    environment = make_environment(build(name, zk=ZK))
    torch.manual_seed(1)
    rollout = environment.rollout(NUM_STEPS, break_when_any_done=False)
    assert rollout.batch_size == (NUM_ENVIRONMENTS, NUM_STEPS)
    assert rollout["next", "done"].sum() > NUM_ENVIRONMENTS
    assert torch.equal(rollout["next", "done"], rollout["next", "terminated"])
    # One verifier had decided while the other had not.
    decided = rollout["next", "has_decided"]
    assert (decided[..., -3] ^ decided[..., -2]).any()
    reward = rollout["next", "agents", "reward"].squeeze(-1)
    assert (reward[..., -1] + reward[..., -2]).abs().max() == 0

"""Episodes begin with the next datapoint, end by the protocol, and TorchRL can play them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot
from torchrl.envs import check_env_specs

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.scenario_base.protocol.environment import DataCycler
from tests.kit.protocol_games import build_game

PROTOCOLS = [str(member) for member in InteractionProtocolType]


def test_every_pass_holds_each_datapoint_once_in_another_order_which_goes_on() -> None:
    cycler, other = DataCycler(10, (0, "x")), DataCycler(10, (0, "x"))
    drawn = torch.cat([cycler.take(count) for count in (3, 9, 8)])
    for part in (drawn[:10], drawn[10:]):
        assert sorted(part.tolist()) == list(range(10))
    assert drawn[:10].tolist() != drawn[10:].tolist()
    other.position = 13
    assert drawn[13:].tolist() == other.take(7).tolist()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("zero_knowledge", [False, True])
def test_torchrl_finds_the_specs_right_and_plays_through_ends(
    protocol: str, zero_knowledge: bool
) -> None:
    linear = {"include_linear_message_space": True, "message_size": 2}
    game = build_game(protocol, linear, protocol_common={"zero_knowledge": zero_knowledge})
    environment, handler = game.train_environment, game.protocol_handler
    check_env_specs(environment)
    torch.manual_seed(1)
    rollout = environment.rollout(20, break_when_any_done=False)
    done = rollout["next", "done"].squeeze(-1)
    assert done.any()
    assert rollout["next", "done"].equal(rollout["next", "terminated"])
    # After an end another datapoint is played from round 0, without messages or decisions.
    for name in ("round", "message", "linear_message", "message_history", "has_decided"):
        assert not rollout[name][:, 1:][done[:, :-1]].any(), name
    assert (rollout["round"][:, 1:] == rollout["round"][:, :-1] + 1)[~done[:, :-1]].all()
    # Only messages of agents with a turn are sent, and no agent has one after its decision.
    frames = rollout.reshape(-1)
    turn = frames["round"], frames["seed"], frames["has_decided"]
    assert frames["active_mask"].equal(handler.active_mask(*turn))
    assert frames["can_decide"].equal(handler.can_decide(*turn))
    assert frames["question_round"].equal(handler.question_round(*turn[:2]))
    for name in ("message", "linear_message"):
        sent = one_hot(frames["agents", name], frames[name].shape[-1])
        sent = (sent * frames["active_mask"][..., None, None]).sum(1).float()
        assert frames["next", name].equal(sent)
        history = frames["next", f"{name}_history"]
        assert history[torch.arange(len(history)), frames["round"]].equal(sent)


def test_verifiers_of_zero_knowledge_end_apart() -> None:
    game = build_game("nip", protocol_common={"zero_knowledge": True})
    torch.manual_seed(1)
    rollout = game.train_environment.rollout(20, break_when_any_done=False)
    verifier, adversary, simulator = rollout["next", "has_decided"][..., 1:].unbind(-1)
    assert (verifier ^ adversary).any()
    assert simulator.equal(adversary)


@pytest.mark.parametrize(
    ("agents", "num_frames", "fact"),
    [
        ({"default": {}}, 65, "Set it to 64, or set"),
        ({"default": {}, "provr": {}}, 64, "Did you mean 'prover'?"),
        ({"prover": {}}, 64, "agents.verifier"),
    ],
)
def test_agents_that_the_protocol_lacks_or_needs_and_frames_that_do_not_divide_are_refused(
    agents: dict[str, Any], num_frames: int, fact: str
) -> None:
    frames = {"frames_per_batch": num_frames, "steps_per_env_per_iteration": 4}
    with pytest.raises(ConfigurationError) as caught:
        build_game("nip", {"agents": agents}, rl=frames)
    assert fact in str(caught.value)


def test_common_parameters_apply_to_agents_with_their_own_parameters_too() -> None:
    rates = {"default": {"actor": 0.5}, "verifier": {"critic": 2.0}}
    agents = {name: {"agent_lr_factor": rate} for name, rate in rates.items()}
    game = build_game("nip", {"agents": agents})
    factors = game.agents["verifier"].parameters_of_agent.agent_lr_factor
    assert (factors.actor, factors.critic) == (0.5, 2.0)


def test_an_agent_is_the_same_whatever_the_others_are() -> None:
    game, other = build_game("nip"), build_game("nip", rl={"use_shared_body": False})
    for name in ("prover", "verifier"):
        weights = (built.agents[name].parameters() for built in (game, other))
        assert all(item.equal(same) for item, same in zip(*weights, strict=True))
    first = next(game.agents["prover"].parameters())
    assert not first.equal(next(game.agents["verifier"].parameters()))


@pytest.mark.parametrize("zero_knowledge", [False, True])
def test_a_policy_has_no_decision_to_make_where_decisions_are_forced(zero_knowledge: bool) -> None:
    common = {"force_guess": "y", "zero_knowledge": zero_knowledge}
    game = build_game("nip", protocol_common=common)
    environment, agents = game.train_environment, game.combined_agents
    frame = environment.fresh(16)
    moves = agents.act(frame, torch.Generator().manual_seed(0))
    assert not frame["can_decide"][:, agents.number("verifier")].any()
    assert (moves.decision_BA[:, agents.number("verifier")] == 2).all()
    after = environment.advance(frame, moves).observation
    assert after["decided"].equal(frame["y"].squeeze(1)), "the label is decided all the same"
    if zero_knowledge:
        assert frame["can_decide"][:, agents.number("adversarial_verifier")].all()

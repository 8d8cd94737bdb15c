"""Every protocol behaves as computed by hand."""

from __future__ import annotations

import pytest
import torch

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import CONTINUE, Moves, ProtocolHandler
from tests.protocols.oracle import CASES, SEES, Case, Play
from tests.protocols.playing import LETTERS, build, play


def build_case(case: Case) -> ProtocolHandler:
    return build(case.protocol, case.section, **case.common)


def test_every_protocol_has_a_case_worked_out_by_hand() -> None:
    names = {str(member) for member in InteractionProtocolType}
    assert {case.protocol for case in CASES} == names == set(SEES)


@pytest.mark.parametrize("name", SEES)
def test_agents_and_channels_are_as_worked_out(name: str) -> None:
    handler = build(name)
    assert handler.agent_names == tuple(SEES[name])
    channels = handler.message_channel_names
    for a, (agent, seen) in enumerate(SEES[name].items()):
        assert [channels[c] for c in handler.visible_channels(agent)] == seen
        assert handler.visibility_AC[a].tolist() == [channel in seen for channel in channels]
        assert handler.has_decision_logits(agent) == (agent == "verifier")
    assert handler.verifier_names == ("verifier",)
    assert handler.prover_names == tuple(agent for agent in SEES[name] if agent != "verifier")
    assert (handler.num_agents, handler.num_channels) == (len(SEES[name]), len(channels))
    assert not handler.needs_logits


@pytest.mark.parametrize("case", CASES, ids=str)
def test_turns_are_as_worked_out(case: Case) -> None:
    handler = build_case(case)
    assert handler.max_message_rounds == len(case.turns[0])
    for seed in range(4):
        turns = case.turns[seed % len(case.turns)]
        for r in range(len(turns) + 2):
            active_AC = handler.active_mask(torch.tensor([r]), torch.tensor([seed]))[0]
            found = {
                f"{handler.agent_names[a]}:{handler.message_channel_names[c]}"
                for a, c in active_AC.nonzero().tolist()
            }
            assert found == (set(turns[r].split()) if r < len(turns) else set())
            can_decide_A = handler.can_decide(torch.tensor([r]), torch.tensor([seed]))[0]
            deciding = [n for n, c in zip(handler.agent_names, can_decide_A, strict=True) if c]
            assert deciding == (["verifier"] if r in case.deciding_rounds else [])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plays_end_and_reward_as_worked_out(case: Case) -> None:
    handler = build_case(case)
    # All plays of a case form a batch, and each is stepped after its end.
    y_E = torch.tensor([one.y for one in case.plays])
    seed_E = torch.tensor([one.seed for one in case.plays])

    def moves_of(r: int) -> Moves:
        decision_EA = torch.zeros(len(case.plays), handler.num_agents, dtype=torch.long)
        letters = [one.decisions[r : r + 1] or "r" for one in case.plays]
        decision_EA[:, -1] = torch.tensor([LETTERS[letter] for letter in letters])
        return Moves(decision_EA)

    steps = play(handler, moves_of, y_E, seed_E)
    for e, expected in enumerate(case.plays):
        length = len(expected.rewards["verifier"])
        is_done = [bool(step.is_done[e]) for step in steps[:length]]
        assert is_done == [False] * (length - 1) + [True]
        last = steps[length - 1]
        assert bool(last.is_out_of_rounds_E[e]) is expected.is_out
        assert bool(last.has_decided_E[e]) is not expected.is_out
        for a, agent in enumerate(handler.agent_names):
            got = [float(step.reward_EA[e, a]) for step in steps]
            assert got == expected.rewards[agent] + [0.0] * (len(steps) - length), agent
        assert [int(step.decision_E[e]) for step in steps] == _decisions(case, expected, len(steps))
        expected_end = [
            agent == "verifier" and not expected.is_out for agent in handler.agent_names
        ]
        assert last.agent_decided_EA[e].tolist() == expected_end


def _decisions(case: Case, expected: Play, num_rounds: int) -> list[int]:
    """The decisions that count in each round: one at the end, or none."""
    decisions = [CONTINUE] * num_rounds
    if not expected.is_out:
        last = len(expected.rewards["verifier"]) - 1
        forced = {"zero": 0, "one": 1, "y": expected.y, None: None}[case.common.get("force_guess")]
        decisions[last] = LETTERS[expected.decisions[last]] if forced is None else forced
    return decisions


@pytest.mark.parametrize(
    ("name", "section", "common", "questions"),
    [
        ("nip", {"max_message_rounds": 7}, {}, 4),
        ("nip", {"max_message_rounds": 7}, {"verifier_first": False}, 3),
        ("debate", {"max_message_rounds": 8}, {}, 4),
        ("debate", {"max_message_rounds": 8, "sequential": True}, {}, 3),
        ("debate", {"max_message_rounds": 8, "sequential": True}, {"verifier_first": False}, 2),
        ("mnip", {"max_message_rounds": 7, "sequential": True}, {}, 3),
        ("adp", {}, {}, 1),
        ("merlin_arthur", {}, {}, 1),
        ("multi_channel_test", {}, {}, 3),
        ("solo_verifier", {}, {}, 1),
    ],
)
def test_the_number_of_questions_is_that_of_the_verifiers_turns(
    name: str, section: dict[str, object], common: dict[str, object], questions: int
) -> None:
    assert build(name, section, **common).max_verifier_questions == questions


def test_verifiers_lead_and_all_others_follow() -> None:
    assert build("debate").stackelberg_sequence == (("verifier",), ("prover0", "prover1"))
    assert build("solo_verifier").stackelberg_sequence == (("verifier",),)


def test_the_mid_point_lies_between_the_rewards_for_well_and_badly_done() -> None:
    handler = build("nip")
    assert handler.reward_mid_point_estimate("verifier") == (3 - 5) / 2
    assert handler.reward_mid_point_estimate("prover") == 1.0
    assert build("nip", shared_reward=True).reward_mid_point_estimate("prover") == -1.0


def test_a_description_shows_who_sees_sends_and_decides() -> None:
    assert build("nip", {"max_message_rounds": 3}).describe() == "\n".join(
        [
            "prover sees main",
            "verifier sees main",
            "",
            "round  prover  verifier",
            "0      -       main, decides",
            "1      main    -",
            "2      -       main, decides",
        ]
    )
    text = build("merlin_arthur").describe()
    assert "episodes with seed % 2 = 0:\nround  prover0  prover1  verifier\n0      main " in text
    assert "episodes with seed % 2 = 1:\nround  prover0  prover1  verifier\n0      -  " in text

"""Text games have their protocols' turns, visibility and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.language_models.services.chat import ChatRequest
from nip_astra.protocols.protocol_base import ACCEPT, CONTINUE, REJECT, Moves
from nip_astra.samplers.text_rollouts import TextNode
from nip_astra.scenario_base.text.game import (
    GO_ON,
    TextGame,
    channel_title,
    decision_text,
    load_prompts,
    parse_answer,
    parse_messages,
    random_stance,
)
from tests.kit.messages import says
from tests.kit.text_games import PROMPTS, FakeChatModel, build_text_game, play

SEQUENTIAL = {"max_message_rounds": 6, "sequential": True}
PROVER1_FIRST = SEQUENTIAL | {"prover0_first": False}
VERIFIER_LATER = {"protocol_common": {"verifier_first": False}}
PROTOCOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "nip": ("nip", {"nip": {"max_message_rounds": 4}}),
    "nip, prover first": ("nip", {"nip": {"max_message_rounds": 4}} | VERIFIER_LATER),
    "adp": ("adp", {}),
    "debate": ("debate", {"debate": {"max_message_rounds": 3}}),
    "debate in turn": ("debate", {"debate": SEQUENTIAL}),
    "debate in turn, prover1 first": ("debate", {"debate": PROVER1_FIRST} | VERIFIER_LATER),
    "mnip": ("mnip", {"mnip": {"max_message_rounds": 3}}),
    "merlin_arthur": ("merlin_arthur", {}),
    "solo_verifier": ("solo_verifier", {}),
    "multi_channel_test": ("multi_channel_test", {"multi_channel_test": {"max_message_rounds": 5}}),
}


def _talk(request: ChatRequest, number: int) -> str:
    """A message to every channel of an agent, in a form that a single channel also accepts."""
    return (
        "To main: hi\nTo prover0: hi\nTo prover1: hi\nTo prover0 verifier: hi\nTo prover chat: hi"
    )


def test_running_out_of_rounds_costs_the_verifier(tmp_path: Path) -> None:
    groups = {
        "nip": {"max_message_rounds": 4},
        "protocol_common": {"verifier_no_guess_reward": 0.25, "verifier_terminated_penalty": -2.0},
    }
    game = build_text_game("nip", tmp_path, **groups)
    (end,) = play(game, FakeChatModel(_talk))
    paid = [node.outcome.rewards for node in end.path() if node.outcome]
    # The verifier passes in rounds 0 and 2, and the last round, a prover's, ends the game.
    assert paid == [(0, 0.25), (0, 0), (0, 0.25), (0, -2)]


def test_shared_rewards_and_forced_guesses_are_those_of_the_declaration(tmp_path: Path) -> None:
    common = {"shared_reward": True, "force_guess": "y"}
    game = build_text_game("adp", tmp_path, protocol_common=common)
    model = FakeChatModel(_talk)
    (end,) = play(game, model, [game.start(0, {"y": 0, "claim": "x"}, 0)])
    assert (end.outcome.decision, end.outcome.rewards) == (REJECT, (1, 1))
    assert len(model.requests) == 1, "a decision that is forced is not asked for"


@pytest.mark.parametrize(("name", "groups"), PROTOCOLS.values(), ids=PROTOCOLS)
@pytest.mark.parametrize("label", [0, 1])
def test_a_game_in_words_pays_and_ends_as_the_tensor_game_of_its_declaration(
    name: str, groups: dict[str, Any], label: int, tmp_path: Path
) -> None:
    game = build_text_game(name, tmp_path, **groups)
    rounds = iter(torch.randint(3, (40,), generator=torch.Generator().manual_seed(3)).tolist())

    def script(request: ChatRequest, number: int) -> str:
        is_verifier = "You are Verifier" in request.messages[0]["content"]
        turn = request.messages[-1]["content"]
        drawn = next(rounds) if is_verifier and "decide" in turn else CONTINUE
        if "Last turn" in turn and drawn == CONTINUE:
            drawn = ACCEPT
        words = {REJECT: "Decision: reject", ACCEPT: "Decision: accept"}
        return words.get(drawn, _talk(request, number))

    starts = [game.start(0, {"y": label, "claim": "x"}, seed) for seed in range(6)]
    for start, end in zip(starts, play(game, FakeChatModel(script), starts), strict=True):
        _check_against_tensors(game, end, label, start.seed)


def _check_against_tensors(game: TextGame, end: TextNode, label: int, seed: int) -> None:
    protocol = game.protocol
    decided_EA = torch.zeros(1, protocol.num_agents, dtype=torch.bool)
    for number, node in enumerate(end.path()):
        at = torch.tensor([number]), torch.tensor([seed])
        active_AC = protocol.active_mask(*at, decided_EA)[0]
        speaking = [protocol.agent_names[a] for a in active_AC.any(-1).nonzero().flatten().tolist()]
        assert sorted(node.moves) == sorted(speaking)
        moves = [node.moves.get(agent) for agent in protocol.agent_names]
        decisions = [CONTINUE if move is None else move.parsed.decision for move in moves]
        played = Moves(torch.tensor([decisions]))
        step = protocol.step(*at, torch.tensor([label]), decided_EA, played)
        assert tuple(step.reward_EA[0].tolist()) == node.outcome.rewards
        assert bool(step.is_done[0]) == node.episode.is_done
        decided_EA = step.agent_decided_EA
    assert end.episode.is_done


SEES = {
    "solo_verifier": {"verifier": ""},
    "debate in turn": {
        "verifier": "prover0 prover1",
        "prover0": "prover1 verifier",
        "prover1": "prover0 verifier",
    },
    "mnip": {"verifier": "prover0 prover1", "prover0": "verifier", "prover1": "verifier"},
    "multi_channel_test": {
        "verifier": "prover0 prover1",
        "prover0": "prover1 prover2 verifier",
        "prover1": "prover2 verifier",
        # The verifier's channels are main and prover0_verifier, of which prover2 sees main.
        "prover2": "prover1 verifier",
    },
}


@pytest.mark.parametrize("name", SEES)
def test_an_agent_reads_only_the_messages_in_its_channels(name: str, tmp_path: Path) -> None:
    protocol, groups = PROTOCOLS[name] if " " in name else (name, {})
    game = build_text_game(protocol, tmp_path, **groups)
    (end,) = play(game, FakeChatModel(_talk))
    heard: dict[str, set[str]] = {}
    for node in end.path():
        for agent, move in node.moves.items():
            texts = [item["content"] for item in move.prompt if item["role"] == "user"]
            lines = [line for text in texts for line in text.splitlines()]
            names = {line.split(" (")[0].split(":")[0] for line in lines if ": " in line}
            spoken = {name.lower() for name in names} & {*game.protocol.agent_names}
            heard.setdefault(agent, set()).update(spoken)
    assert {agent: " ".join(sorted(names)) for agent, names in heard.items()} == SEES[name]


def test_an_agent_reads_the_conversation_from_its_own_side(tmp_path: Path) -> None:
    game = build_text_game("nip", tmp_path, nip={"max_message_rounds": 3})
    answers = iter(["Why? ", "Since.", "Decision: accept"])
    (end,) = play(game, FakeChatModel(lambda request, _: next(answers)))
    assert [dict(item) for item in end.moves["verifier"].prompt] == [
        {
            "role": "system",
            "content": "You are Verifier. At most 1 questions about the sky is blue.",
        },
        {"role": "user", "content": "Begin."},
        {"role": "assistant", "content": "Why? "},
        {"role": "user", "content": "Prover: Since.\n\nLast turn: decide."},
    ]
    assert [dict(item) for item in end.path()[1].moves["prover"].prompt] == [
        {"role": "system", "content": "You are Prover. Argue for accept of the sky is blue."},
        {"role": "user", "content": "Begin.\n\nVerifier: Why?\n\n[main]"},
    ]
    # Without a message between two turns, an agent gets a request to continue.
    prompts = {name: text.split("{% block turn %}")[0] for name, text in PROMPTS.items()}
    (tmp_path / "other").mkdir()
    game = build_text_game("multi_channel_test", tmp_path / "other", prompts=prompts)
    (end,) = play(game, FakeChatModel(_talk))
    prompt = end.path()[2].moves["prover1"].prompt
    assert [item["role"] for item in prompt] == ["system", "user", "assistant", "user"]
    assert prompt[-1]["content"] == GO_ON


def test_a_random_stance_hangs_on_the_datapoint_and_pays_for_its_side(tmp_path: Path) -> None:
    game = build_text_game("adp", tmp_path, has_random_stance=True)
    points = [{"y": 1, "claim": f"claim {number}"} for number in range(40)]
    stances = [random_stance(point) for point in points]
    assert stances == [random_stance(point | {"y": 0}) for point in points]
    assert 10 < sum(stances) < 30
    starts = [game.start(number, point, 0) for number, point in enumerate(points)]
    model = FakeChatModel(
        lambda request, _: "Hi" if "Prover" in str(request.messages[0]) else "Decision: reject"
    )
    for end, stance in zip(play(game, model, starts), stances, strict=True):
        assert end.outcome.rewards == (float(stance == REJECT), -1.0)
        word = "reject" if stance == REJECT else "accept"
        assert f"Argue for {word}" in end.path()[0].moves["prover"].prompt[0]["content"]


def test_the_order_of_channels_changes_with_seed_and_round(tmp_path: Path) -> None:
    game = build_text_game("debate", tmp_path)
    starts = [game.start(0, {"y": 1, "claim": "x"}, seed) for seed in range(20)]
    firsts = set()
    for end in play(game, FakeChatModel(_talk), starts):
        text = end.path()[2].moves["verifier"].prompt[-1]["content"]
        firsts.add(text.index("Prover0:") < text.index("Prover1:"))
    assert firsts == {True, False}


def test_protocols_that_cannot_be_played_in_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"zero_knowledge=false"):
        build_text_game("nip", tmp_path, protocol_common={"zero_knowledge": True})
    with pytest.raises(ConfigurationError, match="provers are prover0, prover1"):
        build_text_game("debate", tmp_path, has_random_stance=True)


def test_a_missing_or_broken_prompt_is_reported(tmp_path: Path) -> None:
    (tmp_path / "prover.jinja").write_text("{% block openin %}{% endblock %}")
    with pytest.raises(ConfigurationError) as caught:
        load_prompts(tmp_path, {"prover": "prover", "verifier": "verifier"}, "nip")
    assert says(caught.value, "prover.jinja", "'openin'", "opening")
    assert says(caught.value, "verifier.nip.jinja", "verifier.jinja")
    for broken in (b"{% if %}", b"\xff", b"{% extends 'other.jinja' %}"):
        (tmp_path / "prover.jinja").write_bytes(broken)
        with pytest.raises(ConfigurationError, match=r"prover\.jinja"):
            load_prompts(tmp_path, {"prover": "prover"}, "nip")


def test_a_prompt_inherits_blocks_and_uses_macros(tmp_path: Path) -> None:
    child = (
        "{% extends 'prover.jinja' %}{% macro loud(text) %}{{ text | upper }}!{% endmacro %}"
        "{% block turn %}{{ super() }} {{ loud('go') }}{% endblock %}"
    )
    parent = "{% block system %}S{% endblock %}{% block turn %}T{% endblock %}"
    (tmp_path / "prover.jinja").write_text(parent)
    (tmp_path / "prover.nip.jinja").write_text(child)
    prompts = load_prompts(tmp_path, {"prover": "prover"}, "nip")
    assert prompts["prover"].render({}) == {"system": "S", "opening": "", "turn": "T GO!"}


def test_an_unknown_variable_in_a_prompt_for_the_protocol_is_reported(tmp_path: Path) -> None:
    unknown = "{% block opening %}{{ datapoint.clam }}{% endblock %}"
    # A prompt for the protocol comes before that of the role.
    prompts = PROMPTS | {"verifier.solo_verifier.jinja": unknown}
    game = build_text_game("solo_verifier", tmp_path, prompts=prompts)
    with pytest.raises(DataError, match=r"has no attribute 'clam'.*It may use: agent, channels"):
        play(game, FakeChatModel(_talk))
    prompts["verifier.solo_verifier.jinja"] = "{% block opening %}{{ 1 / 0 }}{% endblock %}"
    with pytest.raises(DataError, match=r"verifier\.solo_verifier\.jinja"):
        play(build_text_game("solo_verifier", tmp_path, prompts=prompts), FakeChatModel(_talk))


TWO = ("prover0_channel", "prover1_channel")


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        *((decision_text(decision), decision) for decision in (REJECT, ACCEPT)),
        *((text, REJECT) for text in ("Sure.\nDECISION:  Reject.", 'decision: "reject"')),
        *((f"{text}accept", ACCEPT) for text in ("**Decision**: ", "Decision: Accept\nDecision: ")),
        *((f"{text} accept", CONTINUE) for text in ("My decision is to", "indecision:")),
        ("Decision: acceptable", CONTINUE),
    ],
)
def test_a_decision_is_found_anywhere_and_in_any_case(text: str, decision: int) -> None:
    parsed = parse_answer(text, ("main",), may_decide=True)
    assert (parsed.decision, parsed.fault) == (decision, "")
    assert parsed.messages == ({} if decision != CONTINUE else {"main": text})


@pytest.mark.parametrize(
    ("text", "may", "must"),
    [
        ("Decision: accept. Decision: reject.", True, False),
        ("Decision: accept", False, False),
        ("What is it?", True, True),
        ("  \n", True, False),
    ],
)
def test_an_answer_that_cannot_be_used_has_a_fault(text: str, may: bool, must: bool) -> None:
    parsed = parse_answer(text, ("main",), may_decide=may, must_decide=must)
    assert (bool(parsed.fault), parsed.decision, parsed.messages) == (True, CONTINUE, {})


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "Hm.\nTo prover0: Which line?\nSay why.\n**to PROVER1:** And you?",
            {"prover0_channel": "Which line?\nSay why.", "prover1_channel": "And you?"},
        ),
        ("To prover1: Hi", {"prover1_channel": "Hi"}),
        ("Hi", {}),
        ("To prover1:", {}),
    ],
)
def test_messages_to_several_channels_stand_below_their_headings(
    text: str, messages: dict[str, str]
) -> None:
    parsed = parse_answer(text, TWO, may_decide=True)
    assert parsed.messages == messages
    assert (parsed.fault == "") is bool(messages)


def test_a_longer_title_is_not_taken_for_a_shorter_and_a_quotation_for_a_decision() -> None:
    names = ("prover", "prover chat", "prover_0_verifier")
    text = "To prover chat: a\nTo prover: b\nTo prover 0 verifier: c\nTo prover: d"
    assert parse_messages(text, names).messages == {
        "prover chat": "a",
        "prover": "b\nd",
        "prover_0_verifier": "c",
    }
    assert channel_title("prover0_channel") == "prover0"
    # An agent that does not decide may quote a decision.
    parsed = parse_messages("Say decision: accept!", ("main",))
    assert (parsed.messages, parsed.decision) == ({"main": "Say decision: accept!"}, CONTINUE)

"""Turns, visibility and rewards in words equal hand-worked tables, and the tensor game's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.language_models.services.chat import ChatRequest
from nip_astra.protocols.protocol_base import ACCEPT, CONTINUE, REJECT, Moves
from nip_astra.samplers.text_rollouts import TextNode
from nip_astra.scenario_base.protocol.combined import JointMoves
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
from tests.kit.protocol_games import build_game
from tests.kit.text_games import PROMPTS, FakeChatModel, build_text_game, play

SEQUENTIAL = {"max_message_rounds": 6, "sequential": True}
TURNS: dict[str, tuple[str, dict[str, Any], list[set[str]]]] = {
    "nip": ("nip", {"nip": {"max_message_rounds": 4}}, [{"v"}, {"p"}, {"v"}, {"p"}]),
    "nip, prover first": (
        "nip",
        {"nip": {"max_message_rounds": 4}, "protocol_common": {"verifier_first": False}},
        [{"p"}, {"v"}, {"p"}, {"v"}],
    ),
    "adp": ("adp", {}, [{"p"}, {"v"}]),
    "debate": (
        "debate",
        {"debate": {"max_message_rounds": 3}},
        [{"v"}, {"p0", "p1"}, {"v"}],
    ),
    "debate in turn": (
        "debate",
        {"debate": SEQUENTIAL},
        [{"v"}, {"p0"}, {"p1"}, {"v"}, {"p0"}, {"p1"}],
    ),
    "debate in turn, prover1 first": (
        "debate",
        {
            "debate": SEQUENTIAL | {"prover0_first": False},
            "protocol_common": {"verifier_first": False},
        },
        [{"p1"}, {"p0"}, {"v"}, {"p1"}, {"p0"}, {"v"}],
    ),
    "mnip": ("mnip", {"mnip": {"max_message_rounds": 3}}, [{"v"}, {"p0", "p1"}, {"v"}]),
    "merlin_arthur": ("merlin_arthur", {}, [{"p0"}, {"v"}]),
    "solo_verifier": ("solo_verifier", {}, [{"v"}]),
    "multi_channel_test": (
        "multi_channel_test",
        {"multi_channel_test": {"max_message_rounds": 5}},
        [{"v"}, {"p0", "p1"}, {"p1", "p2"}, {"v"}, {"p0", "p1"}],
    ),
}


def _short(agent: str) -> str:
    return agent.replace("prover", "p").replace("verifier", "v")


def _talk(request: ChatRequest, number: int) -> str:
    """A message to every channel of an agent, in a form that a lone channel takes as well."""
    return (
        "To main: hi\nTo prover0: hi\nTo prover1: hi\nTo prover0 verifier: hi\nTo prover chat: hi"
    )


def _deciding(text: str) -> FakeChatModel:
    def script(request: ChatRequest, number: int) -> str:
        is_verifier = "You are Verifier" in request.messages[0]["content"]
        return text if is_verifier else _talk(request, number)

    return FakeChatModel(script)


@pytest.mark.parametrize(("name", "groups", "expected"), TURNS.values(), ids=TURNS)
def test_agents_have_their_turns_in_the_rounds_of_the_table(
    name: str, groups: dict[str, Any], expected: list[set[str]], tmp_path: Path
) -> None:
    game = build_text_game(name, tmp_path, **groups)
    (end,) = play(game, FakeChatModel(_talk))
    assert [{_short(agent) for agent in node.moves} for node in end.path()] == expected
    assert end.outcome is not None
    assert end.outcome.is_out_of_rounds


def test_the_episodes_seed_says_who_of_two_speaks_to_arthur(tmp_path: Path) -> None:
    game = build_text_game("merlin_arthur", tmp_path)
    starts = [game.start(0, {"y": 1, "claim": "x"}, seed) for seed in (4, 7)]
    ends = play(game, _deciding("Decision: reject"), starts)
    assert [list(end.path()[0].moves) for end in ends] == [["prover0"], ["prover1"]]
    # prover0 argues for reject, prover1 for accept, and neither the silent nor the wronged is paid.
    assert [end.path()[1].outcome.rewards for end in ends] == [(1, 0, -1), (1, 0, -1)]  # type: ignore[union-attr]


REWARDS = [
    # protocol, decision, label, rewards in the order of agent_names
    ("nip", "accept", 1, (1, 1)),
    ("nip", "accept", 0, (1, -1)),
    ("nip", "reject", 1, (0, -1)),
    ("nip", "reject", 0, (0, 1)),
    ("adp", "accept", 0, (1, -1)),
    ("adp", "reject", 0, (0, 1)),
    ("solo_verifier", "reject", 1, (-1,)),
    ("solo_verifier", "accept", 1, (1,)),
    ("debate", "accept", 1, (0, 1, 1)),
    ("debate", "accept", 0, (0, 1, -1)),
    ("debate", "reject", 0, (1, 0, 1)),
    ("mnip", "accept", 1, (1, 1, 1)),
    ("mnip", "accept", 0, (1, 1, -1)),
    ("mnip", "reject", 0, (0, 0, 1)),
    ("merlin_arthur", "accept", 1, (0, 1, 1)),
    ("merlin_arthur", "accept", 0, (0, 1, -1)),
    ("merlin_arthur", "reject", 0, (1, 0, 1)),
    ("debate", "reject", 1, (1, 0, -1)),
    ("mnip", "reject", 1, (0, 0, -1)),
    ("multi_channel_test", "accept", 1, (1, 1, 1, 1)),
]


@pytest.mark.parametrize(("name", "word", "label", "expected"), REWARDS)
def test_a_decision_pays_what_the_table_says(
    name: str, word: str, label: int, expected: tuple[int, ...], tmp_path: Path
) -> None:
    game = build_text_game(name, tmp_path)
    start = game.start(0, {"y": label, "claim": "x"}, 0)
    model = _deciding(f"Decision: {word}")
    if name == "multi_channel_test":
        # A decision counts from the second round on, and the verifier's second turn is the fourth.
        model = FakeChatModel(
            lambda request, number: (
                f"Decision: {word}"
                if "Ask or decide" in request.messages[-1]["content"]
                else _talk(request, number)
            )
        )
    (end,) = play(game, model, [start])
    assert end.outcome is not None
    assert end.outcome.rewards == expected
    assert end.episode.is_done
    assert end.outcome.decision == (ACCEPT if word == "accept" else REJECT)


def test_running_out_of_rounds_costs_the_verifier(tmp_path: Path) -> None:
    groups = {
        "nip": {"max_message_rounds": 4},
        "protocol_common": {"verifier_no_guess_reward": 0.25, "verifier_terminated_penalty": -2.0},
    }
    game = build_text_game("nip", tmp_path, **groups)
    (end,) = play(game, FakeChatModel(_talk))
    paid = [node.outcome.rewards for node in end.path() if node.outcome]
    # The verifier passes in rounds 0 and 2, and the last round, a prover's, ends it.
    assert paid == [(0, 0.25), (0, 0), (0, 0.25), (0, -2)]


def test_shared_rewards_and_forced_guesses_are_those_of_the_declaration(tmp_path: Path) -> None:
    common = {"shared_reward": True, "force_guess": "y"}
    game = build_text_game("adp", tmp_path, protocol_common=common)
    model = FakeChatModel(_talk)
    (end,) = play(game, model, [game.start(0, {"y": 0, "claim": "x"}, 0)])
    assert end.outcome is not None
    assert (end.outcome.decision, end.outcome.rewards) == (REJECT, (1, 1))
    assert len(model.requests) == 1, "a decision that is forced is not asked for"


@pytest.mark.parametrize(("name", "groups", "_"), TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("label", [0, 1])
def test_a_game_in_words_pays_and_ends_as_the_tensor_game_of_its_declaration(
    name: str, groups: dict[str, Any], _: Any, label: int, tmp_path: Path
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
        assert node.outcome is not None
        at = torch.tensor([number]), torch.tensor([seed])
        active_AC = protocol.active_mask(*at, decided_EA)[0]
        speaking = [protocol.agent_names[a] for a in active_AC.any(-1).nonzero().flatten().tolist()]
        assert sorted(node.moves) == sorted(speaking)
        step = protocol.step(*at, torch.tensor([label]), decided_EA, Moves(_decisions(game, node)))
        assert tuple(step.reward_EA[0].tolist()) == node.outcome.rewards
        assert bool(step.is_done[0]) == node.episode.is_done
        decided_EA = step.agent_decided_EA
    assert end.episode.is_done


def _decisions(game: TextGame, node: TextNode) -> torch.Tensor:
    names = game.protocol.agent_names
    moves = [node.moves[agent].parsed.decision if agent in node.moves else None for agent in names]
    return torch.tensor([[CONTINUE if one is None else one for one in moves]])


@pytest.mark.parametrize(("name", "groups", "_"), TURNS.values(), ids=TURNS)
def test_the_environment_of_tensors_plays_a_conversation_as_it_was_in_words(
    name: str, groups: dict[str, Any], _: Any, tmp_path: Path
) -> None:
    """The same decisions, put into the environment that networks play in."""
    game = build_text_game(name, tmp_path, **groups)
    environment = build_game(name, **groups).train_environment
    labels_E = environment.first_frames(torch.arange(8))["y"].squeeze(-1)
    seeds = list(range(8))
    starts = [
        game.start(0, {"y": int(label), "claim": "x"}, seed)
        for label, seed in zip(labels_E.tolist(), seeds, strict=True)
    ]
    drawn = iter(torch.randint(3, (99,), generator=torch.Generator().manual_seed(7)).tolist())
    words = {REJECT: "Decision: reject", ACCEPT: "Decision: accept"}

    def script(request: ChatRequest, number: int) -> str:
        turn = request.messages[-1]["content"]
        if "decide" not in turn:
            return _talk(request, number)
        decision = next(drawn)
        decision = ACCEPT if "Last turn" in turn and decision == CONTINUE else decision
        return words.get(decision, _talk(request, number))

    for place, end in enumerate(play(game, FakeChatModel(script), starts)):
        frame = environment.first_frames(torch.tensor([place]), torch.tensor([seeds[place]]))
        for node in end.path():
            assert node.outcome is not None
            moves = _symbols(game, node, environment.space.num_symbols)
            active_AC = frame["active_mask"][0]
            moved = environment.advance(frame, moves)
            frame = moved.observation
            assert tuple(moved.step.reward_EA[0].tolist()) == node.outcome.rewards
            assert bool(moved.is_done_E[0]) == node.episode.is_done
            heard_C = frame["message"][0].sum(dim=(-1, -2)) > 0
            for agent, move in node.moves.items():
                a = game.protocol.agent_names.index(agent)
                assert active_AC[a].any()
                for channel in move.parsed.messages:
                    assert heard_C[game.protocol.message_channel_names.index(channel)]
        decided = int(frame["decided"][0])
        assert decided == end.outcome.decision  # type: ignore[union-attr]


def _symbols(game: TextGame, node: TextNode, num_symbols: int) -> JointMoves:
    """The moves of a round as networks make them: everybody sends the first symbol."""
    a, c = game.protocol.num_agents, game.protocol.num_channels
    return JointMoves(
        decision_BA=_decisions(game, node),
        message_BACP=torch.zeros(1, a, c, 1, dtype=torch.long),
        logprobs_BA=torch.zeros(1, a),
        message_logits_BACPS=torch.zeros(1, a, c, 1, num_symbols),
        decision_logits_BA3=torch.zeros(1, a, 3),
    )


SEES = {
    "adp": {"verifier": {"Prover"}, "prover": set[str]()},
    "solo_verifier": {"verifier": set[str]()},
    "nip": {"verifier": {"Prover"}, "prover": {"Verifier"}},
    "debate": {
        "verifier": {"Prover0", "Prover1"},
        "prover0": {"Verifier", "Prover1"},
        "prover1": {"Verifier", "Prover0"},
    },
    "debate in turn": {
        "verifier": {"Prover0", "Prover1"},
        "prover0": {"Verifier", "Prover1"},
        "prover1": {"Verifier", "Prover0"},
    },
    # With the seed 0, prover0 is who speaks.
    "merlin_arthur": {"verifier": {"Prover0"}, "prover0": set[str]()},
    "mnip": {
        "verifier": {"Prover0", "Prover1"},
        "prover0": {"Verifier"},
        "prover1": {"Verifier"},
    },
    "multi_channel_test": {
        "verifier": {"Prover0", "Prover1"},
        "prover0": {"Verifier", "Prover1", "Prover2"},
        "prover1": {"Verifier", "Prover2"},
        # The verifier's channels are main and prover0_verifier, of which prover2 sees main.
        "prover2": {"Verifier", "Prover1"},
    },
}


@pytest.mark.parametrize("name", SEES)
def test_an_agent_reads_what_is_said_in_its_channels_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    protocol, groups, _ = TURNS[name] if " " in name else (name, {}, [])
    game = build_text_game(protocol, tmp_path, **groups)
    (end,) = play(game, FakeChatModel(_talk))
    heard: dict[str, set[str]] = {}
    for node in end.path():
        for agent, move in node.moves.items():
            texts = [one["content"] for one in move.prompt if one["role"] == "user"]
            lines = [line for text in texts for line in text.splitlines()]
            names = {line.split(" (")[0].split(":")[0] for line in lines if ": " in line}
            spoken = {one for one in names if one.lower() in game.protocol.agent_names}
            heard.setdefault(agent, set()).update(spoken)
    assert heard == SEES[name]


def test_mnips_second_prover_never_reads_a_question_to_the_first(tmp_path: Path) -> None:
    game = build_text_game("mnip", tmp_path)
    model = FakeChatModel(lambda request, _: "To prover0: secret\nTo prover1: open")
    (end,) = play(game, model)
    read = {
        agent: "".join(part["content"] for part in move.prompt if part["role"] == "user")
        for node in end.path()
        for agent, move in node.moves.items()
    }
    assert "secret" in read["prover0"]
    assert "open" not in read["prover0"]
    assert "secret" not in read["prover1"]
    assert "open" in read["prover1"]


def test_an_agent_reads_the_conversation_from_its_own_side(tmp_path: Path) -> None:
    game = build_text_game("nip", tmp_path, nip={"max_message_rounds": 3})
    answers = iter(["Why? ", "Since.", "Decision: accept"])
    (end,) = play(game, FakeChatModel(lambda request, _: next(answers)))
    assert [dict(one) for one in end.moves["verifier"].prompt] == [
        {
            "role": "system",
            "content": "You are Verifier. At most 1 questions about the sky is blue.",
        },
        {"role": "user", "content": "Begin."},
        {"role": "assistant", "content": "Why? "},
        {"role": "user", "content": "Prover: Since.\n\nLast turn: decide."},
    ]
    assert [dict(one) for one in end.path()[1].moves["prover"].prompt] == [
        {"role": "system", "content": "You are Prover. Argue for accept of the sky is blue."},
        {"role": "user", "content": "Begin.\n\nVerifier: Why?\n\n[main]"},
    ]


def test_an_agent_that_hears_nothing_between_two_turns_is_told_to_go_on(tmp_path: Path) -> None:
    prompts = {name: text.split("{% block turn %}")[0] for name, text in PROMPTS.items()}
    game = build_text_game("multi_channel_test", tmp_path, prompts=prompts)
    (end,) = play(game, FakeChatModel(_talk))
    prompt = end.path()[2].moves["prover1"].prompt
    assert [one["role"] for one in prompt] == ["system", "user", "assistant", "user"]
    assert prompt[-1]["content"] == GO_ON


def test_provers_argue_for_the_decision_that_pays_them(tmp_path: Path) -> None:
    game = build_text_game("debate", tmp_path)
    (end,) = play(game, FakeChatModel(_talk))
    moves = end.path()[1].moves
    assert "Argue for reject" in moves["prover0"].prompt[0]["content"]
    assert "Argue for accept" in moves["prover1"].prompt[0]["content"]


def test_a_random_stance_hangs_on_the_datapoint_and_pays_for_its_side(tmp_path: Path) -> None:
    game = build_text_game("adp", tmp_path, has_random_stance=True)
    points = [{"y": 1, "claim": f"claim {number}"} for number in range(40)]
    stances = [random_stance(point) for point in points]
    assert stances == [random_stance(point | {"y": 0}) for point in points]
    assert 10 < sum(stances) < 30
    starts = [game.start(number, point, 0) for number, point in enumerate(points)]
    for end, stance in zip(play(game, _deciding("Decision: reject"), starts), stances, strict=True):
        assert end.outcome is not None
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


def test_what_cannot_be_played_in_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"zero_knowledge=false"):
        build_text_game("nip", tmp_path, protocol_common={"zero_knowledge": True})
    with pytest.raises(ConfigurationError, match="provers are prover0, prover1"):
        build_text_game("debate", tmp_path, has_random_stance=True)


def test_a_prompt_that_is_missing_or_broken_is_told(tmp_path: Path) -> None:
    (tmp_path / "prover.jinja").write_text("{% block openin %}{% endblock %}")
    with pytest.raises(ConfigurationError) as caught:
        load_prompts(tmp_path, {"prover": "prover", "verifier": "verifier"}, "nip")
    text = str(caught.value)
    assert "prover.jinja has the block 'openin'; known: system, opening, turn" in text
    assert "verifier has no prompt; write one of verifier.nip.jinja, verifier.jinja" in text
    (tmp_path / "prover.jinja").write_text("{% if %}")
    with pytest.raises(ConfigurationError, match=r"prover\.jinja is not a valid template"):
        load_prompts(tmp_path, {"prover": "prover"}, "nip")


def test_a_prompt_that_asks_for_what_there_is_not_is_told(tmp_path: Path) -> None:
    prompts = PROMPTS | {"verifier.jinja": "{% block opening %}{{ datapoint.clam }}{% endblock %}"}
    game = build_text_game("solo_verifier", tmp_path, prompts=prompts)
    with pytest.raises(DataError, match=r"has no attribute 'clam'.*It may use: agent, channels"):
        play(game, FakeChatModel(_talk))


def test_a_prompt_for_the_protocol_comes_before_that_of_the_role(tmp_path: Path) -> None:
    prompts = PROMPTS | {"verifier.adp.jinja": "{% block opening %}Only adp.{% endblock %}"}
    game = build_text_game("adp", tmp_path, prompts=prompts)
    (end,) = play(game, _deciding("Decision: accept"))
    assert end.moves["verifier"].prompt[0]["content"].startswith("Only adp.")


TWO = ("prover0_channel", "prover1_channel")


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        ("Decision: accept", ACCEPT),
        ("I am sure.\nDECISION:  Reject.", REJECT),
        ("**Decision**: accept", ACCEPT),
        ('decision: "reject"', REJECT),
        ("Decision: accept\nDecision: Accept", ACCEPT),
        ("My decision is to accept", CONTINUE),
        ("Decision: acceptable", CONTINUE),
        ("indecision: accept", CONTINUE),
    ],
)
def test_a_decision_is_found_anywhere_and_in_any_case(text: str, decision: int) -> None:
    parsed = parse_answer(text, ("main",), may_decide=True)
    assert (parsed.decision, parsed.fault) == (decision, "")
    assert parsed.messages == ({} if decision != CONTINUE else {"main": text})


@pytest.mark.parametrize("decision", [REJECT, ACCEPT])
def test_what_is_written_as_a_decision_is_read_as_it(decision: int) -> None:
    assert parse_answer(decision_text(decision), ("main",), may_decide=True).decision == decision


@pytest.mark.parametrize(
    ("text", "may", "must", "fault"),
    [
        ("Decision: accept. Decision: reject.", True, False, "it decides both ways"),
        ("Decision: accept", False, False, "it decides where it cannot"),
        ("What is it?", True, True, "it holds no decision, in the last turn"),
        ("  \n", True, False, "it is empty"),
    ],
)
def test_an_answer_that_cannot_be_used_has_a_fault(
    text: str, may: bool, must: bool, fault: str
) -> None:
    parsed = parse_answer(text, ("main",), may_decide=may, must_decide=must)
    assert (parsed.fault, parsed.decision, parsed.messages) == (fault, CONTINUE, {})


def test_messages_to_several_channels_stand_below_their_headings_and_lose_them() -> None:
    text = "Hm.\nTo prover0: Which line?\nSay why.\n**to PROVER1:** And you?"
    parsed = parse_answer(text, TWO, may_decide=True)
    assert parsed.messages == {
        "prover0_channel": "Which line?\nSay why.",
        "prover1_channel": "And you?",
    }


def test_a_channel_that_is_not_named_gets_nothing_and_one_must_be() -> None:
    assert parse_answer("To prover1: Hi", TWO, may_decide=True).messages == {
        "prover1_channel": "Hi"
    }
    assert parse_answer("Hi", TWO, may_decide=True).fault == "it names no channel to send in"
    assert parse_answer("To prover1:", TWO, may_decide=True).fault != ""


def test_a_longer_title_is_not_taken_for_a_shorter_one() -> None:
    names = ("prover", "prover chat", "prover_0_verifier")
    text = "To prover chat: a\nTo prover: b\nTo prover 0 verifier: c\nTo prover: d"
    assert parse_messages(text, names).messages == {
        "prover chat": "a",
        "prover": "b\nd",
        "prover_0_verifier": "c",
    }
    assert channel_title("prover0_channel") == "prover0"


def test_an_agent_that_does_not_decide_may_quote_a_decision() -> None:
    parsed = parse_messages("Say decision: accept!", ("main",))
    assert (parsed.messages, parsed.decision) == ({"main": "Say decision: accept!"}, CONTINUE)

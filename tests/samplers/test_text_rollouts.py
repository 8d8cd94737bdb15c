from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nip_astra.errors import DataError, ServiceError
from nip_astra.language_models.services.chat import (
    ChatAnswer,
    ChatFailure,
    ChatRequest,
    FailureReason,
    FinishReason,
)
from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.samplers.text_rollouts import (
    AnswerJournal,
    StoredResponses,
    TextNode,
    active_turns,
    read_prompt,
    rollout_spec,
    rollouts_of,
    transcripts,
)
from nip_astra.scenario_base.text.game import TextEpisode, TextGame
from nip_astra.utils.nested_array_dict import NestedArrayDict
from tests.kit.messages import says
from tests.kit.text_games import FakeChatModel, build_text_game, play


def _say(request: ChatRequest, number: int) -> str:
    if "decide" in request.messages[-1]["content"]:
        word = "accept" if (request.seed or 0) % 2 else "reject"
        return f"Decision: {word}"
    return f"say {(request.seed or 0) % 1000} {number}"


def _starts(game: TextGame, num: int) -> list[TextEpisode]:
    return [game.start(n, {"y": n % 2, "claim": f"claim {n}"}, n) for n in range(num)]


@pytest.fixture
def adp(tmp_path: Path) -> TextGame:
    return build_text_game("adp", tmp_path)


def test_all_requests_of_a_round_are_in_flight_together_with_seeds_of_their_own(
    adp: TextGame,
) -> None:
    model = FakeChatModel(_say)
    many = play(adp, model, _starts(adp, 12))
    assert model.most_in_flight == 12
    assert len({request.seed for request in model.requests}) == len(model.requests) == 24
    # An answer depends on key, place and attempt alone.
    few = play(adp, FakeChatModel(_say), _starts(adp, 3))
    assert [end.path()[0].moves for end in few] == [end.path()[0].moves for end in many[:3]]


def test_branches_request_several_samples_at_once_and_grow_a_tree(tmp_path: Path) -> None:
    game = build_text_game("nip", tmp_path, nip={"max_message_rounds": 3})
    model = FakeChatModel(lambda request, number: "Ask" if number else _say(request, number))
    (start,) = _starts(game, 1)
    ends = play(game, model, [start], num_branches=2)
    # The verifier decides at once in branch 0; branch 1 continues, with two answers of the prover.
    ids = ["0.0", "0.1.0.0", "0.1.0.1", "0.1.1.0", "0.1.1.1"]
    assert [end.node_id for end in ends] == ids
    assert [end.episode.round for end in ends] == [1, 3, 3, 3, 3]
    assert all(request.num_samples == 2 for request in model.requests[:2])
    assert ends[1].path()[0] is ends[4].path()[0]


def moves_of(end: TextNode) -> dict[str, Any]:
    return {agent: move for node in end.path() for agent, move in node.moves.items()}


def test_an_unusable_answer_is_requested_again_and_counted(adp: TextGame) -> None:
    answers = iter(["", "hello", "dunno", "dunno", "Decision: accept"])
    moves = moves_of(*play(adp, FakeChatModel(lambda request, number: next(answers))))
    assert (moves["prover"].num_retries, moves["prover"].answer) == (1, "hello")
    assert (moves["verifier"].num_retries, moves["verifier"].is_filled) == (2, False)


def test_after_all_retries_an_agent_stays_silent(
    adp: TextGame, caplog: pytest.LogCaptureFixture
) -> None:
    model = FakeChatModel(lambda request, number: "" if "Argue" in str(request) else "dunno")
    ends = play(adp, model, [adp.start(0, {"y": 0, "claim": "x"}, seed) for seed in range(2)])
    for end in ends:
        assert all(move.is_filled and move.answer == "" for move in moves_of(end).values())
        assert end.outcome.is_out_of_rounds
    assert len(model.requests) == 12
    # One warning for all turns of an agent in a round.
    for agent, warning in zip(("prover", "verifier"), caplog.messages, strict=True):
        assert says(warning, agent, "2 of 2", "2 retries")


def test_only_failed_samples_are_requested_again(adp: TextGame) -> None:
    model = FakeChatModel(lambda request, number: "" if number == 1 else "hi decision: accept")
    ends = play(adp, model, num_branches=3)
    assert [request.num_samples for request in model.requests[:2]] == [3, 1]
    assert [end.path()[0].moves["prover"].num_retries for end in ends[::3]] == [0, 1, 0]


@pytest.mark.parametrize(
    "bad",
    [
        ChatFailure(FailureReason.REFUSED, "no"),
        ChatAnswer("half", FinishReason.CONTENT_FILTER),
        ChatAnswer("", refusal="I will not"),
        ChatAnswer("", FinishReason.LENGTH),
        ChatFailure(FailureReason.TOO_LONG, "more than 9 bytes"),
    ],
)
def test_a_refused_request_is_data(adp: TextGame, bad: ChatAnswer | ChatFailure) -> None:
    answers = iter([bad, ChatAnswer("hi", FinishReason.LENGTH), ChatAnswer("Decision: reject")])
    (end,) = play(adp, FakeChatModel(lambda request, number: next(answers)))
    move = end.path()[0].moves["prover"]
    assert (move.num_retries, move.answer, move.is_cut) == (1, "hi", True)


def test_a_conversation_that_exceeds_the_window_is_not_asked_again(adp: TextGame) -> None:
    model = FakeChatModel(lambda *_: ChatFailure(FailureReason.CONTEXT_LENGTH, "no room"))
    (end,) = play(adp, model)
    assert end.path()[0].moves["prover"].is_filled
    assert len(model.requests) == 2


def test_a_stored_answer_of_any_length_is_bounded(adp: TextGame, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    play(adp, FakeChatModel(_say), journal=AnswerJournal(path))
    first, rest = path.read_text().split("\n", 1)
    stored = json.loads(first)
    stored["texts"] = ["word " * 100_000]
    path.write_text(json.dumps(stored) + "\n" + rest)
    (end,) = play(adp, FakeChatModel(_say), journal=AnswerJournal(path))
    move = end.path()[0].moves["prover"]
    assert move.num_retries == 1
    assert len(move.answer) < 100


def test_requests_that_the_model_repeats_itself_are_neither_repeated_nor_kept(
    adp: TextGame, tmp_path: Path
) -> None:
    def script(request: ChatRequest, number: int) -> str | ChatFailure:
        is_bad = "Argue" in str(request) and number == 0
        return ChatFailure(FailureReason.MALFORMED, "no text") if is_bad else _say(request, number)

    model, path = FakeChatModel(script), tmp_path / "answers.jsonl"
    (end,) = play(adp, model, journal=AnswerJournal(path))
    move = end.path()[0].moves["prover"]
    assert (move.is_filled, move.num_retries, len(model.requests)) == (True, 0, 2)
    healed = FakeChatModel(_say)
    (end,) = play(adp, healed, journal=AnswerJournal(path))
    assert not end.path()[0].moves["prover"].is_filled
    assert len(healed.requests) == 1, "the failure is asked for again, and the rest is kept"
    ends = play(adp, FakeChatModel(script), num_branches=2)
    assert [item.path()[0].moves["prover"].is_filled for item in ends[::2]] == [True, False]


def test_an_unreachable_service_stops_the_sampling_and_loses_no_answer(
    adp: TextGame, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"

    def script(request: ChatRequest, number: int) -> str | ChatFailure:
        if "claim 1" in str(request):
            return ChatFailure(FailureReason.UNAVAILABLE, "no route")
        return _say(request, number)

    with pytest.raises(ServiceError, match=r"unavailable, no route\. Resume the run"):
        play(adp, FakeChatModel(script), _starts(adp, 3), journal=AnswerJournal(path))
    model = FakeChatModel(_say)
    ends = play(adp, model, _starts(adp, 3), journal=AnswerJournal(path))
    assert len(model.requests) == 4, "one that had failed, and three of the second round"
    whole = play(adp, FakeChatModel(_say), _starts(adp, 3))
    assert rollouts_of(adp, ends) == rollouts_of(adp, whole)


@pytest.mark.parametrize("num_before", range(7))
def test_an_interrupted_sampling_continues_without_repeating_requests(
    adp: TextGame, tmp_path: Path, num_before: int
) -> None:
    whole = play(adp, FakeChatModel(_say), _starts(adp, 3))
    path = tmp_path / "answers.jsonl"
    play(adp, FakeChatModel(_say), _starts(adp, 3), journal=AnswerJournal(path))
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    # The process was killed in the middle of a line.
    half = lines[num_before][:40] if num_before < 6 else b""
    path.write_bytes(b"".join(lines[:num_before]) + half)
    model = FakeChatModel(_say)
    ends = play(adp, model, _starts(adp, 3), journal=AnswerJournal(path))
    assert len(model.requests) == 6 - num_before
    assert rollouts_of(adp, ends) == rollouts_of(adp, whole)
    assert sorted(path.read_bytes().splitlines()) == sorted(b"".join(lines).splitlines())


def test_a_journal_keeps_values_difficult_for_json_and_counts_paid_requests(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "answers.jsonl"
    journal = AnswerJournal(path)
    hard = StoredResponses(("a\u2028b\n\"'\x00é",), (False,), ("",), 3, 2)
    journal.put("one/0", hard)
    journal.put("two", StoredResponses(("x", ""), (True, False), ("", "no"), 5, 7, is_cached=True))
    again = AnswerJournal(path)
    assert again.get("one/0") == hard
    assert again.get("two") == journal.get("two")
    assert again.get("three") is None
    assert again.tokens() == (3, 2)
    for damaged in (b'{"id": "x"}\n', b'{"id": "\xff"}\n'):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"line 1 of .*answers\.jsonl"):
            AnswerJournal(path)


IN_TURN = {"debate": {"max_message_rounds": 6, "sequential": True}}


@pytest.mark.parametrize(
    ("protocol", "groups"), [*((name, {}) for name in InteractionProtocolType), ("debate", IN_TURN)]
)
def test_rollouts_of_every_protocol_come_back_from_disk(
    protocol: str, groups: dict[str, Any], tmp_path: Path
) -> None:
    game = build_text_game(protocol, tmp_path, **groups)

    def script(request: ChatRequest, number: int) -> str:
        text = _say(request, number)
        return text if "Decision" in text else f"To prover0: {text}\nTo main: \u2028 {text}"

    ends = play(game, FakeChatModel(script), _starts(game, 3), num_branches=2)
    rollouts = rollouts_of(game, ends)
    rollout_spec(game, len(ends)).check(rollouts)
    rollouts.save(tmp_path / "rollouts.json")
    assert NestedArrayDict.load(tmp_path / "rollouts.json") == rollouts
    turns = list(active_turns(rollouts))
    assert turns
    for n, r, a in turns:
        node, agent = ends[n].path()[r], game.protocol.agent_names[a]
        assert read_prompt(rollouts["agents", "prompt"][n, r, a]) == node.moves[agent].prompt
        assert rollouts["agents", "raw_message"][n, r, a] == node.moves[agent].answer
    assert len(turns) == sum(len(node.moves) for end in ends for node in end.path())


def test_a_rollout_records_the_played_game(adp: TextGame) -> None:
    (end, *_) = ends = play(adp, FakeChatModel(_say), _starts(adp, 3))
    rollouts = rollouts_of(adp, ends)
    assert rollouts.batch_size == (3,)
    first = {
        ("decision",): end.outcome.decision,
        ("num_rounds",): 2,
        ("datapoint", "claim"): "claim 0",
        ("node", "id"): ["0.0", "0.0.0"],
        ("node", "parent"): ["0", "0.0"],
        ("agents", "is_active"): [[True, False], [False, True]],
    }
    assert {name: rollouts[name].tolist()[0] for name in first} == first
    answer = end.path()[0].moves["prover"].answer
    assert rollouts["agents", "message"][0, :, :, 0].tolist() == [[answer, None], [None, None]]
    assert np.array_equal(rollouts["agents", "reward"][0, 1], end.outcome.rewards)
    rows = transcripts(rollouts, adp.protocol.agent_names, ("main",))
    decisions = [(turn["agent"], turn["decision"]) for turn in rows[0]["turns"]]
    assert decisions == [("prover", 2), ("verifier", end.outcome.decision)]
    assert json.loads(json.dumps(rows)) == rows
    messages = [row["turns"][0]["messages"]["main"] for row in rows]
    assert messages == rollouts["agents", "raw_message"][:, 0, 0].tolist()
    assert len(set(messages)) == 3

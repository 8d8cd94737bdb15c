from __future__ import annotations

import pytest

from nip_astra.protocols.protocol_base import ACCEPT, CONTINUE, REJECT
from nip_astra.scenario_base.text.game import (
    channel_title,
    decision_text,
    parse_answer,
    parse_messages,
)

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

"""The turn that all parts of a conversation share."""

from __future__ import annotations

import json
import pickle

import pytest

import nip_astra as na
from nip_astra.rollouts.messages import ToolCall, Turn

CALLS = (ToolCall("add", {"a": 1, "b": [2]}),)


@pytest.mark.parametrize(
    "turn",
    [
        Turn("user", "hello"),
        Turn("assistant", "3", reasoning="1 + 2", calls=CALLS),
        Turn("assistant", "", reasoning="1 +", is_missing=True),
    ],
)
def test_a_turn_survives_json_and_pickle(turn: Turn) -> None:
    assert Turn.from_plain(json.loads(json.dumps(turn.to_plain()))) == turn
    assert pickle.loads(pickle.dumps(turn)) == turn


def test_a_turn_without_a_thought_or_a_call_is_stored_as_before() -> None:
    assert Turn("user", "hello").to_plain() == ["user", "hello"]


def test_messages_of_plug_ins_are_turns_and_unpack_to_role_and_text() -> None:
    role, text = na.Message("user", "hello")
    assert (role, text) == ("user", "hello")
    assert na.Message is na.Turn is Turn

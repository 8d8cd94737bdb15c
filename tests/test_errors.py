"""A single tree of errors: their types, facts, and copies through pickling."""

from __future__ import annotations

import pickle

import pytest

from nip_astra import errors
from nip_astra.errors import (
    DuplicateNameError,
    NipAstraError,
    ParameterError,
    ParameterFault,
    StopRequested,
    UnknownNameError,
    UnreadParameterError,
    nearest_names,
)
from tests.kit.messages import says

FAULTS = [
    ParameterFault("training.lr", '"1e-5"', "must be a number, not text", "Unquote it.", "a.yaml"),
    ParameterFault("seed", "-1", "must be at least 0"),
]
EXAMPLES = {
    "ParameterError": ParameterError(FAULTS),
    "UnreadParameterError": UnreadParameterError(FAULTS),
    "UnknownNameError": UnknownNameError("scorer", "detoxfy", ["profanity", "detoxify"]),
    "DuplicateNameError": DuplicateNameError("trainer", "mine", "a.py:3", "b.py:7"),
    "StopRequested": StopRequested("SIGTERM", "runs/one"),
}
EVERY = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, NipAstraError)
]


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_every_error_refines_a_builtin_and_stays_equal_through_pickling(
    cls: type[NipAstraError],
) -> None:
    builtins = [item for item in cls.__mro__ if item.__module__ == "builtins"]
    assert cls is NipAstraError or builtins[0] is not Exception
    error = EXAMPLES.get(cls.__name__) or cls("the value, the fault, the next step")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_an_unknown_name_has_the_nearest_name_all_names_and_a_next_step() -> None:
    error = EXAMPLES["UnknownNameError"]
    assert (error.kind, error.name, error.known) == ("scorer", "detoxfy", ["detoxify", "profanity"])
    assert error.suggestions == ["detoxify"]
    assert says(error, "scorer 'detoxfy'", "'detoxify'?", "detoxify, profanity", "--plugin")
    far = UnknownNameError("language_model", "x", [])
    assert says(far, "language model 'x'", "language models: none", "--plugin")
    assert far.suggestions == []


def test_messages_have_every_place_fault_and_command() -> None:
    assert says(EXAMPLES["DuplicateNameError"], "trainer 'mine'", "b.py:7", "a.py:3")
    both = str(EXAMPLES["ParameterError"])
    assert says(both, "2 parameters", "training.lr", '"1e-5"', "(from a.yaml)", "Unquote it.")
    assert says(both, "seed", "-1")
    assert says(ParameterError(FAULTS[1:]), "1 parameter ")
    stopped = EXAMPLES["StopRequested"], StopRequested("SIGTERM", "runs/one", is_saved=False)
    for error in stopped:
        assert says(error, "SIGTERM", "nip-astra resume runs/one")
    assert str(stopped[0]) != str(stopped[1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ast_dop", ["ast_dpo"]),
        ("AST-DPO", ["ast_dpo"]),
        (" ast_dpo ", ["ast_dpo"]),
        ("zzz", []),
        ("", []),
        ("trainr", ["trainer", "train", "training"]),
    ],
)
def test_near_names_come_nearest_first(name: str, expected: list[str]) -> None:
    known = ["ast_dpo", "self_hosted_grpo", "training", "train", "trainer", "seed"]
    assert nearest_names(name, known) == expected
    assert nearest_names(name, known, n=2) == expected[:2]

"""One tree of errors: what each is, says and keeps through pickling."""

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

BUILTINS = {
    "ConfigurationError": ValueError,
    "MissingPartError": AttributeError,
    "ParameterError": ValueError,
    "UnreadParameterError": ValueError,
    "UnknownNameError": LookupError,
    "DuplicateNameError": ValueError,
    "PluginError": ImportError,
    "UntrustedRunError": PermissionError,
    "SandboxUnavailableError": RuntimeError,
    "AgentShapeError": ValueError,
    "MissingDependencyError": ImportError,
    "ModelLoadError": OSError,
    "ModelAbilityError": OSError,
    "LostProcessError": RuntimeError,
    "ServiceRequestError": ConnectionError,
    "ServiceUnreachableError": ConnectionError,
    "ServiceConflictError": ConnectionError,
    "ServiceModelError": ConnectionError,
    "ServiceBusyError": ConnectionError,
    "DataError": ValueError,
    "ContextLengthError": ValueError,
    "RunDirectoryError": OSError,
    "CheckpointError": OSError,
    "ScorerError": RuntimeError,
    "ScorerTimeoutError": TimeoutError,
    "RewardTermError": RuntimeError,
    "NonFiniteLossError": ArithmeticError,
    "NonFiniteOutputError": ArithmeticError,
    "WorkerProcessError": RuntimeError,
    "UnexpectedExitError": RuntimeError,
    "ServiceError": ConnectionError,
    "AnswerTooLargeError": ConnectionError,
    "NothingMeasuredError": RuntimeError,
    "BudgetExhaustedError": RuntimeError,
    "TaskError": RuntimeError,
    "TrackingError": RuntimeError,
    "StopRequested": RuntimeError,
}
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


def every_error() -> list[type[NipAstraError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [cls for cls in found if issubclass(cls, NipAstraError)]


def example(cls: type[NipAstraError]) -> NipAstraError:
    return EXAMPLES.get(cls.__name__) or cls("what was asked, what is wrong, what to do")


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
def test_every_error_keeps_type_message_and_attributes_through_pickling(
    cls: type[NipAstraError],
) -> None:
    error = example(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_is_also_the_builtin_that_it_refines() -> None:
    classes = {cls.__name__: cls for cls in every_error()}
    assert set(classes) - {"NipAstraError"} == set(BUILTINS)
    for name, builtin in BUILTINS.items():
        assert issubclass(classes[name], builtin)


def test_an_unknown_name_tells_the_nearest_name_all_names_and_what_to_do() -> None:
    error = EXAMPLES["UnknownNameError"]
    assert str(error) == (
        "unknown scorer 'detoxfy'. Did you mean 'detoxify'? Known scorers: detoxify, profanity. "
        "A scorer of your own is loaded with --plugin path/to/file.py."
    )
    assert isinstance(error, UnknownNameError)
    assert (error.kind, error.name) == ("scorer", "detoxfy")
    assert error.known == ["detoxify", "profanity"]
    assert error.suggestions == ["detoxify"]


def test_an_unknown_name_that_is_near_to_none_guesses_none() -> None:
    error = UnknownNameError("language_model", "x", [])
    assert str(error) == (
        "unknown language model 'x'. Known language models: none. A language model of your own is "
        "loaded with --plugin path/to/file.py."
    )


def test_a_duplicate_name_tells_both_places() -> None:
    assert says(EXAMPLES["DuplicateNameError"], "trainer 'mine'", "b.py:7", "a.py:3")


def test_a_parameter_error_tells_every_fault_with_path_value_source_and_advice() -> None:
    assert str(ParameterError(FAULTS)) == (
        "2 parameters are wrong:\n"
        '  training.lr: must be a number, not text; given "1e-5" (from a.yaml). Unquote it.\n'
        "  seed: must be at least 0; given -1."
    )
    assert str(ParameterError(FAULTS[1:])).startswith("1 parameter is wrong:\n")


def test_a_stopped_run_tells_how_to_go_on() -> None:
    assert says(EXAMPLES["StopRequested"], "SIGTERM", "nip-astra resume runs/one")
    stopped = StopRequested("SIGINT", "runs/one", is_saved=False)
    assert says(stopped, "SIGINT", "nip-astra resume runs/one")
    assert str(stopped) != str(StopRequested("SIGINT", "runs/one"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ast_dop", ["ast_dpo"]),
        ("AST-DPO", ["ast_dpo"]),
        (" ast_dpo ", ["ast_dpo"]),
        ("zzz", []),
        ("", []),
    ],
)
def test_near_names_are_found_whatever_their_case_and_dashes(
    name: str, expected: list[str]
) -> None:
    assert nearest_names(name, ["ast_dpo", "self_hosted_grpo"]) == expected


def test_near_names_are_given_nearest_first_and_at_most_n() -> None:
    known = ["training", "train", "trainer", "seed"]
    assert nearest_names("trainr", known)[0] == "trainer"
    assert len(nearest_names("train", known, n=2)) == 2

"""Grammars of structured answers: their limits, and their compilation beside a running batch."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError
from nip_astra.language_models import structured
from nip_astra.language_models.structured import Grammars, check_schema_size, json_rule
from tests.kit.tiny import make_byte_tokenizer


def nested(depth: int) -> dict[str, Any]:
    """An object within an object, and so on."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def with_values(number: int, length: int) -> dict[str, Any]:
    values = [f"{index:>{length}}" for index in range(number)]
    return {"type": "object", "properties": {"a": {"enum": values}}}


def with_properties(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {} for index in range(number)}}


@pytest.mark.parametrize(
    ("within", "beyond", "limit"),
    [
        (nested(10), nested(11), 10),
        (with_properties(5000), with_properties(5001), 5000),
        (with_values(1000, 15), with_values(1001, 10), 1000),
        (with_values(251, 59), with_values(251, 60), 15_000),
        (with_values(8, 14_999), with_values(9, 14_999), 120_000),
        ({"const": "x" * 15_000}, {"const": "x" * 15_001}, 15_000),
        ({"anyOf": [{"const": "x" * 15_000}]}, {"anyOf": [{"enum": ["x" * 10**6]}]}, 15_000),
    ],
)
def test_schemas_beyond_a_limit_are_refused_with_it(
    within: dict[str, Any], beyond: dict[str, Any], limit: int
) -> None:
    check_schema_size(within)
    with pytest.raises(ConfigurationError, match=str(limit)):
        json_rule(beyond)


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    check_schema_size({"properties": {"enum": {"type": "string"}, "const": {"type": "string"}}})


def test_a_grammar_that_compiles_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    compile_grammar = structured._compile
    has_begun, may_end = threading.Event(), threading.Event()

    def compile_slowly(library: Any, vocabulary: Any, grammar: str) -> Any:
        if "slow" in grammar:
            has_begun.set()
            assert may_end.wait(60)
        return compile_grammar(library, vocabulary, grammar)

    monkeypatch.setattr(structured, "_compile", compile_slowly)
    tokenizer = make_byte_tokenizer()
    grammars = Grammars(tokenizer, {tokenizer.eos_token_id}, len(tokenizer))
    thread = threading.Thread(target=grammars.matcher, args=('start: "slow"',))
    thread.start()
    try:
        assert has_begun.wait(60)
        other = threading.Thread(target=grammars.matcher, args=('start: "fast"',))
        other.start()
        other.join(60)
        assert not other.is_alive()
    finally:
        may_end.set()
        thread.join()

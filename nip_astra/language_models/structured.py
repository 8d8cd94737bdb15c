"""Grammars for structured answers, and vocabulary masks that enforce them.

A grammar is a text in llguidance's variant of Lark, whose rules may contain JSON schemas. A mask
allows the tokens after which the answer can still become a complete text of the grammar.

Shape suffixes: `R` row, `V` vocabulary, `W` group of 32 tokens.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError, MissingDependencyError, ModelAbilityError

WHITESPACE = r"[ \n\t]{0,12}"
"""Whitespace between the parts of JSON. Without a limit, a weak model may generate nothing else."""
MAX_COMPILED = 64
"""Maximum number of cached grammars."""
MAX_PROPERTIES, MAX_SCHEMA_DEPTH = 5000, 10
MAX_ENUM_VALUES, MAX_CHARACTERS = 1000, 120_000
LARGE_ENUM, MAX_LARGE_ENUM = 250, 15_000
"""OpenAI's limits of a schema: properties in all, their levels of nesting, values of enums in all,
characters of names and values in all, and characters of an enum with more than 250 values."""
MAX_VALUE = 15_000
"""Maximum characters of one value; a mask within a longer one takes up to a second."""
_PROBE = '{"key": [-1.5, true, null, "\u00e9\\n"]}'


def answer_schema(response_format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the JSON schema of an OpenAI `response_format`; None if it allows any text.

    Raises `ConfigurationError` for any other type.
    """
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return schema
    raise ConfigurationError(
        f"the response_format {str(dict(response_format))[:80]} is neither text, json_object nor "
        "json_schema with a schema"
    )


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return a rule for JSON of a schema; its references are relative to this schema.

    Raises
    ------
    ConfigurationError
        If the schema exceeds a limit, see `check_schema_size`.
    """
    check_schema_size(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def check_schema_size(schema: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` for a schema whose masks would delay all answers of a batch.

    The limits are those that OpenAI documents for structured outputs, and one of ours on a single
    value.
    """
    num_properties = num_enum_values = num_characters = 0
    # A stack of subschemas with their depth.
    subschemas: list[tuple[Any, int]] = [(schema, 0)]
    while subschemas:
        subschema, depth = subschemas.pop()
        if isinstance(subschema, list):
            subschemas += [(alternative, depth) for alternative in subschema]
            continue
        if not isinstance(subschema, Mapping):
            continue
        _require_at_most("levels of nesting", depth, MAX_SCHEMA_DEPTH)
        for keyword, content in subschema.items():
            if keyword in ("enum", "const"):
                is_enum = keyword == "enum"
                constants = content if is_enum and isinstance(content, list) else [content]
                lengths = [len(str(constant)) for constant in constants]
                if is_enum:
                    num_enum_values += len(constants)
                num_characters += sum(lengths)
                _require_at_most("characters in one value", max(lengths, default=0), MAX_VALUE)
                if len(constants) > LARGE_ENUM:
                    _require_at_most("characters in a large enum", sum(lengths), MAX_LARGE_ENUM)
            elif keyword in ("properties", "$defs", "definitions") and isinstance(content, Mapping):
                # Names of properties are data, in which a keyword has no meaning.
                if keyword == "properties":
                    num_properties += len(content)
                num_characters += sum(len(str(name)) for name in content)
                subschemas += [(named_schema, depth + 1) for named_schema in content.values()]
            elif keyword not in ("default", "examples", "required"):
                subschemas.append((content, depth))
    _require_at_most("properties", num_properties, MAX_PROPERTIES)
    _require_at_most("values of enums", num_enum_values, MAX_ENUM_VALUES)
    _require_at_most("characters of names and values", num_characters, MAX_CHARACTERS)


def _require_at_most(kind: str, number: int, limit: int) -> None:
    if number > limit:
        raise ConfigurationError(f"the schema has {number} {kind}, more than {limit}")


class Grammars:
    """Compiles grammars for one vocabulary; thread-safe.

    Raises `MissingDependencyError` without llguidance, and `ModelAbilityError` if the vocabulary
    cannot express JSON.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], vocab_size: int) -> None:
        try:
            import llguidance.hf
        except ImportError as error:
            raise MissingDependencyError.of(
                "a structured answer", "llguidance", "structured"
            ) from error
        self._arguments = tokenizer, end_ids, vocab_size
        self._lock = threading.Lock()
        self._executor = llguidance.LLExecutor(torch.get_num_threads())
        try:
            self._vocabulary = llguidance.hf.from_tokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=sorted(end_ids)
            )
            ids = self._vocabulary.tokenize_str(_PROBE)
            is_able = _PROBE == self._vocabulary.decode_str(ids) == tokenizer.decode(ids)
            reason = f"{_PROBE!r} comes back as {tokenizer.decode(ids)!r}"
        except ValueError as error:
            is_able, reason = False, str(error)
        if not is_able:
            raise ModelAbilityError(
                f"the vocabulary of {vocab_size} tokens cannot express JSON: {reason}. Use a model "
                "with a byte-level or SentencePiece tokenizer."
            )
        self._compiled = lru_cache(MAX_COMPILED)(partial(_compile, llguidance, self._vocabulary))

    def __reduce__(self) -> tuple[type[Grammars], tuple[Any, Collection[int], int]]:
        # Another process compiles its own.
        return Grammars, self._arguments

    def matcher(self, grammar: str) -> Any:
        """Return a matcher at the start of a text; `ConfigurationError` for an invalid grammar."""
        # Not under the lock: a batch that goes on must not wait for a grammar of another request.
        compiled = self._compiled(grammar)
        with self._lock:
            # A matcher has state, so the cached one is only copied.
            return compiled.deep_copy()

    def mask(self, logits_RV: Tensor, matchers: Sequence[Any | None]) -> None:
        """Set the logits of tokens that a row's matcher rejects to -inf; None rejects none."""
        constrained_rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
        if not constrained_rows:
            return
        num_rows = len(constrained_rows)
        vocab_size, device = logits_RV.shape[1], logits_RV.device
        num_words = -(-vocab_size // 32)
        bits_RW = np.zeros((num_rows, num_words), dtype=np.int32)
        # Writes each matcher's row of bits, on several threads.
        self._executor.unsafe_compute_mask_ptr(
            [(matchers[row], index) for index, row in enumerate(constrained_rows)],
            bits_RW.ctypes.data,
            bits_RW.strides[0],
            num_rows,
        )
        words_RW = torch.from_numpy(bits_RW).to(device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        is_rejected_RW32 = (words_RW[:, :, None] >> shifts) & 1 == 0
        is_rejected_RV = is_rejected_RW32.flatten(1)[:, :vocab_size]
        index_R = torch.tensor(constrained_rows, device=device)
        logits_RV[index_R] = logits_RV[index_R].masked_fill(is_rejected_RV, float("-inf"))


def _compile(library: Any, vocabulary: Any, grammar: str) -> Any:
    limits = library.LLParserLimits(verbose_errors=False)
    matcher = library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ConfigurationError(_read_error(matcher))
    return matcher


def advance(matcher: Any, token: int) -> str | None:
    """Advance by a token of the answer; return the reason if the grammar rejects it."""
    return None if matcher.consume_token(token) else _read_error(matcher)


def _read_error(matcher: Any) -> str:
    """Return the first line of a matcher's error, cut."""
    return str(matcher.get_error()).split("\n")[0][:300]

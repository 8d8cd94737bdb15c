"""What a job learns from: lines of JSON in OpenAI's form, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.services.fine_tuning import check_length
from nip_astra.serve.api_errors import ApiError, wrong
from nip_astra.serve.bodies import Body, check_body, parse_json
from nip_astra.serve.generation_bodies import Message
from nip_astra.serve.prompts import encode, render

Method = Literal["supervised", "dpo"]


class SupervisedLine(Body):
    """A conversation whose last message is to be imitated."""

    messages: Annotated[list[Message], Field(min_length=2)]


class PreferenceInput(Body):
    """What both answers of a pair reply to."""

    messages: Annotated[list[Message], Field(min_length=1)]


class PreferenceLine(Body):
    """A conversation with an answer that is preferred to another one."""

    input: PreferenceInput
    preferred_output: Annotated[list[Message], Field(min_length=1, max_length=1)]
    non_preferred_output: Annotated[list[Message], Field(min_length=1, max_length=1)]


class TrainingText(NamedTuple):
    """A conversation and the answers to learn from: one, or the preferred and the other one."""

    messages: tuple[dict[str, str], ...]
    answers: tuple[str, ...]


class TokenRow(NamedTuple):
    """Tokens that are read, and tokens that are to be said, the end of the turn included."""

    context: tuple[int, ...]
    answer: tuple[int, ...]


def read_texts(path: Path, method: Method) -> list[TrainingText]:
    """Read a file of examples.

    Raises
    ------
    ApiError
        400, with the number of the line at fault.
    """
    found = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                found.append(_read_line(line, number, method))
    if not found:
        raise _wrong_file("the file has no examples. Give one JSON object a line.")
    return found


def _read_line(line: bytes, number: int, method: Method) -> TrainingText:
    try:
        given = parse_json(line)
        if method == "supervised":
            body = check_body(given, SupervisedLine)
            *before, last = (message.plain() for message in body.messages)
            answers = [last]
        else:
            pair = check_body(given, PreferenceLine)
            before = [message.plain() for message in pair.input.messages]
            answers = [pair.preferred_output[0].plain(), pair.non_preferred_output[0].plain()]
    except ApiError as error:
        raise _wrong_file(f"line {number} is no example of the method {method}: {error}") from error
    if any(answer["role"] != "assistant" for answer in answers):
        raise _wrong_file(
            f"line {number} ends with a message of another role than the assistant, so there is "
            "nothing to learn to say. End it with the assistant's message."
        )
    return TrainingText(tuple(before), tuple(answer["content"] for answer in answers))


def _wrong_file(message: str) -> ApiError:
    return wrong(message, "training_file", "invalid_training_file")


def token_rows(
    tokenizer: Any, texts: Sequence[TrainingText], end_ids: Sequence[int], *, window: int
) -> list[list[TokenRow]]:
    """The tokens of each text's answers, as the model would have read and said them.

    Raises
    ------
    ContextLengthError
        When one does not fit into the model's window.
    ConfigurationError
        When the template refuses one.
    """
    found = []
    for number, text in enumerate(texts, 1):
        try:
            rows = [_token_row(tokenizer, text, answer, end_ids) for answer in text.answers]
        except ApiError as error:
            raise ConfigurationError(f"example {number} cannot be read: {error}") from error
        check_length(number, max(len(row.context) + len(row.answer) for row in rows), window)
        found.append(rows)
    return found


def _token_row(tokenizer: Any, text: TrainingText, answer: str, end_ids: Sequence[int]) -> TokenRow:
    before = render(tokenizer, text.messages, opens_answer=True)
    said = {"role": "assistant", "content": answer}
    whole = render(tokenizer, [*text.messages, said], opens_answer=False)
    ids: list[int] = []
    if whole.startswith(before):
        ids = encode(tokenizer, whole[len(before) :])
    ends = [place for place, token in enumerate(ids) if token in end_ids]
    # Some templates end turns by text, or open answers as they do not write them down.
    ids = ids[: ends[0] + 1] if ends else [*encode(tokenizer, answer), *end_ids[:1]]
    return TokenRow(tuple(encode(tokenizer, before)), tuple(ids))

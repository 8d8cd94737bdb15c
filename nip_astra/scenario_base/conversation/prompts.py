"""Opening prompts from text, CSV, JSON Lines, JSON or Parquet files, or from datasets."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nip_astra.errors import DataError, nearest_names
from nip_astra.lazy import import_extra
from nip_astra.parameters.content import HUB, resolve_reference
from nip_astra.rollouts.messages import ToolCall, Turn
from nip_astra.rollouts.prompts import Prompt

DEFAULT_COLUMN = "prompt"
"""Default column of the prompts."""
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PARQUET = ".parquet"
_SUFFIXES = (".txt", ".jsonl", ".json", _PARQUET, *_DELIMITERS)
_DATASET = re.compile(r"(?P<name>[^:]+?)(?::(?P<split>[^/].*))?")
_KINDS_OF_FILES = (
    "a .txt, .csv, .tsv, .jsonl, .json or .parquet file, or a dataset as owner/name:split"
)
_ROLES = ("system", "user", "assistant", "tool")
_SAVED_DATASET, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that mark a folder of `Dataset.save_to_disk`, and one of several splits."""


def read_prompts(
    reference: str, scenario_dir: Path | None, column: str = DEFAULT_COLUMN
) -> list[Prompt]:
    """Read the prompts of a file or dataset, in order, with the other columns of their rows.

    `.csv` and `.tsv`: the first line names the columns, which a semicolon may separate in place of
    a comma; `.jsonl`: one object a line; `.json`: a list of texts or objects; `.parquet`: a table;
    anything else: one prompt a line. A dataset is a hub id or a folder, also of
    `Dataset.save_to_disk`, with a split of the package datasets: `owner/name:train[:80%]`. A prompt
    is a text, or a list of messages with `role` and `content` (a text, or parts of text): an
    optional system message first; a last message of the assistant is the beginning of the answer.
    Empty prompts are skipped.

    Raises
    ------
    DataError
        When it is missing, cannot be parsed, lacks the column, or holds no prompt.
    MissingDependencyError
        If a data set is requested and the package datasets is not installed.
    """
    dataset = _as_dataset(reference, scenario_dir)
    rows: Iterable[tuple[str, Any]]
    if dataset is not None:
        name, split = dataset
        place = f"the dataset {name!r}, split {split!r},"
        advice = f"Check the name and the network, or give {_KINDS_OF_FILES}."
        if Path(name).is_dir():
            advice = "Check its files and the name of the split."
        rows = _load_rows(place, advice, name, split=split)
    else:
        path = Path(resolve_reference(reference, scenario_dir))
        place = f"the prompt file {path}"
        if path.suffix != _PARQUET:
            rows = _rows_of_file(path, _read_text(path, reference))
        elif path.is_file():
            advice = "It is damaged, or not in this format: write it again."
            rows = _load_rows(place, advice, "parquet", data_files=str(path), split="train")
        else:
            raise DataError(f"{place} does not exist. Give {_KINDS_OF_FILES}.")
    try:
        prompts = [_prompt_of(row, where, column) for where, row in rows]
    except (RecursionError, ValueError, csv.Error) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else error
        raise DataError(
            f"{place} cannot be parsed: {reason}. A .csv file begins with its column names, "
            'a .jsonl file has one {"prompt": "..."} per line, a .json file is a list of texts.'
        ) from error
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise DataError(f"{place} has no prompts. Give at least one opening prompt.")
    return prompts


def read_probe_conversations(
    reference: str, scenario_dir: Path | None
) -> list[tuple[tuple[str, str], ...]]:
    """Read given probes, each with the turns that follow it, as role and text.

    A row with messages is the conversation after an opening: probes of the role user, and between
    them responses of the role assistant. Any other row is a single probe.

    Raises
    ------
    DataError
        As `read_prompts`, and for messages in another order.
    """
    conversations: list[tuple[tuple[str, str], ...]] = []
    for number, prompt in enumerate(read_prompts(reference, scenario_dir), start=1):
        messages = prompt.messages or (Turn("user", str(prompt)),)
        turns = tuple((str(turn.role), turn.text) for turn in messages)
        roles = [role for role, _ in turns]
        if roles[::2] != ["user"] * len(roles[::2]) or roles[1::2] != ["assistant"] * (
            len(roles) // 2
        ):
            raise DataError(
                f"probe {number} of {reference!r} has the roles {', '.join(roles)}. Begin with a "
                "probe of the role user, and give user and assistant in turn."
            )
        conversations.append(turns)
    return conversations


def read_probes(reference: str, scenario_dir: Path | None) -> list[str]:
    """Read given probes that are one turn each; `DataError` for a row with several."""
    probes = []
    for number, turns in enumerate(read_probe_conversations(reference, scenario_dir), start=1):
        if len(turns) > 1:
            raise DataError(
                f"probe {number} of {reference!r} has {len(turns)} messages. Give its first one "
                "alone: only ast_sft learns whole conversations."
            )
        probes.append(turns[0][1].strip())
    return probes


def _read_text(path: Path, reference: str) -> str:
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a file")
        # Without the byte order mark of some editors.
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else error
        raise DataError(
            f"cannot read the prompts {reference!r} from {path}: {reason}. Give {_KINDS_OF_FILES}."
        ) from error


def _rows_of_file(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each text or row of a file, with its position for error messages."""
    if path.suffix in _DELIMITERS:
        csv.field_size_limit(2**31 - 1)  # a text may be longer than the module's 131,072 characters
        delimiter = _DELIMITERS[path.suffix]
        head = text.partition("\n")[0]
        if delimiter == "," and "," not in head and ";" in head:
            # As programs of countries with a decimal comma write it.
            delimiter = ";"
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"line {reader.line_num}: not as many values as columns")
            yield f"line {reader.line_num}", row
        return
    if path.suffix == ".json":
        items = json.loads(text)
        if not isinstance(items, list):
            raise ValueError("not a list")
        yield from ((f"item {number}", item) for number, item in enumerate(items, start=1))
        return
    # Not splitlines: a prompt may contain rarer line separators of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if path.suffix != ".jsonl":
            yield f"line {number}", line
        elif line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"line {number}: not an object with {DEFAULT_COLUMN!r}")
            yield f"line {number}", record


def _prompt_of(row: Any, place: str, column: str) -> Prompt:
    """Return the prompt of a text or of a row with its columns."""
    if isinstance(row, Mapping):
        if column not in row:
            near = nearest_names(column, row, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            names = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"{place}: no column {column!r}, only {names}{hint}")
        text, others = row[column], [pair for pair in row.items() if pair[0] != column]
    elif column != DEFAULT_COLUMN:
        raise ValueError(f"{place}: no column {column!r}, because it has no columns")
    else:
        text, others = row, []
    messages: tuple[Turn, ...] = ()
    if isinstance(text, list | tuple):
        messages = _messages_of(text, place)
        text = _transcript(messages)
    if not isinstance(text, str):
        shown = json.dumps(text, default=str)
        raise ValueError(f"{place}: the prompt {shown[:80]} is neither a text nor messages")
    for value in (text, *(value for _, value in others if isinstance(value, str))):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{place}: it contains a lone surrogate (half a character)") from error
    columns = tuple((str(name), _plain(value)) for name, value in others)
    return Prompt(text.strip(), columns, {str(name): value for name, value in others}, messages)


def _messages_of(value: Any, place: str) -> tuple[Turn, ...]:
    """Validate and return the messages of a conversational prompt."""
    messages = tuple(_message_of(one, place) for one in value)
    roles = [message.role for message in messages]
    if "system" in roles[1:]:
        raise ValueError(f"{place}: a system message must be the first of its prompt")
    for before, message in zip((None, *messages), messages, strict=False):
        follows_call = before is not None and (before.calls or before.role == "tool")
        if message.role == "tool" and not follows_call:
            raise ValueError(
                f"{place}: a tool's message must follow an assistant's message with tool_calls"
            )
    if not roles or roles[-1] == "system" or messages[-1].calls:
        raise ValueError(
            f"{place}: the last message of its prompt must be the user's, a tool's, or the "
            "beginning of an answer"
        )
    return messages


def _message_of(value: Any, place: str) -> Turn:
    """Return a message of a chat as a turn."""
    if not isinstance(value, Mapping) or not value.get("role"):
        raise ValueError(f"{place}: a message of its prompt lacks a role")
    role = str(value["role"])
    if role not in _ROLES:
        raise ValueError(f"{place}: unknown role {role!r}; choose one of {', '.join(_ROLES)}")
    calls = tuple(_call_of(call, place) for call in value.get("tool_calls") or ())
    if calls and role != "assistant":
        raise ValueError(f"{place}: a message of the role {role} has tool_calls")
    content = value.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list | tuple):
        content = "".join(_text_of_part(part, place) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{place}: a message of its prompt lacks a text as content")
    return Turn(role, content, calls=calls)  # type: ignore[arg-type]  # one of `_ROLES`


def _text_of_part(part: Any, place: str) -> str:
    """Return the text of a part of a message."""
    # The package datasets fills the fields that other parts have with None.
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f"{place}: a message of its prompt has a part {kind!r}, and only text is read")


def _call_of(value: Any, place: str) -> ToolCall:
    """Return a call of a tool in OpenAI's format; arguments may be an object or its JSON."""
    function = value.get("function", value) if isinstance(value, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
        raise ValueError(f"{place}: a call of its prompt lacks a name or arguments by name")
    # As above: arguments of other calls are None.
    given = {key: argument for key, argument in (arguments or {}).items() if argument is not None}
    return ToolCall(name, given)


def _transcript(messages: Sequence[Turn]) -> str:
    """Return the text that identifies a conversational prompt: that of a single message, or all."""
    if len(messages) == 1:
        return messages[0].text
    return "\n\n".join(
        f"{message.role}: {message.text}"
        + "".join(f" {json.dumps(call)}" for call in message.calls)
        for message in messages
    )


def _plain(value: Any) -> str | int | float | bool | None:
    """Return a comparable value; lists and objects as JSON."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, default=str)


def _as_dataset(reference: str, scenario_dir: Path | None) -> tuple[str, str] | None:
    """Return name and split of a dataset; None for a file."""
    if "://" in reference:
        return None
    if reference.startswith(HUB):
        name, _, split = reference.removeprefix(HUB).partition(":")
        return str(resolve_reference(f"{HUB}{name}")), split or "train"
    found = _DATASET.fullmatch(reference)
    if found is None or Path(found["name"]).suffix in _SUFFIXES:
        return None
    resolved = resolve_reference(found["name"], scenario_dir)
    is_hub_id = isinstance(resolved, str) and resolved.count("/") == 1
    if not is_hub_id and not (isinstance(resolved, Path) and resolved.is_dir()):
        return None
    return str(resolved), found["split"] or "train"


def _load_rows(place: str, advice: str, *arguments: Any, **options: Any) -> list[tuple[str, Any]]:
    """Load rows with the package datasets; errors name the place and end with the advice."""
    datasets = import_extra("datasets", place, "datasets")
    folder = Path(arguments[0])
    is_saved = any((folder / file).is_file() for file in (_SAVED_DATASET, _SAVED_SPLITS))
    try:
        if is_saved:
            saved = datasets.load_from_disk(str(folder))
            # A folder of one dataset has no other split.
            is_one = (folder / _SAVED_DATASET).is_file() and options["split"] == "train"
            rows = list(saved if is_one else saved[options["split"]])
        else:
            rows = list(datasets.load_dataset(*arguments, **options))
    except Exception as error:
        # datasets and the hub's client have many error classes.
        raise DataError(f"{place} cannot be loaded: {error}. {advice}") from error
    return [(f"row {number}", row) for number, row in enumerate(rows)]

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
    dataset = _find_dataset(reference, scenario_dir)
    rows: Iterable[tuple[str, Any]]
    if dataset is not None:
        name, split = dataset
        source = f"the dataset {name!r}, split {split!r},"
        advice = f"Check the name and the network, or give {_KINDS_OF_FILES}."
        if Path(name).is_dir():
            advice = "Check its files and the name of the split."
        rows = _load_rows(source, advice, name, split=split)
    else:
        path = Path(resolve_reference(reference, scenario_dir))
        source = f"the prompt file {path}"
        if path.suffix != _PARQUET:
            rows = _iterate_rows(path, _read_text(path, reference))
        elif path.is_file():
            advice = "It is damaged, or not in this format: write it again."
            rows = _load_rows(source, advice, "parquet", data_files=str(path), split="train")
        else:
            raise DataError(f"{source} does not exist. Give {_KINDS_OF_FILES}.")
    try:
        prompts = [_parse_prompt(row, position, column) for position, row in rows]
    except (RecursionError, ValueError, csv.Error) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else error
        raise DataError(
            f"{source} cannot be parsed: {reason}. A .csv file begins with its column names, "
            'a .jsonl file has one {"prompt": "..."} per line, a .json file is a list of texts.'
        ) from error
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise DataError(f"{source} has no prompts. Give at least one opening prompt.")
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
        roles = [str(turn.role) for turn in messages]
        expected_roles = [("user", "assistant")[index % 2] for index in range(len(roles))]
        if roles != expected_roles:
            raise DataError(
                f"probe {number} of {reference!r} has the roles {', '.join(roles)}. Begin with a "
                "probe of the role user, and give user and assistant in turn."
            )
        texts = [turn.text for turn in messages]
        conversations.append(tuple(zip(roles, texts, strict=True)))
    return conversations


def read_probes(
    reference: str, scenario_dir: Path | None, column: str = DEFAULT_COLUMN
) -> list[Prompt]:
    """Read given probes that are one turn each, with the other columns of their rows.

    Raises
    ------
    DataError
        As `read_prompts`, and for a row with several messages or one of another role.
    """
    probes = read_prompts(reference, scenario_dir, column)
    for number, probe in enumerate(probes, start=1):
        roles = [message.role for message in probe.messages]
        if len(roles) > 1:
            raise DataError(
                f"probe {number} of {reference!r} has {len(roles)} messages. Give its first one "
                "alone: only ast_sft learns whole conversations, and a list of attacks has one "
                "turn each."
            )
        if roles not in ([], ["user"]):
            raise DataError(
                f"probe {number} of {reference!r} has the role {roles[0]!r}. Give a message of the "
                "role user."
            )
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


def _iterate_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each text or row of a file, with its position for error messages."""
    if path.suffix in _DELIMITERS:
        # A text may be longer than the module's limit of 131,072 characters.
        csv.field_size_limit(2**31 - 1)
        delimiter = _DELIMITERS[path.suffix]
        header = text.partition("\n")[0]
        if delimiter == "," and "," not in header and ";" in header:
            # As programs of countries with a decimal comma write it.
            delimiter = ";"
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"line {reader.line_num}: not as many values as columns")
            yield f"line {reader.line_num}", row
        return
    if path.suffix == ".json":
        rows = json.loads(text)
        if not isinstance(rows, list):
            raise ValueError("not a list")
        for number, row in enumerate(rows, start=1):
            yield f"item {number}", row
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


def _parse_prompt(row: Any, position: str, column: str) -> Prompt:
    """Return the prompt of a text or of a row with its columns."""
    content = row
    columns: dict[str, Any] = {}
    if isinstance(row, Mapping):
        if column not in row:
            near = nearest_names(column, row, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            names = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"{position}: no column {column!r}, only {names}{hint}")
        content = row[column]
        columns = {str(name): value for name, value in row.items() if name != column}
    elif column != DEFAULT_COLUMN:
        raise ValueError(f"{position}: no column {column!r}, because it has no columns")
    messages: tuple[Turn, ...] = ()
    text = content
    if isinstance(content, list | tuple):
        messages = _parse_messages(content, position)
        text = _join_messages(messages)
    if not isinstance(text, str):
        excerpt = json.dumps(text, default=str)[:80]
        raise ValueError(f"{position}: the prompt {excerpt} is neither a text nor messages")
    for value in (text, *columns.values()):
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{position}: it contains a lone surrogate (half a character)"
                ) from error
    plain_columns = tuple((name, _to_comparable(value)) for name, value in columns.items())
    return Prompt(text.strip(), plain_columns, columns, messages)


def _parse_messages(content: Sequence[Any], position: str) -> tuple[Turn, ...]:
    """Validate and return the messages of a conversational prompt."""
    messages = tuple(_parse_message(message, position) for message in content)
    roles = [message.role for message in messages]
    if "system" in roles[1:]:
        raise ValueError(f"{position}: a system message must be the first of its prompt")
    previous: Turn | None = None
    for message in messages:
        # Several results may follow one message with several calls.
        can_follow = previous is not None and (previous.calls or previous.role == "tool")
        if message.role == "tool" and not can_follow:
            raise ValueError(
                f"{position}: a tool's message must follow an assistant's message with tool_calls"
            )
        previous = message
    if not roles or roles[-1] == "system" or messages[-1].calls:
        raise ValueError(
            f"{position}: the last message of its prompt must be the user's, a tool's, or the "
            "beginning of an answer"
        )
    return messages


def _parse_message(message: Any, position: str) -> Turn:
    """Return a message of a chat as a turn."""
    if not isinstance(message, Mapping) or not message.get("role"):
        raise ValueError(f"{position}: a message of its prompt lacks a role")
    role = str(message["role"])
    if role not in _ROLES:
        raise ValueError(f"{position}: unknown role {role!r}; choose one of {', '.join(_ROLES)}")
    calls = tuple(_parse_call(call, position) for call in message.get("tool_calls") or ())
    if calls and role != "assistant":
        raise ValueError(f"{position}: a message of the role {role} has tool_calls")
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list | tuple):
        content = "".join(_read_text_part(part, position) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{position}: a message of its prompt lacks a text as content")
    return Turn(role, content, calls=calls)  # type: ignore[arg-type]  # one of `_ROLES`


def _read_text_part(part: Any, position: str) -> str:
    """Return the text of a part of a message."""
    # The package datasets fills the fields that other parts have with None.
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(
        f"{position}: a message of its prompt has a part {kind!r}, and only text is read"
    )


def _parse_call(call: Any, position: str) -> ToolCall:
    """Return a call of a tool in OpenAI's format; arguments may be an object or its JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name = function.get("name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
        raise ValueError(f"{position}: a call of its prompt lacks a name or arguments by name")
    # As for parts of messages, arguments of other calls are None.
    present_arguments = {
        key: argument for key, argument in (arguments or {}).items() if argument is not None
    }
    return ToolCall(name, present_arguments)


def _join_messages(messages: Sequence[Turn]) -> str:
    """Return the text that identifies a conversational prompt: that of a single message, or all."""
    if len(messages) == 1:
        return messages[0].text
    paragraphs = []
    for message in messages:
        calls = [f" {json.dumps(call)}" for call in message.calls]
        paragraphs.append(f"{message.role}: {message.text}{''.join(calls)}")
    return "\n\n".join(paragraphs)


def _to_comparable(value: Any) -> str | int | float | bool | None:
    """Return a comparable value; lists and objects as JSON."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, default=str)


def _find_dataset(reference: str, scenario_dir: Path | None) -> tuple[str, str] | None:
    """Return name and split of a dataset; None for a file."""
    if "://" in reference:
        return None
    if reference.startswith(HUB):
        name, _, split = reference.removeprefix(HUB).partition(":")
        return str(resolve_reference(f"{HUB}{name}")), split or "train"
    match = _DATASET.fullmatch(reference)
    if match is None or Path(match["name"]).suffix in _SUFFIXES:
        return None
    resolved = resolve_reference(match["name"], scenario_dir)
    is_hub_id = isinstance(resolved, str) and resolved.count("/") == 1
    is_folder = isinstance(resolved, Path) and resolved.is_dir()
    if not is_hub_id and not is_folder:
        return None
    return str(resolved), match["split"] or "train"


def _load_rows(source: str, advice: str, *arguments: Any, **options: Any) -> list[tuple[str, Any]]:
    """Load rows with the package datasets; errors name the source and end with the advice."""
    datasets = import_extra("datasets", source, "datasets")
    folder = Path(arguments[0])
    has_one_split = (folder / _SAVED_DATASET).is_file()
    has_several_splits = (folder / _SAVED_SPLITS).is_file()
    try:
        if has_one_split or has_several_splits:
            saved = datasets.load_from_disk(str(folder))
            # A folder of one dataset has no other split.
            is_whole = has_one_split and options["split"] == "train"
            rows = list(saved if is_whole else saved[options["split"]])
        else:
            rows = list(datasets.load_dataset(*arguments, **options))
    except Exception as error:
        # datasets and the hub's client have many error classes.
        raise DataError(f"{source} cannot be loaded: {error}. {advice}") from error
    return [(f"row {number}", row) for number, row in enumerate(rows)]

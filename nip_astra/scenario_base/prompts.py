"""Read opening prompts from a text, JSON Lines or JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nip_astra.errors import DataError
from nip_astra.parameters.content import resolve_reference


def read_prompts(reference: str, scenario_dir: Path | None) -> list[str]:
    """Give the prompts of a file, in order.

    `.jsonl`: one object a line with a `prompt`; `.json`: a list of strings; anything else: one
    prompt a line. Empty prompts are skipped.

    Raises
    ------
    DataError
        When the file is missing, cannot be parsed, or holds no prompt.
    """
    path = Path(resolve_reference(reference, scenario_dir))
    try:
        # Some editors begin a file with a byte order mark, which is no part of the first prompt.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"prompts were to be read from {reference!r}, but {path} cannot be read: {reason}. "
            "Give a .txt, .jsonl or .json file."
        ) from error
    try:
        prompts = [prompt.strip() for prompt in _parse(text, path.suffix)]
    except ValueError as error:
        raise DataError(
            f"the prompt file {path} cannot be parsed: {error}. A .jsonl file holds one "
            '{"prompt": "..."} a line, a .json file a list of strings.'
        ) from error
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise DataError(
            f"prompts were to be read from {reference!r}, but {path} holds none. Give at least "
            "one opening prompt."
        )
    return prompts


def _parse(text: str, suffix: str) -> list[str]:
    # Not splitlines: a prompt may hold the rarer line separators of Unicode.
    lines = text.split("\n")
    if suffix == ".jsonl":
        return [_prompt_of(line, n) for n, line in enumerate(lines, start=1) if line.strip()]
    if suffix == ".json":
        items = json.loads(text)
        if not isinstance(items, list):
            raise ValueError("it is no list")
        return [_checked(item, f"item {n}") for n, item in enumerate(items, start=1)]
    return lines


def _prompt_of(line: str, number: int) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error
    if not isinstance(record, dict) or "prompt" not in record:
        raise ValueError(f"line {number}: it has no 'prompt'")
    return _checked(record["prompt"], f"line {number}")


def _checked(prompt: Any, place: str) -> str:
    if not isinstance(prompt, str):
        raise ValueError(f"{place}: its prompt is {json.dumps(prompt)} and no text")
    return prompt

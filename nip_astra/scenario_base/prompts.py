"""Read opening prompts from a text, JSON Lines or JSON file."""

from __future__ import annotations

import json
from pathlib import Path

from nip_astra.errors import DataError
from nip_astra.parameters.content import resolve_reference


def read_prompts(reference: str, scenario_dir: Path | None) -> list[str]:
    """Give the prompts of a file, in order.

    `.jsonl`: one object a line with a `prompt`; `.json`: a list of strings; anything else: one
    prompt a line. Empty lines are skipped.

    Raises
    ------
    DataError
        When the file is missing, cannot be parsed, or holds no prompt.
    """
    path = Path(resolve_reference(reference, scenario_dir))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"prompts were to be read from {reference!r}, but {path} cannot be read: {error}. "
            "Give a .txt, .jsonl or .json file."
        ) from error
    prompts = [prompt.strip() for prompt in _parse(text, path)]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise DataError(
            f"prompts were to be read from {reference!r}, but {path} holds none. Give at least "
            "one opening prompt."
        )
    return prompts


def _parse(text: str, path: Path) -> list[str]:
    try:
        if path.suffix == ".jsonl":
            return [str(json.loads(line)["prompt"]) for line in text.splitlines() if line.strip()]
        if path.suffix == ".json":
            return [str(prompt) for prompt in json.loads(text)]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the prompt file {path} cannot be parsed: {type(error).__name__}: {error}. A .jsonl "
            'file holds one {"prompt": "..."} a line, a .json file a list of strings.'
        ) from error
    return text.splitlines()

"""Loading of models, which tests do thousands of times with the same few tiny models."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

LARGEST = 2**20
"""Bytes of a file of models that are kept."""
PLAIN = (bool, str, int, torch.dtype, type(None))


def _content(folder: Path) -> dict[str, bytes] | None:
    files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    if not files or max(file.stat().st_size for file in files) > LARGEST:
        return None
    return {file.name: file.read_bytes() for file in files}


def models_are_read_once(patch: pytest.MonkeyPatch) -> None:
    """Have transformers return a copy of a model whose files it has loaded before."""
    for kind in (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification):
        read = partial(_read_once, kind.from_pretrained, [])
        patch.setattr(kind, "from_pretrained", staticmethod(read))


def _read_once(
    read: Callable[..., Any], kept: list[tuple[Any, Any]], name: Any, *args: Any, **options: Any
) -> Any:
    is_plain = not args and all(isinstance(value, PLAIN) for value in options.values())
    content = _content(Path(name)) if is_plain else None
    if content is None:
        return read(name, *args, **options)
    key = (options, content)
    found = next((value for known, value in kept if known == key), None)
    if found is None:
        found = read(name, **options)
        kept.insert(0, (key, found))
        del kept[16:]
    copied = deepcopy(found)
    model = copied[0] if isinstance(copied, tuple) else copied
    model.name_or_path = model.config.name_or_path = str(name)
    return copied

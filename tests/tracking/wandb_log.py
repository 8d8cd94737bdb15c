"""Read W&B's offline files: records of its protocol in LevelDB's log format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

FILE_HEADER_SIZE = 7
BLOCK_SIZE = 32768
RECORD_HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[Any]:
    """Each record of a `.wandb` file."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, parts = FILE_HEADER_SIZE, b""
    while position + RECORD_HEADER.size <= len(data):
        left_in_block = BLOCK_SIZE - position % BLOCK_SIZE
        if left_in_block < RECORD_HEADER.size:
            position += left_in_block
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, position)
        position += RECORD_HEADER.size
        parts = (parts if kind in (MIDDLE, LAST) else b"") + data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


class WandbLog:
    """Content of an offline run: labels, config, summary, rows of metrics, artifacts and end."""

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.artifacts: list[Any] = []
        self.exit_code: int | None = None
        self.text = path.read_bytes()
        for record in read_records(path):
            if record.HasField("run"):
                self.run_id, self.project = record.run.run_id, record.run.project
                self.group, self.tags = record.run.run_group, list(record.run.tags)
                self.config |= _items(record.run.config.update)
            elif record.HasField("history"):
                self.history.append(_items(record.history.item))
            elif record.HasField("summary"):
                self.summary |= _items(record.summary.update)
            elif record.HasField("artifact"):
                self.artifacts.append(record.artifact)
            elif record.HasField("request") and record.request.HasField("log_artifact"):
                self.artifacts.append(record.request.log_artifact.artifact)
            elif record.HasField("exit"):
                self.exit_code = record.exit.exit_code


def _items(items: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        inner = values
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)
    return values

"""Rows of an evaluation: one JSON object a node, appended part by part.

Episodes stand one after the other, the turns of each in order, so that a file that was cut off by
a kill still begins with whole episodes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nip_astra.errors import DataError, RunDirectoryError
from nip_astra.safe_text import to_json

Row = dict[str, Any]
"""A node: see the table of columns in doc/guides/evaluating.md."""
Episode = list[Row]
"""The nodes of a conversation that does not branch, in order."""

_RENAMED = {"strategy": "proposal"}
"""Columns that files of older versions hold, and their names now."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none where it is missing; a last line that was cut off is left out.

    Raises
    ------
    DataError
        When another line is broken.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    # What follows the last line break is empty, or was cut off.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"rows were to be read from {path}, but line {number} is no JSON: {error}. Remove "
                "the file and evaluate again, or give --overwrite."
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"rows were to be read from {path}, but line {number} is no JSON object. Give a "
                "file that an evaluation or a run wrote."
            )
        for old in _RENAMED.keys() & row.keys():
            row[_RENAMED[old]] = row.pop(old)
        rows.append(row)
    return rows


def encode_rows(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Rows as lines; NaN and infinities, which JSON has not, become null.

    Half of a surrogate pair is written as its escape, which JSON readers take back.
    """
    lines = [to_json(_plain(row), allow_nan=False) for row in rows]
    return "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")


class RowFile:
    """A file of rows that grows by whole episodes.

    Parameters
    ----------
    episode_length : int
        Rows of an episode.
    """

    def __init__(self, path: Path, episode_length: int) -> None:
        self.path = path
        self.episode_length = episode_length

    def recover(self) -> int:
        """Cut off what a kill left of an unfinished episode, and give the number of whole ones."""
        rows = read_rows(self.path)
        num_episodes = len(rows) // self.episode_length
        if self.path.is_file():
            lines = self.path.read_bytes().split(b"\n")[: num_episodes * self.episode_length]
            os.truncate(self.path, sum(len(line) + 1 for line in lines))
        return num_episodes

    def count(self) -> int:
        """The number of whole episodes."""
        return len(read_rows(self.path)) // self.episode_length

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write whole episodes and sync them to disk.

        Raises
        ------
        RunDirectoryError
            When they cannot be written.
        """
        try:
            with self.path.open("ab") as file:
                file.write(encode_rows(rows))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} was to be written, but {error.strerror or error}. Free space or "
                "change the permissions; the same command goes on where it was."
            ) from error

    def read(self) -> list[Row]:
        """All rows."""
        return read_rows(self.path)


def episodes_of(rows: Iterable[Row]) -> list[Episode]:
    """The chains of conversation in rows, by step and episode, each in order of depth.

    In a tree that branches, each path from the opening to a leaf is a chain of its own.
    """
    grouped: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.get("step", 0), row["episode"]), []).append(row)
    return [chain for nodes in grouped.values() for chain in _chains(nodes)]


def _chains(nodes: list[Row]) -> list[Episode]:
    by_depth = sorted(nodes, key=lambda row: int(row["depth"]))
    if len({row["depth"] for row in nodes}) == len(nodes):
        return [by_depth]
    by_name = {row["node"]: row for row in nodes}
    parents = {row["parent"] for row in nodes}
    chains = []
    for leaf in (row for row in by_depth if row["node"] not in parents):
        chain = [leaf]
        while chain[-1]["parent"] in by_name:
            chain.append(by_name[chain[-1]["parent"]])
        chains.append(chain[::-1])
    return chains


def number(row: Mapping[str, Any], name: str) -> float:
    """A numeric column of a row, NaN where it is null or absent."""
    value = row.get(name)
    return math.nan if value is None else float(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

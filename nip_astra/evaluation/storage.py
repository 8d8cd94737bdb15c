"""Files of an evaluation in `RUN/evaluations/<name>/`: configuration, rows, figures and table.

Rows are JSON objects, one per turn, appended part by part. The turns of an episode are in order, so
a file that a kill cut off still begins with whole episodes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, DataError, NipAstraError, RunDirectoryError
from nip_astra.parameters.files import flatten
from nip_astra.safe_text import to_json
from nip_astra.tracking.figure_names import with_current_names
from nip_astra.tracking.run_directory import RunDirectory, finite, write_atomically
from nip_astra.tracking.run_lock import run_lock

EVALUATIONS = "evaluations"
FIGURES = "evaluation.json"
CONFIGURATION = "configuration.json"
TABLE = "table.txt"
ROWS = "rows.jsonl"
PROBABILITY_ROWS = "probability_rows.jsonl"
PARTS = "parts.jsonl"
TASK_ROWS = "problems.jsonl"
"""File with one line per run of a problem: prompt, answer and reward."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")

Row = dict[str, Any]
"""A node; see the table of columns in doc/guides/evaluating.md."""
Episode = list[Row]
"""Nodes of a conversation without branches, in order."""


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, none if it is missing; omits a truncated last line.

    Columns have their current names, also in files of earlier versions.

    Raises
    ------
    DataError
        When another line is broken.
    """
    if not path.is_file():
        return []
    rows = []
    # The text after the last line break is empty, or was cut off.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"line {number} of {path} is not JSON: {error}. Remove the file and evaluate "
                "again, or give --overwrite."
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"line {number} of {path} is not a JSON object. Give a file written by an "
                "evaluation or a run."
            )
        rows.append(with_current_names(row))
    return rows


@contextmanager
def reading(*paths: Path) -> Iterator[None]:
    """Raise `DataError` if stored values lack a name or are of a wrong type, as after an edit."""
    try:
        yield
    except NipAstraError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"a file of {' or '.join(map(str, paths))} lacks a value, or holds one of a wrong type "
            f"({type(error).__name__}: {error}). Restore it, or evaluate again with --overwrite."
        ) from error


def encode_rows(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode rows as lines; NaN and infinities become null, and lone surrogates are escaped."""
    lines = [to_json(finite(row), allow_nan=False) for row in rows]
    return "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")


class RowFile:
    """A file of rows that grows by whole episodes of `episode_length` rows."""

    def __init__(self, path: Path, episode_length: int) -> None:
        self.path = path
        self.episode_length = episode_length

    def recover(self) -> int:
        """Remove an unfinished episode, and return the number of whole ones."""
        num_episodes = len(read_rows(self.path)) // self.episode_length
        if self.path.is_file():
            lines = self.path.read_bytes().split(b"\n")[: num_episodes * self.episode_length]
            os.truncate(self.path, sum(len(line) + 1 for line in lines))
        return num_episodes

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
                f"{self.path} cannot be written: {error.strerror or error}. Free space or change "
                "the permissions; the same command continues."
            ) from error

    def read(self) -> list[Row]:
        """Return all rows."""
        return read_rows(self.path)


def episodes_of(rows: Iterable[Row]) -> list[Episode]:
    """Return the conversations in rows, by step and episode, each in order of depth.

    In a tree that branches, each path from the opening to a leaf is one of them.
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
    """Return a numeric column of a row, NaN if it is null or absent."""
    value = row.get(name)
    return math.nan if value is None else float(value)


class EvaluationFolder:
    """Files of one evaluation, which is named after the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_run(cls, run: Path, name: str) -> EvaluationFolder:
        """Return the folder of an evaluation of a run.

        Raises
        ------
        ConfigurationError
            When the name is not a file name.
        """
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"the evaluation's name {name!r} is not a folder name. Use letters, digits, dots, "
                "dashes, @ and underscores."
            )
        return cls(run / EVALUATIONS / name)

    def open(self, configuration: Mapping[str, Any], *, is_overwritten: bool = False) -> bool:
        """Create the folder, or continue one of the same configuration; return True if it is new.

        Raises
        ------
        ConfigurationError
            When the folder has another configuration; lists the differences.
        """
        if is_overwritten and self.path.is_dir():
            shutil.rmtree(self.path)
        stored = self.configuration()
        if not stored:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunDirectoryError(
                    f"the folder {self.path} cannot be made: {error.strerror or error}. Give a run "
                    "directory that you may write to."
                ) from error
            # The origin of rows without a configuration is unknown.
            self.forget_rows()
            content = {"sha256": configuration_hash(configuration), **configuration}
            RunDirectory(self.path).write_json(CONFIGURATION, content)
        elif stored.get("sha256") != configuration_hash(configuration):
            lines = "\n".join(f"  {line}" for line in differences(stored, configuration))
            raise ConfigurationError(
                f"{self.path} holds an evaluation of another configuration:\n{lines}\nGive the "
                "same options to continue it, another --name to keep both, or --overwrite to start "
                "over."
            )
        else:
            RowFile(self.path / PARTS, 1).recover()
        return not stored

    @contextmanager
    def opened(
        self, configuration: Mapping[str, Any], *, is_overwritten: bool = False
    ) -> Iterator[bool]:
        """Open the folder as `open` does, for this process alone within the block.

        Raises
        ------
        RunDirectoryError
            When another process is using it.
        """
        if self.path.is_dir():
            with run_lock(self.path):
                pass  # Nothing is overwritten that is in use.
        is_new = self.open(configuration, is_overwritten=is_overwritten)
        with run_lock(self.path):
            yield is_new

    def rows(self, episode_length: int) -> RowFile:
        """Return the file of the attacker's rows."""
        return RowFile(self.path / ROWS, episode_length)

    def probability_rows(self, episode_length: int) -> RowFile:
        """Return the file of rows of the reference and the importance sampler."""
        return RowFile(self.path / PROBABILITY_ROWS, episode_length)

    def replace_rows(self, episodes: Sequence[Episode], probability: Sequence[Episode]) -> None:
        """Rewrite all rows after conversations were rated again."""
        for name, chains in ((ROWS, episodes), (PROBABILITY_ROWS, probability)):
            (self.path / name).unlink(missing_ok=True)
            if chains:
                RowFile(self.path / name, 1).append([row for chain in chains for row in chain])

    def forget_rows(self) -> None:
        """Remove all rows, so that the same command starts again."""
        for name in (ROWS, PROBABILITY_ROWS, PARTS, TASK_ROWS):
            (self.path / name).unlink(missing_ok=True)

    def note_part(self, part: Mapping[str, Any]) -> None:
        """Append the costs of a part of the work."""
        RowFile(self.path / PARTS, 1).append([part])

    def parts(self) -> list[dict[str, Any]]:
        """Return the costs of each part of the work."""
        return read_rows(self.path / PARTS)

    def write(self, figures: Mapping[str, Any], table: str) -> None:
        """Write `evaluation.json` and the table."""
        RunDirectory(self.path).write_json(FIGURES, dict(figures))
        write_atomically(self.path / TABLE, table)

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a whole file of rows."""
        write_atomically(self.path / name, encode_rows(rows).decode())

    def figures(self) -> dict[str, Any]:
        """Return the content of `evaluation.json`.

        Raises
        ------
        RunDirectoryError
            When it is missing or broken.
        """
        return RunDirectory(self.path).read_json(FIGURES)

    def configuration(self) -> dict[str, Any]:
        """Return the stored configuration, empty if there is none."""
        if not (self.path / CONFIGURATION).is_file():
            return {}
        return RunDirectory(self.path).read_json(CONFIGURATION)


def configuration_hash(configuration: Mapping[str, Any]) -> str:
    """Return a digest of everything that affects an evaluation's result."""
    text = json.dumps(_without_hash(configuration), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], places: tuple[str, str] = ("there", "now")
) -> list[str]:
    """Return the differences of two configurations by dotted path; `places` names the two."""
    before = dict(flatten(json.loads(json.dumps(_without_hash(stored)))))
    after = dict(flatten(json.loads(json.dumps(_without_hash(wanted)))))
    nothing = "nothing"
    return [
        f"{path}: {_short(before.get(path, nothing))} {places[0]}, "
        f"{_short(after.get(path, nothing))} {places[1]}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path, nothing) != after.get(path, nothing)
    ]


def text_hash(texts: Sequence[str]) -> str:
    """Return a short digest of texts in order."""
    return hashlib.sha256("\x1f".join(texts).encode()).hexdigest()[:16]


def weights_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, including shards; for a file, itself."""
    if folder.is_file():
        return [folder]
    # Imported here: it needs torch, and stored figures do not.
    from nip_astra.checkpoints.shards import SHARDS

    patterns = ("*.safetensors", "*.bin", "*.gguf", f"{SHARDS}/*.safetensors")
    return sorted(file for pattern in patterns for file in folder.glob(pattern))


def weights_hash(folder: Path) -> str | None:
    """Return a short digest of a folder's weights; None if it has none."""
    files = weights_files(folder)
    if not files:
        return None
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]


def _without_hash(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in configuration.items() if name != "sha256"}


def _short(value: Any) -> str:
    text = value if value == "nothing" else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."

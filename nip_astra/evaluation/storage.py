"""The folder of an evaluation: its configuration, rows, figures and table."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, RunDirectoryError
from nip_astra.evaluation.rows import Episode, RowFile, encode_rows, read_rows
from nip_astra.tracking.run_directory import RunDirectory

EVALUATIONS = "evaluations"
FIGURES = "evaluation.json"
CONFIGURATION = "configuration.json"
TABLE = "table.txt"
ROWS = "rows.jsonl"
PROBABILITY_ROWS = "probability_rows.jsonl"
PARTS = "parts.jsonl"
TASK_ROWS = "problems.jsonl"
"""A line a run of a problem: what was asked, said and given for it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")


class EvaluationFolder:
    """Files of one evaluation.

    Attributes
    ----------
    path : Path
        The folder; its name is the evaluation's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_run(cls, run: Path, name: str) -> EvaluationFolder:
        """The folder of an evaluation of a run.

        Raises
        ------
        ConfigurationError
            When the name is no file name.
        """
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"an evaluation named {name!r} was asked for, but the name becomes that of a "
                "folder. Use letters, digits, dots, dashes, @ and underscores."
            )
        return cls(run / EVALUATIONS / name)

    def open(self, configuration: Mapping[str, Any], *, is_overwritten: bool = False) -> bool:
        """Make the folder, or go on with one of the same configuration; says whether it was made.

        Raises
        ------
        ConfigurationError
            When the folder holds an evaluation of another configuration; tells what differs.
        """
        if is_overwritten and self.path.is_dir():
            shutil.rmtree(self.path)
        stored = self._stored()
        if stored is None:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunDirectoryError(
                    f"the folder {self.path} was to be made, but {error.strerror or error}. Give "
                    "a run directory that you may write to."
                ) from error
            # Rows without a configuration are of nobody knows what.
            self.forget_rows()
            content = {"sha256": configuration_hash(configuration), **configuration}
            RunDirectory(self.path).write_json(CONFIGURATION, content)
        elif stored.get("sha256") != configuration_hash(configuration):
            lines = "\n".join(f"  {line}" for line in differences(stored, configuration))
            raise ConfigurationError(
                f"the evaluation {self.path.name!r} was to be made or gone on with, but "
                f"{self.path} holds one of another configuration:\n{lines}\nGive the same options "
                "to go on, another --name to keep both, or --overwrite to start over."
            )
        return stored is None

    def rows(self, episode_length: int) -> RowFile:
        """The attacker's rows."""
        return RowFile(self.path / ROWS, episode_length)

    def probability_rows(self, episode_length: int) -> RowFile:
        """The rows of the reference and of the importance sampler."""
        return RowFile(self.path / PROBABILITY_ROWS, episode_length)

    def replace_rows(self, episodes: Sequence[Episode], probability: Sequence[Episode]) -> None:
        """Write all rows anew, for conversations that were rated again."""
        for name, chains in ((ROWS, episodes), (PROBABILITY_ROWS, probability)):
            (self.path / name).unlink(missing_ok=True)
            if chains:
                RowFile(self.path / name, 1).append([row for chain in chains for row in chain])

    def forget_rows(self) -> None:
        """Remove what was played, so that the same command plays it anew."""
        for name in (ROWS, PROBABILITY_ROWS, PARTS, TASK_ROWS):
            (self.path / name).unlink(missing_ok=True)

    def note_part(self, part: Mapping[str, Any]) -> None:
        """Keep what a part of the work took."""
        with (self.path / PARTS).open("ab") as file:
            file.write(encode_rows([part]))

    def parts(self) -> list[dict[str, Any]]:
        """What each part of the work took."""
        return read_rows(self.path / PARTS)

    def write(self, figures: Mapping[str, Any], table: str) -> None:
        """Write `evaluation.json` and the table, whole or not at all."""
        RunDirectory(self.path).write_json(FIGURES, dict(figures))
        (self.path / TABLE).write_text(table, encoding="utf-8")

    def figures(self) -> dict[str, Any]:
        """The content of `evaluation.json`.

        Raises
        ------
        RunDirectoryError
            When it is missing or broken.
        """
        found: dict[str, Any] = RunDirectory(self.path).read_json(FIGURES)
        return found

    def configuration(self) -> dict[str, Any]:
        """The configuration, empty where there is none."""
        return self._stored() or {}

    def _stored(self) -> dict[str, Any] | None:
        path = self.path / CONFIGURATION
        if not path.is_file():
            return None
        found: dict[str, Any] = RunDirectory(self.path).read_json(CONFIGURATION)
        return found


def configuration_hash(configuration: Mapping[str, Any]) -> str:
    """A digest of everything that changes an evaluation's result."""
    text = json.dumps(_without_hash(configuration), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], places: tuple[str, str] = ("there", "now")
) -> list[str]:
    """Say by dotted path what two configurations differ in.

    Parameters
    ----------
    places : tuple[str, str]
        Where each of them holds, for the text.
    """
    before = _flat(json.loads(json.dumps(_without_hash(stored))))
    after = _flat(json.loads(json.dumps(_without_hash(wanted))))
    nothing = "nothing"
    return [
        f"{path}: {_short(before.get(path, nothing))} {places[0]}, "
        f"{_short(after.get(path, nothing))} {places[1]}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path, nothing) != after.get(path, nothing)
    ]


def text_hash(texts: Sequence[str]) -> str:
    """A short digest of texts in order."""
    return hashlib.sha256("\x1f".join(texts).encode()).hexdigest()[:16]


def weights_files(folder: Path) -> list[Path]:
    """The files of a folder's weights, those of parts among them; a file is its own."""
    if folder.is_file():
        return [folder]
    # Imported here, since it needs torch, and stored figures do not.
    from nip_astra.checkpoints.shards import SHARDS

    patterns = ("*.safetensors", "*.bin", "*.gguf", f"{SHARDS}/*.safetensors")
    return sorted(file for pattern in patterns for file in folder.glob(pattern))


def weights_hash(folder: Path) -> str | None:
    """A short digest of a folder's weights; None where it is no folder of them."""
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


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        found: dict[str, Any] = {}
        for name, item in value.items():
            found |= _flat(item, f"{path}.{name}" if path else name)
        return found
    return {path: value}


def _short(value: Any) -> str:
    text = value if value == "nothing" else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""Digests of the data files that a run reads, to notice files that change before it is resumed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from nip_astra.errors import (
    ChangedDataError,
    ConfigurationError,
    DataError,
    RunDirectoryError,
)
from nip_astra.parameters.content import resolve_reference
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, MODEL_DIR, RunDirectory

logger = logging.getLogger(__name__)

DATA_FILES = "data_files.json"
"""File in the run directory with the digest of each data file, by its name in the parameters."""
MAX_WHOLE_BYTES = 1 << 28
"""Of a larger file, as of the weights of a model, parts are digested: reading all of it would take
longer than the rest of the start."""
NUM_SAMPLED_PARTS = 64
_PART_BYTES = 1 << 20
_CODE = (".py", ".pyc")
"""Suffixes of code, whose changes cause a warning elsewhere."""
_NO_DATA = ("scenario", "plugins", "custom_trainer_module_path", "base_run", "package_version")
"""Parameters that name no data: folders of many things, and code."""

_UNNAMED = ("scenario://prompts",)
"""Data that a scenario's folder may hold without a parameter: the prompts of a text protocol."""


def digest_data(resolved: ResolvedExperiment) -> dict[str, str]:
    """Return the SHA-256 digest of each local file or folder that the parameters name.

    Of files above `MAX_WHOLE_BYTES`, it is of their size and of evenly spaced parts. Names on the
    hub have none, and neither have files that a plug-in reads without a parameter.

    Raises
    ------
    DataError
        When a file cannot be read.
    """
    plain = resolved.hyper_params.to_dict()
    parameters = {name: value for name, value in plain.items() if name not in _NO_DATA}
    digests: dict[str, str] = {}
    for name in (*_texts_in(parameters), *_UNNAMED):
        path = _find_data(name, resolved.scenario_dir)
        if path is None or name in digests:
            continue
        try:
            digests[name] = _digest(path)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror or error}. Correct its permissions."
            ) from error
    return digests


def write_data_digests(directory: RunDirectory, resolved: ResolvedExperiment) -> None:
    """Store the digests of a run's data files in its directory."""
    directory.write_json(DATA_FILES, {"sha256": digest_data(resolved)})


def check_data_unchanged(
    directory: RunDirectory, resolved: ResolvedExperiment, *, allow_changed_data: bool = False
) -> None:
    """Compare the data files with those of the run's start; a run without digests gets them.

    Parameters
    ----------
    allow_changed_data : bool
        Continue with a warning, and from now on with the digests of the present files.

    Raises
    ------
    ChangedDataError
        When files have changed, naming them.
    """
    now = digest_data(resolved)
    before = _read_digests(directory)
    # A missing file is reported by the component that reads it.
    changed = sorted(name for name in now if name in before and now[name] != before[name])
    if changed and not allow_changed_data:
        files = ", ".join(changed)
        raise ChangedDataError(
            f"the run {directory.run_id!r} read other data than now in {files}. Restore "
            f"{'it' if len(changed) == 1 else 'them'}, or continue with --allow-changed-data."
        )
    if changed:
        logger.warning(
            "the run continues with changed data: %s; results differ from those of a run of either",
            ", ".join(changed),
            extra={"is_repeated_at_end": True},
        )
    if changed or not before:
        directory.write_json(DATA_FILES, {"sha256": {**before, **now}})


def _read_digests(directory: RunDirectory) -> dict[str, str]:
    """Return the digests of the run's start; none, with a warning, of an older run."""
    try:
        stored = directory.read_json(DATA_FILES)["sha256"]
        return {str(name): str(digest) for name, digest in stored.items()}
    except (RunDirectoryError, KeyError, AttributeError) as error:
        logger.warning(
            "the run %s has no digests of its data (%s), so changes since its start are not "
            "noticed; those from now on are",
            directory.run_id,
            "begun by an older version" if isinstance(error, RunDirectoryError) else DATA_FILES,
        )
        return {}


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in nested parameters."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts_in(part)


def _find_data(name: str, scenario_dir: Path | None) -> Path | None:
    """Return the file or folder that a parameter names; None if it names none."""
    if not name or "\n" in name:
        return None
    if "://" in name:
        try:
            found = Path(resolve_reference(name, scenario_dir))
        except (ConfigurationError, OSError):
            # An address, or a package that the component that needs it reports as missing.
            return None
        candidates = [found]
    else:
        path = Path(name).expanduser()
        # Some scenarios name files relative to their folder.
        candidates = [] if scenario_dir is None else [scenario_dir / path]
        # A word such as a protocol's name may be that of an unrelated folder.
        if "/" in name or path.suffix:
            candidates.insert(0, path)
            # A split of a folder: `data/mine:train[:80%]`.
            candidates.append(Path(name.partition(":")[0]).expanduser())
    for candidate in candidates:
        try:
            if candidate.suffix not in _CODE and (candidate.is_file() or candidate.is_dir()):
                return _without_run(candidate)
        except (OSError, ValueError):
            # A text that cannot be a file name.
            continue
    return None


def _without_run(path: Path) -> Path | None:
    """Return a path; of a run directory, whose records may grow, its trained model."""
    if not (path / HYPER_PARAMETERS).is_file():
        return path
    model = path / MODEL_DIR
    return model if model.is_dir() else None


def _digest(path: Path) -> str:
    """Return the digest of a file, or of the names and contents of a folder's files."""
    if path.is_file():
        return _digest_of_file(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path)
        is_hidden = any(part.startswith((".", "__pycache__")) for part in inside.parts)
        if file.is_file() and not is_hidden and file.suffix not in _CODE:
            digest.update(f"{inside.as_posix()} {_digest_of_file(file)}\n".encode())
    return digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= MAX_WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return _digest_of_parts(file, size)


def _digest_of_parts(file: BinaryIO, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    last_start = size - _PART_BYTES
    for number in range(NUM_SAMPLED_PARTS):
        file.seek(last_start * number // (NUM_SAMPLED_PARTS - 1))
        digest.update(file.read(_PART_BYTES))
    return digest.hexdigest()

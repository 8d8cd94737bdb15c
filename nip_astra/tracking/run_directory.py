"""The directory with all files of a run."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from nip_astra.errors import RunDirectoryError, nearest_names, reason_of
from nip_astra.safe_text import SafeFormatter, escape_for_yaml, has_unsafe, to_json
from nip_astra.tracking.figure_names import current_figure_name, with_nested_current_names
from nip_astra.tracking.run_lock import is_abandoned, run_lock
from nip_astra.trust import is_own, refuse_links_outside

HYPER_PARAMETERS = "hyper_parameters.yaml"
PARAMETER_SOURCES = "parameter_sources.json"
SETTINGS = "settings.yaml"
ENVIRONMENT = "environment.json"
RESULTS = "results.json"
FAILED = "failed"
"""`status` in the results of a run that failed and can be resumed."""
REPORT = "report.html"
LOG = "log.txt"
HAS_CHECKPOINTS = ".has_checkpoints"
"""File that exists from a run's first checkpoint on, to detect lost checkpoints."""
IS_TRACKED = ".is_tracked"
"""File that exists while trackers may lack records of the run."""
MODEL_DIR = "model"
"""Folder of a run directory with the trained model."""
OUTCOMES = "_outcomes"
"""Suffix of the name of a table in `rollouts/` with all episodes of a test, without messages."""
_UNFINISHED = ".new-"
"""Prefix of run directories that are being created or removed."""
_SECONDS_TO_BEGIN = 10.0
"""Age from which an unlocked directory counts as abandoned by a killed process."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def new_run_id(trainer: str, scenario: str) -> str:
    """Return a run id of trainer, scenario, time and four random digits."""
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = f"{trainer}-{Path(scenario).name}-{now}-{secrets.token_hex(2)}"
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip("._-")


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically: a crash or a full disk leaves the old file intact."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # In JSON, half of a surrogate pair can be written as its escape.
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RunDirectoryError(
            f"{path} cannot be written: {error.strerror or error}. Free space or change the "
            "permissions; the old file is unchanged."
        ) from error


def append_line(path: Path, line: bytes) -> None:
    """Append a whole line or nothing, so that the next one starts a new line.

    Several processes may append to a file.
    """
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            written = file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return YAML that OmegaConf reads back to equal values."""
    text = yaml.dump(dict(values), Dumper=_OmegaConfDumper, sort_keys=False, allow_unicode=True)
    return escape_for_yaml(text)


def escape_references(text: str) -> str:
    """Escape `${` so that OmegaConf reads it as text, not as a reference."""
    # An odd number of backslashes makes ${ plain text.
    return re.sub(r"(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", text)


def unescape_references(value: Any) -> Any:
    """Undo `escape_references` in nested values; references stay text."""
    if isinstance(value, str):
        return re.sub(r"(\\+)\$\{", _without_escape, value)
    if isinstance(value, Mapping):
        return {
            unescape_references(name): unescape_references(member) for name, member in value.items()
        }
    if isinstance(value, list):
        return [unescape_references(member) for member in value]
    return value


def _without_escape(match: re.Match[str]) -> str:
    # OmegaConf reads two backslashes before a reference as one.
    half, is_escaped = divmod(len(match[1]), 2)
    return f"{match[1][:half]}${{" if is_escaped else match[0]


class RunDirectory:
    """The files of one run; the directory name is the run id."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @classmethod
    def create(
        cls,
        runs_dir: str | Path,
        run_id: str,
        write: Callable[[RunDirectory], object] = lambda directory: None,
    ) -> RunDirectory:
        """Create a run directory with the files that `write` writes, atomically."""
        if not _RUN_ID.fullmatch(run_id):
            raise RunDirectoryError(
                f"the run id {run_id!r} cannot name a folder. Use letters, digits, dots, dashes "
                "and underscores."
            )
        path, new = Path(runs_dir) / run_id, Path(runs_dir) / f"{_UNFINISHED}{run_id}"
        try:
            str(path.absolute()).encode()
        except UnicodeEncodeError as error:
            raise RunDirectoryError(
                f"the folder {str(Path(runs_dir))!r} of the run {run_id!r} is not UTF-8. Choose "
                "another with --runs-dir, or rename it."
            ) from error
        try:
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            _remove_abandoned(new)
            new.mkdir(parents=True, exist_ok=True)
            with run_lock(new):
                try:
                    for folder in ("rollouts", "checkpoints"):
                        (new / folder).mkdir()
                    write(cls(new))
                    sync_folder(new)
                    new.rename(path)
                except BaseException:
                    shutil.rmtree(new, ignore_errors=True)
                    raise
            sync_folder(path.parent)
        except RunDirectoryError:
            raise
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise RunDirectoryError(
                    f"the run {run_id!r} exists already: {path}. Resume it with `nip-astra resume "
                    f"{path}`, or choose another --run-id."
                ) from error
            raise RunDirectoryError(
                f"the run directory {path} cannot be made: {error.strerror or error}. Choose a "
                "writable folder with --runs-dir."
            ) from error
        return cls(path)

    def discard(self) -> None:
        """Remove the directory, atomically."""
        unfinished = self.path.with_name(f"{_UNFINISHED}{self.path.name}")
        with suppress(OSError):
            self.path.rename(unfinished)
            shutil.rmtree(unfinished)

    def remove_leftovers(self) -> None:
        """Remove temporary files of a killed process."""
        for leftover in self.path.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open the directory of an existing run.

        Raises
        ------
        RunDirectoryError
            When it is none.
        UntrustedRunError
            When it is not the user's own, and has links out of its folder.
        """
        path = Path(path)
        if not (path / HYPER_PARAMETERS).is_file():
            raise RunDirectoryError(
                f"{path} is not a run: it holds no {HYPER_PARAMETERS}. Give the path of a run "
                "directory, for instance runs/<run id>."
            )
        directory = cls(path)
        directory.check_links()
        return directory

    def check_links(self) -> None:
        """Raise for links out of another user's run directory; see `refuse_links_outside`."""
        if not is_own(self.path / HYPER_PARAMETERS):
            refuse_links_outside(self.path)

    @classmethod
    def find(cls, run: str | Path, runs_dir: str | Path) -> RunDirectory:
        """Open the directory of an existing run by its path, or by its name in `runs_dir`."""
        is_path = len(Path(run).parts) != 1 or (Path(run) / HYPER_PARAMETERS).is_file()
        if is_path:
            return cls.open(run)
        path_by_name = Path(runs_dir) / run
        if path_by_name.is_dir():
            return cls.open(path_by_name)
        names = sorted(
            path.parent.name for path in Path(runs_dir).glob(f"[!.]*/{HYPER_PARAMETERS}")
        )
        near = nearest_names(str(run), names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RunDirectoryError(
            f"{runs_dir} holds no run {str(run)!r}.{hint} "
            "Give the name of one of its runs, or the path of a run directory."
        )

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self.path.resolve().name

    @property
    def has_ended(self) -> bool:
        """Whether the run has results, not only an error."""
        if not (self.path / RESULTS).is_file():
            return False
        return bool(self.read_json(RESULTS).get("status") != FAILED)

    @property
    def checkpoints_dir(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def rollouts_dir(self) -> Path:
        """Folder of the tables of sampled conversations."""
        return self.path / "rollouts"

    def write_json(self, name: str, value: Any) -> Path:
        """Write a JSON file atomically; NaN and infinities become null."""
        path = self.path / name
        text = to_json(finite(value), indent=2, allow_nan=False)
        write_atomically(path, text + "\n")
        return path

    def write_yaml(self, name: str, value: Mapping[str, Any]) -> Path:
        """Write a YAML file atomically."""
        path = self.path / name
        write_atomically(path, to_yaml(value))
        return path

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON object, with current names of figures.

        Raises
        ------
        RunDirectoryError
            When it is missing or broken.
        """
        content = self._read(name, json.loads)
        return {
            current_figure_name(key): with_nested_current_names(value)
            for key, value in content.items()
        }

    def read_yaml(self, name: str) -> dict[str, Any]:
        """Read a YAML mapping; raise `RunDirectoryError` if it is missing or broken."""
        return self._read(name, _parse_yaml)

    def _read(self, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        path = self.path / name
        try:
            content = parse(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("it holds no mapping of names to values")
            return content
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}," if mark is not None else ""
            reason = getattr(error, "problem", None) or reason_of(error)
            raise RunDirectoryError(
                f"{path}{line} is missing or broken: {reason}. Restore it; the run cannot be used "
                "without it."
            ) from error


@contextmanager
def log_file(directory: RunDirectory) -> Iterator[None]:
    """Write the package's log to log.txt within the block."""
    handler = logging.FileHandler(directory.path / LOG, encoding="utf-8")
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("nip_astra")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


class _OmegaConfDumper(yaml.SafeDumper):
    """Quotes text that OmegaConf would read as a number or an interpolation."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    escaped = escape_references(text)
    # 1e-5 and .5 are text to PyYAML and numbers to OmegaConf.
    is_number = escaped[:1] in set("+-.0123456789")
    style = '"' if is_number or has_unsafe(escaped) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", escaped, style=style)


_OmegaConfDumper.add_representer(str, _represent_text)


def _remove_abandoned(unfinished: Path) -> None:
    """Remove unfinished directories of killed processes, and `unfinished` however new it is."""
    for folder in unfinished.parent.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            is_old = time.time() - folder.stat().st_mtime > _SECONDS_TO_BEGIN
            if (is_old or folder == unfinished) and is_abandoned(folder):
                shutil.rmtree(folder)


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by null in a nested value."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse_yaml(text: str) -> Any:
    # Only a resumed run reads YAML here; a new one does not wait for OmegaConf.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # References are text: another user's run must not read this environment.
        return unescape_references(
            OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=False)
        )
    except OmegaConfBaseException as error:
        raise ValueError(str(error)) from error


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

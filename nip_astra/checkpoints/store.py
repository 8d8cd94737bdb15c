"""A folder of checkpoints.

A checkpoint is written to a temporary folder, synced and renamed; then the pointer `latest` is
updated. If the process is killed at any point, older checkpoints stay valid.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from nip_astra.errors import CheckpointError, NipAstraError
from nip_astra.tracking.run_directory import sync_folder

MANIFEST = "manifest.json"
FORMAT = "nip_astra.checkpoint"
VERSION = 1
LATEST, BEST = "latest", "best"
_NAME = re.compile(r"step_(\d{8,})(?:_r(\d+))?")


class CheckpointStore:
    """The most recent checkpoints of a run, and the best one.

    Parameters
    ----------
    about : Mapping, optional
        Metadata of every checkpoint.
    also_write : Callable[[Path], None], optional
        Writes further files of every checkpoint.
    marker : Path, optional
        A file created after the first checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        num_kept: int = 2,
        *,
        about: Mapping[str, Any] | None = None,
        also_write: Callable[[Path], None] | None = None,
        marker: Path | None = None,
    ) -> None:
        self.directory = directory
        self.num_kept = num_kept
        self.about = dict(about or {})
        self.also_write = also_write
        self.marker = marker

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        metadata: dict[str, Any],
        is_best: bool = False,
    ) -> Path:
        """Write a checkpoint with `write` and return its folder.

        `step` increases. A step saved again gets a new folder (`step_00000012_r2`); no checkpoint
        is ever overwritten.
        """
        with self._as_checkpoint_error(step):
            self.directory.mkdir(parents=True, exist_ok=True)
            self.remove_leftovers()
            name = self._unused_name(step)
            temporary = self.directory / f".tmp-{name}"
            try:
                temporary.mkdir()
                write(temporary)
                if self.also_write is not None:
                    self.also_write(temporary)
                write_manifest(temporary, step, {**metadata, **self.about}, is_best=is_best)
                temporary.rename(self.directory / name)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            sync_folder(self.directory)
            if is_best:
                self._point(BEST, name)
            self._point(LATEST, name)
            if self.marker is not None and not self.marker.exists():
                _write_synced(self.marker, name + "\n")
                sync_folder(self.marker.parent)
            self._prune()
        return self.directory / name

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        # A process killed in its first save may leave a complete checkpoint without a pointer.
        return self._follow(LATEST) or next(iter(reversed(self._all())), None)

    def best(self) -> Path | None:
        """Return the last checkpoint saved as best, or None."""
        named = self._follow(BEST)
        if named is not None:
            return named
        # A process killed in its first save may leave no pointer.
        for path in reversed(self._all()):
            if _manifest_of(path).get("is_best") is True:
                return path
        return None

    def named(self, name: str) -> Path:
        """Verify and return the checkpoint of a name."""
        names = [path.name for path in self._all()]
        if name not in names:
            raise CheckpointError(
                f"{self.directory} has no checkpoint {name!r}. Available: "
                f"{', '.join(names) or 'none'}, or {LATEST}."
            )
        self.verify(self.directory / name)
        return self.directory / name

    def open_best(self) -> Path:
        """Verify and return the last checkpoint saved as best."""
        path = self.best()
        if path is None:
            raise CheckpointError(
                f"{self.directory} has no best checkpoint. Restore the folder, or start a new run."
            )
        _, fault = inspect_folder(path)
        if fault:
            raise CheckpointError(
                f"best checkpoint {path}: {fault}. Restore it, or write the name of another one "
                f"into {self.directory / BEST}."
            )
        return path

    def verify(self, path: Path) -> dict[str, Any]:
        """Check every file of a checkpoint against its manifest, and return the manifest."""
        manifest, fault = inspect_folder(path)
        if fault:
            raise CheckpointError(f"checkpoint {path}: {fault}. {self._advice(path)}")
        return manifest

    def open_latest(self) -> tuple[Path, dict[str, Any]]:
        """Verify the newest checkpoint, and return it with its manifest."""
        path = self.latest()
        if path is None:
            raise CheckpointError(
                f"{self.directory} has no checkpoint to resume from. Start a new run with the same "
                "parameters."
            )
        return path, self.verify(path)

    def _advice(self, refused: Path | None, pointer: str = LATEST) -> str:
        for path in reversed(self._all()):
            _, fault = inspect_folder(path)
            if path != refused and not fault:
                return (
                    f"To use {path.name}, the newest valid checkpoint, write its name into "
                    f"{self.directory / pointer}."
                )
        return "There is no other valid checkpoint; start a new run."

    def _all(self) -> list[Path]:
        """Return the checkpoints, oldest first."""
        numbered_paths = []
        for path in self.directory.glob("step_*"):
            match = _NAME.fullmatch(path.name)
            if match is not None:
                step, revision = int(match[1]), int(match[2] or 1)
                numbered_paths.append((step, revision, path))
        return [path for _, _, path in sorted(numbered_paths)]

    def _unused_name(self, step: int) -> str:
        name, revision = f"step_{step:08d}", 1
        while (self.directory / name).exists():
            revision += 1
            name = f"step_{step:08d}_r{revision}"
        return name

    def _follow(self, pointer: str) -> Path | None:
        try:
            text = (self.directory / pointer).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        name = text.strip()
        if not _NAME.fullmatch(name):
            raise CheckpointError(
                f"{self.directory / pointer} must name a checkpoint, got {name[:60]!r}. "
                f"{self._advice(None, pointer)}"
            )
        return self.directory / name

    def _point(self, pointer: str, name: str) -> None:
        temporary = self.directory / f".tmp-{pointer}"
        _write_synced(temporary, name + "\n")
        temporary.replace(self.directory / pointer)
        sync_folder(self.directory)

    def _prune(self) -> None:
        kept_names = {path.name for path in self._all()[-self.num_kept :]}
        kept_names.update(path.name for path in (self.latest(), self.best()) if path is not None)
        for path in self._all():
            if path.name not in kept_names:
                # Renamed first, so that a partly removed checkpoint does not look corrupt.
                removed = self.directory / f".tmp-{path.name}"
                path.rename(removed)
                shutil.rmtree(removed)

    def remove_leftovers(self) -> None:
        """Remove temporary files of a killed process."""
        for leftover in self.directory.glob(".tmp-*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()

    @contextmanager
    def _as_checkpoint_error(self, step: int) -> Iterator[None]:
        try:
            yield
        except NipAstraError:
            # Not a storage error, for instance an unavailable service.
            raise
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"cannot save the checkpoint of step {step} in {self.directory}: {reason}. Free "
                "space or change the permissions; older checkpoints are unchanged."
            ) from error


def write_manifest(folder: Path, step: int, metadata: dict[str, Any], *, is_best: bool) -> None:
    """Sync every file of a folder and write its manifest."""
    files = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        files[file.relative_to(folder).as_posix()] = {
            "sha256": digest_of_file(file),
            "size": file.stat().st_size,
        }
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "is_best": is_best,
        "metadata": metadata,
        "files": files,
    }
    manifest["manifest_sha256"] = _manifest_digest(manifest)
    _write_synced(folder / MANIFEST, json.dumps(manifest, indent=2))
    for subfolder in (path for path in folder.rglob("*") if path.is_dir()):
        sync_folder(subfolder)
    sync_folder(folder)


def inspect_folder(path: Path) -> tuple[dict[str, Any], str]:
    """Return the manifest of a folder, and its first fault or an empty string."""
    if not path.is_dir():
        return {}, "the folder does not exist"
    manifest = _manifest_of(path)
    if not manifest:
        return {}, f"{MANIFEST} is missing or corrupt"
    if manifest.get("format") != FORMAT:
        return {}, "it was not written by nip_astra"
    version = manifest.get("version")
    if not isinstance(version, int) or version > VERSION:
        return {}, (
            f"format version {version} is newer than {VERSION}; install the version that wrote it"
        )
    if manifest.get("manifest_sha256") != _manifest_digest(manifest):
        return {}, f"{MANIFEST} is corrupt"
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return {}, f"{name} is missing"
        if file.stat().st_size != expected["size"] or digest_of_file(file) != expected["sha256"]:
            return {}, f"{name} is corrupt"
    return manifest, ""


def _manifest_of(path: Path) -> dict[str, Any]:
    """Return the manifest of a folder, empty if it is missing or no JSON object."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _manifest_digest(manifest: dict[str, Any]) -> str:
    # JSON converts numeric keys to strings.
    content = json.loads(json.dumps(manifest))
    content.pop("manifest_sha256", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of_file(file: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

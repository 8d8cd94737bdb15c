"""Training runs of Tinker's protocol and their checkpoints, as folders."""

from __future__ import annotations

import json
import re
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from nip_astra.serve.requests import ApiError, bad_request
from nip_astra.tracking.run_directory import write_atomically

CheckpointKind = Literal["training", "sampler"]
FOLDERS: dict[CheckpointKind, str] = {"training": "weights", "sampler": "sampler_weights"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Valid names of checkpoints; paths are invalid."""
UNNAMED = "unnamed-"
"""Start of a generated name. Unnamed weights to sample from end with their session."""
RUN = re.compile(r"[A-Za-z0-9-]+:train:[0-9]+")
LAST_TIME = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""Latest displayed time; an earlier version allowed longer lifetimes."""
_DESCRIPTION = "checkpoint.json"
_RUN = "run.json"


@dataclass(frozen=True)
class LoraShape:
    """Size and target layers of an adapter, in the terms of the protocol."""

    rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


@dataclass(frozen=True)
class RunRecord:
    """A training run."""

    run_id: str
    base_model: str
    lora: LoraShape
    user_metadata: dict[str, str] | None
    created: float


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run; deleted after the time `expires`, if there is one."""

    run_id: str
    kind: CheckpointKind
    name: str
    folder: Path
    created: float
    expires: float | None
    user_metadata: dict[str, str] | None

    @property
    def checkpoint_id(self) -> str:
        return f"{FOLDERS[self.kind]}/{self.name}"

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.checkpoint_id}"

    def card(self) -> dict[str, Any]:
        """Return the checkpoint in the form of the SDK's `Checkpoint`."""
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        expires_at = None if self.expires is None else iso_time(self.expires)
        return {
            "checkpoint_id": self.checkpoint_id,
            "checkpoint_type": self.kind,
            "time": iso_time(self.created),
            "tinker_path": self.path,
            "size_bytes": size,
            "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": expires_at,
        }


class CheckpointFolder:
    """The folder of all runs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def clear_unfinished(self) -> None:
        """Remove what a killed service left: interrupted writes, and unnamed weights."""
        for pattern in ("unfinished-*", f"{FOLDERS['sampler']}/{UNNAMED}{'[0-9a-f]' * 32}"):
            for path in self.root.glob(f"*/{pattern}"):
                shutil.rmtree(path, ignore_errors=True)

    # ---- runs

    def add_run(self, record: RunRecord) -> None:
        folder = self._run_folder(record.run_id)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _RUN, json.dumps(asdict(record)))

    def run(self, run_id: str) -> RunRecord:
        """Return a run by its id; raise `ApiError` 404 without one."""
        path = self._run_folder(run_id) / _RUN if RUN.fullmatch(run_id) else None
        if path is None or not path.exists():
            raise ApiError(
                404,
                f"this service has no training run {run_id[:200]!r}. List them by "
                "list_training_runs of the SDK's RestClient.",
                code="run_not_found",
            )
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["lora"] = LoraShape(**fields["lora"])
        return RunRecord(**fields)

    def runs(self) -> list[RunRecord]:
        """Return every run, newest first."""
        names = [path.parent.name for path in self.root.glob(f"*/{_RUN}")]
        records = [self.run(name.replace("_", ":")) for name in names]
        return sorted(records, key=lambda record: -record.created)

    def _run_folder(self, run_id: str) -> Path:
        # Windows allows no colon in a name.
        return self.root / run_id.replace(":", "_")

    # ---- checkpoints

    def save(
        self,
        run_id: str,
        kind: CheckpointKind,
        name: str | None,
        write: Callable[[Path], None],
        *,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint atomically; `name` None generates one."""
        name = f"{UNNAMED}{uuid.uuid4().hex}" if name is None else name
        if not NAME.fullmatch(name):
            raise bad_request(
                f"invalid name {name[:200]!r} of a checkpoint. Use at most 200 letters, digits, "
                "dots, dashes and underscores.",
                "path",
            )
        folder = self._run_folder(run_id) / FOLDERS[kind] / name
        if self._read(run_id, kind, folder) is not None and not overwrite:
            raise bad_request(
                f"the run has a checkpoint {name!r}. Give another name, or overwrite=True.",
                "path",
            )
        unfinished = self._run_folder(run_id) / f"unfinished-{uuid.uuid4().hex}"
        unfinished.mkdir(parents=True)
        try:
            write(unfinished)
            _write_description(unfinished, time.time(), ttl_seconds, user_metadata)
            folder.parent.mkdir(exist_ok=True)
            # A folder cannot replace another that is not empty, so the old one is moved away.
            replaced = unfinished.with_suffix(".old")
            if folder.exists():
                folder.rename(replaced)
            unfinished.rename(folder)
            shutil.rmtree(replaced, ignore_errors=True)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        checkpoint = self._read(run_id, kind, folder)
        assert checkpoint is not None
        return checkpoint

    def find(self, path: str) -> Checkpoint:
        run_id, _, rest = path.removeprefix("tinker://").partition("/")
        if not path.startswith("tinker://"):
            raise bad_request(
                f"invalid path {path[:200]!r} of a checkpoint. Give a tinker:// path of save_state "
                "or save_weights_for_sampler."
            )
        return self.get(run_id, rest)

    def get(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        """Return a checkpoint of a run by its name there; raise `ApiError` 404 without one."""
        folder_name, _, name = checkpoint_id.partition("/")
        kinds = {folder: kind for kind, folder in FOLDERS.items()}
        # The patterns also keep a name from leaving the folder.
        if folder_name in kinds and NAME.fullmatch(name) and RUN.fullmatch(run_id):
            folder = self._run_folder(run_id) / folder_name / name
            checkpoint = self._read(run_id, kinds[folder_name], folder)
            if checkpoint is not None:
                return checkpoint
        raise ApiError(
            404,
            f"this service has no checkpoint 'tinker://{run_id[:200]}/{checkpoint_id[:200]}'; "
            "it may have expired. List them by list_user_checkpoints of the SDK's RestClient.",
            code="checkpoint_not_found",
        )

    def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """Return every checkpoint of a run, oldest first."""
        run_folder = self._run_folder(self.run(run_id).run_id)
        checkpoints = []
        for kind, folder_name in FOLDERS.items():
            for path in (run_folder / folder_name).glob("*"):
                checkpoint = self._read(run_id, kind, path)
                if checkpoint is not None:
                    checkpoints.append(checkpoint)
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.created)

    def delete(self, checkpoint: Checkpoint) -> None:
        shutil.rmtree(checkpoint.folder, ignore_errors=True)

    def set_ttl(self, checkpoint: Checkpoint, ttl_seconds: int | None) -> None:
        """Change the lifetime of a checkpoint, from now on."""
        _write_description(
            checkpoint.folder, checkpoint.created, ttl_seconds, checkpoint.user_metadata
        )

    def _read(self, run_id: str, kind: CheckpointKind, folder: Path) -> Checkpoint | None:
        """Return the checkpoint in a folder; None without one, or if it has expired."""
        try:
            description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        except OSError:
            return None
        checkpoint = Checkpoint(run_id, kind, folder.name, folder, **description)
        # Deleted when it is next looked at; nothing watches the time.
        if checkpoint.expires is not None and checkpoint.expires < time.time():
            self.delete(checkpoint)
            return None
        return checkpoint


def iso_time(seconds: float) -> str:
    """Format a time as in the protocol."""
    return datetime.fromtimestamp(min(seconds, LAST_TIME), UTC).isoformat()


def _write_description(
    folder: Path, created: float, ttl_seconds: int | None, user_metadata: dict[str, str] | None
) -> None:
    expires = None if ttl_seconds is None else time.time() + ttl_seconds
    description = {"created": created, "expires": expires, "user_metadata": user_metadata}
    write_atomically(folder / _DESCRIPTION, json.dumps(description))

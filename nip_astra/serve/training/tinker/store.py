"""What clients of Tinker's protocol save: training runs and their checkpoints, as folders."""

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

from nip_astra.serve.api_errors import ApiError, wrong

CheckpointKind = Literal["training", "sampler"]
FOLDERS: dict[CheckpointKind, str] = {"training": "weights", "sampler": "sampler_weights"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""What a checkpoint may be called; no path is a name."""
RUN = re.compile(r"[A-Za-z0-9-]+:train:[0-9]+")
LAST_TIME = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""What is to be kept for longer, as an earlier version allowed, is shown as kept up to here."""
_ABOUT, _RUN = "checkpoint.json", "run.json"


@dataclass(frozen=True)
class LoraShape:
    """Size and place of an adapter, in the words of the protocol."""

    rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


@dataclass(frozen=True)
class RunRecord:
    """A training run.

    Attributes
    ----------
    base_model : str
        As the client named it.
    """

    run_id: str
    base_model: str
    lora: LoraShape
    user_metadata: dict[str, str] | None
    created: float


@dataclass(frozen=True)
class Checkpoint:
    """Something saved of a run.

    Attributes
    ----------
    expires : float or None
        Time after which it is gone; None for never.
    """

    run_id: str
    kind: CheckpointKind
    name: str
    folder: Path
    created: float
    expires: float | None
    user_metadata: dict[str, str] | None

    @property
    def checkpoint_id(self) -> str:
        """Its name within the run."""
        return f"{FOLDERS[self.kind]}/{self.name}"

    @property
    def path(self) -> str:
        """The address by which clients name it."""
        return f"tinker://{self.run_id}/{self.checkpoint_id}"

    def card(self) -> dict[str, Any]:
        """What clients are told of it."""
        size = sum(one.stat().st_size for one in self.folder.rglob("*") if one.is_file())
        return {
            "checkpoint_id": self.checkpoint_id,
            "checkpoint_type": self.kind,
            "time": told_time(self.created),
            "tinker_path": self.path,
            "size_bytes": size,
            "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": None if self.expires is None else told_time(self.expires),
        }


class CheckpointFolder:
    """The folder of all runs.

    Parameters
    ----------
    root : Path
        Made where it is not there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    # ---- runs

    def add_run(self, record: RunRecord) -> None:
        """Remember a run."""
        folder = self._run_folder(record.run_id)
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / _RUN, asdict(record))

    def run(self, run_id: str) -> RunRecord:
        """A run by its id.

        Raises
        ------
        ApiError
            404 where there is none.
        """
        path = self._run_folder(run_id) / _RUN if RUN.fullmatch(run_id) else None
        if path is None or not path.exists():
            raise ApiError(
                404,
                f"the training run {run_id[:200]!r} was asked for, but this service has none of "
                "that id. List them by list_training_runs of the SDK's RestClient.",
                code="run_not_found",
            )
        given = json.loads(path.read_text(encoding="utf-8"))
        return RunRecord(**{**given, "lora": LoraShape(**given["lora"])})

    def runs(self) -> list[RunRecord]:
        """Every run, the newest first."""
        names = [path.parent.name for path in self.root.glob(f"*/{_RUN}")]
        records = [self.run(name.replace("_", ":")) for name in names]
        return sorted(records, key=lambda record: -record.created)

    def _run_folder(self, run_id: str) -> Path:
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
        """Write a checkpoint as a whole: a service that is killed meanwhile leaves none.

        Parameters
        ----------
        name : str or None
            None takes one of its own.
        write : Callable
            Called with a folder to write into.
        """
        name = uuid.uuid4().hex if name is None else name
        if not NAME.fullmatch(name):
            raise wrong(
                f"a checkpoint was to be saved as {name[:200]!r}, but a name consists of up to 200 "
                "letters, digits, dots, dashes and underscores. Give one of these.",
                "path",
            )
        folder = self._run_folder(run_id) / FOLDERS[kind] / name
        if self._read(run_id, kind, folder) is not None and not overwrite:
            raise wrong(
                f"a checkpoint was to be saved as {name!r}, but the run has one of that name. Give "
                "another name, or overwrite=True.",
                "path",
            )
        unfinished = self._run_folder(run_id) / f"unfinished-{uuid.uuid4().hex}"
        unfinished.mkdir(parents=True)
        try:
            write(unfinished)
            now = time.time()
            about = {
                "created": now,
                "expires": None if ttl_seconds is None else now + ttl_seconds,
                "user_metadata": user_metadata,
            }
            _write_json(unfinished / _ABOUT, about)
            folder.parent.mkdir(exist_ok=True)
            if folder.exists():
                folder.rename(unfinished.with_suffix(".old"))
            unfinished.rename(folder)
            shutil.rmtree(unfinished.with_suffix(".old"), ignore_errors=True)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        found = self._read(run_id, kind, folder)
        assert found is not None
        return found

    def find(self, path: str) -> Checkpoint:
        """A checkpoint by its address.

        Raises
        ------
        ApiError
            404 where there is none.
        """
        run_id, _, rest = path.removeprefix("tinker://").partition("/")
        if not path.startswith("tinker://"):
            raise wrong(
                f"a checkpoint was named as {path[:200]!r}, but addresses begin with tinker://. "
                "Give one that save_state or save_weights_for_sampler gave."
            )
        return self.get(run_id, rest)

    def get(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        """A checkpoint of a run, by its name there."""
        folder_name, _, name = checkpoint_id.partition("/")
        kinds = {folder: kind for kind, folder in FOLDERS.items()}
        found = None
        if folder_name in kinds and NAME.fullmatch(name) and RUN.fullmatch(run_id):
            kind = kinds[folder_name]
            found = self._read(run_id, kind, self._run_folder(run_id) / folder_name / name)
        if found is None:
            raise ApiError(
                404,
                f"the checkpoint 'tinker://{run_id[:200]}/{checkpoint_id[:200]}' was asked for, "
                "but this service has none of that address: it was never saved here, was deleted, "
                "or has expired. List them by list_user_checkpoints of the SDK's RestClient.",
                code="checkpoint_not_found",
            )
        return found

    def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """Every checkpoint of a run, in the order in which they were saved."""
        folder = self._run_folder(self.run(run_id).run_id)
        found = [
            self._read(run_id, kind, path)
            for kind, name in FOLDERS.items()
            for path in (folder / name).glob("*")
        ]
        return sorted((one for one in found if one is not None), key=lambda one: one.created)

    def delete(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(checkpoint.folder, ignore_errors=True)

    def set_ttl(self, checkpoint: Checkpoint, ttl_seconds: int | None) -> None:
        """Change when a checkpoint is gone."""
        about = {
            "created": checkpoint.created,
            "expires": None if ttl_seconds is None else time.time() + ttl_seconds,
            "user_metadata": checkpoint.user_metadata,
        }
        _write_json(checkpoint.folder / _ABOUT, about)

    def _read(self, run_id: str, kind: CheckpointKind, folder: Path) -> Checkpoint | None:
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        except OSError:
            return None
        found = Checkpoint(run_id, kind, folder.name, folder, **about)
        if found.expires is not None and found.expires < time.time():
            self.delete(found)
            return None
        return found


def told_time(seconds: float) -> str:
    """A time as the protocol writes it."""
    return datetime.fromtimestamp(min(seconds, LAST_TIME), UTC).isoformat()


def _write_json(path: Path, value: Any) -> None:
    written = path.with_suffix(".new")
    written.write_text(json.dumps(value), encoding="utf-8")
    written.replace(path)

"""Outcomes of calls that a time limit may cut, kept for the run that is resumed.

A parameter may limit a call: a tool's program stops after `seconds`, a scorer after
`timeout_seconds`, a request after `attempt_timeout`. Whether the limit is met depends on the load
of a machine, so a resumed run must not make the call again. A run appends each outcome to a file as
soon as it is known, whether the call was cut or not. A new file begins with each checkpoint, and
a run resumed from it takes the outcomes that follow, in the order in which they were kept. A run
that ends with an error keeps none since its last checkpoint: what has failed is called again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from nip_astra.errors import RunDirectoryError
from nip_astra.tracking.run_directory import append_line

FOLDER = "call_outcomes"
"""Folder of a run directory with the outcomes since its last checkpoints."""
NUM_FILES_KEPT = 2
"""Files that stay: a run whose newest checkpoint is damaged continues from the one before."""
_BEGINNING = "beginning"
"""Stem of the file before a run's first checkpoint; those of later ones are named after these."""
_CHECKPOINT = re.compile(r"step_(\d+)(?:_r(\d+))?")


class KeptOutcome(NamedTuple):
    """An outcome of a call."""

    key: str
    """Digest of the call's kind, position and arguments."""
    value: Any
    """Plain values of JSON."""


class CallOutcomes:
    """Outcomes kept by a run, and those that an earlier process of the run has kept.

    Parameters
    ----------
    folder : Path, optional
        Where outcomes are appended; None keeps them in memory, for a worker process that returns
        them.
    checkpoint : str, optional
        Name of the checkpoint from which the run continues; None at its beginning.
    earlier : sequence of KeptOutcome
        Outcomes of an earlier process, for a worker process.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        checkpoint: str | None = None,
        earlier: Sequence[KeptOutcome] = (),
    ) -> None:
        self.new: list[KeptOutcome] = []
        """Outcomes since this object was made, if they are kept in memory."""
        self._folder, self._stem = folder, checkpoint or _BEGINNING
        self._lock = threading.Lock()
        self._earlier: dict[str, deque[KeptOutcome]] = defaultdict(deque)
        self._taken: list[str] = []
        if folder is not None:
            earlier = self._read_files()
        for outcome in earlier:
            self._earlier[outcome.key].append(outcome)

    def take(self, key: str) -> KeptOutcome | None:
        """Return the first outcome of a call that was kept and not taken yet; None without one."""
        with self._lock:
            outcomes = self._earlier.get(key)
            if not outcomes:
                return None
            if self._folder is None:
                self._taken.append(key)
            return outcomes.popleft()

    def keep(self, outcome: KeptOutcome) -> None:
        """Append an outcome."""
        if self._folder is None:
            self.new.append(outcome)
            return
        with self._lock:
            self._append(list(outcome))

    def forget(self) -> None:
        """Remove the outcomes since the last checkpoint, so that later processes call again."""
        if self._folder is not None:
            (self._folder / f"{self._stem}.jsonl").unlink(missing_ok=True)

    def remaining(self) -> list[KeptOutcome]:
        """Return the outcomes of an earlier process that were not taken yet, for a worker."""
        with self._lock:
            return [outcome for outcomes in self._earlier.values() for outcome in outcomes]

    def of_worker(self) -> tuple[list[str], list[KeptOutcome]]:
        """Return the keys of taken outcomes, and the new outcomes, for `adopt`."""
        return self._taken, self.new

    def adopt(self, taken: Sequence[str], new: Sequence[Sequence[Any]]) -> None:
        """Keep what a worker returns as `of_worker`."""
        for key in taken:
            self.take(key)
        for outcome in new:
            self.keep(KeptOutcome(*outcome))

    def begin_after(self, checkpoint: str) -> None:
        """Begin the file of a new checkpoint, which has everything that was kept so far."""
        with self._lock:
            self._stem = checkpoint
            self._earlier.clear()
            if self._folder is not None:
                older = [path for path in self._files() if path.stem != checkpoint]
                for path in older[: 1 - NUM_FILES_KEPT]:
                    path.unlink(missing_ok=True)

    def renew_lock(self) -> None:
        """Make a new lock, in a forked process: another thread may have held the old one."""
        self._lock = threading.Lock()

    def _append(self, fields: list[Any]) -> None:
        assert self._folder is not None
        path = self._folder / f"{self._stem}.jsonl"
        line = json.dumps(fields, ensure_ascii=True) + "\n"
        try:
            self._folder.mkdir(exist_ok=True)
            append_line(path, line.encode())
        except OSError as error:
            raise RunDirectoryError(
                f"{path} cannot be written: {error.strerror or error}. Free space or change the "
                "permissions, then resume the run."
            ) from error

    def _files(self) -> list[Path]:
        """Return the files in the order of their checkpoints."""
        assert self._folder is not None
        return sorted(self._folder.glob("*.jsonl"), key=lambda path: _order_of(path.stem))

    def _read_files(self) -> list[KeptOutcome]:
        """Return the outcomes kept since the checkpoint from which the run continues."""
        outcomes: list[KeptOutcome] = []
        for path in self._files():
            if _order_of(path.stem) < _order_of(self._stem):
                continue
            *lines, unfinished = path.read_bytes().split(b"\n")
            if unfinished:
                # A process was killed while it wrote.
                os.truncate(path, path.stat().st_size - len(unfinished))
            outcomes += [KeptOutcome(*json.loads(line)) for line in lines]
        return outcomes


def _order_of(stem: str) -> tuple[int, int]:
    """Return step and revision of a checkpoint; those of the beginning come first."""
    match = _CHECKPOINT.fullmatch(stem)
    return (-1, 0) if match is None else (int(match[1]), int(match[2] or 1))


_outcomes: CallOutcomes | None = None
"""Those of the run of this process."""
_position: ContextVar[tuple[Any, ...]] = ContextVar("position of a call", default=())


def current_outcomes() -> CallOutcomes | None:
    """Return the outcomes of the run of this process; None without a run."""
    return _outcomes


@contextmanager
def using_outcomes(outcomes: CallOutcomes | None) -> Iterator[None]:
    """Keep outcomes within the block, in all threads; None keeps and takes none."""
    global _outcomes
    before, _outcomes = _outcomes, outcomes
    try:
        yield
    finally:
        _outcomes = before


@contextmanager
def call_position(*position: str | int) -> Iterator[None]:
    """Name the place in the run of the calls within the block, in this thread.

    Calls that run at once need different places, since the order in which they end may change.
    """
    token = _position.set(position)
    try:
        yield
    finally:
        _position.reset(token)


def key_of_call(kind: str, arguments: Any) -> str:
    """Return the key of a call, here and now."""
    text = json.dumps([kind, _position.get(), arguments], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def kept_outcome(kind: str, arguments: Any, call: Callable[[], Any]) -> Any:
    """Return the outcome of a call that a time limit may cut.

    A resumed run gets the outcome that was kept for the same arguments at the same position, and
    does not call again.

    Parameters
    ----------
    arguments, and the result of `call`
        Plain values of JSON.
    """
    outcomes = _outcomes
    if outcomes is None:
        return call()
    key = key_of_call(kind, arguments)
    earlier = outcomes.take(key)
    if earlier is not None:
        return earlier.value
    value = call()
    outcomes.keep(KeptOutcome(key, value))
    return value


def _after_fork() -> None:
    if _outcomes is not None:
        _outcomes.renew_lock()


os.register_at_fork(after_in_child=_after_fork)

"""Journal of chat models' responses, so that a killed run repeats no request."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nip_astra.errors import CheckpointError, DataError, RunDirectoryError
from nip_astra.safe_text import valid_text


@dataclass(frozen=True)
class StoredResponses:
    """The responses to one request, one per sample.

    `failures` has an empty text where there is a response. `are_final` marks samples whose model
    has retried already; it is empty if none has. Tokens are those of all samples.
    """

    texts: tuple[str, ...]
    are_cut: tuple[bool, ...]
    failures: tuple[str, ...]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cached: bool = False
    are_final: tuple[bool, ...] = ()


@dataclass
class AnswerJournal:
    """Responses by request id, in memory and, with a `path`, in a file of JSON lines.

    `run_key` names the run at its services. With `is_replayed` every request must be in the
    journal, since the models that answered no longer exist.
    """

    path: Path | None = None
    run_key: str | None = None
    is_replayed: bool = False
    _by_id: dict[str, StoredResponses] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self._by_id = dict(self._read(self.path))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> StoredResponses | None:
        """Return the responses to a request; None if it is new."""
        found = self._by_id.get(request_id)
        if found is None and self.is_replayed:
            raise CheckpointError(
                f"{self.path} lacks the answers to {request_id}. Restore the file, or start a new "
                "run."
            )
        return found

    def put(self, request_id: str, answers: StoredResponses) -> None:
        """Store the responses to a request; they are in the file when this returns."""
        self._by_id[request_id] = answers
        if self.path is not None:
            line = json.dumps({"id": request_id, **vars(answers)}, ensure_ascii=False) + "\n"
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _append(self.path, line.encode("utf-8", "backslashreplace"))
            except OSError as error:
                raise RunDirectoryError(
                    f"cannot write {self.path}: {error.strerror or error}. Free space or change "
                    "the permissions, and resume the run."
                ) from error

    def tokens(self) -> tuple[int, int]:
        """Return the paid tokens of prompts and of answers."""
        paid = [one for one in self._by_id.values() if not one.is_cached]
        return sum(one.prompt_tokens for one in paid), sum(one.completion_tokens for one in paid)

    def _read(self, path: Path) -> Iterator[tuple[str, StoredResponses]]:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            # A killed process leaves half a line; the next record must begin a new one.
            with path.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], start=1):
            try:
                values = json.loads(line)
                request_id = values.pop("id")
                lists = {name: tuple(one) for name, one in values.items() if isinstance(one, list)}
                for name in ("texts", "failures"):
                    lists[name] = tuple(map(valid_text, lists[name]))
                yield request_id, StoredResponses(**(values | lists))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"line {number} of {path} is corrupt: {error!r}. Remove the line; its request "
                    "is repeated."
                ) from error


def _append(path: Path, line: bytes) -> None:
    """Append a whole line or nothing, so that the next answer starts a new line."""
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

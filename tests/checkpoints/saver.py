"""Save a checkpoint and kill the own process at a chosen call to the file system.

Run as `python saver.py DIRECTORY STEP KILL_AT`. If fewer than KILL_AT calls are made, the
process ends with status 0, so that a test can go through all of them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nip_astra.checkpoints.store import CheckpointStore

WATCHED = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "open")


def main() -> None:
    directory, step, kill_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    num_calls = 0

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    for name in WATCHED:
        setattr(os, name, watched(getattr(os, name)))

    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(bytes([step]) * 5000)

    CheckpointStore(directory, num_kept=2).save(
        step, write, metadata={"step": step}, is_best=step == 1
    )


main()

"""What a launcher such as torchrun says of the processes that it started."""

from __future__ import annotations

import os


def is_one_of_several() -> bool:
    """Say whether a launcher has started this process as one of a run's."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ


def rank_of_process() -> int:
    """Which process of its run this is, as the launcher says; 0 where there is none."""
    return int(os.environ["RANK"]) if is_one_of_several() else 0


def processes_on_this_machine() -> int:
    """How many processes of the run share the cores of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if is_one_of_several() else 1

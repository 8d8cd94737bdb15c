"""Rank and number of processes, as set by a launcher such as torchrun."""

from __future__ import annotations

from nip_astra.errors import ConfigurationError
from nip_astra.trust import read_variable


def is_one_of_several() -> bool:
    """Return whether a launcher started this process as one of several."""
    return num_processes() > 1 and read_variable("RANK") is not None


def num_processes() -> int:
    """Return the number of processes that train the run."""
    return _number("WORLD_SIZE", default=1, least=1)


def rank_of_process() -> int:
    """Return the rank of this process; 0 without a launcher."""
    if not is_one_of_several():
        return 0
    rank, size = _number("RANK", default=0), num_processes()
    if rank >= size:
        raise ConfigurationError(
            f"RANK is {rank}, but WORLD_SIZE is {size}. Give each process a RANK from 0 to "
            f"{size - 1}, or start all of them by torchrun."
        )
    return rank


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return _number("LOCAL_RANK", default=0)


def processes_on_this_machine() -> int:
    """Return the number of the run's processes on this machine."""
    return _number("LOCAL_WORLD_SIZE", default=1, least=1) if is_one_of_several() else 1


def _number(name: str, *, default: int, least: int = 0) -> int:
    given = read_variable(name) or str(default)
    # int() raises for thousands of digits.
    if not (given.isascii() and given.isdigit() and len(given) < 10 and int(given) >= least):
        raise ConfigurationError(
            f"the environment variable {name} is {given[:40]!r}. Give a whole number from {least}, "
            "or unset it to train in one process."
        )
    return int(given)

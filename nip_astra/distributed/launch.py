"""Rank and number of processes, as set by a launcher such as torchrun."""

from __future__ import annotations

from nip_astra.errors import ConfigurationError
from nip_astra.trust import read_variable


def is_one_of_several() -> bool:
    """Return whether a launcher started this process as one of several."""
    return num_processes() > 1 and read_variable("RANK") is not None


def num_processes() -> int:
    """Return the number of processes that train the run."""
    return _read_number("WORLD_SIZE", default=1, minimum=1)


def rank_of_process() -> int:
    """Return the rank of this process; 0 without a launcher."""
    if not is_one_of_several():
        return 0
    rank = _read_number("RANK", default=0)
    size = num_processes()
    if rank >= size:
        raise ConfigurationError(
            f"RANK is {rank}, but WORLD_SIZE is {size}. Give each process a RANK from 0 to "
            f"{size - 1}, or start all of them by torchrun."
        )
    return rank


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return _read_number("LOCAL_RANK", default=0)


def processes_on_this_machine() -> int:
    """Return the number of the run's processes on this machine."""
    if not is_one_of_several():
        return 1
    return _read_number("LOCAL_WORLD_SIZE", default=1, minimum=1)


def _read_number(name: str, *, default: int, minimum: int = 0) -> int:
    """Return the number in an environment variable; `default` if it is unset or empty."""
    text = read_variable(name) or str(default)
    # int() raises for thousands of digits.
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    if not is_number or int(text) < minimum:
        raise ConfigurationError(
            f"the environment variable {name} is {text[:40]!r}. Give a whole number from "
            f"{minimum}, or unset it to train in one process."
        )
    return int(text)

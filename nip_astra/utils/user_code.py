"""Calls of users' functions that leave the process as it was."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from nip_astra.errors import UserCodeError

logger = logging.getLogger(__name__)


@contextmanager
def process_state_kept(name: str) -> Iterator[None]:
    """Undo changes of the process that a user's function makes in the block.

    torch's default dtype, which decides the type of all later tensors, is restored with a warning.
    An alarm that the function leaves behind is cancelled, and the handler of alarms and a timer
    that ran before are restored. Alarms are a matter of the main thread alone.

    Parameters
    ----------
    name : str
        The function, for messages.

    Raises
    ------
    UserCodeError
        If an alarm of the function ends within the block and the function has no handler of
        alarms; Python would end the process.
    """
    dtype = torch.get_default_dtype()
    try:
        with _alarms_kept(name):
            yield
    finally:
        if torch.get_default_dtype() != dtype:
            logger.warning(
                "%s set torch's default dtype to %s; it is %s again. Convert tensors instead.",
                name,
                torch.get_default_dtype(),
                dtype,
            )
            torch.set_default_dtype(dtype)


@contextmanager
def _alarms_kept(name: str) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0] > 0:
        # The timer that runs belongs to the caller, who would miss its end.
        yield
        return

    def refuse(number: int, frame: FrameType | None) -> None:
        raise UserCodeError(
            f"{name} set an alarm, which ended the call. Use asyncio.timeout or a time limit of "
            "its own library."
        )

    handler = signal.getsignal(signal.SIGALRM)
    if handler == signal.SIG_DFL:
        signal.signal(signal.SIGALRM, refuse)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)

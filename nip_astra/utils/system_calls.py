"""System calls that code in the sandbox is refused: a filter for seccomp, and a new keyring.

A call that is refused fails with EPERM, as it does where a capability is missing. What Python and
its standard library need is allowed. https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from typing import NamedTuple

REFUSED = {
    # Name: number on x86_64, and on arm64 and riscv64; None where the call does not exist.
    # The kernel's keyrings.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Memory and messages of System V and POSIX, which no limit of a process counts.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # Large parts of the kernel that Python does not need.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None),
    # Namespaces and file systems.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # The machine itself.
    "syslog": (103, 116),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "iopl": (172, None),
    "ioperm": (173, None),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "vhangup": (153, 58),
}
"""Calls that are refused whatever their arguments are."""

ADDRESS_FAMILIES = (1, 2, 10)
"""Sockets that may be made: AF_UNIX, AF_INET and AF_INET6. The network's namespace is empty."""
_NAMESPACES = 0x7E020080
"""Flags of `clone` that make a namespace."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""
_JOIN_SESSION_KEYRING = 1

# Numbers of operations of the classic Berkeley packet filter.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in the kernel's `seccomp_data`, whose arguments have 8 bytes each."""


class _Machine(NamedTuple):
    """A kind of processor: what the kernel calls it, and its numbers of calls with conditions."""

    architecture: int
    column: int
    clone: int
    socket: int
    socketpair: int
    ioctl: int


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 0, clone=56, socket=41, socketpair=53, ioctl=16),
    "aarch64": _Machine(0xC00000B7, 1, clone=220, socket=198, socketpair=199, ioctl=29),
    "riscv64": _Machine(0xC00000F3, 1, clone=220, socket=198, socketpair=199, ioctl=29),
}
_CLONE3 = 435
_X32 = 0x40000000
"""From here on x86_64 counts a second set of calls, which no program needs."""


def filter_program(machine: str) -> bytes:
    """The filter for a kind of processor, as `bwrap --seccomp` reads it; empty for unknown ones."""
    if (known := _MACHINES.get(machine)) is None:
        return b""
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, known.architecture, then=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_step(_AT_LEAST, _X32, otherwise=1), _step(_RETURN, _KILL)]
    for numbers in REFUSED.values():
        if (number := numbers[known.column]) is not None:
            program += _if_called(number, [_fail(errno.EPERM)])
    # glibc makes threads with clone where the newer call, whose flags no filter sees, is unknown.
    program += _if_called(_CLONE3, [_fail(errno.ENOSYS)])
    flags = [_argument(0), _step(_ANY_BIT, _NAMESPACES, otherwise=1), _fail(errno.EPERM)]
    program += _if_called(known.clone, [*flags, _step(_RETURN, _ALLOW)])
    request = _argument(1)
    typing = [_step(_EQUAL, _TERMINAL_INPUT[0], then=1), _step(_EQUAL, _TERMINAL_INPUT[1], 0, 1)]
    program += _if_called(
        known.ioctl, [request, *typing, _fail(errno.EPERM), _step(_RETURN, _ALLOW)]
    )
    families = [
        step
        for family in ADDRESS_FAMILIES
        for step in (_step(_EQUAL, family, otherwise=1), _step(_RETURN, _ALLOW))
    ]
    for number in (known.socket, known.socketpair):
        program += _if_called(number, [_argument(0), *families, _fail(errno.EAFNOSUPPORT)])
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def join_new_keyring() -> bool:
    """Give the calling thread, and the processes it starts, an empty session keyring."""
    if (known := _MACHINES.get(platform.machine())) is None:
        return False
    number = REFUSED["keyctl"][known.column]
    return int(ctypes.CDLL(None).syscall(number, _JOIN_SESSION_KEYRING, None)) > 0


def _step(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One operation; `then` and `otherwise` are the steps that a comparison skips."""
    return struct.pack("<HBBI", operation, then, otherwise, value)


def _if_called(number: int, steps: list[bytes]) -> list[bytes]:
    return [_step(_EQUAL, number, otherwise=len(steps)), *steps]


def _argument(place: int) -> bytes:
    """Load the lower half of an argument, which holds all of an `int`."""
    return _step(_LOAD, _ARGUMENTS + 8 * place)


def _fail(code: int) -> bytes:
    return _step(_RETURN, _FAIL | code)

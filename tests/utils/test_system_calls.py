"""The filter of system calls, run as the kernel runs it, for each processor architecture."""

from __future__ import annotations

import errno
import struct

import pytest

from nip_astra.utils.sandbox import REFUSED, filter_program

ALLOWED, KILLED, FAILED = 0x7FFF0000, 0x80000000, 0x00050000
X86_64, AARCH64, RISCV64, I386 = 0xC000003E, 0xC00000B7, 0xC00000F3, 0x40000003


def decide(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """A classic Berkeley packet filter's verdict on a call."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(value % 2**64 for value in values))
    steps = list(struct.iter_unpack("<HBBI", program))
    place, held = 0, 0
    while True:
        operation, then, otherwise, value = steps[place]
        place += 1
        if operation == 0x06:
            return int(value)
        if operation == 0x20:
            (held,) = struct.unpack_from("<I", data, value)
            continue
        holds = {0x15: held == value, 0x35: held >= value, 0x45: held & value != 0}[operation]
        place += then if holds else otherwise


@pytest.mark.parametrize(
    ("machine", "architecture", "column", "read", "clone", "socket", "ioctl"),
    [
        ("x86_64", X86_64, 0, 0, 56, 41, 16),
        ("aarch64", AARCH64, 1, 63, 220, 198, 29),
        ("riscv64", RISCV64, 1, 63, 220, 198, 29),
    ],
)
def test_calls_are_allowed_or_refused_by_number_and_arguments(
    machine: str, architecture: int, column: int, read: int, clone: int, socket: int, ioctl: int
) -> None:
    program = filter_program(machine)
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            assert decide(program, architecture, number) == FAILED | errno.EPERM
    assert decide(program, architecture, read) == ALLOWED
    # A thread and a child, but no namespace; clone3 does not exist.
    assert decide(program, architecture, clone, 0x3D0F00) == ALLOWED
    assert decide(program, architecture, clone, 17) == ALLOWED
    assert decide(program, architecture, clone, 0x10000011) == FAILED | errno.EPERM
    assert decide(program, architecture, 435) == FAILED | errno.ENOSYS
    answers = {family: decide(program, architecture, socket, family) for family in range(64)}
    families = {family for family, answer in answers.items() if answer == ALLOWED}
    assert families == {1, 2, 10}
    socketpair = {41: 53, 198: 199}[socket]
    for number in (socket, socketpair):
        assert decide(program, architecture, number, 40) == FAILED | errno.EAFNOSUPPORT
    assert decide(program, architecture, ioctl, 0, 0x5401) == ALLOWED
    for request in (0x5412, 0x541C, 0x5412 | 1 << 32):
        assert decide(program, architecture, ioctl, 0, request) == FAILED | errno.EPERM
    # Calls of another architecture, which reach the same kernel.
    assert decide(program, I386, read) == KILLED
    if machine == "x86_64":
        assert decide(program, architecture, 0x40000000 | read) == KILLED
    assert len(program) <= 8 * 4096


def test_an_unknown_processor_has_no_filter() -> None:
    assert filter_program("sparc64") == b""

"""Attacks on the sandbox, each with the expected reason for its failure."""

from __future__ import annotations

from typing import NamedTuple


class Attack(NamedTuple):
    """A program that ends with an exception if it fails, and a pattern of its error.

    Names in braces stand for objects of the host, see `test_sandbox`.
    """

    why: str
    code: str

    def program(self, host: dict[str, object]) -> str:
        """Return the program, which prints BREACH if the attack succeeds."""
        return f"{self.code.format(**host)}\nprint('BREACH')"


_GONE = "FileNotFoundError.*No such file"
_FORBIDDEN = "PermissionError"
_READ_ONLY = "Read-only file system"
_UNREACHABLE = "Network is unreachable"
_NO_FAMILY = "Address family not supported"


def _c(call: str) -> str:
    """Return a program that calls a C function, and raises its error if the condition holds."""
    return (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"if libc.{call}: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"
    )


_ENVIRONMENTS = """
import glob, os
found = str(dict(os.environ))
for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):
    found += open(path).read()
if '{terces}'[::-1] not in found:
    raise LookupError(f'only {{len(found)}} characters, of the sandbox itself')
"""
_FORKS = """
import os, time
for n in range(200):
    if os.fork() == 0: time.sleep(5); os._exit(0)
"""
_THREADS = """
import threading, time
for n in range(200): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
"""
_DESCRIPTORS = """
import os
for fd in range(3, 4096):
    try: print('BREACH', os.fstat(fd))
    except OSError as error: last = error
raise last
"""
_PRIORITY = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"

# System calls without a program here are made by
# `test_every_refused_system_call_is_refused`.
_BY_REASON = {
    _FORBIDDEN: {
        "raw packets": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "terminal input": "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')",
        "higher priority": "import os; os.nice(-5)",
        "real-time priority": _PRIORITY,
        "precedence in low memory": "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000')",
        "a new device": "import os; os.mknod('x', 0o60600, os.makedev(8, 0))",
        "a child in its namespaces": _c("syscall({calls[clone]}, 0x10000011, 0, 0, 0, 0) == -1"),
    },
    _NO_FAMILY: {
        "packets of a link": "import socket; socket.socket(17, 3, 0)",
        "the kernel's routing tables": "import socket; socket.socket(16, 3, 0)",
        "the virtual machine's host": "import socket; socket.socket(40, 1, 0)",
        "the kernel's ciphers": "import socket; socket.socket(38, 5, 0)",
        "a pair of sockets": "import socket; socket.socketpair(30, 1, 0)",
    },
    _READ_ONLY: {
        "shared memory": "open('/dev/shm/x', 'w').write('x')",
        "writing to the root": "open('/x', 'w').write('x')",
        "writing to Python": "open('/python/bin/x', 'w').write('x')",
        "a symlink in place of a library": "import os; os.symlink('/work', '/usr/lib/x')",
        "a folder of the first process": "import os; os.mkdir('/proc/1/x')",
    },
    _GONE: {
        "writing to the project": "open('{project}/x', 'w').write('x')",
        "home": "import os; os.listdir('{home}')",
        "passwords": "open('/etc/passwd').read()",
        "a symlink": "import os; os.symlink('{home}/secret', 'x'); open('x').read()",
        "a root above the root": "open('/proc/self/root/../../{home}/secret').read()",
        "a device": "import os; os.open('/dev/mem', os.O_RDONLY)",
        "devices of the machine": "import os; os.listdir('/sys')",
        "running services": "import os; os.listdir('/run')",
        "another program": "import subprocess; subprocess.run(['sh', '-c', 'id'])",
        "the first process' memory": "open('/proc/1/mem', 'r+b')",
    },
    f"{_READ_ONLY}|{_FORBIDDEN}|{_GONE}": {
        "writing to the kernel": "open('/proc/sys/kernel/core_pattern', 'w').write('x')",
        "a restart by a file": "open('/proc/sysrq-trigger', 'wb', 0).write(b'x')",
        "the kernel's memory": "open('/proc/kcore', 'rb').read(1)",
        "the first process' root": "import os; os.listdir('/proc/1/root/home')",
    },
    "ProcessLookupError": {
        "a signal to the host": "import os; os.kill({pid}, 0)",
        "a hold of a process": _c("syscall(434, {pid}, 0) == -1"),
    },
    f"Connection refused|{_UNREACHABLE}": {
        "loopback of the host": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
        "abstract socket of the host": (
            "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}')"
        ),
    },
}
_WITH_OWN_REASON = {
    "internet": (_UNREACHABLE, "import socket; socket.create_connection(('192.0.2.1', 80), 2)"),
    "names": ("gaierror.*[Nn]ame", "import socket; socket.getaddrinfo('example.org', 80)"),
    "calls of another kind of processor": (
        "signal 31|Function not implemented",
        _c("syscall(0x40000027) == -1"),
    ),
    "a child by the newer call": ("Function not implemented", _c("syscall(435, 0, 0) == -1")),
    # No user namespaces are allowed beyond the sandbox's own.
    "a user namespace": (f"No space left|{_FORBIDDEN}", _c("unshare(0x10000000)")),
    # Memory, disk, limits.
    "fork bomb": ("BlockingIOError.*temporarily unavailable", _FORKS),
    "thread bomb": ("can't start new thread", _THREADS),
    "memory": ("MemoryError", "x = bytearray(2**30)"),
    "mapped memory": ("Cannot allocate memory", "import mmap; m = mmap.mmap(-1, 2**30); m[0] = 1"),
    "large file": (
        "File too large",
        "f = open('x', 'wb', 0)\nfor n in range(64): f.write(b'x' * 2**20)",
    ),
    "many files": (
        "No space left",
        "for n in range(64): open(f'{{n}}', 'wb', 0).write(b'x' * 2**19)",
    ),
    "many open files": ("Too many open files", "files = [open(f'{{n}}', 'w') for n in range(200)]"),
    "higher limits": (
        "not allowed to raise maximum limit",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    ),
    "a hard link": (
        f"cross-device|{_READ_ONLY}|{_FORBIDDEN}",
        "import os; os.link('/python/bin', 'x')",
    ),
    "a descriptor that was left open": ("Bad file descriptor", _DESCRIPTORS),
    "a terminal": ("OSError", "open('/dev/tty', 'w').write('x')"),
    "the project's modules": ("ModuleNotFoundError", "import nip_astra"),
    "environments": ("LookupError: only", _ENVIRONMENTS),
    "becoming root": ("OSError: .Errno 22", "import os; os.setuid(0)"),
}
ATTACKS = {
    name: Attack(why, code) for why, codes in _BY_REASON.items() for name, code in codes.items()
} | {name: Attack(*attack) for name, attack in _WITH_OWN_REASON.items()}
ALONE = ("fork bomb", "a descriptor that was left open")
"""Disturb programs beside them, and need a sandbox of their own."""

FORGERIES = {
    "an import hook": """
import builtins, sys
real = builtins.__import__
class Json:
    dumps = staticmethod(lambda value: '{"value": true}')
    loads = staticmethod(lambda text: [[0], [0]])
def hooked(name, *args):
    return Json if name == 'json' else real(name, *args)
builtins.__import__ = hooked
sys.modules['json'] = Json
def f(x): return 1
""",
    "an object that equals all": """
class Equal:
    def __eq__(self, other): return True
def f(x): return Equal()
""",
    "lines of the checker": """
import sys
def f(x):
    sys.__stdout__.write('\\n' + _MARK + '{"value": true}\\n')
    return True
""",
    "a number that equals all": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Equal(7)
""",
    "an end without a result": "import os\ndef f(x): os._exit(0)",
}
"""Programs that know how they are checked, but not the expected result."""

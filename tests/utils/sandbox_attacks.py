"""Attacks on the sandbox, each with the expected reason for its failure."""

from __future__ import annotations

from typing import NamedTuple


class Attack(NamedTuple):
    """A program that ends with an exception if it fails; see `program`.

    Attributes
    ----------
    code : str
        The program; names in braces stand for objects of the host, see `test_sandbox`.
    why : str
        A pattern of its error.
    is_alone : bool
        Whether it needs its own sandbox, because it disturbs programs beside it.
    """

    code: str
    why: str
    is_alone: bool = False

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
ATTACKS = {
    # The network.
    "internet": Attack(
        "import socket; socket.create_connection(('192.0.2.1', 80), 2)", _UNREACHABLE
    ),
    "names": Attack("import socket; socket.getaddrinfo('example.org', 80)", "gaierror.*[Nn]ame"),
    "loopback of the host": Attack(
        "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
        f"Connection refused|{_UNREACHABLE}",
    ),
    "abstract socket of the host": Attack(
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}')",
        "Connection refused",
    ),
    "raw packets": Attack(
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", _FORBIDDEN
    ),
    "packets of a link": Attack("import socket; socket.socket(17, 3, 0)", _NO_FAMILY),
    "the kernel's routing tables": Attack("import socket; socket.socket(16, 3, 0)", _NO_FAMILY),
    "the virtual machine's host": Attack("import socket; socket.socket(40, 1, 0)", _NO_FAMILY),
    "the kernel's ciphers": Attack("import socket; socket.socket(38, 5, 0)", _NO_FAMILY),
    "a pair of sockets": Attack("import socket; socket.socketpair(30, 1, 0)", _NO_FAMILY),
    "a packet without a connection": Attack(
        "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
        _UNREACHABLE,
    ),
    "the address of a machine's metadata": Attack(
        "import urllib.request as r; r.urlopen('http://169.254.169.254/', timeout=2)",
        _UNREACHABLE,
    ),
    # Parts of the kernel.
    "calls of another kind of processor": Attack(
        _c("syscall(0x40000027) == -1"), "signal 31|Function not implemented"
    ),
    "terminal input": Attack(
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')", _FORBIDDEN
    ),
    # Processes, memory, disk.
    "fork bomb": Attack(_FORKS, "BlockingIOError.*temporarily unavailable", is_alone=True),
    "thread bomb": Attack(_THREADS, "can't start new thread"),
    "memory": Attack("x = bytearray(2**30)", "MemoryError"),
    "mapped memory": Attack(
        "import mmap; m = mmap.mmap(-1, 2**30); m[0] = 1", "Cannot allocate memory"
    ),
    "large file": Attack(
        "f = open('x', 'wb', 0)\nfor n in range(64): f.write(b'x' * 2**20)", "File too large"
    ),
    "many files": Attack(
        "for n in range(64): open(f'{{n}}', 'wb', 0).write(b'x' * 2**19)", "No space left"
    ),
    "many open files": Attack(
        "files = [open(f'{{n}}', 'w') for n in range(200)]", "Too many open files"
    ),
    "a file in memory": Attack("import os; os.memfd_create('x')", _FORBIDDEN),
    "higher priority": Attack("import os; os.nice(-5)", _FORBIDDEN),
    "real-time priority": Attack(_PRIORITY, _FORBIDDEN),
    "precedence when memory is short": Attack(
        "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000')", _FORBIDDEN
    ),
    "shared memory": Attack("open('/dev/shm/x', 'w').write('x')", _READ_ONLY),
    "higher limits": Attack(
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "not allowed to raise maximum limit",
    ),
    # Files.
    "writing to the root": Attack("open('/x', 'w').write('x')", _READ_ONLY),
    "writing to Python": Attack("open('/python/bin/x', 'w').write('x')", _READ_ONLY),
    "writing to libraries": Attack("open('/usr/lib/x', 'w').write('x')", _READ_ONLY),
    "writing to the project": Attack("open('{project}/x', 'w').write('x')", _GONE),
    "writing to the kernel": Attack(
        "open('/proc/sys/kernel/core_pattern', 'w').write('x')", f"{_READ_ONLY}|{_FORBIDDEN}"
    ),
    "home": Attack("import os; os.listdir('{home}')", _GONE),
    "a file of the home": Attack("open('{home}/secret').read()", _GONE),
    "passwords": Attack("open('/etc/passwd').read()", _GONE),
    "a symlink": Attack("import os; os.symlink('{home}/secret', 'x'); open('x').read()", _GONE),
    "a symlink in place of a library": Attack(
        "import os; os.symlink('/work', '/usr/lib/x')", _READ_ONLY
    ),
    "a device": Attack("import os; os.open('/dev/mem', os.O_RDONLY)", _GONE),
    "the kernel's memory": Attack("open('/proc/kcore', 'rb').read(1)", f"{_FORBIDDEN}|{_GONE}"),
    "a restart by a file": Attack(
        "open('/proc/sysrq-trigger', 'wb', 0).write(b'x')", f"{_READ_ONLY}|{_FORBIDDEN}|{_GONE}"
    ),
    "devices of the machine": Attack("import os; os.listdir('/sys')", _GONE),
    "running services": Attack("import os; os.listdir('/run')", _GONE),
    "a hard link": Attack(
        "import os; os.link('/python/bin', 'x')", f"cross-device|{_READ_ONLY}|{_FORBIDDEN}"
    ),
    "a root above the root": Attack("open('/proc/self/root/../../{home}/secret').read()", _GONE),
    "a descriptor that was left open": Attack(_DESCRIPTORS, "Bad file descriptor", is_alone=True),
    "a new device": Attack("import os; os.mknod('x', 0o60600, os.makedev(8, 0))", _FORBIDDEN),
    "a terminal": Attack("open('/dev/tty', 'w').write('x')", "OSError"),
    "the project's modules": Attack("import nip_astra", "ModuleNotFoundError"),
    # Environments, other processes, signals.
    "environments": Attack(_ENVIRONMENTS, "LookupError: only"),
    "the first process' root": Attack(
        "import os; os.listdir('/proc/1/root/home')", f"{_GONE}|{_FORBIDDEN}"
    ),
    "a signal to the host": Attack("import os; os.kill({pid}, 0)", "ProcessLookupError"),
    "another program": Attack("import subprocess; subprocess.run(['sh', '-c', 'id'])", _GONE),
    "becoming root": Attack("import os; os.setuid(0)", "OSError: .Errno 22"),
    "the first process' environment": Attack("open('/proc/1/environ').read()", _GONE),
    "the first process' memory": Attack("open('/proc/1/mem', 'r+b')", _GONE),
    "a folder in place of the first process": Attack(
        "import os; os.mkdir('/proc/1/x')", _READ_ONLY
    ),
    # Escapes by ctypes.
    "a mount": Attack(_c("mount(b'none', b'/work', b'tmpfs', 0, None)"), _FORBIDDEN),
    # No user namespaces are allowed beyond the sandbox's own.
    "a user namespace": Attack(_c("unshare(0x10000000)"), f"No space left|{_FORBIDDEN}"),
    "a child in its own namespaces": Attack(
        _c("syscall({calls[clone]}, 0x10000011, 0, 0, 0, 0) == -1"), _FORBIDDEN
    ),
    "a child by the newer call": Attack(_c("syscall(435, 0, 0) == -1"), "Function not implemented"),
    "another root": Attack(_c("chroot(b'/work')"), _FORBIDDEN),
    "a trace": Attack(_c("ptrace(16, os.getppid() or 1, 0, 0)"), _FORBIDDEN),
    "a hold of a process": Attack(_c("syscall(434, {pid}, 0) == -1"), "ProcessLookupError"),
}

FORGERIES = {
    "patched unittest": """
import unittest
unittest.TestCase.assertEqual = lambda *args: None
def f(x): return 'patched'
""",
    "patched json": """
import json
json.dumps = lambda value: '{"value": true}'
def f(x): return object()
""",
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
    "a finder of modules": """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        raise SystemExit('found')
sys.meta_path.insert(0, Finder())
sys.modules.pop('json', None)
def f(x): return x
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

"""Attacks on the sandbox, each with the reason for which it fails."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """A program that prints BREACH where it succeeds, and ends by an exception where it does not.

    Attributes
    ----------
    code : str
        The program; names in braces stand for things of the host, see `test_sandbox`.
    why : str
        A pattern of what it is told when it fails.
    """

    code: str
    why: str


_GONE = "FileNotFoundError.*No such file"
_FORBIDDEN = "PermissionError"
_READ_ONLY = "Read-only file system"
_CTYPES = (
    "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.{}: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
    "print('BREACH')"
)
_ENVIRONMENTS = (
    "import glob, os\n"
    "told = str(dict(os.environ))\n"
    "for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
    "    told += open(path).read()\n"
    "if '{terces}'[::-1] in told: print('BREACH')\n"
    "raise LookupError(f'only {{len(told)}} characters, of the sandbox itself')"
)

ATTACKS = {
    # The network.
    "internet": Attack(
        "import socket; socket.create_connection(('192.0.2.1', 80), 2); print('BREACH')",
        "Network is unreachable",
    ),
    "names": Attack(
        "import socket; socket.getaddrinfo('example.org', 80); print('BREACH')",
        "gaierror.*[Nn]ame",
    ),
    "loopback of the host": Attack(
        "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('BREACH')",
        "Connection refused|Network is unreachable",
    ),
    "abstract socket of the host": Attack(
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}')\n"
        "print('BREACH')",
        "Connection refused",
    ),
    "raw packets": Attack(
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('BREACH')",
        _FORBIDDEN,
    ),
    # Processes, memory, disk.
    "fork bomb": Attack(
        "import os, time\n"
        "for n in range(200):\n"
        "    if os.fork() == 0: time.sleep(5); os._exit(0)\n"
        "print('BREACH')",
        "BlockingIOError.*temporarily unavailable",
    ),
    "thread bomb": Attack(
        "import threading, time\n"
        "for n in range(200): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
        "print('BREACH')",
        "can't start new thread",
    ),
    "memory": Attack("x = bytearray(2**30); print('BREACH')", "MemoryError"),
    "mapped memory": Attack(
        "import mmap; m = mmap.mmap(-1, 2**30); m[0] = 1; print('BREACH')",
        "Cannot allocate memory",
    ),
    "large file": Attack(
        "f = open('x', 'wb', 0)\nfor n in range(64): f.write(b'x' * 2**20)\nprint('BREACH')",
        "File too large",
    ),
    "many files": Attack(
        "for n in range(64): open(f'{{n}}', 'wb', 0).write(b'x' * 2**19)\nprint('BREACH')",
        "No space left",
    ),
    "many open files": Attack(
        "files = [open(f'{{n}}', 'w') for n in range(200)]; print('BREACH')",
        "Too many open files",
    ),
    "shared memory": Attack("open('/dev/shm/x', 'w').write('x'); print('BREACH')", _READ_ONLY),
    "raising limits": Attack(
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)); print('BREACH')",
        "not allowed to raise maximum limit",
    ),
    # Files.
    "writing to the root": Attack("open('/x', 'w').write('x'); print('BREACH')", _READ_ONLY),
    "writing to Python": Attack(
        "open('/python/bin/x', 'w').write('x'); print('BREACH')", _READ_ONLY
    ),
    "writing to libraries": Attack(
        "open('/usr/lib/x', 'w').write('x'); print('BREACH')", _READ_ONLY
    ),
    "writing to the project": Attack("open('{project}/x', 'w').write('x'); print('BREACH')", _GONE),
    "writing to the kernel": Attack(
        "open('/proc/sys/kernel/core_pattern', 'w').write('x'); print('BREACH')",
        f"{_READ_ONLY}|{_FORBIDDEN}",
    ),
    "home": Attack("import os; print('BREACH', os.listdir('{home}'))", _GONE),
    "a file of the home": Attack("print('BREACH', open('{home}/secret').read())", _GONE),
    "passwords": Attack("print('BREACH', open('/etc/passwd').read())", _GONE),
    "a symlink": Attack(
        "import os; os.symlink('{home}/secret', 'x'); print('BREACH', open('x').read())", _GONE
    ),
    "a symlink in place of a library": Attack(
        "import os; os.symlink('/work', '/usr/lib/x'); print('BREACH')", _READ_ONLY
    ),
    "a device": Attack("import os; print('BREACH', os.open('/dev/mem', os.O_RDONLY))", _GONE),
    "a new device": Attack(
        "import os; os.mknod('x', 0o60600, os.makedev(8, 0)); print('BREACH')", _FORBIDDEN
    ),
    "a terminal": Attack("open('/dev/tty', 'w').write('x'); print('BREACH')", "OSError"),
    "the project's modules": Attack("import nip_astra; print('BREACH')", "ModuleNotFoundError"),
    # Environments, other processes, signals.
    "environments": Attack(_ENVIRONMENTS, "LookupError: only"),
    "the first process' root": Attack(
        "import os; print('BREACH', os.listdir('/proc/1/root/home'))", f"{_GONE}|{_FORBIDDEN}"
    ),
    "a signal to the host": Attack(
        "import os; os.kill({pid}, 0); print('BREACH')", "ProcessLookupError"
    ),
    "another program": Attack(
        "import subprocess; print('BREACH', subprocess.run(['sh', '-c', 'id']))", _GONE
    ),
    "becoming root": Attack("import os; os.setuid(0); print('BREACH')", "OSError: .Errno 22"),
    # Ways out by ctypes.
    "a mount by ctypes": Attack(
        _CTYPES.format("mount(b'none', b'/work', b'tmpfs', 0, None)"), _FORBIDDEN
    ),
    "a user namespace by ctypes": Attack(
        # No more user namespaces are allowed than the sandbox's own.
        _CTYPES.format("unshare(0x10000000)"),
        "No space left|PermissionError",
    ),
    "another root by ctypes": Attack(_CTYPES.format("chroot(b'/work')"), _FORBIDDEN),
    "a trace by ctypes": Attack(_CTYPES.format("ptrace(16, os.getppid() or 1, 0, 0)"), _FORBIDDEN),
    "a hold of a process by ctypes": Attack(
        _CTYPES.format("syscall(434, {pid}, 0) == -1"), "ProcessLookupError"
    ),
}

FORGERIES = {
    # Each answers the call with a lie that it hopes to be taken for the right value.
    "patched unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *args: None\n"
        "def f(x): return 'patched'"
    ),
    "patched json": (
        "import json\njson.dumps = lambda value: '{\"value\": true}'\ndef f(x): return object()"
    ),
    "an import hook": (
        "import builtins, sys\nreal = builtins.__import__\n"
        "class Json:\n    dumps = staticmethod(lambda value: '{\"value\": true}')\n"
        "    loads = staticmethod(lambda text: [[0], [0]])\n"
        "def hooked(name, *args):\n"
        "    return Json if name == 'json' else real(name, *args)\n"
        "builtins.__import__ = hooked\nsys.modules['json'] = Json\ndef f(x): return 1"
    ),
    "a finder of modules": (
        "import sys\n"
        "class Finder:\n    def find_spec(self, name, path=None, target=None):\n"
        "        raise SystemExit('found')\n"
        "sys.meta_path.insert(0, Finder())\nsys.modules.pop('json', None)\ndef f(x): return x"
    ),
    "an object that equals all": (
        "class Equal:\n    def __eq__(self, other): return True\ndef f(x): return Equal()"
    ),
    "lines of the checker": (
        "import sys\n"
        "def f(x):\n    sys.__stdout__.write('\\n' + _MARK + '{\"value\": true}\\n')\n"
        "    return True"
    ),
    "a number that equals all": (
        "class Equal(int):\n    def __eq__(self, other): return True\n"
        "    __hash__ = int.__hash__\ndef f(x): return Equal(7)"
    ),
    "an end without a word": "import os\ndef f(x): os._exit(0)",
}
"""Programs that know how they are checked, but not what is expected."""

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
        A pattern of the error that it gets.
    is_alone : bool
        Whether it needs a sandbox of its own, because it disturbs what runs beside it.
    """

    code: str
    why: str
    is_alone: bool = False


_GONE = "FileNotFoundError.*No such file"
_FORBIDDEN = "PermissionError"
_READ_ONLY = "Read-only file system"
_NO_FAMILY = "Address family not supported"
_CTYPES = (
    "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.{}: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
    "print('BREACH')"
)


def _call(name: str, *arguments: str) -> Attack:
    """A system call that the filter refuses."""
    given = ", ".join([f"{{calls[{name}]}}", *arguments])
    return Attack(_CTYPES.format(f"syscall({given}) == -1"), _FORBIDDEN)


def _socket(family: int, kind: int = 1) -> Attack:
    return Attack(f"import socket; socket.socket({family}, {kind}, 0); print('BREACH')", _NO_FAMILY)


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
    "packets of a link": _socket(17, 3),
    "the kernel's tables of routes": _socket(16, 3),
    "a socket to the virtual machine's host": _socket(40),
    "a socket for the kernel's ciphers": _socket(38, 5),
    "a pair of sockets of a family": Attack(
        "import socket; socket.socketpair(30, 1, 0); print('BREACH')", _NO_FAMILY
    ),
    "a packet without a connection": Attack(
        "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))\n"
        "print('BREACH')",
        "Network is unreachable",
    ),
    "the address of a machine's metadata": Attack(
        "import urllib.request as r; r.urlopen('http://169.254.169.254/', timeout=2)\n"
        "print('BREACH')",
        "Network is unreachable",
    ),
    # Keyrings.
    "the session's keyring": _call("keyctl", "10", "-3", "b'user'", "b'canary'", "0"),
    "a key of one's own": _call("add_key", "b'user'", "b'x'", "b'x'", "1", "-3"),
    "a key of the caller's": _call("request_key", "b'user'", "b'canary'", "0", "0"),
    # Parts of the kernel.
    "a ring of requests": _call("io_uring_setup", "8", "ctypes.create_string_buffer(120)"),
    "counters of performance": _call("perf_event_open", "0", "0", "-1", "-1", "0"),
    "a program for the kernel": _call("bpf", "0", "ctypes.create_string_buffer(120)", "120"),
    "watching a file system": _call("fanotify_init", "0", "0"),
    "a module of the kernel": _call("init_module", "0", "0", "b''"),
    "another kernel": _call("kexec_load", "0", "0", "0", "0"),
    "the kernel's messages": _call("syslog", "3", "0", "0"),
    "the clock": _call("settimeofday", "0", "0"),
    "a restart": _call("reboot", "0xfee1dead", "672274793", "0x1234567", "0"),
    "calls of another kind of processor": Attack(
        _CTYPES.format("syscall(0x40000027) == -1"), "signal 31|Function not implemented"
    ),
    "typing into a terminal": Attack(
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x'); print('BREACH')",
        _FORBIDDEN,
    ),
    # Processes, memory, disk.
    "fork bomb": Attack(
        "import os, time\n"
        "for n in range(200):\n"
        "    if os.fork() == 0: time.sleep(5); os._exit(0)\n"
        "print('BREACH')",
        "BlockingIOError.*temporarily unavailable",
        is_alone=True,
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
    "memory of System V": _call("shmget", "0", "2**30", "0o1600"),
    "attached memory of System V": _call("shmat", "0", "0", "0"),
    "semaphores of System V": _call("semget", "0", "1", "0o1600"),
    "messages of System V": _call("msgget", "0", "0o1600"),
    "messages of POSIX": _call("mq_open", "b'x'", "0o102", "0o600", "0"),
    "a file in memory": Attack("import os; os.memfd_create('x'); print('BREACH')", _FORBIDDEN),
    "secret memory": _call("memfd_secret", "0"),
    "pages of other nodes": _call("move_pages", "0", "0", "0", "0", "0", "0"),
    "faults by a program": _call("userfaultfd", "1"),
    "another's share of the processor": Attack(
        "import os; os.nice(-5); print('BREACH')", _FORBIDDEN
    ),
    "a processor to itself": Attack(
        "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); print('BREACH')",
        _FORBIDDEN,
    ),
    "a place before others when memory is short": Attack(
        "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000'); print('BREACH')", _FORBIDDEN
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
    "the kernel's memory": Attack(
        "print('BREACH', open('/proc/kcore', 'rb').read(1))", f"{_FORBIDDEN}|{_GONE}"
    ),
    "a restart by a file": Attack(
        "open('/proc/sysrq-trigger', 'wb', 0).write(b'x'); print('BREACH')",
        f"{_READ_ONLY}|{_FORBIDDEN}|{_GONE}",
    ),
    "devices of the machine": Attack("import os; print('BREACH', os.listdir('/sys'))", _GONE),
    "running services": Attack("import os; print('BREACH', os.listdir('/run'))", _GONE),
    "a hard link": Attack(
        "import os; os.link('/python/bin', 'x'); print('BREACH')",
        f"cross-device|{_READ_ONLY}|{_FORBIDDEN}",
    ),
    "a root above the root": Attack(
        "print('BREACH', open('/proc/self/root/../../{home}/secret').read())", _GONE
    ),
    "a descriptor that was left open": Attack(
        "import os\nfor fd in range(3, 4096):\n"
        "    try: print('BREACH', os.fstat(fd))\n"
        "    except OSError as error: last = error\nraise last",
        "Bad file descriptor",
        is_alone=True,
    ),
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
    "the first process' environment": Attack(
        "print('BREACH', open('/proc/1/environ').read())", _GONE
    ),
    "the first process' memory": Attack("open('/proc/1/mem', 'r+b'); print('BREACH')", _GONE),
    "a folder in place of the first process": Attack(
        "import os; os.mkdir('/proc/1/x'); print('BREACH')", _READ_ONLY
    ),
    "memory of the first process by a call": _call(
        "process_vm_writev", "1", "0", "0", "0", "0", "0"
    ),
    "a file of the first process by a call": _call("pidfd_getfd", "0", "0", "0"),
    "comparing processes": _call("kcmp", "1", "1", "0", "0", "0"),
    # Ways out by ctypes.
    "a mount by ctypes": Attack(
        _CTYPES.format("mount(b'none', b'/work', b'tmpfs', 0, None)"), _FORBIDDEN
    ),
    "a user namespace by ctypes": Attack(
        # No more user namespaces are allowed than the sandbox's own.
        _CTYPES.format("unshare(0x10000000)"),
        "No space left|PermissionError",
    ),
    "a child in namespaces of its own": Attack(
        _CTYPES.format("syscall({calls[clone]}, 0x10000011, 0, 0, 0, 0) == -1"), _FORBIDDEN
    ),
    "a child by the newer call": Attack(
        _CTYPES.format("syscall(435, 0, 0) == -1"), "Function not implemented"
    ),
    "another's namespaces": _call("setns", "0", "0"),
    "a mount by the newer calls": _call("fsopen", "b'tmpfs'", "0"),
    "a file by its handle": _call("open_by_handle_at", "-100", "0", "0"),
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

"""An environment and a reward function that look everywhere for secrets, and attack what is outside them.

Standard library only. A secret is a word that CANARY matches; nothing here knows one. What would harm the
machine where nothing holds it in (signals to everybody, ptrace, unmounting /proc) is tried in a namespace only.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

CANARY = re.compile(rb"canary-[0-9a-f]{16}")
READ_BYTES_MAX = 1 << 20
MEMORY_BYTES_MAX = 64 << 20  # of each process
CLONE_NEWUSER, CLONE_NEWNS, PTRACE_ATTACH, MNT_DETACH = 0x10000000, 0x20000, 16, 2

libc = ctypes.CDLL(None, use_errno=True)


def look(task: dict[str, Any]) -> list[str]:
    """Every secret that is found. The task names files, ports and sockets that a lucky guess would.

    Its "only" are the processes to look at, where that should not be all.
    """
    found: set[bytes] = set()
    attempts = [_here, _files, _brokers, _processes]
    for attempt in (*attempts, _traced, _below_proc) if is_held() else attempts:
        with contextlib.suppress(OSError):
            for data in attempt(task):
                found.update(CANARY.findall(data))
    return sorted(each.decode() for each in found)


def is_held() -> bool:
    """Whether this process is in a namespace of its own, its parent outside."""
    return os.getppid() == 0 and os.getpid() != 1


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(READ_BYTES_MAX)
    except OSError:
        return b""


def _here(task: dict[str, Any]) -> Iterator[bytes]:
    """Its own variables, arguments and descriptors."""
    yield repr((dict(os.environ), sys.argv)).encode()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            yield link.encode()
            if link.startswith("/"):
                yield _read(f"/proc/self/fd/{name}")


def _files(task: dict[str, Any]) -> Iterator[bytes]:
    for path in task.get("files", ()):
        yield _read(path)
        for other in glob.glob(f"/proc/[0-9]*/root{path}"):
            yield _read(other)


def _brokers(task: dict[str, Any]) -> Iterator[bytes]:
    """What a broker says to one who has no password."""
    for where in task.get("brokers", ()):
        with contextlib.suppress(OSError):
            family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
            with socket.socket(family) as line:
                line.settimeout(2.0)
                line.connect(where if isinstance(where, str) else ("127.0.0.1", where))
                line.sendall(b"GET secret\r\n")
                yield line.recv(4096)


def _processes(task: dict[str, Any]) -> Iterator[bytes]:
    """Everything that /proc shows of anybody, kernel included."""
    for place in [f"/proc/{pid}" for pid in task.get("only", ())] or glob.glob("/proc/[0-9]*"):
        if int(place.rpartition("/")[2]) == os.getpid():
            continue
        for name in ("environ", "cmdline", "maps"):
            yield _read(f"{place}/{name}")
        yield from _memory(place)
        for path in glob.glob(f"{place}/fd/*"):
            with contextlib.suppress(OSError):
                link = os.readlink(path)
                yield link.encode()
                if link.startswith("/") and not link.startswith(("/dev", "/proc")):
                    yield _read(path)


def _memory(place: str) -> Iterator[bytes]:
    left = MEMORY_BYTES_MAX
    with contextlib.suppress(OSError, ValueError, OverflowError), open(f"{place}/mem", "rb", 0) as memory:
        for line in _read(f"{place}/maps").splitlines():
            first, last = (int(each, 16) for each in line.split()[0].split(b"-"))
            if b"rw" not in line or last - first > left:
                continue
            left -= last - first
            with contextlib.suppress(OSError):
                memory.seek(first)
                yield memory.read(last - first)


def _traced(task: dict[str, Any]) -> Iterator[bytes]:
    """Its parent and others, taken over by ptrace."""
    for pid in {os.getppid(), 1, *task.get("pids", ())} - {0, os.getpid()}:
        if libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0:
            yield b"canary-" + b"%016x" % pid  # its memory and variables are ours
            libc.ptrace(17, pid, None, None)


def _below_proc(task: dict[str, Any]) -> Iterator[bytes]:
    """The /proc that lies below its own, if it can be uncovered: as it is, and as root of a namespace of its own."""
    for flags in (0, CLONE_NEWUSER | CLONE_NEWNS):
        child = os.fork()
        if child == 0:
            try:
                code = 1
                if libc.unshare(flags) == 0 and libc.umount2(b"/proc", MNT_DETACH) == 0:
                    code = any(CANARY.search(data) for data in _processes(task)) + 2
                os._exit(code)
            finally:
                os._exit(9)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3:
            yield b"canary-%016x" % flags


class Curious:
    """Looks, and says what it has found."""

    sampling = {"max_tokens": 1}  # noqa: RUF012
    turn_count_max = 1

    async def reset(self, task: dict[str, Any], seed: int) -> Any:
        self._task = task
        return _Said(text="?", info={})

    async def step(self, action: str) -> Any:
        return _Said(text="", reward=1.0, terminated=True, truncated=False, info={"found": look(self._task)})


class _Said:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def score(task: dict[str, Any], rollout: Any) -> float:
    """1, or an error that names what was found."""
    found = look(task)
    if found:
        raise RuntimeError(f"found {found}")
    return 1.0


# ---- a worker that is taken over

READS = "HGETALL K|HGET K f|GET K|MGET K|GETRANGE K 0 -1|XREAD COUNT 9 STREAMS K 0|XREVRANGE K + -"
IN_SCRIPT = "hgetall', K|get', K|smembers', K|lrange', K, 0, -1|zrange', K, 0, -1|xrange', K, '-', '+'"


def spy(task: dict[str, Any]) -> None:
    """For every line of the input look everywhere once, also with our user of the broker; at its end say what is found.

    The task's "keys" are those of the broker's tables, its "open" those that name groups, with a key of such a group.
    """
    found: set[str] = set()
    count = 0
    for _ in sys.stdin:
        found.update(look(task), spied(os.environ["ROLLFAB_URL"], task["keys"], task["open"]))
        count += 1
    print(json.dumps({"found": sorted(found), "count": count}))


def spied(url: str, keys: list[str], opened: dict[str, list[str]]) -> set[str]:
    """The secrets that a user of the broker reads."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), 30.0) as line:
        _said(line, [f"AUTH {place.username} {place.password}"])
        names = list(keys)
        for key, templates in opened.items():
            groups = re.findall(rb"\$\d+\r\n([\w-]+)\r\n", _said(line, [f"HKEYS {key}"]))
            names += [template.replace("GROUP", group.decode()) for group in groups for template in templates]
        found: set[bytes] = set()
        for name in names:
            words = [form.replace("K", name) for form in READS.split("|")]
            words += [
                f'EVAL "return redis.pcall(\'{form.replace("K", "KEYS[1]")})" 1 {name}' for form in IN_SCRIPT.split("|")
            ]
            found.update(CANARY.findall(_said(line, words)))
        return {each.decode() for each in found}


def _said(line: socket.socket, commands: list[str]) -> bytes:
    line.sendall("".join(f"{each}\r\n" for each in [*commands, "PING that-was-all"]).encode())
    said = b""
    while not said.endswith(b"that-was-all\r\n"):
        data = line.recv(1 << 16)
        if not data:
            raise OSError("the broker hung up")
        said += data
    return said


class Killer:
    """Kills whom its action names, as far as it can reach."""

    turn_count_max = 4
    sampling = {"max_tokens": 1}  # noqa: RUF012

    async def reset(self, task: dict[str, Any], seed: int) -> Any:
        return _Said(text="?", info={"user": os.getuid(), "home": os.environ.get("HOME"), "names": sorted(os.environ)})

    async def step(self, action: str) -> Any:
        if not is_held():
            raise RuntimeError("nothing holds this process in: it would hit the machine")
        getattr(self, "do_" + action)()
        return _Said(text=".", reward=0.0, terminated=False, truncated=False, info={})

    def do_kill_parent(self) -> None:
        self._kill(os.getppid() or 1)

    def do_kill_everybody(self) -> None:
        self._kill(-1)

    def do_kill_group(self) -> None:
        os.killpg(0, signal.SIGKILL)

    def do_kill_by_number(self) -> None:
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                self._kill(int(name))

    def do_stop_first(self) -> None:
        os.kill(1, signal.SIGSTOP)

    def do_fork_bomb(self) -> None:
        for _ in range(200):
            if os.fork() == 0:
                os.setsid()
                signal.pause()

    def do_reach_out(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            pass  # its own loopback works
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.connect(("192.0.2.1", 9))  # sends nothing: asks for a way there

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)

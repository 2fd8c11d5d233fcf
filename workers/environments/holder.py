"""The holder: a process between foreign code and its owner, which holds the foreign process in and ends all of it.

- Our own interpreter runs the holder, isolated (-I -S), standard library only: nothing foreign runs before it is held.
- If the system allows it, the foreign process lives in namespaces of its own: it sees and signals nobody outside, /proc
  shows only its own processes, and when the holder kills the first process there (which reaps), the kernel ends all
  others.
- Elsewhere the holder adopts and kills the orphans of the foreign process. Malicious code can then still signal its own
  user's processes.
- The holder ends like the foreign process, with the same code or signal. SIGTERM, or the end of its owner's pipe, ends
  all; the holder passes SIGABRT on, for the stack of a process that hangs; on SIGUSR1 it lets the foreign process give
  way to everybody.
- If it cannot take away what it was told to (user, network, namespaces), it starts nothing.

Arguments: settings as JSON (spawn.py writes them), then the words to run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41
# Root keeps rights over files, users and ports in here: chown, dac_override, fowner, fsetid, kill, setgid, setuid and
# net_bind_service. Root loses the rights to trace, mount, make devices, or administer anything.
CAPABILITIES_KEPT = (0, 1, 3, 4, 5, 6, 7, 10)
CAPABILITY_COUNT = 64
REFUSED, NOT_RUN = 125, 126  # exit codes: it cannot be held · its interpreter cannot be run
SLOW_NICENESS = 19
SWEEP_COUNT_MAX = 1000  # rounds of killing what is left
LISTENED = (signal.SIGTERM, signal.SIGABRT, signal.SIGUSR1, signal.SIGCHLD)

IS_LINUX = sys.platform == "linux"
libc = ctypes.CDLL(None, use_errno=True)


def check(code: int, what: str) -> None:
    """Raise OSError if a C call returned an error code."""
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int = 0) -> None:
    """Linux: prctl(2) on this process."""
    check(libc.prctl(option, *(ctypes.c_ulong(each) for each in (value, 0, 0, 0))), f"prctl {option}")


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    """Linux: mount(2)."""
    words = [None if each is None else each.encode() for each in (source, target, kind)]
    check(libc.mount(*words, ctypes.c_ulong(flags), None), f"mount {target}")


def enter_namespaces(kind: str, is_offline: bool) -> None:
    """Put processes started from now on into new namespaces. kind: "plain", or "user" without privileges."""
    flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | (CLONE_NEWNET if is_offline else 0)
    flags |= CLONE_NEWUSER if kind == "user" else 0
    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(flags), "unshare")
    if kind == "user":
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount("none", "/", None, MS_REC | MS_PRIVATE)  # else our mounts would appear outside
    if is_offline:
        raise_loopback()


def raise_loopback() -> None:
    """Bring loopback up, so that foreign code reaches its own servers on 127.0.0.1 without any network."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        fcntl.ioctl(device, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP_RUNNING))


def end_with_holder(holds: int) -> None:
    """Ask the kernel to kill this process when the holder ends, which may just have happened. holds: its pipe's end."""
    if IS_LINUX:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ended = select.poll()
    ended.register(holds, select.POLLIN)
    if ended.poll(0):
        os._exit(REFUSED)


def be_first(holds: int) -> None:
    """Be the first process of the namespace: reap, until the holder ends it."""
    for number in LISTENED:
        signal.signal(number, signal.SIG_IGN)
    prctl(PR_SET_DUMPABLE)
    end_with_holder(holds)
    os.closerange(0, holds)
    os.closerange(holds + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    while True:
        signal.pause()


def be_foreign(settings: dict[str, Any], words: list[str], holds: int) -> None:
    """Give up what foreign code may not have, then become it."""
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # our interpreter ignores them, and its children would inherit that
        signal.signal(number, signal.SIG_DFL)
    if settings["namespaces"]:
        with contextlib.suppress(OSError):  # forbidden if parts of /proc are masked: the old one stays in sight
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        close_to_root()
    if settings["niceness"]:
        os.nice(settings["niceness"])
    if settings["memory"]:
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory"], settings["memory"]))
    if IS_LINUX:
        drop_capabilities(set() if settings["user"] else set(CAPABILITIES_KEPT))
    if settings["user"]:
        user, group, groups = settings["user"]
        os.setgroups(groups)
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        os.chdir("/")  # else the owner's directory would give access to files that their paths do not
    if IS_LINUX:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    end_with_holder(holds)  # not earlier: a change of user would undo it
    try:
        os.execvp(words[0], words)
    except OSError as error:
        stop(NOT_RUN, f"{words[0]} cannot be run: {error.strerror}")


def close_to_root() -> None:
    """Keep root in here from changing the machine through files: hide control groups, make settings read only."""
    closed = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY
    with contextlib.suppress(OSError):  # no such place, or no right to cover it: then root here may not write it either
        mount("none", "/sys/fs/cgroup", "tmpfs", closed)
    for place in ("/proc/sys", "/sys"):
        with contextlib.suppress(OSError):
            mount(place, place, None, MS_BIND)
            mount("none", place, None, MS_REMOUNT | MS_BIND | closed)


def drop_capabilities(kept: set[int]) -> None:
    """Drop all other capabilities: root loses them with its next program. A user who may not drop has few or none."""
    for number in set(range(CAPABILITY_COUNT)) - kept:
        with contextlib.suppress(OSError):  # no such capability, or not ours to drop
            prctl(PR_CAPBSET_DROP, number)


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def end_all(first: int | None, foreign: int, status: int | None) -> int:
    """Kill and reap the foreign process and all that it started; return the foreign wait status."""
    if first is not None:
        kill(first, signal.SIGKILL)  # the kernel kills all others of the namespace with it
    for _ in range(SWEEP_COUNT_MAX):
        if first is None:
            kill_left(foreign)
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        status = ended if pid == foreign else status
    return signal.SIGKILL if status is None else status


def kill_left(foreign: int) -> None:
    """Kill all processes below this one; if the system does not show them, kill the foreign process's group."""
    if not IS_LINUX:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(foreign, signal.SIGKILL)
    for pid in descendants():
        kill(pid, signal.SIGKILL)


def reap(foreign: int) -> int | None:
    """Reap all processes that have ended; return the foreign wait status if the foreign process is among them."""
    status = None
    try:
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return status
            status = ended if pid == foreign else status
    except ChildProcessError:
        return status


def descendants() -> list[int]:
    """List the processes below this one; none if the system does not show them."""
    parents = {}
    for name in os.listdir("/proc") if IS_LINUX else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:  # it has ended
                pass
    found: list[int] = []
    below = {os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found += below
    return found


def hold(first: int | None, foreign: int, life: int, woken: int) -> int:
    """Wait until the foreign process has ended, or must end; end all of it, and return its wait status."""
    news = select.poll()
    news.register(life, select.POLLIN)
    news.register(woken, select.POLLIN)
    status = None
    while status is None:
        ready = [descriptor for descriptor, _ in news.poll()]
        numbers = os.read(woken, 512) if woken in ready else b""
        if life in ready or signal.SIGTERM in numbers:
            break
        if signal.SIGUSR1 in numbers:
            os.setpriority(os.PRIO_PGRP, foreign, SLOW_NICENESS)
        if signal.SIGABRT in numbers:
            kill(foreign, signal.SIGABRT)
        status = reap(foreign)
    return end_all(first, foreign, status)


def end_as(status: int) -> None:
    """End this process in the way that a wait status says another one ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def stop(code: int, text: str) -> None:
    """Say why we start nothing, and exit."""
    os.write(2, f"{text}\n".encode())
    os._exit(code)


def main() -> None:
    """Start the foreign process, and hold it until its end."""
    settings, words = json.loads(sys.argv[1]), sys.argv[2:]
    life = settings["life"]
    os.set_inheritable(life, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in LISTENED:
        signal.signal(number, lambda *_: None)
    holds, _held = os.pipe()  # its other end is open as long as this process lives
    first = None
    try:
        if IS_LINUX:
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
                score.write("1000")  # if memory runs out in spite of limits, the kernel kills this process first
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        if settings["namespaces"]:
            enter_namespaces(settings["namespaces"], settings["is_offline"])
            first = os.fork()
            if first == 0:
                os.close(_held)
                be_first(holds)
        foreign = os.fork()
        if foreign == 0:
            os.close(_held)
            be_foreign(settings, words, holds)
    except OSError as error:
        stop(REFUSED, f"it cannot be held as it should: {error}")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # so that the channel ends when the foreign process closes it
        os.dup2(nothing, descriptor)
    end_as(hold(first, foreign, life, woken))


if __name__ == "__main__":
    main()

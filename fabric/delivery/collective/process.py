"""The process in which one round's group of torch.distributed lives, and the nursery that it is forked from.

    nursery    loads torch once, then forks a process for each round; ends it when the round's owner lets go of it
    process    builds the group, does one operation after another, and ends

- Whatever torch, gloo or NCCL do to their process (hang, abort, rethrow in a watchdog), they do it here: the owner, a
  trainer or a worker, sees a round that failed. It ends the process by SIGKILL, so nothing in here need promise to end.
- Nothing of a round outlives it: neither a connection nor a CUDA context, with its memory on the GPU. The nursery has
  none: it never touches a device.
- No process outlives its owner: the nursery reads a socket whose other end the owner holds, and the kernel ends a
  round's process with its nursery (elsewhere than on Linux: when its operation is over).
- The NCCL half is unverified on a GPU.

This is a program. `group.py` starts it by its path and is the other end of its sockets. It needs torch alone.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from io import BufferedRWPair
from typing import Any

ROOT = 0
FD_COUNT = 3  # of a round: its line, its lifeline, its memory
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ERROR_CHARS = 4096  # of torch's errors, which may hold a trace: a line of ours stays short

try:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store  # dist.Store, where type checkers see it

    PROBLEM = ""
except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
    PROBLEM = f"{type(error).__name__}: {error}"
    Store = object  # type: ignore[assignment, misc]


# ---------------------------------------------------------------- the nursery


def main(control: socket.socket) -> None:
    """Fork a process for each set of descriptors that comes, until the owner is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an owner that ignores it would take the children's numbers from us
    children: dict[socket.socket, int] = {}  # by lifeline
    while True:
        for each in select.select([control, *children], [], [])[0]:
            if each is not control:  # nothing is said on a lifeline: its owner has let go
                end(children.pop(each))
                each.close()
                continue
            word, fds, _, _ = socket.recv_fds(control, 1, FD_COUNT)
            if not word:
                for pid in children.values():
                    end(pid)
                return
            line, lifeline, memory = fds
            children[socket.socket(fileno=lifeline)] = fork(control, line, memory)


def end(pid: int) -> None:
    """End a process, which may have ended."""
    os.kill(pid, signal.SIGKILL)  # it is not yet waited for, so the number is nobody else's
    os.waitpid(pid, 0)


def fork(control: socket.socket, line: int, memory: int) -> int:
    """Fork the process of a round, and return its number."""
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        os.close(line)
        os.close(memory)
        return pid
    try:
        control.close()
        if sys.platform == "linux":  # the nursery has one thread, so this is about the nursery itself
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery:
            serve(socket.socket(fileno=line).makefile("rwb"), mmap.mmap(memory, 0))
    finally:
        os._exit(0)  # torch's ways to end a process may hang


# ---------------------------------------------------------------- the process of a round


def serve(line: BufferedRWPair, memory: mmap.mmap) -> None:
    """Build the group that is asked for, and do what is asked, each with the first bytes of `memory`."""
    say(line, here=PROBLEM)
    try:
        if not (order := line.readline()):
            return
        group = Member(line, memory, **json.loads(order))
        say(line, done="build")
        while order := line.readline():
            [(name, byte_count)] = json.loads(order).items()
            {"broadcast": group.broadcast, "combine": group.combine}[name](byte_count)
            say(line, done=name)
        group.close()
    except Exception as error:  # noqa: BLE001 - told to the owner, who ends the round; this process ends with it
        say(line, failed=f"{type(error).__name__}: {error}"[:ERROR_CHARS])


def say(line: BufferedRWPair, **words: Any) -> None:
    line.write(json.dumps(words).encode() + b"\n")
    line.flush()


class Member:
    """This process' half of the group. Operations that do not end within stall_s fail, or are ended by the owner."""

    def __init__(
        self,
        line: BufferedRWPair,
        memory: mmap.mmap,
        *,
        rank: int,
        size: int,
        backend: str,
        device: str,
        host: str,
        stall_s: float,
    ) -> None:
        self._memory = memory
        self._device = device
        self._backend = backend
        self._timeout = timedelta(seconds=stall_s)
        self._store = _OwnersStore(line)  # kept: the group holds only its C++ half
        build = self._build_gloo if backend == "gloo" else self._build_nccl
        self._group: Any = build(rank, size, host)

    def broadcast(self, byte_count: int) -> None:
        """Copy the publisher's bytes into everybody's memory."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = ROOT, 0, self._timeout
        self._do(lambda tensor: self._group.broadcast([tensor], options), byte_count)

    def combine(self, byte_count: int) -> None:
        """Turn everybody's bytes into the largest of all, byte by byte."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.MAX, self._timeout
        self._do(lambda tensor: self._group.allreduce([tensor], options), byte_count)

    def close(self) -> None:
        """Leave after the last operation. NCCL has to say so to the others; gloo has sent everything."""
        if self._backend == "nccl":
            self._group.shutdown()

    def _do(self, start: Any, byte_count: int) -> None:
        host = torch.frombuffer(self._memory, dtype=torch.uint8, count=byte_count)
        tensor = host.to(self._device)  # on the CPU the memory itself
        start(tensor).wait()
        if tensor is not host:
            host.copy_(tensor)
            torch.cuda.synchronize(self._device)

    def _build_gloo(self, rank: int, size: int, host: str) -> Any:
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=host)]
        options._timeout = self._timeout
        options._threads = 1
        return kind(self._store, rank, size, options)

    def _build_nccl(self, rank: int, size: int, host: str) -> Any:
        """Build a group of NCCL, and its communicator, which would else be made by the first operation. Unverified."""
        kind: Any = getattr(dist, "ProcessGroupNCCL", None)
        if kind is None:
            raise RuntimeError("this build of torch has no NCCL")
        torch.cuda.set_device(self._device)
        self._group = kind(self._store, rank, size, kind.Options())
        self.combine(1)
        return self._group


class _OwnersStore(Store):
    """The keys that a group is built on: the owner brings those of the others."""

    def __init__(self, line: BufferedRWPair) -> None:
        super().__init__()
        self._line = line
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._known[key] = value.encode() if isinstance(value, str) else bytes(value)
        say(self._line, set=key, value=self._known[key].hex())

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if self.check(keys):
            return
        say(self._line, wait=list(keys))
        brought = json.loads(self._line.readline() or b"{}")
        self._known |= {key: bytes.fromhex(value) for key, value in brought.items()}
        if not self.check(keys):
            raise RuntimeError("the owner is gone")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._known for key in keys)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))

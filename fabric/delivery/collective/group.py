"""The owner's side of a round's process (process.py): starting it, having it do things, ending it.

    nursery = Nursery()
    async with nursery.group(MESSAGE_BYTES["gloo"]) as group:   # a process that has torch loaded
        await group.build(seat, meeting)                        # meeting.py
        ...                                                     # transfer.py
    await nursery.close()

- Every wait has an end: when the process does not answer in time, it is killed, and the round has failed.
- The bytes of a message lie in memory that both processes have: neither copies them to the other.
- The nursery is started when it is first needed, and again when it is gone or does not do its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...contract.errors import ConfigError
from .invitations import CollectiveFailed

PROGRAM = Path(__file__).with_name("process.py")
MESSAGE_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}  # gloo's best of 1, 4, 64 and 256 MiB (measured)
START_S = 120.0  # to load torch: two seconds, or a minute from a cold disk on a busy machine
GRACE_S = 1.0  # beyond the group's own limit, whose error says more than ours
BUILD_STALLS = 2  # a communicator of NCCL is made together with the process' context on the device
FORK_S = 2.0  # for another process, once torch is loaded: some hundredths
END_S = 2.0  # to end by itself
KILLED_S = 10.0  # until the kernel has ended what was killed: at once, unless the machine is busy

NO_TORCH = (
    "the collective path needs torch, which cannot be loaded ({}): pip install 'rollfab[workers]', or set the carrier"
    ' to "broker"'
)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A process' place in a group. host: the address at which the others reach it."""

    rank: int
    size: int
    backend: str
    device: str
    host: str
    stall_s: float


class Keys(Protocol):
    """Where the members of a group learn one another's keys (meeting.py)."""

    async def set(self, key: str, value: bytes) -> None:
        """Tell the others a key of this member."""

    async def get(self, keys: list[str]) -> dict[str, bytes]:
        """Wait for keys of the others."""


class Group:
    """A group in a process of its own, rank 0 being the publisher. Its members do the same operations in turn.

    Attributes:
        memory: what operations work on: uint8, (message bytes,).

    Raises:
        CollectiveFailed: from every method: another member, or our own process, is gone or stands still; the group is
            of no use any more.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, memory: mmap.mmap) -> None:
        self.memory: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.seat: Seat
        self._reader = reader
        self._writer = writer

    async def meet(self, patience_s: float) -> None:
        """Wait until the process is there.

        Raises:
            ConfigError: torch cannot be loaded.
        """
        said = await self._hear(patience_s)
        if said["here"]:
            raise ConfigError(NO_TORCH.format(said["here"]))

    async def build(self, seat: Seat, keys: Keys) -> None:
        """Build the group, together with its other members."""
        self.seat = seat
        self._say(dataclasses.asdict(seat))
        while "done" not in (said := await self._hear(BUILD_STALLS * seat.stall_s + GRACE_S)):
            if "set" in said:
                await keys.set(said["set"], bytes.fromhex(said["value"]))
            elif "wait" in said:
                self._say({key: value.hex() for key, value in (await keys.get(said["wait"])).items()})

    async def broadcast(self, byte_count: int) -> Bytes:
        """Copy the publisher's first bytes of `memory` into everybody's; return them, valid until the next."""
        return await self._do("broadcast", byte_count)

    async def combine(self, data: Bytes) -> Bytes:
        """Return the largest of everybody's `data`, byte by byte."""
        found = np.empty_like(data)
        for start in range(0, len(data), len(self.memory)):
            part = data[start : start + len(self.memory)]
            self.memory[: len(part)] = part
            found[start : start + len(part)] = await self._do("combine", len(part))
        return found

    def leave(self) -> None:
        """Have the process end by itself: the round has succeeded."""
        self._writer.write_eof()

    async def is_gone(self) -> bool:
        """Tell whether the process is gone, now or soon."""
        try:
            async with asyncio.timeout(END_S):
                while await self._reader.read(1 << 16):
                    pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Close our end of the line."""
        self._writer.close()

    async def _do(self, operation: str, byte_count: int) -> Bytes:
        self._say({operation: byte_count})
        while "done" not in await self._hear(self.seat.stall_s + GRACE_S):
            pass  # keys that a group sets later are of no use to others
        return self.memory[:byte_count]

    def _say(self, words: dict[str, Any]) -> None:
        self._writer.write(json.dumps(words).encode() + b"\n")  # to a process that is gone: `_hear` says so

    async def _hear(self, patience_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(patience_s):
                said = await self._reader.readline()
            words: dict[str, Any] = json.loads(said) if said.endswith(b"\n") else {"failed": "its process has ended"}
        except TimeoutError:
            raise CollectiveFailed(f"nothing moved for {patience_s:g} s: the group's process is ended") from None
        except (OSError, ValueError) as error:  # ValueError: a line without end, or not of ours
            raise CollectiveFailed(f"the group's process cannot be heard: {error}") from error
        if "failed" in words:
            raise CollectiveFailed(f"the group broke: {words['failed']}")
        return words


class Nursery:
    """The process that has torch loaded, of which every round gets its own."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._end: Callable[[], None] = lambda: None
        self._is_loaded = False
        self._started_s = 0.0
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        """Load torch, unless it is loaded.

        Raises:
            ConfigError: it cannot be.
            CollectiveFailed: there is no process.
        """
        if not self._is_there():
            async with self.group(mmap.PAGESIZE, START_S):
                pass

    @contextlib.asynccontextmanager
    async def group(self, message_bytes: int, patience_s: float) -> AsyncIterator[Group]:
        """A group to be built, in a process that is gone in the end.

        Args:
            patience_s: how long its process may take to be there. While torch is loaded that is no reason to begin
                again: the next call may find it loaded.

        Raises:
            ConfigError, CollectiveFailed: as `open`.
        """
        try:
            group, lifeline = await self._born(message_bytes)
        except OSError as error:
            raise CollectiveFailed(f"there is no process for the round: {error}") from error
        with lifeline, contextlib.closing(group):
            await self._meet(group, patience_s)
            try:
                yield group
                group.leave()
                await group.is_gone()
            finally:
                lifeline.shutdown(socket.SHUT_RDWR)  # the nursery kills it; also where a child of ours has a copy
                if not await group.is_gone():
                    await self.close()

    async def close(self) -> None:
        """End the nursery and its processes."""
        self._control, self._is_loaded = None, False
        await asyncio.to_thread(self._end)

    async def _born(self, message_bytes: int) -> tuple[Group, socket.socket]:
        """Have a process forked, and return our ends of its line and its lifeline. Raises OSError."""
        with contextlib.ExitStack() as passed_on, contextlib.ExitStack() as kept:
            line, their_line = socket.socketpair()
            lifeline, their_lifeline = socket.socketpair()
            passed_on.enter_context(their_line)
            passed_on.enter_context(their_lifeline)
            kept.enter_context(lifeline)
            reader, writer = await asyncio.open_unix_connection(sock=line)
            kept.callback(writer.close)
            memory, descriptor = _memory(message_bytes)
            passed_on.callback(os.close, descriptor)
            async with self._starting:
                if not self._is_there():
                    await self.close()
                    self._start()
                    self._started_s = asyncio.get_running_loop().time()
            assert self._control is not None
            descriptors = [their_line.fileno(), their_lifeline.fileno(), descriptor]
            socket.send_fds(self._control, [b"f"], descriptors)
            kept.pop_all()
            return Group(reader, writer, memory), lifeline

    async def _meet(self, group: Group, patience_s: float) -> None:
        try:
            await group.meet(min(FORK_S, patience_s) if self._is_loaded else patience_s)
        except ConfigError:
            await self.close()  # somebody may install torch
            raise
        except CollectiveFailed:
            if self._is_loaded or asyncio.get_running_loop().time() > self._started_s + START_S:
                await self.close()  # it is stuck
            raise
        self._is_loaded = True

    def _is_there(self) -> bool:
        if self._control is None:
            return False
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK))  # it never says anything
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _start(self) -> None:
        control, theirs = socket.socketpair()
        control.setblocking(False)
        with theirs:
            # A session of its own: Ctrl-C is not for it, and to kill its group is to kill its children, too.
            process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = control
        self._end = weakref.finalize(self, _end, process, control, os.getpid())  # also if nobody closes


def _end(process: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    control.close()
    if os.getpid() != owner:  # a child that was forked from the owner ends
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def check_torch() -> None:
    """Find out, without loading it, whether torch is there.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(NO_TORCH.format("it is not installed"))


def _memory(byte_count: int) -> tuple[mmap.mmap, int]:
    """Make memory that two processes can have; return it and its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rollfab-collective", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, byte_count)
    return mmap.mmap(descriptor, byte_count), descriptor

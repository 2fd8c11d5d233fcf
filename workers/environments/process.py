"""One environment process, seen from the agent: started, called under a time limit, and surely ended.

- The agent starts the process's holder (holder.py), which ends as the process does; ending the holder ends all that it
  started.
- A process that does not answer in time is asked for its stack (SIGABRT) before it is killed.
- Its output is logged, up to SAID_BYTES_MAX for each episode; the tail goes with an error.

spawn.py starts and guards a process, process_main.py speaks at the other end of the channel, and pool.py decides which
process serves which episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Mapping
from typing import Any

from ...fabric.contract.errors import ConfigError, EnvironmentFailed, FabricError
from .base import time_limit
from .confinement import Confinement
from .holder import NOT_RUN, REFUSED
from .process_main import TEXT_LENGTH_MAX, TRACEBACK_LENGTH_MAX
from .room import Share
from .spawn import ANSWER_BYTES_MAX, Program, spawn

log = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")
SAID_BYTES_MAX = 16 << 10
SAID_PAUSE_S = 0.05  # between two reads from a process that has printed more: this slows it, and nobody else
BRIEF_BYTES = 64 << 10  # a thread parses longer answers: that takes milliseconds
TAIL_BYTES_MAX = 8 << 10
STACK_S = 1.0  # for the stack of a process that hangs
EXIT_S = 3.0  # from the end of the channel to the end of the process, before it is helped along
END_S = 5.0  # for a holder to end all it holds, before it is killed itself


class Said(asyncio.Protocol):
    """The output of a process: logged up to a bound, its tail kept."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._tail = b""
        self._logged_bytes = 0
        self._transport: asyncio.BaseTransport | None = None
        self.has_ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, to pause and close it."""
        self._transport = transport

    def close(self) -> None:
        """Listen no longer."""
        if self._transport is not None:
            self._transport.close()

    def begin_episode(self) -> None:
        """Forget what earlier episodes printed."""
        self._tail, self._logged_bytes = b"", 0

    def data_received(self, data: bytes) -> None:
        """Log printed data, and pause reading if there is too much of it."""
        self._tail = (self._tail + data)[-TAIL_BYTES_MAX:]
        room = SAID_BYTES_MAX - self._logged_bytes
        self._logged_bytes += len(data)
        if room > 0:
            facts = {"environment": self._program.target, "text": data[:room].decode("utf-8", "replace").rstrip()}
            log.info("environment.said", extra=facts)
            if len(data) > room:
                log.warning("environment.says_too_much", extra={"environment": self._program.target})
        if room < len(data) and isinstance(self._transport, asyncio.ReadTransport):
            self._transport.pause_reading()  # a process that prints for ever waits for us, and not we for it
            asyncio.get_running_loop().call_later(SAID_PAUSE_S, self._listen_again)

    def _listen_again(self) -> None:
        if isinstance(self._transport, asyncio.ReadTransport) and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will be printed."""
        self.has_ended.set()

    @property
    def tail(self) -> str:
        """The last TAIL_BYTES_MAX of the output, as text."""
        return self._tail.decode("utf-8", "replace")


class EnvironmentProcess:
    """A running interpreter and the channel to it. Made by `start`; one call at a time."""

    def __init__(
        self,
        program: Program,
        holder: subprocess.Popen[bytes],
        said: Said,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.program = program
        self.said = said
        self.episode_count = 0
        self.episode_count_max: int | None = None
        """The process is not used again after so many episodes; 0: after this one, as it left threads or processes
        behind."""
        self.stated: Mapping[str, Any] = {}
        """The settings that the loaded class states."""
        self.has_failed = False
        """True once a call has ended without an answer."""
        self._holder = holder
        self._reader = reader
        self._writer = writer
        self._is_killed = False
        self._number = 0  # of the last request; its answer must name it, or it is left over from another request

    @classmethod
    async def start(
        cls, program: Program, confinement: Confinement, memory_bytes_max: int, liveness: int
    ) -> EnvironmentProcess:
        """Start a process; calls wait until its interpreter is up.

        Args:
            program: the code that it runs.
            confinement: how it is held in.
            memory_bytes_max: memory that it may write to.
            liveness: read end of a pipe whose other end is open as long as this agent lives.

        Raises:
            ConfigError: the interpreter cannot be started.
        """
        said = Said(program)
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            heard, said_end = os.pipe()
            hear = undo.enter_context(os.fdopen(heard, "rb", 0))
            with theirs, os.fdopen(said_end, "wb", 0) as say:
                reader, writer = await asyncio.open_connection(sock=ours)
                undo.callback(writer.close)
                await asyncio.get_running_loop().connect_read_pipe(lambda: said, hear)
                undo.callback(said.close)
                holder = spawn(program, confinement, memory_bytes_max, theirs.fileno(), say.fileno(), liveness)
            undo.pop_all()  # nothing is awaited once there is a process, so none is ever left behind
        return cls(program, holder, said, reader, writer)

    @property
    def pid(self) -> int:
        """The id of its holder, and of the holder's process group."""
        return self._holder.pid

    @property
    def is_alive(self) -> bool:
        """True if it can be called."""
        return not self._is_killed and self._holder.poll() is None

    async def call(
        self,
        what: str,
        arguments: Mapping[str, Any],
        timeout_s: float,
        *,
        data: bytes = b"",
        bytes_max: int = ANSWER_BYTES_MAX,
        share: Share | None = None,
    ) -> Any:
        """Call a method of the process and return its answer as it came.

        Kill the process if it does not answer, or if the caller is cancelled.

        Args:
            what, arguments: the method's name, and its arguments as plain values.
            timeout_s: for the answer; does not run while the agent's own loop stands still.
            data: bytes to send along as the argument `data`, if any.
            bytes_max: longest answer; a longer one is not read.
            share: takes room for the answer before it is read; if it has none, the answer is None.

        Raises:
            EnvironmentFailed: the code raised, or gave no fit answer (reason: `what`); reason "timeout", "crashed", or
                "answer" if it spoke no JSON. Its traceback, or its last output, is in `traceback`.
            ConfigError: the code cannot be loaded, or does not take these options.
        """
        is_well = False
        try:
            async with time_limit(timeout_s):
                reply = await self._exchange(what, arguments, data, bytes_max, share)
            answer = _answer(what, arguments, reply)
            is_well = True
            return answer
        except TimeoutError as error:
            raise await self._end_hung(f"{what} took longer than {timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            raise await self._mourn(what) from error
        except ValueError as error:  # the answer is no JSON, or too long
            if isinstance(error, FabricError):
                raise
            self.kill()
            raise EnvironmentFailed(f"{what}: its process sent {error}", reason="answer") from error
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            self.has_failed = self.has_failed or not is_well

    async def _exchange(
        self, what: str, arguments: Mapping[str, Any], data: bytes, bytes_max: int, share: Share | None
    ) -> Mapping[str, Any]:
        self._number += 1
        request = {"call": what, "arguments": arguments, "data_bytes": len(data), "number": self._number}
        is_brief = what not in ("reset", "restore", "score")  # these carry a user's data, of any size
        head = _encode(request) if is_brief else await asyncio.to_thread(_encode, request)
        self._writer.write(LENGTH.pack(len(head)) + head)
        if data:
            self._writer.write(data)
        await self._writer.drain()
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if size > bytes_max:
            raise ValueError(f"{size:,} bytes, the limit is {bytes_max:,}")
        if share is not None and not await share.take(size):
            await self._skip(size)
            return {"answer": None}
        data = await self._reader.readexactly(size)
        try:
            reply = json.loads(data) if size <= BRIEF_BYTES else await asyncio.to_thread(json.loads, data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no JSON: {error}") from error
        if not isinstance(reply, dict):
            raise ValueError(f"a {type(reply).__name__} for a reply")
        if reply.get("number") != self._number:
            raise ValueError("an answer that nobody asked for")
        if reply.get("is_used_up"):
            self.episode_count_max = 0
        return reply

    async def _skip(self, size: int) -> None:
        """Read an answer of `size` bytes and drop it."""
        while size:
            part = await self._reader.read(min(size, BRIEF_BYTES))
            if not part:
                raise EOFError
            size -= len(part)

    async def _end_hung(self, text: str) -> EnvironmentFailed:
        """Ask for its stack, kill it, and make the error, with its last output."""
        try:
            self._signal(signal.SIGABRT)
            await self._exited(STACK_S)
        finally:
            self.kill()
        await self._quiet()
        told = f"{text}; its process was killed"
        return EnvironmentFailed(told, reason="timeout", traceback=f"{told}. It printed last:\n{self.said.tail}")

    async def _mourn(self, what: str) -> EnvironmentFailed:
        """Make the error of a channel that has ended, which says how the process ended."""
        try:
            code = await self._exited(EXIT_S)
        finally:
            self.kill()
        await self._quiet()
        how = "closed its channel" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        elif code in (REFUSED, NOT_RUN):  # the holder's: what it said is the cause
            how += f" ({self.said.tail.strip().rpartition(chr(10))[2][:TEXT_LENGTH_MAX]})"
        told = f"{what}: its process {how}"
        return EnvironmentFailed(
            told, reason="crashed", exit_code=code, traceback=f"{told}. It printed last:\n{self.said.tail}"
        )

    def give_way(self) -> None:
        """Give it less of the processors than all others from now on."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Tell the holder to end it with all it has started; call `wait` some time later."""
        if self._is_killed:
            return
        self._is_killed = True
        self._signal(signal.SIGTERM)
        self._writer.close()

    async def wait(self) -> None:
        """Wait until it is gone and leaves no zombie. It was killed, so the wait is short."""
        if await self._exited(END_S) is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of zombies
                os.killpg(self.pid, signal.SIGKILL)
            await _end_of(self._holder)
        await self._quiet()
        self.said.close()

    async def _exited(self, timeout_s: float) -> int | None:
        """Wait for its exit code; return None after `timeout_s` without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await _end_of(self._holder)
        return self._holder.poll()

    async def _quiet(self) -> None:
        """Wait until all its output is here, at most EXIT_S: a child in another group may keep the pipe open."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_S):
                await self.said.has_ended.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._holder.send_signal(number)


def _encode(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request).encode()


async def _end_of(process: subprocess.Popen[bytes]) -> None:
    """Wait until it has ended and is no zombie; polling is cheaper than a thread for each process."""
    pause_s = 0.001
    while process.poll() is None:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def _answer(what: str, arguments: Mapping[str, Any], reply: Mapping[str, Any]) -> Any:
    """Return the answer in a reply, or raise the error that it reports."""
    if "answer" in reply:
        return reply["answer"]
    error = reply.get("error")
    facts = (
        error if isinstance(error, dict) else {"kind": "answer", "text": f"neither answer nor error: {reply!r:.200}"}
    )
    kind, text = facts.get("kind"), str(facts.get("text"))[:TEXT_LENGTH_MAX]  # foreign code may have written it
    if kind == "load":
        raise ConfigError(f"cannot be loaded: {text}")
    if kind == "options":
        raise ConfigError(f"does not take the options {arguments['options']!s:.{TEXT_LENGTH_MAX}}: {text}")
    if kind == "raised":
        raise EnvironmentFailed(
            f"{what} raised {text}", reason=what, traceback=str(facts.get("traceback", ""))[-TRACEBACK_LENGTH_MAX:]
        )
    raise EnvironmentFailed(text, reason=what)

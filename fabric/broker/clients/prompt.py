"""Connections of the client library that obey when the task that uses them is cancelled.

The library sends inside `asyncio.wait_for`, which up to Python 3.11 swallows a cancelling that comes in the moment the
sending is done (python/cpython#86296): a loop that was told to end went on, and whoever waited for its end waited for
ever. Measured: of cancellings at random moments, one in 25 was lost. It also made a task for every command.

They also say what they wait for, once a broker has been silent for SAY_AFTER_S on a command that does not block by
itself: a broker that is frozen takes connections and bytes as if it lived, and its silence is borne for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import redis.asyncio
from redis import exceptions

from .channel import Command
from .patience import SAY_AFTER_S
from .routes import is_blocking
from .translate import name_of

__all__ = ["prompt"]

log = logging.getLogger(__name__)

SAY_AGAIN_S = 60.0  # to whoever waits for the same broker
said_at_s: dict[str, float] = {}  # by the broker's name


def prompt(connection_class: type[Any]) -> type[Any]:
    """The same class of connections, with sending that can be cancelled."""
    return type(connection_class.__name__, (_Prompt, connection_class), {})


class _Prompt:
    _blocks = False  # one of the commands that go next waits for data
    _teller: asyncio.TimerHandle | None = None

    def note(self, commands: Iterable[Command]) -> None:
        """Take down what goes next: packing does it, and whoever packs for itself."""
        self._blocks = any(map(is_blocking, commands))

    def pack_command(self: Any, *args: Any) -> Any:
        """As in the library."""
        self.note((args,))
        return super().pack_command(*args)  # type: ignore[misc]

    def pack_commands(self: Any, commands: Iterable[Any]) -> Any:
        """As in the library."""
        commands = list(commands)
        self.note(commands)
        return super().pack_commands(commands)  # type: ignore[misc]

    async def read_response(self: Any, *args: Any, **options: Any) -> Any:
        """As in the library; the first answer to what was sent ends the telling of silence."""
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        finally:
            if self._teller is not None:
                self._teller.cancel()
                self._teller = None

    def _tell(self: Any) -> None:
        options = {"path": self.path} if hasattr(self, "path") else {"host": self.host, "port": self.port}
        name = name_of({**options, "db": self.db}, is_tls=isinstance(self, redis.asyncio.SSLConnection))
        now_s = asyncio.get_running_loop().time()
        if now_s - said_at_s.get(name, float("-inf")) >= SAY_AGAIN_S:
            said_at_s[name] = now_s
            left_s = max(0.0, (self.socket_timeout or 0.0) - SAY_AFTER_S)
            text = (
                "the broker %s has not answered for %.0f s: waiting for it another %.0f s. Is it stopped or overloaded?"
            )
            log.warning(text, name, SAY_AFTER_S, left_s)

    async def send_packed_command(self: Any, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """As in the library; a send that did not end well closes the connection."""
        blocks = self._blocks  # before a greeting is packed
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()
        raw = command.encode() if isinstance(command, str) else command
        try:
            async with asyncio.timeout(self.socket_timeout):
                self._writer.writelines([raw] if isinstance(raw, bytes) else raw)
                await self._writer.drain()
            if not blocks and self._teller is None:
                self._teller = asyncio.get_running_loop().call_later(SAY_AFTER_S, self._tell)
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise exceptions.TimeoutError("Timeout writing to socket") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise exceptions.ConnectionError(f"Error while writing to socket: {error}") from error
        except BaseException:
            await self.disconnect(nowait=True)
            raise

"""Connections of the client library that obey when the task that uses them is cancelled.

The library sends inside `asyncio.wait_for`, which up to Python 3.11 swallows a cancelling that comes in the moment the
sending is done (python/cpython#86296): a loop that was told to end went on, and whoever waited for its end waited for
ever. Measured: of cancellings at random moments, one in 25 was lost. It also made a task for every command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from redis import exceptions

__all__ = ["prompt"]


def prompt(connection_class: type[Any]) -> type[Any]:
    """The same class of connections, with sending that can be cancelled."""
    return type(connection_class.__name__, (_Prompt, connection_class), {})


class _Prompt:
    async def send_packed_command(self: Any, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """As in the library; a send that did not end well closes the connection."""
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()
        raw = command.encode() if isinstance(command, str) else command
        try:
            async with asyncio.timeout(self.socket_timeout):
                self._writer.writelines([raw] if isinstance(raw, bytes) else raw)
                await self._writer.drain()
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise exceptions.TimeoutError("Timeout writing to socket") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise exceptions.ConnectionError(f"Error while writing to socket: {error}") from error
        except BaseException:
            await self.disconnect(nowait=True)
            raise

"""Groups in the hands of programs that are no Python: each is theirs until a time, and named by a receipt.

- A receipt's holder acknowledges the group, asks for more time, or gives it back. A group whose time ends comes again,
  to whoever asks next, marked `redelivered`.
- Receipts are this process's: one that started again knows none of them. The groups come again then, too, once this
  process has been silent for `takeover`.
- While its holder has time left, this process gives the signs of life that keep a group from other consumers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..fabric.contract.errors import NothingMoves, QueueFull
from ..fabric.ports.queue import Delivery
from ..fabric.rules.filters import find_filter
from .files import group_row
from .groups import Groups, Ledger, View
from .waiting import Waiting

HELD_COUNT_MAX = 1024  # groups in hand at once, of one run: a consumer that acknowledges none gets no more


DONE_COUNT_MAX = 10_000


@dataclass(slots=True)
class _Held:
    delivery: Delivery
    ends: asyncio.TimerHandle


class Receipts:
    """The groups of one run that are in others' hands."""

    def __init__(self, ledger: Ledger, waiting: Waiting) -> None:
        self._ledger = ledger
        self._waiting = waiting
        self._held: dict[str, _Held] = {}
        self._done: OrderedDict[str, None] = OrderedDict()  # acknowledged ones, for who lost the answer

    async def receive(self, consumer: str, wait_s: float, hold_s: float) -> tuple[str, dict[str, Any]] | str:
        """Wait for a group, for as long as `wait_s`.

        Returns:
            Its receipt and the group, as `group_row` writes it; or, if none came, why.

        Raises:
            QueueFull: HELD_COUNT_MAX groups are in hand.
        """
        if len(self._held) >= HELD_COUNT_MAX:
            raise QueueFull(
                f"{HELD_COUNT_MAX} groups are in hand, which is the limit: acknowledge or give back some",
                depth=len(self._held),
                limit=HELD_COUNT_MAX,
            )
        view = View(timeout=wait_s, consumer=consumer, count=None, keep=find_filter(None))
        groups = Groups(self._ledger, view, waiting=self._waiting)
        try:
            delivery = await groups.receive()
        except NothingMoves as error:
            return error.message
        if delivery is None:
            return groups.ended_why
        name = secrets.token_hex(16)
        self._held[name] = _Held(delivery, self._timer(name, hold_s))
        return name, group_row(delivery.group)

    async def acknowledge(self, names: Sequence[str]) -> list[str]:
        """Acknowledge groups; return the receipts that count, also when they are said again.

        The others' groups come again, or came.
        """
        found = [name for name in dict.fromkeys(names) if name in self._held]
        counted = [name for name in dict.fromkeys(names) if name in self._done]
        for name in found:
            held = self._held.pop(name)
            held.ends.cancel()
            try:
                is_counted = await self._ledger.acknowledge(held.delivery)
            except BaseException:
                # Whether it counts is not known; who asks again is told.
                self._held[name] = _Held(held.delivery, self._timer(name, max(0.0, held.ends.when() - _now_s())))
                raise
            if is_counted:
                counted.append(name)
                self._done[name] = None
        while len(self._done) > DONE_COUNT_MAX:
            self._done.popitem(last=False)
        return counted

    def renew(self, names: Sequence[str], hold_s: float) -> list[str]:
        """Give holders another `hold_s` seconds from now; return the receipts that hold."""
        found = [name for name in dict.fromkeys(names) if name in self._held]
        for name in found:
            self._held[name].ends.cancel()
            self._held[name].ends = self._timer(name, hold_s)
        return found

    def give_back(self, names: Sequence[str]) -> list[str]:
        """Take groups back unused, so that they come again; return the receipts that held."""
        found = [name for name in dict.fromkeys(names) if name in self._held]
        for name in found:
            self._end(name)
        return found

    def close(self) -> None:
        self.give_back(list(self._held))

    def _timer(self, name: str, hold_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(hold_s, self._end, name)

    def _end(self, name: str) -> None:
        held = self._held.pop(name)
        held.ends.cancel()
        self._ledger.put_back(held.delivery)


def _now_s() -> float:
    return asyncio.get_running_loop().time()

"""What this client has pushed and acknowledged, so that a broker which forgot its last writes is told again.

A replica that takes over, or a disk that lost power, may lack the last moments of what was answered with "done".
Pushes are known by their ids and acknowledged groups by theirs, so saying both again changes nothing where nothing
was lost:

- While no group comes, everything pushed here and not yet received is pushed again, every PUSH_AGAIN_S.
- A group that was acknowledged here and comes again is acknowledged again, and not handed out.

Both memories are bounded, and end with the process: a trainer that starts again repeats its own pushes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..fabric.errors import BrokerError, QueueFull
from ..fabric.ports import Delivery, GroupPush, RolloutStream

PUSH_AGAIN_S = 15.0
PUSH_COUNT = 64  # groups a call
GROUP_COUNT_MAX = 20_000


class Ledger:
    """A run's rollout stream, with a memory."""

    def __init__(self, rollouts: RolloutStream) -> None:
        self._rollouts = rollouts
        self._open: dict[str, GroupPush] = {}
        self._used: dict[str, None] = {}
        self._quiet_since_s: float | None = None

    async def push(self, groups: Sequence[GroupPush]) -> None:
        """Push groups. Raises QueueFull, as RolloutStream.push."""
        await self._rollouts.push(groups)
        for group in groups:
            self._open[group.group_id] = group
        _bound(self._open)

    async def receive(self, consumer: str, timeout_s: float) -> Delivery | None:
        """The next complete group that was not used before; None when none came in time."""
        found = await self._rollouts.receive(consumer, 1, timeout_s)
        if not found:
            await self._rollouts.reap()
            await self._push_again()
            return None
        self._quiet_since_s = None
        (delivery,) = found
        self._open.pop(delivery.group.group_id, None)
        if delivery.group.group_id in self._used:
            await self._rollouts.acknowledge(delivery)
            return None
        return delivery

    async def acknowledge(self, delivery: Delivery) -> None:
        """The group was used."""
        self._used[delivery.group.group_id] = None
        _bound(self._used)
        try:
            await self._rollouts.acknowledge(delivery)
        except BrokerError:
            self._rollouts.put_back(delivery)  # it comes again, and is acknowledged then
            raise

    def put_back(self, delivery: Delivery) -> None:
        """The group was not used after all."""
        self._rollouts.put_back(delivery)

    async def cancel(self, group_id: str) -> bool:
        """Drop a group."""
        self._open.pop(group_id, None)
        return await self._rollouts.cancel(group_id)

    async def _push_again(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if now_s - self._quiet_since_s < PUSH_AGAIN_S:
            return
        self._quiet_since_s = now_s
        groups = list(self._open.values())
        for start in range(0, len(groups), PUSH_COUNT):
            try:
                await self._rollouts.push(groups[start : start + PUSH_COUNT])
            except QueueFull:
                return  # what is there must be consumed first; the next round asks again


class Hand:
    """The group that a plain `for` loop is working on, not yet acknowledged."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._delivery: Delivery | None = None

    def take(self, delivery: Delivery) -> None:
        """Hold a group until the loop shows that it is done with it."""
        assert self._delivery is None
        self._delivery = delivery

    async def acknowledge(self) -> None:
        """The loop went on, so it is done with its group."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            await self._ledger.acknowledge(delivery)


def _bound(memory: dict[str, GroupPush] | dict[str, None]) -> None:
    """Forget the oldest above GROUP_COUNT_MAX."""
    while len(memory) > GROUP_COUNT_MAX:
        del memory[next(iter(memory))]

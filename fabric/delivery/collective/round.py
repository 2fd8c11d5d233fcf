"""Taking part in one round, the same for publisher and receivers: what is said on the board, and a process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...contract.clock import Clock
from ...contract.errors import WireError
from ...ports.weights import WeightStore
from .addresses import HOST
from .group import MESSAGE_BYTES, Group, Nursery
from .invitations import Answer, CollectiveOptions, Offer, Watch

T = TypeVar("T")

LOOK_S, LOOK_S_MAX = 0.004, 0.1  # between two looks at the board: from a message's time up to many members' patience


@dataclass(frozen=True, slots=True)
class Room:
    """The means of a party to rounds: the board it speaks on, its settings, its clock, and processes for groups."""

    store: WeightStore
    options: CollectiveOptions
    clock: Clock
    watch: Watch | None = None
    nursery: Nursery = field(default_factory=Nursery)

    def tell(self, index: int, data: NDArray[np.uint8]) -> None:
        """Show a message to who watches."""
        if self.watch is not None:
            self.watch(index, data)

    def board_ttl_s(self, offer: Offer) -> float:
        """Return how long a message of this round is kept: the longest that a member may still need it."""
        return offer.answer_s + 10 * offer.stall_s

    async def look(self, until_s: float, question: Callable[[], Awaitable[T | None]]) -> T | None:
        """Ask, ever more rarely, until an answer is not None, and return it; None at `until_s` of the clock."""
        pause_s = LOOK_S
        while True:
            found = await question()
            if found is not None or self.clock.now_s() >= until_s:
                return found
            await self.clock.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LOOK_S_MAX)

    async def answer(self, offer: Offer, me: Answer) -> None:
        """Write this member's answer to an offer."""
        await self.store.answer(offer.run_id, offer.round_id, me.member, me.encode(), self.board_ttl_s(offer))

    async def answers(self, offer: Offer) -> dict[str, Answer]:
        """Read the answers of a round, by member; skip unreadable ones."""
        found: dict[str, Answer] = {}
        for member, raw in (await self.store.answers(offer.run_id, offer.round_id)).items():
            with contextlib.suppress(WireError):
                answer = Answer.decode(raw)
                if HOST.fullmatch(answer.host):
                    found[member] = answer
        return found

    @contextlib.asynccontextmanager
    async def group(self, offer: Offer) -> AsyncIterator[Group]:
        """A group for an offer, not yet built, in a process of its own, which is gone in the end."""
        async with self.nursery.group(MESSAGE_BYTES[offer.backend], offer.stall_s) as group:
            yield group

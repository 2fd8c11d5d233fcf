"""Taking part in one round, the same for publisher and receivers: meet, build the group, do one's part."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...contract.clock import Clock
from ...contract.errors import ConfigError, WireError
from ...ports.weights import WeightStore
from .addresses import HOST, LOOPBACK, host_towards
from .invitations import PUBLISHER, Answer, CollectiveOptions, Offer, Watch
from .meeting import Meeting
from .side_thread import Progress, SideThread

if TYPE_CHECKING:
    from .group import Group

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S, LOOK_S_MAX = 0.004, 0.1  # between two looks at the board: from a message's time up to many members' patience
PATIENCE_STALLS = 3  # no step for so many stalls: one to meet, one to connect, one for the first message


@dataclass(frozen=True, slots=True)
class Room:
    """The means of a party to rounds: the board it speaks on, its settings, its clock, and the thread for groups."""

    store: WeightStore
    options: CollectiveOptions
    clock: Clock
    thread: SideThread
    watch: Watch | None = None

    def watcher(self, progress: Progress) -> Watch:
        """Make a watch that counts every message as a step, and passes it to the configured watch."""

        def watch(index: int, data: NDArray[np.uint8]) -> None:
            progress.step()
            if self.watch is not None:
                self.watch(index, data)

        return watch

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

    async def answers(self, offer: Offer) -> dict[str, Answer]:
        """Read the answers of a round, by member; skip unreadable ones."""
        found: dict[str, Answer] = {}
        for member, raw in (await self.store.answers(offer.run_id, offer.round_id)).items():
            with contextlib.suppress(WireError):
                answer = Answer.decode(raw)
                if HOST.fullmatch(answer.host):
                    found[member] = answer
        return found

    async def take_part(
        self, offer: Offer, me: Answer, rank: int, work: Callable[[Group, Watch], T], *, peer: str
    ) -> T:
        """Build the group of a closed offer, do `work` in it, and take it down.

        Args:
            rank: 0 for the publisher. peer: an address of another member, if not all are on this machine.

        Raises:
            CollectiveFailed: a member did not come, is gone or stands still.
        """
        loop, wake = asyncio.get_running_loop(), asyncio.Event()
        meeting = Meeting(lambda: _ring(loop, wake), offer.stall_s)
        carrying = asyncio.create_task(self._carry(offer, me, meeting, wake), name=f"round {offer.round_id}")
        host = self.options.host or (LOOPBACK if offer.is_local else host_towards(peer))

        def in_thread(progress: Progress) -> T:
            from .group import Group, Seat  # torch

            size, device = len(offer.members) + 1, self.options.device
            seat = Seat(rank=rank, size=size, backend=offer.backend, device=device, host=host, stall_s=offer.stall_s)
            group = Group(meeting, seat)
            try:
                progress.step()
                return work(group, self.watcher(progress))
            finally:
                group.close()

        try:
            return await self.thread.run(in_thread, PATIENCE_STALLS * offer.stall_s)
        finally:
            meeting.close()
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)

    async def _carry(self, offer: Offer, me: Answer, meeting: Meeting, wake: asyncio.Event) -> None:
        """Write this member's keys to the board and fetch the others' from it, as long as the round lasts."""
        said: dict[str, bytes] = {}
        ranks = {member: rank for rank, member in enumerate([PUBLISHER, *offer.members])}
        pause_s = LOOK_S
        try:
            while True:
                own = meeting.own()
                if own != said:
                    answer = dataclasses.replace(me, keys={key: value.hex() for key, value in own.items()})
                    ttl_s = self.board_ttl_s(offer)
                    await self.store.answer(offer.run_id, offer.round_id, me.member, answer.encode(), ttl_s)
                    said, pause_s = own, LOOK_S
                if not meeting.is_waiting:
                    await wake.wait()
                    wake.clear()
                    continue
                for member, answer in (await self.answers(offer)).items():
                    if member in ranks and not _learn(meeting, answer, ranks[member], own, offer):
                        del ranks[member]
                await self.clock.sleep(pause_s)
                pause_s = min(1.5 * pause_s, LOOK_S_MAX)
        except Exception as error:  # noqa: BLE001 - after any error the others' keys do not come any more
            log.warning("collective.not_met", extra={"run_id": offer.run_id, "error": str(error)})
            meeting.close(f"members of the group cannot be met: {error}")


def _learn(meeting: Meeting, answer: Answer, rank: int, own: Mapping[str, bytes], offer: Offer) -> bool:
    """Learn a member's keys; False if they are wrong: then the round goes on as if that member had not come."""
    try:
        meeting.learn(keys_of(answer, rank, own, offer.backend))
        return True
    except WireError as error:
        log.warning("collective.answer_refused", extra={"run_id": offer.run_id, "error": str(error)})
        return False


def _ring(loop: asyncio.AbstractEventLoop, wake: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(wake.set)


async def load() -> None:
    """Load torch, off the loop: it takes seconds the first time.

    Raises:
        ConfigError: it is not installed.
    """

    def importing() -> None:
        try:
            from . import group  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"the collective path needs torch, which cannot be loaded ({error}): pip install 'rollfab[workers]',"
                ' or set the carrier to "broker"'
            ) from error

    await asyncio.to_thread(importing)


# ---------------------------------------------------------------- keys
#
# The keys that answers of other members may bring into the store that a group is built on.
#
# torch hands gloo the values of that store, and gloo's parser believes every length in them. So a member's answer
# brings one key, of its own rank and in the form of our own: the members of a group run one build of torch.
#
#     gloo   u64 bytes of the host's name, name, u64 bytes of the address, address (its family first),
#            u64 for each member


U64, FAMILY = struct.Struct("<Q"), struct.Struct("<H")
HOST_BYTES_MAX = 255
NCCL_BYTES_MAX = 4096  # its id has 128


def keys_of(answer: Answer, rank: int, own: Mapping[str, bytes], backend: str) -> dict[str, bytes]:
    """Return the keys of the member of `rank` that may be learned; none while ours are missing for a comparison.

    Args:
        own: the keys that this member has set.

    Raises:
        WireError: they are of another form.
    """
    try:
        sent = {key: bytes.fromhex(value) for key, value in answer.keys.items()}
    except ValueError as error:
        raise WireError(f"the answer of {answer.member!r:.80} is not in hex") from error
    if backend == "nccl":  # unverified on a GPU: the publisher alone says where its group meets
        if rank == 0 and all(len(value) <= NCCL_BYTES_MAX for value in sent.values()):
            return sent
        return {}
    found = {}
    for key, value in own.items():
        theirs = f"{key.rpartition('/')[0]}/{rank}"
        if theirs in sent and theirs not in own:
            found[theirs] = _like(value, sent[theirs], answer.member)
    return found


def _like(own: bytes, theirs: bytes, member: str) -> bytes:
    """Require the same lengths behind the host's name, and the same family of addresses, in both values."""
    try:
        is_alike = _shape(own) == _shape(theirs)
    except struct.error:
        is_alike = False
    if not is_alike:
        raise WireError(f"the answer of {member!r:.80} is not one of gloo's addresses like ours")
    return theirs


def _shape(value: bytes) -> tuple[int, int, int]:
    """Return the bytes behind the host's name, those of the address, and its family. Raises struct.error: cut off."""
    (host_bytes,) = U64.unpack_from(value)
    if host_bytes > HOST_BYTES_MAX:
        raise struct.error("no host has such a name")
    start = U64.size + host_bytes
    (address_bytes,) = U64.unpack_from(value, start)
    (family,) = FAMILY.unpack_from(value, start + U64.size)
    return len(value) - start, address_bytes, family

"""Where the members of one group learn how to reach one another: on the broker's board, with their answers.

A group of torch.distributed is built on a store of keys: each member sets some and waits for those of the others. A
member's keys go out with its answer on the board, and those of the others are read from theirs.

- torch's own TCPStore is not used, because its client waits without limit for a server that is frozen: `wait`, `get`
  and connecting were all seen to hang, with every timeout set. Here a wait ends at its time.
- torch hands gloo the values of that store, and gloo's parser believes every length in them. So a member's answer
  brings one key, of its own rank and in the form of our own: the members of a group run one build of torch.

      gloo   u64 bytes of the host's name, name, u64 bytes of the address, address (its family first),
             u64 for each member
"""

from __future__ import annotations

import dataclasses
import logging
import struct
from collections.abc import Mapping

from ...contract.errors import FabricError, WireError
from ...contract.records import GLOO
from .addresses import LOOPBACK, host_towards
from .group import Group, Seat
from .invitations import PUBLISHER, Answer, CollectiveFailed, Offer
from .round import Room

log = logging.getLogger(__name__)

U64, FAMILY = struct.Struct("<Q"), struct.Struct("<H")
HOST_BYTES_MAX = 255
NCCL_BYTES_MAX = 4096  # its id has 128
DEVICE = "cuda:0"  # of NCCL's messages: a process sees its own GPU first


async def build(group: Group, room: Room, offer: Offer, me: Answer, rank: int, *, peer: str) -> None:
    """Build the group of a closed offer.

    Args:
        rank: 0 for the publisher. peer: an address of another member, if not all are on this machine.

    Raises:
        CollectiveFailed: a member did not come, is gone or stands still.
    """
    host = room.options.host or (LOOPBACK if offer.is_local else host_towards(peer))
    size, device = len(offer.members) + 1, "cpu" if offer.backend == GLOO else DEVICE
    seat = Seat(rank=rank, size=size, backend=offer.backend, device=device, host=host, stall_s=offer.stall_s)
    await group.build(seat, Meeting(room, offer, me))


class Meeting:
    """Keys of one group, on this member's side.

    Args:
        offer: closed. me: this member's answer.
    """

    def __init__(self, room: Room, offer: Offer, me: Answer) -> None:
        self._room = room
        self._offer = offer
        self._me = me
        self._members = [PUBLISHER, *offer.members]
        self._refused: set[str] = set()
        self._own: dict[str, bytes] = {}
        self._known: dict[str, bytes] = {}
        self._until_s = room.clock.now_s() + offer.stall_s

    async def set(self, key: str, value: bytes) -> None:
        """Tell the others a key of this member.

        Raises:
            CollectiveFailed: the board does not take it.
        """
        self._own[key] = value
        keys = {key: value.hex() for key, value in self._own.items()}
        try:
            await self._room.answer(self._offer, dataclasses.replace(self._me, keys=keys))
        except FabricError as error:
            raise CollectiveFailed(f"members of the group cannot be met: {error}") from error

    async def get(self, keys: list[str]) -> dict[str, bytes]:
        """Wait for keys of the others, until the meeting has lasted for stall_s.

        Raises:
            CollectiveFailed: they did not come; names the members.
        """

        async def all_there() -> bool | None:
            if not keys_left():
                return True
            await self._learn()
            return None if keys_left() else True

        def keys_left() -> list[str]:
            return [key for key in keys if key not in self._known]

        try:
            await self._room.look(self._until_s, all_there)
        except FabricError as error:
            raise CollectiveFailed(f"members of the group cannot be met: {error}") from error
        if missing := keys_left():
            names = ", ".join(map(self._bringer, missing))
            raise CollectiveFailed(f"members of the group did not come within {self._offer.stall_s:g} s: {names}")
        return {key: self._known[key] for key in keys}

    async def _learn(self) -> None:
        """Learn the keys of all that have some; who brings wrong ones is as if it had not come."""
        for member, answer in (await self._room.answers(self._offer)).items():
            if member in self._refused or member not in self._members:
                continue
            try:
                found = keys_of(answer, self._members.index(member), self._own, self._offer.backend)
            except WireError as error:
                log.warning("collective.answer_refused", extra={"run_id": self._offer.run_id, "error": str(error)})
                self._refused.add(member)
            else:
                self._known = {**found, **self._known}

    def _bringer(self, key: str) -> str:
        """Return the member whose key this is: a key ends with its rank."""
        rank = key.rpartition("/")[2]
        return self._members[int(rank)] if rank.isdigit() and int(rank) < len(self._members) else key


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

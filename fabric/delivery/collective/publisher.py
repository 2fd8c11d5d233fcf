"""The publisher's side: offering a version to the receivers that are there, and sending it to those that want it.

    collective = CollectivePublisher(store, "run")
    report = await collective.send(prepared.manifest, prepared.chunks, expected=names_of_live_receivers)
    if report.is_enough:                       # then, and only then
        await store.put_manifest(prepared.manifest)      # its carrier is "collective": no chunks at the broker
        await store.advance_head(prepared.manifest, shard_count)

- Nothing is published here: a receiver that has the chunks does nothing with them until the head names the version.
- A member that fails costs one round: the next is held with the members that answer again. A member is judged only by
  whether it answers, never by reports of others.
- `send` ends: every wait in it has a limit, and so has the number of rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...contract.clock import Clock, SystemClock
from ...contract.errors import BrokerError, ConfigError, FabricError
from ...contract.ids import new_group_id
from ...format.manifest import WeightManifest
from ...ports.weights import WeightStore
from .addresses import SOMEWHERE_ELSE, host_towards, node
from .group import Group, Nursery
from .invitations import (
    CLOSED,
    OPEN,
    OVER,
    PUBLISHER,
    Answer,
    CollectiveFailed,
    CollectiveOptions,
    Offer,
    Watch,
    manifest_digest,
)
from .meeting import build
from .round import Room
from .transfer import send

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """The outcome of sending a version. reached: members that hold every chunk. left_out: asked members that do not.

    is_enough: as many members as wanted are reached. error: why the last round failed; empty if it did not.
    """

    payload_bytes: int
    duration_s: float
    reached: tuple[str, ...]
    left_out: tuple[str, ...]
    round_count: int
    is_enough: bool
    error: str = ""


@dataclass(slots=True)
class _Tally:
    """The state of a version's rounds. asked: members expected or seen. answered: members of the last round."""

    asked: set[str]
    answered: set[str] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    round_count: int = 0
    error: str = ""


class CollectivePublisher:
    """Sends versions of one run.

    Args:
        watch: called with each message's number and bytes before it leaves.
        nursery: whose processes hold the groups, shared with others; None: one of its own.
    """

    def __init__(
        self,
        store: WeightStore,
        run_id: str,
        *,
        options: CollectiveOptions | None = None,
        clock: Clock | None = None,
        watch: Watch | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        self._run_id = run_id
        self._options = options or CollectiveOptions()
        self._room = Room(store, self._options, clock or SystemClock(), watch, nursery or Nursery())

    async def send(
        self,
        manifest: WeightManifest,
        chunks: Sequence[bytes],
        *,
        expected: Collection[str] = (),
        quorum: int | None = None,
    ) -> SendReport:
        """Bring a version to the receivers that answer.

        Args:
            manifest: of the version; not yet the head's.
            expected: receivers thought to be there; once all have answered, the wait ends. Empty: every receiver that
                answers within answer_s takes part.
            quorum: how many must be reached; None: all that answered in the last round, and at least one.

        Raises:
            ConfigError: torch is not installed.
            BrokerError: the board cannot be reached. Any other failure is the report's `error`.
        """
        started_s = self._room.clock.now_s()
        tally = _Tally(asked=set(expected))
        offer = self._offer(manifest)
        try:
            while tally.round_count < self._options.attempt_count:
                offer = self._offer(manifest)
                if not await self._try(offer, manifest, chunks, tally):
                    break
        finally:
            await self._end(offer)
        need = len(tally.answered) if quorum is None else quorum
        return SendReport(
            payload_bytes=offer.payload_bytes,
            duration_s=self._room.clock.now_s() - started_s,
            reached=tuple(sorted(tally.reached)),
            left_out=tuple(sorted(tally.asked - tally.reached)),
            round_count=tally.round_count,
            is_enough=len(tally.reached) >= max(1, need),
            error=tally.error,
        )

    async def _try(self, offer: Offer, manifest: WeightManifest, chunks: Sequence[bytes], tally: _Tally) -> bool:
        """Hold one round; return whether another one might do better."""
        tally.round_count += 1
        before, tally.answered, tally.error = tally.answered, set(), ""
        try:
            await self._room.nursery.open()  # members answer at once, and wait no longer than a stall for us
            async with self._room.group(offer) as group:
                tally.reached = await self._hold(group, offer, manifest, chunks, tally, before)
        except (BrokerError, ConfigError):
            raise
        except CollectiveFailed as failure:
            tally.error = str(failure)
            is_last = tally.round_count == self._options.attempt_count
            then = "it goes by the broker" if is_last else "members that answer again have another round"
            facts = {"run_id": self._run_id, "policy_version": offer.version, "error": tally.error}
            log.warning(f"collective.round_failed: {then}", extra={**facts, "members": sorted(tally.answered)})
            return True
        except Exception as error:  # a version that cannot go this way goes by the broker
            tally.error = f"{type(error).__name__}: {error}"
            log.exception("collective.round_failed", extra={"run_id": self._run_id, "error": tally.error})
            return False
        if not tally.answered:
            tally.error = "nobody answered"
        return False

    async def close(self) -> None:
        """End the process that has torch loaded."""
        await self._room.nursery.close()

    def _offer(self, manifest: WeightManifest) -> Offer:
        options = self._options
        return Offer(
            run_id=self._run_id,
            round_id=new_group_id(),
            state=OPEN,
            epoch=manifest.epoch,
            version=manifest.version,
            kind=manifest.kind,
            payload_bytes=int(manifest.chunk_bytes.sum()),
            manifest_digest=manifest_digest(manifest.encode()),
            backend=options.backend,
            host=options.host or host_towards(SOMEWHERE_ELSE),
            node=node(),
            members=[],
            is_local=False,
            answer_s=options.answer_s,
            stall_s=options.stall_s,
        )

    async def _hold(
        self,
        group: Group,
        offer: Offer,
        manifest: WeightManifest,
        chunks: Sequence[bytes],
        tally: _Tally,
        before: Collection[str],
    ) -> set[str]:
        """Offer, close the list of members, send; return the members that hold every chunk.

        Args:
            before: members of the round that failed, if one did.
        """
        await self._say(offer)
        answers = await self._gather(offer, tally.asked)
        for member in sorted(set(before) - answers.keys()):
            facts = {"run_id": self._run_id, "policy_version": offer.version, "member": member}
            log.warning("collective.member_silent: the round is without it; see whether it runs", extra=facts)
        tally.answered |= answers.keys()
        tally.asked |= answers.keys()
        if not answers:
            return set()
        members = sorted(answers)
        strangers = [answer.host for answer in answers.values() if answer.node != offer.node]
        closed = dataclasses.replace(offer, state=CLOSED, members=members, is_local=not strangers)
        await self._say(closed)
        me = Answer(member=PUBLISHER, host=offer.host, node=offer.node, keys={})
        await build(group, self._room, closed, me, 0, peer=(strangers or [""])[0])
        missing = await send(group, manifest, chunks, self._room.tell)
        return {member for member, row in zip(members, missing, strict=True) if not row.any()}

    async def _gather(self, offer: Offer, asked: Collection[str]) -> dict[str, Answer]:
        """Collect answers until all asked members have answered or answer_s is over."""
        found: dict[str, Answer] = {}

        async def all_there() -> bool | None:
            found.update(await self._room.answers(offer))
            return True if asked and found.keys() >= set(asked) else None

        await self._room.look(self._room.clock.now_s() + offer.answer_s, all_there)
        return found

    async def _say(self, offer: Offer) -> None:
        await self._room.store.offer(self._run_id, offer.encode(), self._room.board_ttl_s(offer))

    async def _end(self, offer: Offer) -> None:
        """Let nobody answer this round any more."""
        with contextlib.suppress(FabricError):
            await self._say(dataclasses.replace(offer, state=OVER))

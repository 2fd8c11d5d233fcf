"""Asks the ranks of a vLLM, one or several, to stage their parts of a version; see ranks.Ranks.

- The ranks are told by one short call between two steps; they read, decode and answer while vLLM generates. The commit
  is another: its ticket.
- What this process holds decoded (a whole version from another worker, say) goes the same way, as a parcel (arena.py).
- A rank that fails, is gone, or is silent for too long leaves every rank where it is.
- For ranks on this machine: others could open neither a version's file nor the directory of the answers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .....fabric.contract.clock import SystemClock
from .....fabric.contract.errors import EngineError, FabricError, WeightError
from .....fabric.format.layout import Layout
from .....fabric.format.manifest import Sums
from .....fabric.format.regions import Region
from .....fabric.versions.commit import Staged
from .....fabric.versions.rank_parts import check_regions
from .....fabric.versions.vote import Vote, agree, check_staged, state_of
from ...base import TurnsAtCommit
from ...ranks import Gathering, StagedByRanks
from ..common.arena import pack, posted
from ..common.backend import Door
from ..common.shared import aside
from .rank_answers import DIRECTORY_PREFIX, StageOrder, answer_count, read_answers
from .version_files import VersionFiles

log = logging.getLogger(__name__)

ANSWER_S = 60.0  # how long ranks may take for nothing
BYTES_PER_S_MIN = 4 << 20  # and what they must decode at
POLL_S_MIN, POLL_S_MAX = 0.001, 0.02

Write = Callable[[], Awaitable[None]]
Commit = Callable[[int, Write, TurnsAtCommit, bool], Awaitable[float]]


@runtime_checkable
class RankDoor(Protocol):
    """A door to a vLLM whose ranks may be on this machine."""

    @property
    def rank_count(self) -> int:
        """Processes that hold parts of the model; 0: no ranks of one model would answer."""
        ...

    def check(self) -> None:
        """Raise EngineError if the vLLM is gone, see Door."""
        ...

    async def update(self, information: dict[str, Any], what: str, version: int | None = None) -> None:
        """Make one weight update on every rank (transfer.UpdateInfo); afterwards the weights are called `version`.

        Raises:
            EngineError: beginning with `what`.
        """
        ...


async def ranks_of(door: Door, between: Callable[[Write], Awaitable[None]], commit: Commit) -> VllmRanks | None:
    """Return the ranks of a vLLM if their parts are known to make up the model, see VllmRanks; else None."""
    if not isinstance(door, RankDoor) or door.abilities.weights != "deltas" or not door.rank_count:
        return None
    made = VllmRanks(door, door.facts.layout, between, commit)
    try:
        await made.survey()
    except FabricError as error:
        log.warning("weights.not_by_ranks: commits are written while it is held", extra={"error": str(error)})
        return None
    return made


class VllmRanks:
    """Stages a vLLM's versions by its ranks, see ranks.Ranks.

    Args:
        layout: of the model.
        between: runs a weight update to its end while there is no other, and the engine does not sleep.
        commit: the engine's, which holds the door and does what the turns in flight need around a write.
    """

    def __init__(
        self, door: RankDoor, layout: Layout, between: Callable[[Write], Awaitable[None]], commit: Commit
    ) -> None:
        self._door = door
        self._rank_count = door.rank_count
        self._layout = layout
        self._between = between
        self._commit = commit
        self._clock = SystemClock()
        mine = secrets.token_hex(8)  # no other worker's, whom the same server would obey
        self._tickets = (f"{mine}-{number}" for number in count(1))
        self._ticket = ""  # of what the ranks have staged, or are staging
        self._stop_count = 0

    async def survey(self) -> None:
        """Have every rank make its map; all must be there, and together hold every element.

        Raises:
            EngineError, WeightError, LayoutMismatch: this model is not one to stage by ranks.
        """
        votes = await self._told(-1)

        def check() -> None:
            check_regions(self._layout, {Region(*row) for vote in votes for row in vote.regions.tolist()})

        await asyncio.to_thread(check)

    async def live_sums(self) -> Sums:
        """Sum what is live on all ranks. Raises as Ranks, and EngineError."""
        votes = await self._told(0)
        return await asyncio.to_thread(state_of, votes, self._layout)

    async def _told(self, have: int) -> list[Vote]:
        """Ask all ranks to tell of their parts, which they have to walk through."""
        limit_s = ANSWER_S + self._layout.byte_count / BYTES_PER_S_MIN
        order = StageOrder(ticket=next(self._tickets), have=have, files=[], answers="")
        votes, cause = await self._ask(order, limit_s)
        wrong = [vote.error for vote in votes if vote.error]
        if cause is not None or wrong or len(votes) != self._rank_count:
            raise EngineError(f"its ranks cannot tell their parts: {cause or (wrong or ['one gave no answer'])[0]}")
        return votes

    def gather(self) -> VersionFiles:
        return VersionFiles(self._layout)

    async def stage(self, gathering: Gathering, have: int | None) -> StagedByRanks:
        assert isinstance(gathering, VersionFiles) and gathering.manifests
        goal = gathering.manifests[-1]
        limit_s = ANSWER_S + sum(each.payload_bytes for each in gathering.manifests) / BYTES_PER_S_MIN
        have = -1 if have is None else have
        order = StageOrder(ticket=next(self._tickets), have=have, files=gathering.paths, answers="")
        votes = await self._staged(order, goal.version, limit_s, partial(agree, manifest=goal))
        return StagedByRanks(
            version=goal.version,
            sums=goal.sums,
            changed_count=sum(vote.changed_count for vote in votes),
            read_bytes=tuple(vote.read_bytes for vote in votes),
            ticket=order.ticket,
        )

    async def stage_writes(self, staged: Staged) -> StagedByRanks:
        """Have every rank stage its part of writes that this process holds.

        Raises:
            WeightError: a rank failed or is gone, or there is no room for them; nothing was written anywhere.
        """
        version, size = staged.version, sum(values.nbytes for _, values in staged.writes.values())
        async with posted(await aside(size, pack, staged.writes)) as path:
            order = StageOrder(ticket=next(self._tickets), have=version, files=[], answers="", parcel=path)
            await self._staged(
                order, version, ANSWER_S + size / BYTES_PER_S_MIN, partial(check_staged, version=version)
            )
        return StagedByRanks(
            version=version, sums=staged.sums, changed_count=staged.changed_count, read_bytes=(), ticket=order.ticket
        )

    async def _staged(
        self, order: StageOrder, version: int, limit_s: float, check: Callable[..., None]
    ) -> Sequence[Vote]:
        """Have the ranks stage, and return the votes if `check` accepts them."""
        try:
            votes, cause = await self._ask(order, limit_s)
        except EngineError as error:
            raise WeightError(f"version {version} was not staged: {error}", version=version) from error
        try:
            await asyncio.to_thread(partial(check, votes, rank_count=self._rank_count))
        except WeightError as error:
            if cause is None:
                raise
            raise WeightError(f"{error.message}: {cause}", **error.facts) from cause
        return votes

    async def stop(self) -> None:
        """Give up what is being staged: no rank reads live weights afterwards, until it is asked again."""
        self._stop_count += 1
        await self._door.update({"stop": True}, "vLLM's ranks did not stop staging")

    async def apply(
        self, staged: StagedByRanks, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False
    ) -> float:
        return await self._commit(staged.version, self.writing(staged), turns, may_reuse_prefix)

    def writing(self, staged: StagedByRanks) -> Write:
        """Return the call that has every rank write its part; it is made while the engine is held."""

        async def write() -> None:
            if staged.ticket != self._ticket:
                raise WeightError(f"version {staged.version} is not staged any more: stage it again")
            self._ticket = ""
            await self._door.update({"commit": staged.ticket}, "vLLM did not take the weights", staged.version)

        return write

    async def _ask(self, order: StageOrder, limit_s: float) -> tuple[list[Vote], EngineError | None]:
        """Ask the ranks, again if `stop` ended it; returns their votes, and why vLLM gives no more of them.

        `answers` is filled in here.
        """
        while True:
            stop_count = self._stop_count
            told = await self._ask_once(order, limit_s)
            if stop_count == self._stop_count:
                return told

    async def _ask_once(self, order: StageOrder, limit_s: float) -> tuple[list[Vote], EngineError | None]:
        # A rank may put its answer in while we remove it: that must not take the place of a cancellation
        with tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX, ignore_cleanup_errors=True) as directory:

            async def tell() -> None:
                self._ticket = order.ticket
                row = asdict(replace(order, answers=directory))
                await self._door.update({"stage": row}, "vLLM's ranks did not begin to stage")

            await self._between(tell)
            return await self._answers(Path(directory), limit_s)

    async def _answers(self, directory: Path, limit_s: float) -> tuple[list[Vote], EngineError | None]:
        until_s, pause_s = self._clock.now_s() + limit_s, POLL_S_MIN
        while self._clock.now_s() < until_s:
            if answer_count(directory) == self._rank_count:
                break
            try:
                self._door.check()
            except EngineError as error:
                return await asyncio.to_thread(read_answers, directory), error
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)
        return await asyncio.to_thread(read_answers, directory), None  # large ones take a good part of a second

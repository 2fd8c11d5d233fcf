"""The ranks of a vLLM of our own, asked to stage their parts of a version; see ranks.Ranks.

- The ranks are told by one short call between two steps; they read, decode and answer while vLLM generates.
- A rank that fails, is gone, or is silent for too long leaves every rank where it is.
- For ranks on this machine: others could open neither a version's file nor the directory of the answers.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .....fabric.contract.clock import SystemClock
from .....fabric.contract.errors import EngineError, FabricError, WeightError
from .....fabric.format.layout import Layout
from .....fabric.format.regions import Region
from .....fabric.versions.rank_parts import check_regions
from .....fabric.versions.vote import Vote, agree
from ...base import TurnsAtCommit
from ...ranks import Gathering, StagedByRanks
from ..common.backend import Door
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
    """A door to a vLLM of several ranks on this machine."""

    @property
    def rank_count(self) -> int:
        """Processes that hold parts of the model."""
        ...

    def check(self) -> None:
        """See Door."""
        ...

    async def update(self, information: dict[str, Any], what: str, version: int | None = None) -> None:
        """One weight update on every rank (transfer.UpdateInfo); afterwards the weights are called `version`.

        Raises:
            EngineError: beginning with `what`.
        """
        ...


async def ranks_of(door: Door, between: Callable[[Write], Awaitable[None]], commit: Commit) -> VllmRanks | None:
    """The ranks of a vLLM, if there are several and their parts are known to make up the model; see VllmRanks."""
    if not isinstance(door, RankDoor) or door.abilities.weights != "deltas" or door.rank_count == 1:
        return None
    made = VllmRanks(door, door.facts.layout, between, commit)
    try:
        await made.survey()
    except FabricError as error:
        log.warning("weights.not_by_ranks: whole versions are staged instead", extra={"error": str(error)})
        return None
    return made


class VllmRanks:
    """See ranks.Ranks.

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
        self._tickets = map(str, count(1))
        self._ticket = ""  # of what the ranks have staged, or are staging

    async def survey(self) -> None:
        """Have every rank make its map; all must be there, and together hold every element.

        Raises:
            EngineError, WeightError, LayoutMismatch: this model is not one to stage by ranks.
        """
        votes, cause = await self._ask(next(self._tickets), [], -1, ANSWER_S)
        wrong = [vote.error for vote in votes if vote.error]
        if cause is not None or wrong or len(votes) != self._rank_count:
            raise EngineError(f"its ranks cannot stage their parts: {cause or (wrong or ['one gave no answer'])[0]}")
        rows = [row for vote in votes for row in vote.regions.tolist()]
        check_regions(self._layout, {Region(*row) for row in rows})

    def gather(self) -> VersionFiles:
        return VersionFiles(self._layout)

    async def stage(self, gathering: Gathering, have: int | None) -> StagedByRanks:
        assert isinstance(gathering, VersionFiles) and gathering.manifests
        goal, ticket = gathering.manifests[-1], next(self._tickets)
        limit_s = ANSWER_S + sum(each.payload_bytes for each in gathering.manifests) / BYTES_PER_S_MIN
        try:
            votes, cause = await self._ask(ticket, gathering.paths, -1 if have is None else have, limit_s)
        except EngineError as error:
            raise WeightError(f"version {goal.version} was not staged: {error}", version=goal.version) from error
        try:
            agree(votes, goal, self._rank_count)
        except WeightError as error:
            if cause is None:
                raise
            raise WeightError(f"{error.message}: {cause}", **error.facts) from cause
        return StagedByRanks(
            version=goal.version,
            sums=goal.sums,
            changed_count=sum(vote.changed_count for vote in votes),
            read_bytes=tuple(vote.read_bytes for vote in votes),
            ticket=ticket,
        )

    async def apply(
        self, staged: StagedByRanks, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False
    ) -> float:
        async def write() -> None:
            if staged.ticket != self._ticket:
                raise WeightError(f"version {staged.version} is not staged any more: stage it again")
            self._ticket = ""
            await self._door.update({"commit": staged.ticket}, "vLLM did not take the weights", staged.version)

        return await self._commit(staged.version, write, turns, may_reuse_prefix)

    def forget(self) -> None:
        """The ranks were written by something else: what they have staged is void."""
        self._ticket = ""

    async def _ask(
        self, ticket: str, files: Sequence[str], have: int, limit_s: float
    ) -> tuple[list[Vote], EngineError | None]:
        """Votes within the limit, and why vLLM gives no more of them."""
        with tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX) as directory:
            order = StageOrder(ticket=ticket, have=have, files=files, answers=directory)

            async def tell() -> None:
                self._ticket = ticket
                await self._door.update({"stage": asdict(order)}, "vLLM's ranks did not begin to stage")

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
                return read_answers(directory), error
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)
        return read_answers(directory), None

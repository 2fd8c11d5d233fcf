"""Asks the broker for turns, and gives each result to whoever waits for it: one caller for each run of an agent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ...fabric.contract.errors import BrokerError, ClaimLost
from ...fabric.contract.records import TurnJob, TurnResult
from ...fabric.ports.queue import TrajectoryClaim, TrajectoryQueue, TurnPush, TurnQueue
from .slots import Quarantine


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A turn that an episode asks for; `answer` becomes None if the trajectory's claim is lost."""

    push: TurnPush
    answer: asyncio.Future[TurnResult | None]


class TurnCaller:
    """Asks the broker for the episodes of one run: for the next turn, and to keep a snapshot.

    All turns that are asked for in one round of the event loop go in one call; each result goes to its episode.
    """

    def __init__(
        self,
        agent_id: str,
        turns: TurnQueue,
        trajectories: TrajectoryQueue,
        quarantine: Quarantine,
        *,
        ask_again_s: float,
    ) -> None:
        """Make a caller; its owner must keep `push` and `receive` running as long as any episode asks."""
        self.agent_id = agent_id
        self._turns = turns
        self._trajectories = trajectories
        self._quarantine = quarantine
        self._ask_again_s = ask_again_s
        self._waiting: dict[str, _Call] = {}  # by turn
        self._silent_since_s = 0.0  # on the event loop's clock; of use only while an episode waits
        self._asked: list[_Call] = []
        self._cancelled: list[TurnPush] = []
        self._has_asked = asyncio.Event()

    async def ask(self, claim: TrajectoryClaim, job: TurnJob) -> TurnResult:
        """Ask for a turn and wait for its result. Raises ClaimLost."""
        push = TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job)
        if not self._waiting:
            self._hear()
        call = self._waiting[job.turn_id] = _Call(push, asyncio.get_running_loop().create_future())
        try:
            while not call.answer.done():
                self._asked.append(call)
                self._has_asked.set()
                await asyncio.wait([call.answer], timeout=self._ask_again_s)
        finally:
            call.answer.cancel()  # also stops a push that still waits: its answer would look like a later claim's
            if self._waiting.get(job.turn_id) is call:  # false if a later claim asks for the same turn
                del self._waiting[job.turn_id]
        result = call.answer.result()
        if result is None:
            raise _lost(claim)
        self._quarantine.clear(claim)
        return result

    def unanswered(self, for_s: float) -> set[str]:
        """Return the trajectories that wait, if no turn of the run has come for `for_s` seconds; else none.

        A call that returns some counts the silence anew.
        """
        if not self._waiting or asyncio.get_running_loop().time() < self._silent_since_s + for_s:
            return set()
        self._hear()
        return {call.push.trajectory_id for call in self._waiting.values()}

    def _hear(self) -> None:
        self._silent_since_s = asyncio.get_running_loop().time()

    def cancel(self, claim: TrajectoryClaim, job: TurnJob) -> None:
        """Give up a turn that was asked for; whoever waits gets a result that says so, unless it has come before."""
        self._cancelled.append(TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job))
        self._has_asked.set()

    async def save(self, claim: TrajectoryClaim, snapshot: bytes) -> None:
        """Keep a snapshot for the next agent. Raises ClaimLost."""
        if not await self._trajectories.save(self.agent_id, claim, snapshot):
            raise _lost(claim)

    async def push(self) -> None:
        """Push the turns that are asked for, then cancel those that are given up; for ever.

        Raises:
            BrokerError: that failed; its turns stay asked for, and the next call pushes them.
        """
        while True:
            await self._has_asked.wait()
            await asyncio.sleep(0)
            self._has_asked.clear()
            asked, self._asked = [call for call in self._asked if not call.answer.done()], []
            cancelled, self._cancelled = self._cancelled, []
            try:
                lost = await self._turns.push(self.agent_id, [call.push for call in asked]) if asked else []
                for call in asked:
                    if call.push.trajectory_id in lost and not call.answer.done():
                        call.answer.set_result(None)
                asked = []
                if cancelled:
                    await self._turns.cancel(self.agent_id, cancelled)
            except BrokerError:
                self._asked = [*asked, *self._asked]
                self._cancelled = [*cancelled, *self._cancelled]
                self._has_asked.set()
                raise

    async def receive(self) -> None:
        """Bring each result to the episode that waits for it; for ever."""
        while True:
            for result in await self._turns.results(self.agent_id, 1.0):
                self._hear()
                call = self._waiting.get(result.turn_id)
                if call is not None and not call.answer.done():
                    call.answer.set_result(result)


def _lost(claim: TrajectoryClaim) -> ClaimLost:
    name = claim.job.trajectory_id
    return ClaimLost(f"trajectory {name} is held by someone else now", job_id=name, fence=claim.fence)

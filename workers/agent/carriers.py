"""Carriers: trajectories of a run whose only use is that turns can be asked for on them (docs/decisions/0060).

- This process pushes a carrier when it needs one, claims it as any agent claims, and cancels its group when it is used
  up, lost, or idle: a carrier is never settled, so no consumer of the run ever sees it.
- A session's turns are asked for on one carrier, as long as it has some left; all requests without a session share one.
- A carrier that was claimed before is another process's leavings: nobody knows here which of its turns were asked for,
  so it is cancelled, too. Whatever becomes of processes, the next one to need a carrier cleans up.
- Turns of a carrier are numbered without holes, as the broker expects: `ask` is not broken off when a client leaves.
  The turn is cancelled, and its result says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...fabric.contract.errors import BrokerError, RunUnknown
from ...fabric.contract.ids import new_group_id, trajectory_id
from ...fabric.contract.records import RunConfig, TrajectoryJob, TurnJob, TurnResult
from ...fabric.host.helpers import end_all
from ...fabric.ports.inference import INFERENCE
from ...fabric.ports.queue import Fabric, GroupPush, TrajectoryClaim, TrajectoryQueue
from .episode import TurnCaller

log = logging.getLogger(__name__)

SESSION_COUNT_MAX = 4096  # with a carrier of their own; beyond it the longest idle one is given up
IDLE_S = 600.0  # without a request, after which a session's carrier is given up
CLAIM_COUNT_MAX = 64  # carriers that are taken at once, where many sessions begin together
WAIT_S = 0.5  # for a trajectory that was pushed, before it is looked for again
SWEEP_S = 0.5
PRIORITY = 0  # what has little memory left still begins urgent trajectories, and these hold almost none


@dataclass(slots=True, eq=False)
class Carrier:
    """A claimed trajectory, and what is under way on it. asked_count: turns, so far. is_over: it takes no more."""

    claim: TrajectoryClaim
    used_s: float
    asked_count: int = 0
    is_over: bool = False
    asking: set[asyncio.Task[TurnResult]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.claim.job.trajectory_id

    def has_room(self) -> bool:
        """Whether it has turns left."""
        return not self.is_over and self.asked_count < self.claim.turn_count_max

    def next_index(self) -> int:
        """Take the number of its next turn."""
        self.asked_count += 1
        return self.asked_count - 1

    def ask(self, caller: TurnCaller, job: TurnJob) -> asyncio.Task[TurnResult]:
        """Begin to ask for a turn. The task is cancelled only where the carrier is over."""
        task = asyncio.create_task(caller.ask(self.claim, job))
        self.asking.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[TurnResult]) -> None:
        self.asking.discard(task)
        if not task.cancelled():
            task.exception()  # it may be that nobody waits for it any more

    def end(self) -> None:
        """End it: who waits for one of its turns finds the task cancelled."""
        self.is_over = True
        for task in self.asking:
            task.cancel()


class Carriers:
    """The carriers of one run in this process. The keeper renews their claims (keeper.py, Kept)."""

    def __init__(self, fabric: Fabric, run: RunConfig, worker_id: str) -> None:
        self.run = run
        self._worker_id = worker_id
        self._trajectories = fabric.trajectories(run)
        self._rollouts = fabric.rollouts(run)
        self.claims: dict[str, TrajectoryClaim] = {}
        self._held: dict[str, Carrier] = {}  # by trajectory
        self._current: dict[str, Carrier] = {}  # by session; the longest unused first
        self._spare: list[TrajectoryClaim] = []
        self._waiting_count = 0
        self._taking = asyncio.Lock()
        self._ended_groups: list[str] = []  # that are still to be cancelled

    # ---- the keeper's side

    async def renew(self, trajectories: TrajectoryQueue) -> dict[str, int]:
        """Renew the claims; return the lost ones as trajectory → fence. The keeper calls this in its own thread."""
        held = list(self.claims.values())
        lost = await trajectories.renew(self._worker_id, held) if held else []
        fences = {claim.job.trajectory_id: claim.fence for claim in held}
        return {name: fences[name] for name in lost}

    def lose(self, lost: Mapping[str, int]) -> None:
        """End lost carriers: their requests go on, on others."""
        for name, fence in lost.items():
            claim = self.claims.get(name)
            if claim is None or claim.fence != fence:
                continue
            log.info("carrier.lost", extra={"job_id": name, "fence": fence})
            carrier = self._held.get(name)
            if carrier is not None:
                self.give_up(carrier)
            else:  # a spare one
                self._spare = [each for each in self._spare if each is not claim]
                self._forget(claim)

    # ---- requests

    async def of(self, session: str) -> Carrier:
        """Return the carrier of a session that has a turn left.

        Raises:
            QueueFull, BrokerFull, RunUnknown: the run takes no trajectory in, as they say.
        """
        carrier = self._current.get(session)
        if carrier is None or not carrier.has_room():
            self._waiting_count += 1
            try:
                async with self._taking:
                    carrier = self._current.get(session)
                    if carrier is None or not carrier.has_room():
                        carrier = self._replace(session, await self._take())
            finally:
                self._waiting_count -= 1
        self._current[session] = self._current.pop(session)
        carrier.used_s = asyncio.get_running_loop().time()
        return carrier

    def _replace(self, session: str, claim: TrajectoryClaim) -> Carrier:
        carrier = Carrier(claim, asyncio.get_running_loop().time())
        self._held[carrier.name] = self._current[session] = carrier
        while len(self._current) > SESSION_COUNT_MAX:
            idle = next((name for name, each in self._current.items() if not each.asking and name != session), None)
            if idle is None:
                break
            self.give_up(self._current[idle])
        return carrier

    async def _take(self) -> TrajectoryClaim:
        """Claim a trajectory that nobody has held before; push some for all who wait, where there is none."""
        while not self._spare:
            want = min(max(1, self._waiting_count), CLAIM_COUNT_MAX)
            if not await self._claim(want):
                await self._rollouts.push([_group() for _ in range(want)])
                if not await self._claim(want):
                    await self._trajectories.wait(WAIT_S)  # another process of ours was faster
        return self._spare.pop()

    async def _claim(self, want: int) -> bool:
        for claim in await self._trajectories.claim(self._worker_id, want, is_inside=False):
            self.claims[claim.job.trajectory_id] = claim
            if claim.fence == 1:
                self._spare.append(claim)
            else:
                self._forget(claim)
        return bool(self._spare)

    # ---- their end

    def give_up(self, carrier: Carrier) -> None:
        """End a carrier; its group is cancelled soon."""
        if carrier.is_over and carrier.name not in self._held:
            return
        carrier.end()
        self._held.pop(carrier.name, None)
        for session in [name for name, each in self._current.items() if each is carrier]:
            del self._current[session]
        self._forget(carrier.claim)

    def _forget(self, claim: TrajectoryClaim) -> None:
        if self.claims.get(claim.job.trajectory_id) is claim:
            del self.claims[claim.job.trajectory_id]
        self._ended_groups.append(claim.job.group_id)

    async def sweep(self) -> None:
        """Give up what is used up or idle, and cancel the groups of what is over; for ever.

        Raises:
            BrokerError: that failed; the next call repeats it.
        """
        while True:
            now_s = asyncio.get_running_loop().time()
            for carrier in list(self._held.values()):
                is_of_use = carrier.has_room() and carrier.used_s + IDLE_S > now_s
                if not carrier.asking and not is_of_use:
                    self.give_up(carrier)
            await self._cancel_ended()
            await asyncio.sleep(SWEEP_S)

    async def _cancel_ended(self) -> None:
        while self._ended_groups:
            await self._rollouts.cancel(self._ended_groups[0])
            self._ended_groups.pop(0)

    async def close(self) -> None:
        """End all carriers, and cancel their groups."""
        asking = [task for carrier in self._held.values() for task in carrier.asking]
        for carrier in list(self._held.values()):
            self.give_up(carrier)
        for claim in self._spare:
            self._forget(claim)
        self._spare = []
        await end_all(asking)
        try:
            await self._cancel_ended()
        except (BrokerError, RunUnknown) as error:  # their claims end by themselves, and others clean up
            log.warning("carriers.left_without_saying", extra={"error": str(error)})


def _group() -> GroupPush:
    group_id = new_group_id()
    job = TrajectoryJob(
        trajectory_id=trajectory_id(group_id, 0), group_id=group_id, task_id=INFERENCE, index=0, task={}, seed=0
    )
    return GroupPush(group_id=group_id, task_id=INFERENCE, task={}, jobs=(job,), priority=PRIORITY)

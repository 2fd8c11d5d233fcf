"""Carriers: trajectories of a run whose only use is that turns can be asked for on them (docs/decisions/0060).

- This process pushes a carrier when it needs one, claims it as any agent claims, and cancels its group when it is used
  up, lost, or idle: a carrier is never settled, so no consumer of the run ever sees it.
- A carrier has one turn under way at most, as trajectories have: so what is open is what the controller plans for.
  A session keeps its carrier between its requests; what it asks for beside them goes to the carriers of no session.
- A carrier that was claimed before is another process's leavings: nobody knows here which of its turns were asked for,
  so it is cancelled, too. Whatever becomes of processes, the next one to need a carrier cleans up.
- Turns of a carrier are numbered without holes, as the broker expects: `ask` is not broken off when a client leaves.
  The turn is cancelled, and its result says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ...fabric.contract.errors import BrokerError, RunUnknown
from ...fabric.contract.ids import new_group_id, trajectory_id
from ...fabric.contract.records import RunConfig, TrajectoryJob, TurnJob, TurnResult
from ...fabric.host.helpers import end_all
from ...fabric.ports.inference import INFERENCE
from ...fabric.ports.queue import Fabric, GroupPush, TrajectoryClaim, TrajectoryQueue
from .episode import TurnCaller

log = logging.getLogger(__name__)

SESSION_COUNT_MAX = 4096  # with a carrier of their own; beyond it the longest idle one is given up
SESSION_IDLE_S = 60.0  # without a request, after which a session's carrier is given up: to the controller it thinks
IDLE_S = 5.0  # likewise a carrier of no session: what nobody needs is to ask for no workers
CLAIM_COUNT_MAX = 64  # carriers that are taken at once, where many sessions begin together
WAIT_S = 0.5  # for a trajectory that was pushed, before it is looked for again
SWEEP_S = 0.5
PRIORITY = 0  # what has little memory left still begins urgent trajectories, and these hold almost none


@dataclass(slots=True, eq=False)
class Carrier:
    """A claimed trajectory. session: whose it is; empty: nobody's. asked_count: turns, so far. is_over: it takes none.

    asking: the turn that is under way.
    """

    claim: TrajectoryClaim
    session: str
    used_s: float
    asked_count: int = 0
    is_over: bool = False
    asking: asyncio.Task[TurnResult] | None = None

    @property
    def name(self) -> str:
        return self.claim.job.trajectory_id

    @property
    def has_turns(self) -> bool:
        """True if it has turns left."""
        return not self.is_over and self.asked_count < self.claim.turn_count_max

    @property
    def is_free(self) -> bool:
        """True if a turn can be asked for on it now."""
        return self.has_turns and self.asking is None


class Carriers:
    """The carriers of one run in this process. The keeper renews their claims (keeper.py, Kept)."""

    def __init__(self, fabric: Fabric, run: RunConfig, worker_id: str) -> None:
        self.run = run
        self._worker_id = worker_id
        self._trajectories = fabric.trajectories(run)
        self._rollouts = fabric.rollouts(run)
        self.claims: dict[str, TrajectoryClaim] = {}
        self._held: dict[str, Carrier] = {}  # by trajectory
        self._sessions: dict[str, Carrier] = {}  # the longest unused first
        self._free: list[Carrier] = []  # of no session; the last used last, and some that are not free any more
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
        """Return a carrier on which a turn can be asked for: its caller calls `ask` before it awaits anything.

        Raises:
            QueueFull, BrokerFull, RunUnknown: the run takes no trajectory in, as they say.
        """
        own = self._sessions.get(session)
        carrier = own if own is not None and own.is_free else self._next_free()
        if carrier is None:
            self._waiting_count += 1
            try:
                async with self._taking:
                    carrier = self._next_free()
                    if carrier is None:
                        carrier = Carrier(await self._take(), "", 0.0)
                        self._held[carrier.name] = carrier
            finally:
                self._waiting_count -= 1
        own = self._sessions.get(session)  # another request of the session may have brought one meanwhile
        if session and (own is None or not own.has_turns):
            carrier.session = session
        if carrier.session:
            self._sessions.pop(carrier.session, None)
            self._sessions[carrier.session] = carrier
            self._bound_sessions()
        return carrier

    def ask(self, carrier: Carrier, caller: TurnCaller, job: TurnJob) -> asyncio.Task[TurnResult]:
        """Begin to ask for a carrier's next turn. The task is cancelled only where the carrier is over."""
        assert carrier.is_free
        carrier.asked_count += 1
        carrier.asking = asyncio.create_task(caller.ask(carrier.claim, job, goes_home=bool(carrier.session)))
        carrier.asking.add_done_callback(lambda task: self._has_asked(carrier, task))
        return carrier.asking

    def _has_asked(self, carrier: Carrier, task: asyncio.Task[TurnResult]) -> None:
        carrier.asking = None
        carrier.used_s = asyncio.get_running_loop().time()
        if not carrier.session and carrier.has_turns:
            self._free.append(carrier)
        if not task.cancelled():
            task.exception()  # it may be that nobody waits for it any more

    def _next_free(self) -> Carrier | None:
        while self._free:
            carrier = self._free.pop()
            if carrier.is_free:
                return carrier
        return None

    def _bound_sessions(self) -> None:
        while len(self._sessions) > SESSION_COUNT_MAX:
            idle = next((each for each in self._sessions.values() if each.is_free), None)
            if idle is None:
                return
            self.give_up(idle)

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
            if claim.is_first:
                self._spare.append(claim)
            else:
                self._forget(claim)
        return bool(self._spare)

    # ---- their end

    def give_up(self, carrier: Carrier) -> None:
        """End a carrier: who waits for its turn finds the task cancelled. Its group is cancelled soon."""
        if carrier.is_over:
            return
        carrier.is_over = True
        if carrier.asking is not None:
            carrier.asking.cancel()
        self._held.pop(carrier.name, None)
        if self._sessions.get(carrier.session) is carrier:
            del self._sessions[carrier.session]
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
                idle_s = SESSION_IDLE_S if carrier.session else IDLE_S
                if carrier.asking is None and not (carrier.has_turns and carrier.used_s + idle_s > now_s):
                    self.give_up(carrier)
            await self._cancel_ended()
            await asyncio.sleep(SWEEP_S)

    async def _cancel_ended(self) -> None:
        while self._ended_groups:
            await self._rollouts.cancel(self._ended_groups[0])
            self._ended_groups.pop(0)

    async def close(self) -> None:
        """End all carriers, and cancel their groups."""
        asking = [carrier.asking for carrier in self._held.values() if carrier.asking is not None]
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

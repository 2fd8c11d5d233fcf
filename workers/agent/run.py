"""The part of an agent worker that serves one run: claims its trajectories, and brings each to its end.

What happens between the two is episode.py's. A claim that is lost ends its episode at once; whoever took it over goes
on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError, ClaimLost, FabricError
from ...fabric.contract.records import RunConfig
from ...fabric.contract.tokenizer import Tokenizer
from ...fabric.host.helpers import Helpers, end_all
from ...fabric.ports.queue import Fabric, TrajectoryClaim, TrajectoryQueue
from ...fabric.rules.queue.runs import is_same_run
from ..environments.failures import dead_letter
from ..environments.registry import Registry
from ..environments.room import Room
from .episode import Episode, Limits, TurnCaller
from .keeper import AskReward, patiently
from .slots import Places, Quarantine

log = logging.getLogger(__name__)

STALL_S = 30.0  # without a turn from anybody: what is above a run's share is for others then
WAIT_S = 0.5  # longest wait for work, or for a place: the safety net below the doorbell


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Settings of an agent worker."""

    worker_id: str
    environment_count: int = 256
    """Environments at once, over all runs, [1, 10000]."""
    environment_timeout_s: float = 30.0
    """A reset or step that takes longer fails its attempt."""
    ask_again_s: float = 60.0
    """A turn without a result for this long is asked for again, which changes nothing if it is under way, and brings
    the result if that was lost on its way here. Waiting itself has no end: there may be no worker for hours."""
    renew_s: float = 0.5
    """Must be well below the claim time of 2 s; a cancelled group has let go of its places after as long."""
    reap_s: float = 0.25
    """How often what others lost is taken back, and groups past their deadline are completed."""
    runs_s: float = 0.25
    """How often new runs, and changed settings of others, are looked for."""
    hub_names: tuple[str, ...] = ()
    """Models whose tokenizers may be downloaded for a run that names them, as patterns: "org/*"."""
    hung_s: float = 30.0
    """An agent whose event loop stands for longer is hung, and its trajectories are for others."""


@dataclass(frozen=True, kw_only=True)
class AgentParts:
    """What the runs of one agent share: the places for environments and for a suspect, the room for snapshots, and how
    to reach all else."""

    fabric: Fabric
    registry: Registry
    config: AgentConfig
    clock: Clock
    ask_reward: AskReward
    places: Places
    quarantine: Quarantine
    room: Room


class RunAgent:
    """The part of an agent worker that serves one run."""

    def __init__(self, parts: AgentParts, run: RunConfig, tokenizer: Tokenizer) -> None:
        self._parts = parts
        self._worker_id = parts.config.worker_id
        self._run = run
        self._trajectories = parts.fabric.trajectories(run)
        self._tokenizer = tokenizer
        self.claims: dict[str, TrajectoryClaim] = {}
        self._episodes: dict[str, asyncio.Task[None]] = {}
        self._settling: set[tuple[str, int]] = set()  # trajectory and fence
        again_s, turns = parts.config.ask_again_s, parts.fabric.turns(run)
        caller = TurnCaller(self._worker_id, turns, self._trajectories, parts.quarantine, ask_again_s=again_s)
        self._caller = caller
        self._helpers = Helpers(*(patiently(work, parts.clock) for work in (self._claim, caller.push, caller.receive)))

    @property
    def run(self) -> RunConfig:
        """The run as it is now."""
        return self._run

    def follow(self, run: RunConfig) -> bool:
        """Take in settings that changed, for claims from now on: episodes under way go on as they began.

        How often a trajectory may fail counts at once. False: it is another run, made anew under the same name.
        """
        if not is_same_run(self._run, run):
            return False
        if run != self._run:
            self._run, self._trajectories = run, self._parts.fabric.trajectories(run)
        return True

    def has_died(self) -> bool:
        """Whether a loop ended by an error that is ours."""
        error = self._helpers.error
        if error is not None:
            log.error("agent.loop_died", exc_info=error, extra={"run_id": self._run.run_id})
        return error is not None

    async def close(self) -> None:
        """Stop, and give back what is unfinished."""
        held = list(self.claims.values())
        await self._helpers.end()
        await end_all(self._episodes.values())
        try:
            await self._trajectories.release(self._worker_id, held)
        except FabricError as error:
            log.warning("agent.left_without_saying", extra={"error": str(error)})

    # ---- the loops

    async def _claim(self) -> None:
        run_id, places, quarantine = self._run.run_id, self._parts.places, self._parts.quarantine
        while True:
            is_inside = await self._is_inside()
            want, claims = places.take(run_id), []
            if not want:
                await places.changed(WAIT_S)
                continue
            takes_suspect = is_inside and quarantine.take()
            try:
                found = await self._trajectories.claim(
                    self._worker_id, want, takes_suspect=takes_suspect or not is_inside, is_inside=is_inside
                )
                claims = [dataclasses.replace(each, snapshot=None) for each in found]  # those are kept
            finally:
                places.used(run_id, want, len(claims))
                if takes_suspect:
                    quarantine.hold(claims)
            for claim in claims:
                self._start(claim, found.pop(0))
            if not claims:
                await self._trajectories.wait(WAIT_S)

    async def _is_inside(self) -> bool:
        """Whether the environment could end this agent; one that cannot be had says why to each of its episodes."""
        try:
            return await self._parts.registry.is_inside(self._run.environment)
        except FabricError:
            return False

    async def renew(self, trajectories: TrajectoryQueue) -> dict[str, int]:
        """Renew what is held, in the keeper's thread; returns what is lost: trajectory and fence."""
        held = list(self.claims.values())
        lost = await trajectories.renew(self._worker_id, held) if held else []
        fences = {claim.job.trajectory_id: claim.fence for claim in held}
        return {name: fences[name] for name in lost}

    def lose(self, lost: Mapping[str, int]) -> None:
        """End episodes whose claim is lost, but not those that were claimed anew while the broker was asked.

        One that is being handed in is no longer held by its claim: the answer to that tells what became of it.
        """
        for name, fence in lost.items():
            claim = self.claims.get(name)
            if claim is not None and claim.fence == fence and (name, fence) not in self._settling:
                self._episodes[name].cancel()

    async def give_back(self, count: int) -> None:
        """Let go of `count` trajectories, if nobody has generated a turn of this run for long: others have work.

        The last ones that were claimed, which are the least far. Whoever claims them next goes on where they are.
        """
        waiting = self._caller.unanswered(STALL_S)
        chosen = [claim for name, claim in self.claims.items() if name in waiting][-count:]
        if not chosen:
            return
        log.info("agent.places_given_back", extra={"run_id": self._run.run_id, "count": len(chosen)})
        await end_all([self._episodes[claim.job.trajectory_id] for claim in chosen])
        try:
            await self._trajectories.release(self._worker_id, chosen)
        except FabricError as error:  # their claims end by themselves
            log.warning("agent.broker_lost", extra={"error": str(error)})

    # ---- one trajectory

    def _start(self, claim: TrajectoryClaim, found: TrajectoryClaim) -> None:
        """Begin its episode. found: the same claim as it came, with a snapshot that the episode lets go of."""
        name, parts = claim.job.trajectory_id, self._parts
        if name in self._episodes:  # its claim was lost, which nobody has told us yet
            self._episodes[name].cancel()
        self.claims[name] = claim
        limits = Limits(agent_id=self._worker_id, call_timeout_s=parts.config.environment_timeout_s, room=parts.room)
        episode = Episode(self._run, found, parts.registry, self._tokenizer, limits, self._caller)
        self._episodes[name] = asyncio.create_task(self._live(claim, episode))
        self._episodes[name].add_done_callback(lambda _: self._end(claim))

    def _end(self, claim: TrajectoryClaim) -> None:
        """An episode is over: also one that was cancelled before it began."""
        name = claim.job.trajectory_id
        self._parts.quarantine.clear(claim)
        if self.claims.get(name) is claim:  # not, when a retry of it was claimed here in the meantime
            del self.claims[name], self._episodes[name]
        self._parts.places.give(self._run.run_id)

    async def _live(self, claim: TrajectoryClaim, episode: Episode) -> None:
        """Run a claimed trajectory to its end, whatever that is."""
        name = claim.job.trajectory_id
        try:
            rollout = await episode.run()
            is_scored = self._run.reward is None
            self._settling.add((name, claim.fence))
            settle = self._trajectories.settle
            is_settled = await self._settle_patiently(lambda: settle(claim, rollout, is_scored=is_scored))
            if is_settled and not is_scored:
                await self._parts.ask_reward(self._run.run_id, name, claim.fence)
        except ClaimLost:
            log.info("agent.claim_lost", extra={"job_id": name, "fence": claim.fence})
        except Exception as error:  # noqa: BLE001 - around a user's environment: its attempt fails, the agent goes on
            await self._fail(claim, error)
        finally:
            self._settling.discard((name, claim.fence))

    async def _settle_patiently(self, settle: Callable[[], Awaitable[bool]]) -> bool:
        """Settling is idempotent, so it is repeated until the broker answers or the claim is surely lost."""
        for _ in range(10):
            try:
                return await settle()
            except BrokerError as error:
                log.warning("agent.broker_lost", extra={"error": str(error)})
                await self._parts.clock.sleep(0.5)
        return False

    async def _fail(self, claim: TrajectoryClaim, error: Exception) -> None:
        who = {"run_id": self._run.run_id, "worker_id": self._worker_id}
        letter = dead_letter(error, claim.job, attempt=claim.attempt, **who)
        try:
            outcome = await self._trajectories.fail(claim.job.trajectory_id, claim.fence, letter)
        except FabricError as trouble:
            log.error("agent.fail_failed", extra={"job_id": claim.job.trajectory_id, "error": str(trouble)})
            return
        facts = {"job_id": claim.job.trajectory_id, "attempt": claim.attempt, "outcome": outcome}
        log.warning("agent.attempt_failed", extra={**facts, "reason": letter.reason})

"""The part of an agent worker that serves one run: claims its trajectories, and settles or fails each.

The life of a trajectory in between is episode.py's. A lost claim ends its episode at once; the agent that took it over
goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError, ClaimLost, EngineUnsupported, FabricError, PayloadTooLarge
from ...fabric.contract.records import Rollout, RunConfig
from ...fabric.host.helpers import Helpers, end_all
from ...fabric.model.tokenizer import Tokenizer
from ...fabric.ports.queue import Fabric, TrajectoryClaim, TrajectoryQueue
from ...fabric.rules.queue.runs import is_same_run
from ...fabric.rules.queue.timings import Timings
from ...fabric.tracing.spans import place_of
from ..environments.failures import dead_letter
from ..environments.registry import Registry
from ..environments.room import Room
from .desk import Desk, Untaken
from .episode import Episode, Limits, TurnCaller, played_at
from .keeper import AskReward, patiently
from .slots import Places, Quarantine

log = logging.getLogger(__name__)

STALL_S = 30.0  # a run that waits and has had no turn for so long has stalled: see rules/queue/share.py
AGAIN_S = 300.0
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
    """The agent asks again for a turn that has had no result for this long: this changes nothing if the turn is under
    way, and brings the result if it was lost on its way here. The wait itself has no end: there may be no worker for
    hours."""
    renew_s: float = 0.5
    """How often claims are renewed. Must be well below the claim time of 2 s; a cancelled group frees its places within
    this time."""
    reap_s: float = 0.25
    """How often the agent takes back claims that others lost, and completes groups past their deadline."""
    runs_s: float = 0.25
    """How often the agent looks for new runs and changed settings."""
    hub_names: tuple[str, ...] = ()
    """Models whose tokenizers may be downloaded for a run that names them, as patterns: "org/*"."""
    hung_s: float = 30.0
    """An agent whose event loop stands still for longer is hung, and others take over its trajectories."""


@dataclass(frozen=True, kw_only=True)
class AgentParts:
    """The things that all runs of one agent share: places for environments and for a suspect, the room for snapshots,
    what it measures, and the way to everything else."""

    fabric: Fabric
    registry: Registry
    config: AgentConfig
    clock: Clock
    ask_reward: AskReward
    places: Places
    quarantine: Quarantine
    room: Room
    desk: Desk
    timings: Timings


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
        self._stalled_at_s = -math.inf
        again_s, turns = parts.config.ask_again_s, parts.fabric.turns(run)
        self._timings = parts.timings.of(run.run_id)
        caller = self._caller = TurnCaller(
            self._worker_id,
            turns,
            self._trajectories,
            parts.quarantine,
            ask_again_s=again_s,
            timings=self._timings,
            run=run,
        )
        self._helpers = Helpers(*(patiently(work, parts.clock) for work in (self._claim, caller.push, caller.receive)))

    @property
    def run(self) -> RunConfig:
        """The run, with its settings as they are now."""
        return self._run

    def follow(self, run: RunConfig) -> bool:
        """Take in changed settings for claims from now on: episodes under way go on as they began.

        The limit of a trajectory's failures holds at once. Return False if this is another run, made anew under the
        same name.
        """
        if not is_same_run(self._run, run):
            return False
        if run != self._run:
            self._run, self._trajectories = run, self._parts.fabric.trajectories(run)
        return True

    def has_died(self) -> bool:
        """Tell whether a fault of ours has ended one of the loops."""
        error = self._helpers.error
        if error is not None:
            log.error("agent.loop_died", exc_info=error, extra={"run_id": self._run.run_id})
        return error is not None

    async def close(self) -> None:
        """Stop, and release unfinished trajectories."""
        held = list(self.claims.values())
        await self._helpers.end()
        await end_all(self._episodes.values())
        await self._release(held)

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
                claims = [dataclasses.replace(each, snapshot=None) for each in found]  # we keep these, so no snapshots
            finally:
                places.used(run_id, want, len(claims))
                if takes_suspect:
                    quarantine.hold(claims)
            for claim in claims:
                if claim.waited_s is not None:
                    self._timings.note("trajectory_queue", claim.waited_s, claim.job.trajectory_id)
                    self._trace_wait(claim, claim.waited_s)
                self._start(claim, found.pop(0))
            if not claims:
                await self._trajectories.wait(WAIT_S)

    async def _is_inside(self) -> bool:
        """Tell whether the environment runs in this process, and so could end it.

        False if the environment cannot be had: each of its episodes fails with the reason.
        """
        try:
            return await self._parts.registry.is_inside(self._run.environment)
        except FabricError:
            return False

    async def renew(self, trajectories: TrajectoryQueue) -> dict[str, int]:
        """Renew the claims; return the lost ones as trajectory → fence. The keeper calls this in its own thread."""
        held = list(self.claims.values())
        lost = await trajectories.renew(self._worker_id, held) if held else []
        fences = {claim.job.trajectory_id: claim.fence for claim in held}
        return {name: fences[name] for name in lost}

    def lose(self, lost: Mapping[str, int]) -> None:
        """End the episodes of lost claims, except trajectories claimed anew while the broker was asked.

        Also spare a trajectory that is being settled: that ends its claim, and the broker's answer tells the outcome.
        """
        for name, fence in lost.items():
            claim = self.claims.get(name)
            if claim is not None and claim.fence == fence and (name, fence) not in self._settling:
                self._episodes[name].cancel()

    def has_stalled(self) -> bool:
        """Tell whether episodes waited for STALL_S without any turn of the run, and none has come since.

        One that holds no place any more is believed to have stalled for AGAIN_S, and then tried like any other.
        """
        now_s = asyncio.get_running_loop().time()
        if self._caller.waiting and self._caller.silent_s() >= STALL_S:
            self._stalled_at_s = now_s
        elif self._caller.heard_at_s > self._stalled_at_s or now_s > self._stalled_at_s + AGAIN_S:
            self._stalled_at_s = -math.inf
        return self._stalled_at_s > -math.inf

    async def give_back(self, count: int) -> None:
        """Release `count` trajectories for other runs, of those that wait for a turn.

        Choose those claimed last, which are the least far. The next agent to claim them goes on where they are.
        """
        waiting = self._caller.waiting
        chosen = [claim for name, claim in self.claims.items() if name in waiting][-count:]
        if not chosen:
            return
        log.info("agent.places_given_back", extra={"run_id": self._run.run_id, "count": len(chosen)})
        await end_all([self._episodes[claim.job.trajectory_id] for claim in chosen])
        await self._release(chosen)

    async def _release(self, claims: list[TrajectoryClaim]) -> None:
        try:
            await self._trajectories.release(self._worker_id, claims)
        except FabricError as error:  # their claims end by themselves
            log.warning("agent.left_without_saying", extra={"error": str(error)})

    # ---- one trajectory

    def _start(self, claim: TrajectoryClaim, found: TrajectoryClaim) -> None:
        """Begin the episode of a claim. found: the same claim with its snapshot, which only the episode keeps."""
        name, parts = claim.job.trajectory_id, self._parts
        if name in self._episodes:  # its earlier claim was lost, and the news has not come yet
            self._episodes[name].cancel()
        self.claims[name] = claim
        limits = Limits(
            agent_id=self._worker_id,
            call_timeout_s=parts.config.environment_timeout_s,
            room=parts.room,
            desk=parts.desk,
            clock=parts.clock,
            timings=self._timings,
        )
        episode = Episode(self._run, found, parts.registry, self._tokenizer, limits, self._caller)
        self._episodes[name] = asyncio.create_task(self._live(claim, episode))
        self._episodes[name].add_done_callback(lambda _: self._end(claim))

    def _end(self, claim: TrajectoryClaim) -> None:
        """Free the place of an episode that is over, even if it was cancelled before it began."""
        name = claim.job.trajectory_id
        self._parts.quarantine.clear(claim)
        if self.claims.get(name) is claim:  # false if a retry of it was claimed here in the meantime
            del self.claims[name], self._episodes[name]
        self._parts.places.give(self._run.run_id)

    async def _live(self, claim: TrajectoryClaim, episode: Episode) -> None:
        """Run a claimed trajectory to its end; settle it, or fail it."""
        name, is_settled, begun_s = claim.job.trajectory_id, False, self._parts.clock.now_s()
        try:
            rollout = await episode.run()
            is_scored = self._run.reward is None
            self._settling.add((name, claim.fence))
            settle = self._trajectories.settle
            is_settled = await self._settle_patiently(lambda: settle(claim, rollout, is_scored=is_scored))
            if is_settled:
                self._timings.note("trajectory", self._parts.clock.now_s() - begun_s, name)
                self._trace(claim, begun_s, rollout=rollout)
            if is_settled and not is_scored:
                await self._parts.ask_reward(self._run.run_id, name, claim.fence)
        except ClaimLost:
            log.info("agent.claim_lost", extra={"job_id": name, "fence": claim.fence})
        except Untaken:
            await self._release([claim])
        except Exception as error:  # noqa: BLE001 - around a user's environment: its attempt fails, the agent goes on
            self._trace(claim, begun_s, error=type(error).__name__)
            await self._fail(claim, error)
        finally:
            if episode.session is not None:
                episode.session.say_recorded(is_settled)
            await episode.close()
            self._settling.discard((name, claim.fence))

    def _trace_wait(self, claim: TrajectoryClaim, waited_s: float) -> None:
        """Add the span of a trajectory's wait for this agent."""
        place = played_at(claim)
        if place is not None:
            now_s = self._parts.clock.now_s()
            at, submitted = place.child("queue", claim.fence), place_of(claim.job.traceparent)
            self._timings.spans.add("trajectory_queue", at, submitted, now_s - waited_s, now_s)

    def _trace(
        self, claim: TrajectoryClaim, begun_s: float, *, rollout: Rollout | None = None, error: str = ""
    ) -> None:
        """Add the span of an attempt that ended well, with its rollout, or not; if it is traced."""
        made, place = rollout, played_at(claim)
        if place is None:
            return
        self._timings.spans.add(
            "trajectory",
            place,
            place_of(claim.job.traceparent),
            begun_s,
            self._parts.clock.now_s(),
            error=error,
            environment=self._run.environment,
            model=self._run.model,
            run_id=self._run.run_id,
            group_id=claim.job.group_id,
            trajectory_id=claim.job.trajectory_id,
            attempt=claim.attempt,
            turn_count=None if made is None else made.turn_count,
            outcome=None if made is None else made.finish_reason,
            reward=None if made is None else made.reward,
        )

    async def _settle_patiently(self, settle: Callable[[], Awaitable[bool]]) -> bool:
        """Repeat settling, which is idempotent, until the broker answers or the claim is surely lost."""
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
            is_final = isinstance(error, EngineUnsupported | PayloadTooLarge)  # it would be refused again
            outcome = await self._trajectories.fail(claim.job.trajectory_id, claim.fence, letter, is_final=is_final)
        except FabricError as trouble:
            log.error("agent.fail_failed", extra={"job_id": claim.job.trajectory_id, "error": str(trouble)})
            return
        facts = {"job_id": claim.job.trajectory_id, "attempt": claim.attempt, "outcome": outcome}
        log.warning("agent.attempt_failed", extra={**facts, "reason": letter.reason})

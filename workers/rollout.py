"""The rollout worker: pulls turns under a lease and runs them on an engine. Dedicated and serving workers share it.

The loop, one verb a line, is `_turn_over`: collect what the engine finished, exchange with the broker (hand in, keep,
take), start what came. Around it three things happen by themselves: a heartbeat that brings the lease, a listener at
the doorbell, and a receiver that stages new weights.

- Without a lease nothing is claimed. When a lease ends, running turns go back at once, with their tokens.
- A claim that was lost is aborted; its tokens belong to whoever holds it now.
- Tokens of long turns are saved every `log_s`, so a killed worker costs at most that much.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Container
from dataclasses import dataclass

from ..fabric.clock import Clock
from ..fabric.errors import BrokerError, EngineError, FabricError
from ..fabric.ports import Exchange, Fabric, TurnClaim, TurnProgress, TurnQueue, TurnSettle
from ..fabric.records import NO_IDS, NO_LOGPROBS, Lease, TokenLog, TurnResult, WorkerInfo
from .engines.base import Engine, Generation, GenerationRequest
from .spans import merge
from .weights import WeightReceiver

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of a rollout worker."""

    worker_id: str
    role: str
    """dedicated or serving."""
    model: str
    slot_count: int
    """Turns it can run at once, [1, 4096]."""
    heartbeat_s: float = 0.2
    """Also the longest time for which an ended lease goes unnoticed."""
    log_s: float = 0.5
    """How often running turns are renewed and their tokens saved; must be well below the claim time of 2 s."""
    poll_s: float = 0.25
    """Safety net below the doorbell."""


@dataclass(slots=True)
class _Running:
    claim: TurnClaim
    renewed_at_s: float
    saved_count: int = 0


class RolloutWorker:
    """Runs turns of whatever run its lease names."""

    def __init__(
        self,
        fabric: Fabric,
        engine: Engine,
        config: RolloutConfig,
        clock: Clock,
        *,
        make_receiver: Callable[[str], WeightReceiver],
        headroom: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._fabric = fabric
        self._engine = engine
        self._config = config
        self._clock = clock
        self._make_receiver = make_receiver
        self._headroom = headroom
        self._lease: Lease | None = None
        self._lease_until_s: float | None = None
        self._is_held = False
        self._turns: TurnQueue | None = None
        self._receiver: WeightReceiver | None = None
        self._running: dict[str, _Running] = {}
        self._done: list[Generation] = []
        self._is_lease_in_doubt = False
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_beat_due = asyncio.Event()
        self._run_id: str | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then give everything back.

        Raises:
            EngineError: the engine died; its turns were given back.
        """
        helpers = [asyncio.create_task(work()) for work in (self._collect, self._beat, self._watch, self._listen)]
        try:
            while not stop.is_set():
                _raise_finished(helpers)
                try:
                    await self._turn_over()
                except BrokerError as error:
                    log.warning("worker.broker_lost", extra={"error": str(error)})
                    await self._clock.sleep(self._config.poll_s)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._leave()

    async def _turn_over(self) -> None:
        """One round: hand in, keep, take, start."""
        await self._wait()
        await self._follow_lease()
        if self._turns is None:
            return
        outcome = await self._exchange(self._turns)
        if not outcome.has_lease:
            self._doubt_lease()
        taken = [claim.job.turn_id for claim in outcome.claims]
        stale = [*outcome.lost, *(name for name in taken if name in self._running)]
        if stale:
            await self._drop(stale)
        self._start(outcome.claims)
        if self._free_count():
            self._has_room.set()

    async def _wait(self) -> None:
        timer = asyncio.get_running_loop().call_later(self._config.poll_s, self._wake.set)
        await self._wake.wait()
        timer.cancel()
        self._wake.clear()

    async def _exchange(self, turns: TurnQueue) -> Exchange:
        """Hand in all that has ended; the slots which that frees are asked for in the same round trip."""
        self._check_engine()
        done, self._done = self._done, []
        settles = {each.request_id: settle for each in done if (settle := self._settle(each)) is not None}
        try:
            outcome = await turns.exchange(
                self._config.worker_id,
                settles=list(settles.values()),
                progress=self._due(settles),
                want=self._free_count(len(settles)),
                lease_epoch=self._lease.lease_epoch if self._lease else 0,
                active_version=self._active_version(),
            )
        except BrokerError:
            self._done = [*done, *self._done]  # settling is idempotent: hand in again
            raise
        for name in settles:
            self._running.pop(name, None)
        return outcome

    # ---- leases

    async def _follow_lease(self) -> None:
        """Give everything back when the lease is gone; turn to another run when it names one."""
        if self._is_held:
            await self._give_back()
            self._is_held, self._lease_until_s = False, None
            await self._engine.resume("lease")
        run_id = self._lease.run_id if self._lease else None
        if run_id == self._run_id:
            return
        await self._give_back()
        await self._stop_receiving()
        self._turns, self._run_id = None, None
        if run_id is None:
            return
        config = (await self._fabric.board.runs()).get(run_id)
        if config is None:
            return
        self._turns, self._run_id = self._fabric.turns(config), run_id
        self._receiver = self._make_receiver(run_id)
        self._receiver.start()

    async def _give_back(self) -> None:
        """Every running turn back to its queue, with its tokens: revoked, or leaving."""
        if self._turns is None or not self._running:
            return
        for generation in await self._engine.abort(list(self._running)):
            self._done.append(generation)
        finished = [each for each in self._done if each.finish_reason in ("stop", "length")]
        settles = [settle for each in finished if (settle := self._settle(each)) is not None]
        ended = {settle.claim.job.turn_id for settle in settles}
        made = {each.request_id: each for each in self._done if each.finish_reason == "abort"}
        back = [
            TurnProgress(claim=each.claim, log=self._log(each.claim, made.get(name)))
            for name, each in self._running.items()
            if name not in ended
        ]
        self._done, self._running = [], {}
        if settles:
            await self._turns.exchange(self._config.worker_id, settles=settles)
        await self._turns.release(self._config.worker_id, back)
        log.info("worker.gave_back", extra={"turn_count": len(back)})

    def _log(self, claim: TurnClaim, made: Generation | None) -> TokenLog | None:
        """What to save of a turn; None, of an engine that died and tells nothing: what was saved last is better."""
        return None if made is None else merge(claim.log, made, self._config.worker_id)

    async def _stop_receiving(self) -> None:
        if self._receiver is not None:
            await self._receiver.close()
        self._receiver = None

    async def _leave(self) -> None:
        try:
            await self._give_back()
            await self._stop_receiving()
            await self._fabric.board.forget_worker(self._config.worker_id)
        except FabricError as error:
            log.warning("worker.left_without_saying", extra={"error": str(error)})

    # ---- weights

    def _active_version(self) -> int:
        return self._receiver.version if self._receiver else -1

    def _trouble(self) -> str | None:
        """Why the engine cannot be brought to the head; while there is any, no turns are taken.

        A broker that is away is none: the live weights are good, and how old they may be is checked at every claim.
        """
        error = self._receiver.error if self._receiver else None
        return None if error is None or isinstance(error, BrokerError) else str(error)

    # ---- turns

    def _free_count(self, ended_count: int = 0) -> int:
        """Turns that may be asked for, once `ended_count` of those that count as running have been handed in."""
        if self._lease is None or self._is_lease_in_doubt or self._active_version() < 0 or self._trouble():
            return 0
        return max(0, self._lease.slot_count + ended_count - len(self._running))

    def _start(self, claims: list[TurnClaim]) -> None:
        now = self._clock.now_s()
        for claim in claims:
            saved_count = len(claim.log.completion_ids) if claim.log else 0
            self._running[claim.job.turn_id] = _Running(claim, now, saved_count)
        for claim in claims:
            job = claim.job
            prior_ids = claim.log.completion_ids if claim.log else NO_IDS
            request = GenerationRequest(
                request_id=job.turn_id, prompt_ids=job.prompt_ids, sampling=job.sampling, prior_ids=prior_ids
            )
            try:
                self._engine.generate(request)
            except EngineError as error:
                self._done.append(Generation(request_id=job.turn_id, finish_reason="error", error=str(error)))
                self._wake.set()

    def _check_engine(self) -> None:
        """Tell a request that failed from an engine that did: no turn may pay for the latter with an attempt.

        Raises:
            EngineError: the engine is gone.
        """
        if any(each.finish_reason == "error" for each in self._done):
            self._engine.stats()

    def _settle(self, generation: Generation) -> TurnSettle | None:
        """The handing in of a finished turn; None for one that is no longer ours."""
        running = self._running.get(generation.request_id)
        if running is None or generation.finish_reason == "abort":
            return None
        made = merge(running.claim.log, generation, self._config.worker_id)
        is_error = generation.finish_reason == "error"
        result = TurnResult(
            turn_id=generation.request_id,
            finish_reason=generation.finish_reason,
            spans=() if is_error else made.spans,
            completion_ids=NO_IDS if is_error else made.completion_ids,
            logprobs=NO_LOGPROBS if is_error else made.logprobs,
            resumed=running.claim.log is not None and len(running.claim.log.completion_ids) > 0,
            error=generation.error,
        )
        return TurnSettle(claim=running.claim, result=result)

    def _due(self, ended: Container[str]) -> list[TurnProgress]:
        """Turns whose claim should be renewed now, except those `ended`; with their tokens where there are new."""
        last_s = self._clock.now_s() - self._config.log_s
        due = {name: each for name, each in self._running.items() if each.renewed_at_s <= last_s and name not in ended}
        if not due:
            return []
        made = {each.request_id: each for each in self._engine.progress(list(due))}
        progress: list[TurnProgress] = []
        for name, each in due.items():
            each.renewed_at_s = last_s + self._config.log_s
            tokens = merge(each.claim.log, made.get(name), self._config.worker_id)
            is_new = len(tokens.completion_ids) > each.saved_count
            each.saved_count = len(tokens.completion_ids)
            progress.append(TurnProgress(claim=each.claim, log=tokens if is_new else None))
        return progress

    async def _drop(self, turn_ids: list[str]) -> None:
        """Stop turns whose claim is lost: cancelled, taken over, or asked for anew while the old one still ran.

        What they made goes too: a later claim of the same turn must never be settled with it.
        """
        lost = {name for name in turn_ids if self._running.pop(name, None) is not None}
        await self._engine.abort(list(lost))
        self._done = [each for each in self._done if each.request_id not in lost]
        log.info("worker.claims_lost", extra={"turn_count": len(lost)})

    # ---- what happens by itself

    async def _collect(self) -> None:
        while True:
            finished = await self._engine.finished(1.0)
            self._done += finished  # in two steps: the list may be another one after the wait
            if finished:
                self._wake.set()

    async def _listen(self) -> None:
        """Answer the doorbell while there is room; one ring, one exchange, so that other workers hear the next."""
        while True:
            await self._has_room.wait()
            self._has_room.clear()
            if self._turns is None:
                continue
            try:
                await self._turns.wait(1.0)
            except BrokerError:
                await self._clock.sleep(self._config.poll_s)
            self._wake.set()

    async def _beat(self) -> None:
        while True:
            self._is_beat_due.clear()
            try:
                asked_at_s = self._clock.now_s()
                self._take_lease(await self._fabric.board.heartbeat(self._info()), asked_at_s)
            except BrokerError as error:
                log.warning("worker.heartbeat_failed", extra={"error": str(error)})
            timer = asyncio.get_running_loop().call_later(self._config.heartbeat_s, self._is_beat_due.set)
            await self._is_beat_due.wait()
            timer.cancel()

    def _doubt_lease(self) -> None:
        """The broker has another lease or none: ask which, before giving back what may still be ours to run."""
        self._is_lease_in_doubt = True
        self._is_beat_due.set()

    def _take_lease(self, lease: Lease | None, asked_at_s: float) -> None:
        is_other = self._is_lease_in_doubt or (lease and (lease.run_id, lease.lease_epoch)) != (
            self._lease and (self._lease.run_id, self._lease.lease_epoch)
        )
        self._lease, self._is_lease_in_doubt = lease, False
        remaining_ms = lease.remaining_ms if lease else None
        self._lease_until_s = None if remaining_ms is None else asked_at_s + remaining_ms / 1000
        if is_other:
            self._wake.set()

    async def _watch(self) -> None:
        """Hold the engine the moment a lease runs out, even while the broker cannot be reached."""
        while True:
            is_over = self._lease_until_s is not None and self._clock.now_s() >= self._lease_until_s
            if is_over and not self._is_held:
                self._is_held = True
                self._lease = None
                await self._engine.pause("lease")
                self._wake.set()
                log.warning("worker.lease_ran_out", extra={"worker_id": self._config.worker_id})
            await self._clock.sleep(0.02)

    def _info(self) -> WorkerInfo:
        stats = self._engine.stats()
        trouble = self._trouble()
        state = "failed" if trouble else "ready" if self._active_version() >= 0 else "loading"
        return WorkerInfo(
            worker_id=self._config.worker_id,
            role=self._config.role,
            pid=os.getpid(),
            host=socket.gethostname(),
            model=self._config.model,
            slot_count=self._config.slot_count,
            running_count=len(self._running),
            run_id=self._run_id,
            active_version=self._active_version(),
            token_count=stats.token_count,
            headroom_fraction=self._headroom(),
            state=state,
            error=trouble,
        )


def _raise_finished(tasks: list[asyncio.Task[None]]) -> None:
    """Let a helper's error end the worker instead of leaving it half alive."""
    for task in tasks:
        if task.done():
            task.result()

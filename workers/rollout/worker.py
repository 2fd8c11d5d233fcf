"""The rollout worker: pulls turns under a lease and runs them on an engine. Dedicated and serving workers share it.

The loop, one verb a line, is `_turn_over`: follow the lease, give back turns that stand still, exchange with the broker
(hand in, renew, claim), start the claimed turns. Beside it run the lease (lease.py), the turns and the engine's health
(turns.py, engine_watch.py), a listener at the doorbell, and a receiver that stages new weights (weights.py).

- Without a lease the worker claims nothing. When a lease ends, running turns go back at once, with their tokens.
- After long without a lease, the engine sleeps or gives its KV memory back, if it can (engine_sleep.py); a lease wakes
  it before anything is fetched or claimed. The worker follows weights under a lease alone, so none arrive while it
  sleeps.
- A turn whose claim was lost is aborted; its tokens belong to the worker that holds the claim now.
- Tokens of long turns are saved every `log_s`, so a killed worker costs at most that much.
- Turns yield to a serving engine on the same device (yielding.py).
- A turn that makes no tokens here goes on elsewhere. An engine that does not answer holds up neither claims nor
  heartbeats; its tokens are read without its answer, or the tokens saved last count.
- Weights change between two engine steps, and the run decides what running turns do: they keep their KV cache, have it
  computed again, or finish first. In the last case no turn begins until they have ended; turns that take longer than
  `finish_s` go on elsewhere, with their tokens.
- If a run's turns may not mix versions, they finish, and the worker drops tokens of another version.
- A lease may come with guests: runs whose weights are the same, bit for bit. Their turns run beside those of the run
  whose weights the worker follows, and share its slots by weight. Before those weights change, turns of guests go back
  to their queue, with their tokens (guests.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError, FabricError, WireError
from ...fabric.contract.ids import new_process_id
from ...fabric.contract.records import RunConfig, WorkerInfo
from ...fabric.host.helpers import Helpers
from ...fabric.host.memory import HeldMemory
from ...fabric.ports.queue import Fabric
from ...fabric.rules.queue.engine_watch import StallRule
from ...fabric.rules.queue.retries import is_stale
from ...fabric.rules.queue.share import Sharer, more
from ...fabric.rules.queue.timings import Timings
from ...fabric.tracing.spans import Spans
from ..engines.base import Engine
from .config import RolloutConfig as RolloutConfig
from .engine_sleep import GivesBack, Readiness
from .guests import Guest
from .lease import LeaseKeeper, LeaseOptions
from .report import Guarded, WorkerReport
from .turns import RunningOptions, RunningTurns, ServedRun
from .weights import AtCommit, WeightReceiver
from .yielding import Yielding

log = logging.getLogger(__name__)


class RolloutWorker:
    """Runs turns of the runs that its lease names. keeper: its lease, and the terms of its serving team."""

    def __init__(
        self,
        fabric: Fabric,
        engine: Engine,
        config: RolloutConfig,
        clock: Clock,
        *,
        make_receiver: Callable[[str], WeightReceiver],
        guard: Guarded | None = None,
        memory: GivesBack | None = None,
        spans: Spans | None = None,
        held: HeldMemory | None = None,
    ) -> None:
        """Make a worker.

        Args:
            make_receiver: makes a receiver of a run's weights.
            guard: if the engine shares its device with a serving engine: how much it may do now.
            memory: in the same case: the engine's KV memory, which the serving engine can have while nothing is lent.
            spans: takes those of turns that are traced.
            held: the memory of its processes, which somebody follows; None: its own process alone is looked at.
        """
        self._fabric = fabric
        self._config = config
        self._clock = clock
        self._make_receiver = make_receiver
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_ended = asyncio.Event()
        rule = StallRule(stall_s=config.stall_s, first_token_s=config.first_token_s)
        running = RunningOptions(
            hardware=config.hardware,
            worker_id=config.worker_id,
            log_s=config.log_s,
            stall=rule,
            context_tokens_max=config.context_tokens_max,
        )
        self._timings = Timings(new_process_id(), spans)
        self._running = RunningTurns(engine, running, clock, wake=self._wake.set)
        self._yielding = Yielding(self._running, guard, clock)
        lease = LeaseOptions(worker_id=config.worker_id, heartbeat_s=config.heartbeat_s, retry_s=config.poll_s)
        self.keeper = self._keeper = LeaseKeeper(
            fabric.board, engine, lease, clock, tell=self._info, changed=self._wake.set, timings=self._timings
        )
        self._readiness = Readiness(
            engine, clock, sleep_after_s=config.sleep_after_s, memory=memory, changed=self._note_readiness
        )
        self._report = WorkerReport(engine, config, clock, readiness=self._readiness, guard=guard, held=held)
        self._first: ServedRun | None = None  # whose weights the worker follows
        self._guests: list[Guest] = []
        self._receiver: WeightReceiver | None = None
        self._is_engine_still = True  # see WeightReceiver
        self._may_begin = True
        self._guests_must_leave = False
        self._is_overdue = False  # turns that should finish have taken too long
        self._is_asking = False
        self._asks_from_s = 0.0

    def check_integrity(self) -> None:
        """Assert the invariants of its turns: see `RunningTurns`."""
        self._running.check_integrity()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then give everything back.

        Raises:
            EngineError: the engine died; its turns were given back.
        """
        keeper, running = self._keeper, self._running
        loops = [running.collect, running.look, self._listen, self._follow_run]
        loops += [keeper.beat, keeper.listen, keeper.watch]
        if self._yielding.has_guard:
            loops.append(lambda: self._yielding.follow(self._wake.set))
        try:
            async with Helpers(*(loop() for loop in loops)) as helpers:
                while not stop.is_set():
                    helpers.check()
                    try:
                        await self._turn_over()
                    except (BrokerError, WireError) as error:
                        log.warning("worker.broker_lost", extra={"error": str(error)})
                        await self._clock.sleep(self._config.poll_s)
        finally:
            await self._leave()

    async def _turn_over(self) -> None:
        """Make one round: hand in, renew, claim, start."""
        await self._wait()
        await self._follow_lease()
        if self._first is None:
            return
        await self._part_with_standing()
        await self._part_with_overdue()
        await self._part_with_yielding()
        await self._part_with_guests()
        for served in self._all_served():
            await self._running.hand_back(served)
        try:
            self._is_asking = True
            for served in sorted(self._all_served(), key=lambda each: each.served):  # who had least asks first
                await self._exchange(served)
        finally:
            self._is_asking = False
            self._has_ended.set()
        if self._free_count():
            self._has_room.set()
            if self._guests and any(map(self._may_take, self._all_served())):
                self._wake.set()  # others have no turns for the slots that were their part

    async def _wait(self) -> None:
        timer = asyncio.get_running_loop().call_later(self._config.poll_s, self._wake.set)
        await self._wake.wait()
        timer.cancel()
        self._wake.clear()

    def _all_served(self) -> list[ServedRun]:
        """List the runs whose turns we take; that whose weights we follow is in front."""
        return [] if self._first is None else [self._first, *(guest.served for guest in self._guests)]

    async def _exchange(self, served: ServedRun) -> None:
        """Exchange with the queue of one run; leave a guest out that has nothing here, and had no turn just now."""
        is_guest = served is not self._first
        if self._clock.now_s() - served.asked_at_s >= self._config.poll_s:
            served.note_work(self._all_served())
        if is_guest and not self._may_take(served) and not self._running.count_of(served.run_id):
            return
        lease = self._keeper.lease_of(served.run_id)
        has_lease = await self._running.exchange(
            served,
            partial(self._free_count, served),
            lease_epoch=lease.lease_epoch if lease else 0,
            active_version=self._version_of(served),
            weights_epoch=self._epoch_of(served),
            is_guest=is_guest,
        )
        if not has_lease:
            self._keeper.doubt()

    def _may_take(self, served: ServedRun) -> bool:
        """Tell whether a run may have turns that we could take."""
        return served.may_have_work and self._version_of(served) >= 0

    def _version_of(self, served: ServedRun) -> int:
        """Return the live weights' version, as this run counts; -1: none of its versions has these weights."""
        receiver = self._receiver
        if receiver is None or served is self._first:
            return self._active_version()
        sums = receiver.live_sums
        guest = next(guest for guest in self._guests if guest.served is served)
        return -1 if sums is None or self._guests_must_leave else guest.version_of(sums)

    def _epoch_of(self, served: ServedRun) -> int:
        """Return the epoch of the publisher that made that version the run's head; 0: not known."""
        if served is self._first:
            return self._receiver.moved_by if self._receiver is not None else 0
        return next(guest.moved_by for guest in self._guests if guest.served is served)

    # ---- leases

    async def _follow_lease(self) -> None:
        """Give everything back if the lease is gone; turn to another run if it names one; follow its guests."""
        if self._keeper.has_run_out:
            await self._give_back()
            await self._keeper.let_go()
        lease, is_awake = self._keeper.lease, self._is_awake()
        run_id = lease.run_id if lease and is_awake else None
        if run_id != (self._first.run_id if self._first else None):
            await self._go_to(run_id)
        if self._first is not None:
            await self._follow_guests([guest.run_id for guest in lease.guests] if lease else [])

    async def _go_to(self, run_id: str | None) -> None:
        """Follow the weights of another run, and take its turns; None: of none."""
        await self._give_back()
        await self._follow_guests([])
        await self._stop_receiving()
        if self._first is not None:
            self._first.end()
        self._first = None
        config = (await self._fabric.board.runs()).get(run_id) if run_id else None
        if config is None:
            return
        self._first = self._served(config)
        self._receiver = self._make_receiver(config.run_id)
        self._receiver.timings = self._first.timings
        self._running.begin_run(config.run_id)
        self._receiver.gate = self._committing
        self._receiver.at_commit = _at_commit(config)
        self._receiver.is_engine_still = self._is_engine_still
        self._receiver.start()

    def _served(self, config: RunConfig) -> ServedRun:
        return ServedRun(run=config, queue=self._fabric.turns(config), timings=self._timings.of(config.run_id))

    async def _follow_guests(self, run_ids: Sequence[str]) -> None:
        """Take the turns of these runs, too, and give back those of others."""
        for guest in [each for each in self._guests if each.served.run_id not in run_ids]:
            self._mute()
            await self._running.give_back(guest.served)
            await guest.close()
            self._guests.remove(guest)
        known = [each.run_id for each in self._all_served()]
        missing = [run_id for run_id in run_ids if run_id not in known]
        if missing and self._receiver is not None:
            configs = await self._fabric.board.runs()
            for run_id in missing:
                if run_id in configs:
                    guest = Guest(self._served(configs[run_id]), self._receiver.store, self._clock, self._wake.set)
                    self._guests.append(guest)
                    guest.start()

    def _is_awake(self) -> bool:
        """Begin to wake the engine or put it to sleep, if that is due; return whether it may be used now."""
        watch = self._running.watch
        is_in_use = self._first is not None or bool(self._running) or watch.is_owing or watch.is_hung
        self._readiness.follow(has_lease=self._keeper.lease is not None, is_in_use=is_in_use)
        return self._readiness.is_awake

    def _note_readiness(self) -> None:
        self._running.watch.is_asleep = not self._readiness.is_awake
        self._wake.set()

    # ---- turns that go on elsewhere

    async def _give_back(self) -> None:
        """Give every running turn back to its queue, with its tokens: the lease is revoked, or we leave."""
        if not self._running:
            return
        self._mute()
        for served in self._all_served():
            await self._running.give_back(served)

    async def _part_with_standing(self) -> None:
        """Release turns that stand still, so that another worker can run them."""
        names, is_stalled = self._running.standing()
        if not names:
            return
        is_stalled = is_stalled and (self._running.watch.is_hung or not self._yielding.is_narrowed)
        self._mute()
        await self._running.take_out(names, is_stalled=is_stalled)
        self._asks_from_s = self._clock.now_s() + self._config.poll_s  # others first, or it would stall here again

    async def _part_with_overdue(self) -> None:
        """Release turns that have not finished in time, so that new weights need not wait for them."""
        if self._is_overdue and self._running:
            self._mute()
            await self._running.take_out()

    async def _part_with_yielding(self) -> None:
        """Release turns that must yield to a serving engine, or that exceed its team's cap on slots."""
        names, terms = self._yielding.due(), self._keeper.terms
        if terms is not None and terms.slot_count_max is not None:
            running = [size.request_id for size in self._running.sizes()]
            names += [name for name in running[terms.slot_count_max :] if name not in names]
        if names:
            self._mute()
            await self._running.take_out(names)

    async def _part_with_guests(self) -> None:
        """Release turns of guests before the weights change: the new ones are none of theirs."""
        names = self._running.inside_of([guest.served.run_id for guest in self._guests])
        if self._guests_must_leave and names:
            self._mute()
            await self._running.take_out(names)
            self._has_ended.set()

    def _mute(self) -> None:
        """Stop listening at the doorbells: the ring for turns that we give back is for others."""
        self._has_room.clear()
        for served in self._all_served():
            if served.ring is not None:
                served.ring.cancel()

    async def _stop_receiving(self) -> None:
        if self._receiver is not None:
            await self._receiver.close()
            self._is_engine_still = self._receiver.is_engine_still
        self._receiver = None

    async def _leave(self) -> None:
        await self._readiness.close()
        forget = partial(self._fabric.board.forget_worker, self._config.worker_id)
        see_off = partial(self._follow_guests, [])
        for step in (self._give_back, see_off, self._stop_receiving, self._tell_timings, forget):
            try:
                await step()
            except FabricError as error:
                log.warning("worker.left_without_saying", extra={"error": str(error)})
        self._running.watch.close()

    async def _tell_timings(self) -> None:
        await self._fabric.board.add_timings(self._info(), self._timings)

    # ---- weights

    def _active_version(self) -> int:
        return self._receiver.version if self._receiver else -1

    def _trouble(self) -> str | None:
        """Say why the worker is of no use now: its engine does not wake, or hangs, or may hold bad weights.

        Weights that are only too old are no such trouble: the worker keeps its lease, and with it the weights that the
        next version builds on.
        """
        receiver = self._receiver
        is_sound = receiver is None or receiver.is_sound
        return self._readiness.error or self._running.watch.trouble or (None if is_sound else self._behind())

    def _behind(self) -> str | None:
        """Say why the engine is not at the head. A broker that is away is no reason: nobody knows a newer head then."""
        receiver = self._receiver
        if receiver is None or receiver.error is None or isinstance(receiver.error, BrokerError):
            return None
        live = f"version {receiver.version} stays live, the head is {receiver.head_version}: "
        return f"{live if receiver.is_sound else ''}{receiver.error}"

    def _is_stale(self) -> bool:
        """Tell whether newer weights fail to come, and the live ones are too old for turns of the run."""
        receiver, first = self._receiver, self._first
        if receiver is None or first is None or self._behind() is None:
            return False
        return is_stale(receiver.version, receiver.head_version, first.run.staleness)

    @asynccontextmanager
    async def _committing(self) -> AsyncIterator[None]:
        """Wrap the writing of weights: expect no steps meanwhile; if turns must finish, wait for them, begin none.

        Turns of guests leave first, in any case.
        """
        self._may_begin = self._first is None or not self._first.run.turns_finish
        self._guests_must_leave = True
        self._wake.set()
        timer = asyncio.get_running_loop().call_later(self._config.finish_s, self._note_overdue)
        try:
            while self._must_wait():
                self._has_ended.clear()
                await self._has_ended.wait()
            await self._until_open()
            self._running.watch.is_excused = True
            yield
        finally:
            timer.cancel()
            self._may_begin, self._is_overdue, self._running.watch.is_excused = True, False, False
            self._guests_must_leave = False
            self._wake.set()

    def _must_wait(self) -> bool:
        """Tell whether turns are here, or on their way, that new weights must not meet."""
        if not self._may_begin:
            return bool(self._running) or self._is_asking
        guests = [guest.served.run_id for guest in self._guests]
        return bool(guests) and (self._is_asking or bool(self._running.inside_of(guests)))

    async def _until_open(self) -> None:
        """Wait for the guard to open, at most commit_wait_s: writing weights delays serving like a long step."""
        until_s = self._clock.now_s() + self._config.commit_wait_s
        while self._yielding.is_shut and self._clock.now_s() < until_s:
            await self._clock.sleep(0.05)

    def _note_overdue(self) -> None:
        if not self._may_begin:
            log.warning("worker.turns_overdue", extra={"turn_count": len(self._running)})
            self._is_overdue = True
            self._wake.set()

    def _free_count(self, served: ServedRun | None = None, ended_count: int = 0) -> int:
        """Count the turns that may be claimed, once `ended_count` of those that count as running are handed in.

        served: for this run, beside others; None: for all together.
        """
        is_barred = not self._may_begin or self._active_version() < 0 or self._trouble() is not None
        if is_barred or self._clock.now_s() < self._asks_from_s:
            return 0
        if self._is_stale() if served in (None, self._first) else self._version_of(served) < 0:
            return 0
        running_count = len(self._running) - ended_count
        slot_count = self._keeper.slot_count
        free = max(0, slot_count - running_count)
        if self._guests:
            free = self._part_of(served, slot_count)
        bounds = (
            self._running.watch.may_take(running_count),
            self._yielding.may_take(),
            self._running.cache_room(slot_count) if free else 0,
        )
        return min([free, *(bound for bound in bounds if bound is not None)])

    def _part_of(self, served: ServedRun | None, slot_count: int) -> int:
        """Count the slots that a run may take beside others: by weight, as agents share their places. None: all free.

        Turns that have ended take none, though the broker has yet to hear of them.
        """
        held = self._running.counts()
        if served is None:
            return max(0, slot_count - held.total())
        sharers = [
            Sharer(
                run_id=each.run_id,
                weight=each.run.weight,
                held=held[each.run_id],
                may_have_work=each is served or self._may_take(each),
                served=each.served,
            )
            for each in self._all_served()
        ]
        return more(slot_count, sharers, served.run_id)

    # ---- loops beside the rounds

    async def _follow_run(self) -> None:
        """Take in changed settings of the runs, for claims and commits from then on; give no turn back."""
        while True:
            await self._clock.sleep(self._config.runs_s)
            try:
                runs = await self._fabric.board.runs() if self._first else {}
            except FabricError as error:
                log.warning("worker.settings_not_read", extra={"error": str(error)})
                continue
            for served in self._all_served():
                served.run = runs.get(served.run_id, served.run)
            if self._first is not None and self._receiver is not None:
                self._receiver.at_commit = _at_commit(self._first.run)

    async def _listen(self) -> None:
        """Answer the doorbells while there is room: one exchange for each ring, so that other workers hear the next."""
        while True:
            await self._has_room.wait()
            self._has_room.clear()
            waiting = self._all_served()
            if not waiting:
                continue
            for served in waiting:
                if served.ring is None:
                    served.ring = asyncio.create_task(served.queue.wait(self._config.worker_id, 1.0))
            try:
                rings = [served.ring for served in waiting if served.ring is not None]
                await asyncio.wait(rings, return_when=asyncio.FIRST_COMPLETED)
                for served in waiting:
                    self._hear(served)
            except (BrokerError, WireError):
                await self._clock.sleep(self._config.poll_s)
            except asyncio.CancelledError:
                for served in waiting:
                    served.end()
                raise
            self._wake.set()

    def _hear(self, served: ServedRun) -> None:
        """Take note of a ring. Raises BrokerError, WireError: the doorbell could not be watched."""
        ring = served.ring
        if ring is None or not ring.done():
            return
        served.ring = None
        served.note_work(self._all_served())
        if not ring.cancelled():
            ring.result()

    def _info(self) -> WorkerInfo:
        return self._report.info(
            run_id=self._first.run_id if self._first else None,
            active_version=self._active_version(),
            guests={guest.served.run_id: self._version_of(guest.served) for guest in self._guests},
            running_count=self._running.unfinished_count,
            trouble=self._trouble(),
            behind=self._behind(),
            is_stale=self._is_stale(),
            receiver=self._receiver,
            speeds=self._running.speeds(),
        )


def _at_commit(run: RunConfig) -> AtCommit:
    """Choose what becomes of KV caches at a commit. If turns finish first, only the choice of prefixes is left."""
    is_keeping = run.turns_at_commit == "keep" or (run.turns_finish and run.may_reuse_prefix)
    return AtCommit(turns="keep" if is_keeping else "recompute", may_reuse_prefix=run.may_reuse_prefix)

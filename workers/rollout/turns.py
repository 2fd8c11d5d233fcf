"""The turns under our claims, between the engine that runs them and the broker that keeps them.

- A turn stays here until the broker has taken it: handed in, given back, or lost. If the broker was away, the next
  round repeats whatever it has not heard.
- We read the tokens of a turn that must leave before we ask the engine to abort it, so that they are not lost if the
  engine does not answer.
- A worker may serve several runs of the same weights at once: then a turn has its run's queue, its run's settings, and
  the name that its run has for these weights. worker.py knows the leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace

from ...fabric.contract import sides
from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import EngineError, EngineUnsupported
from ...fabric.contract.ids import trajectory_of
from ...fabric.contract.limits import TURN_SIDES_BYTES_MAX
from ...fabric.contract.records import NO_IDS, NO_LOGPROBS, RunConfig, Span, TokenLog, TurnResult
from ...fabric.ports.queue import TurnClaim, TurnProgress, TurnQueue, TurnSettle
from ...fabric.rules.queue.engine_watch import WAITING_FRACTION, Line, Pulse, StallRule, feel, is_stalled
from ...fabric.rules.queue.placement import DecodeSpeed, PrefillSpeed
from ...fabric.rules.queue.retries import is_suspect
from ...fabric.rules.queue.room import Holding, KvRoom
from ...fabric.rules.queue.runs import cache_salt
from ...fabric.rules.queue.timings import RunTimings
from ...fabric.rules.queue.token_parts import NOTHING_SAVED, Saved, followed, joined, next_save
from ...fabric.tracing.spans import Spans, place_of
from ..engines.base import Engine, Generation, GenerationRequest
from .engine_watch import LOOK_S, EngineWatch

log = logging.getLogger(__name__)

WHOLE = ("stop", "length")  # finish reasons of a complete turn
FAILED = ("error", "refused")  # finish reasons of a turn without tokens
ENDED = (*WHOLE, *FAILED)  # finish reasons of a turn that we hand in


@dataclass(frozen=True, kw_only=True)
class RunningOptions:
    """Options of the running turns.

    log_s: time between two renewals of a turn's claim. stall: how long a turn may make no token. context_tokens_max:
    tokens at which the engine cuts every turn; None: not known.
    """

    worker_id: str
    hardware: str = ""
    log_s: float
    stall: StallRule
    context_tokens_max: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ServedRun:
    """A run whose turns a worker takes. run: its settings as they are now. timings: where what they take is noted.

    may_have_work: whether the broker may have turns of it for us, as far as we know: see `note_claims`. served: turns
    that it was given, divided by its weight. asked_at_s: when it was last asked for turns. ring: waits at its doorbell.
    coming_back: to look again.
    """

    run: RunConfig
    queue: TurnQueue
    timings: RunTimings
    may_have_work: bool = False
    served: float = 0.0
    asked_at_s: float = -math.inf
    ring: asyncio.Task[None] | None = None
    coming_back: asyncio.TimerHandle | None = None

    @property
    def run_id(self) -> str:
        return self.run.run_id

    def note_work(self, others: Iterable[ServedRun]) -> None:
        """Note that there may be work for it; what it did not want meanwhile is no debt of the others to it."""
        if not self.may_have_work:
            least = min((each.served for each in others if each.may_have_work), default=0.0)
            self.may_have_work, self.served = True, max(self.served, least)

    def end(self) -> None:
        """Look and listen no more."""
        for each in (self.ring, self.coming_back):
            if each is not None:
                each.cancel()

    def note_claims(self, want: int, count: int, now_s: float) -> None:
        """Note how many turns came when `want` were asked for: fewer means that there are no more now."""
        if want > 0:
            self.may_have_work, self.asked_at_s = count >= want, now_s
            self.served += count / self.run.weight


class RunningTurns:
    """All turns of one worker, by request id."""

    def __init__(self, engine: Engine, options: RunningOptions, clock: Clock, *, wake: Callable[[], None]) -> None:
        """wake: called when there is news for the broker."""
        self.watch = EngineWatch(engine, options.stall, clock)
        self._kv_room, self._run_id = KvRoom(), ""
        self._capacity: int | None = None  # of the engine's KV cache, in tokens
        self._prefill, self._decode = PrefillSpeed(), DecodeSpeed()
        self._engine = engine
        self._options = options
        self._clock = clock
        self._wake = wake
        self._turns: dict[str, RunningTurn] = {}
        self._done: list[Generation] = []
        self._stalled: list[str] = []  # as of the last renewals
        self._line, self._begun_count = Line(), 0
        self._out_count = 0  # turns taken out, and not yet given back

    def __len__(self) -> int:
        return len(self._turns)

    def begin_run(self, run_id: str) -> None:
        """Follow this run's weights from now on; what was learned of another's turns says nothing of its own."""
        if run_id != self._run_id:
            self._kv_room, self._run_id = KvRoom(), run_id

    def count_of(self, run_id: str) -> int:
        """Count the turns of a run that are here."""
        return sum(turn.run_id == run_id for turn in self._turns.values())

    def speeds(self) -> tuple[int, int]:
        """Return the microseconds that a token costs here to read, and to make in a slot; 0: not known."""
        return self._prefill.us_per_token if self._prefill.is_known else 0, self._decode.us_per_made

    @property
    def unfinished_count(self) -> int:
        """How many turns the engine must still step for."""
        return len(self._unfinished())

    def counts(self) -> Counter[str]:
        """Count the turns that the engine must still step for, by run."""
        return Counter(self._turns[name].run_id for name in self._unfinished())

    def inside_of(self, runs: Container[str]) -> list[str]:
        """List the request ids of these runs' turns that were not taken out."""
        return [name for name in self._inside() if self._turns[name].run_id in runs]

    def check_integrity(self) -> None:
        """Assert the invariants that hold between calls."""
        turns = self._turns.values()
        assert list(self._turns) == [turn.request_id for turn in turns]
        assert len({(turn.run_id, turn.claim.job.turn_id) for turn in turns}) == len(turns), "two claims of one turn"
        assert self._out_count == sum(turn.back is not None for turn in turns)
        assert not any(turn.is_stalled and turn.back is None for turn in turns)

    def sizes(self) -> list[TurnSize]:
        """Return the sizes of the turns that the engine still runs, in the order in which they were begun."""
        return [self._turns[name].size(self._options.context_tokens_max) for name in self._unfinished()]

    def room(self, kv_tokens_max: int) -> int:
        """Count the turns that may begin beside those that run, which are to hold so many tokens together."""
        sizes = self.sizes()
        count = self._kv_room.count([size.holding(1.0) for size in sizes], kv_tokens_max)
        if count is None:  # of what size they are is not known: one is tried
            return int(kv_tokens_max > sum(size.context_tokens for size in sizes))
        return count

    def cache_room(self, slot_count: int) -> int | None:
        """Count the turns that the engine's KV cache has room for beside those that run; None: for all, or not known.

        Turns that share prefixes hold less than each by itself: we look at what those that run hold together.

        Raises:
            EngineError: the engine is gone.
        """
        if self._capacity is None:  # it never changes
            self._capacity = self._engine.stats().kv_capacity_tokens
        capacity, most = self._capacity, self._options.context_tokens_max
        if not capacity or (most is not None and slot_count * most <= capacity):
            return None
        sizes = self.sizes()
        begun = sum(size.context_tokens for size in sizes if size.is_begun)
        fraction = min(1.0, self._engine.stats().kv_used_fraction * capacity / begun) if begun else 1.0
        count = self._kv_room.count([size.holding(fraction) for size in sizes], capacity, held_fraction=fraction)
        return count if sizes or count is None else max(1, count)

    # ---- exchange with the broker

    async def exchange(
        self,
        served: ServedRun,
        free: Callable[[int], int],
        *,
        lease_epoch: int,
        active_version: int,
        weights_epoch: int,
        is_guest: bool = False,
    ) -> bool:
        """Make one round trip: hand in the turns that have ended, renew those that run, claim ready ones; begin these.

        Args:
            served: the run whose turns these are.
            free: returns how many turns may be claimed, given how many are handed in now: the same round trip claims
                turns for the slots that this frees.
            active_version: of the live weights, by the name that this run has for them.
            weights_epoch: of the publisher that made that version the run's head.
            is_guest: the engine names these weights as another run does.

        Returns:
            Whether the broker knows our lease.

        Raises:
            EngineError: the engine is gone.
        """
        if any(each.finish_reason == "error" for each in self._done):
            self._engine.stats()  # raises if the engine failed, not the request: then no turn pays with an attempt
        run = served.run
        settles = self._settles(run.run_id)
        progress = self._renewals(settles, run.run_id)
        want = free(len(settles))
        outcome = await served.queue.exchange(
            self._options.worker_id,
            settles=list(settles.values()),
            progress=progress,
            want=want,
            lease_epoch=lease_epoch,
            active_version=active_version,
            weights_epoch=weights_epoch,
            takes_suspect=not any(is_suspect(turn.claim.loss) for turn in self._turns.values()),
            us_per_token=self._prefill.us_per_token if run.prefix_affinity else 0,
            hardware=self._options.hardware,
        )
        served.note_claims(want, len(outcome.claims), self._clock.now_s())
        self._come_back(served, outcome.next_ms)
        for row in progress:
            turn = self._turns.get(request_id_of(run.run_id, row.claim))
            if turn is not None and row.log is not None and turn.back is None:
                turn.note_saved(row.claim.job.turn_id in outcome.saved)
        self._forget(name for name, row in settles.items() if row.claim.job.turn_id not in outcome.unsettled)
        await self._drop({*outcome.lost, *(claim.job.turn_id for claim in outcome.claims)}, run.run_id)
        claims = outcome.claims
        if not run.may_mix_versions:
            claims = [_of_version(each, active_version) for each in claims]
        self._start(claims, served, active_version if is_guest else None)
        return outcome.has_lease

    def _come_back(self, served: ServedRun, after_ms: int | None) -> None:
        """Look again when a turn of the run that waits for its home may be taken here; None: there is none."""
        if served.coming_back is not None:
            served.coming_back.cancel()
        loop = asyncio.get_running_loop()
        served.coming_back = None if after_ms is None else loop.call_later(after_ms / 1000, self._ask_again, served)

    def _ask_again(self, served: ServedRun) -> None:
        served.asked_at_s = -math.inf
        self._wake()

    async def give_back(self, served: ServedRun) -> None:
        """Give every turn of a run back to its queue, with its tokens; hand in those that have ended by themselves."""
        await self.take_out(self.inside_of((served.run_id,)))
        settles = self._settles(served.run_id)
        if settles:
            await served.queue.exchange(self._options.worker_id, settles=list(settles.values()))
            self._forget(settles)
        await self.hand_back(served)

    async def hand_back(self, served: ServedRun) -> None:
        """Give back the turns of a run that were taken out. If the broker is away now, the next call repeats it."""
        for blames in (False, True) if self._out_count else ():
            turns = [(name, each) for name, each in self._turns.items() if each.run_id == served.run_id]
            back = {name: each.back for name, each in turns if each.back is not None and each.is_stalled == blames}
            if back:
                await served.queue.release(self._options.worker_id, list(back.values()), is_stalled=blames)
                self._forget(back)
                log.info("worker.gave_back", extra={"turn_count": len(back), "is_stalled": blames})

    def _start(self, claims: Iterable[TurnClaim], served: ServedRun, version: int | None) -> None:
        """Begin turns of a run that were claimed just now. version: see `RunningTurn`."""
        now = self._clock.now_s()
        for claim in claims:
            if claim.log is not None and not self._engine.cannot_resume.isdisjoint(claim.job.sampling.row()):
                claim = _begun_anew(claim)
            self._begun_count += 1
            number, timings = self._begun_count, served.timings
            turn = RunningTurn.begin(
                claim,
                self._options.worker_id,
                now,
                number=number,
                run_id=served.run_id,
                timings=timings,
                version=version,
            )
            if claim.waited_s is not None and not claim.is_handed_over:
                timings.note("turn_queue", claim.waited_s, trajectory_of(claim.job.turn_id))
            self._turns[turn.request_id] = turn
            size = turn.size(self._options.context_tokens_max)
            self._kv_room.note_begun(size.context_tokens, size.reserve_tokens - size.context_tokens)
            try:
                self._engine.generate(turn.request(cache_salt(served.run, claim.job.turn_id)))
            except EngineError as error:
                reason = "refused" if isinstance(error, EngineUnsupported) else "error"
                self._done.append(Generation(request_id=turn.request_id, finish_reason=reason, error=str(error)))
                self._wake()

    def _settles(self, run_id: str) -> dict[str, TurnSettle]:
        """Make the settles of a run's turns that have ended, by request id; leave out those that are no longer ours."""
        found = {}
        for each in self._done:
            turn = self._turns.get(each.request_id)
            is_ours = turn is not None and turn.run_id == run_id and turn.back is None
            if turn is not None and is_ours and each.finish_reason in ENDED:
                found[each.request_id] = turn.settle(each)
        return found

    def _renewals(self, ended: Container[str], run_id: str) -> list[TurnProgress]:
        """Make a run's renewals that are due, except for turns `ended`; add a turn's tokens if there are new ones."""
        now, log_s = self._clock.now_s(), self._options.log_s
        turns = [(name, each) for name, each in self._turns.items() if each.run_id == run_id]
        due = {name: each for name, each in turns if each.renewed_at_s <= now - log_s and name not in ended}
        if not due:
            return []
        made = {each.request_id: each for each in self._engine.progress(list(due))}
        for name, each in due.items():
            if name in made and len(made[name].completion_ids) != each.pulse.count:
                self._line.note(each.number, now)
        some_wait = self._engine.stats().waiting_count > 0
        self._stalled += [
            name for name, each in due.items() if self._has_stalled(each, made.get(name), now, some_wait=some_wait)
        ]
        if self._stalled:
            self._wake()
        return [each.renewal(made.get(name), now) for name, each in due.items()]

    def _has_stalled(self, turn: RunningTurn, made: Generation | None, now_s: float, *, some_wait: bool) -> bool:
        """Look at a turn; tell whether it has been silent for too long, and not because it waits in line.

        some_wait: the engine has turns that it does not run now.
        """
        before, gap_s_max = turn.pulse, 2 * self._options.log_s
        is_passed = self._line.passed_at_s(turn.number) > before.looked_at_s
        waits = not is_passed and (not before.count or some_wait)
        fraction = WAITING_FRACTION if waits else 1.0
        turn.look(made, now_s, gap_s_max=gap_s_max, is_excused=self.watch.is_held, fraction=fraction)
        context = turn.size(self._options.context_tokens_max).context_tokens
        return is_stalled(turn.pulse, self._options.stall, context)

    def _forget(self, names: Iterable[str]) -> None:
        """Drop these turns: the broker knows that they are no longer ours."""
        for name in names:
            turn = self._turns.pop(name, None)
            self._out_count -= turn is not None and turn.back is not None
        self._done = [each for each in self._done if each.request_id in self._turns]

    # ---- turns that end before their time

    async def _drop(self, turn_ids: Container[str], run_id: str) -> None:
        """Stop a run's turns whose claim is lost: cancelled, taken over, or asked for anew while the old one still ran.

        Drop their tokens too: a later claim of the same turn must never be settled with them.
        """
        turns = self._turns.items()
        lost = [name for name, each in turns if each.run_id == run_id and each.claim.job.turn_id in turn_ids]
        if not lost:
            return
        self._forget(lost)
        log.info("worker.claims_lost", extra={"turn_count": len(lost)})
        await self.watch.abort(lost)

    def standing(self) -> tuple[list[str], bool]:
        """List the turns that should go on elsewhere, and say whether that is because they stalled.

        List all if the engine hangs or is held for long; else those that make no tokens although others do.
        """
        if self.watch.is_hung and not self.watch.may_take(0):
            return self._inside(), True
        if self.watch.is_held_long:
            return self._inside(), False
        stalled, self._stalled = self._stalled, []
        return [name for name in stalled if name in self._turns and self._turns[name].back is None], True

    async def take_out(self, names: Iterable[str] | None = None, *, is_stalled: bool = False) -> None:
        """End turns (None: all) in the engine; those that had not ended by themselves must then be given back."""
        wanted = set(self._turns if names is None else names)
        inside = [name for name in self._inside() if name in wanted]
        if not inside:
            return
        made: dict[str, Generation] = {}
        with contextlib.suppress(EngineError):  # it died, and tells nothing: the tokens saved last count
            made = {each.request_id: each for each in self._engine.progress(inside)}
        made |= {each.request_id: each for each in await self.watch.abort(inside)}
        self._done += [each for each in made.values() if each.finish_reason in ENDED]
        whole = {each.request_id for each in self._done if each.finish_reason in WHOLE}
        for name in inside:
            if name in self._turns and name not in whole:
                self._turns[name].take_out(made.get(name), is_stalled=is_stalled)
                self._trace(self._turns[name], made.get(name), "given_back")
                self._out_count += 1

    def _inside(self) -> list[str]:
        return [name for name, each in self._turns.items() if each.back is None]

    def _unfinished(self) -> list[str]:
        """List the turns that the engine must still step for, without ended ones that wait for the broker."""
        ended = {each.request_id for each in self._done}
        return [name for name in self._inside() if name not in ended]

    # ---- loops beside the exchange

    async def collect(self) -> None:
        """Take the turns that have ended from the engine; for ever."""
        while True:
            finished = await self._engine.finished(1.0)
            self._done += finished  # in two steps: the list may be another one after the wait
            for each in finished:
                self._note(each)
            if finished:
                self._wake()

    def _note(self, ended: Generation) -> None:
        """Note how long a turn's tokens took, where the engine tells of the first."""
        turn, first_s = self._turns.get(ended.request_id), ended.first_token_s
        if turn is not None and turn.back is None and ended.finish_reason in ENDED:
            self._trace(turn, ended, ended.finish_reason)
        if turn is None or ended.finish_reason not in WHOLE:
            return
        self._line.note(turn.number, self._clock.now_s())
        name, count = trajectory_of(turn.claim.job.turn_id), len(ended.completion_ids)
        self._kv_room.note_ended(turn.read_count - len(turn.claim.job.prompt_ids) + count)
        if first_s is None:
            return
        turn.timings.note("ttft", first_s, name)
        self._prefill.note(max(0, turn.read_count - ended.cached_token_count), first_s)
        if turn.claim.is_handed_over and turn.claim.waited_s is not None:
            turn.timings.note("handover", turn.claim.waited_s + first_s, name)
        if count > 1:
            decode_s = self._clock.now_s() - turn.begun_s - first_s
            self._decode.note(count - 1, decode_s)
            turn.timings.note("tpot", decode_s / (count - 1), name)

    def _trace(self, turn: RunningTurn, made: Generation | None, outcome: str) -> None:
        """Add the spans of a claim that ends now."""
        if not turn.claim.job.traceparent:
            return
        times = {"begun_s": turn.begun_s, "now_s": self._clock.now_s()}
        trace_claim(turn.timings.spans, turn.claim, turn.worker_id, made, **times, outcome=outcome)

    async def look(self) -> None:
        """Watch the engine; for ever. Raises EngineError: it is gone."""
        while True:
            await self._clock.sleep(LOOK_S)
            inside_count = len(self._inside())
            self.watch.look(len(self._unfinished()))
            if inside_count and (self.watch.is_hung or self.watch.is_held_long):
                self._wake()


# ---------------------------------------------------------------- turn
#
# One turn on our engine: its claim, the tokens it has made, and how it is handed on.
#
# - For the engine every claim is a request of its own (`request_id`): tokens that an earlier claim of the same turn
#   still makes can never be taken for this one's.
# - `back` is set once the turn was taken out of the engine before its end; from then on only the broker must learn of
#   it.


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSize:
    """How much KV cache a turn needs, in tokens.

    context_tokens: its prompt and all tokens made. reserve_tokens: the most that it may come to hold. token_count: made
    in all its claims; is_begun: some of them were seen in this claim.
    """

    request_id: str
    context_tokens: int
    reserve_tokens: int
    token_count: int
    is_begun: bool

    def holding(self, held_fraction: float) -> Holding:
        """Say it as the rule of room wants it. held_fraction: see `KvRoom.count`."""
        left = max(0, self.reserve_tokens - self.context_tokens)
        return Holding(self.context_tokens * held_fraction, self.token_count, left)


@dataclass(slots=True, kw_only=True)
class RunningTurn:
    """A claim of a turn, begun at `begun_s`. number: in the order in which the worker began them. renewed_at_s: when
    the broker last heard of it. saved_count: tokens that were sent to be saved. saved: what the broker has of them,
    to_be_saved: once it has taken what it was sent last. timings: of its run. version: of the weights that make its
    tokens, by its run's name for them; None: by the engine's."""

    claim: TurnClaim
    number: int
    worker_id: str
    begun_s: float
    renewed_at_s: float
    pulse: Pulse
    run_id: str = ""
    timings: RunTimings = field(default_factory=RunTimings)
    version: int | None = None
    saved_count: int = 0
    saved: Saved = NOTHING_SAVED
    to_be_saved: Saved = NOTHING_SAVED
    back: TurnProgress | None = None
    is_stalled: bool = False

    @classmethod
    def begin(
        cls,
        claim: TurnClaim,
        worker_id: str,
        now_s: float,
        *,
        number: int,
        run_id: str = "",
        timings: RunTimings | None = None,
        version: int | None = None,
    ) -> RunningTurn:
        """Make the record of a turn that was claimed just now."""
        saved_count = len(claim.log.completion_ids) if claim.log else 0
        pulse = Pulse(0, now_s)
        return cls(
            claim=claim,
            number=number,
            worker_id=worker_id,
            begun_s=now_s,
            renewed_at_s=now_s,
            pulse=pulse,
            saved_count=saved_count,
            run_id=run_id,
            timings=timings or RunTimings(),
            version=version,
        )

    @property
    def request_id(self) -> str:
        """The claim's name in the engine."""
        return request_id_of(self.run_id, self.claim)

    @property
    def read_count(self) -> int:
        """Tokens that the engine goes on from: the prompt's, and those of earlier claims."""
        prior = self.claim.log
        return len(self.claim.job.prompt_ids) + (len(prior.completion_ids) if prior else 0)

    def request(self, salt: str) -> GenerationRequest:
        """Make the engine's request, which goes on from the tokens of earlier claims. salt: of its prefixes."""
        job, prior = self.claim.job, self.claim.log
        return GenerationRequest(
            request_id=self.request_id,
            prompt_ids=job.prompt_ids,
            sampling=job.sampling,
            prior_ids=prior.completion_ids if prior else NO_IDS,
            cache_salt=salt,
            images=self.claim.images,
        )

    def size(self, context_tokens_max: int | None) -> TurnSize:
        """Compute the size as of the last look. context_tokens_max: where the engine cuts turns; None: not known."""
        job, prior = self.claim.job, self.claim.log
        count = self.pulse.count + (len(prior.completion_ids) if prior else 0)
        reserve = len(job.prompt_ids) + job.sampling.max_tokens
        return TurnSize(
            request_id=self.request_id,
            context_tokens=len(job.prompt_ids) + count,
            reserve_tokens=reserve if context_tokens_max is None else min(reserve, context_tokens_max),
            token_count=count,
            is_begun=self.pulse.count > 0,
        )

    def look(
        self, made: Generation | None, now_s: float, *, gap_s_max: float, is_excused: bool, fraction: float
    ) -> None:
        """Note whether tokens have come since the last look. The rest: see `feel`."""
        count = self.pulse.count if made is None else len(made.completion_ids)
        self.pulse = feel(self.pulse, count, now_s, gap_s_max=gap_s_max, is_excused=is_excused, fraction=fraction)

    def renewal(self, made: Generation | None, now_s: float) -> TurnProgress:
        """Make the renewal of the claim; add the tokens if there are new ones."""
        self.renewed_at_s = now_s
        if self.back is not None:
            return self.back
        tokens = merge(self.claim.log, made, self.worker_id, self.version)
        count = len(tokens.completion_ids)
        if count <= self.saved_count or _excess(tokens) is not None:
            return TurnProgress(claim=self.claim)
        self.saved_count = count
        save = next_save(tokens, self.saved, f"{self.claim.fence}.{count}")
        before, self.to_be_saved = self.saved, save.saved
        return TurnProgress(
            claim=self.claim,
            log=save.log,
            place=save.place,
            saved_before=before.text,
            saved_then=save.saved.text,
        )

    def note_saved(self, is_saved: bool) -> None:
        """Note whether the broker has kept what it was sent: then the next save goes on behind it, else it is whole."""
        self.saved = self.to_be_saved if is_saved else NOTHING_SAVED
        self.saved_count = self.saved_count if is_saved else 0

    def settle(self, generation: Generation) -> TurnSettle:
        """Make the settle with the tokens of all its claims."""
        prior = self.claim.log
        made = merge(prior, generation, self.worker_id, self.version)
        if generation.finish_reason in WHOLE and (excess := _excess(made)) is not None:
            generation = replace(generation, finish_reason="refused", error=excess)
        is_error = generation.finish_reason in FAILED
        result = TurnResult(
            turn_id=self.claim.job.turn_id,
            finish_reason=generation.finish_reason,
            spans=() if is_error else made.spans,
            completion_ids=NO_IDS if is_error else made.completion_ids,
            logprobs=NO_LOGPROBS if is_error else made.logprobs,
            resumed=prior is not None and len(prior.completion_ids) > 0,
            error=generation.error,
            context_digest=self.claim.job.context_digest,
            sides=() if is_error else made.sides,
        )
        return TurnSettle(claim=self.claim, result=result)

    def take_out(self, made: Generation | None, *, is_stalled: bool) -> None:
        """Note that the turn goes on elsewhere from the tokens made here; made None: from those saved last."""
        log = None if made is None else merge(self.claim.log, made, self.worker_id, self.version)
        log = None if log is not None and _excess(log) is not None else log
        self.back, self.is_stalled = TurnProgress(claim=self.claim, log=log), is_stalled


def request_id_of(run_id: str, claim: TurnClaim) -> str:
    """Return a claim's name in the engine: runs may have turns of the same name."""
    return f"{claim.job.turn_id}#{claim.fence}@{run_id}"


def _excess(log: TokenLog) -> str | None:
    """Return why a turn cannot be recorded with all that was noted beside its tokens; None: it can."""
    count = sides.size_bytes(log.sides)
    if count <= TURN_SIDES_BYTES_MAX:
        return None
    names = ", ".join(sorted({side.name for side in log.sides}))
    return (
        f"what it records beside its tokens ({names}) takes {count:,} bytes, the limit of a turn is"
        f" {TURN_SIDES_BYTES_MAX:,}: ask for less of it, or let max_tokens be smaller"
    )


def _of_version(claim: TurnClaim, version: int) -> TurnClaim:
    """Return the claim; drop its tokens if they are of another version than ours, with which they may not mix."""
    if claim.log is None or all(span.policy_version == version for span in claim.log.spans):
        return claim
    return _begun_anew(claim)


def _begun_anew(claim: TurnClaim) -> TurnClaim:
    """Return the claim without its tokens: the result's spans then name this worker alone."""
    count = len(claim.log.completion_ids) if claim.log else 0
    log.info("worker.log_dropped", extra={"job_id": claim.job.turn_id, "token_count": count})
    return replace(claim, log=None)


# ---------------------------------------------------------------- spans
#
# Puts a turn's tokens together from the claims that made them.


EMPTY = TokenLog()


def merge(prior: TokenLog | None, made: Generation | None, worker_id: str, version: int | None = None) -> TokenLog:
    """Join the tokens of earlier claims with those made now; spans name each token's worker and policy version.

    version: of all that was made now, by the name of its run; None: as the engine names it.
    """
    before = prior or EMPTY
    if made is None or not len(made.completion_ids):
        return before
    rows = ((start, end, named if version is None else version) for start, end, named in made.versions)
    spans = tuple(joined(Span(start, end, worker_id, named) for start, end, named in rows))
    log = TokenLog(spans=spans, completion_ids=made.completion_ids, logprobs=made.logprobs, sides=made.sides)
    return followed(before, log) if len(before.completion_ids) else log  # almost always: nothing to put before it


def trace_claim(
    spans: Spans,
    claim: TurnClaim,
    worker_id: str,
    made: Generation | None,
    *,
    begun_s: float,
    now_s: float,
    outcome: str,
) -> None:
    """Add the spans of a claim that ends now, if its turn is traced: its wait, its prefill, its decoding.

    made: what it made; None: not known. outcome: stop, length, error, refused, or given_back: it goes on elsewhere.
    """
    parent = place_of(claim.job.traceparent) if spans.is_on else None
    if parent is None:
        return
    place = parent.child(worker_id, claim.fence)
    if claim.waited_s is not None:
        waiting, is_again = place.child("queue"), claim.is_handed_over
        spans.add("turn_queue", waiting, parent, begun_s - claim.waited_s, begun_s, is_handed_over=is_again)
    prior, count = 0 if claim.log is None else len(claim.log.completion_ids), 0
    first_s = begun_s
    if made is not None:
        count = len(made.completion_ids)
        if made.first_token_s is not None:
            first_s = min(now_s, begun_s + made.first_token_s)
            tokens = len(claim.job.prompt_ids) + prior
            spans.add("prefill", place.child("prefill"), parent, begun_s, first_s, input_tokens=tokens)
    spans.add(
        "decode",
        place.child("decode"),
        parent,
        first_s,
        now_s,
        outcome=outcome,
        generated_tokens=count,
        prior_tokens=prior,
        error=outcome if outcome in ("error", "refused") else "",
    )

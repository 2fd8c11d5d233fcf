"""Groups on their way between a trainer and its run: submitted, received, and acknowledged when they are used.

`Ledger` remembers the groups that this client has pushed, holds and has acknowledged, because the broker may forget,
and other consumers may take over. A replica that takes over, or a disk that lost power, may lack the last moments of
writes that were answered with "done". Pushes and acknowledgements carry group ids, so repeating them changes nothing
if nothing was lost:

- While no group comes, what was pushed here and is not there any more is pushed again, every PUSH_AGAIN_S.
- A group that was acknowledged here and comes again is acknowledged again, and not handed out.
- An acknowledgement that did not reach the broker is sent again before anything else is received.

This process keeps its groups in hand as long as it lives: every few seconds it gives a sign of life. A process that is
silent for `takeover_s` loses its groups to other consumers, and learns so when it acknowledges one.

Memories are bounded, and end with the process: a trainer that starts again repeats its own pushes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from ..fabric.contract.errors import BrokerError, ClaimLost, FabricError, InputError, QueueFull
from ..fabric.contract.ids import new_trace_id
from ..fabric.contract.records import Group, RunConfig
from ..fabric.contract.text import one_line
from ..fabric.host.command import command
from ..fabric.host.forks import Home
from ..fabric.ports.queue import Delivery, GroupPush, RolloutStream
from ..fabric.rules.filters import Keep, Refill
from ..fabric.rules.queue.push import never_fits
from ..fabric.tracing.spans import Place, Spans, place_of
from .checks import make_groups
from .waiting import Waiting

log = logging.getLogger(__name__)

PUSH_RETRY_S = 0.1
ANSWER_S = 2.0  # longest wait for the answer to a cancelled push, to say which groups it took in
LATE_S = 0.25  # after its time: a wait that ends so late was frozen, and what came meanwhile is still to be read
POLL_S = 1.0  # an interrupt is noticed, and a lost answer repaired, between polls
PUSH_AGAIN_S = 15.0
PUSH_COUNT = 64  # groups a call
GROUP_COUNT_MAX = 20_000
REASON_LENGTH_MAX = 300  # of a failure, in a warning
TAKEOVER_S = 60.0
BEAT_S_MAX = 5.0
BEATS_MIN = 4  # signs of life that would have to be lost before others take over


class Submission:
    """A submit: its groups, and its progress, which it reports when it is refused or interrupted.

    check: asked before the first write; raises what refuses it all.
    """

    def __init__(self) -> None:
        self.check: Callable[[], Awaitable[None]] | None = None
        self.group_ids: list[str] = []
        self._groups: list[GroupPush] = []
        self._taken: dict[str, None] = {}
        self._doubtful: dict[str, None] = {}

    def begin(self, groups: list[GroupPush]) -> None:
        """Note the groups to push."""
        self._groups = groups
        self.group_ids = [group.group_id for group in groups]

    async def push(self, ledger: Ledger, config: RunConfig, waiting: Waiting, timeout_s: float) -> list[str]:
        """Push all groups; return their ids. Raises as `AsyncRun.submit` says."""
        try:
            await ledger.go_on()
            self._groups = ledger.trace(self._groups)
            self._check_sizes(config)
            if self.check is not None:
                await self.check()
            deadline_s = asyncio.get_running_loop().time() + timeout_s
            for start in range(0, len(self._groups), PUSH_COUNT):
                await self._push(ledger, self._groups[start : start + PUSH_COUNT], deadline_s, waiting)
        except FabricError as error:
            raise self.explain(error) from error
        except BaseException as error:
            self.note_on(error)
            raise
        return self.group_ids

    def _check_sizes(self, config: RunConfig) -> None:
        """Refuse, before the first write, groups that would never fit."""
        limit = config.trajectory_count_max // config.shard_count
        largest = max((len(group.jobs) for group in self._groups), default=0)
        if largest > limit:
            raise never_fits(config.run_id, limit, largest)

    async def _push(self, ledger: Ledger, groups: list[GroupPush], deadline_s: float, waiting: Waiting) -> None:
        refused_at_s: float | None = None
        while True:
            try:
                return await self._push_once(ledger, groups)
            except QueueFull as error:
                is_hopeless = error.facts.get("need", 0) > error.facts["limit"]
                now_s = asyncio.get_running_loop().time()
                if is_hopeless or now_s >= deadline_s:
                    raise
                refused_at_s = refused_at_s or now_s
                waiting.tell_refusal(now_s - refused_at_s, error)
                await asyncio.sleep(PUSH_RETRY_S)

    async def _push_once(self, ledger: Ledger, groups: list[GroupPush]) -> None:
        """Push, and note the groups taken in. If cancelled, wait for the push under way: its answer names them."""
        names = [group.group_id for group in groups]
        push = asyncio.ensure_future(ledger.push(groups))
        try:
            await asyncio.shield(push)
            self.note_taken(names)
        except FabricError as error:
            self.note_error(error, names)
            raise
        except asyncio.CancelledError:
            self.note_doubtful(names)
            await asyncio.wait((push,), timeout=ANSWER_S)
            if not push.done():
                push.cancel()
            elif (found := push.exception()) is None:
                self.note_taken(names)
            elif isinstance(found, FabricError):
                self.note_sure(found)
            raise

    def note_taken(self, group_ids: Sequence[str]) -> None:
        """Note that these groups are in."""
        for name in group_ids:
            self._taken[name] = None
            self._doubtful.pop(name, None)

    def note_doubtful(self, group_ids: Sequence[str]) -> None:
        """Note that these groups may be in."""
        self._doubtful.update(dict.fromkeys(name for name in group_ids if name not in self._taken))

    def note_error(self, error: FabricError, group_ids: Sequence[str]) -> None:
        """Note the error of a push of these groups; if it does not name the groups taken in, all are in doubt."""
        self.note_doubtful(group_ids)
        self.note_sure(error)

    def note_sure(self, error: FabricError) -> None:
        """Note the groups whose fate the error of a push states."""
        self.note_taken(error.facts.get("taken", ()))
        for name in error.facts.get("refused", ()):
            self._doubtful.pop(name, None)

    def sentence(self, *, may_repeat: bool = True) -> str:
        """Tell people which groups are in, and what to do. may_repeat: whether the same submit could go through."""
        count, total = len(self._taken), len(self.group_ids)
        if not count and not self._doubtful:
            return "nothing of this submit was taken in"
        doubt = f", {len(self._doubtful)} more may have been" if self._doubtful else ""
        advice = (
            "" if count == total or not may_repeat else ": repeat it with the same group_ids, what is in stays as it is"
        )
        return f"{count} of {total} groups of this submit were taken in{doubt}{advice}"

    def note_on(self, error: BaseException) -> None:
        """Add this sentence to the exception that interrupted the submit."""
        if self.sentence() not in getattr(error, "__notes__", ()):
            error.add_note(self.sentence())

    def explain(self, error: FabricError) -> FabricError:
        """Make the error of a refused submit. Facts: group_ids, all of them; taken, doubtful and refused."""
        refused = [name for name in self.group_ids if name not in self._taken and name not in self._doubtful]
        facts = {
            "group_ids": list(self.group_ids),
            "taken": list(self._taken),
            "doubtful": list(self._doubtful),
            "refused": refused,
        }
        said = self.sentence(may_repeat=not isinstance(error, InputError))
        return type(error)(f"{error.message}; {said}", **{**error.facts, **facts})


class Ledger:
    """A run's rollout stream, with a memory. open_ledgers: the ledgers that hold something, so that they get closed.

    spans: takes those of its groups.
    """

    def __init__(
        self,
        rollouts: RolloutStream,
        *,
        run_id: str = "",
        open_ledgers: set[Ledger] | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._spans = spans or Spans()
        self._received_s: dict[tuple[int, str], float] = {}  # of groups in hand that are traced
        self._rollouts = rollouts
        self._run_id = run_id
        self._open_ledgers = set[Ledger]() if open_ledgers is None else open_ledgers
        self._open: dict[str, GroupPush] = {}
        self._used: dict[str, None] = {}
        self._unsaid: dict[tuple[int, str], Delivery] = {}  # used, while the broker could not be told
        self._in_hand: dict[tuple[int, str], str] = {}  # entry → the consumer that it was received by
        self._in_use: Delivery | None = None  # the group that a plain `for` loop works on
        self._lost: set[tuple[int, str]] = set()  # groups that others have taken over, with a warning given
        self._takeover_s: dict[str, float] = {}  # by consumer
        self._beat_at_s: dict[str, float] = {}
        self._warned_names: set[str] = set()
        self.failed_group_count = 0  # received, with nothing but failures
        self._quiet_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def push(self, groups: Sequence[GroupPush]) -> None:
        """Push groups. Raises FabricError, like RolloutStream.push."""
        taken: set[str] = set()
        begun_s = asyncio.get_running_loop().time()
        try:
            await self._rollouts.push(groups)
            taken = {group.group_id for group in groups}
        except FabricError as error:
            taken = set(error.facts.get("taken", ()))
            raise
        finally:
            taken_in = [group for group in groups if group.group_id in taken]
            self._note_pushed(taken_in)
            self._trace_pushed(taken_in, begun_s)

    def trace(self, groups: list[GroupPush]) -> list[GroupPush]:
        """Begin a trace of each group that is to be traced: its jobs carry it, also if they are pushed again."""
        return [_traced(each, root) if (root := self._spans.root()) is not None else each for each in groups]

    def _trace_pushed(self, groups: Sequence[GroupPush], begun_s: float) -> None:
        """Add the span of each group that was taken in."""
        for group in groups if self._spans.is_on else ():
            place = place_of(group.jobs[0].traceparent) if group.jobs else None
            facts: dict[str, Any] = {"run_id": self._run_id, "group_id": group.group_id, "group_size": len(group.jobs)}
            self._spans.add("submit", place, None, begun_s, asyncio.get_running_loop().time(), **facts)

    def _trace_used(self, key: tuple[int, str], delivery: Delivery) -> None:
        """Add the span of a group from its arrival to its acknowledgement: a trace of its own, with links to its
        trajectories'."""
        begun_s, group = self._received_s.pop(key, None), delivery.group
        places = [place for each in group.rollouts if (place := place_of(each.traceparent)) is not None]
        if begun_s is None or not places:
            return
        trace_id = new_trace_id()
        self._spans.add(
            "consume",
            Place(trace_id, trace_id[:16]),
            None,
            begun_s,
            asyncio.get_running_loop().time(),
            links=places,
            run_id=self._run_id,
            group_id=group.group_id,
            group_size=len(group.rollouts),
            ended_by=group.ended_by,
            is_redelivered=group.redelivered,
        )

    async def receive(self, consumer: str, timeout_s: float, *, takeover_s: float = TAKEOVER_S) -> Delivery | None:
        """Return the next complete group that was not used before; None if none came in time."""
        await self._say_again()
        self._takeover_s[consumer] = takeover_s
        await self._beat(consumer)
        found = await self._rollouts.receive(consumer, 1, timeout_s)
        if not found:
            await self._rollouts.reap()
            await self._push_again()
            return None
        self._quiet_since_s = None
        (delivery,) = found
        self._open.pop(delivery.group.group_id, None)
        self._hold(delivery, consumer)
        if delivery.group.group_id in self._used:
            await self.acknowledge(delivery)
            return None
        self._note_failed(delivery.group)
        if self._spans.is_on:
            self._received_s[delivery.shard, delivery.entry_id] = asyncio.get_running_loop().time()
        return delivery

    async def acknowledge(self, delivery: Delivery) -> bool:
        """Acknowledge a used group. If others took it over meanwhile this does not count: warn, and return False."""
        key = (delivery.shard, delivery.entry_id)
        self._note_used(delivery.group.group_id)
        is_repeated = key in self._unsaid
        self._unsaid[key] = delivery  # until the broker has answered
        lost: ClaimLost | None = None
        try:
            is_counted = await self._rollouts.acknowledge(delivery)
        except ClaimLost as error:
            is_counted, lost = False, error
        self._unsaid.pop(key, None)  # another task may have sent it at the same time and removed it
        if not is_counted and not is_repeated:
            await self._tell_lost(key, lost)
        self._let_go(delivery)
        return lost is None

    async def swap(self, delivery: Delivery, push: GroupPush) -> bool:
        """Acknowledge a group that is not wanted and push another in its place, at once; return whether that is in.

        If others took it over meanwhile they replace it: warn, and return False. Raises FabricError, like
        RolloutStream.swap.
        """
        begun_s = asyncio.get_running_loop().time()
        try:
            is_in = await self._rollouts.swap(delivery, push)
        except ClaimLost as error:
            await self._tell_lost((delivery.shard, delivery.entry_id), error)
            is_in = False
        else:
            self._note_used(delivery.group.group_id)
        if is_in:
            self._note_pushed([push])
            self._trace_pushed([push], begun_s)
        self._let_go(delivery)
        return is_in

    def _note_used(self, group_id: str) -> None:
        self._used[group_id] = None
        _bound(self._used)

    def _note_pushed(self, groups: Sequence[GroupPush]) -> None:
        self._open.update((group.group_id, group) for group in groups)
        _bound(self._open)

    def _let_go(self, delivery: Delivery) -> None:
        """Forget a group in hand that has ended."""
        key = (delivery.shard, delivery.entry_id)
        self._in_hand.pop(key, None)
        self._lost.discard(key)
        if self._spans.is_on:
            self._trace_used(key, delivery)

    async def _tell_lost(self, key: tuple[int, str], error: ClaimLost | None) -> None:
        """Warn that an acknowledgement does not count, unless this process cancelled the group or warned before."""
        if key in self._in_hand:
            with contextlib.suppress(BrokerError):
                await self._beat(self._in_hand[key], is_due=True)  # tells whether others took over
        if error is not None and key not in self._lost:
            log.warning("%s", error.message, extra={"run_id": self._run_id})

    def put_back(self, delivery: Delivery) -> None:
        """Give up a group that was not used after all; keep it if it was used and the broker does not know yet."""
        key = (delivery.shard, delivery.entry_id)
        if key not in self._unsaid:
            self._in_hand.pop(key, None)
            self._lost.discard(key)
            self._received_s.pop(key, None)
            self._rollouts.put_back(delivery)

    def use(self, delivery: Delivery) -> None:
        """Note that a plain `for` loop works on a group, until it goes on."""
        assert self._in_use is None
        self._in_use = delivery

    def leave(self, delivery: Delivery) -> None:
        """Forget that a plain `for` loop works on a group: it never got it."""
        if self._in_use is delivery:
            self._in_use = None

    async def go_on(self) -> None:
        """Acknowledge the loop's group: the loop went on, so it is done with it."""
        delivery, self._in_use = self._in_use, None
        if delivery is not None:
            await self.acknowledge(delivery)

    async def cancel(self, group_id: str) -> bool:
        self._open.pop(group_id, None)
        return await self._rollouts.cancel(group_id)

    def close(self) -> None:
        """Give no more signs of life."""
        for each in (self._timer, self._task):
            if each is not None:
                each.cancel()
        self._open_ledgers.discard(self)

    async def _say_again(self) -> None:
        for delivery in list(self._unsaid.values()):
            await self.acknowledge(delivery)

    async def _push_again(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if now_s - self._quiet_since_s < PUSH_AGAIN_S:
            return
        self._quiet_since_s = now_s
        names = list(self._open)
        for start in range(0, len(names), PUSH_COUNT):
            part = names[start : start + PUSH_COUNT]
            known = await self._rollouts.known(part)  # first: all tasks together may be large
            gone = [name for name, is_known in zip(part, known, strict=True) if not is_known]
            try:
                if lost := [self._open[name] for name in gone if name in self._open]:
                    await self._rollouts.push(lost)
            except QueueFull:
                return  # the groups there must be consumed first; the next round asks again

    def _note_failed(self, group: Group) -> None:
        """Warn of the first group that has nothing but failures, and of the tenth, hundredth, …; count the others."""
        if group.rollouts or not group.failures:
            return
        self.failed_group_count += 1
        if math.log10(self.failed_group_count) % 1 == 0:
            log.warning(
                "run %r: every trajectory of group %r failed (the %s such group received here), the first because: %s. "
                "See `%s`",
                self._run_id,
                group.group_id,
                "first" if self.failed_group_count == 1 else f"{self.failed_group_count}th",
                one_line(group.failures[0].reason)[:REASON_LENGTH_MAX],
                command(f"dead ls --run {self._run_id}"),
                extra={"run_id": self._run_id, "failed_group_count": self.failed_group_count},
            )

    # ---- signs of life

    def _hold(self, delivery: Delivery, consumer: str) -> None:
        self._in_hand[delivery.shard, delivery.entry_id] = consumer
        if self._timer is None:
            self._open_ledgers.add(self)
            self._set_timer()

    def _set_timer(self) -> None:
        """Set a timer, as asyncio would warn of a sleeping task when a program ends without closing its connection."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(map(self._pause_s, self._in_hand.values())), self._start)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        """Give a sign of life, and set the next one while groups are in hand."""
        try:
            for consumer in sorted(set(self._in_hand.values())):
                await self._beat(consumer)
            await self._say_again()
        except FabricError as error:
            log.warning("run %r: no sign of life could be given: %s", self._run_id, error.message)
        if self._in_hand:
            self._set_timer()
        else:
            self._timer = None
            self._open_ledgers.discard(self)

    def _pause_s(self, consumer: str) -> float:
        return min(BEAT_S_MAX, self._takeover_s[consumer] / BEATS_MIN)

    async def _beat(self, consumer: str, *, is_due: bool = False) -> None:
        """Give a sign of life if it is due; warn of groups taken over, and once of another consumer of this name."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._beat_at_s.get(consumer, 0.0) and not is_due:
            return
        beat = await self._rollouts.beat(consumer, self._takeover_s[consumer])
        self._beat_at_s[consumer] = now_s + 0.9 * self._pause_s(consumer)  # else every second pause would bring none
        lost = [key for key, name in self._in_hand.items() if name == consumer and key not in self._lost]
        if beat.was_lost and lost:
            self._lost.update(lost)
            log.warning(
                'run %r: %d groups in the hands of this process, consumer "%s", were taken over by another consumer, '
                "and its acknowledgements of them do not count: this process gave no sign of life for %g s, or another "
                "one started under its name. Give groups(takeover=…) more seconds or keep the event loop free while it "
                "trains; give every process a consumer=… of its own",
                self._run_id,
                len(lost),
                consumer,
                self._takeover_s[consumer],
                extra={"run_id": self._run_id},
            )
        if beat.namesakes and consumer not in self._warned_names:
            self._warned_names.add(consumer)
            log.warning(
                'run %r: another live process (%s) consumes as "%s", too: the newer one takes over the groups in the '
                "older one's hands, and they are used twice. Give every process a name of its own: groups(consumer=…)",
                self._run_id,
                ", ".join(beat.namesakes),
                consumer,
                extra={"run_id": self._run_id},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A loop's wishes: which groups it wants, and how long it waits for each."""

    timeout: float | None
    consumer: str
    count: int | None
    keep: Keep
    takeover: float = TAKEOVER_S


class Groups:
    """Completed groups of a run, in either of two ways. `ended_why` says why the iteration ended.

    `async for group in run.groups()`: each is acknowledged once the program goes on, that is with the next group or
    the next call on the run. A body that raises and ends the process leaves its group to be delivered again.

    `async with run.groups(count=16) as groups`: one transaction. All groups received inside are acknowledged
    when the block ends without an exception; otherwise all of them come again, marked `redelivered`.
    """

    def __init__(self, ledger: Ledger, view: View, refill: Refill | None = None, *, waiting: Waiting) -> None:
        self._home = Home()
        self._waiting = waiting
        self._ledger = ledger
        self._view = view
        self._refill = refill
        self._left = view.count
        self._held: list[Delivery] | None = None
        self._latest: Delivery | None = None  # what `__anext__` returned last
        self.given_count = 0  # groups that it returned
        self.dropped_count = 0
        self.ended_why = ""

    def __aiter__(self) -> Groups:
        return self

    async def __anext__(self) -> Group:
        self._home.check()
        await self._ledger.go_on()
        if self._left == 0:
            self.ended_why = f"all {self._view.count} groups came"
            raise StopAsyncIteration
        delivery = await self.receive()
        if delivery is None:
            raise StopAsyncIteration
        if self._left is not None:
            self._left -= 1
        if self._held is None:
            self._ledger.use(delivery)
        else:
            self._held.append(delivery)
        self._latest = delivery
        self.given_count += 1
        return delivery.group

    async def put_back_latest(self) -> None:
        """Give up the group that `__anext__` returned last, as it never reached who asked; it comes again."""
        delivery, self._latest = self._latest, None
        if delivery is None:
            return
        if self._left is not None:
            self._left += 1
        if self._held is None:
            self._ledger.leave(delivery)
        else:
            self._held.remove(delivery)
        self._ledger.put_back(delivery)

    async def receive(self) -> Delivery | None:
        """Wait for a group that is wanted, which nobody acknowledges but the caller; None: `ended_why`."""
        loop = asyncio.get_running_loop()
        timeout_s = math.inf if self._view.timeout is None else self._view.timeout
        begun_s, held_count = loop.time(), len(self._held or ())
        while True:
            asked_s = loop.time()
            waited_s = asked_s - begun_s
            left_s = min(POLL_S, timeout_s - waited_s, self._waiting.look_in_s(waited_s))
            found = await self._ledger.receive(self._view.consumer, max(left_s, 0.001), takeover_s=self._view.takeover)
            if found is not None:
                self._waiting.forget()
                if self._is_wanted(found):
                    return found
                await self._drop(found)
                begun_s = loop.time()
                continue
            waited_s = loop.time() - begun_s
            if waited_s >= timeout_s and loop.time() < asked_s + max(left_s, 0.0) + LATE_S:
                self.ended_why = await self._waiting.why(waited_s, timeout_s, held_count)
                return None
            if not self._waiting.look_in_s(waited_s):
                await self._waiting.tell(waited_s, held_count)

    def _is_wanted(self, delivery: Delivery) -> bool:
        try:
            return self._view.keep(delivery.group)
        except BaseException:
            self._ledger.put_back(delivery)
            raise

    async def _drop(self, delivery: Delivery) -> None:
        """Acknowledge an unwanted group; the next task takes its place, if there is one."""
        try:
            refill = self._refill
            push = None if refill is None else self._replacement(delivery.group, refill)
            if refill is None or push is None:
                await self._ledger.acknowledge(delivery)
            else:
                refill.note(push.group_id, is_used=await self._ledger.swap(delivery, push))
        except BaseException:
            self._ledger.put_back(delivery)
            raise
        self.dropped_count += 1

    def _replacement(self, group: Group, refill: Refill) -> GroupPush | None:
        name = refill.name_of(group.group_id)
        with self._waiting.for_refill():
            task = refill.task_for(name)
        if task is None:
            return None
        size = len(group.rollouts) + len(group.failures) + len(group.cancelled)
        (push,) = self._ledger.trace(make_groups([task], size, [name]))
        return push

    async def __aenter__(self) -> Groups:
        self._home.check()
        await self._ledger.go_on()
        self._held = []
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held or [], None
        if error is None:
            answers = await asyncio.gather(*map(self._ledger.acknowledge, held), return_exceptions=True)
            for answer in answers:  # all have ended, so none still runs when the caller goes on
                if isinstance(answer, BaseException):
                    raise answer
        else:
            for delivery in held:
                self._ledger.put_back(delivery)


def _traced(group: GroupPush, root: Place) -> GroupPush:
    jobs = (replace(job, traceparent=root.traceparent) for job in group.jobs)
    return replace(group, jobs=tuple(jobs))


def _bound(memory: dict[str, GroupPush] | dict[str, None]) -> None:
    """Forget the oldest groups above GROUP_COUNT_MAX."""
    while len(memory) > GROUP_COUNT_MAX:
        del memory[next(iter(memory))]

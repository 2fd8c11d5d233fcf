"""Watches an engine: whether it steps, whether it answers, and how many turns it may be given.

- Nobody waits for an engine longer than ANSWER_S. Answers that it owes stay on a list; the engine counts as hung if the
  list is not empty, and no answer has come for as long as the stall timeout.
- How long a step may take is learned: SPARE times the longest of late, at least `stall_s`, at most `first_token_s`.
  A step that reads many long prompts takes seconds, and an engine that came back by itself had not hung.
- A hung engine gets no turns until it steps again. If it owes no answer, but has no turn left to step for, it is tried
  with one turn at a time, ever more rarely, until a step proves it well.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import EngineError
from ...fabric.rules.queue.engine_watch import Pulse, StallRule, feel, is_stalled
from ..engines.base import Engine, Generation

log = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks; an engine's counters cost microseconds
GAP_S_MAX = 0.5  # most time that counts if a look came late
ANSWER_S = 0.5  # claims that were renewed 0.5 s ago must still be ours after waiting this long
SPARE = 3.0  # times the longest step of late, before an engine counts as hung
LATE_S = 60.0  # time constant in which a long step is forgotten
TRIAL_S_MAX = 60.0  # longest time between two trials of an engine that did not step


@dataclass(slots=True)
class _Hang:
    """An engine's hang. since_s: its last sign of life. step_count: its steps until then."""

    since_s: float
    step_count: int
    trial_count: int
    trial_at_s: float


class EngineWatch:
    """Looks at one engine, and asks it for answers that may never come.

    Attributes:
        is_excused: the engine is busy with other work than steps (writing weights) and need make none.
        is_asleep: the engine sleeps, falls asleep or wakes: it need make no step, and does not count as held either.
        is_shut: the guard lets the engine make no step, whether or not the engine says so itself.
    """

    def __init__(self, engine: Engine, rule: StallRule, clock: Clock) -> None:
        now = clock.now_s()
        self.is_excused = False
        self.is_asleep = False
        self.is_shut = False
        self._engine = engine
        self._rule = rule
        self._clock = clock
        self._step = Pulse(0, now)
        self._longest_s, self._learned_at_s = 0.0, now  # step of late
        self._held = Pulse(0, now)
        self._answer = Pulse(0, now)
        self._answer_count = 0
        self._owed: set[asyncio.Future[list[Generation]]] = set()
        self._is_paused = False
        self._hang: _Hang | None = None

    def look(self, running_count: int) -> None:
        """Take one look. Raises EngineError: the engine is gone."""
        now, stats = self._clock.now_s(), self._engine.stats()
        self._is_paused = bool(stats.paused_by)
        is_held, is_owing = self.is_held, self.is_owing
        is_stepping = running_count > 0 and not is_held and not self.is_asleep
        is_held_from_steps = is_held and not self.is_asleep
        self._held = feel(self._held, 0, now, gap_s_max=GAP_S_MAX, is_excused=not is_held_from_steps)
        before = self._step
        self._step = feel(before, stats.step_count, now, gap_s_max=GAP_S_MAX, is_excused=not is_stepping)
        self._learn(before, now)
        is_excused = is_held or not is_owing
        self._answer = feel(self._answer, self._answer_count, now, gap_s_max=GAP_S_MAX, is_excused=is_excused)
        if self._hang and stats.step_count != self._hang.step_count and not is_owing:
            log.info("engine.steps_again", extra={"hung_s": now - self._hang.since_s})
            self._hang = None
        if is_stalled(self._step, self._step_rule):
            self._note_hang(self._step.quiet_s)
        elif self._hang is None and self._answer.quiet_s >= self._step_rule.stall_s:  # it answers between two steps
            self._note_hang(self._answer.quiet_s)

    def _learn(self, before: Pulse, now_s: float) -> None:
        """Note how long the step took that has ended since the look before, if one has."""
        if self._step.count == before.count or not before.count:  # an engine's first step is no step like others
            return
        took_s = before.quiet_s if self._hang is None else now_s - self._hang.since_s
        kept = math.exp((self._learned_at_s - now_s) / LATE_S)
        self._longest_s, self._learned_at_s = max(took_s, self._longest_s * kept), now_s

    @property
    def _step_rule(self) -> StallRule:
        rule = self._rule
        longest_s = min(SPARE * self._longest_s, rule.first_token_s)
        return replace(rule, stall_s=max(rule.stall_s, longest_s))

    def _note_hang(self, quiet_s: float) -> None:
        now, before = self._clock.now_s(), self._hang
        trial_count = before.trial_count + 1 if before else 0
        wait_s = min(self._rule.stall_s * 2**trial_count, TRIAL_S_MAX)
        since_s = before.since_s if before else now - quiet_s
        self._hang = _Hang(since_s, self._step.count, trial_count, now + wait_s)
        self._step = Pulse(self._step.count, now)
        log.warning("engine.hangs", extra={"error": self._text(self._hang), "trial_count": trial_count})

    @property
    def is_held(self) -> bool:
        """True if the engine makes no steps on purpose; pauses count as of the last look."""
        return self._is_paused or self.is_excused or self.is_shut

    @property
    def is_held_long(self) -> bool:
        """True if the engine has been held for so long that its turns should go on elsewhere."""
        return self._held.quiet_s >= self._rule.stall_s

    @property
    def is_owing(self) -> bool:
        """True if the engine has not yet answered a request."""
        return bool(self._owed)

    @property
    def is_hung(self) -> bool:
        """True if the engine makes no step, or gives no answer, though it should."""
        return self._hang is not None

    @property
    def trouble(self) -> str | None:
        """The engine's trouble; None while it is well, or may be tried again."""
        return self._text(self._hang) if self._hang is not None and not self._may_try(self._hang) else None

    def may_take(self, running_count: int) -> int | None:
        """Return how many turns the engine may be given now, beside those that run; None: we set no bound."""
        if self.is_held_long:
            return 0
        if self._hang is None:
            return None
        return max(0, 1 - running_count) if self._may_try(self._hang) else 0

    def _may_try(self, hang: _Hang) -> bool:
        return not self._owed and self._clock.now_s() >= hang.trial_at_s

    def _text(self, hang: _Hang) -> str:
        return f"engine made no step for {self._clock.now_s() - hang.since_s:.0f} s"

    async def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """End requests; return the engine's answer, or nothing if it is late or an error.

        A late answer can be dropped, as it is of no later claim: see `RunningTurn.request_id`.
        """
        if not request_ids:
            return []
        answer = asyncio.ensure_future(self._engine.abort(request_ids))
        wait_s = 0.0 if self._owed or self._hang else ANSWER_S
        self._owed.add(answer)
        answer.add_done_callback(self._note_answer)
        done, _ = await asyncio.wait((answer,), timeout=wait_s)
        try:
            return answer.result() if done else []
        except EngineError:
            return []

    def _note_answer(self, answer: asyncio.Future[list[Generation]]) -> None:
        self._owed.discard(answer)
        self._answer_count += 1
        if not answer.cancelled() and (error := answer.exception()) is not None:
            log.warning("engine.not_aborted", extra={"error": str(error)})

    def close(self) -> None:
        """Wait for no answer any more."""
        for answer in list(self._owed):
            answer.cancel()


async def answered(work: Awaitable[None]) -> bool:
    """Tell whether an engine did its work within ANSWER_S; log the reason if it did not."""
    try:
        async with asyncio.timeout(ANSWER_S):
            await work
    except (TimeoutError, EngineError) as error:
        log.warning("engine.not_answered", extra={"error": str(error) or f"no answer within {ANSWER_S} s"})
        return False
    return True

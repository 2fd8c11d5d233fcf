"""Which running turns go on elsewhere because their GPU is wanted back, and when new ones may be taken again.

- A guard that is shut for long gives all turns back, each once it has waited for as long as reading its context again
  elsewhere would take, but at least `yield_after_s`: waiting longer costs more than moving, moving sooner costs more
  than most shuts last.
- A KV budget that was cut gives those back with the least progress, until the rest fits. A turn counts with what it
  holds; one without a token of its own with the most that it may come to hold, as engines admit by that, and one that
  is not admitted would stand still.
- Nothing is taken while the guard is shut; after a shut that made turns yield, not before it has been open for as long
  as they waited, at most `claim_after_s_max`. A budget lets as many be taken as fit by the most that each may come to
  hold: what was taken within a budget yields only when that is cut.
- A turn that made no token while the guard let little through has not stalled: it goes on elsewhere without blame.
- Tokens are turns.py's: what yields keeps them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...fabric.contract.clock import Clock
from ...fabric.contract.sharing import GuardView
from .engine_watch import LOOK_S
from .report import Guarded
from .turns import RunningTurns, TurnSize

SIZE_COUNT = 8  # turns whose sizes tell what the next one may need
SHUT, SILENT = "shut", "silent"
OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldRule:
    """prefill_tokens_per_s: of the engines that turns would go on at. yield_after_s: a busy serving engine often shuts
    the guard for a second; turns that left each time would do little but read their contexts again."""

    yield_after_s: float = 2.0
    prefill_tokens_per_s: float = 10_000.0
    claim_after_s_max: float = 1.0
    trial_s: float = 5.0
    """This long after turns yielded to a budget too small for one of their size, one is tried: it may be smaller."""
    blameless_s: float = 2.0
    """For how long after the guard was not wide open a turn that makes no token is not said to have stalled."""


def overdue(turns: Sequence[TurnSize], shut_s: float, rule: YieldRule) -> list[str]:
    """Turns that have stood behind a shut guard for longer than it takes to begin again elsewhere."""
    waits = {turn.request_id: turn.context_tokens / rule.prefill_tokens_per_s for turn in turns}
    return [name for name, wait_s in waits.items() if shut_s >= max(rule.yield_after_s, wait_s)]


def too_many(turns: Sequence[TurnSize], kv_tokens_max: int) -> list[str]:
    """Turns that must go so that the others fit: those with the least tokens, of these the youngest, first.

    Args:
        turns: in the order in which they were begun.
    """
    excess = sum(turn.held_tokens for turn in turns) - kv_tokens_max
    gone = []
    for _, turn in sorted(enumerate(turns), key=lambda row: (row[1].token_count, -row[0])):
        if excess <= 0:
            break
        gone.append(turn.request_id)
        excess -= turn.held_tokens
    return gone


def room_for(turns: Sequence[TurnSize], kv_tokens_max: int, turn_tokens: int | None) -> int:
    """Turns of `turn_tokens` at most (None: not known, so one is tried) that fit beside those that run."""
    left = kv_tokens_max - sum(turn.reserve_tokens for turn in turns)
    if turn_tokens is None:
        return int(left > 0)
    return max(0, left // max(1, turn_tokens))


class Yielding:
    """Follows the guard of one worker.

    Args:
        guard: asked ten times a second; None: there is none, and nothing ever yields. One that is not up yet is shut.
    """

    def __init__(
        self, running: RunningTurns, guard: Guarded | None, clock: Clock, rule: YieldRule | None = None
    ) -> None:
        self._running = running
        self._guard = guard
        self._clock = clock
        self._rule = rule or YieldRule()
        self._view = GuardView() if guard is not None else GuardView(state=OPEN)
        self._settle_s = 0.0  # how long it must be open before turns are taken again
        self._opened_at_s = self._narrow_at_s = self._exceeded_at_s = float("-inf")
        self._sizes: deque[int] = deque(maxlen=SIZE_COUNT)

    def due(self) -> list[str]:
        """Look at the guard; request ids of turns that are to be given back now."""
        view = self._look()
        turns = self._running.sizes() if self._guard is not None else []
        names = overdue(turns, view.shut_s, self._rule) if view.state == SHUT else []
        if names:
            self._settle_s = min(view.shut_s, self._rule.claim_after_s_max)
        if view.kv_tokens_max is None:
            return names
        excess = too_many([turn for turn in turns if turn.request_id not in names], view.kv_tokens_max)
        if excess:
            self._exceeded_at_s = self._clock.now_s()
        return names + excess

    def may_take(self) -> int | None:
        """Most turns that may be taken beside those that run; None: no bound of the guard's."""
        view = self._look()
        if view.state in (SHUT, SILENT) or self._is_settling():
            return 0
        if view.kv_tokens_max is None:
            return None
        turns = self._running.sizes()
        is_trial_due = self._clock.now_s() - self._exceeded_at_s >= self._rule.trial_s
        is_trial = not turns and view.kv_tokens_max > 0 and is_trial_due
        return max(int(is_trial), room_for(turns, view.kv_tokens_max, max(self._sizes, default=None)))

    def note_begun(self, sizes: Sequence[TurnSize]) -> None:
        """Learn from turns that were taken just now what the next ones may come to hold."""
        self._sizes.extend(size.reserve_tokens for size in sizes)

    @property
    def has_guard(self) -> bool:
        """Whether anything may ever have to yield."""
        return self._guard is not None

    @property
    def is_shut(self) -> bool:
        """Whether serving needs all of the device now."""
        return self._look().state == SHUT

    @property
    def is_narrowed(self) -> bool:
        """Whether turns may have been without tokens of late because of the guard."""
        return self._clock.now_s() - self._narrow_at_s < self._rule.blameless_s

    async def follow(self, wake: Callable[[], None]) -> None:
        """Call `wake` when turns are to yield, and when some may be taken again; for ever."""
        is_barred = False
        while True:
            await self._clock.sleep(LOOK_S)
            was_barred, is_barred = is_barred, self.may_take() == 0
            if self.due() or (was_barred and not is_barred):
                wake()

    def _look(self) -> GuardView:
        if self._guard is None:
            return self._view
        before, now = self._view, self._clock.now_s()
        view = self._view = self._guard() or GuardView()
        self._running.watch.is_shut = view.state == SHUT
        if view.state != OPEN:
            self._narrow_at_s = now
        if before.state == SHUT != view.state:
            self._opened_at_s = now
        return view

    def _is_settling(self) -> bool:
        if self._clock.now_s() - self._opened_at_s >= self._settle_s:
            self._settle_s = 0.0
        return self._settle_s > 0

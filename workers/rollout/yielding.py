"""Chooses the turns that must go on elsewhere because their GPU is wanted back, and says when new ones may be taken.

- While the guard stays shut, each turn is given back once it has waited for as long as another engine would need to
  read its context again, but at least `yield_after_s`: a longer wait costs more than a move, and an earlier move costs
  more than most shuts last.
- If turns hold more than a KV budget allows, as it was cut or as they came to make more than was likely, those with the
  least progress are given back until the rest fits. A turn counts with its context, also before the engine let it in.
- No turn is taken while the guard is shut. After a shut that made turns yield, the guard must also have been open for
  as long as they waited, at most `claim_after_s_max`. A budget takes as many new turns as it is likely to have room for
  (fabric/rules/queue/room.py).
- A turn that made no token while the guard let little through has not stalled: it goes on elsewhere without blame.
- turns.py keeps the tokens: a turn that yields takes them along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...fabric.contract.clock import Clock
from ...fabric.contract.sharing import GuardView
from .engine_watch import LOOK_S
from .report import Guarded
from .turns import RunningTurns, TurnSize

SHUT, SILENT = "shut", "silent"
OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldRule:
    """The rule of when turns yield.

    prefill_tokens_per_s: the speed of the engines where turns would go on. yield_after_s: a busy serving engine often
    shuts the guard for a second, and turns that left each time would do little but read their contexts again.
    """

    yield_after_s: float = 2.0
    prefill_tokens_per_s: float = 10_000.0
    claim_after_s_max: float = 1.0
    trial_s: float = 5.0
    """So long after turns yielded to a budget that is too small for one of their size, one turn is tried: it may be
    smaller."""
    blameless_s: float = 2.0
    """So long after the guard was last not wide open, a turn that makes no token does not count as stalled."""


def overdue(turns: Sequence[TurnSize], shut_s: float, rule: YieldRule) -> list[str]:
    """List the turns that have waited at a shut guard for longer than it takes to begin again elsewhere."""
    waits = {turn.request_id: turn.context_tokens / rule.prefill_tokens_per_s for turn in turns}
    return [name for name, wait_s in waits.items() if shut_s >= max(rule.yield_after_s, wait_s)]


def too_many(turns: Sequence[TurnSize], kv_tokens_max: int) -> list[str]:
    """List the turns that must go so that the others fit: those with the fewest tokens first, of these the youngest.

    Args:
        turns: in the order in which they were begun.
    """
    excess = sum(turn.context_tokens for turn in turns) - kv_tokens_max
    gone = []
    for _, turn in sorted(enumerate(turns), key=lambda row: (row[1].token_count, -row[0])):
        if excess <= 0:
            break
        gone.append(turn.request_id)
        excess -= turn.context_tokens
    return gone


class Yielding:
    """Follows the guard of one worker.

    Args:
        guard: asked ten times a second; counts as shut while it is not up yet. None: there is no guard, and no turn
            ever yields.
    """

    def __init__(
        self, running: RunningTurns, guard: Guarded | None, clock: Clock, rule: YieldRule | None = None
    ) -> None:
        self._running = running
        self._guard = guard
        self._clock = clock
        self._rule = rule or YieldRule()
        self._view = GuardView() if guard is not None else GuardView(state=OPEN)
        self._settle_s = 0.0  # how long the guard must be open before turns are taken again
        self._opened_at_s = self._narrow_at_s = self._exceeded_at_s = float("-inf")

    def due(self) -> list[str]:
        """Look at the guard; return the request ids of turns to give back now."""
        view = self._look()
        if view.state != SHUT and view.kv_tokens_max is None:
            return []
        turns = self._running.sizes()
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
        """Return how many turns may be taken beside those that run; None: the guard sets no bound."""
        view = self._look()
        if view.state in (SHUT, SILENT) or self._is_settling():
            return 0
        if view.kv_tokens_max is None:
            return None
        room = self._running.room(view.kv_tokens_max)
        is_trial_due = self._clock.now_s() - self._exceeded_at_s >= self._rule.trial_s
        is_trial = view.kv_tokens_max > 0 and is_trial_due and not self._running.sizes()
        return max(room, int(is_trial))

    @property
    def has_guard(self) -> bool:
        """True if turns may ever have to yield."""
        return self._guard is not None

    @property
    def is_shut(self) -> bool:
        """True if serving needs all of the device now."""
        return self._look().state == SHUT

    @property
    def is_narrowed(self) -> bool:
        """True if the guard may be why turns have made no tokens of late."""
        return self._clock.now_s() - self._narrow_at_s < self._rule.blameless_s

    async def follow(self, wake: Callable[[], None]) -> None:
        """Call `wake` when turns must yield, and when new ones may be taken again; for ever."""
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

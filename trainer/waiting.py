"""Saying why a call waits: a trainer that gets no group, or may not push, learns the cause and the next step.

- After SAY_AFTER_S of waiting one warning is logged, which Python shows on stderr if nobody has set up logging;
  again when the cause changes, and every SAY_AGAIN_S.
- fabric/inspect/diagnosing.py finds the cause, at most every LOOK_EVERY_S and only while a call waits.
- A fabric that cannot be asked is no reason to fail: then nothing is logged.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from ..fabric.contract.errors import FabricError, NothingMoves
from ..fabric.contract.text import counted
from ..fabric.host.command import with_commands
from ..fabric.inspect.diagnosing import read_fabric
from ..fabric.inspect.diagnosis import MISSING, TAKE, Cause
from ..fabric.ports.queue import LeaseBoard

log = logging.getLogger(__name__)

SAY_AFTER_S = 5.0
SAY_AGAIN_S = 60.0
LOOK_EVERY_S = 5.0
MADE = ("tokens", "turns_settled", "trajectories_completed", "attempts_failed")  # counters that show work
RECENT_S = 30.0  # so long who was there may be silent: his machine is busy, or he is started again
HELD = "for_trainer"  # complete groups wait, or a live consumer holds them
POLL_S = 1.0  # an iteration that waits for less is one of many, and asks nobody why


class Waiting:
    """The warnings to one run's trainer about its waiting, over all of its calls."""

    def __init__(self, board: LeaseBoard, run_id: str) -> None:
        self._board = board
        self._run_id = run_id
        self._causes: Sequence[Cause] = ()
        self._looked_at_s = self._said_at_s = float("-inf")
        self._said = ""
        self._well_at_s = float("-inf")  # when the run was last seen to have everybody that it needs
        self._made: int | None = None  # the run's output at the last look in this wait
        self._has_moved = False  # the run made something in this wait
        self._waited_s = 0.0  # without a group, by iterations that have ended: short ones in a row are one long wait

    def look_in_s(self, waited_s: float) -> float:
        """Return the seconds until an iteration that has waited so long should tell why."""
        return max(SAY_AFTER_S - waited_s, self._looked_at_s + LOOK_EVERY_S - _now_s(), 0.0)

    async def tell(self, waited_s: float, held_count: int = 0) -> None:
        """Say why an iteration has waited so long, and goes on, if the cause is news. held_count: of its own block."""
        causes = await self._look()
        if causes:
            self._say(causes[0], f"groups() has waited for {waited_s:.0f} s: {_words(causes[0], held_count)}")

    def tell_refusal(self, waited_s: float, error: FabricError) -> None:
        """Say why a push is refused again and again, and goes on trying: the refusal itself has the cause."""
        if waited_s >= SAY_AFTER_S:
            cause = Cause(code=type(error).__name__, kind="passing", text=error.message)
            self._say(cause, f"submit has waited for {waited_s:.0f} s: {error.message}")

    @contextmanager
    def for_refill(self) -> Iterator[None]:
        """Say while the body lasts that it waits for refill's iterator, by a thread: it holds up the event loop."""
        is_over = threading.Event()

        def watch() -> None:
            waited_s = SAY_AFTER_S
            while not is_over.wait(SAY_AGAIN_S if waited_s > SAY_AFTER_S else SAY_AFTER_S):
                log.warning(
                    "run %r: the loop has waited for %.0f s for the next task of the iterator that replaces dropped "
                    "groups. Meanwhile it gives no sign of life, so others may take over the groups in its hands: give "
                    "it a list of tasks, or an iterator that has them ready",
                    self._run_id,
                    waited_s,
                    extra={"run_id": self._run_id, "cause": "refill"},
                )
                waited_s += SAY_AGAIN_S

        threading.Thread(target=watch, name="rollfab-refill", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    async def why(self, waited_s: float, timeout_s: float, held_count: int = 0) -> str:
        """Say why an iteration ends without another group. held_count: groups that its own `with` block holds.

        Raises:
            NothingMoves: it has waited long enough to know, nothing ran meanwhile, and the run stands until somebody
                acts.
        """
        try:
            return await self._why(waited_s, timeout_s, held_count)
        finally:
            self._made, self._has_moved = None, False

    async def _why(self, waited_s: float, timeout_s: float, held_count: int) -> str:
        self._waited_s += waited_s
        is_poll = timeout_s < POLL_S and self._waited_s < SAY_AFTER_S
        age_s = 0.0 if timeout_s >= SAY_AFTER_S else LOOK_EVERY_S  # an error must be of now
        causes = self._causes if is_poll else await self._look(age_s)
        if not causes:
            return f"no group came within {timeout_s:g} s"
        text = f"no group came within {timeout_s:g} s: {_words(causes[0], held_count)}"
        may_come_back = causes[0].code in MISSING and _now_s() - self._well_at_s < RECENT_S
        is_stuck = causes[0].kind == "stuck" and not (self._has_moved or may_come_back)
        if timeout_s >= SAY_AFTER_S and is_stuck:
            rows = with_commands([asdict(each) for each in causes])
            raise NothingMoves(text, run_id=self._run_id, cause=rows[0]["code"], step=rows[0]["step"], causes=rows)
        if not causes[0].is_well:
            self._say(causes[0], text)
        return text

    def forget(self) -> None:
        """Forget the cause, as a group came: warn again when the run stands again."""
        self._causes, self._said, self._waited_s, self._looked_at_s = (), "", 0.0, float("-inf")
        self._well_at_s = _now_s()
        self._made, self._has_moved = None, False

    async def _look(self, age_s: float = LOOK_EVERY_S) -> Sequence[Cause]:
        """Look up the causes; a look up to `age_s` old will do."""
        if _now_s() - self._looked_at_s >= age_s:
            self._looked_at_s = _now_s()
            try:
                found = await read_fabric(self._board, self._run_id)
                self._causes = found.causes[self._run_id]
                self._note_made(found.survey.runs[self._run_id].counters)
                if not any(each.code in MISSING for each in self._causes):
                    self._well_at_s = _now_s()
            except FabricError as error:
                self._causes = ()
                log.info("waiting.not_diagnosed", extra={"run_id": self._run_id, "error": str(error)})
        return self._causes

    def _note_made(self, counters: Mapping[str, int]) -> None:
        made = sum(counters.get(name, 0) for name in MADE)
        self._has_moved = self._has_moved or self._made not in (None, made)
        self._made = made

    def _say(self, cause: Cause, text: str) -> None:
        if cause.code == self._said and _now_s() - self._said_at_s < SAY_AGAIN_S:
            return
        self._said, self._said_at_s = cause.code, _now_s()
        level = logging.INFO if cause.kind == "moves" else logging.WARNING  # slow work is no reason to alarm anybody
        log.log(level, "%s", text, extra={"run_id": self._run_id, "cause": cause.code})


def _words(cause: Cause, held_count: int) -> str:
    """Write a cause for the trainer that waits, and how many of the groups in question it holds itself."""
    own = f"{counted(held_count, 'group', 'is', 'are')} held by this very `with` block, and acknowledged at its end"
    if held_count and cause.code == HELD:
        return f"{cause.text}: {own}. If no others are on their way, end it, or push more tasks"
    if cause.code == HELD and cause.step.startswith(TAKE):
        return f"{cause.text}; this call takes them as soon as the broker hands them over"
    return f"{with_commands(cause.words)}. {own}" if held_count else with_commands(cause.words)


def _now_s() -> float:
    return asyncio.get_running_loop().time()

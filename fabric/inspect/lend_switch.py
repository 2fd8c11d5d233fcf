"""Uses the serving team's switch: refuses a name that nobody has, and watches workers give back what was taken back.

- The switch works before anything is looked at: what is said stands, whatever becomes of the look.
- A worker has given everything back once a heartbeat from after the switch says that no turn runs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..contract.clock import Clock
from ..contract.records import WorkerInfo
from ..contract.sharing import LendSetting
from ..ports.queue import LeaseBoard
from ..rules.lending.hours import minute_of_week
from ..rules.lending.terms import check_known, concerns, terms
from .diagnosing import forgotten

LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """The outcome of a switch.

    worker_ids: live serving workers that it concerns; lending_ids: those of them that may lend now. taken_ids: those
    that ran turns and may lend no more; turn_count: turns that ran there, by their last heartbeats. waiting: those that
    have not yet said that nothing runs, with the turns that they told last and the age of that in ms. waited_s: until
    the last one had said so, or for how long it was waited for.
    """

    setting: LendSetting
    worker_ids: list[str] = field(default_factory=list)
    lending_ids: list[str] = field(default_factory=list)
    taken_ids: list[str] = field(default_factory=list)
    turn_count: int = 0
    waiting: dict[str, tuple[int, float]] = field(default_factory=dict)
    waited_s: float = 0.0


async def switch(
    board: LeaseBoard, clock: Clock, subject: str, changes: Mapping[str, Any], *, is_future: bool, wait_s: float
) -> Switched:
    """Change what is said of a subject, and wait up to `wait_s` until its workers have given back what they must.

    Args:
        changes: fields of a LendSetting.
        is_future: the name may be one that nobody has yet.

    Raises:
        InputError: nobody has that name, or the outcome is no setting; nothing was switched.
    """
    workers, lends = await board.workers(), await board.lends()
    if not is_future:  # who was there a moment ago may come back as he was: what is said now must hold for him
        late = await forgotten(board, await board.wall_ms())
        check_known(subject, [info for info, _ in (*late.values(), *workers.values())], lends)
    concerned = {name: info for name, (info, _) in workers.items() if concerns(subject, info)}
    minute = minute_of_week(await board.wall_ms())
    lent = _lending(concerned, lends, minute)
    said = await board.change_lend(subject, changes)
    at_s = clock.now_s()
    lending = _lending(concerned, await board.lends(), minute)
    running = {name: concerned[name].running_count for name in lent - lending}
    running |= {
        name: info.running_count for name, info in concerned.items() if info.running_count and name not in lending
    }
    waiting = await _look(board, clock, running, at_s)
    while waiting and clock.now_s() < at_s + wait_s:
        await clock.sleep(LOOK_S)
        waiting = await _look(board, clock, running, at_s)
    taken = {name: count for name, count in running.items() if count}
    return Switched(
        setting=said,
        worker_ids=sorted(concerned),
        lending_ids=sorted(lending),
        taken_ids=sorted(taken),
        turn_count=sum(taken.values()),
        waiting=waiting,
        waited_s=clock.now_s() - at_s,
    )


def _lending(infos: Mapping[str, WorkerInfo], lends: Mapping[str, LendSetting], minute: int) -> set[str]:
    return {name for name, info in infos.items() if terms(lends, name, info.pool, minute).may_lend}


async def _look(board: LeaseBoard, clock: Clock, running: dict[str, int], at_s: float) -> dict[str, tuple[int, float]]:
    """Return the workers that have not yet said that nothing runs.

    `running`: the most turns that each has told of; grows here.
    """
    since_ms = 1000 * (clock.now_s() - at_s)
    seen: dict[str, tuple[WorkerInfo, int]] = await board.workers()
    found: dict[str, tuple[int, float]] = {}
    for name in running.keys() & seen.keys():  # who is forgotten runs nothing that anybody would take
        info, age_ms = seen[name]
        running[name] = max(running[name], info.running_count)
        if info.running_count or age_ms >= since_ms:
            found[name] = (info.running_count, age_ms)
    return found

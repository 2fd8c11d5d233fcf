"""Decides from all that a serving team said how much of a worker may be lent at this minute.

- The strictest word holds: off before observe before on; the smallest of each cap; hours to which all agree.
- Nothing said at all is observe: nothing is lent before a team says so, and what could be lent is measured.
- "On" for all is said by name, of the pools and workers that are known then: who comes later observes until it is lent
  itself. "Observe", "off" and caps for all hold for those who come later too.
- A cap of 0 is off. Outside of its hours a setting is observe. What cannot be understood is off.

The board keeps the settings; workers/rollout/lease.py obeys them, at every heartbeat and ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...contract.errors import InputError
from ...contract.ids import NAME
from ...contract.limits import SLOT_COUNT_MAX
from ...contract.records import WorkerInfo
from ...contract.sharing import ALL, POOL, LendSetting
from ...contract.text import did_you_mean
from .hours import is_within, parse_hours

MODES = ("on", "observe", "off")  # the strictest last
CLEAR = "clear"  # as a mode, only of a change: nothing is said of this subject any more
CAPS = {
    "slot_count_max": "rollout slots",
    "compute_fraction_max": "compute for rollouts",
    "memory_fraction_max": "KV cache for rollouts",
}
"""Fields of a setting → what they bound, for people."""
TEXT_LENGTH_MAX = 500  # of a reason, or a name
WINDOW_COUNT_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LendTerms:
    """The terms on which a worker may be lent now: the strictest of all that was said."""

    mode: str
    """on; observe: measure what could be lent, and lend nothing; off."""
    slot_count_max: int | None = None
    """A cap, as the next two; null: none."""
    compute_fraction_max: float | None = None
    memory_fraction_max: float | None = None
    reason: str = ""
    """The setting that decides, who said it, and why."""

    @property
    def may_lend(self) -> bool:
        """True if rollouts may run at all."""
        return self.mode == "on"

    @property
    def text(self) -> str:
        """The terms in one word: off, observe, on, or the slots that it is limited to."""
        return self.mode if self.mode != "on" or self.slot_count_max is None else str(self.slot_count_max)


def terms(settings: Mapping[str, LendSetting], worker_id: str, pool: str, minute_of_week: int) -> LendTerms:
    """Decide how much of a worker may be lent at this minute of the week (0: Monday, 00:00 UTC).

    Args:
        settings: what was said, by subject; those of other subjects are passed over.
        pool: the worker's; empty: none.
    """
    subjects = subjects_of(worker_id, pool)
    said = [(subject, settings[subject]) for subject in subjects if subject in settings]
    judged = [(*_judge(setting, minute_of_week), subject, setting) for subject, setting in said]
    judged = [row for row in judged if row[0] != "on" or row[2] != ALL or not set(row[3].names).isdisjoint(subjects)]
    slots = _smallest(setting.slot_count_max for _, setting in said)
    mode, reason = "observe", _nothing_said(pool, came_later=bool(said))
    if judged:
        mode, why, subject, setting = max(judged, key=lambda row: MODES.index(row[0]))  # of equals the most particular
        reason = _reason(subject, why, setting)
    return LendTerms(
        mode=mode,
        slot_count_max=None if slots is None else int(slots),
        compute_fraction_max=_smallest(setting.compute_fraction_max for _, setting in said),
        memory_fraction_max=_smallest(setting.memory_fraction_max for _, setting in said),
        reason=reason,
    )


def subjects_of(worker_id: str, pool: str) -> tuple[str, ...]:
    """List the subjects that this worker belongs to, the most particular first."""
    return (worker_id, f"{POOL}{pool}", ALL) if pool else (worker_id, ALL)


def lent_by_name(subject: str, said: LendSetting, infos: Iterable[WorkerInfo]) -> LendSetting:
    """Replace "on" for all by the names that it means now: pools, and workers that are in none."""
    is_lent = subject == ALL and said.mode == "on"
    serving = [info for info in infos if info.role == "serving"] if is_lent else []
    return replace(said, names=sorted({f"{POOL}{each.pool}" if each.pool else each.worker_id for each in serving}))


def concerns(subject: str, info: WorkerInfo) -> bool:
    """Tell whether what is said of a subject is said of this worker too."""
    return info.role == "serving" and subject in subjects_of(info.worker_id, info.pool)


# ---------------------------------------------------------------- what is said


def setting_of(subject: str, value: LendSetting | str) -> LendSetting:
    """Make a setting of what was given, which may be one word: on, observe, off, clear, or a number of slots.

    Raises:
        InputError: the subject or the setting is not one.
    """
    check_subject(subject)
    if isinstance(value, LendSetting):
        return check_setting(value)
    if value.isascii() and value.isdigit():
        return check_setting(LendSetting(mode="on", slot_count_max=int(value)))
    return check_setting(LendSetting(mode=value))


def changed(before: LendSetting | None, changes: Mapping[str, Any]) -> LendSetting:
    """Return the setting of a subject after `changes` to some of its fields.

    Caps and hours stay until they are changed themselves: a team that takes everything back and lends again later
    finds the bounds that it had set. Where nothing was said, a bound alone lends nothing.

    Raises:
        InputError: the outcome is no setting.
    """
    return check_setting(replace(before or LendSetting(mode="observe"), **changes))


def check_subject(subject: str) -> str:
    """Return a subject if it is one.

    Raises:
        InputError: it is neither a worker's name, nor a pool's after "pool:", nor "*".
    """
    name = subject.removeprefix(POOL)
    if subject != ALL and not NAME.match(name):
        raise InputError(
            f"{subject!r} is nothing that can be lent: name a worker, a pool as {POOL}NAME, or {ALL} for all "
            "(1 to 63 letters, digits, '-' or '_')"
        )
    return subject


def check_known(subject: str, infos: Iterable[WorkerInfo], settings: Iterable[str]) -> None:
    """Refuse a name that nobody has.

    Args:
        infos: the workers that live.
        settings: subjects of which something was said already.

    Raises:
        InputError: no serving worker or pool is called so, and nothing was said of it; the text has the nearest names.
    """
    workers = {info.worker_id: info for info in infos}
    serving = [info for info in workers.values() if info.role == "serving"]
    subjects = {ALL, *settings, *(name for info in serving for name in subjects_of(info.worker_id, info.pool))}
    if subject in subjects:
        return
    if subject in workers:
        raise InputError(
            f"worker {subject!r} is a {workers[subject].role} worker: only serving workers are lent and taken back",
            role=workers[subject].role,
        )
    is_pool = subject.startswith(POOL)
    known = [name.removeprefix(POOL) for name in subjects if name.startswith(POOL) == is_pool and name != ALL]
    name, kind = subject.removeprefix(POOL), "pool" if is_pool else "serving worker"
    option = "pool" if is_pool else "name"
    start = "" if serving else f"Start a serving worker: `rollfab worker --role serving --{option} {name} …`. "
    raise InputError(
        f"no {kind} {name!r} is known to the broker, and nothing was switched: "
        + did_you_mean(name, known, f"{start}If it is still to come, say so with --future"),
        known=sorted(known),
    )


def check_setting(setting: LendSetting) -> LendSetting:
    """Return a setting if it can be obeyed.

    Raises:
        InputError: names the field, what it is and what it may be.
    """
    if setting.mode not in (*MODES, CLEAR):
        raise InputError(f"lend {setting.mode!r}: expected on, observe, off, clear, or a number of slots")
    slots = setting.slot_count_max
    if slots is not None and (isinstance(slots, bool) or not 0 <= slots <= SLOT_COUNT_MAX):
        raise InputError(f"slot_count_max is {slots}, must be from 0 to {SLOT_COUNT_MAX:,}")
    for name in ("compute_fraction_max", "memory_fraction_max"):
        share = getattr(setting, name)
        if share is not None and not (math.isfinite(share) and 0 <= share <= 1):
            raise InputError(f"{name} is {share}, must be from 0 to 1: 0.3 is 30 %")
    for name in ("reason", "said_by"):
        if len(getattr(setting, name)) > TEXT_LENGTH_MAX:
            raise InputError(f"{name} has {len(getattr(setting, name))} characters, at most {TEXT_LENGTH_MAX}")
    if len(setting.hours) > WINDOW_COUNT_MAX:
        raise InputError(f"hours has {len(setting.hours)} windows, at most {WINDOW_COUNT_MAX}: join some")
    for text in setting.hours:
        parse_hours(text)
    return setting


def switch_facts(subject: str, said: LendSetting) -> dict[str, Any]:
    """Return the facts of a switch's event: what was said of whom, by whom and why."""
    bounds = {name: getattr(said, name) for name in CAPS if getattr(said, name) is not None}
    hours = {"hours": list(said.hours)} if said.hours else {}
    who = {"said_by": said.said_by, "reason": said.reason}
    return {"worker_id": subject, "value": said.mode, **bounds, **hours, **who}


def subject_text(subject: str) -> str:
    """Name a subject for people."""
    if subject == ALL:
        return "all serving workers"
    return f"pool {subject.removeprefix(POOL)}" if subject.startswith(POOL) else subject


# ---------------------------------------------------------------- judging


def _judge(setting: LendSetting, minute_of_week: int) -> tuple[str, str]:
    """Return the mode that one setting comes to now, and why."""
    if setting.mode not in MODES:
        return "off", f"its mode {setting.mode!r} is not known here"
    if setting.mode == "off":
        return "off", "off"
    zero = next((what for name, what in CAPS.items() if getattr(setting, name) == 0), None)
    if zero is not None:
        return "off", f"at most 0 {zero}"
    try:
        if setting.mode == "on" and not is_within(setting.hours, minute_of_week):
            return "observe", f"outside of its hours ({', '.join(setting.hours)} UTC)"
    except InputError as error:
        return "off", str(error)
    return setting.mode, setting.mode


def _reason(subject: str, why: str, setting: LendSetting) -> str:
    by = f", said by {setting.said_by}" if setting.said_by else ""
    reason = f": {setting.reason}" if setting.reason else ""
    return f"{subject_text(subject)}: {why}{by}{reason}"


def _nothing_said(pool: str, *, came_later: bool) -> str:
    whom = f"--pool {pool}" if pool else "--worker NAME"
    why = "it came after all others were lent" if came_later else "nothing was said of it yet"
    return f"{why}: `rollfab lend on {whom}` lends it"


def _smallest(caps: Any) -> float | None:
    return min((cap for cap in caps if cap is not None), default=None)

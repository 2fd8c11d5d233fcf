"""Where each process of the pair runs: one table.

- Core 0 is the device: both engines compute there, and nothing else does. Core 1 is the host: the serving front end,
  its client, the lent worker's front end, and below them what would be on other machines: broker, agent, controller,
  the dedicated worker. Its engine yields to all of them (an accelerator of its own needs none of this core).
- None: as the process came up, which is how the product itself asks for its priority.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rollfab.fabric.contract.errors import FabricError
from tests.bench.measure import child_pids, process_title

DEVICE, HOST = 0, 1
NORMAL, LOW, IDLE = "normal", "low", "idle"
NICE_LOW = 19


@dataclass(frozen=True, kw_only=True)
class Place:
    """core: DEVICE or HOST. priority: NORMAL, LOW, IDLE, or None."""

    core: int
    priority: str | None = None


PLACES: Mapping[str, Place] = MappingProxyType(
    {
        "serving engine": Place(core=DEVICE),
        "serving front": Place(core=HOST),
        "borrowed engine": Place(core=DEVICE),
        "borrowed front": Place(core=HOST),
        "dedicated engine": Place(core=HOST, priority=IDLE),
        "dedicated front": Place(core=HOST, priority=LOW),
        "broker": Place(core=HOST, priority=LOW),
        "controller": Place(core=HOST, priority=LOW),
        "agent": Place(core=HOST, priority=LOW),
        "client": Place(core=HOST),
        "bench": Place(core=HOST),
    }
)


def check_machine() -> None:
    """Raises FabricError: no two cores, or a system that cannot pin processes to them."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        raise FabricError("co-serving is measured on a pair of cores that processes can be pinned to: a Linux machine")


def put(pid: int, role: str, cores: tuple[int, ...]) -> None:
    """Put all threads of a process where its role belongs; those that it starts later go there, too."""
    place = PLACES[role]
    for thread in threads(pid):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread, {cores[place.core]})
    if place.priority is not None:
        set_priority(pid, place.priority)


def set_priority(pid: int, priority: str) -> None:
    """NORMAL, LOW or IDLE, for all threads of a process.

    Raises:
        FabricError: this user may not.
    """
    for thread in threads(pid):
        try:
            os.sched_setscheduler(thread, os.SCHED_IDLE if priority == IDLE else os.SCHED_OTHER, os.sched_param(0))
            if priority != IDLE:
                os.setpriority(os.PRIO_PROCESS, thread, NICE_LOW if priority == LOW else 0)
        except ProcessLookupError:
            continue
        except PermissionError as error:
            raise FabricError(
                f"this user may not make process {pid} {priority} again: run the bench as root"
            ) from error


def priorities(pid: int) -> dict[int, tuple[int, int]]:
    """Scheduling class and nice value by thread."""
    found = {}
    for thread in threads(pid):
        with contextlib.suppress(ProcessLookupError):
            found[thread] = os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)
    return found


def restore(found: Mapping[int, tuple[int, int]]) -> None:
    """Give threads the priorities that they had."""
    for thread, (kind, nice) in found.items():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(thread, kind, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def engine_pid(pid: int) -> int:
    """The process below this one that computes.

    Raises:
        FabricError: there is none.
    """
    for child in child_pids(pid):
        if "EngineCore" in process_title(child):
            return child
    raise FabricError(f"no EngineCore below process {pid} ({process_title(pid) or 'which has ended'})")


def threads(pid: int) -> list[int]:
    """Native ids; none if it has ended."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return []

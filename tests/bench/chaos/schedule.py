"""Which faults `rollfab bench chaos` injects: a sequence per role that follows from the seed alone.

- Every role has a lane of its own, so that faults of different roles overlap as they please; within a lane one fault is
  over before the next begins. *When* a fault falls depends on the machine, *which* one comes next never does.
- A lane draws its kinds from a bag that is refilled when it is empty, so that none is left out for long.
- Cheap faults are more frequent than dear ones: a worker that was killed needs some 7 s of CPU to load torch again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

KILL = "kill"  # SIGKILL; the supervisor starts it again
FREEZE = "freeze"  # SIGSTOP, later SIGCONT
CUT = "cut"  # every connection to the broker is reset, and so is every new one for a while
HOLD = "hold"  # the network swallows everything for a while, then delivers it late
KINDS = (KILL, FREEZE, CUT, HOLD)
BROKER = "broker"

_EVEN = (KILL, FREEZE, CUT, HOLD)
_DEAR = (KILL, FREEZE, FREEZE, CUT, CUT, HOLD)
BAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "worker": _DEAR,
        "serving": _DEAR,
        "agent": _EVEN,
        "gateway": _EVEN,
        "controller": _EVEN,
        "reward": _EVEN,
        "trainer": _EVEN,
        "api": _EVEN,
        BROKER: (KILL, FREEZE, CUT),  # cut off from everybody at once
    }
)
ROLES = tuple(BAGS)

SHORT_S = (0.5, 1.8)  # less than a claim lasts: whoever is hit goes on by itself
LONG_S = (2.1, 4.0)  # more than a claim lasts: its work is taken over while it still believes to hold it
LONG_FRACTION = 0.3
CUT_S = (0.05, 3.0)
BROKER_AWAY_S = (0.05, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. pause_s: quiet in its lane before it. duration_s: how long the harm lasts; 0: a process is killed."""

    number: int
    role: str
    kind: str
    instance: int
    pause_s: float
    duration_s: float


def faults(seed: int, role: str, *, instance_count: int, pause_s: tuple[float, float]) -> Iterator[Fault]:
    """The faults of one role, without end.

    Args:
        seed: the same seed, the same faults.
        role: one of ROLES.
        instance_count: processes of this role; they are hit in a random order.
        pause_s: bounds of the quiet time before a fault.
    """
    dice = random.Random(f"{seed} {role}")
    bag: list[str] = []
    number = 0
    while True:
        if not bag:
            bag = list(BAGS[role])
            dice.shuffle(bag)
        kind = bag.pop()
        yield Fault(
            number=number,
            role=role,
            kind=kind,
            instance=dice.randrange(instance_count),
            pause_s=dice.uniform(*pause_s),
            duration_s=_duration_s(dice, role, kind),
        )
        number += 1


def _duration_s(dice: random.Random, role: str, kind: str) -> float:
    if role == BROKER:
        return dice.uniform(*BROKER_AWAY_S)
    if kind == KILL:
        return 0.0
    if kind == CUT:
        return dice.uniform(*CUT_S)
    return dice.uniform(*(LONG_S if dice.random() < LONG_FRACTION else SHORT_S))

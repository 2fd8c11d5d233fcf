"""The checkers: one per promise. They see every call that the broker carried out, in its order, and what it answered.

They know only the ports and what was promised; they look into nobody's tables but at the very end (check_end.py).
A broken promise raises Violation, which ends the simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.options import Options
from tests.sim.virtual_loop import Process


class Violation(Exception):
    """A promise was broken."""


def require(condition: object, text: str) -> None:
    """Raise Violation with `text` unless the promise held."""
    if not condition:
        raise Violation(text)


@dataclass(slots=True)
class Facts:
    """What checkers share.

    Attributes:
        broker_ms: what the clock of a group's shard shows: by it the group's deadline is kept.
        weights: version → digest of the weights that were published as it.
        newest: what these are made of (policy.py): a version, and a trainer's life.
        line: of the trace: (seconds, process, what happened, to what, details).
    """

    options: Options
    now_s: Callable[[], float]
    broker_ms: Callable[[str], float]
    broker: Process
    clock_trouble_s: float = 0.0
    head_version: int = -1
    weights: dict[int, int] = field(default_factory=dict)
    newest: tuple[int, int] = (0, 0)
    lines: list[tuple[float, str, str, str, str]] = field(default_factory=list)

    def note(self, who: str, what: str, whom: str = "", details: object = "") -> None:
        """A line of the trace."""
        self.lines.append((self.now_s(), who, what, whom, str(details)))

    def was_well(self, process: Process, since_s: float) -> bool:
        """Whether nothing was wrong with a process, or with the broker, since then."""
        trouble_s = max(process.trouble_s, self.broker.trouble_s, self.clock_trouble_s)
        return not process.is_dead and process.held is None and trouble_s < since_s


class Checkers:
    """Shows calls to checkers: `turns.exchange` to every method `turns_exchange(process, result, *args)`."""

    def __init__(self, checkers: list[Any]) -> None:
        self._checkers = checkers
        self._hooks: dict[str, list[Callable[..., None]]] = {}

    def observe(self, process: Process, name: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call that the broker has just carried out."""
        hooks = self._hooks.get(name)
        if hooks is None:
            method = name.replace(".", "_")
            hooks = [getattr(each, method) for each in self._checkers if hasattr(each, method)]
            self._hooks[name] = hooks
        for hook in hooks:
            hook(process, result, *args, **kwargs)


@dataclass(slots=True)
class Hold:
    """The claim of a job that was handed out last."""

    process: Process
    worker_id: str
    fence: int
    renewed_s: float
    is_live: bool = True

    def is_of(self, worker_id: str, fence: int) -> bool:
        """Whether it is this one."""
        return self.worker_id == worker_id and self.fence == fence


def check_taken_over(facts: Facts, what: str, hold: Hold | None, fence: int, claim_s: float) -> None:
    """A job was handed out under `fence`; `hold` is the claim before, if it was not given back."""
    if hold is None:
        return
    require(fence > hold.fence, f"{what}: claimed under fence {fence} after fence {hold.fence} was handed out")
    if not hold.is_live:
        return
    age_s = facts.now_s() - hold.renewed_s
    is_due = age_s >= claim_s or facts.clock_trouble_s >= hold.renewed_s
    require(is_due, f"{what}: claimed anew {age_s:.2f} s after {hold.worker_id} had it, a claim lasts {claim_s:g} s")
    is_idle = hold.process.is_dead or not facts.was_well(hold.process, hold.renewed_s - 0.1)
    require(is_idle, f"{what}: taken from {hold.worker_id}, which was well and should have renewed it")

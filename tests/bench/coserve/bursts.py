"""How fast a lent device is given back when a burst comes: what rollouts still take of it, and for how long.

- A burst is a number of prompts at one instant, from when the first of them is sent. Only those count that come while
  rollouts compute: with the guard shut there is nothing to give back.
- `taken_ms` is the processor time that the rollout engine had between the burst's arrival and its first token: by so
  much it can have delayed serving. What it gets where serving leaves the processor idle is in it.
- `noticed_ms`: from the arrival until the serving engine has a request, and its probe shows it. Before that client and
  front end have it, and nothing of it can be computed. `taken_after_ms` is what was taken of the device after that.
- `step_ms`: processor time of a rollout step, the median of all that were made meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self, TextIO

import numpy as np

from rollfab.deploy.replay.figures import percentile
from rollfab.deploy.replay.records import Arrival, Outcome
from rollfab.workers.serving.probes.reader import ProbeReader

from .arms import Rounds
from .cast import BORROWED, Pair
from .places import engine_pid, threads

REQUESTS, PROMPT_TOKENS, COMPLETION_TOKENS, EVERY_S = 16, 200, 8, 2.0
LOOK_S = 0.002
OPEN_S, COMPUTING = (
    0.05,
    0.1,
)  # who had a tenth of the time just before a burst computed; a guard that is shut takes 3 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """spent_s: processor time of the rollout engine so far, all threads. steps: its, arrived: requests that the serving
    engine had, so far."""

    at_s: float
    spent_s: float
    steps: int
    arrived: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What rollouts had of it, milliseconds. See the module."""

    was_open: bool
    taken_ms: float
    noticed_ms: float
    taken_after_ms: float


class Watch:
    """Looks at the rollout and the serving engine every LOOK_S while the block runs.

    Attributes:
        looks: in order.
    """

    def __init__(self, pair: Pair) -> None:
        self.looks: list[Look] = []
        self._pair = pair
        self._reader = ProbeReader(pair.probe)
        self._reader.read(time.monotonic())
        pid = engine_pid(pair.pid(BORROWED))
        self._paths = [f"/proc/{pid}/task/{thread}/schedstat" for thread in threads(pid)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="burst-watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        with ExitStack() as opened:
            files = [opened.enter_context(open(path)) for path in self._paths]
            while not self._stop.wait(LOOK_S):
                self.looks.append(
                    Look(
                        at_s=time.monotonic(),
                        spent_s=sum(_spent_s(each) for each in files),
                        steps=self._pair.step_count,
                        arrived=self._reader.arrived_count(),
                    )
                )


def _spent_s(schedstat: TextIO) -> float:
    schedstat.seek(0)
    return int(schedstat.read().split()[0]) / 1e9


def bursts(pair: Pair, rounds: Rounds, burst_count: int) -> dict[str, Any]:
    """Of `burst_count` bursts under the guard: percentiles over those that came while rollouts computed."""
    rounds.enter("ours")
    one = [Arrival(at_s=0.0, prompt_tokens=PROMPT_TOKENS, completion_tokens=COMPLETION_TOKENS)] * REQUESTS
    arrivals = [replace(each, at_s=EVERY_S * index) for index in range(burst_count) for each in one]
    with Watch(pair) as watch:
        start_at_s, outcomes = rounds.replay(arrivals)
    found = [taken(watch.looks, *span) for span in spans(start_at_s, outcomes)]
    return {"requests_each": REQUESTS, "step_ms": step_ms(watch.looks), **figures(found)}


def figures(found: Sequence[Burst]) -> dict[str, Any]:
    """Percentiles of what rollouts had, None without a burst that counts."""
    counted = [each for each in found if each.was_open]
    told: dict[str, Any] = {"sent_count": len(found), "burst_count": len(counted)}
    for name in ("taken_ms", "noticed_ms", "taken_after_ms"):
        values = [getattr(each, name) for each in counted]
        for part in (0.5, 0.99):
            told[f"{name}_p{round(100 * part)}"] = percentile(values, part) if values else None
    return told


def spans(start_at_s: float, outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Of each burst that was answered: when its first request was sent, and when it had the first token of any."""
    sent: dict[float, float] = {}
    first: dict[float, float] = {}
    for each in outcomes:
        at_s = each.arrival.at_s
        sent[at_s] = min(each.sent_at_s, sent.get(at_s, each.sent_at_s))
        if each.ttft_s is not None:
            first[at_s] = min(each.ttft_s, first.get(at_s, each.ttft_s))
    return [(start_at_s + sent[at_s], start_at_s + at_s + ttft_s) for at_s, ttft_s in sorted(first.items())]


def taken(looks: Sequence[Look], from_s: float, until_s: float) -> Burst:
    """What rollouts had of a burst that came at `from_s` and had its first token at `until_s`, monotonic seconds."""
    at_s, spent_s = np.array([(each.at_s, each.spent_s) for each in looks]).T
    arrived = np.array([each.arrived for each in looks])
    before = arrived[at_s <= from_s]
    later = at_s[(at_s > from_s) & (arrived > (before[-1] if len(before) else 0))]
    noticed_s = min(float(later[0]), until_s) if len(later) else until_s
    edges = np.interp([from_s - OPEN_S, from_s, noticed_s, until_s], at_s, spent_s)
    return Burst(
        was_open=bool(edges[1] - edges[0] > COMPUTING * OPEN_S),
        taken_ms=float(1000 * (edges[3] - edges[1])),
        noticed_ms=1000 * (noticed_s - from_s),
        taken_after_ms=float(1000 * (edges[3] - edges[2])),
    )


def step_ms(looks: Sequence[Look]) -> float | None:
    """Processor time of a rollout step, the median; None: there were no two."""
    steps = np.array([each.steps for each in looks])
    spent_s = np.array([each.spent_s for each in looks])
    ends = np.flatnonzero(np.diff(steps)) + 1
    each_s = np.diff(spent_s[ends]) / np.diff(steps[ends])
    return float(1000 * np.median(each_s)) if len(each_s) else None

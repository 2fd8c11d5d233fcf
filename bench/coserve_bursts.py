"""How fast a lent device is given back when a burst comes: what rollouts still take of it, and for how long.

- A burst is a number of prompts at one instant, while rollouts have the device. `taken_ms` is the processor time that
  the rollout engine had between the burst's arrival and its first token: by so much it can have delayed serving.
- `stopped_after_ms`: from the arrival to the last moment before that token at which rollouts computed. What they get
  where serving leaves the processor idle is in both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from .coserve_arms import Rounds
from .coserve_cast import BORROWED, Pair
from .coserve_places import engine_pid, threads
from .harness import percentile
from .replay.records import Arrival, Outcome

REQUESTS, PROMPT_TOKENS, COMPLETION_TOKENS, EVERY_S = 16, 200, 8, 3.0
LOOK_S = 0.002
COMPUTING = 0.1  # of a look's time: less is what a look at a lock or a clock takes


class ProcessorTime:
    """Looks at the processor time of a process, all threads together, while the block runs.

    Attributes:
        looks: (monotonic seconds, processor seconds so far), in order.
    """

    def __init__(self, pid: int) -> None:
        self.looks: list[tuple[float, float]] = []
        self._paths = [f"/proc/{pid}/task/{thread}/schedstat" for thread in threads(pid)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="processor-time")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        files = [open(path) for path in self._paths]  # noqa: SIM115 - kept open for a thousand looks
        while not self._stop.wait(LOOK_S):
            spent_ns = 0
            for each in files:
                each.seek(0)
                spent_ns += int(each.read().split()[0])
            self.looks.append((time.monotonic(), spent_ns / 1e9))
        for each in files:
            each.close()


def bursts(pair: Pair, rounds: Rounds, burst_count: int) -> dict[str, Any]:
    """Of `burst_count` bursts under the guard: percentiles of `taken_ms` and `stopped_after_ms`."""
    rounds.enter("ours")
    one = [Arrival(at_s=0.0, prompt_tokens=PROMPT_TOKENS, completion_tokens=COMPLETION_TOKENS)] * REQUESTS
    arrivals = [replace(each, at_s=EVERY_S * index) for index in range(burst_count) for each in one]
    with ProcessorTime(engine_pid(pair.pid(BORROWED))) as watched:
        start_at_s, outcomes = rounds.replay(arrivals)
    found = [taken(watched.looks, *span) for span in spans(start_at_s, outcomes)]
    figures: dict[str, Any] = {"burst_count": len(found), "requests_each": REQUESTS}
    for index, name in enumerate(("taken_ms", "stopped_after_ms")):
        values = [each[index] for each in found]
        figures |= {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}
    return figures


def spans(start_at_s: float, outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Of each burst that was answered: when it came, and when the first token of any of its requests did."""
    first: dict[float, float] = {}
    for each in outcomes:
        if each.ttft_s is not None:
            at_s = each.arrival.at_s
            first[at_s] = min(each.ttft_s, first.get(at_s, each.ttft_s))
    return [(start_at_s + at_s, start_at_s + at_s + ttft_s) for at_s, ttft_s in sorted(first.items())]


def taken(looks: Sequence[tuple[float, float]], from_s: float, until_s: float) -> tuple[float, float]:
    """Milliseconds of processor time between two moments, and from the first to when they were last being spent."""
    at_s, spent_s = np.array(looks).T
    edges = np.interp([from_s, until_s], at_s, spent_s)
    inside = np.flatnonzero((at_s[1:] > from_s) & (at_s[:-1] < until_s))
    is_computing = np.diff(spent_s)[inside] > COMPUTING * np.diff(at_s)[inside]
    last_s = at_s[1:][inside][is_computing].max(initial=from_s)
    return float(1000 * (edges[1] - edges[0])), float(1000 * (min(last_s, until_s) - from_s))

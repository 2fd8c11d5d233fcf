"""What a serving instance can serve within its objectives while it lends nothing: what loads are parts of.

By the lengths of its requests and its bursts, a trace may ask fifty times as much of an instance as another one of the
same rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ....fabric.rules.serving.facts import Slo
from ...replay.records import Arrival
from .books import Books
from .cost import StepCost
from .engine import Engine, EngineOptions
from .events import Events
from .serving import Served, ServingSide, served

KEPT_MIN = 0.99  # of the requests, by each of the objectives
NEAR = 1.03  # a rate at which they are kept, and one at which not, are at most so far apart
RATE_MIN, RATE_MAX = 1 / 64, 1024.0
ALONE_COUNT, ALONE_S = 1000, 3600.0  # requests that are tried alone, and the time between two of them


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A serving instance. kv_tokens: that its cache has room for."""

    cost: StepCost
    kv_tokens: int
    slo: Slo

    def capacity_per_s(self, at_rate: Callable[[float], Sequence[Arrival]]) -> float:
        """Find the highest rate at which each objective is kept for 99 of 100 requests, if it is for requests alone.

        at_rate: the load with a mean rate, in requests per second.
        """
        rate, kept, broken = 1.0, 0.0, 2 * RATE_MAX
        while broken > NEAR * max(kept, RATE_MIN):
            if self.keeps(self.answer(at_rate(rate))):
                kept = rate
            else:
                broken = rate
            rate = min(2 * rate, math.sqrt(max(kept, RATE_MIN / 2) * broken))
        return kept

    def keeps(self, found: Served | None) -> bool:
        """Say whether each objective is kept for 99 of 100 requests; it is where there was none."""
        return found is None or min(found.ttft_attained, found.tpot_attained) >= KEPT_MIN

    def alone(self, load: Sequence[Arrival]) -> Served | None:
        """Answer requests of a load one after another, none beside another."""
        chosen = load[:: len(load) // ALONE_COUNT + 1]
        apart = [replace(each, at_s=index * ALONE_S) for index, each in enumerate(chosen)]
        return self.answer(apart, to_end=True)

    def answer(self, load: Sequence[Arrival], *, to_end: bool = False) -> Served | None:
        """Answer a load, to its end or until the objectives cannot be kept any more; None: it has no request."""
        events, serving = Events(), ServingSide(self.cost, self.kv_tokens)
        options = EngineOptions(
            name="alone", cost=self.cost, slot_count=1, kv_tokens=1, turn_tokens_max=1, chunk_tokens=1
        )
        engine = Engine(options, events, Books(), serving=serving, on_end=_nothing, on_back=_nothing)
        late_max = int(len(load) * (1 - KEPT_MIN))

        def is_broken() -> bool:
            waiting, first_s = serving.waiting, events.now_s - self.slo.ttft_ms / 1000
            return not to_end and len(waiting) > late_max and waiting[late_max].at_s < first_s

        for each in load:
            events.at(each.at_s, engine.arrive, each.prompt_tokens, each.completion_tokens)
        events.run(is_broken, math.inf)
        return served(serving.requests, self.slo, events.now_s)


def _nothing(*_: object) -> None:
    """Take no turn back: there is none."""

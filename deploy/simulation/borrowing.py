"""Who else lends: PEARL's elastic rule, and spot instances. Both have whole GPUs.

- `Elastic` (PEARL, arXiv 2609.35158): an instance is borrowed where it shortens the rest of a step by more than it
  costs to fetch it and give it back, by a margin; the rest of a step is the longest trajectory alone, or all work at
  the speed of all instances. It is freed of requests first, and given back when the rollouts end, or serving needs
  it. As far as we read it; costs are those that it states.
- `Spot` (as RLBoost, arXiv 2510.19225): further GPUs come and go with a recorded trace of spot instances, and are cold
  when they come. Turns of one that goes keep their tokens. Nothing is borrowed from serving.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from importlib.resources import files

from .cluster import Cluster
from .lending import ONE, Nobody
from .machine.bound import alone_s, work_s
from .machine.engine import Engine

LOOK_S = 5.0
BORROW_S, RETURN_S = 6.1, 4.4  # what PEARL states that a move costs
MARGIN = 1.2  # of a move's cost, that it must gain
LOAD_MAX_FRACTION = 0.7  # of what an instance can serve, for those that go on serving
NOTHING_MORE = 10**6  # requests that serving's router counts where it should send none
COLD_S = 67.4  # until a spot instance makes tokens, for an 8B model
SPOT = "spot.csv"


class Elastic(Nobody):
    """See the module."""

    def start(self, cluster: Cluster) -> None:
        """Begin to look."""
        self._cluster, self._is_rolling = cluster, False
        self._borrowed: dict[str, Engine] = {}
        cluster.events.after(LOOK_S, self._look)

    def rollouts(self, begins: bool) -> None:
        """Borrow for a step, and give back after it."""
        self._is_rolling = begins
        if begins:
            self._borrow_more()
        else:
            self._give_back(len(self._borrowed))

    def came_back(self, engine: Engine) -> None:
        """Lend it again if it is still borrowed."""
        if engine.name in self._borrowed and not engine.is_leased:
            self._cluster.lease(engine)

    def _look(self) -> None:
        self._cluster.events.after(LOOK_S, self._look)
        self._give_back(len(self._borrowed) - self._room())
        if self._is_rolling:
            self._borrow_more()

    def _room(self) -> int:
        """Count the instances that serving does not need, by what its instances say of their load."""
        cluster, load = self._cluster, 0.0
        for engine in cluster.lendable:
            assert engine.guard is not None
            if not engine.turn_count:
                engine.guard.look(cluster.events.now_s, ONE, is_idle=True)
            load += engine.guard.view(cluster.events.now_s).load_fraction or 0.0
        carriers = max(1, math.ceil(load / LOAD_MAX_FRACTION))
        return max(0, min(len(cluster.offered), len(cluster.lendable) - carriers))

    def _borrow_more(self) -> None:
        room = self._room()
        while len(self._borrowed) < room and self._gain_s() > MARGIN * (BORROW_S + RETURN_S):
            free = [engine for engine in self._cluster.offered if engine.name not in self._borrowed]
            engine = min(free, key=lambda each: each.serving.load if each.serving else 0)
            self._borrowed[engine.name] = engine
            self._advise()
            self._cluster.events.after(BORROW_S, self._fetched, engine)

    def _gain_s(self) -> float:
        """Compute by how much one more instance shortens the rest of the step."""
        cluster = self._cluster
        count = len(cluster.dedicated) + len(self._borrowed)
        return self._rest_s(count) - self._rest_s(count + 1)

    def _rest_s(self, count: int) -> float:
        """Compute the rest of a step on so many instances; lengths are as drawn, which favours this arm."""
        setup, alone, all_s = self._cluster.setup, 0.0, 0.0
        for batch in self._cluster.batches:
            for each in batch.open.values():
                left = 1.0 - each.index / len(each.plan.turns)
                alone = max(alone, left * alone_s(each.plan, setup.rollout.cost))
                all_s += left * work_s(each.plan, setup.rollout.cost, setup.slot_count)
        return max(alone, all_s / count)

    def _fetched(self, engine: Engine) -> None:
        """Lend it, once the requests that it had are answered."""
        if engine.name not in self._borrowed or engine.is_leased:
            return
        if engine.serving is not None and engine.serving.load:
            self._cluster.events.after(1.0, self._fetched, engine)
        else:
            self._cluster.lease(engine, is_awake=True)

    def _give_back(self, count: int) -> None:
        for name in list(self._borrowed)[: max(0, count)]:
            engine = self._borrowed.pop(name)
            if engine.is_leased:
                self._cluster.revoke(engine)
            self._cluster.events.after(RETURN_S, self._advise)

    def _advise(self) -> None:
        self._cluster.advise(dict.fromkeys(self._borrowed, NOTHING_MORE))


@cache
def spot_counts() -> tuple[tuple[float, float], ...]:
    """Read the trace: when, in s, and which part of the most there ever was is there from then on."""
    lines = files("rollfab.deploy.simulation.data").joinpath(SPOT).read_text("utf-8").splitlines()
    rows = [(float(row["t_s"]), float(row["count"])) for row in csv.DictReader(lines)]
    most = max(count for _, count in rows)
    return tuple((at_s, count / most) for at_s, count in rows)


class Spot(Nobody):
    """See the module."""

    def start(self, cluster: Cluster) -> None:
        """Follow the trace, from a place in it that the seed gives."""
        self._cluster = cluster
        self._there: list[Engine] = []
        counts = spot_counts()
        span_s = counts[-1][0]
        first_s = (cluster.setup.seed * 7919.0) % span_s
        before = [part for at_s, part in counts if at_s <= first_s]
        self._become(before[-1])
        for round_s in (0.0, span_s):
            for at_s, part in counts:
                if at_s + round_s > first_s:
                    cluster.events.at(at_s + round_s - first_s, self._become, part)

    def came_back(self, engine: Engine) -> None:
        """Lend it again if it is still there."""
        if engine in self._there and not engine.is_leased:
            self._cluster.lease(engine)

    def _become(self, part: float) -> None:
        cluster = self._cluster
        wanted = cluster.offered[: round(part * len(cluster.offered))]
        for engine in [each for each in self._there if each not in wanted]:
            self._there.remove(engine)
            cluster.revoke(engine)
        for engine in [each for each in wanted if each not in self._there]:
            self._there.append(engine)
            cluster.events.after(COLD_S, self._warm, engine)

    def _warm(self, engine: Engine) -> None:
        if engine in self._there and not engine.is_leased:
            self._cluster.lease(engine, is_awake=True)

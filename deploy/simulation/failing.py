"""Workers that die and come back: when, drawn from the seed; what becomes of their work, the cluster knows.

- A worker lives for an exponential time. Each has dice of its own, so a seed's deaths are as many in every arm that has
  as many workers, and as early.
- Only rollout workers die, the lent ones too; serving beside them, agents, the broker and the controller do not.
"""

from __future__ import annotations

from random import Random

from .cluster import FORGET_S, ROUND_S, Cluster
from .lending import Lender
from .machine.engine import Engine
from .scenario import FailuresPart


class Failures:
    """Kills the workers of a cluster, and brings them back."""

    def __init__(self, cluster: Cluster, lender: Lender, part: FailuresPart) -> None:
        self._cluster, self._lender, self._part = cluster, lender, part
        self._dice = {each.name: Random(f"{cluster.setup.seed} {each.name}") for each in cluster.engines}
        self._lives: dict[str, int] = {}

    def start(self) -> None:
        """Begin, if workers fail at all."""
        if self._part.hours_between:
            self._save()
            for engine in self._cluster.engines:
                self._live(engine)

    def _save(self) -> None:
        self._cluster.save()
        self._cluster.events.after(ROUND_S, self._save)

    def _live(self, engine: Engine) -> None:
        self._lives[engine.name] = self._lives.get(engine.name, 0) + 1
        life_s = self._dice[engine.name].expovariate(1 / (3600 * self._part.hours_between))
        self._cluster.events.after(life_s, self._die, engine)

    def _die(self, engine: Engine) -> None:
        self._cluster.kill(engine)
        self._cluster.events.after(FORGET_S, self._forget, engine, self._lives[engine.name])
        self._cluster.events.after(self._part.back_s, self._come_back, engine)

    def _forget(self, engine: Engine, life: int) -> None:
        if engine.name in self._cluster.dead and self._lives[engine.name] == life:
            self._cluster.forget(engine)

    def _come_back(self, engine: Engine) -> None:
        self._cluster.revive(engine)
        self._lender.came_back(engine)
        self._live(engine)

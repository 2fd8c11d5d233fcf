"""Who dies and comes back: when, drawn from the seed; what becomes of their work, the cluster knows.

- Each lives for an exponential time, and has dice of its own: a seed's deaths are as many in every arm that has as many
  of them, and as early.
- Rollout workers die, the lent ones too, while serving beside them goes on; agents; the controller; and the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ...workers.controller.controller import ControllerConfig
from .cluster import FORGET_S, ROUND_S, Cluster
from .lending import Lender
from .machine.engine import Engine
from .scenario import FailuresPart

LEAD_S = ControllerConfig.lead_ms / 1000  # nobody leads sooner after a leader's death
AGAIN_S = 1.0  # between two tries of who cannot start alone


@dataclass(frozen=True, kw_only=True)
class Mortal:
    """Somebody who dies. may_start: whether what it needs to start is there."""

    name: str
    hours: float
    die: Callable[[], None]
    come_back: Callable[[], None]
    may_start: Callable[[], bool]
    back_s: float


class Failures:
    """Kills who is in a cluster, and brings them back."""

    def __init__(self, cluster: Cluster, lender: Lender, part: FailuresPart) -> None:
        self._cluster, self._lender, self._part = cluster, lender, part
        self._lives: dict[str, int] = {}
        self._is_led = True

    def start(self) -> None:
        """Begin, if anybody fails at all."""
        everybody = [each for each in self._everybody() if each.hours]
        if everybody:
            self._save()
        for each in everybody:
            self._live(each, Random(f"{self._cluster.setup.seed} {each.name}"))

    def _everybody(self) -> list[Mortal]:
        part, cluster = self._part, self._cluster
        broker, agents = cluster.broker, range(cluster.setup.agents)
        return [
            *(self._worker(each) for each in cluster.engines),
            *(self._agent(index) for index in agents),
            Mortal(
                name="controller",
                hours=part.controller_hours_between,
                die=self._lose_controller,
                come_back=self._lead,
                may_start=lambda: not broker.is_away,
                back_s=max(part.back_s, LEAD_S),
            ),
            Mortal(
                name="broker",
                hours=part.broker_hours_between,
                die=self._lose_broker,
                come_back=self._reconnect,
                may_start=lambda: True,
                back_s=part.back_s,
            ),
        ]

    def _save(self) -> None:
        self._cluster.save()
        self._cluster.events.after(ROUND_S, self._save)

    def _live(self, each: Mortal, dice: Random) -> None:
        self._lives[each.name] = self._lives.get(each.name, 0) + 1
        self._cluster.events.after(dice.expovariate(1 / (3600 * each.hours)), self._die, each, dice)

    def _die(self, each: Mortal, dice: Random) -> None:
        self._cluster.books.death_count += 1
        each.die()
        self._cluster.events.after(each.back_s, self._come_back, each, dice)

    def _come_back(self, each: Mortal, dice: Random) -> None:
        if each.may_start():
            each.come_back()
            self._live(each, dice)
        else:
            self._cluster.events.after(AGAIN_S, self._come_back, each, dice)

    # ---- workers: without a controller none is forgotten, and none gets a lease

    def _worker(self, engine: Engine) -> Mortal:
        return Mortal(
            name=engine.name,
            hours=self._part.hours_between,
            die=lambda: self._lose_worker(engine),
            come_back=lambda: self._revive(engine),
            may_start=lambda: self._is_led and not self._cluster.broker.is_away,
            back_s=self._part.back_s,
        )

    def _lose_worker(self, engine: Engine) -> None:
        self._cluster.kill(engine)
        self._cluster.events.after(FORGET_S, self._forget, engine, self._lives[engine.name])

    def _forget(self, engine: Engine, life: int) -> None:
        if engine.name not in self._cluster.dead or self._lives[engine.name] != life:
            return
        if self._is_led and not self._cluster.broker.is_away:
            self._cluster.forget(engine)
        else:
            self._cluster.events.after(AGAIN_S, self._forget, engine, life)

    def _revive(self, engine: Engine) -> None:
        self._cluster.revive(engine)
        self._lender.came_back(engine)

    # ---- agents, of all runs

    def _agent(self, index: int) -> Mortal:
        def die() -> None:
            for run in self._cluster.beside:
                run.kill_agent(index)

        def come_back() -> None:
            for run in self._cluster.beside:
                run.agents.revive(index)

        return Mortal(
            name=f"agent-{index}",
            hours=self._part.agent_hours_between,
            die=die,
            come_back=come_back,
            may_start=lambda: not self._cluster.broker.is_away,
            back_s=self._part.back_s,
        )

    # ---- the controller and the broker

    def _lose_controller(self) -> None:
        self._is_led = False
        self._lender.fell_silent()

    def _lead(self) -> None:
        self._is_led = True
        self._lender.spoke_again(is_new=True)

    def _lose_broker(self) -> None:
        self._cluster.broker.go()
        self._lender.fell_silent()

    def _reconnect(self) -> None:
        self._cluster.reconnect()
        self._lender.spoke_again(is_new=False)

"""The agents of a run: who has which trajectories under way, and what becomes of those of one that dies.

- Each agent has as many places as the next, to within one. A trajectory goes to the agent with the most free ones.
- Nobody hears that an agent has died: its claims end CLAIM_S after they were renewed last, and other agents take what
  it had, before what is new. Its environments begin again and replay what they did; no turn is made a second time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from ....fabric.queue.trajectories import CLAIM_MS
from ....workers.agent.run import AgentConfig
from .broker import Broker
from .events import Events
from .turns import Trajectory

CLAIM_S, RENEW_S, REAP_S = CLAIM_MS / 1000, AgentConfig.renew_s, AgentConfig.reap_s


class Agents:
    """Gives places to trajectories. begin: is called with each that has got one, at first or again."""

    def __init__(
        self, events: Events, broker: Broker, count: int, place_count: int, begin: Callable[[Trajectory], None]
    ) -> None:
        self._events, self._broker, self._begin = events, broker, begin
        self.place_count = place_count
        self._held: list[dict[int, Trajectory]] = [{} for _ in range(count)]
        self._dead: set[int] = set()
        self._queued: deque[Trajectory] = deque()
        self._again: deque[Trajectory] = deque()  # that somebody held before
        self._lost: set[int] = set()  # trajectories whose claims have not ended yet

    @property
    def claimed_count(self) -> int:
        """Count the trajectories under way, those of the dead too until their claims end."""
        return sum(map(len, self._held)) + len(self._lost)

    @property
    def are_dead(self) -> bool:
        """True if nobody is there who would take back what others lost."""
        return len(self._dead) == len(self._held)

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Let new trajectories wait for a place."""
        self._queued += trajectories
        self.claim()

    def claim(self) -> None:
        """Let agents take trajectories, as long as they have places."""
        while (self._again or self._queued) and not self._broker.is_away:
            agent = self._freest()
            if agent is None:
                return
            trajectory = (self._again or self._queued).popleft()
            if not trajectory.is_over:
                trajectory.agent = agent
                self._held[agent][trajectory.number] = trajectory
                self._begin(trajectory)

    def _freest(self) -> int | None:
        """Find the living agent with the most free places; None: all are taken."""
        count = len(self._held)
        places = [self.place_count // count + (index < self.place_count % count) for index in range(count)]
        living = [index for index in range(count) if index not in self._dead]
        agent = max(living, key=lambda index: places[index] - len(self._held[index]), default=None)
        return agent if agent is not None and places[agent] > len(self._held[agent]) else None

    def release(self, trajectory: Trajectory) -> None:
        """End a trajectory, wherever it is."""
        if trajectory.agent is not None:
            del self._held[trajectory.agent][trajectory.number]
        self._lost.discard(trajectory.number)
        trajectory.is_over, trajectory.agent = True, None

    # ---- agents that die

    def kill(self, agent: int) -> list[Trajectory]:
        """End an agent without a word, and with it what its environments are about; return what it had."""
        self._dead.add(agent)
        renewed_s = RENEW_S * math.floor(self._events.now_s / RENEW_S)
        reaped_s = REAP_S * math.ceil((renewed_s + CLAIM_S) / REAP_S)
        held, self._held[agent] = list(self._held[agent].values()), {}
        for trajectory in held:
            trajectory.agent, trajectory.is_followed = None, False
            trajectory.fence += 1
        self._lost.update(trajectory.number for trajectory in held)
        self._events.at(reaped_s, self._reap, held, self._broker.silent_s)
        return held

    def _reap(self, held: list[Trajectory], silent_s: float) -> None:
        """Let others take what a dead agent held; silent_s: of the broker, when its claims had so long to go."""
        left_s = self._broker.silent_s - silent_s
        if self._broker.is_away or self.are_dead or left_s > 0.0:
            silent_s = silent_s if self._broker.is_away else self._broker.silent_s
            self._events.after(max(REAP_S, left_s), self._reap, held, silent_s)
            return
        for trajectory in held:
            if not trajectory.is_over:
                self._lost.discard(trajectory.number)
                self._again.append(trajectory)
        self.claim()

    def revive(self, agent: int) -> None:
        """Start an agent anew: it knows nothing, and takes what waits."""
        self._dead.remove(agent)
        self.claim()

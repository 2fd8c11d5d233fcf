"""Which turn is next, and on which instance: rules of others, after what they published.

- `Affine`: ROSE's router: by urgency, where the context is, else a dedicated instance, else where most room is.
- `ByLength`: Heddle's order of trajectories (arXiv 2603.28101): what is expected to take longest goes first, and takes
  the place of what is expected to end soonest; it goes to the instance with the least work before it. Our reading of
  "progressive priority", "preemptive", and of a placement that divides work evenly; a forecast of the run's own history
  stands for its trained one, and instances are all alike: it has some of more GPUs for the longest.
- `Levels`: Libra's feedback queue (arXiv 2606.03077): a tool that returns without an end is a sign of a long
  trajectory, which then moves to a bucket of instances that hold half as many. Our reading: a quarter of the instances,
  and the median of turns in the run so far.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence

from .engine import Engine
from .turns import Trajectory, Turn

REFILL_TOKENS = 256  # to compute again: less than that is no reason to be elsewhere
EVICT_FACTOR = 2.0  # what waits takes a place of what has less than this part of its work left
LONG_PART, LONG_SLOTS = 0.25, 0.5  # of the instances, for long trajectories; of their slots, that are used
SEEN_COUNT_MIN = 16  # trajectories that must have ended before their lengths tell anything


class Router:
    """Says who waits before whom, and who takes what. It hears of turns that begin and leave, and of what is done."""

    def rank(self, turn: Turn, urgency: int) -> float:
        """Return the place in the queue: the lowest is first, then first come, first served."""
        return urgency

    def choose(self, turn: Turn, engines: Sequence[Engine]) -> Engine | None:
        """Choose the instance for the first turn of the queue; None: it waits."""
        raise NotImplementedError

    def begun(self, turn: Turn, engine: Engine) -> None:
        """Hear that a turn has begun."""

    def left(self, turn: Turn, engine: Engine) -> None:
        """Hear that a turn has left its instance."""

    def completed(self, trajectory: Trajectory) -> None:
        """Hear that a trajectory is complete."""


def home_of(turn: Turn, free: Sequence[Engine]) -> Engine | None:
    """Return the instance that has a turn's context, if it is free."""
    return next((e for e in free if e.name == turn.home and e.cached(turn.key[0]) > REFILL_TOKENS), None)


def fullness(engine: Engine) -> tuple[float, int]:
    """Order instances by how full they are, then by who was free for longest."""
    return engine.turn_count / engine.slot_count, engine.free_since


class Affine(Router):
    """See the module."""

    def choose(self, turn: Turn, engines: Sequence[Engine]) -> Engine | None:
        """Choose its home, else a dedicated instance, else where most room is."""
        free = [engine for engine in engines if engine.can_take(turn)]
        return home_of(turn, free) or min(
            free, key=lambda each: (each.serving is not None, fullness(each)), default=None
        )


class Forecast:
    """What a trajectory has still to make, by the turns of those that ended and by the tokens of its own group's."""

    def __init__(self) -> None:
        self._counts: list[int] = []  # of turns, in order
        self._made: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # by group: tokens and turns that are over
        self._all = [0, 0]

    def note(self, trajectory: Trajectory) -> None:
        """Learn from a trajectory that is complete."""
        insort(self._counts, len(trajectory.plan.turns))
        for sums in (self._made[id(trajectory.group)], self._all):
            sums[0] += trajectory.plan.output_tokens
            sums[1] += len(trajectory.plan.turns)

    def median(self) -> float:
        """Return the median of turns; infinite while too few have ended."""
        return self._counts[len(self._counts) // 2] if len(self._counts) >= SEEN_COUNT_MIN else math.inf

    def rest(self, trajectory: Trajectory) -> float:
        """Expect how many tokens are left of a trajectory, the turn that it is in included."""
        done = trajectory.index
        longer = self._counts[bisect_right(self._counts, done) :]
        turns = sum(longer) / len(longer) - done if longer else 1.0 + done
        made = sum(turn.output_tokens for turn in trajectory.plan.turns[:done])
        tokens, count = self._made.get(id(trajectory.group)) or self._all
        usual = tokens / count if count else 1.0
        return turns * (made + usual) / (done + 1)


class ByLength(Router):
    """See the module."""

    def __init__(self) -> None:
        self._forecast = Forecast()
        self._rest: dict[tuple[int, int], float] = {}  # of turns that run
        self._work: dict[str, float] = defaultdict(float)  # before each instance
        self._evicting: set[tuple[int, int]] = set()  # turns for which another one is leaving

    def rank(self, turn: Turn, urgency: int) -> float:
        """Return the expected rest: the longest first."""
        return -self._forecast.rest(turn.trajectory)

    def choose(self, turn: Turn, engines: Sequence[Engine]) -> Engine | None:
        """Choose its home, else the instance with the least work before it."""
        free = [engine for engine in engines if engine.can_take(turn)]
        if not free:
            self._evict(turn, engines)
            return None
        return home_of(turn, free) or min(free, key=lambda each: (self._work[each.name], each.free_since))

    def _evict(self, turn: Turn, engines: Sequence[Engine]) -> None:
        if turn.key in self._evicting:
            return
        running = [
            (self._rest[each.key], each) for engine in engines for each in engine.turns() if each.key in self._rest
        ]
        rest, least = min(running, key=lambda pair: pair[0], default=(math.inf, None))
        if least is not None and rest * EVICT_FACTOR < -self.rank(turn, 0):
            self._evicting.add(turn.key)
            engine = next(each for each in engines if each.name == least.engine)
            engine.take_back([least], keeps_tokens=True)

    def begun(self, turn: Turn, engine: Engine) -> None:
        """Count its expected rest."""
        self._evicting.discard(turn.key)
        self._rest[turn.key] = self._forecast.rest(turn.trajectory)
        self._work[engine.name] += self._rest[turn.key]

    def left(self, turn: Turn, engine: Engine) -> None:
        """Forget it."""
        self._work[engine.name] -= self._rest.pop(turn.key, 0.0)

    def completed(self, trajectory: Trajectory) -> None:
        """Learn from its length."""
        self._forecast.note(trajectory)


class Levels(Router):
    """See the module."""

    def __init__(self) -> None:
        self._forecast = Forecast()

    def choose(self, turn: Turn, engines: Sequence[Engine]) -> Engine | None:
        """Choose within its bucket, its home first; else in the other one."""
        long_count = int(LONG_PART * len(engines))
        free = [engine for engine in engines if engine.can_take(turn)]
        buckets: tuple[list[Engine], list[Engine]] = ([], [])
        for engine in free:
            is_long = engine in engines[:long_count]
            if not is_long or engine.turn_count < LONG_SLOTS * engine.slot_count:
                buckets[is_long].append(engine)
        own = buckets[turn.trajectory.index > self._forecast.median()]
        other = buckets[1] if own is buckets[0] else buckets[0]
        return home_of(turn, own) or min(own or other, key=fullness, default=None)

    def completed(self, trajectory: Trajectory) -> None:
        """Learn from its length."""
        self._forecast.note(trajectory)

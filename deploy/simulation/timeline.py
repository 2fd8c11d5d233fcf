"""What happened when in one simulated run: samples of all instances, and serving's latencies by minute."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..replay.figures import percentile
from .cluster import Cluster
from .machine.serving import Request, latencies_ms

SAMPLE_S = 5.0
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One sample. own_s, lent_s, serving_s: GPU seconds until now, over all instances of a kind.

    leased: which lendable instances are lent, in their order. queued, running: trajectories.
    """

    at_s: float
    own_s: float
    lent_s: float
    serving_s: float
    leased: tuple[bool, ...]
    queued: int
    running: int


@dataclass
class Timeline:
    """Looks at a cluster every SAMPLE_S of its time, which changes nothing in it."""

    moments: list[Moment] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def watch(self, cluster: Cluster) -> None:
        """Look now, and again and again."""
        queued, running = (sum(column) for column in zip(*(each.counts() for each in cluster.beside), strict=True))
        shared = [each.used_s() for each in cluster.lendable]
        self.moments.append(
            Moment(
                at_s=cluster.events.now_s,
                own_s=sum(each.used_s()[0] for each in cluster.dedicated),
                lent_s=sum(rollout_s for rollout_s, _ in shared),
                serving_s=sum(serving_s for _, serving_s in shared),
                leased=tuple(each.is_leased for each in cluster.lendable),
                queued=queued,
                running=running,
            )
        )
        cluster.events.after(SAMPLE_S, self.watch, cluster)

    def end(self, cluster: Cluster) -> None:
        """Keep what serving's users saw; called once serving was drained, after which nothing is looked at."""
        self.requests = cluster.requests()


def by_minute(requests: list[Request], ended_s: float) -> list[tuple[float, float, float]]:
    """Return the minutes in which requests came: when, in s, and the P99 of their TTFT and TPOT, in ms."""
    minutes: dict[int, list[Request]] = {}
    for each in requests:
        minutes.setdefault(int(each.at_s / MINUTE_S), []).append(each)
    found = []
    for minute, those in sorted(minutes.items()):
        ttfts, tpots = latencies_ms(those, ended_s)
        finite = [each for each in tpots if math.isfinite(each)]
        found.append((MINUTE_S * minute, percentile(ttfts, 0.99), percentile(finite, 0.99) if finite else 0.0))
    return found

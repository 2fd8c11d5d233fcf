"""Advises serving's router which workers to spare: a pure function of the plan's facts.

A GPU that serves even a few requests is inside a step nearly all of the time, so rollouts beside them get half of it.
The same requests on fewer GPUs cost their users little, and the GPUs that serve nothing roll out at full speed.

- The advice is a number for each spared worker: the router counts so many requests more than the worker has. It gets
  nothing while the others have their usual requests, and its share as soon as they have more: a burst reaches it at
  once, without a word from here. So advice that is old, or wrong, moves so many requests and no more.
- In a pool so many workers carry the load that none has more than `load_max_fraction` of what it can serve. More are
  spared only if the others could then still take the last minute's peak. A worker that is no longer spared comes back
  over `return_s`: a router that sends to whoever has the fewest requests would else send it all that arrives.
- A worker is spared only where that is of use: it is lent, and a run of its model had work of late. A worker whose
  load is not known is left out of account.
- A spared worker keeps its guard, and serves what comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .capacity_facts import RunFacts, WorkerFacts, is_same_model


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRule:
    """Bounds of the advice. Loads are fractions of what a device can serve in time, or of its KV cache."""

    load_max_fraction: float = 0.75  # of a worker that carries: room for a long prompt that nobody expects
    load_spare_fraction: float = 0.65  # of a worker that carries, after others were spared
    smooth_s: float = 2.0  # over which a pool's load is smoothed: single seconds scatter
    peak_s: float = 60.0  # in which a peak is forgotten: workers that return for a peak stay for the next
    usual_s: float = 10.0  # over which requests are counted as usual
    follow_fraction: float = 0.25  # of a carrier's requests: a spared worker has fewer, if the router follows
    return_s: float = 10.0  # in which a worker comes back
    remember_s: float = 300.0  # after a run's last work: its next step will come


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The advice to a pool's router.

    extra: how many requests more to count, by worker. spared: the workers that should get nothing; the others in
    `extra` come back. is_followed: as far as can be seen. load and peak (in workers), requests, and strays (requests of
    spared workers) are the pool's, smoothed, as of at_s.
    """

    extra: Mapping[str, float] = field(default_factory=dict)
    spared: tuple[str, ...] = ()
    is_followed: bool = False
    at_s: float = -math.inf
    load: float = 0.0
    peak: float = 0.0
    requests: float = 0.0
    strays: float = 0.0


def advise(
    workers: Sequence[WorkerFacts],
    runs: Sequence[RunFacts],
    before: Mapping[str, Advice],
    now_s: float,
    rule: AdviceRule,
) -> dict[str, Advice]:
    """Advise the router of each pool.

    Args:
        workers, runs: the facts of the plan. Dedicated workers serve nothing; of those without a pool nobody knows
            whether they serve the same.
        before: what this returned last.
    """
    pools: dict[str, list[WorkerFacts]] = {}
    for each in workers:
        if each.lend is not None and each.pool:
            pools.setdefault(each.pool, []).append(each)
    live = [run for run in runs if run.has_weights and (run.open_count or run.idle_s < rule.remember_s)]
    return {pool: _advise(members, live, before.get(pool, Advice()), now_s, rule) for pool, members in pools.items()}


def extra_requests(advice: Mapping[str, Advice]) -> dict[str, int]:
    """Return how many requests more the routers of all pools should count, by worker, in the order of their names."""
    return dict(sorted((name, math.ceil(extra)) for each in advice.values() for name, extra in each.extra.items()))


def followed(workers: Sequence[WorkerFacts], advice: Mapping[str, Advice]) -> list[WorkerFacts]:
    """Return the facts with who is spared and who serves instead, in pools whose router follows."""
    told = [each for each in advice.values() if each.is_followed]
    spared = {name for each in told for name in each.spared}
    returning = {name for each in told for name in each.extra} - spared
    pools = {pool for pool, each in advice.items() if each.is_followed}
    return [
        replace(each, is_spared=each.worker_id in spared)
        if each.lend is not None and each.pool in pools and each.worker_id not in returning
        else each
        for each in workers
    ]


def _advise(
    members: Sequence[WorkerFacts], runs: Sequence[RunFacts], before: Advice, now_s: float, rule: AdviceRule
) -> Advice:
    known = {each.worker_id: each for each in members if None not in (each.load_fraction, each.request_count)}
    passed_s = now_s - before.at_s
    load = _smooth(before.load, sum(each.load_fraction or 0.0 for each in known.values()), passed_s / rule.smooth_s)
    peak = max(load, before.peak * math.exp(-passed_s / rule.peak_s))
    counts = {name: each.request_count or 0 for name, each in known.items()}
    requests = _smooth(before.requests, sum(counts.values()), passed_s / rule.usual_s)
    strays = _smooth(before.strays, sum(counts.get(name, 0) for name in before.spared), passed_s / rule.usual_s)
    models = {(each.model, each.model_digest) for each in known.values()}
    used = {key for key in models if any(is_same_model(*key, run.model, run.model_digest) for run in runs)}
    free = {name: each for name, each in known.items() if each.lend and (each.model, each.model_digest) in used}
    spared = [name for name in before.spared if name in free][: _left(len(known), load / rule.load_max_fraction)]
    more = max(0, _left(len(known), peak / rule.load_spare_fraction) - len(spared))
    new = sorted(set(free) - set(spared), key=lambda name: _order(free[name]))[:more]
    spared += new
    strays += len(new) * requests / max(1, len(known))  # until the router is seen to follow
    carriers = max(1, len(known) - len(spared))
    usual = requests / carriers
    level = usual + 2 * math.sqrt(usual) + 1  # requests that arrive by chance scatter by the root of their number
    back = {name: min(extra, level) - level * passed_s / rule.return_s for name, extra in before.extra.items()}
    follow_fraction = rule.follow_fraction * (2 if before.is_followed else 1)
    return Advice(
        extra={name: extra for name, extra in back.items() if name in known and extra > 0}
        | dict.fromkeys(spared, level),
        spared=tuple(spared),
        is_followed=strays * carriers < follow_fraction * (requests - strays) * len(spared),
        at_s=now_s,
        load=load,
        peak=peak,
        requests=requests,
        strays=strays,
    )


def _order(worker: WorkerFacts) -> tuple[bool, float, str]:
    """Order the workers that may be spared: lent ones first, then those with little to hand over."""
    return not worker.is_lent, worker.load_fraction or 0.0, worker.worker_id


def _left(count: int, carriers: float) -> int:
    """Count the workers that are left where so many carry the load; one carries it in any case."""
    return max(0, count - max(1, math.ceil(carriers)))


def _smooth(before: float, now: float, times: float) -> float:
    """Smooth exponentially. times: how often the smoothing time has passed since."""
    return now + (before - now) * math.exp(-times)

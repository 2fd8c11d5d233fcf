"""The histograms of runs as metric families: how long things take, by run and role.

A bucket's exemplar is the latest duration in it, with its trajectory's id as the trace id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import Exemplar, HistogramMetricFamily, Metric

from ...fabric.rules.queue.timings import BOUNDS_S, TIMINGS, Histogram, Histograms

BOUNDS = (*map(str, BOUNDS_S), "+Inf")


def histogram_metrics(runs: Mapping[str, Histograms]) -> Iterator[Metric]:
    """Yield a family for everything that is timed; a role that has timed nothing has no series."""
    for name, text in TIMINGS.items():
        family = HistogramMetricFamily(f"rollfab_{name}", text, labels=["run", "role"], unit="seconds")
        for run_id, histograms in sorted(runs.items()):
            for (timed, role), histogram in sorted(histograms.items(), key=lambda item: item[0]):
                if timed == name:
                    family.add_metric([run_id, role], _buckets(histogram), histogram.sum_s)
        yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    found: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    for place, (bound, count) in enumerate(zip(BOUNDS, accumulate(histogram.counts), strict=True)):
        if place in histogram.latest:
            wall_ms, seconds, trajectory_id = histogram.latest[place]
            found.append((bound, count, Exemplar({"trace_id": trajectory_id}, seconds, wall_ms / 1000)))
        else:
            found.append((bound, count))
    return found

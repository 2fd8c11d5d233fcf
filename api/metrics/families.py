"""Metric families by our convention: `rollfab_*`, in base units, with the unit that a name ends with."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

UNITS = ("seconds", "bytes", "tokens", "ratio")


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """Make a family of gauges with these labels."""
    return GaugeMetricFamily(f"rollfab_{name}", text, labels=labels, unit=_unit(name))


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """Make a family of counters; `_total` comes after the name."""
    return CounterMetricFamily(f"rollfab_{name}", text, labels=labels, unit=_unit(name))


def _unit(name: str) -> str:
    last = name.rpartition("_")[2]
    return last if last in UNITS else ""

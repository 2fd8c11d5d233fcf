"""Lending and its price as Prometheus metrics: of all serving workers together, so their number grows with nothing.

What workers report is since each of them started; sums are of those that live, and fall when one leaves: gauges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from ..schemas.answers import Status, WorkerView

MODES = ("on", "observe", "off")
GUARDS = ("open", "narrow", "shut", "none")
SUMS = (
    ("violation_count", "shared_requests_violated", "Serving requests beside rollouts, beyond an objective."),
    ("token_count", "harvested_tokens", "Rollout tokens made on serving workers."),
    ("lent_s", "lent_seconds", "Time of serving workers under a lease."),
    ("computing_s", "shared_computing_seconds", "Time in which rollouts computed on serving workers."),
    ("could_lend_s", "observed_open_seconds", "Time that could have been lent by workers that only observe."),
)
TAXES = (("ttft_tax_p99_worst", "ttft"), ("tpot_tax_p99_worst", "tpot"))


def sharing_metrics(status: Status) -> Iterator[Metric]:
    """What serving teams allow, what guards do, and what it cost and gave."""
    live = [worker for worker in status.workers if worker.role == "serving" and worker.is_fresh]
    yield from _states(live)
    yield from _open(live)
    yield from _price(status)


def _states(live: list[WorkerView]) -> Iterator[Metric]:
    modes = Counter(worker.lend_terms.mode for worker in live if worker.lend_terms is not None)
    guards = Counter(worker.guard_state or "none" for worker in live)
    for name, text, known, counts in (
        ("lend_workers", "Live serving workers by what their team allows now.", MODES, modes),
        ("guard_workers", "Live serving workers by what their guard does now.", GUARDS, guards),
    ):
        family = GaugeMetricFamily(f"rollfab_{name}", text, labels=["state"])
        for each in known:
            family.add_metric([each], counts[each])
        yield family


def _open(live: list[WorkerView]) -> Iterator[Metric]:
    shares = [worker.open_fraction for worker in live if worker.open_fraction is not None]
    text = "Part of the last seconds in which guards let rollouts run."
    family = GaugeMetricFamily("rollfab_guard_open_ratio", text, labels=["kind"])
    if shares:
        family.add_metric(["min"], min(shares))
        family.add_metric(["mean"], sum(shares) / len(shares))
    yield family


def _price(status: Status) -> Iterator[Metric]:
    totals, text = status.sharing, "P99 latency of serving requests, of the worker where it is highest."
    for name in ("ttft", "tpot"):
        family = GaugeMetricFamily(f"rollfab_serving_{name}_seconds_p99_max", text, labels=["kind"])
        for kind, field in (("alone", "alone"), ("rollouts", "shared")):
            highest = getattr(totals, f"{name}_ms_p99_{field}_worst")
            if highest is not None:
                family.add_metric([kind], highest / 1000)
        yield family
    tax = GaugeMetricFamily("rollfab_serving_tax_p99_ratio_max", "Shared over alone, less one.", labels=["kind"])
    for field, name in TAXES:
        if (found := getattr(totals, field)) is not None:
            tax.add_metric([name], found)
    yield tax
    attained = GaugeMetricFamily("rollfab_serving_attained_ratio", "Requests within both objectives.", labels=["kind"])
    for kind, share in (("alone", totals.alone_attained_fraction), ("rollouts", totals.shared_attained_fraction)):
        if share is not None:
            attained.add_metric([kind], share)
    yield attained
    for field, name, what in SUMS:
        yield GaugeMetricFamily(f"rollfab_{name}", what, value=getattr(totals, field))

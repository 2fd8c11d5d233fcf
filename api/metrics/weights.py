"""Makes metric families of the weights of runs, and of those that each live worker holds.

These alone are labelled by worker: people ask of one worker whether it is behind, or paused for long. A silent worker
has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from ..reading.views import GENERATING
from ..schemas.answers import Status, WorkerView
from ..schemas.weights import WeightsView, WeightVersion
from .families import counter, gauge

WORKERS = (
    ("version", "active_version", 1.0, "Policy version that the worker generates with; -1 for none."),
    ("versions_behind", "versions_behind", 1.0, "Versions that the worker is behind the head of its run."),
    ("stage_seconds", "stage_ms", 1e-3, "What fetching and checking its weights took last, while it generated."),
    ("pause_seconds", "pause_ms", 1e-3, "What writing its weights took last, while it did not generate."),
    ("payload_bytes", "payload_bytes", 1.0, "Bytes fetched for the weights that it holds."),
)


def weight_metrics(status: Status) -> Iterator[Metric]:
    """Yield all metrics of weights in a status."""
    yield from _heads(status)
    yield from _sizes(status.weights)
    yield from _held(status.weights)
    yield from _workers([worker for worker in status.workers if worker.is_fresh and worker.role in GENERATING])


def _heads(status: Status) -> Iterator[Metric]:
    head = gauge("head_version", "Newest published policy version; -1 for none.", "run")
    active = gauge("active_version_min", "Oldest policy version that a live worker of the run generates with.", "run")
    for weights in status.weights:
        head.add_metric([weights.run_id], weights.head_version)
        found = [worker.version_of(weights.run_id) for worker in status.workers if _generates(worker, weights.run_id)]
        if found:
            active.add_metric([weights.run_id], min(found))
    yield from (head, active)


def _sizes(runs: list[WeightsView]) -> Iterator[Metric]:
    payload = gauge("head_payload_bytes", "Bytes that the newest version takes to fetch.", "run")
    dense = gauge("head_dense_bytes", "Bytes of the full weights.", "run")
    by_kind = gauge("weights_payload_bytes", "Payload of the newest version of a kind.", "run", "kind")
    density = gauge("weights_density_ratio", "Changed elements of all, in the newest delta.", "run")
    each = gauge("weights_bytes_per_changed", "Bytes for every changed element, in the newest delta.", "run")
    floor = gauge("weights_of_entropy_floor_ratio", "Entropy floor over the payload, newest delta's blocks.", "run")
    for weights in runs:
        newest = {version.kind: version for version in weights.newest_by_kind}
        for kind, version in sorted(newest.items()):
            by_kind.add_metric([weights.run_id, kind], version.payload_bytes)
        head = _head(weights)
        if head is not None:
            payload.add_metric([weights.run_id], head.payload_bytes)
            dense.add_metric([weights.run_id], head.dense_bytes)
        delta = newest.get("delta")
        for family, name in ((density, "density"), (each, "bytes_per_changed"), (floor, "of_entropy_floor")):
            value = getattr(delta, name, None)
            if value is not None:
                family.add_metric([weights.run_id], value)
    yield from (payload, dense, by_kind, density, each, floor)


def _held(runs: list[WeightsView]) -> Iterator[Metric]:
    held = gauge("weights_held_bytes", "Bytes of all versions that the broker holds.", "run")
    count = gauge("weights_manifests", "Manifests that the broker holds.", "run")
    holders = gauge("weights_holders", "Workers and relays that hold weights of the run.", "run")
    text = "Bytes of versions published, with keyframes and jumps, since this api began to look."
    published = counter("weights_published_bytes", text, "run")
    for weights in runs:
        if weights.held_bytes is not None:
            held.add_metric([weights.run_id], weights.held_bytes)
        count.add_metric([weights.run_id], weights.held_count)
        holders.add_metric([weights.run_id], weights.holder_count)
        published.add_metric([weights.run_id], weights.published_bytes)
    yield from (held, count, holders, published)


def _workers(live: list[WorkerView]) -> Iterator[Metric]:
    for name, field, unit, text in WORKERS:
        family = gauge(f"worker_weights_{name}", text, "run", "worker")
        for worker in live:
            value = getattr(worker, field)
            if worker.run_id is not None and value is not None:
                family.add_metric([worker.run_id, worker.worker_id], value * unit)
            for run_id, version in worker.guest_versions.items() if field == "active_version" else ():
                family.add_metric([run_id, worker.worker_id], version)
        yield family
    failed = gauge("worker_failed", "1 if the worker takes no turns because of an error.", "run", "worker")
    for worker in live:
        if worker.run_id is not None:
            failed.add_metric([worker.run_id, worker.worker_id], worker.error is not None)
    yield failed


def _head(weights: WeightsView) -> WeightVersion | None:
    """Return the version that the head names: as the kind that moved it, where that is shown."""
    found = [version for version in weights.versions if version.is_head]
    return next((version for version in found if version.kind == weights.kind), found[-1] if found else None)


def _generates(worker: WorkerView, run_id: str) -> bool:
    return worker.is_fresh and worker.role in GENERATING and run_id in (worker.run_id, *worker.guest_versions)

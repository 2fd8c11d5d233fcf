"""The status as Prometheus metrics, made at the scrape from one reading of the broker.

- Names are `rollfab_*` in base units; labels are run, role, state and kind alone, so the number of series grows with
  runs and roles, never with groups or trajectories; nor with workers, but for the weights below.
- A bucket's exemplar is the latest duration in it, with its trajectory's id as the trace id.
- Metrics of the weights that live workers hold alone are labelled by worker: people ask of one worker whether it is
  behind, or paused for long. A silent worker has none.
- Counters are the broker's: they survive a restart of the api; but for published bytes, which the api adds up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from ...fabric.rules.queue.retries import ever
from ...fabric.rules.queue.timings import BOUNDS_S, TIMINGS, Histogram, Histograms
from ..reading.views import GENERATING
from ..schemas.answers import LeaseView, RunView, Status, WorkerView
from ..schemas.weights import WeightsView, WeightVersion

PLAIN, OPENMETRICS = CONTENT_TYPE_PLAIN_0_0_4, openmetrics.CONTENT_TYPE_LATEST
WRITERS: Mapping[str, Callable[[CollectorRegistry], bytes]] = {
    PLAIN: generate_latest,
    OPENMETRICS: openmetrics.generate_latest,
}
BOUNDS = (*map(str, BOUNDS_S), "+Inf")
COUNTERS = (
    ("groups_submitted", "groups_submitted", "Groups taken in."),
    ("groups_completed", "groups_completed", "Groups whose trajectories have all ended."),
    ("groups_consumed", "groups_consumed", "Groups that a trainer acknowledged."),
    ("groups_cancelled", "groups_cancelled", "Groups that were cancelled."),
    ("trajectories_submitted", "trajectories_submitted", "Trajectories taken in."),
    ("trajectories_completed", "rollouts", "Trajectories completed and scored."),
    ("trajectories_failed", "trajectories_failed", "Trajectories that ended in the dead letters."),
    ("trajectories_cancelled", "trajectories_cancelled", "Trajectories not needed any more: quorum or deadline."),
    ("attempts_failed", "attempts_failed", "Attempts at a trajectory that failed."),
    ("reruns", "reruns", "Trajectories run again because their tokens were too stale."),
    ("turns_settled", "turns_settled", "Turns that were generated and handed in."),
    ("tokens", "generated_tokens", "Tokens of settled turns."),
    ("reaped", "claims_reaped", "Claims taken back from workers that fell silent."),
    ("released", "claims_released", "Claims given back by workers that left or were revoked."),
    ("stalled", "turns_stalled", "Turns given back because no token came."),
    ("refused", "writes_refused", "Writes refused because their claim had ended."),
)
WORKERS = (
    ("version", "active_version", 1.0, "Policy version that the worker generates with; -1 for none."),
    ("versions_behind", "versions_behind", 1.0, "Versions that the worker is behind the head of its run."),
    ("stage_seconds", "stage_ms", 1e-3, "What fetching and checking its weights took last, while it generated."),
    ("pause_seconds", "pause_ms", 1e-3, "What writing its weights took last, while it did not generate."),
    ("payload_bytes", "payload_bytes", 1.0, "Bytes fetched for the weights that it holds."),
)
UNITS = ("seconds", "bytes", "tokens", "ratio")


def render(status: Status | None, runs: Mapping[str, Histograms], kind: str) -> bytes:
    """Write metrics as text of a kind, PLAIN or OPENMETRICS; without a status, that the broker does not answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status, runs))
    return WRITERS[kind](registry)


class StatusCollector(Collector):
    """One status, and the histograms of runs, as metric families."""

    def __init__(self, status: Status | None, runs: Mapping[str, Histograms]) -> None:
        self._status = status
        self._runs = runs

    def collect(self) -> Iterable[Metric]:
        status = self._status
        yield _one("broker_up", "1 if the broker answered the api.", status is not None)
        if status is None:
            return
        yield _one("ready", "1 if nothing is missing for work to flow.", status.readiness.is_ready)
        yield from histogram_metrics(self._runs)
        yield from _run_gauges(status.runs)
        yield from _run_counters(status.runs)
        yield from _training(status.runs)
        yield from _agreement(status.runs)
        yield from weight_metrics(status)
        yield from _workers(status.workers)
        yield from _leases(status)
        yield from sharing_metrics(status)


def _run_gauges(runs: list[RunView]) -> Iterator[Metric]:
    trajectories = gauge("trajectories", "Unfinished trajectories.", "run", "state")
    turns = gauge("turns", "Unfinished turns.", "run", "state")
    depth = gauge("trajectories_open", "Trajectories submitted and not yet consumed.", "run")
    limit = gauge("trajectories_open_limit", "Above this many open trajectories a push is refused.", "run")
    memory = gauge("memory_bytes", "Jobs and rollouts that the broker holds.", "run")
    waiting = gauge("groups_waiting", "Complete groups that the trainer has not acknowledged.", "run")
    dead = gauge("dead_letters", "Trajectories in the dead letters.", "run")
    for run in runs:
        for family, counts in ((trajectories, run.trajectories), (turns, run.turns)):
            for state, count in counts.items():
                family.add_metric([run.run_id, state], count)
        depth.add_metric([run.run_id], run.depth)
        limit.add_metric([run.run_id], run.trajectory_count_max)
        memory.add_metric([run.run_id], run.memory_bytes)
        waiting.add_metric([run.run_id], run.groups_waiting)
        dead.add_metric([run.run_id], run.dead_count)
    yield from (trajectories, turns, depth, limit, memory, waiting, dead)


def _run_counters(runs: list[RunView]) -> Iterator[Metric]:
    for key, name, text in COUNTERS:
        family = counter(name, text, "run")
        for run in runs:
            family.add_metric([run.run_id], ever(run.counters, key))
        yield family


def _training(runs: list[RunView]) -> Iterator[Metric]:
    step = gauge("trainer_step", "Optimiser step that the trainer last reported.", "run")
    reward = gauge("trainer_reward_mean", "Mean reward that the trainer last reported.", "run")
    for run in runs:
        if run.training is not None and run.training.step is not None:
            step.add_metric([run.run_id], run.training.step)
        if run.training is not None and run.training.reward_mean is not None:
            reward.add_metric([run.run_id], run.training.reward_mean)
    yield from (step, reward)


# Figures of the fresh tokens that the trainer compared last.
AGREEMENT = {
    "logprob_difference_mean": "Mean |trainer - worker| of log-probabilities, nats.",
    "logprob_difference_max": "Largest |trainer - worker| of log-probabilities, nats.",
    "importance_sampling_ratio_mean": "Mean of exp(trainer - worker).",
    "importance_sampling_ratio_min": "Smallest exp(trainer - worker).",
    "importance_sampling_ratio_max": "Largest exp(trainer - worker).",
    "k3_kl": "Estimate of KL(workers || trainer) per token, nats.",
}


def _agreement(runs: list[RunView]) -> Iterator[Metric]:
    alarms = gauge("agreement_alarms", "Workers whose log-probabilities are over a limit, and the trainer's.", "run")
    tokens = gauge("agreement_tokens", "Tokens compared; stale: of other versions, so not compared.", "run", "state")
    figures = {name: gauge(name, text, "run") for name, text in AGREEMENT.items()}
    for run in runs:
        if run.agreement is None:
            continue
        alarms.add_metric([run.run_id], len(run.agreement.alarms))
        tokens.add_metric([run.run_id, "fresh"], run.agreement.fresh.token_count)
        tokens.add_metric([run.run_id, "stale"], run.agreement.stale.token_count)
        for name, family in figures.items():
            if run.agreement.fresh.token_count:
                family.add_metric([run.run_id], getattr(run.agreement.fresh, name))
    yield from (alarms, tokens, *figures.values())


def _workers(workers: list[WorkerView]) -> Iterator[Metric]:
    count = gauge("workers", "Workers by role and state; silent: no heartbeat for 3 s.", "role", "state")
    slots = gauge("slots", "Turns or environments that live workers can run at once.", "role")
    running = gauge("slots_running", "Turns or environments that live workers run now.", "role")
    age = gauge("heartbeat_age_seconds_max", "Age of the oldest heartbeat.", "role")
    headroom = gauge("slo_headroom_ratio_min", "Smallest distance to the SLO among serving workers.", "role")
    for role in sorted({worker.role for worker in workers}):
        members = [worker for worker in workers if worker.role == role]
        live = [worker for worker in members if worker.is_fresh]
        states = [worker.state if worker.is_fresh else "silent" for worker in members]
        for state in sorted(set(states)):
            count.add_metric([role, state], states.count(state))
        slots.add_metric([role], sum(worker.slot_count for worker in live))
        running.add_metric([role], sum(worker.running_count for worker in live))
        age.add_metric([role], max(worker.heartbeat_age_ms for worker in members) / 1000)
        margins = [worker.headroom_fraction for worker in live if worker.headroom_fraction is not None]
        if margins:
            headroom.add_metric([role], min(margins))
    yield from (count, slots, running, age, headroom)
    yield from _engines([worker for worker in workers if worker.is_fresh])


def _engines(live: list[WorkerView]) -> Iterator[Metric]:
    rows = (
        ("prefix_hit_ratio_min", "Smallest part of recent prompts' tokens found in a prefix cache.", min, 1.0),
        ("wake_seconds_max", "Longest that waking an engine took last.", max, 1e-3),
        ("sleep_seconds_max", "Longest that putting an engine to sleep took last.", max, 1e-3),
        ("resident_bytes_max", "Most RAM that a worker's processes hold.", max, 1),
        ("device_bytes_max", "Most device memory that a worker's processes hold.", max, 1),
    )
    fields = ("prefix_hit_fraction", "wake_ms", "sleep_ms", "resident_bytes", "device_bytes")
    for (name, text, pick, unit), field in zip(rows, fields, strict=True):
        family = gauge(name, text, "role")
        for role in sorted({worker.role for worker in live}):
            values = [getattr(worker, field) for worker in live if worker.role == role]
            known = [value for value in values if value is not None]
            if known:
                family.add_metric([role], pick(known) * unit)
        yield family


def _leases(status: Status) -> Iterator[Metric]:
    text = "Leases that have not ended; guest: in the slots of another run's, as both have the same weights."
    count = gauge("leases", text, "run", "state")
    slots = gauge("lease_slots", "Turns that these leases allow at once.", "run", "state")
    guests = {(worker.worker_id, name) for worker in status.workers for name in worker.guest_versions}

    def state_of(lease: LeaseView) -> str:
        is_guest = (lease.worker_id, lease.run_id) in guests
        return "guest" if is_guest else "standing" if lease.is_standing else "revocable"

    for run in status.runs:
        for state in ("standing", "revocable", "guest"):
            found = [each for each in status.leases if each.run_id == run.run_id and state_of(each) == state]
            count.add_metric([run.run_id, state], len(found))
            slots.add_metric([run.run_id, state], sum(each.slot_count for each in found))
    yield from (count, slots)


def _one(name: str, text: str, value: float) -> Metric:
    family = gauge(name, text)
    family.add_metric([], value)
    return family


# ---------------------------------------------------------------- sharing
#
# Prometheus metrics of lending and its price, of all serving workers together: their number is fixed.
#
# Workers report since their start. Sums are of live workers and fall when one leaves, so they are gauges.


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
    """Yield the metrics of sharing: terms of serving teams, guards, costs and gains."""
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
        family = gauge(name, text, "state")
        for each in known:
            family.add_metric([each], counts[each])
        yield family


def _open(live: list[WorkerView]) -> Iterator[Metric]:
    shares = [worker.open_fraction for worker in live if worker.open_fraction is not None]
    text = "Part of the last seconds in which guards let rollouts run."
    family = gauge("guard_open_ratio", text, "kind")
    if shares:
        family.add_metric(["min"], min(shares))
        family.add_metric(["mean"], sum(shares) / len(shares))
    yield family
    errors = gauge(
        "guard_step_error_ratio_max", "How far off a guard predicts serving's steps, where it is furthest.", "kind"
    )
    for kind in ("p50", "p95"):
        told = [getattr(worker, f"step_error_fraction_{kind}") for worker in live]
        if known := [each for each in told if each is not None]:
            errors.add_metric([kind], max(known))
    yield errors


def _price(status: Status) -> Iterator[Metric]:
    totals, text = status.sharing, "P99 latency of serving requests, of the worker where it is highest."
    for name in ("ttft", "tpot"):
        family = gauge(f"serving_{name}_seconds_p99_max", text, "kind")
        for kind, field in (("alone", "alone"), ("rollouts", "shared")):
            highest = getattr(totals, f"{name}_ms_p99_{field}_worst")
            if highest is not None:
                family.add_metric([kind], highest / 1000)
        yield family
    tax = gauge("serving_tax_p99_ratio_max", "Shared over alone, less one.", "kind")
    for field, name in TAXES:
        if (found := getattr(totals, field)) is not None:
            tax.add_metric([name], found)
    yield tax
    attained = gauge("serving_attained_ratio", "Requests within both objectives.", "kind")
    for kind, share in (("alone", totals.alone_attained_fraction), ("rollouts", totals.shared_attained_fraction)):
        if share is not None:
            attained.add_metric([kind], share)
    yield attained
    for field, name, what in SUMS:
        yield _one(name, what, getattr(totals, field))


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


def weight_metrics(status: Status) -> Iterator[Metric]:
    yield from _heads(status)
    yield from _sizes(status.weights)
    yield from _held(status.weights)
    yield from _holding([worker for worker in status.workers if worker.is_fresh and worker.role in GENERATING])


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


def _holding(live: list[WorkerView]) -> Iterator[Metric]:
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


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """Make a family of gauges with these labels."""
    return GaugeMetricFamily(f"rollfab_{name}", text, labels=labels, unit=_unit(name))


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """Make a family of counters; `_total` comes after the name."""
    return CounterMetricFamily(f"rollfab_{name}", text, labels=labels, unit=_unit(name))


def _unit(name: str) -> str:
    last = name.rpartition("_")[2]
    return last if last in UNITS else ""

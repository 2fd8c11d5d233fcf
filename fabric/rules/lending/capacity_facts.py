"""Facts and outcome of the capacity plan: supply, demand, bounds and grants as plain records.

- Durations are seconds unless the name says otherwise; speeds are tokens per second of one busy slot.
- A fact that nobody measured is None, and is never taken for bad news about a dedicated worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SWITCH_S_MAX = 600.0  # no worker is waited for longer, until it has the weights of another run


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A rollout worker as the controller sees it.

    model, model_digest: what it holds, see is_same_model.
    lend: slots its team offers; None: dedicated, all of them. lend_reason: why it offers no more.
    activation_ms: what waking it is expected to take; 0: it is awake. fetch_ms: what fetching the weights that it lacks
    is; 0: it lacks none. switch_s: what going to another run is; SWITCH_S_MAX while it does so; 0: not known.
    probe: what shows a serving engine to its guard; None: nothing is served beside it. shut_s: how long its guard has
    let nothing run. open_fraction: of the last seconds, in which it let rollouts run.
    pool: whose requests it serves. load_fraction: of its device's time or KV cache, what serving needs.
    request_count: those that are not answered yet. None: not known.
    is_spared: its router sends it nothing (True), or what spared workers would get (False); None: nothing is advised,
    or the router does not follow.
    doubt_s: how long there has been a reason to take it back. withdrawn_s: how long ago it was taken back for the sake
    of serving.
    """

    worker_id: str
    model: str
    slot_count: int
    model_digest: str = ""
    lend: int | None = None
    lend_reason: str = "lending is switched off"
    headroom_fraction: float | None = None
    pool: str = ""
    load_fraction: float | None = None
    request_count: int | None = None
    is_spared: bool | None = None
    run_id: str | None = None
    is_lent: bool = False
    activation_ms: int = 0
    fetch_ms: int = 0
    switch_s: float = 0.0
    probe: str | None = None
    guard_state: str | None = None
    shut_s: float = 0.0
    open_fraction: float | None = None
    slot_tokens_per_s: float | None = None
    doubt_s: float = 0.0
    withdrawn_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run's demand. `open_count`: slots that it has work for: one for each trajectory queued or running, or fewer
    where those think (workers/controller/demand.py). `idle_s`: how long it has been without any.

    spare_s: how long it has had a worker more than it has work for. is_unfit: a worker could not get its weights.
    owed: seconds of a dedicated slot that it is behind its share so far; below 0: ahead of it.
    left_tokens: what a mean open trajectory is expected to make still; None: none has ended yet.
    weights: the digest of its head's weights; "": not known. runs: all that are planned as this one; (): itself alone.
    """

    run_id: str
    model: str
    weight: float
    has_weights: bool
    open_count: int
    idle_s: float
    spare_s: float = 0.0
    is_unfit: bool = False
    owed: float = 0.0
    left_tokens: float | None = None
    model_digest: str = ""
    weights: str = ""
    runs: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The runs that are planned as this one."""
        return self.runs or (self.run_id,)

    @property
    def pool_key(self) -> str:
        """Runs of one pool of workers have it in common."""
        return self.model_digest or self.model


def is_same_model(name: str, digest: str, other_name: str, other_digest: str) -> bool:
    """Tell whether two names mean one model: by their files' digests where both are known, else by name.

    digest: of the model's files (fabric/model/presets.py); "": it is a preset or a hub name, or was not read here.
    """
    return digest == other_digest if digest and other_digest else name == other_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRule:
    """Bounds of the plan."""

    headroom_min_fraction: float = 0.1  # below this a serving worker keeps everything for serving
    headroom_lend_fraction: float = 0.2  # below this one that is not lent stays so: it would be taken back soon
    take_back_after_s: float = 3.0  # longer than a synchronous trainer's step, or it would be taken back every step
    drain_after_s: float = 3.0  # a guard that is shut so long will not open soon: its turns go on elsewhere
    rest_s: float = 10.0  # after being taken back for serving's sake: a burst is over, or it is none
    requires_probe: bool = False  # whether serving workers without one are refused; else nothing is served there
    slice_s: float = 10.0  # shortest time for which a worker serves one of several runs that take turns
    switch_fraction: float = 0.2  # of its time, at most, that a worker spends on going from run to run: slices grow
    refill_fraction: float = 0.05  # of a trajectory's time, to compute its prefix again where it goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One worker's part of the plan; slot_count 0 means: serve nothing. The reason is for people.

    speed: of each slot, in dedicated slots. slice_s: shortest time for which the worker serves a run; 0: not known.
    is_doubted: it is lent on for now, though there is a reason to take it back. is_for_serving: it was refused for the
    sake of its serving engine.
    """

    worker_id: str
    run_id: str | None
    slot_count: int
    is_standing: bool
    reason: str
    speed: float = 1.0
    slice_s: float = 0.0
    is_doubted: bool = False
    is_for_serving: bool = False

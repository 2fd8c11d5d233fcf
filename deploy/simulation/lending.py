"""Who lends which serving GPU to rollouts, and when: the ways that are compared.

- `Planned` is production: its census of workers and runs, its plan, its terms of giving turns back and of memory, all
  unchanged. Only the broker between them is missing: what it reads is made from the simulated engines.
- `WholeSteps` lends every serving GPU from a step's beginning to the end of its rollouts; with `cuts_memory` as ROSE
  does, with `yields` its workers give turns back as production's do.
- `Always` and `Nobody` say what they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol, cast

from ...fabric.contract.records import Lease, WorkerInfo
from ...fabric.contract.sharing import GuardView, LendSetting
from ...fabric.ports.queue import RunStatus, Survey
from ...fabric.rules.lending import capacity, division
from ...fabric.rules.lending.advice import Advice, AdviceRule, advise, extra_requests, followed
from ...fabric.rules.lending.capacity_facts import CapacityRule, Grant
from ...fabric.rules.serving.facts import StepWork
from ...workers.controller.controller import ControllerConfig
from ...workers.controller.demand import Census
from ...workers.rollout.engine_watch import LOOK_S
from ...workers.rollout.turns import TurnSize
from ...workers.rollout.yielding import Yielding, YieldRule, too_many
from ...workers.serving.device.memory import KvBudget
from .cluster import MODEL, Cluster
from .machine.engine import Engine
from .machine.turns import Turn

POOL, KEPT = "serving", "kept"  # serving workers whose team lends them, and others
ONE = StepWork(decode_count=1)
LEASE_S = ControllerConfig.lease_ms / 1000  # until a lease on a serving worker ends that nobody renews
TICK_S = 0.5  # between two plans; production makes one every 0.25 s
TELL_S = 2.0  # until a router that polls once a second has heard of new advice
FOLLOW_S = 0.25  # between two looks of a lent worker at its guard and memory; production looks every 0.1 s
ROSE_MARK, ROSE_CUT = 0.8, 0.5  # of serving's KV cache, above which what rollouts hold is cut to this, once a step


class Lender(Protocol):
    """Lends instances out and takes them back."""

    def start(self, cluster: Cluster) -> None:
        """Begin."""
        ...

    def rollouts(self, begins: bool) -> None:
        """Hear that a step's rollouts begin, or end."""
        ...

    def came_back(self, engine: Engine) -> None:
        """Hear that a worker that had died has started anew."""
        ...

    def fell_silent(self) -> None:
        """Hear that no plan reaches anybody from now on: the controller has died, or the broker is away."""
        ...

    def spoke_again(self, *, is_new: bool) -> None:
        """Hear that plans do again. is_new: of a controller that knows nothing."""
        ...


def sizes(engine: Engine) -> Iterator[tuple[Turn, TurnSize]]:
    """Tell what each turn of an engine holds, as a worker tells its rules."""
    for turn in engine.turns():
        made = engine.made(turn)
        yield (
            turn,
            TurnSize(
                request_id=turn.name,
                context_tokens=turn.context_tokens + made,
                reserve_tokens=turn.context_tokens + engine.options.turn_tokens_max,
                token_count=made,
                is_begun=turn in engine.decoding,
            ),
        )


class Worker:
    """Production's worker beside a serving engine: when turns yield, when new ones may be taken, and how much memory.

    It stands in for the running turns, the clock and the memory that those rules ask.
    """

    def __init__(self, cluster: Cluster, engine: Engine, rule: YieldRule) -> None:
        assert engine.guard is not None and engine.serving is not None
        self._cluster, self._engine, self._guard, self._serving = cluster, engine, engine.guard, engine.serving
        self.watch = SimpleNamespace(is_shut=False)
        self.capacity_tokens = engine.options.kv_tokens
        self._yielding = Yielding(cast(Any, self), self._view, cast(Any, self), rule)
        self._budget = KvBudget(cast(Any, self))
        self._kv_tokens_max: int | None = None
        self._viewed, self._viewed_at_s = GuardView(), -LOOK_S
        engine.may_take = self._yielding.may_take

    def follow(self) -> None:
        """Look at memory and guard, and give turns back that must go on elsewhere."""
        engine, now_s = self._engine, self.now_s()
        self._kv_tokens_max = self._budget.look(now_s, self._serving.read(now_s), None)
        if engine.turn_count:
            names = set(self._yielding.due())
            if names:
                gone = [turn for turn in engine.turns() if turn.name in names]
                engine.take_back(gone, keeps_tokens=self._cluster.setup.keeps_tokens)

    def _view(self) -> GuardView:
        """Show the guard as a worker sees it, who asks it ten times a second."""
        if self.now_s() - self._viewed_at_s >= LOOK_S:
            self._viewed_at_s = self.now_s()
            self._viewed = replace(self._guard.view(self.now_s()), kv_tokens_max=self._kv_tokens_max)
        return self._viewed

    # What the rules ask of running turns, clock and memory.

    def sizes(self) -> list[TurnSize]:
        """List what its turns hold."""
        return [size for _, size in sizes(self._engine)]

    def room(self, kv_tokens_max: int) -> int:
        """Count the turns that may begin within a budget."""
        count = self._engine.room(kv_tokens_max)
        return int(kv_tokens_max > self.used_tokens()) if count is None else count

    def now_s(self) -> float:
        """Tell simulated time."""
        return self._cluster.events.now_s

    def used_tokens(self) -> int:
        """Count the KV cache that its turns hold, or will once they are read."""
        return sum(size.context_tokens for size in self.sizes())

    def limit(self, kv_tokens_max: int | None) -> None:
        """Bound nothing else: turns beyond the budget yield."""


class Nobody:
    """Lends nothing."""

    def start(self, cluster: Cluster) -> None:
        """Do nothing."""

    def rollouts(self, begins: bool) -> None:
        """Do nothing."""

    def came_back(self, engine: Engine) -> None:
        """Do nothing."""

    def fell_silent(self) -> None:
        """Do nothing."""

    def spoke_again(self, *, is_new: bool) -> None:
        """Do nothing."""


class Always(Nobody):
    """Lends everything for good."""

    def start(self, cluster: Cluster) -> None:
        """Lend."""
        self._cluster = cluster
        for engine in cluster.offered:
            cluster.lease(engine)

    def came_back(self, engine: Engine) -> None:
        """Lend it again."""
        if engine in self._cluster.offered and not engine.is_leased:
            self._cluster.lease(engine)


class WholeSteps(Nobody):
    """Lends everything while rollouts run."""

    def __init__(self, *, yields: bool = False, cuts_memory: bool = False) -> None:
        self._yields, self._cuts_memory = yields, cuts_memory
        self._workers: dict[str, Worker] = {}
        self._is_rolling = False
        self._budgets: dict[str, int] = {}  # of engines that were cut in this step: no more than so many tokens

    def start(self, cluster: Cluster) -> None:
        """Begin to look."""
        self._cluster = cluster
        if self._yields:
            self._workers = {engine.name: Worker(cluster, engine, YieldRule()) for engine in cluster.lendable}
        cluster.events.after(FOLLOW_S, self._look)

    def rollouts(self, begins: bool) -> None:
        """Lend, or take back, all."""
        self._is_rolling = begins
        for engine in self._cluster.offered:
            if begins and not engine.is_leased:
                self._budgets.pop(engine.name, None)
                if not self._yields:
                    engine.may_take = None
                self._cluster.lease(engine)
            elif not begins:
                self._cluster.revoke(engine)

    def came_back(self, engine: Engine) -> None:
        """Lend it again, if rollouts are under way."""
        if engine.name in self._workers:
            self._workers[engine.name] = Worker(self._cluster, engine, YieldRule())
        if self._is_rolling and engine in self._cluster.offered and not engine.is_leased:
            self._cluster.lease(engine)

    def _look(self) -> None:
        for worker in self._workers.values():
            worker.follow()
        for engine in self._cluster.lendable if self._cuts_memory else ():
            serving = engine.serving
            assert serving is not None
            is_tight = serving.context_tokens > ROSE_MARK * serving.kv_tokens
            if is_tight and engine.is_leased and engine.name not in self._budgets:
                self._cut(engine)
        self._cluster.events.after(FOLLOW_S, self._look)

    def _cut(self, engine: Engine) -> None:
        """Halve what an engine's turns hold, until the step ends; those beyond it are aborted and begin anew."""
        held = [size for _, size in sizes(engine)]
        budget = self._budgets[engine.name] = int(ROSE_CUT * sum(size.context_tokens for size in held))
        engine.may_take = lambda: engine.room(budget)
        names = set(too_many(held, budget))
        engine.take_back([turn for turn in engine.turns() if turn.name in names], keeps_tokens=False)


class Planned(Nobody):
    """Production's controller at every tick, and its workers' giving way.

    drains: a lease that ends waits for its turns, and none ever leaves in the middle: the ablation without migration.
    is_followed: serving's router follows the advice whom to spare.
    """

    def __init__(self, *, drains: bool = False, is_followed: bool = False) -> None:
        self._drains, self._is_followed = drains, is_followed
        self._advice: dict[str, Advice] = {}
        self._rule = CapacityRule(requires_probe=True)
        self._census = Census()
        self._grants: list[Grant] = []
        self._owed: dict[str, float] = {}
        self._lends = {f"pool:{POOL}": LendSetting(mode="on")}
        self._tokens: dict[str, int] = {}
        self._workers: dict[str, Worker] = {}
        self._draining: set[str] = set()
        self._told: dict[str, WorkerInfo] = {}  # the last heartbeats
        self._anew: set[str] = set()  # workers that never woke since they started again
        self.move_count = 0  # of workers, from one run to another
        self._silence_count = self._spoken_count = 0  # why nobody plans just now; how often somebody did again

    def start(self, cluster: Cluster) -> None:
        """Begin to tick."""
        self._cluster = cluster
        self._workers = {engine.name: self._worker(engine) for engine in cluster.lendable}
        cluster.events.at(0.0, self._tick, cluster)
        cluster.events.after(FOLLOW_S, self._follow, cluster)

    def _worker(self, engine: Engine) -> Worker:
        return Worker(self._cluster, engine, YieldRule(yield_after_s=1e9) if self._drains else YieldRule())

    def say(self, mode: str) -> None:
        """Let the team of what serves switch lending."""
        self._lends[f"pool:{POOL}"] = LendSetting(mode=mode)

    def came_back(self, engine: Engine) -> None:
        """Begin its rules anew; the plan lends it."""
        self._anew.add(engine.name)
        if engine.serving is not None:
            self._workers[engine.name] = self._worker(engine)

    def fell_silent(self) -> None:
        """Plan nothing for now; leases on serving workers run out."""
        self._silence_count += 1
        self._cluster.events.after(LEASE_S, self._run_out, self._spoken_count)

    def spoke_again(self, *, is_new: bool) -> None:
        """Plan again."""
        self._silence_count -= 1
        self._spoken_count += 1
        if is_new:
            self._census, self._grants, self._owed, self._advice = Census(), [], {}, {}

    def _run_out(self, spoken_count: int) -> None:
        """End the leases that nobody has renewed."""
        if self._silence_count and self._spoken_count == spoken_count:
            for engine in self._cluster.lendable:
                if engine.is_leased:
                    self._draining.discard(engine.name)
                    self._cluster.beside[engine.tenant].revoke(engine)

    def _follow(self, cluster: Cluster) -> None:
        for engine in cluster.lendable:
            if engine.is_leased or engine.turn_count:
                self._workers[engine.name].follow()
            if engine.name in self._draining and not engine.turn_count:
                self._draining.discard(engine.name)
                cluster.beside[engine.tenant].revoke(engine)
        cluster.events.after(FOLLOW_S, self._follow, cluster)

    def _tick(self, cluster: Cluster) -> None:
        cluster.events.after(TICK_S, self._tick, cluster)
        if self._silence_count:
            return
        now_s = cluster.events.now_s
        survey = self._survey(cluster, now_s)
        infos = [info for info, _ in survey.workers.values()]
        facts = self._census.workers(infos, survey, self._lends, now_s=now_s, wall_ms=survey.wall_ms)
        runs = self._census.runs(survey.runs.values(), now_s, survey.leases)
        self._owed = division.settle(self._owed, self._grants, runs, TICK_S, self._rule)
        runs = [replace(run, owed=self._owed[run.run_id]) if run.run_id in self._owed else run for run in runs]
        self._advice = advise(facts, runs, self._advice, now_s, AdviceRule())
        facts = followed(facts, self._advice)
        if self._is_followed:
            cluster.events.after(TELL_S, cluster.advise, extra_requests(self._advice))
        self._grants = capacity.plan(facts, runs, self._rule)
        self._census.learn(facts, self._grants, now_s)
        by_run = {each.run.run_id: each for each in cluster.beside}
        for grant in self._grants:
            self._carry_out(cluster.by_name[grant.worker_id], by_run.get(grant.run_id or ""), cluster)

    def _carry_out(self, engine: Engine, run: Cluster | None, cluster: Cluster) -> None:
        """Let an engine work for a run; None: for none."""
        holder, is_lent = cluster.beside[engine.tenant], engine.is_leased and engine.name not in self._draining
        if run is not None and not engine.is_leased:
            run.lease(engine)
        elif run is not None and is_lent and run is not holder:
            holder.revoke(engine)
            run.lease(engine, is_awake=True)
            self.move_count += 1
        elif run is None and is_lent and self._drains:
            engine.is_ready = False
            self._draining.add(engine.name)
        elif run is None and is_lent:
            holder.revoke(engine)

    def _survey(self, cluster: Cluster, now_s: float) -> Survey:
        """Show the cluster as a reading of the broker would."""
        leases: dict[str, dict[str, Lease]] = {each.run.run_id: {} for each in cluster.beside}
        for engine in cluster.engines:
            if engine.is_leased and engine.name not in self._draining:
                run_id, slots = cluster.beside[engine.tenant].run.run_id, engine.slot_count
                leases[run_id][engine.name] = Lease(
                    worker_id=engine.name, run_id=run_id, lease_epoch=1, slot_count=slots, lease_until_ms=None
                )
        return Survey(
            workers={name: (info, 0) for name, info in self._heartbeats(cluster, now_s)},
            assignments={name: run_id for run_id, own in leases.items() for name in own},
            runs={each.run.run_id: _status(each) for each in cluster.beside},
            leases=leases,
            wall_ms=int(now_s * 1000),
            now_ms=int(now_s * 1000),
        )

    def _heartbeats(self, cluster: Cluster, now_s: float) -> Iterator[tuple[str, WorkerInfo]]:
        """Tell the last of each worker that is not forgotten: the dead say nothing new."""
        for engine in cluster.engines:
            if engine.name not in cluster.dead:
                self._told[engine.name] = self._info(cluster, engine, now_s)
            if engine.name not in cluster.gone:
                yield engine.name, self._told[engine.name]

    def _info(self, cluster: Cluster, engine: Engine, now_s: float) -> WorkerInfo:
        """Make an engine's heartbeat."""
        made = engine.token_count - self._tokens.get(engine.name, 0)
        self._tokens[engine.name] = engine.token_count
        setup, view, run = cluster.setup, None, cluster.beside[engine.tenant]
        if engine.is_ready:
            self._anew.discard(engine.name)
        has_woken = engine.name not in self._anew
        if engine.guard is not None:
            if not engine.turn_count:
                engine.guard.look(now_s, ONE, is_idle=True)
            view = engine.guard.view(now_s)
        return WorkerInfo(
            worker_id=engine.name,
            role="dedicated" if view is None else "serving",
            pid=1,
            host="simulated",
            model=MODEL,
            slot_count=engine.slot_count,
            running_count=engine.turn_count,
            run_id=run.run.run_id if engine.version >= 0 else None,
            active_version=engine.version,
            token_count=engine.token_count,
            tokens_per_s=made / TICK_S,
            state="ready" if engine.is_leased else "asleep",
            head_version=run.head_version,
            wake_ms=int(1000 * setup.activation_s) if has_woken else None,
            switch_ms=None if engine.fetched_s is None else int(1000 * engine.fetched_s),
            pool="" if view is None else POOL if engine in cluster.offered else KEPT,
            headroom_fraction=view.headroom_fraction if view else None,
            load_fraction=view.load_fraction if view else None,
            request_count=view.request_count if view else None,
            guard_state=view.state if view else None,
            open_fraction=view.open_fraction if view else None,
            probe=view.probe if view else None,
        )


def _status(run: Cluster) -> RunStatus:
    """Show a run as a reading of the broker would."""
    queued, running = run.counts()
    return RunStatus(
        config=run.run,
        head_version=run.head_version,
        depth=queued,
        memory_bytes=0,
        trajectories={"queued": queued, "running": running},
        turns={"ready": run.waiting_count()},
        groups_waiting=0,
        dead_count=0,
        counters={"trajectories_completed": run.completed_count, "tokens": run.kept_count},
    )

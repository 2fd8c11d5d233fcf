"""The simulated cluster: instances, turns that wait, tools, and serving load.

- Agents have as many places as there are slots, those that may be lent included: so many trajectories are under way,
  the others wait (machine/agents.py). A turn is asked for as soon as its environment has answered.
- Turns wait in one stream, by urgency, then first come, first served; whoever has been free for longest takes as many
  as it has slots for, or its share. With `home`, a turn waits for the worker with its context; another one takes it
  when it could have read that meanwhile and has nothing else to do, and a second later before all else.
- A serving request goes to the instance with the fewest unanswered ones.
- Where workers are of unlike hardware, a turn without a home waits for one that suits it, by production's rules; their
  speeds are looked at each TICK_S.
- Several runs may share the workers, each with agents, turns, weights and homes of its own: clusters beside each other.
  A worker works for one of them, its tenant, and goes to another by way of a lease, without its prefixes.
- Nobody hears that a worker has died: its claims end CLAIM_S after they were renewed last, and its turns go on from the
  tokens that were saved then; its lease ends once it was silent for FORGET_S. Of agents that die: machine/agents.py.
- What goes through the broker waits while it is away: machine/broker.py.
- Who is lent decides a lender (lending.py), what a step is a trainer (training.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from ...fabric.contract.records import RunConfig, Span
from ...fabric.queue.turns import CLAIM_MS
from ...fabric.rules.lending.hardware import Speeds, read_costs
from ...fabric.rules.queue.placement import GRACE_MS, PATIENCE_MS_MAX, READY_MS, Homes, unsuited_s
from ...fabric.rules.queue.retries import is_stale
from ...workers.controller.controller import ControllerConfig
from ...workers.rollout.config import RolloutConfig
from ...workers.serving.guarding.guard import Guard, GuardConfig, GuardOrders, Policy
from ..replay.records import Arrival
from .machine.agents import REAP_S, Agents
from .machine.books import Books, Broken
from .machine.broker import Broker, through_broker
from .machine.cost import Model
from .machine.engine import Engine, EngineOptions
from .machine.events import Events
from .machine.order import Affine, Router
from .machine.serving import CHUNK_TOKENS, Request, ServingSide
from .machine.turns import Batch, GroupState, Trajectory, Turn
from .machine.workload import Group, StepPlan

LENT_CHUNK, OWN_CHUNK = 512, 2048  # prompt tokens in one rollout step: beside serving, and alone
NEARLY_COMPLETE = 4  # a quarter of a group's quorum missing: use/ring.lua of the broker says the same, and a test it
GRACE_S, READY_S, PATIENCE_S = GRACE_MS / 1000, READY_MS / 1000, PATIENCE_MS_MAX / 1000
STRAY_COUNT, SHARE_SLACK = 16, 1.125  # as use/strays.lua and use/share.lua of the broker say
REFILL_TOKENS = 256  # to compute again: less than that is no reason to be elsewhere
DRAIN_S = 600.0
TICK_S = ControllerConfig.tick_s
SAVE_S, ROUND_S = RolloutConfig.log_s, RolloutConfig.poll_s  # between two renewals of a claim, and two rounds at most
CLAIM_S = CLAIM_MS / 1000
FORGET_S = ControllerConfig.worker_age_ms_max / 1000
RUN, MODEL = "run", "model"
NUMBERS = 10**9  # of trajectories, for each run
Waiting = tuple[float, int, Turn]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated. dedicated, lendable: instances. kv_*: tokens. load: serving requests in [0, load_s), repeated.

    offered: of the lendable, those that may be lent; None: all. lent_chunk: prompt tokens in one of their steps.
    places: shared, home, or routed: a router of others says who takes what. staleness: versions behind the head that
    may still generate. lent_places: of agents, for each slot that may be lent.
    agents: that trajectories are divided among. other: the model on another kind of GPU, which the last other_count of
    the dedicated instances are; suits: whether turns begin where hardware suits them.
    """

    rollout: Model
    serving: Model
    dedicated: int
    lendable: int
    slot_count: int = 16
    kv_dedicated: int
    kv_lent: int
    kv_serving: int
    turn_tokens_max: int
    load: Sequence[Arrival] = ()
    load_s: float = 1.0
    ttft_ms: float
    tpot_ms: float
    activation_s: float = 2.0
    fetch_s: float = 2.0
    noise: float = 0.03
    seed: int = 0
    places: str = "shared"
    router: Callable[[], Router] = Affine
    lent_chunk: int = LENT_CHUNK
    offered: int | None = None
    lent_places: float = 1.0
    keeps_tokens: bool = True
    policy: Policy | None = None
    serving_chunk: int = CHUNK_TOKENS
    staleness: int = 1
    agents: int = 1
    other: Model | None = None
    other_count: int = 0
    kv_other: int = 0
    suits: bool = True


def urgency(missing: int, quorum: int, *, was_held: bool, priority: int = 1) -> int:
    """Return the class in which a turn waits, as the broker's script decides it."""
    is_urgent = was_held or missing * NEARLY_COMPLETE <= quorum
    return max(0, priority - 1) if is_urgent else priority


class Cluster:
    """See the module."""

    def __init__(self, setup: Setup, *, weight: float = 1.0, host: Cluster | None = None) -> None:
        """host: the first run's, whose workers this one shares; None: it is the first, which begins with them."""
        self.setup = setup
        self.beside: list[Cluster] = host.beside if host is not None else []
        self.index = len(self.beside)
        self.beside.append(self)
        self.head_version = 0
        self.run = RunConfig(
            run_id=f"{RUN}-{self.index}" if self.index else RUN,
            model=MODEL,
            environment="simulated",
            prefix_affinity=setup.places != "shared",
            hardware_affinity=setup.suits and setup.places == "home",
            staleness=setup.staleness,
            weight=weight,
        )
        self._share_workers(host) if host is not None else self._make_workers()
        self.batches: list[Batch] = []
        place_count = int(setup.slot_count * (len(self.dedicated) + setup.lent_places * len(self.offered)))
        self.agents = Agents(self.events, self.broker, setup.agents, place_count, self._begin_trajectory)
        self.completed_count = self.kept_count = 0
        self._homes = Homes()
        self._router = setup.router() if setup.places == "routed" else None
        self._is_draining = False
        self._read_costs: dict[str, int] = {}  # as the broker has them, and the next two
        self._first_tokens = self._first_count = 0
        self._ready: list[Waiting] = []  # a heap: urgency, number, turn
        self._parked: dict[str, list[Waiting]] = {}  # by home: heaps of turns that wait for it
        self._homed: dict[int, Turn] = {}  # all of them that still do, by number: the oldest first
        self._count, self._trajectories = 0, NUMBERS * self.index
        self._lost: set[Turn] = set()  # whose claims have not ended yet
        if setup.other_count and host is None:
            self.events.after(TICK_S, self._look_at_hardware)
        if setup.load and self.lendable and host is None:
            self.events.at(setup.load[0].at_s, self._arrive, 0, 0.0)

    def _make_workers(self) -> None:
        setup = self.setup
        self.events, self.books = Events(), Books()
        self.broker = Broker(self.events)
        like_count = setup.dedicated - setup.other_count
        self.dedicated = [self._engine(f"own-{n}", n, setup.kv_dedicated) for n in range(like_count)]
        self.dedicated += [
            self._engine(f"own-{n}", n, setup.kv_other, model=setup.other) for n in range(like_count, setup.dedicated)
        ]
        self.lendable = [self._serving_engine(f"lent-{n}", n) for n in range(setup.lendable)]
        for engine in self.dedicated:
            engine.version = self.head_version
        self.engines = [*self.dedicated, *self.lendable]
        self.by_name = {engine.name: engine for engine in self.engines}
        self._leased = list(self.dedicated)
        self.offered = self.lendable[: setup.offered]
        self.extra_requests: Mapping[str, int] = {}  # that serving's router counts where there are none
        self._leases: dict[str, int] = {}
        self.dead: set[str] = set()
        self.gone: set[str] = set()  # of the dead, those that the controller has forgotten
        self._dying: set[Turn] = set()  # with their worker, at the end of the step under way

    def _share_workers(self, host: Cluster) -> None:
        self.events, self.books, self.broker = host.events, host.books, host.broker
        self.dedicated, self.lendable, self.engines = host.dedicated, host.lendable, host.engines
        self.by_name, self.offered = host.by_name, host.offered
        self._leased = []
        self._leases, self.dead, self.gone, self._dying = host._leases, host.dead, host.gone, host._dying

    def _engine(
        self,
        name: str,
        seed: int,
        kv_tokens: int,
        serving: ServingSide | None = None,
        guard: Guard | None = None,
        model: Model | None = None,
    ) -> Engine:
        setup = self.setup
        options = EngineOptions(
            name=name,
            cost=(model or setup.rollout).cost,
            hardware="other" if model else "",
            slot_count=setup.slot_count,
            kv_tokens=kv_tokens,
            turn_tokens_max=setup.turn_tokens_max,
            chunk_tokens=OWN_CHUNK if serving is None else setup.lent_chunk,
            noise=setup.noise,
            seed=setup.seed * 10_000 + seed,
        )
        return Engine(
            options,
            self.events,
            self.books,
            serving=serving,
            guard=guard,
            on_end=self._ended_of_all,
            on_back=self._came_back_of_all,
        )

    def _serving_engine(self, name: str, index: int) -> Engine:
        setup = self.setup
        serving = ServingSide(setup.serving.cost, setup.kv_serving, setup.serving_chunk)
        return self._engine(name, 1000 + index, setup.kv_lent, serving, self._guard(serving))

    def _guard(self, serving: ServingSide) -> Guard:
        setup = self.setup
        config = GuardConfig(probe="", probe_name="simulated", slo_ttft_ms=setup.ttft_ms, slo_tpot_ms=setup.tpot_ms)
        return Guard(config, serving, [setup.policy] if setup.policy is not None else ())

    def _arrive(self, index: int, began_s: float) -> None:
        if self._is_draining:
            return
        setup = self.setup
        arrival = setup.load[index]
        least = min(self.lendable, key=self._load)
        least.arrive(arrival.prompt_tokens, arrival.completion_tokens)
        index += 1
        if index == len(setup.load):
            index, began_s = 0, began_s + setup.load_s
        self.events.at(max(self.events.now_s, began_s + setup.load[index].at_s), self._arrive, index, began_s)

    def requests(self) -> list[Request]:
        """Return all requests that serving was sent."""
        return [each for engine in self.lendable if engine.serving for each in engine.serving.requests]

    def advise(self, extra_requests: Mapping[str, int]) -> None:
        """Let serving's router count so many requests more of these instances."""
        self.extra_requests = extra_requests

    def _load(self, engine: Engine) -> int:
        assert engine.serving is not None
        return engine.serving.load + self.extra_requests.get(engine.name, 0)

    def drain(self) -> None:
        """Let serving answer what has come, with nothing new: a tail that is cut off would count as missed."""
        self._is_draining = True
        until_s = self.events.now_s + DRAIN_S
        self.events.run(lambda: not any(each.serving and each.serving.has_work for each in self.lendable), until_s)

    # ---- leases and weights

    def lease(self, engine: Engine, *, is_awake: bool = False) -> None:
        """Lend an engine out; it takes turns once it is awake and has the weights."""
        if engine.name in self.gone:
            return
        if engine.tenant != self.index:
            engine.tenant, engine.version, engine.free_since = self.index, -1, self._count
        engine.is_leased = True
        self._leased.append(engine)
        self._set_up(engine, is_awake=is_awake)

    def _set_up(self, engine: Engine, *, is_awake: bool = False) -> None:
        number = self._leases[engine.name] = self._leases.get(engine.name, 0) + 1
        engine.is_ready = False
        if engine.guard is not None:
            engine.guard.orders = GuardOrders(is_lent=True, policy=int(self.setup.policy is not None))
        if engine.name not in self.dead:
            fetch_s = self._fetch_s(engine)
            wake_s = 0.0 if is_awake else self.setup.activation_s
            self.events.after(wake_s + fetch_s, self._got_ready, engine, number, fetch_s)

    @through_broker
    def _got_ready(self, engine: Engine, number: int, fetch_s: float) -> None:
        if engine.is_leased and self._leases[engine.name] == number:
            engine.is_ready, engine.fetched_s = True, fetch_s
            if engine.version != self.head_version:
                engine.forget_prefixes()
            engine.version = self.head_version
            self.place()

    def revoke(self, engine: Engine) -> None:
        """End a lease: its turns go on elsewhere."""
        if engine.is_leased:
            self._leased.remove(engine)
        engine.is_leased = engine.is_ready = False
        self._leave_parked(engine)
        engine.take_back(engine.turns(), keeps_tokens=self.setup.keeps_tokens)
        self.place()  # what waited for it alone

    def _fetch_s(self, engine: Engine) -> float:
        return self.setup.fetch_s if engine.version != self.head_version else 0.0

    @through_broker
    def publish(self) -> None:
        """Give all engines that work for the run new weights; prefixes of older ones are of no use."""
        self.head_version += 1
        for engine in self.engines:
            if engine.is_leased and engine.tenant == self.index:
                engine.version = self.head_version
                engine.forget_prefixes()

    # ---- the broker, agents and workers that die

    def reconnect(self) -> None:
        """Let the broker be back: it takes what has waited, and gives out what waits there."""
        self.broker.come_back()
        for run in self.beside:
            run.agents.claim()
            run.place()

    def kill_agent(self, agent: int) -> None:
        """End an agent without a word; nobody knows the homes of what it had."""
        for trajectory in self.agents.kill(agent):
            self._homes.leave(str(trajectory.number))

    def save(self) -> None:
        """Let workers renew the claims that are due, and save the tokens of their turns."""
        now_s = self.events.now_s
        for engine in self.engines if not self.broker.is_away else ():
            if engine.turn_count and engine.name not in self.dead:
                for turn, made in engine.progress():
                    if turn.renewed_at_s <= now_s - SAVE_S:
                        turn.renewed_at_s, turn.saved = now_s, made

    def kill(self, engine: Engine) -> None:
        """End a worker without a word, at the end of its step under way. Serving beside it goes on."""
        self.dead.add(engine.name)
        engine.is_ready = False
        self._leases[engine.name] = self._leases.get(engine.name, 0) + 1  # it does not get ready any more
        turns = engine.turns()
        self._dying.update(turns)
        engine.take_back(turns, keeps_tokens=True)

    def forget(self, engine: Engine) -> None:
        """End the lease of a worker that was silent for too long."""
        self.gone.add(engine.name)
        self.beside[engine.tenant].revoke(engine)

    def revive(self, engine: Engine) -> None:
        """Start a worker anew: it knows nothing. If it has a lease, it gets ready; a dedicated one gets a lease."""
        self.dead.remove(engine.name)
        self.gone.discard(engine.name)
        engine.restart()
        if engine.serving is not None:
            engine.serving.forget_news()
            engine.guard = self._guard(engine.serving)
        if engine.is_leased:
            self.beside[engine.tenant]._set_up(engine)
        elif engine.serving is None and len(self.beside) == 1:  # else the plan says to which run
            self.lease(engine)

    def _lose(self, turn: Turn) -> None:
        """Let a turn of a dead worker wait for the end of its claim, with the tokens that were saved."""
        saved = min(turn.saved, turn.made) if self.setup.keeps_tokens else 0
        self.books.loses(turn, turn.made - saved)
        self._lost.add(turn)
        reaped_s = REAP_S * math.ceil((turn.renewed_at_s + CLAIM_S) / REAP_S)
        self.events.at(max(self.events.now_s, reaped_s), self._reap, turn, self.broker.silent_s)

    @through_broker
    def _reap(self, turn: Turn, silent_s: float) -> None:
        """Let a turn whose claim has ended go on; silent_s: of the broker, when the claim had so long to go."""
        left_s = self.broker.silent_s - silent_s
        if left_s > 0.0 or self.agents.are_dead:
            self.events.after(max(REAP_S, left_s), self._reap, turn, self.broker.silent_s)
            return
        self._lost.remove(turn)
        turn.version = turn.version if turn.made else -1
        self._hand_over(turn)
        self.place()

    # ---- trajectories

    @through_broker
    def submit(self, plan: StepPlan, on_done: Callable[[list[Group]], None]) -> None:
        """Submit a step's groups. on_done: called when enough of them are complete, with those that are not."""
        batch = Batch(plan=plan, on_done=on_done, began_s=self.events.now_s, missing_groups=plan.needed)
        self.batches.append(batch)
        for index, group in enumerate(plan.groups):
            quorum = plan.quorum or len(group)
            state = GroupState(batch=batch, index=index, quorum=quorum, missing=quorum)
            batch.groups.append(state)
            for each in group:
                self._trajectories += 1
                trajectory = Trajectory(self._trajectories, each, state)
                self.books.submits(trajectory.number)
                batch.open[trajectory.number] = trajectory
        self.agents.add(list(batch.open.values()))

    def _begin_trajectory(self, trajectory: Trajectory) -> None:
        """Begin the environment of a trajectory that an agent has claimed; play again what was played before."""
        self._play(trajectory, trajectory.plan.start_s, 0)

    def _play(self, trajectory: Trajectory, delay_s: float, known: int) -> None:
        """Let a trajectory's environment answer the turns that are over, of which it has seen `known`."""
        for each in trajectory.plan.turns[known : trajectory.index]:
            delay_s += each.tool_s
        self.events.after(delay_s, self._go_on, trajectory, trajectory.fence, trajectory.index)

    @through_broker
    def _go_on(self, trajectory: Trajectory, fence: int, known: int) -> None:
        """Do what comes once an environment has answered so many turns, unless its agent has died meanwhile."""
        if trajectory.is_over or trajectory.fence != fence:
            return
        if trajectory.index > known:  # a turn has ended as the ones before were played again
            self._play(trajectory, 0.0, known)
        elif known == len(trajectory.plan.turns):
            self._complete(trajectory)
        else:
            trajectory.is_followed = True
            if trajectory.turn is None:
                self._ask(trajectory)

    def counts(self) -> tuple[int, int]:
        """Count the trajectories that wait for an agent, and those under way."""
        claimed = self.agents.claimed_count
        return sum(len(batch.open) for batch in self.batches) - claimed, claimed

    def waiting_count(self) -> int:
        """Count the turns that wait or run."""
        held = sum(engine.turn_count for engine in self.engines if engine.tenant == self.index)
        return len(self._ready) + len(self._homed) + len(self._lost) + held

    def _ask(self, trajectory: Trajectory) -> None:
        plan = trajectory.plan.turns[trajectory.index]
        turn = Turn(
            trajectory, trajectory.index, trajectory.context_tokens, trajectory.fresh_tokens, plan.output_tokens
        )
        home = self._homes.leave(str(trajectory.number))
        turn.home = home.worker_id if home.version >= self.head_version or self._router is not None else ""
        trajectory.turn = turn
        home_engine = self.by_name[turn.home] if turn.home and self.setup.places == "home" else None
        if home_engine is not None and home_engine in self._leased and len(self._leased) > 1:
            self._park(turn, home_engine)
        elif self._read_costs and self._leased:
            self._wait_for_suited(turn)
        else:
            self._push(turn)
        self.place()

    # ---- turns

    def _push(self, turn: Turn) -> None:
        """Let a turn wait for anybody."""
        turn.waits_since_s = self.events.now_s
        heapq.heappush(self._ready, self._row(turn))

    def _row(self, turn: Turn) -> Waiting:
        self._count += 1
        group = turn.trajectory.group
        place: float = urgency(group.missing, group.quorum, was_held=turn.was_held)
        if self._router is not None:
            place = self._router.rank(turn, int(place))
        return place, self._count, turn

    def _park(self, turn: Turn, home: Engine) -> None:
        """Let a turn wait for its home; others look at it once they could have read its context, and again later."""
        row = self._row(turn)
        turn.waits_since_s = self.events.now_s
        self._homed[row[1]] = turn
        heapq.heappush(self._parked.setdefault(home.name, []), row)
        least_s = patience_s(turn, min(each.us_per_token for each in self._leased))
        self.events.after(least_s, self._look_again, row[1])
        self.events.after(least_s + GRACE_S, self._look_again, row[1])

    def _wait_for_suited(self, turn: Turn) -> None:
        """Let a turn without a home wait for hardware that suits it; others look at it once it has waited for them."""
        turn.home = ""
        row = self._row(turn)
        turn.waits_since_s = self.events.now_s
        self._homed[row[1]] = turn
        self._first_tokens += turn.context_tokens
        self._first_count += 1
        waits_s = {round(self._wait_s(turn, engine), 2) + 0.01 for engine in self._leased}
        for wait_s in waits_s | {wait_s + GRACE_S for wait_s in waits_s}:
            self.events.after(wait_s, self._look_again, row[1])

    def _wait_s(self, turn: Turn, engine: Engine) -> float:
        """Compute how long a turn waits before an engine may take it that is not its home."""
        if turn.home:
            return patience_s(turn, engine.us_per_token)
        return unsuited_s(
            turn.context_tokens,
            self._first_tokens / max(1, self._first_count),
            read_cost=self._read_costs.get(engine.options.hardware, 0),
            slot_count=engine.slot_count,
        )

    def _look_at_hardware(self) -> None:
        """Say of each run whether its workers are unlike, as the controller does at its ticks."""
        for run in self.beside if not self.broker.is_away else ():
            speeds = [Speeds(e.options.hardware, e.prefill_us, e.us_per_made) for e in run._leased]
            is_wanted = run.run.hardware_affinity and run.run.prefix_affinity
            run._read_costs = read_costs(speeds, run._read_costs) if is_wanted else {}
            if not run._read_costs:
                run._first_tokens = run._first_count = 0
        self.events.after(TICK_S, self._look_at_hardware)

    def _look_again(self, number: int) -> None:
        if number in self._homed:
            self.place()

    def _leave_parked(self, engine: Engine) -> None:
        """Let turns that waited for an engine which is gone wait for any."""
        for _, number, turn in self._parked.pop(engine.name, []):
            if self._homed.pop(number, None) is not None:
                self._push(turn)

    def place(self) -> None:
        """Let workers take turns that wait: who has been free for longest first, as many as it has slots for."""
        if self.broker.is_away or not (self._ready or self._homed):
            return
        if self._router is not None:
            self._route(self._router)
            return
        share = self._share()
        own = self.index
        free = [e for e in self.engines if e.is_ready and e.turn_count < e.slot_count and e.tenant == own]
        is_for_any = bool(self._ready) or self._has_stray(free)
        for engine in sorted(free, key=attrgetter("free_since")):
            if not is_for_any and not self._parked.get(engine.name):
                continue  # nothing that waits is for it
            while self._ready or self._homed:
                turn = self._next(engine, share)
                if turn is None:
                    break
                self._begin(turn, engine)
                is_for_any = is_for_any or self._has_stray(free)  # the oldest few are others now

    def _next(self, engine: Engine, share: int) -> Turn | None:
        """Take the turn that the broker's script would give to a worker: claim.lua, in its order."""
        found = self._stray(engine, GRACE_S)
        own, ready = self._first(self._parked.get(engine.name, [])), self._first(self._ready)
        has_room = share > engine.turn_count
        if not has_room:
            own, ready = None, self._left_to_others(ready)
        if found is None and own is not None and (ready is None or own[0] <= ready[0]):
            found = own
        if found is None:
            found = ready or (self._stray(engine, 0.0) if has_room else None)
        if found is None or not engine.can_take(found[2]):
            return None
        if found is ready:
            heapq.heappop(self._ready)
        else:
            self._homed.pop(found[1])
        return found[2]

    def _share(self) -> int:
        """Count the turns that a worker may hold before it leaves others to others: use/share.lua."""
        slots = self.setup.slot_count
        total = slots * len(self._leased)
        if self.setup.places == "shared" or total <= slots:
            return slots
        return min(slots, math.ceil(SHARE_SLACK * self.agents.claimed_count * slots / total))

    def _left_to_others(self, row: Waiting | None) -> Waiting | None:
        """Return a turn for anybody if nobody came for it in a while; else look again then."""
        left_s = row[2].waits_since_s + READY_S - self.events.now_s if row is not None else 0.0
        if left_s <= 1e-9:
            return row
        self.events.after(left_s, self.place)
        return None

    def _first(self, rows: list[Waiting]) -> Waiting | None:
        """Look at the first of a heap; drop those that are gone, or of trajectories that are over."""
        while rows:
            turn = rows[0][2]
            is_gone = rows is not self._ready and rows[0][1] not in self._homed
            if not is_gone and not turn.trajectory.is_over:
                return rows[0]
            if not is_gone:
                self._homed.pop(rows[0][1], None)
                self.books.drops(turn, turn.made)
            heapq.heappop(rows)
        return None

    def _stray(self, engine: Engine, grace_s: float) -> Waiting | None:
        """Find a turn of another home that may be taken here, of the oldest few."""
        now_s = self.events.now_s
        for number, turn in islice(self._homed.items(), STRAY_COUNT):
            waited_s = now_s - turn.waits_since_s
            if waited_s < grace_s - 1e-9:
                break  # and so did all after it
            if waited_s >= self._wait_s(turn, engine) + grace_s - 1e-9 and not turn.trajectory.is_over:
                return 0, number, turn
        return None

    def _has_stray(self, free: list[Engine]) -> bool:
        """Tell whether any of these engines may take a turn of another home."""
        now_s, s_per_token = self.events.now_s, 1e-6 * min([engine.us_per_token for engine in free], default=0)
        for turn in islice(self._homed.values(), STRAY_COUNT):
            waited_s = now_s - turn.waits_since_s + 1e-9
            if not turn.home or waited_s >= PATIENCE_S or waited_s >= turn.context_tokens * s_per_token:
                return True
        return False

    def _route(self, router: Router) -> None:
        """Place as a router of others does: the first in its order, where it says."""
        while (row := self._first(self._ready)) is not None:
            engine = router.choose(row[2], self.engines)
            if engine is None:
                return
            heapq.heappop(self._ready)
            router.begun(row[2], engine)
            self._begin(row[2], engine)

    def _begin(self, turn: Turn, engine: Engine) -> None:
        self._count += 1
        engine.free_since = self._count  # it listens again, behind the others
        turn.saved, turn.renewed_at_s = turn.made, self.events.now_s
        engine.begin(turn)

    @through_broker
    def _ended_of_all(self, engine: Engine, turns: list[Turn]) -> None:
        for run, own in self._by_run(turns):
            run._ended(engine, own)

    @through_broker
    def _came_back_of_all(self, engine: Engine, turns: list[Turn]) -> None:
        for run, own in self._by_run(turns):
            run._came_back(engine, own)

    def _by_run(self, turns: list[Turn]) -> Iterator[tuple[Cluster, list[Turn]]]:
        """Divide turns by their runs: a worker that changes hands has some of two for a step."""
        if len(self.beside) == 1:
            yield self, turns
            return
        for run in self.beside:
            own = [turn for turn in turns if turn.key[0] // NUMBERS == run.index]
            if own:
                yield run, own

    def _leave(self, engine: Engine, turns: list[Turn]) -> None:
        if self._router is not None:
            for turn in turns:
                self._router.left(turn, engine)

    def _came_back(self, engine: Engine, turns: list[Turn]) -> None:
        self._leave(engine, turns)
        for turn in turns:
            if turn in self._dying:
                self._dying.remove(turn)
                engine.forget_prefixes()
                self._lose(turn)
            else:
                self._hand_over(turn)
        self.place()

    def _hand_over(self, turn: Turn) -> None:
        """Let a turn that was begun go on at any worker."""
        if turn.trajectory.is_over:
            self.books.drops(turn, turn.made)
            return
        turn.was_held, turn.home, turn.fresh_tokens = True, "", 0
        self.books.moved_count += 1
        self._push(turn)

    def _ended(self, engine: Engine, turns: list[Turn]) -> None:
        self._leave(engine, turns)
        for turn in turns:
            trajectory = turn.trajectory
            trajectory.turn = None
            self.kept_count += turn.made
            self._dying.discard(turn)
            if trajectory.is_over:
                self.books.throws_away(turn.made)
                continue
            trajectory.made += turn.made
            if trajectory.is_followed:
                self._homes.note(self.run, str(trajectory.number), Span(0, turn.made, engine.name, engine.version))
            if trajectory.oldest_version < 0:
                trajectory.oldest_version = turn.version
            plan = trajectory.plan.turns[trajectory.index]
            trajectory.context_tokens += turn.made + plan.observation_tokens
            trajectory.fresh_tokens = plan.observation_tokens
            trajectory.index += 1
            if trajectory.is_followed:
                trajectory.is_followed = False
                self._play(trajectory, 0.0, trajectory.index - 1)
        self.place()

    def _complete(self, trajectory: Trajectory) -> None:
        if is_stale(trajectory.oldest_version, self.head_version, self.setup.staleness):
            raise Broken(f"trajectory {trajectory.number} is {trajectory.oldest_version} of {self.head_version}: stale")
        self.books.completes(trajectory.number)
        self.completed_count += 1
        group = trajectory.group
        batch = group.batch
        self.agents.release(trajectory)
        del batch.open[trajectory.number]
        if self._router is not None:
            self._router.completed(trajectory)
        group.missing -= 1
        group.made += trajectory.made
        if not group.missing:
            self._cancel([each for each in batch.open.values() if each.group is group])
        self.agents.claim()
        if group.missing or group.index not in batch.plan.kept:
            return
        batch.missing_groups -= 1
        if not batch.missing_groups and not batch.is_done:
            batch.is_done = True
            self._cancel(list(batch.open.values()))
            self.books.throws_away(sum(each.made for each in batch.groups if each.missing))
            self.batches.remove(batch)
            batch.on_done([batch.plan.groups[each.index] for each in batch.groups if each.missing])

    def _cancel(self, trajectories: list[Trajectory]) -> None:
        """End what a step no longer needs."""
        for trajectory in trajectories:
            self.agents.release(trajectory)
            del trajectory.group.batch.open[trajectory.number]
            self.books.completes(trajectory.number, is_cancelled=True)
            self.books.throws_away(trajectory.made)
            turn = trajectory.turn
            if turn is not None and turn.engine:
                self.by_name[turn.engine].take_back([turn], keeps_tokens=True)
        self.agents.claim()

    def check(self) -> None:
        """Check the books against the engines, and each engine's time.

        Raises:
            Broken: they differ.
        """
        running = sum(engine.made(turn) for engine in self.engines for turn in engine.turns())
        for run in self.beside:
            waits = [*run._homed.values(), *(row[2] for row in run._ready), *run._lost]
            running += sum(turn.made for turn in waits)
        self.books.check(running)
        for engine in self.engines:
            engine.check_time()


def patience_s(turn: Turn, us_per_token: int) -> float:
    """Compute how long a turn waits for its home before an engine of this speed may take it."""
    return min(PATIENCE_S, 1e-6 * turn.context_tokens * us_per_token)

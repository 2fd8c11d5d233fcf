"""The ports: what the rest of the system may ask of a broker.

One trajectory passes them in this order: RolloutStream.push → TrajectoryQueue.claim → TurnQueue.push →
TurnQueue.exchange (claim, renew, settle) → TrajectoryQueue.settle → RolloutStream.receive → acknowledge.

Every method is atomic on its own. A call whose answer was lost may be repeated: pushes are known by their ids,
settling by its fence. Errors: BrokerError when the broker cannot be reached, WireError for bytes not ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any, Literal, Protocol

from ..contract.agreement import Agreement, TokenDifferences
from ..contract.fields import WHOLE_MAX
from ..contract.ids import NAME
from ..contract.images import Image
from ..contract.lease_plan import LeaseChange, LeasePlan, Sample
from ..contract.limits import TURN_COUNT_MAX
from ..contract.records import (
    DeadLetter,
    Group,
    HeldLease,
    Lease,
    Rollout,
    RunConfig,
    TokenLog,
    TrajectoryJob,
    TurnJob,
    TurnResult,
    WorkerInfo,
)
from ..contract.sharing import LendSetting, SharingReport
from ..rules.queue.curve import Curve
from ..rules.queue.dead import DeadVerdict
from ..rules.queue.timings import Histograms, Timings
from .reading import TrajectoryReader
from .weights import WeightStore

FENCES_PER_CLAIM = 65536  # of a turn, within one claim of its trajectory: fabric/queue/lua/use/record.lua
NotPushed = Literal["lost", "over"]  # the trajectory's claim is lost; the trajectory has had all its turns


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryClaim:
    """An agent's hold on one trajectory.

    is_first: nobody has held it before. waited_s: since it became ready, by the broker's clock; None: not known. turns:
    what earlier claims of this attempt settled, to be replayed. turn_count_max: of its turns, in all claims.
    """

    job: TrajectoryJob
    worker_id: str
    fence: int
    attempt: int
    loss: int
    is_first: bool = True
    waited_s: float | None = None
    snapshot: bytes | None = None
    turns: tuple[TurnResult, ...] = ()
    turn_count_max: int = TURN_COUNT_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreClaim:
    """A reward worker's hold on one reward. `loss`: what it has cost before; above the bound given there is no more."""

    loss: int
    rollout: Rollout | None = None
    task: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnClaim:
    """A rollout worker's hold on one turn. `log`: tokens that earlier claims made. images: its job's.

    waited_s: since it became ready, by the broker's clock; None: not known.
    """

    job: TurnJob
    fence: int
    loss: int
    waited_s: float | None = None
    log: TokenLog | None = None
    images: tuple[Image, ...] = ()

    @property
    def is_handed_over(self) -> bool:
        """True if an earlier claim began it."""
        return self.fence % FENCES_PER_CLAIM > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPush:
    """An agent asks for a turn of a trajectory that it holds. turn_count_max: see its claim.

    images: the files of all images in the job, by digest. The broker gets those that it lacks, and keeps them until the
    trajectory ends. home: the worker whose cache may hold the context: the turn waits for it a while (rules/queue/
    placement.py), if no weights came since home_version; empty: anybody is as good.
    """

    trajectory_id: str
    fence: int
    job: TurnJob
    turn_count_max: int = TURN_COUNT_MAX
    home: str = ""
    home_version: int = WHOLE_MAX
    images: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSettle:
    """A worker hands in a finished turn."""

    claim: TurnClaim
    result: TurnResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnProgress:
    """A worker still runs a turn. log: its tokens so far, or one part of them, to be kept in this place among the parts
    (rules/queue/token_parts.py); None: what was saved stays. saved_before: what the parts before it must be, and
    saved_then, what all are with it; empty where it is whole."""

    claim: TurnClaim
    log: TokenLog | None = None
    place: int = 0
    saved_before: str = ""
    saved_then: str = ""


@dataclass(slots=True)
class Exchange:
    """The answer to one round trip of a rollout worker.

    claims: new turns. saved: ids whose claim goes on, and whose tokens are kept, where any were sent. lost: ids whose
    claim is gone: abort them. refused: ids whose settling was stale. unsettled: to be handed in again. has_lease:
    False: the broker knows no such lease. behind: head, for weights too old to claim. next_ms: in which a turn that
    waits for its home may be taken here; None: none is known.
    """

    claims: list[TurnClaim] = field(default_factory=list)
    saved: set[str] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unsettled: set[str] = field(default_factory=set)
    has_lease: bool = True
    behind: int | None = None
    next_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """The jobs that a reaper took back. scoring: reward jobs to be asked for again, as (trajectory_id, fence)."""

    ready_count: int = 0
    scoring: tuple[tuple[str, int], ...] = ()
    dead_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPush:
    """A group on its way in: all its trajectories at once.

    quorum: rollouts that complete it; what has not ended by then is cancelled. None: every trajectory must end.
    priority: 0 first, 1 normal, 2 last. deadline_s: seconds from the push after which it completes with what it has.
    """

    group_id: str
    task_id: str
    task: dict[str, Any]
    jobs: tuple[TrajectoryJob, ...]
    quorum: int | None = None
    priority: int = 1
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A complete group as received, with what acknowledging it takes. holder: who received it."""

    group: Group
    shard: int
    entry_id: str
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerBeat:
    """The answer to a consumer's sign of life.

    taken_count: groups that it took over from others. was_lost: what it held before was taken over by others.
    namesakes: other live clients that consume under its name.
    """

    taken_count: int = 0
    was_lost: bool = False
    namesakes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run in numbers; O(1) in its history. `counters` are totals since it began."""

    config: RunConfig
    head_version: int
    depth: int
    memory_bytes: int
    trajectories: Mapping[str, int]
    turns: Mapping[str, int]
    groups_waiting: int
    dead_count: int
    counters: Mapping[str, int]
    agreement: Agreement | None = None  # of workers with the trainer, as it was last compared
    rewards: Curve = ()  # of completed rollouts by policy version; a survey leaves it out
    weights: str = ""  # of the head, by their digest: the same for runs whose weights are bit for bit the same


BAD_ROW_COUNT_MAX = 100  # shown at once: more of them would not be read by people either


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row of the broker's tables that cannot be read. Readers pass over it; a person removes it."""

    table: str
    """The table, as "runs" of the fabric, or "r1.0:counters" of a shard of run r1."""
    row: str
    """Its name as it is shown; empty: the whole table is of another type than it should be."""
    problem: str

    @property
    def step(self) -> str:
        """The command that removes it."""
        if self.table == "runs" and NAME.match(self.row):
            return f"rollfab runs rm --yes --run {quote(self.row)}"
        return " ".join(["rollfab rows rm --", quote(self.table), *([quote(self.row)] if self.row else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSurvey:
    """A look through all tables. cut: tables of which some rows were looked at. is_whole: it came to all tables."""

    bad_rows: Sequence[BadRow] = ()
    table_count: int = 0
    row_count: int = 0
    cut: Sequence[str] = ()
    is_whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A consumer of a run's complete groups: all clients of its name together.

    held_count: groups received and not acknowledged. heard_s: since it asked or gave a sign of life: a training step
    takes its time. left_s: until what it holds goes to whoever asks, if it gives no more signs; 0: its time is over, or
    not known.
    """

    name: str
    held_count: int
    heard_s: float
    left_s: float = 0.0

    @property
    def is_live(self) -> bool:
        """True if it keeps what it holds: it has given a sign of life in its time."""
        return self.left_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """Details beside a run's numbers: who consumes, and why one of its dead letters died (None: there is none)."""

    consumers: tuple[Consumer, ...] = ()
    dead_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All that a capacity plan is made of but what serving teams said. workers: with the age of the last heartbeat, ms;
    below 0: it lies in the future.

    assignments: worker → the runs whose leases it looks at, a blank between. leases: by run, then by worker; one that
    is not the same on all shards of its run shows with no slots. wall_ms: the broker machine's time. now_ms: the
    fabric's clock. bad_rows: what could not be read and was left out, at most BAD_ROW_COUNT_MAX.
    """

    workers: Mapping[str, tuple[WorkerInfo, int]]
    assignments: Mapping[str, str]
    runs: Mapping[str, RunStatus]
    leases: Mapping[str, Mapping[str, Lease]]
    wall_ms: int = 0
    now_ms: int = 0
    bad_rows: Sequence[BadRow] = ()


class TrajectoryQueue(Protocol):
    """Trajectories of one run, as an agent worker sees them."""

    async def claim(
        self, worker_id: str, want: int, *, takes_suspect: bool = True, is_inside: bool = True
    ) -> list[TrajectoryClaim]:
        """Take trajectories, the most urgent first.

        Args:
            worker_id: the agent.
            want: how many at most.
            takes_suspect: whether one of them may be a suspect (rules/queue/retries.py); an agent holds one at a time.
            is_inside: their environments run in the agent's own process, and could end it.
        """
        ...

    async def renew(self, worker_id: str, claims: Sequence[TrajectoryClaim]) -> list[str]:
        """Extend claims; returns the ids that are lost."""
        ...

    async def save(self, worker_id: str, claim: TrajectoryClaim, snapshot: bytes) -> bool:
        """Keep an environment's snapshot with the claim; False when the claim is lost."""
        ...

    async def settle(self, claim: TrajectoryClaim, rollout: Rollout, *, is_scored: bool) -> bool:
        """Hand in a finished trajectory; False when the claim is lost, or its tokens are too stale by now.

        A stale one has failed its attempt: it runs again, with fresher weights, as long as it has attempts left.
        """
        ...

    async def score(self, trajectory_id: str, fence: int, reward: float) -> bool:
        """Complete a trajectory that waits for its reward; False when it no longer does, or is too stale by now."""
        ...

    async def begin_score(
        self, trajectory_id: str, fence: int, worker_id: str, duration_s: float, *, loss_max: int = 0
    ) -> ScoreClaim | None:
        """Begin to compute a reward; a worker that then keeps it no longer than `duration_s` has cost a loss of 1.

        None: the trajectory does not wait for its reward any more, or another worker computes it. A claim without a
        rollout: it has cost more than `loss_max`, and was not begun.
        """
        ...

    async def lose_score(self, trajectory_id: str, fence: int, letter: DeadLetter) -> str:
        """Note that the letter's worker lost the process that computed a reward; returns "retry", "dead" or "lost"."""
        ...

    async def keep_scoring(
        self, rows: Sequence[tuple[str, int]], duration_s: float, *, worker_id: str = "-"
    ) -> list[str]:
        """Put off asking again for the rewards of these trajectories (id, fence) for `duration_s`.

        Returns those that no longer wait for one. With a duration of 0 that worker lets go of what it had begun, at no
        cost.
        """
        ...

    async def fail(self, trajectory_id: str, fence: int, letter: DeadLetter, *, is_final: bool = False) -> str:
        """Note that one attempt has failed; returns "retry", "dead" or "lost"."""
        ...

    async def release(self, worker_id: str, claims: Sequence[TrajectoryClaim]) -> None:
        """Give claims back unharmed (the agent is leaving)."""
        ...

    async def reap(self, worker_id: str) -> Reaped: ...
    async def wait(self, timeout_s: float) -> None:
        """Return when a trajectory may be waiting, or after `timeout_s`."""
        ...


class TurnQueue(Protocol):
    """Turns of one run: pushed by agents, exchanged by rollout workers."""

    async def push(self, agent_id: str, pushes: Sequence[TurnPush]) -> list[NotPushed | None]:
        """Ask for turns; return for each why it was not taken; None: it was."""
        ...

    async def cancel(self, agent_id: str, pushes: Sequence[TurnPush]) -> None:
        """Give up turns that were asked for and are not settled: their results come as "cancelled"."""
        ...

    async def results(self, agent_id: str, timeout_s: float) -> list[TurnResult]:
        """Return settled turns for this agent, each once per settling; waits up to `timeout_s` for the first."""
        ...

    async def exchange(
        self,
        worker_id: str,
        *,
        settles: Sequence[TurnSettle] = (),
        progress: Sequence[TurnProgress] = (),
        want: int = 0,
        lease_epoch: int = 0,
        active_version: int = -1,
        weights_epoch: int = 0,
        takes_suspect: bool = True,
        us_per_token: int = 0,
        hardware: str = "",
    ) -> Exchange:
        """Hand in what finished, keep what runs, take what is ready: one round trip.

        weights_epoch: of the publisher that made the active version the head, 0: not said. Who holds weights of an
        earlier one is given nothing: by this version it, or a run of this name, may have meant others. takes_suspect:
        whether one of those taken may be a suspect (rules/queue/retries.py); a worker holds one at a time.
        us_per_token: what this worker pays for a token of a prompt, where the run wants prefix affinity, or 0;
        hardware: its kind (rules/queue/placement.py).
        """
        ...

    async def release(self, worker_id: str, progress: Sequence[TurnProgress], *, is_stalled: bool = False) -> None:
        """Give turns back with their tokens so far: revoked, drained or leaving.

        A turn that stalled has cost a worker; one that stalls everywhere is given up in the end.
        """
        ...

    async def reap(self, worker_id: str) -> Reaped: ...
    async def wait(self, worker_id: str, timeout_s: float) -> None:
        """Return when a turn may be waiting for this worker or for anybody, or after `timeout_s`."""
        ...


class RolloutStream(Protocol):
    """Groups of one run, as a trainer sees them."""

    async def push(self, groups: Sequence[GroupPush]) -> list[bool]:
        """Take groups in, each whole or not at all; False for those already known.

        Raises:
            FabricError: some were refused (QueueFull, BrokerFull, RunUnknown), or their answer was lost. Facts: taken,
            refused and doubtful name them; without these, nobody knows.
        """
        ...

    async def known(self, group_ids: Sequence[str]) -> list[bool]:
        """Say of each group whether it is here, or was consumed or cancelled lately: then a push changes nothing."""
        ...

    async def is_there(self) -> bool:
        """Tell whether the run is still the one that this client began with: neither deleted nor made again since."""
        ...

    async def pinned(self) -> int | None:
        """Return the version that the run evaluates, whoever pinned it; None: it is no evaluation."""
        ...

    async def pin(self, version: int) -> None:
        """Refuse clients that pinned another version from now on: VersionConflict. Those that pinned none go on."""
        ...

    async def check_there(self) -> None:
        """Require that. Raises RunUnknown, VersionConflict: it says what became of the run, and what to do."""
        ...

    async def beat(self, consumer: str, duration_s: float) -> ConsumerBeat:
        """Say that this client consumes under a name: what it received is its own for `duration_s` from now.

        It takes over what others have not acknowledged: with its first beat that of clients of its name, which it
        follows, and with every beat that of consumers whose time is over. That is received next, marked redelivered.
        """
        ...

    async def receive(self, consumer: str, count: int, timeout_s: float) -> list[Delivery]:
        """Return complete groups; first those that the consumer holds but did not acknowledge, marked redelivered.

        A group that is too stale is not delivered, however often it was before: it runs again.
        """
        ...

    async def peek(self, count: int) -> list[Group]:
        """Return up to `count` complete groups that are not acknowledged, the oldest first, and leave all as it is.

        Groups in consumers' hands are among them, and those too stale to be delivered.
        """
        ...

    def put_back(self, delivery: Delivery) -> None:
        """Give a group back that was not used after all: it comes again, marked redelivered."""
        ...

    async def acknowledge(self, delivery: Delivery) -> bool:
        """Acknowledge a group that was used; False when it was acknowledged or cancelled before.

        Raises:
            ClaimLost: another consumer took it over, or it runs again. Nothing was written.
        """
        ...

    async def swap(self, delivery: Delivery, group: GroupPush) -> bool:
        """Acknowledge a group that is not wanted, and push one that runs in its place: both or neither.

        group: of the same shard, and as many trajectories. What the dropped one had of quorum, priority and deadline
        (which begins again) it has, too, and whatever the run is full of, it takes the dropped one's place.

        Returns:
            Whether it runs in its place; False: the group was acknowledged or cancelled before, or another task was
            pushed under this name. What of the two is still to be done is done.

        Raises:
            ClaimLost: as `acknowledge`.
            QueueFull: the run's dead letters are full, or the group would never fit. Nothing was written.
        """
        ...

    async def keep_differences(self, found: Sequence[TokenDifferences]) -> int:
        """Keep beside their groups, until these are forgotten, how far log-probabilities differ; return of how many.

        Those whose group is acknowledged or gone are not kept.
        """
        ...

    async def cancel(self, group_id: str) -> bool:
        """Drop a group; False: it is not there. Raises RunUnknown, as `check_there`."""
        ...

    async def reap(self) -> int:
        """Complete groups whose deadline has passed with what they have; returns how many."""
        ...

    async def dead_letters(self, count: int) -> list[DeadLetter]: ...
    async def retry(self, trajectory_ids: Sequence[str], *, is_dry: bool = False) -> dict[str, DeadVerdict]:
        """Let trajectories that were given up run again in their own groups, each group's together and each once.

        Returns what became of each, also where a call whose answer was lost is repeated. is_dry: what would.
        """
        ...

    async def discard(self, trajectory_ids: Sequence[str], *, is_dry: bool = False) -> dict[str, DeadVerdict]:
        """Forget dead letters; returns what became of each: done or unknown. is_dry: what would."""
        ...


class LeaseBoard(Protocol):
    """Runs, workers and leases: the control plane."""

    async def create_run(self, config: RunConfig) -> RunConfig:
        """Create the run, or return it if it exists with the same settings. Raises RunMismatch."""
        ...

    async def change_run(self, was: RunConfig, config: RunConfig) -> bool:
        """Change a run's settings; False: they are not what they were, so nothing was changed. Raises RunMismatch."""
        ...

    async def runs(self) -> dict[str, RunConfig]:
        """Return every run; one that cannot be read is left out, and among the bad rows of a survey."""
        ...

    async def delete_run(self, run_id: str) -> None:
        """Remove a run and all that it has, also one that cannot be read. Raises RunUnknown."""
        ...

    async def survey_rows(self, tables: Sequence[str] = ()) -> RowSurvey:
        """Look through these tables (none named: all) for rows that cannot be read; for people, as it reads much."""
        ...

    async def remove_row(self, row: BadRow) -> bool:
        """Remove a row that cannot be read; False: it is gone already, or can be read."""
        ...

    async def run_status(self, run_id: str) -> RunStatus:
        """Return a run in numbers. Raises RunUnknown."""
        ...

    async def run_details(self, run: RunConfig) -> RunDetails:
        """Read the details beside the run's numbers."""
        ...

    async def memory_bytes(self) -> tuple[int, int]:
        """Return the bytes that the broker holds and may hold (0: no limit); of a cluster, of the fullest node."""
        ...

    async def set_agreement(self, run_id: str, agreement: Agreement) -> None:
        """Keep how workers and trainer agreed last; it replaces what was kept. Raises RunUnknown."""
        ...

    async def heartbeat(self, info: WorkerInfo) -> HeldLease | None:
        """Say that a worker lives; returns its lease, if it has one that has not ended."""
        ...

    async def add_timings(self, info: WorkerInfo, timings: Timings) -> None:
        """Add what a worker has measured since its last report to the histograms of its runs, each report once."""
        ...

    async def timings(self, run_id: str | None = None) -> dict[str, Histograms]:
        """Return the histograms of every run, or of one: of all roles, also of those that have ended."""
        ...

    async def wait_lease(self, worker_id: str, timeout_s: float) -> None:
        """Return when this worker's lease may have changed, or after `timeout_s`."""
        ...

    async def workers(self) -> dict[str, tuple[WorkerInfo, int]]:
        """Return every known worker, and the age of its last heartbeat in ms."""
        ...

    async def forget_worker(self, worker_id: str) -> None: ...
    async def lead(self, controller_id: str, duration_ms: int, *, process: str = "", is_new: bool = False) -> int:
        """Become or stay leader; returns the term, 0: another process leads. is_new: it replaces one of its name."""
        ...

    async def open_term(self, term: int) -> None:
        """Open a term: from here on no lease of an older one can be written, on any run that there is."""
        ...

    async def survey(self, *, has_rewards: bool = False) -> Survey:
        """Read everything that a plan is made of, in a few round trips; also the curves of rewards, if wanted."""
        ...

    async def change_leases(self, term: int, changes: Sequence[LeaseChange], assigned: Mapping[str, str]) -> list[bool]:
        """Carry out a plan of this term, ends first; False where a newer term or lease is in place (nothing written).

        assigned: worker → the run whose leases it looks at, as it was read; one that must look elsewhere is told and
        woken. Raises RunUnknown, with nothing carried out.
        """
        ...

    async def set_read_costs(self, term: int, costs: Mapping[str, Mapping[str, int]]) -> None:
        """Say which runs have workers of unlike hardware (rules/lending/hardware.py), unless a newer term has begun.

        costs: by run and kind; none: its workers are alike, as they are taken to be when a term begins. Raises
        RunUnknown, with nothing written.
        """
        ...

    async def forget_workers(self, term: int, worker_ids: Sequence[str]) -> bool:
        """Take silent workers off the board; False when a newer term has begun (nothing written)."""
        ...

    async def set_plan(self, plan: LeasePlan) -> bool:
        """Keep the newest plan, for people; False when a newer term than its own has begun (nothing written)."""
        ...

    async def plan(self) -> LeasePlan | None:
        """Return the newest plan; None: there is none, or it cannot be read."""
        ...

    async def add_sample(self, term: int, sample: Sample) -> bool:
        """Keep a sample for people who look later; False (and nothing written) if a newer term has begun."""
        ...

    async def samples(self, since_ms: int, until_ms: int) -> list[Sample]:
        """Return the samples that were written between two times of the broker's wall clock, the oldest first."""
        ...

    async def leases(self, run_id: str) -> dict[str, Lease]: ...
    async def set_lend(self, subject: str, value: LendSetting | str) -> None:
        """Set the serving team's word on a worker, a pool ("pool:NAME") or all ("*"), until it says otherwise.

        The workers that it concerns are woken at once, whoever leads or does not, and the switch is an event: all of
        it, or nothing. A word is understood too: "on", "observe", "off", "clear" (nothing is said of it any more), or
        a number of slots. Raises InputError.
        """
        ...

    async def change_lend(self, subject: str, changes: Mapping[str, Any]) -> LendSetting:
        """Change some fields of a setting, whoever changes others at once; returns the whole.

        See rules/lending/terms.py, `changed`; what `set_lend` says of waking and events holds here.
        """
        ...

    async def lends(self) -> dict[str, LendSetting]:
        """Return all that was said, by subject; what cannot be read is "off"."""
        ...

    async def lends_of(self, worker_id: str, pool: str) -> tuple[dict[str, LendSetting], int]:
        """Read the settings that concern one worker, and the broker machine's time in ms since 1970."""
        ...

    async def wall_ms(self) -> int:
        """Return the broker machine's time in ms since 1970: hours of the day are counted by it."""
        ...

    async def set_sharing(self, report: SharingReport) -> None:
        """Keep what a serving worker on the board measured; it replaces what was kept, and goes with the worker."""
        ...

    async def sharing(self) -> dict[str, SharingReport]:
        """Return the reports of serving workers, by worker; those that cannot be read are left out."""
        ...

    async def add_event(self, kind: str, facts: Mapping[str, Any]) -> None: ...
    async def add_events(self, events: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Add several events at once, as (kind, facts)."""
        ...

    async def events(self, after: str, count: int, timeout_s: float) -> list[tuple[str, str, dict[str, Any]]]:
        """Return events after id `after` as (id, kind, facts)."""
        ...

    async def newest_events(self, before: str, count: int) -> list[tuple[str, str, dict[str, Any]]]:
        """Return events before id `before` ("": before none, so all), the newest first."""
        ...


class Fabric(Protocol):
    """All ports of one broker; the queues are made per run."""

    @property
    def board(self) -> LeaseBoard: ...
    def trajectories(self, run: RunConfig) -> TrajectoryQueue: ...
    def turns(self, run: RunConfig) -> TurnQueue: ...
    def rollouts(self, run: RunConfig) -> RolloutStream: ...
    def reading(self, run: RunConfig) -> TrajectoryReader: ...
    @property
    def weights(self) -> WeightStore: ...
    async def close(self) -> None: ...

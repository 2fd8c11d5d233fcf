"""Every key in the broker: name, type, fields, lifetime, and who deletes it.

Keys of one script share a hash tag, so they share a slot of a Redis Cluster. There are three tags:

    {rf}          the fabric as a whole      (workers, runs, controller)
    {run.s}       shard `s` of a run         (jobs, groups, leases of that run)
    {run.w}       a run's weights            (head, manifests, chunks, who holds what)

Values written `a b c` are words joined by one blank; times are integer milliseconds of the broker's clock.

Fabric: tag {rf}
  rf:{rf}:runs              HASH   run_id → RunConfig. No TTL; deleted by `delete_run`.
  rf:{rf}:deleted:<run>     STRING "": the run was deleted, and not lost. TTL DELETED_TTL_MS tells when.
  rf:{rf}:workers           HASH   worker_id → WorkerInfo. Deleted by the worker as it leaves, or by the controller
                                   when its heartbeat is too old.
  rf:{rf}:heartbeats        ZSET   worker_id → time of the last heartbeat. As above.
  rf:{rf}:lends             HASH   worker_id | "pool:NAME" | "*" → LendSetting, what its serving team said. Theirs.
  rf:{rf}:sharing           HASH   worker_id → SharingReport. With the worker.
  rf:{rf}:assignments       HASH   worker_id → "run_id …": the runs whose leases to look at, the one whose weights it
                                   follows in front. Controller; with the worker.
  rf:{rf}:leader            STRING "controller/process term until_ms". Rewritten by whoever leads.
  rf:{rf}:lease_epoch       STRING the highest term, only grows: older ones write nothing. Never deleted.
  rf:{rf}:plan              STRING LeasePlan, the newest: for people. Rewritten by whoever leads. Never deleted.
  rf:{rf}:samples           STREAM sample: a Sample a minute, the newest that fit in SAMPLES_BYTES_MAX. Whoever leads.
  rf:{rf}:events            STREAM kind, facts (JSON). Bounded to about EVENT_COUNT_MAX: for people to read.
  rf:{rf}:clock             STRING "wall now": the clock of this tag, the broker's without its steps (use/look.lua).
  rf:{rf}:lease_bell:<worker>  LIST one ring at most: this worker's lease may have changed. TTL BELL_TTL_MS.

Run shard: tag {run.s}. Without a note: deleted with the run.
  rf:{run.s}:run            HASH   head_version, staleness, when_stale, depth (trajectories not yet consumed) and
                                   depth_max, bytes (jobs and rollouts of open and waiting groups), bytes_max and
                                   kept_bytes. first_fence: see use/first.lua. moved_by: as in rf:{run.w}:head.
                                   weights: of the head, by its digest (format/manifest.py, state_digest).
                                   pinned: the version that the run evaluates, if it is an evaluation.
                                   Shard 0: agreement (Agreement), as a trainer compared last.
  rf:{run.s}:clock          STRING as rf:{rf}:clock.
  rf:{run.s}:counters       HASH   totals since the run began (groups_submitted, turns_settled, tokens, …).
  rf:{run.s}:rewards        HASH   version // width → "count sum squares min max tokens" of completed rollouts, and
                                   "width"; at most BUCKET_COUNT_MAX (rules/queue/curve.py).
  rf:{run.s}:timings        HASH   "name role place" → durations in a bucket of a histogram, or their sum, and
                                   "name role ~place" → the latest one (rules/queue/timings.py). What roles measure is
                                   in shard 0, what the broker does where it happens.
  rf:{run.s}:lengths        HASH   four hexadecimal digits of a task, or "-" for all → "count sum" of how long its last
                                   trajectories were (rules/queue/length.py); at most 65,537 fields.
  rf:{run.s}:told:<worker>  STRING the number of the last report of durations. Shard 0. TTL TOLD_TTL_MS.
  rf:{run.s}:leases         HASH   worker_id → "lease_epoch slot_count lease_until_ms" (0: standing). Controller.
  rf:{run.s}:lease_slots    STRING the slots of all leases together, counted as leases are written. Controller.
  rf:{run.s}:lease_term     STRING the highest term that has written leases here. Controller.
  rf:{run.s}:group:<id>     HASH   size, quorum, priority, completed, failed, cancelled (trajectories that ended so),
                                   state (open | complete), ended_by and entry (of `completed`) once it was
                                   complete, bytes, task (JSON), deadline if it has one,
                                   redelivered if it was taken back from somebody who may have used it.
                                   pushed: when it was taken in. differences:<trajectory_id>: TokenDifferences, of
                                   some, as a trainer compared last. order: as in open. Deleted by acknowledge, swap or
                                   cancel.
  rf:{run.s}:open           HASH   group_id → "priority missing quorum order" of groups not complete. Field
                                   deleted then. order: 1 its task is a long one, 2 nearness to completion counts
                                   nothing, 3 both.
  rf:{run.s}:late           ZSET   group_id → its deadline. Member deleted when it is complete or cancelled, and
                                   there again when it is taken back to be run again.
  rf:{run.s}:rollouts:<id>  HASH   trajectory_id → Rollout. As above.
  rf:{run.s}:completed      STREAM group: complete groups, consumer group "trainer", consumers "name/client". Entry
                                   deleted by acknowledge or swap.
  rf:{run.s}:consumers      ZSET   "name/client" → until when what it received is its own. Member deleted, with the
                                   stream's consumer, by whoever takes its groups over.
  rf:{run.s}:dead           HASH   trajectory_id → DeadLetter. Deleted by retry or discard.
  rf:{run.s}:consumed       ZSET   group_id → when it was acknowledged or cancelled, the newest CONSUMED_COUNT_MAX.
  rf:{run.s}:begun          ZSET   trajectory_id → when an agent took it first. Member deleted when it ends; a rollout
                                   that is too stale is there again.
  rf:{run.s}:kept           STREAM group, bytes: acknowledged groups that are kept for people to look at, the newest and
                                   ever fewer older ones (rules/queue/keeping.py). Their sum is the run's kept_bytes.
  rf:{run.s}:kept:row:<id>  HASH   as group:<id>, which it was. Deleted with its entry of kept.
  rf:{run.s}:kept:rollouts:<id>  HASH  as rollouts:<id>. As above.

  For each kind of job, K = trajectory | turn:
  rf:{run.s}:K:ready:<u>    STREAM id: jobs that wait, by urgency 0 (first), 1, 2; consumer group "workers". Entry
                                   deleted by claim.
  rf:{run.s}:K:suspects     LIST   id: suspects that wait; a worker holds one at a time. Entry deleted by claim.
  rf:{run.s}:K:job          HASH   id → TrajectoryJob | TurnJob. Turns: deleted when they end. Trajectories: deleted
                                   with the group, for a rollout too stale to be delivered is run again.
  rf:{run.s}:K:record       HASH   id → "state fence attempt loss rerun blame seen inside worker"; loss, blame, seen:
                                   what speaks against it (rules/queue/retries.py), in state scoring loss is what its
                                   reward has cost and worker who computes it, or "-"; inside: its world runs in its
                                   worker. Trajectories: deleted with the group. Turns: deleted when their trajectory
                                   ends.
  rf:{run.s}:K:deadline     ZSET   id → claim_until_ms. Member deleted when the claim ends.
  rf:{run.s}:K:held         HASH   worker_id → claims it holds. Field deleted at zero. "-": when they were counted
                                   anew, in ms.
  rf:{run.s}:K:bell         LIST   wakes one idle worker; bounded to 64: more would only cost empty claims.
  rf:{run.s}:K:log          HASH   id → what an unfinished job has made so far: a trajectory's snapshot (JSON), a turn's
                                   TokenLog. Of a turn also "id~1" and "id~2", its next parts, and "id~0", which
                                   parts there are (rules/queue/token_parts.py). Deleted when the job ends.
  rf:{run.s}:turn:agent     HASH   turn_id → agent_id that waits for it. Deleted when its trajectory ends.
  rf:{run.s}:turn:result    HASH   turn_id → TurnResult, for recovery. Deleted when its trajectory ends.
  rf:{run.s}:turn:homed     ZSET   "home class since tokens turn_id", all at 0: turns that wait for the worker that made
                                   the turn before, by its name, or "~": for hardware that suits them
                                   (rules/queue/placement.py). Member deleted by claim.
  rf:{run.s}:turn:homed_at  ZSET   the same members → since when they wait. Member deleted by claim.
  rf:{run.s}:turn:hardware  HASH   where workers are of unlike hardware: kind → what reading a token costs more there,
                                   us (rules/lending/hardware.py), and of turns that waited for what suits them
                                   "<tab>count" and "<tab>tokens". Deleted when they are alike, or a term begins.
  rf:{run.s}:turn:bell:<worker>  LIST one ring at most: a turn waits for this worker. TTL BELL_TTL_MS.
  rf:{run.s}:turn:image     HASH   "trajectory_id/digest" → an image that its turns show, as a file; trajectory_id →
                                   their digests, a blank before each. Deleted when the trajectory ends.
  rf:{run.s}:inbox:<agent>  STREAM id, result: settled turns for one agent. Entries deleted by it; TTL INBOX_TTL_MS.

Weights: tag {run.w}
  rf:{run.w}:head           HASH   version, epoch (the publisher's fence), kind, moved_by (epoch that moved it).
  rf:{run.w}:manifests      HASH   "<version>:<kind>" → WeightManifest. Publisher, when no longer reachable.
  rf:{run.w}:chunk:<version>:<kind>.<epoch>:<i>   STRING encoded blocks. As its manifest; TTL until that is written.
  rf:{run.w}:sending        HASH   "<version>:<kind>.<epoch>" → its chunk count: some are written, its manifest is not.
                                   Deleted when the manifest is written, or by the next publisher that opens.
  rf:{run.w}:announcements  STREAM version | offer: a hint that the head moved or an offer is there. Bounded to 16.
  rf:{run.w}:holders        HASH   holder_id → "[version, node, region]" (JSON). With its member of holding.
  rf:{run.w}:addresses      HASH   holder_id → where it serves weights, with the secret that opens it. As holders.
  rf:{run.w}:holding        ZSET   holder_id → until when it is live. Bounded to HOLDER_COUNT_MAX; what is over is
                                   deleted by the next `hold`.
  rf:{run.w}:clock          STRING as rf:{rf}:clock.
  rf:{run.w}:offer          STRING what a publisher offers to carry by another path. TTL given with it.
  rf:{run.w}:answers:<round>  HASH member → its answer, at most ANSWER_COUNT_MAX. TTL given with the last one.
  rf:{run.w}:damage         HASH   "<version>:<kind>" → "[epoch, chunks, problem, reporter]" (JSON): what could
                                   not be read, at most DAMAGE_COUNT_MAX. Publisher, once it is healed; TTL given with
                                   the last one.
  rf:{run.w}:tending        STRING epoch of a publisher that lives and heals. TTL given with it.

rq keeps its own keys under `rq:` (workers/rewards/jobs.py); job results there live for 0 s, failures for an hour.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..contract.errors import WireError
from ..contract.ids import group_of, shard_of
from ..contract.text import one_line

PART_ENDINGS = ("", "~1", "~2")  # behind a turn's id, of its log's fields. Twin: lua/use/parts.lua
PREFIX = "rf"
CONSUMER_GROUP_TRAINER = "trainer"
DIFFERENCES = b"differences:"  # before a trajectory's id, in a group's row
EVENT_COUNT_MAX = 10_000
SAMPLES_BYTES_MAX = 16 << 20
SAMPLE_COUNT_MAX = 7 * 24 * 60  # a week
URGENCY_COUNT = 3
CONSUMED_COUNT_MAX = 100_000  # a trainer that repeats an older push than this many groups would be believed
BELL_TTL_MS = 60_000
TOLD_TTL_MS = 600_000  # a report that is repeated later than this would count twice
DELETED_TTL_MS = 7 * 86_400_000
FENCE_MS = 20  # a step of what a run's fences go on from (lua/use/first.lua): a turn's stay below 2**53 until 2057
INBOX_TTL_MS = 3_600_000  # an agent that has been gone for an hour reads its turns from turn:result instead

RUNS = f"{PREFIX}:{{rf}}:runs"
WORKERS = f"{PREFIX}:{{rf}}:workers"
HEARTBEATS = f"{PREFIX}:{{rf}}:heartbeats"
LENDS = f"{PREFIX}:{{rf}}:lends"
SHARING = f"{PREFIX}:{{rf}}:sharing"
ASSIGNMENTS = f"{PREFIX}:{{rf}}:assignments"
LEADER = f"{PREFIX}:{{rf}}:leader"
LEASE_EPOCH = f"{PREFIX}:{{rf}}:lease_epoch"
PLAN = f"{PREFIX}:{{rf}}:plan"
EVENTS = f"{PREFIX}:{{rf}}:events"
SAMPLES = f"{PREFIX}:{{rf}}:samples"
CLOCK = f"{PREFIX}:{{rf}}:clock"


def table_of(key: str | bytes) -> str:
    """Return the name of a key for people: "runs" for a key of the fabric, "r1.0:counters" for a key of a shard."""
    text = one_line(key if isinstance(key, str) else key.decode("utf-8", "backslashreplace"))
    if not text.startswith(f"{PREFIX}:{{"):
        return text  # rq's
    tag, _, rest = text.removeprefix(f"{PREFIX}:{{").partition("}:")
    return rest if tag == PREFIX else f"{tag}:{rest}"


def key_of(table: str) -> str:
    """Return the key of a table, from its name for people."""
    tag, colon, rest = table.partition(":")
    if tag == "rq":
        return table
    return f"{PREFIX}:{{{tag}}}:{rest}" if colon and "." in tag else f"{PREFIX}:{{{PREFIX}}}:{table}"


def deleted_run(run_id: str) -> str:
    """Return the key that says for a while that a run was deleted."""
    return f"{PREFIX}:{{rf}}:deleted:{run_id}"


def lease_bell(worker_id: str) -> str:
    """Return the key of the list that wakes a worker when its lease has changed."""
    return f"{PREFIX}:{{rf}}:lease_bell:{worker_id}"


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Keys of one kind of job on one shard."""

    ready: tuple[str, ...]
    job: str
    record: str
    deadline: str
    held: str
    bell: str
    log: str
    suspects: str


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """Keys of one group."""

    row: str
    rollouts: str
    kept_row: str
    kept_rollouts: str


class ShardKeys:
    """Keys of shard `shard` of a run."""

    def __init__(self, run_id: str, shard: int) -> None:
        self.base = f"{PREFIX}:{{{run_id}.{shard}}}"
        self.run = f"{self.base}:run"
        self.clock = f"{self.base}:clock"
        self.counters = f"{self.base}:counters"
        self.rewards = f"{self.base}:rewards"
        self.timings = f"{self.base}:timings"
        self.lengths = f"{self.base}:lengths"
        self.open = f"{self.base}:open"
        self.late = f"{self.base}:late"
        self.leases = f"{self.base}:leases"
        self.lease_slots = f"{self.base}:lease_slots"
        self.lease_term = f"{self.base}:lease_term"
        self.completed = f"{self.base}:completed"
        self.consumers = f"{self.base}:consumers"
        self.dead = f"{self.base}:dead"
        self.consumed = f"{self.base}:consumed"
        self.begun = f"{self.base}:begun"
        self.kept = f"{self.base}:kept"
        self.trajectory = self._jobs("trajectory")
        self.turn = self._jobs("turn")
        self.turn_agent = f"{self.base}:turn:agent"
        self.turn_result = f"{self.base}:turn:result"
        self.turn_image = f"{self.base}:turn:image"
        self.turn_homed = f"{self.base}:turn:homed"
        self.turn_homed_at = f"{self.base}:turn:homed_at"
        self.turn_hardware = f"{self.base}:turn:hardware"

    def _jobs(self, kind: str) -> JobKeys:
        ready = tuple(f"{self.base}:{kind}:ready:{urgency}" for urgency in range(URGENCY_COUNT))
        names = ("job", "record", "deadline", "held", "bell", "log", "suspects")
        return JobKeys(ready, *(f"{self.base}:{kind}:{name}" for name in names))

    def of_group(self, group_id: str) -> GroupKeys:
        kept_row, kept_rollouts = (f"{self.base}:kept:{table}:{group_id}" for table in ("row", "rollouts"))
        return GroupKeys(self.group(group_id), self.rollouts(group_id), kept_row, kept_rollouts)

    def group(self, group_id: str) -> str:
        return f"{self.base}:group:{group_id}"

    def rollouts(self, group_id: str) -> str:
        return f"{self.base}:rollouts:{group_id}"

    def told(self, worker_id: str) -> str:
        return f"{self.base}:told:{worker_id}"

    def turn_bell(self, worker_id: str) -> str:
        return f"{self.base}:turn:bell:{worker_id}"

    def inbox(self, agent_id: str) -> str:
        return f"{self.base}:inbox:{agent_id}"


class RunShards:
    """The key sets of a run's shards, and which of them a job is on.

    A shard is the unit that lives whole in one slot of a Redis Cluster. A group and all that belongs to it is on the
    shard that its id hashes to; claims visit shards in turn.
    """

    def __init__(self, run_id: str, shard_count: int) -> None:
        assert shard_count >= 1
        self.run_id = run_id
        self.all = tuple(ShardKeys(run_id, shard) for shard in range(shard_count))
        self._next = 0

    def index_of(self, job_id: str) -> int:
        """Return the index of the shard of a group, trajectory or turn."""
        return shard_of(group_of(job_id), len(self.all)) if len(self.all) > 1 else 0

    def of(self, job_id: str) -> ShardKeys:
        """Return the keys of the shard of a group, trajectory or turn."""
        return self.all[self.index_of(job_id)]

    def check(self, job_id: str, keys: ShardKeys) -> None:
        """Require that a job lies in its own shard: any other job was made up, and nobody who asks for it looks there.

        Raises:
            WireError: it lies in another shard.
        """
        if self.of(job_id) is not keys:
            raise WireError(f"it lies in shard {self.all.index(keys)} and belongs to shard {self.index_of(job_id)}")

    def in_turn(self) -> list[ShardKeys]:
        """Return all shards, starting one further each time, so that none is always served last."""
        self._next = (self._next + 1) % len(self.all)
        return [*self.all[self._next :], *self.all[: self._next]]


class WeightKeys:
    """Keys of a run's weights."""

    def __init__(self, run_id: str) -> None:
        self.base = f"{PREFIX}:{{{run_id}.w}}"
        self.head = f"{self.base}:head"
        self.manifests = f"{self.base}:manifests"
        self.sending = f"{self.base}:sending"
        self.announcements = f"{self.base}:announcements"
        self.holders = f"{self.base}:holders"
        self.holding = f"{self.base}:holding"
        self.addresses = f"{self.base}:addresses"
        self.clock = f"{self.base}:clock"
        self.offer = f"{self.base}:offer"
        self.damage = f"{self.base}:damage"
        self.tending = f"{self.base}:tending"

    def answers(self, round_id: str) -> str:
        return f"{self.base}:answers:{round_id}"

    def chunk(self, version: int, kind: str, index: int) -> str:
        return f"{self.base}:chunk:{version}:{kind}:{index}"

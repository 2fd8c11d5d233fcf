"""What a seed draws: the cluster, the work, and how rough it gets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random
from typing import Any

# Seeds in which a healthy cluster has trouble with one role only, and that just longer than it may be silent.
FOCUSES = ("workers", "agents", "trainer", "leader")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One simulated run. Times are virtual seconds."""

    seed: int
    # the work
    recovery: str
    group_count: int
    group_size: int
    turns: int
    tokens: int
    stops: str
    pace_s: float
    has_reward: bool
    staleness: int
    when_stale: str
    may_mix_versions: bool
    quorum: int | None
    deadline_s: float | None
    attempt_count_max: int
    trajectory_count_max: int
    shard_count: int
    # the cluster
    agent_count: int
    environment_count: int
    dedicated_count: int
    serving_count: int
    slot_count: int
    is_unlike: bool  # workers are of two kinds of hardware, by what they say
    step_s: float
    log_s: float
    sleep_after_s: float | None
    # the trainer
    publish_every: int
    think_s: float
    is_transactional: bool
    dies_on_errors: bool
    cancels: bool
    retries: bool  # somebody lets what was given up run again, as long as there are faults
    loosens: bool  # somebody asks less of the run, and orders its work otherwise, in the middle
    has_rank: bool  # a second process consumes beside the trainer, under a name of its own
    drops: bool  # some groups, which other tasks replace
    # the faults
    faults_s: float
    fault_gap_s: float
    trouble_fraction: float
    travel_s: float
    focus: str
    hangs: bool
    revokes: bool
    kills: bool
    has_guest: bool  # a second run, of the same weights now and then
    deletes_guest: bool  # an operator deletes that in the middle of its work
    remakes_guest: bool  # and somebody else makes one of its name
    evaluates: bool  # two processes evaluate versions of the run beside it, both under one name
    serves_s: float  # a step of the serving engines beside which lent workers are; 0: they are beside none

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the run."""
        return {
            "environment_options": {
                "turns": self.turns,
                "tokens": self.tokens,
                "pace_s": self.pace_s,
                "stops": self.stops,
            },
            "reward": "simulated" if self.has_reward else None,
            "staleness": self.staleness,
            "when_stale": self.when_stale,
            "may_mix_versions": self.may_mix_versions,
            "prefix_affinity": True,
            "attempt_count_max": self.attempt_count_max,
            "trajectory_count_max": self.trajectory_count_max,
            "shard_count": self.shard_count,
        }

    def loosened(self, random: Random) -> dict[str, Any]:
        """Settings that ask less of a run than these, and others that its promises do not depend on."""
        return {
            "staleness": self.staleness + random.randint(0, 2),
            "when_stale": random.choice((self.when_stale, "keep")),
            "attempt_count_max": self.attempt_count_max + random.randint(0, 3),
            "trajectory_count_max": self.trajectory_count_max * random.randint(1, 3),
            "turns_at_commit": random.choice(("keep", "recompute", "finish")),
            "prefix_affinity": random.random() < 0.5,
            "hardware_affinity": random.random() < 0.5,
            "longest_first": random.random() < 0.5,
            "nearest_first": random.random() < 0.5,
            "weight": random.choice((0.1, 1.0, 7.0)),
        }

    @property
    def version_max(self) -> int:
        """The last version that is published: nothing may be stale for ever."""
        return self.group_count * (4 if self.focus == "trainer" else 1) + 1

    @property
    def live_s(self) -> float:
        """Within which everything must end once the faults are over."""
        return (180.0 if self.drops else 90.0) + 5.0 * max(0, self.group_count * self.group_size - 16)

    @property
    def of_guest(self) -> Options:
        """What its second run is like."""
        return dataclasses.replace(
            self, has_reward=False, quorum=None, deadline_s=None, cancels=False, kills=False, is_transactional=False
        )

    def lines(self) -> list[str]:
        """For people."""
        return [f"{field.name:<22}{getattr(self, field.name)}" for field in dataclasses.fields(self)]


def draw(seed: int, *, job_count: int | None = None) -> Options:
    """The options of a seed. job_count: about so many trajectories instead of what the seed draws."""
    random = Random(f"options {seed}")
    focus = random.choices(("", *FOCUSES), (60, 10, 10, 10, 10))[0]
    revokes = not focus and random.random() < 0.25
    hangs = not focus and random.random() < 0.15
    is_long = (
        revokes or focus == "workers" or (focus != "agents" and random.random() < 0.3)
    )  # turns that outlast a claim
    group_count, group_size = random.randint(2, 2 if is_long else 4), random.randint(2, 3 if is_long else 4)
    if job_count is not None:
        group_count = max(1, job_count // group_size)
    total = group_count * group_size
    shard_count = Random(f"shards {seed}").choice((1, 1, 2, 3))
    sleep_after_s = Random(f"sleep {seed}").choice((None, None, 0.3, 1.0))
    return Options(
        seed=seed,
        recovery=random.choice(("replay", "replay", "snapshot", "restart")),
        group_count=group_count,
        group_size=group_size,
        turns=random.randint(1, 2 if is_long else 3),
        tokens=random.choice((24, 32)) if is_long else random.choice((2, 6, 12)),
        stops="" if is_long else "yz",
        pace_s=0.8 if focus == "agents" else random.choice((0.0, 0.02, 0.3)),
        has_reward=random.random() < 0.3,
        staleness=random.randint(0, 2),
        when_stale=random.choice(("rerun", "keep")),
        may_mix_versions=random.random() < 0.8,
        quorum=group_size - 1 if random.random() < 0.25 else None,
        deadline_s=random.choice((2.0, 5.0)) if random.random() < 0.15 else None,
        shard_count=shard_count,
        attempt_count_max=random.choice((2, 3, 5)),
        trajectory_count_max=shard_count * random.choice((group_size, 2 * group_size, total)),
        agent_count=random.randint(2 if focus else 1, 2),
        environment_count=random.choice((3, 8) if is_long or focus else (1, 3, 8)),
        dedicated_count=random.choice((2, 3) if focus == "workers" else (1,) if revokes else (1, 2, 2)),
        serving_count=random.choice((1, 2) if revokes or focus == "leader" else (0, 1, 1, 2)),
        slot_count=2 if revokes else random.randint(2 if is_long else 1, 4),
        is_unlike=Random(f"unlike {seed}").random() < 0.3,
        step_s=random.choice((0.1, 0.15)) if is_long else random.choice((0.01, 0.03)),
        log_s=random.choice((0.2, 0.5)),
        sleep_after_s=sleep_after_s,
        publish_every=1 if focus == "trainer" else random.randint(1, 2),
        think_s=0.2 if focus == "trainer" else random.choice((0.0, 0.05, 0.2)),
        is_transactional=random.random() < 0.3,
        dies_on_errors=random.random() < 0.5,
        cancels=random.random() < 0.1,
        retries=Random(f"retries {seed}").random() < 0.3,
        loosens=Random(f"loosens {seed}").random() < 0.3,
        has_rank=Random(f"rank {seed}").random() < 0.3,
        drops=Random(f"drops {seed}").random() < 0.3,
        faults_s=6.0 if focus else random.choice((2.0, 4.0, 6.0)),
        fault_gap_s=random.choice((0.2, 0.5, 1.0)),
        trouble_fraction=0.0 if focus else random.choice((0.0, 0.01, 0.05)),
        travel_s=0.03 if focus in ("leader", "trainer") else random.choice((0.001, 0.001, 0.03)),
        focus=focus,
        hangs=hangs,
        revokes=revokes,
        kills=not (focus or hangs or revokes) and Random(f"kills {seed}").random() < 0.25,
        has_guest=not (focus or hangs or revokes) and Random(f"guest {seed}").random() < 0.4,
        deletes_guest=Random(f"deletes {seed}").random() < 0.4,
        remakes_guest=Random(f"remakes {seed}").random() < 0.6,
        evaluates=not (focus or hangs or revokes) and Random(f"evaluates {seed}").random() < 0.25,
        serves_s=0.0 if hangs else Random(f"serves {seed}").choice((0.0, 0.0, 0.02, 0.12)),
    )

"""Two controllers: the one that leads is killed or frozen, and whatever it does afterwards, no slot is lent twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.lease_plan import EPOCHS_PER_TERM
from rollfab.fabric.contract.wire import load_json
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue.keys import EVENTS, LEADER, ShardKeys
from tests.support.processes.fabric_processes import PYTHONPATH
from tests.support.queue.played_pool import Stage, run_config, worker_infos
from tests.support.until import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.redis]

RUNS = [run_config(index) for index in range(2)]
WORKER_COUNT = 6
LATE_S = 15.0
SETTLE_S = 0.2  # for what the broker had already been told; the term of a leader is longer
LEASE_EVENTS = (b"lease.granted", b"lease.ended")


@dataclass
class Pool:
    """Workers that say they are there, two controllers, and a watch over every lease."""

    url: str
    redis: Redis
    supervisor: Supervisor
    violations: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def epochs(self) -> dict[tuple[str, str], int]:
        """(Worker, run) → epoch of each lease, all of one moment."""
        with self.redis.pipeline(transaction=True) as pipeline:
            for run in RUNS:
                pipeline.hgetall(ShardKeys(run.run_id, 0).leases)
            answers = pipeline.execute()
        return {
            (name.decode(), run.run_id): int(raw.split()[0])
            for run, rows in zip(RUNS, answers, strict=True)
            for name, raw in rows.items()
        }

    def leases(self) -> dict[str, list[tuple[str, int]]]:
        """Worker → (run, term) of each lease it has, all of one moment."""
        found: dict[str, list[tuple[str, int]]] = {}
        for (name, run_id), epoch in self.epochs().items():
            found.setdefault(name, []).append((run_id, epoch // EPOCHS_PER_TERM))
        return found

    def terms(self) -> set[int]:
        return {term for leases in self.leases().values() for _, term in leases}

    def leader(self) -> tuple[str, int]:
        raw: Any = self.redis.get(LEADER)
        name, term, _ = raw.decode().split() if raw else ("", 0, 0)
        return name.partition("/")[0], int(term)

    def written(self) -> list[tuple[bool, tuple[str, str], int]]:
        """(Whether it is a grant, whose, epoch) of every grant and end that was written down, in order."""
        rows: Any = self.redis.xrange(EVENTS)
        found = [(row[b"kind"], load_json(row[b"facts"])) for _, row in rows if row[b"kind"] in LEASE_EVENTS]
        return [
            (kind == LEASE_EVENTS[0], (each["worker_id"], each["run_id"]), int(each["lease_epoch"]))
            for kind, each in found
        ]

    def unwritten(self) -> set[tuple[bool, tuple[str, str]]]:
        """(Whether it is a grant, whose) of all that was done to leases, and not written down yet."""
        told = {whose: epoch if is_grant else None for is_grant, whose, epoch in self.written()}
        held = self.epochs()
        grants = {(True, whose) for whose, epoch in held.items() if told.get(whose) != epoch}
        return grants | {(False, whose) for whose, epoch in told.items() if epoch is not None and whose not in held}

    def until(self, condition: Callable[[], Any], what: str) -> None:
        wait_until(condition, lambda: f"{what}; {self.leader()}, {self.leases()}", LATE_S, 0.01)

    def has_taken_over(self, after: int) -> bool:
        """A later leader has written every lease anew, and every dedicated worker has one."""
        terms = self.terms()
        return len(self.leases()) >= WORKER_COUNT // 2 and bool(terms) and min(terms) > after

    def watch(self) -> None:
        """Until it is over: no worker has two leases, and the highest term that grants never falls."""
        highest = 0
        with Redis.from_url(self.url) as redis:
            mine = Pool(self.url, redis, self.supervisor)
            while not self.is_over.wait(0.002):
                leases = mine.leases()
                doubles = {name: held for name, held in leases.items() if len(held) > 1}
                terms = {term for held in leases.values() for _, term in held}
                if doubles:
                    self.violations.append(f"two leases: {doubles}")
                if terms and max(terms) < highest:
                    self.violations.append(f"a lease of term {max(terms)} after term {highest}")
                highest = max(highest, *terms, 0)

    def beat(self) -> None:
        """Workers live on, until it is over."""

        async def main() -> None:
            async with await RedisFabric.open(self.url, client_name="pool") as fabric:
                stage = Stage(fabric, WORKER_COUNT, 1)
                await stage.open(RUNS)
                while not self.is_over.is_set():
                    for info in worker_infos(WORKER_COUNT):  # with neither probe nor guard
                        await fabric.board.heartbeat(info)
                    await asyncio.sleep(0.3)

        asyncio.run(main())


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with EmbeddedBroker.start(tmp_path / "broker") as broker, Redis.from_url(broker.url) as redis:
        pool = Pool(broker.url, redis, Supervisor(tmp_path / "logs"))
        threads = [threading.Thread(target=each) for each in (pool.beat, pool.watch)]
        try:
            for name in ("one", "two"):
                place = {"PYTHONPATH": PYTHONPATH, "ROLLFAB_URL": broker.url}
                pool.supervisor.add(name, ["controller", "--name", name], environment=place)
            for thread in threads:
                thread.start()
            pool.until(lambda: pool.has_taken_over(0), "one of two controllers has granted every lease")
            pool.until(lambda: both_are_up(pool), "both controllers are there")
            yield pool
        finally:
            pool.is_over.set()
            for thread in threads:
                thread.join()
            pool.supervisor.stop()


def both_are_up(pool: Pool) -> bool:
    workers: Any = pool.redis.hkeys("rf:{rf}:workers")
    return {b"one", b"two"} <= set(workers)


def lend(pool: Pool, word: str) -> None:
    async def main() -> None:
        async with await RedisFabric.open(pool.url, client_name="team") as fabric:
            await fabric.board.set_lend("*", word)

    asyncio.run(main())


@pytest.mark.timeout(90)
def test_a_killed_leader_is_followed_and_no_worker_ever_has_two_leases(pool: Pool) -> None:
    for _ in range(2):
        # Given a leader
        name, term = pool.leader()
        other = {"one": "two", "two": "one"}[name]
        # When it is killed
        pool.supervisor.kill(name)
        # Then the other one leads, in a higher term, and writes every lease anew
        pool.until(lambda term=term: pool.has_taken_over(term), "the standby has taken over")  # type: ignore[misc]
        assert pool.leader()[0] == other
        assert pool.violations == []
        pool.supervisor.watch()  # the killed one is the next standby
        pool.until(lambda name=name: pool.supervisor.children[name].is_running, "it is started again")  # type: ignore[misc]
        time.sleep(0.5)


@pytest.mark.timeout(90)
def test_a_frozen_leader_that_wakes_changes_nothing(pool: Pool) -> None:
    for word in ("off", "on"):
        # Given a leader that is frozen, wherever it is in its work
        name, term = pool.leader()
        pid = pool.supervisor.children[name].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(SETTLE_S)
            may_come_late = pool.unwritten()
            # When another one leads meanwhile, and the plan becomes another one
            pool.until(lambda term=term: pool.has_taken_over(term), "the standby has taken over")  # type: ignore[misc]
            lend(pool, word)
            want = WORKER_COUNT if word == "on" else WORKER_COUNT // 2
            pool.until(lambda want=want: len(pool.leases()) == want, f"lending is {word}")  # type: ignore[misc]
            leader = pool.leader()
            written_count = len(pool.written())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        # Then it goes on for a while, and everything stays as its successor wrote it
        time.sleep(1.5)
        assert pool.leader() == leader
        assert min(pool.terms()) > term
        assert len(pool.leases()) == want
        # What comes late from it is what it had done before
        late = [row for row in pool.written()[written_count:] if row[2] // EPOCHS_PER_TERM <= term]
        assert {(is_grant, whose) for is_grant, whose, _ in late} <= may_come_late
        assert len(late) <= len(may_come_late)
        assert pool.violations == []

"""A fabric at work: the controller, an agent, a worker, a reward worker and the api as real processes, each with a user
of its own, and a trainer. Good groups go through it, and whoever asks is told what does not hold any more."""

from __future__ import annotations

import contextlib
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

import rollfab
from rollfab.deploy.cli.options import with_ports
from rollfab.deploy.cli.status import snapshot
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.records import Group
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import BadRow
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.trainer.client import Fabric, Run
from tests.fuzz.tables import GOOD, VICTIM
from tests.support.brokers.guarded_broker import Guarded, guarded_broker
from tests.support.brokers.redis_server import free_port
from tests.support.processes.fabric_processes import PYTHONPATH, tiny_weights

WAIT_S = 90.0  # for what was pushed to arrive, on a busy machine
PUSH_S = 0.5  # between two groups
OPEN_COUNT_MAX = 8  # groups under way: more would wait for the machine, and not for who stopped
PUBLISH_S = 10.0  # between two versions of the good run
STALENESS = 1000  # nothing is run again for its version
VICTIM_S = 30.0  # then another run is the victim: where a key of another type stands, rows are refused from then on


class World:
    """Real processes with their own users, and a trainer."""

    def __init__(self, broker: Guarded, supervisor: Supervisor, trainer: Fabric, api_url: str) -> None:
        self.broker, self.supervisor, self.api_url = broker, supervisor, api_url
        self.pushed: list[str] = []
        self.arrived: dict[str, Group] = {}
        self._good = _open(trainer, GOOD)
        self._version, self._published_at_s = 0, time.monotonic()
        self._victims = _Victims(broker)
        self._pids = {name: child.pid for name, child in supervisor.children.items()}

    @property
    def victim(self) -> str:
        """The run whose rows are written over."""
        return self._victims.name

    def close(self) -> None:
        self._victims.close()

    def push(self) -> None:
        """Push a group to each run, the good one's while they arrive; and publish."""
        self._victims.push()
        if time.monotonic() - self._published_at_s > PUBLISH_S:
            self._version, self._published_at_s = self._version + 1, time.monotonic()
            self._good.publish(tiny_weights(), version=self._version)
        if len(self.pushed) - len(self.arrived) < OPEN_COUNT_MAX:
            self.pushed += self._good.submit([{"seed": 1}], group_size=2)

    def take(self, timeout_s: float) -> None:
        """Consume groups of the good run for so long."""
        for group in self._good.groups(timeout=timeout_s):
            self.arrived[group.group_id] = group

    def ended(self) -> list[str]:
        """Names of the processes that have ended."""
        return [name for name, child in self.supervisor.children.items() if child.pid != self._pids[name]]

    def wait_for_all(self, limit_s: float) -> list[str]:
        """Names of good groups that do not arrive, though nothing has come for so long: neither they nor bad ones."""
        until_s, least = time.monotonic() + limit_s, sys.maxsize
        while missing := [name for name in self.pushed if name not in self.arrived]:
            waiting_count = len(missing) + self.broker.admin.xlen(ShardKeys(GOOD, 0).completed)
            if waiting_count < least:
                until_s, least = time.monotonic() + limit_s, waiting_count
            if time.monotonic() > until_s:
                break
            self.take(PUSH_S)
        return missing

    def problems(self, limit_s: float = WAIT_S) -> list[str]:
        """What does not hold any more."""
        found = []
        for name in self.ended():
            found.append(f"{name} has ended:\n{self.supervisor.children[name].tail(30)}")
        if missing := self.wait_for_all(limit_s):
            found.append(f"{len(missing)} good groups did not arrive, {missing[0]} first")
        harmed = [name for name, group in self.arrived.items() if group.failures or len(group.rollouts) != 2]
        if harmed:
            found.append(f"{len(harmed)} good groups lost rollouts: {self.arrived[harmed[0]].failures}")
        return [*found, *self._cannot_look(limit_s)]

    def _cannot_look(self, limit_s: float) -> list[str]:
        """Why status or api show nothing for so long; a broker that is busy for a moment is no finding."""
        until_s = time.monotonic() + limit_s
        while True:
            try:
                self.named()
                self.ask_api()
                return []
            except Exception as error:  # noqa: BLE001 - whatever it is, somebody cannot look any more
                if time.monotonic() > until_s:
                    return [f"looking failed: {type(error).__name__}: {error}"]
                time.sleep(1.0)

    def named(self) -> list[dict[str, Any]]:
        """Rows that the status names."""
        rows: list[dict[str, Any]] = with_ports(self.broker.url("operator"), snapshot)["bad_rows"]
        return rows

    def ask_api(self) -> None:
        for path in ("v1/status", "v1/workers", "v1/runs", "metrics"):
            with urllib.request.urlopen(f"{self.api_url}/{path}", timeout=30) as answer:
                assert answer.status == 200

    def tidy(self) -> None:
        """Remove bad rows as an operator does, and the rest of what was written under bad names."""
        rows = [BadRow(row["table"], row["row"], row["problem"]) for row in self.named()]

        async def remove(ports: RedisFabric) -> None:
            for row in rows:
                await ports.board.remove_row(row)

        with_ports(self.broker.url("operator"), remove)
        admin = self.broker.admin
        for key in admin.scan_iter(count=1000):
            with contextlib.suppress(redis.ResponseError):
                if admin.type(key) == b"hash":
                    names = [name for name in admin.hkeys(key) if b"bad" in name[:6]]
                    if names:
                        admin.hdel(key, *names)


class _Victims:
    """Runs whose rows are written over, one after the other, each with a trainer of its own."""

    def __init__(self, broker: Guarded) -> None:
        self._broker = broker
        self._count = 0
        self._groups: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._count += 1
        self.name, self._since_s = f"{VICTIM}-{self._count}", time.monotonic()
        self._groups.clear()
        self._version = 0
        self._trainer = rollfab.connect(self._broker.url("trainer"))
        self._run = _open(self._trainer, self.name)

    def push(self) -> None:
        with contextlib.suppress(FabricError):
            if time.monotonic() - self._since_s > VICTIM_S:
                self.close()
                self._begin()
            self._groups += self._run.submit([{"seed": 1}], group_size=2, timeout=0.1)
            if len(self._groups) > OPEN_COUNT_MAX:  # what nobody can end any more would fill the agent's places
                self._run.cancel(self._groups.pop(0))
        with contextlib.suppress(FabricError):
            self._version += 1
            self._run.publish(tiny_weights(), version=self._version)

    def close(self) -> None:
        name = self.name
        with contextlib.suppress(FabricError):
            self._trainer.close()
        with contextlib.suppress(FabricError):
            with_ports(self._broker.url("operator"), lambda ports: ports.board.delete_run(name))


def _open(trainer: Fabric, name: str) -> Run:
    run = trainer.run(name, model="tiny", environment="walk", reward="steady", attempt_count_max=2, staleness=STALENESS)
    run.publish(tiny_weights(), version=0)
    return run


@contextlib.contextmanager
def world(directory: Path) -> Iterator[World]:
    """A fabric at work, for the length of a block."""
    port = free_port()
    words = {
        "controller": ["controller", "--name", "controller"],
        "agent": ["agent", "--environment", "walk=tests.support.worlds.worlds:Walk"],
        "worker": ["worker"],
        "reward": ["reward", "--reward", "steady=tests.support.worlds.worlds:broken_reward"],
        "api": ["api", "--port", str(port)],
    }
    with guarded_broker(directory) as broker, Supervisor(directory / "logs") as supervisor:
        for name, arguments in words.items():
            role = "api-read" if name == "api" else name
            environment = {"ROLLFAB_URL": broker.url(role), "PYTHONPATH": PYTHONPATH}
            supervisor.add(name, arguments, environment=environment)
        _wait_for_roles(broker, supervisor)
        with rollfab.connect(broker.url("trainer")) as trainer:
            made = World(broker, supervisor, trainer, f"http://127.0.0.1:{port}")
            try:
                made.push()
                if problems := made.problems(2 * WAIT_S):
                    logs = [f"== {name}\n{child.tail(20)}" for name, child in supervisor.children.items()]
                    raise AssertionError("\n".join([*problems, *logs]))
                yield made
            finally:
                made.close()


def _wait_for_roles(broker: Guarded, supervisor: Supervisor) -> None:
    until_s = time.monotonic() + 2 * WAIT_S
    while True:
        seen = with_ports(broker.url("operator"), snapshot)["workers"]
        if {"agent", "controller", "dedicated", "reward"} <= {row["role"] for row in seen}:
            return
        logs = [f"== {name}\n{child.tail(20)}" for name, child in supervisor.children.items()]
        assert time.monotonic() < until_s, "\n".join(logs)
        time.sleep(0.2)

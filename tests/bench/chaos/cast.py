"""The processes of chaos: every role at least twice, each with a way of its own to the broker, and how to harm them.

- Roles are the commands that a person would type; the supervisor starts again what has died.
- Workers are witnessed (bench/witness.py) and trainers keep a journal (trainer.py): both are this bench's own commands.
- The broker is a server process with its append-only file, on a TCP port; only relays and the bench connect to it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from rollfab.api.access.keys import add_key
from rollfab.deploy.local.supervisor import Child, Supervisor
from rollfab.fabric.broker.embedded import EmbeddedBroker, free_port
from rollfab.fabric.contract.errors import BrokerError, FabricError
from rollfab.fabric.contract.records import WorkerInfo
from rollfab.fabric.opened import RedisFabric
from tests.support.brokers.tcp_relay import Relay

from .schedule import BROKER
from .trainer import RUN_ID, journal_path

STROLL = "stroll=tests.bench.chaos.worlds:Stroll"
TALK = "talk=tests.bench.chaos.calls:play"
KEYS = "gateway.keys"
COUNT_TURNS = "count-turns=tests.bench.chaos.worlds:count_turns"
HEARTBEAT_AGE_MS_MAX = 1_500  # agents beat once a second: one that is older is not known to serve
LOOK_S = 0.1
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the processes do. counts: processes by role; slots: turns that a worker runs at once, by role; depth:
    trajectories under way at once. calls: whose chat calls make up a trajectory: "agents" that are environments, or
    agents elsewhere, by "gateway"; empty: it is an ordinary one.
    """

    counts: Mapping[str, int]
    slots: Mapping[str, int]
    depth: int
    group_size: int
    turn_count: int
    completion_tokens: int
    pace_s: float
    calls: str = ""


class Cast:
    """All processes of one run. Use as a context; everything it started has ended after it."""

    def __init__(self, directory: Path, workload: Workload) -> None:
        self.directory = directory
        self.workload = workload
        self.broker = EmbeddedBroker.start(directory / "broker", transport="tcp")
        self.supervisor = Supervisor(directory / "logs")
        self.relays: dict[str, Relay] = {}
        self.crashes: list[str] = []  # children that ended though nobody killed them
        self._killed: set[str] = set()
        self._infos: dict[int, WorkerInfo] = {}
        self._ports: dict[str, int] = {}
        self.gateways: list[str] = []  # their addresses
        self.gateway_key = ""  # opens sessions
        self._ready_apis: set[str] = set()
        self._looking: list[asyncio.Task[None]] = []

    async def start(self, role: str) -> None:
        """Start all processes of a role."""
        for index in range(self.workload.counts[role]):
            name = f"{role}-{index}"
            self.relays[name] = relay = Relay(urlsplit(self.broker.url).port or 0)
            url = _with_port(self.broker.url, await relay.start())
            self.supervisor.add(name, self._words(role, index), environment={"ROLLFAB_URL": url})

    def _words(self, role: str, index: int) -> list[str]:
        load = self.workload
        if role in ("worker", "serving"):
            words = ["--role", "dedicated" if role == "worker" else role, "--slots", str(load.slots[role])]
            return ["bench", "witness", *words, "--directory", str(self.directory)]
        if role == "trainer":
            sizes = {"--group-size": load.group_size, "--turns": load.turn_count, "--depth": load.depth}
            words = [str(word) for pair in sizes.items() for word in pair]
            return ["bench", "trainer", "--index", str(index), "--directory", str(self.directory), *words]
        if role == "api":
            self._ports[f"{role}-{index}"] = port = free_port()
            return ["api", "--port", str(port)]
        if role == "gateway":
            self.gateway_key = self.gateway_key or add_key(self.directory / KEYS, "players", "control")
            port = free_port()
            self.gateways.append(f"http://127.0.0.1:{port}")
            return ["gateway", "--port", str(port), "--keys", str(self.directory / KEYS)]
        named = ["--name", f"controller-{index}"] if role == "controller" else []
        offers = {"agent": ["--environment", TALK if load.calls else STROLL], "reward": ["--reward", COUNT_TURNS]}
        return [role, *named, *offers.get(role, [])]

    def watch(self) -> None:
        """Look after the processes, until the end."""
        self._looking = [asyncio.create_task(work()) for work in (self._restart, self._follow_workers, self._ask_apis)]

    async def close(self) -> None:
        """End everything."""
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
        for name, relay in self.relays.items():
            self.thaw(name)
            relay.heal(name)
            relay.heal(BROKER)
        await asyncio.to_thread(self.supervisor.stop)
        for relay in self.relays.values():
            await relay.close()
        await asyncio.to_thread(self.broker.stop)

    # ---- what is known

    def child(self, name: str) -> Child:
        """A process by its name, like agent-1."""
        return self.supervisor.children[name]

    def worker_id(self, name: str) -> str | None:
        """What the broker calls the process, once it knows it."""
        info = self._infos.get(self.child(name).pid or 0)
        return info.worker_id if info else None

    def is_serving(self, name: str) -> bool:
        """Whether the process that lives now does its work, as far as can be seen from outside."""
        child, role = self.child(name), name.partition("-")[0]
        if not child.is_running:
            return False
        if role == "trainer":
            path = journal_path(self.directory, int(name.partition("-")[2]))
            started_at_s = time.time() - (time.monotonic() - child.start_at_s)
            return path.exists() and path.stat().st_mtime > started_at_s
        if role == "api":
            return name in self._ready_apis
        info = self._infos.get(child.pid or 0)
        if info is None or role not in ("worker", "serving"):
            return info is not None
        return info.run_id == RUN_ID and info.state == "ready" if role == "worker" else info.state != "failed"

    def others_serve(self, name: str) -> bool:
        """Whether the role goes on without this process."""
        role = name.partition("-")[0]
        names = [each for each in self.relays if each.partition("-")[0] == role and each != name]
        return any(map(self.is_serving, names)) or not names

    async def _restart(self) -> None:
        while True:
            for child in self.supervisor.watch():
                if child.name in self._killed:
                    self._killed.discard(child.name)
                elif child.exit_code != 0:
                    self.crashes.append(f"{child.name} ended with code {child.exit_code}: {child.tail(3)}")
            await asyncio.sleep(0.02)

    async def _follow_workers(self) -> None:
        async with await RedisFabric.open(self.broker.url, client_name="chaos", patience_s=0.0) as ports:
            while True:
                try:
                    found = await ports.board.workers()
                except BrokerError:
                    found = {}
                self._infos = {info.pid: info for info, age_ms in found.values() if age_ms <= HEARTBEAT_AGE_MS_MAX}
                await asyncio.sleep(LOOK_S)

    async def _ask_apis(self) -> None:
        while True:
            ready = {name for name, port in self._ports.items() if await _answers(port)}
            self._ready_apis = ready
            await asyncio.sleep(LOOK_S)

    # ---- harm

    def kill(self, name: str) -> None:
        """SIGKILL; the supervisor starts it again."""
        self._killed.add(name)
        self.supervisor.kill(name)

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.child(name).process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        process = self.child(name).process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)

    async def restart_broker(self, away_s: float) -> None:
        """SIGKILL of the server, and a new one on its data and its port.

        Raises:
            FabricError: it did not come back where it was.
        """
        url = self.broker.url
        os.kill(self.broker.pid, signal.SIGKILL)
        await until(lambda: not self.broker.is_running, 10.0)
        await asyncio.sleep(away_s)
        self.broker = await asyncio.to_thread(EmbeddedBroker.start, Path(self.broker.data_directory), transport="tcp")
        if self.broker.url != url:
            raise FabricError(f"the {BROKER} came back at another port: something else took its own meanwhile")


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition came true in time. Polls: what is looked at are other processes."""
    until_s = time.monotonic() + timeout_s
    while True:
        if condition():
            return True
        if time.monotonic() >= until_s:
            return False
        await asyncio.sleep(POLL_S)


def _with_port(url: str, port: int) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f":{parts.password}@127.0.0.1:{port}"))


async def _answers(port: int) -> bool:
    """Whether an api says that it is ready."""
    writer = None
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /readyz HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
            return b" 200 " in await reader.readline()
    except OSError:  # TimeoutError is one
        return False
    finally:
        if writer is not None:
            writer.close()

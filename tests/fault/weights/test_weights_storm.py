"""A run's weights while every process of it is killed, stopped and cut off: what is live is what was published."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.opened import RedisFabric
from tests.fault.weights.weights_processes import FORKS, RUN, read_journal, receive, train
from tests.support.brokers.tcp_relay import Relay

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.long, pytest.mark.redis]

RECEIVERS = ("direct", "first", "second")  # the last two share a node
VERSION_COUNT = 120
STORM_S_MAX = 75.0
CALM_S_MAX = 45.0
SEED = int(os.environ.get("WEIGHTS_STORM_SEED", "1"))


class Role:
    """A process with a way of its own to the broker; started again when it is dead."""

    def __init__(self, relay: Relay, url: str, start: Callable[[str], Any]) -> None:
        self.relay = relay
        self._url, self._start = url, start
        self.process = start(url)
        self.is_done = False

    def watch(self) -> None:
        if not self.process.is_alive():
            assert self.process.exitcode in (0, -signal.SIGKILL), f"it ended with {self.process.exitcode}"
            self.is_done = self.process.exitcode == 0
            if not self.is_done:
                self.process = self._start(self._url)

    def send(self, sent: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, sent)


class Cast:
    """The broker, the trainer and the receivers."""

    def __init__(self, directory: Path, dice: random.Random) -> None:
        self.directory, self.dice = directory, dice
        self.broker = EmbeddedBroker.start(directory / "broker", transport="tcp")
        self.roles: dict[str, Role] = {}
        self.faults: Counter[str] = Counter()

    async def start(self) -> None:
        seeds = iter(range(1000))

        def start(target: Callable[..., None], *args: Any) -> Any:
            process = FORKS.Process(target=target, args=args, daemon=True)
            process.start()
            return process

        await self._add("trainer", lambda url: start(train, url, self.directory, next(seeds), VERSION_COUNT))
        for name in RECEIVERS:
            cache = None if name == "direct" else self.directory / "node"
            await self._add(name, lambda url, name=name, cache=cache: start(receive, url, self.directory, name, cache))

    async def _add(self, name: str, start: Callable[[str], Any]) -> None:
        parts = urlsplit(self.broker.url)
        relay = Relay(parts.port or 0)
        port = await relay.start()
        url = urlunsplit(parts._replace(netloc=f":{parts.password}@127.0.0.1:{port}"))
        self.roles[name] = Role(relay, url, start)

    async def harm(self) -> None:
        """One fault of any kind to anyone."""
        name = self.dice.choice(list(self.roles))
        role = self.roles[name]
        kind = self.dice.choices(["kill", "stop", "cut", "hold", "broker", "spoil"], [5, 3, 3, 2, 2, 2])[0]
        self.faults[f"{kind} {name}" if kind in ("kill", "stop", "cut", "hold") else kind] += 1
        if kind == "kill":
            role.send(signal.SIGKILL)
        elif kind == "stop":
            role.send(signal.SIGSTOP)
            await asyncio.sleep(self.dice.uniform(0.05, 2.0))
            role.send(signal.SIGCONT)
        elif kind in ("cut", "hold"):
            getattr(role.relay, kind)("storm")
            await asyncio.sleep(self.dice.uniform(0.0, 0.7))
            role.relay.heal("storm")
        elif kind == "broker":
            os.kill(self.broker.pid, signal.SIGKILL)
            await asyncio.to_thread(self.broker.stop)
            self.broker = await asyncio.to_thread(EmbeddedBroker.start, self.directory / "broker", transport="tcp")
        else:
            self._spoil()

    def _spoil(self) -> None:
        """A wrong byte in a chunk that the node keeps."""
        files = [path for path in (self.directory / "node").glob("*-*") if path.name[0] in "0123456789abcdef"]
        if files:
            with contextlib.suppress(OSError), self.dice.choice(files).open("r+b") as file:
                at = self.dice.randrange(max(1, os.fstat(file.fileno()).st_size))
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes((byte[0] ^ 4,)))

    async def head(self) -> int:
        """The head's version; -1 while the broker is away."""
        with contextlib.suppress(FabricError):
            async with await RedisFabric.open(self.broker.url, client_name="test", patience_s=1.0) as fabric:
                return (await fabric.weights.head(RUN)).version
        return -1

    def watch(self) -> None:
        for role in self.roles.values():
            role.watch()

    async def close(self) -> None:
        for role in self.roles.values():
            role.send(signal.SIGKILL)
            role.process.join(10.0)
            await role.relay.close()
        self.broker.stop()


@asynccontextmanager
async def cast(directory: Path, dice: random.Random) -> AsyncIterator[Cast]:
    found = Cast(directory, dice)
    try:
        await found.start()
        yield found
    finally:
        await found.close()


@pytest.mark.timeout(180)
async def test_what_is_live_is_what_was_published_whoever_is_killed_and_cut_off(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    print(f"WEIGHTS_STORM_SEED={SEED}")
    async with cast(tmp_path, dice) as play:
        # Given a storm, while versions are published
        until_s = time.monotonic() + STORM_S_MAX
        while time.monotonic() < until_s and not play.roles["trainer"].is_done:
            await asyncio.sleep(dice.uniform(0.0, 0.8))
            await play.harm()
            play.watch()
        head_version = await play.head()

        # When it is over
        until_s = time.monotonic() + CALM_S_MAX
        while not play.roles["trainer"].is_done:
            assert time.monotonic() < until_s, "the trainer does not get through"
            play.watch()
            await asyncio.sleep(0.05)
        last = read_journal(tmp_path / "trainer")[-1]
        assert last[0] == "done"

        # Then everyone comes to hold the last version
        for name in RECEIVERS:
            while read_journal(tmp_path / name)[-1] != ["live", *last[1:]]:
                assert time.monotonic() < until_s, f"{name} stays at {read_journal(tmp_path / name)[-1]}, not {last}"
                play.watch()
                await asyncio.sleep(0.05)
        faults = play.faults

    # And every version that was ever written is what the trainer gave under that number
    tried: dict[str, set[str]] = {}
    for words in read_journal(tmp_path / "trainer"):
        tried.setdefault(words[1], set()).add(words[2])
    counts: Counter[str] = Counter()
    for name in RECEIVERS:
        highest = -1
        for words in read_journal(tmp_path / name):
            counts[words[0]] += 1
            if words[0] == "begin":
                highest = -1
                continue
            assert words[2] in tried.get(words[1], set()), f"{name}: {words}, tried was {tried.get(words[1])}"
            assert int(words[1]) >= highest or faults["broker"], f"{name} went back to {words} from {highest}"
            highest = int(words[1])
    twice = sum(len(digests) > 1 for digests in tried.values())
    print(f"{len(tried)} versions, {twice} tried with several weights, head {head_version} after the storm; {counts}")
    print(f"faults: {dict(faults)}")
    assert counts["live"] > VERSION_COUNT / 2

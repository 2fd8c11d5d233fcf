"""Real processes for tests of the collective path: a broker, receivers, and versions to send them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.delivery.collective.group import Nursery
from rollfab.fabric.delivery.collective.invitations import CollectiveOptions
from rollfab.fabric.delivery.collective.publisher import CollectivePublisher, SendReport
from rollfab.fabric.opened import RedisFabric
from tests.support.processes.collective_member import main
from tests.support.processes.process_groups import state_of
from tests.support.weights.collective_versions import OPTIONS, Versions, digest_of

WAIT_S = 30.0


class Member:
    """A process of collective_member.py and what it says."""

    def __init__(self, nursery: ForkServerContext, url: str, run_id: str, name: str, misdeed: str = "") -> None:
        self.name = name
        self._pipe, theirs = nursery.Pipe()
        self.process = nursery.Process(target=main, args=(url, run_id, name, misdeed, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def forget(self) -> None:
        """Pass over what it has said."""
        while self._pipe.poll():
            self._pipe.recv()

    def wait_for(self, *words: Any) -> tuple[Any, ...]:
        """The next thing it says that begins with these words."""
        until_s = time.monotonic() + WAIT_S
        while self._pipe.poll(max(0.0, until_s - time.monotonic())):
            said: tuple[Any, ...] = self._pipe.recv()  # EOFError: it has ended
            if said[: len(words)] == words:
                return said
        raise AssertionError(f"{self.name} did not say {words} within {WAIT_S:g} s")

    def wait_out(self) -> None:
        """Wait until it is dead or stopped."""
        assert self.process.pid is not None
        until_s = time.monotonic() + WAIT_S
        while state_of(self.process.pid) not in "TZX":
            assert time.monotonic() < until_s, f"{self.name} still runs after {WAIT_S:g} s"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


class Stage:
    """A broker, and processes that end with the test; forked from one that has torch loaded, which takes seconds."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.members: list[Member] = []
        self.groups = Nursery()  # of this process' publishers
        self._nursery = multiprocessing.get_context("forkserver")
        self._nursery.set_forkserver_preload(["tests.support.processes.collective_member"])

    def start(self, run_id: str, **misdeeds: str) -> list[Member]:
        """Members by name; returns once they attend."""
        new = [Member(self._nursery, self.url, run_id, name, misdeed) for name, misdeed in misdeeds.items()]
        self.members += new
        for member in new:
            member.wait_for("attending")
        return new

    async def sender(self, fabric: RedisFabric, run_id: str) -> Sender:
        """A publisher in this process, in charge of the run; torch is loaded for it."""
        await self.groups.open()
        return Sender(fabric, run_id, await fabric.weights.open_publisher(run_id), self.groups)

    def end(self) -> None:
        for member in self.members:
            member.end()
        self.members = []


@contextmanager
def stage(directory: Path) -> Iterator[Stage]:
    """A stage with a private broker."""
    with EmbeddedBroker.start(directory / "broker") as broker:
        found = Stage(broker.url)
        try:
            yield found
        finally:
            found.end()


class Sender:
    """Publishes versions by the collective path, as a trainer would."""

    def __init__(self, fabric: RedisFabric, run_id: str, epoch: int, nursery: Nursery) -> None:
        self.store = fabric.weights
        self.versions = Versions(run_id, epoch)
        self.collective = CollectivePublisher(
            fabric.weights, run_id, options=CollectiveOptions(**OPTIONS), nursery=nursery
        )

    async def send(self, version: int, *expected: Member, quorum: int | None = None) -> tuple[SendReport, str]:
        """Send a version, make it the head if enough have it; returns the report and what the version's bytes are."""
        manifest, chunks = self.versions.next(version)
        names = [member.name for member in expected]
        report = await self.collective.send(manifest, chunks, expected=names, quorum=quorum)
        if report.is_enough:
            await self.store.put_manifest(manifest)
            await self.store.advance_head(manifest, 1)
        return report, digest_of(chunks)


def check_live(version: int, digest: str, *members: Member) -> None:
    """They come to hold exactly this version, without having asked the broker for a single chunk."""
    for member in members:
        assert member.wait_for("live", version)[2:] == (digest, 0), member.name

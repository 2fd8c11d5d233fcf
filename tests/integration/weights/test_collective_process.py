"""The process of a round's group: whatever befalls it or its nursery costs that round alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.delivery.collective.group import PROGRAM, Bytes, Group, Nursery, Seat
from rollfab.fabric.delivery.collective.invitations import CollectiveFailed
from tests.support.processes.process_groups import children_of, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
WAIT_S = 60.0
MESSAGE_BYTES = 1 << 16


class Table:
    """Keys of a group whose members are in this process."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.changed = asyncio.Condition()

    async def set(self, key: str, value: bytes) -> None:
        async with self.changed:
            self.keys[key] = value
            self.changed.notify_all()

    async def get(self, keys: list[str]) -> dict[str, bytes]:
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(lambda: all(key in self.keys for key in keys))
            return {key: self.keys[key] for key in keys}


def seat(rank: int, stall_s: float = 20.0) -> Seat:
    return Seat(rank=rank, size=2, backend="gloo", device="cpu", host="127.0.0.1", stall_s=stall_s)


@pytest.fixture(scope="module")
def nurseries() -> Iterator[list[Nursery]]:
    """One for each of two members; it takes seconds to start."""
    found = [Nursery(), Nursery()]
    yield found
    for nursery in found:
        asyncio.run(nursery.close())


@asynccontextmanager
async def pair(nurseries: list[Nursery], stall_s: float = 20.0) -> AsyncIterator[list[Group]]:
    """Two members that are built."""
    for nursery in nurseries:
        await nursery.open()
    async with nurseries[0].group(MESSAGE_BYTES, WAIT_S) as first, nurseries[1].group(MESSAGE_BYTES, WAIT_S) as second:
        table = Table()
        await asyncio.gather(first.build(seat(0, stall_s), table), second.build(seat(1, stall_s), table))
        yield [first, second]


async def both(first: Awaitable[Bytes], second: Awaitable[Bytes]) -> list[Bytes]:
    """What both return; raises when both are done."""
    found = await asyncio.gather(first, second, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found  # type: ignore[return-value]


async def check_works(nurseries: list[Nursery]) -> None:
    async with pair(nurseries) as (first, second):
        first.memory[:] = 7
        await both(first.broadcast(MESSAGE_BYTES), second.broadcast(MESSAGE_BYTES))
        assert (second.memory == 7).all()
        # More than one message of bytes, of which each member has others
        ours, theirs = np.zeros(2 * MESSAGE_BYTES + 3, dtype=np.uint8), np.zeros(2 * MESSAGE_BYTES + 3, dtype=np.uint8)
        ours[0], theirs[-1] = 1, 2
        for found in await both(first.combine(ours), second.combine(theirs)):
            assert (found[0], found[-1], found.sum()) == (1, 2, 3)


def the_nurseries() -> list[int]:
    """And no other children of ours: those of other tests are not to be killed."""
    return [pid for pid in children_of(os.getpid()) if str(PROGRAM) in Path(f"/proc/{pid}/cmdline").read_text()]


def processes() -> list[int]:
    """Of rounds."""
    return [pid for nursery in the_nurseries() for pid in children_of(nursery)]


async def test_members_have_what_the_publisher_sends_and_nothing_is_left_of_their_processes(
    nurseries: list[Nursery],
) -> None:
    await check_works(nurseries)
    wait_until_gone(*processes())


@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("what", ["process", "nursery"])
async def test_a_process_that_dies_or_freezes_fails_its_round_and_the_next_one_works(
    nurseries: list[Nursery], what: str, deed: signal.Signals
) -> None:
    befallen: list[int] = []

    async def hold() -> None:
        async with pair(nurseries, stall_s=1.0) as (first, second):
            befallen.extend(processes())
            for pid in befallen if what == "process" else the_nurseries():
                os.kill(pid, deed)
            for _ in range(100):
                await both(first.broadcast(8), second.broadcast(8))

    wait_until_gone(*processes())
    # When the processes of both members, or their nurseries, die or freeze in the middle of a round, then it fails;
    # but a frozen nursery does no harm before the next process is asked for
    if (what, deed) == ("nursery", signal.SIGSTOP):
        await hold()
    else:
        with pytest.raises(CollectiveFailed):
            await hold()
    assert len(befallen) == 2
    wait_until_gone(*befallen)

    # And the next round works, if need be after one that found out
    for nursery in nurseries:
        try:
            async with nursery.group(MESSAGE_BYTES, WAIT_S):
                pass
        except CollectiveFailed:
            assert what == "nursery"
    await check_works(nurseries)


async def test_a_group_that_is_never_built_ends_in_time_and_the_next_one_works(nurseries: list[Nursery]) -> None:
    befallen: list[int] = []

    async def hold() -> None:
        async with nurseries[0].group(MESSAGE_BYTES, WAIT_S) as group:
            befallen.extend(processes())
            for pid in befallen:
                os.kill(pid, signal.SIGSTOP)
            await group.build(seat(0, stall_s=0.2), Table())

    # When a member's process freezes before it builds the group, then the round fails in time
    await nurseries[0].open()
    wait_until_gone(*processes())
    with pytest.raises(CollectiveFailed, match=r"nothing moved for 1\.4 s"):
        await hold()
    assert len(befallen) == 1
    wait_until_gone(*befallen)

    # And the next one works
    await check_works(nurseries)


async def test_a_round_that_is_cancelled_leaves_no_process(nurseries: list[Nursery]) -> None:
    async def hold() -> None:
        async with nurseries[0].group(MESSAGE_BYTES, WAIT_S) as group:
            built.set()
            await group.build(seat(0), Table())  # the other one never comes

    built = asyncio.Event()
    await nurseries[0].open()
    wait_until_gone(*processes())
    task = asyncio.create_task(hold())
    await built.wait()
    left = processes()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(left) == 1
    wait_until_gone(*left)


async def test_without_torch_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    nursery = Nursery()

    with pytest.raises(ConfigError, match=r"libcudart\.so is missing.*pip install 'rollfab\[workers\]'"):
        await nursery.open()


OWNER = """
import asyncio, json, os, sys
from rollfab.fabric.delivery.collective.group import Nursery, Seat
class Table:
    async def set(self, key, value):
        print(json.dumps("building"), flush=True)
    async def get(self, keys):
        await asyncio.sleep(3600)
async def main():
    async with Nursery().group(1 << 16, 60) as group:
        seat = Seat(rank=0, size=2, backend="gloo", device="cpu", host="127.0.0.1", stall_s=3600.0)
        await group.build(seat, Table())
asyncio.run(main())
"""


def test_no_process_outlives_an_owner_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        assert json.loads(owner.stdout.readline()) == "building"
        [nursery] = children_of(owner.pid)
        [process] = children_of(nursery)
        owner.kill()
    wait_until_gone(nursery, process)


async def test_rounds_that_begin_together_share_one_nursery() -> None:
    before, nursery = set(the_nurseries()), Nursery()
    try:
        await asyncio.gather(*[nursery.open() for _ in range(3)])
        assert len(set(the_nurseries()) - before) == 1
    finally:
        await nursery.close()
    assert set(the_nurseries()) <= before

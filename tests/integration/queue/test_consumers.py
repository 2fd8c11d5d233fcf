"""Consumers of complete groups that die, freeze, share a name or take their time: real processes, a real broker."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import time
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Thread, Timer
from typing import IO

import pytest
from redis import Redis

from rollfab.fabric.contract.records import RunConfig, Span
from rollfab.fabric.contract.wire import load_json
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.trainer.checks import make_groups
from rollfab.trainer.client import Fabric, Run, connect
from rollfab.trainer.files import group_from, read_groups
from tests.integration.cli.test_cli import rollfab as command
from tests.support.records import rollout_of

pytestmark = [pytest.mark.redis, pytest.mark.timeout(90)]

TAKEOVER_S = 1.5
PATIENCE_S = 30.0  # for what should take TAKEOVER_S, on a busy machine
NAMES = [f"g{index}" for index in range(5)]

CONSUME = """
import sys, time, rollfab
url, run_id, consumer, count, takeover = sys.argv[1:]
with rollfab.connect(url) as fabric:
    with fabric.run(run_id).groups(consumer=consumer, count=int(count), takeover=float(takeover)) as groups:
        for group in groups:
            print(group.group_id, flush=True)
        print("holds", flush=True)
        sys.stdin.readline()
    print("done", flush=True)
"""


@pytest.fixture
def fabric(url: str, redis: Redis) -> Iterator[Fabric]:
    with connect(url) as fabric:
        yield fabric


def complete(url: str, *names: str, version: int = 0) -> None:
    """Have a run with these groups, each of one rollout, complete."""

    async def main() -> None:
        async with await RedisFabric.open(url, client_name="test") as ports:
            run = await ports.board.create_run(RunConfig(run_id="r", model="tiny", environment="none"))
            await ports.rollouts(run).push(make_groups([{}] * len(names), 1, names))
            queue = ports.trajectories(run)
            for claim in await queue.claim("agent", len(names)):
                made = replace(rollout_of(claim.job), spans=(Span(0, 2, "w1", version),))
                assert await queue.settle(claim, made, is_scored=True)

    asyncio.run(main())


class Consumer:
    """A process that receives `count` groups and holds them until it is told to go on."""

    def __init__(self, url: str, name: str, count: int = len(NAMES), takeover_s: float = TAKEOVER_S) -> None:
        words = [sys.executable, "-c", CONSUME, url, "r", name, str(count), str(takeover_s)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.names = [self._line() for _ in range(count)]
        assert self._line() == "holds"

    def _line(self) -> str:
        out: IO[str] | None = self.process.stdout
        assert out is not None
        return out.readline().strip()

    def go_on(self) -> str:
        """Let it acknowledge and end; returns what it wrote to stderr."""
        _, errors = self.process.communicate("\n", timeout=PATIENCE_S)
        return errors


@contextmanager
def consumer(url: str, name: str, count: int = len(NAMES), takeover_s: float = TAKEOVER_S) -> Iterator[Consumer]:
    made = Consumer(url, name, count, takeover_s)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def take(run: Run, name: str, count: int = len(NAMES)) -> dict[str, bool]:
    """Consume groups; whether each was redelivered."""
    found = run.groups(consumer=name, count=count, timeout=PATIENCE_S, takeover=60.0)
    return {group.group_id: group.redelivered for group in found}


def totals(run: Run) -> tuple[int, int]:
    status = run.status()
    return status.depth, status.counters.get("groups_consumed", 0)


def test_the_shell_looks_at_groups_and_they_are_all_still_there(url: str, fabric: Fabric, tmp_path: Path) -> None:
    complete(url, *NAMES)
    run = fabric.run("r")
    look = ("consume", "--run", "r", "--peek")
    printed = command(*look, "--count", "2", url=url)
    assert (printed.returncode, len(printed.stdout.splitlines())) == (0, 2)
    written = command(*look, "--output", str(tmp_path / "g.jsonl"), url=url)
    assert written.returncode == 0 and f"{len(NAMES)} groups written" in written.stdout
    assert sorted(group.group_id for group in read_groups(tmp_path / "g.jsonl")) == NAMES
    refused = command(*look, "--count", "0", url=url)
    assert refused.returncode == 1 and "count is 0, expected a whole number from 1 to 1000" in refused.stderr
    got = list(run.groups(count=len(NAMES), timeout=PATIENCE_S))
    assert sorted(group.group_id for group in got) == NAMES
    assert not any(group.redelivered for group in got)


def contents(redis: Redis) -> dict[bytes, tuple[bytes, int]]:
    """All that the broker holds: streams with their consumers and what those hold; and when keys expire (-1: never)."""
    return {key: (redis.dump(key), redis.pexpiretime(key)) for key in redis.scan_iter(count=1000)}


def test_a_look_changes_nothing_in_the_broker(url: str, fabric: Fabric, redis: Redis, tmp_path: Path) -> None:
    # Given groups too stale to be delivered, of which a consumer holds two, and one cannot be read whole
    complete(url, *NAMES, "old")
    with consumer(url, "holder", count=2) as holder:
        holder.process.send_signal(signal.SIGSTOP)  # it gives signs of life else, which are no look's
        run = fabric.run("r")
        redis.hset(ShardKeys("r", 0).run, "head_version", "5")
        redis.hset(ShardKeys("r", 0).rollouts("g4"), "g4.0", b"torn")
        before = contents(redis)
        assert len(before) > 10 and contents(redis) == before, "something else writes here"

        # When others look, all of them are shown
        for more in ((), ("--output", str(tmp_path / "g.jsonl")), ("--count", "1")):
            done = command("consume", "--run", "r", "--peek", *more, url=url)
            assert done.returncode == 0 and (more or len(done.stdout.splitlines()) == len(NAMES) + 1)
        assert len(run.peek(100)) == len(NAMES) + 1

        # Then the broker holds what it held, to the byte
        assert contents(redis) == before
    # And this comparison would have seen a group that somebody only holds
    redis.hset(ShardKeys("r", 0).run, "head_version", "0")
    before = contents(redis)
    with consumer(url, "other", count=1):
        assert contents(redis) != before


def test_a_look_names_the_options_that_say_nothing_beside_it(url: str) -> None:
    done = command("consume", "--run", "r", "--peek", "--keep", "varied", "--timeout", "3", url=url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--peek takes no group, so --timeout, --keep would do nothing" in done.stderr


def test_groups_of_a_killed_consumer_that_never_returns_go_to_another_one(url: str, fabric: Fabric) -> None:
    complete(url, *NAMES)
    with consumer(url, "gone") as gone:
        assert gone.names == NAMES
        gone.process.kill()
        gone.process.wait()
        assert take(fabric.run("r"), "other") == dict.fromkeys(NAMES, True)
    assert totals(fabric.run("r")) == (0, 5)


@pytest.mark.parametrize("is_killed", [True, False])
def test_who_waits_is_told_who_holds_the_groups_and_when_they_come(
    url: str, fabric: Fabric, is_killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a consumer that holds all groups that are left, of which it acknowledged others before
    complete(url, *NAMES)
    run = fabric.run("r")
    assert len(take(run, "rank-0", 2)) == 2
    with consumer(url, "rank-0", 3, takeover_s=12.0) as holder:
        if is_killed:
            holder.process.kill()
            holder.process.wait()
        # When another one waits
        groups = run.groups(consumer="rank-1", timeout=6.0)
        with caplog.at_level(logging.WARNING):
            assert list(groups) == []
    # Then it is told who holds them, since when nobody has heard of it, and when they come
    for text in (caplog.messages[-1], groups.ended_why):
        found = re.search(
            r"3 complete groups .* held by consumer rank-0, last heard of (\d+) s ago, .*in (\d+) s$", text
        )
        assert found, text
        assert (int(found[1]) >= 5) == is_killed, "who lives gives a sign every 3 s"
        assert 0 < int(found[2]) <= 12


def test_a_block_that_waits_for_more_than_there_is_is_told_what_it_holds_itself(url: str, fabric: Fabric) -> None:
    complete(url, *NAMES)
    with fabric.run("r").groups(count=9, timeout=5.5) as groups:
        assert len(list(groups)) == 5
    assert groups.ended_why.endswith(
        "5 groups are held by this very `with` block, and acknowledged at its end. If no others are on their way, end "
        "it, or push more tasks"
    )
    assert "Wait until it acknowledges" not in groups.ended_why, "nobody waits for himself"


def test_a_consumer_that_is_started_again_gets_all_it_held_at_once(url: str, fabric: Fabric) -> None:
    complete(url, *NAMES)
    with consumer(url, "trainer") as killed:
        killed.process.kill()
        killed.process.wait()
        run = fabric.run("r")
        found = [group.group_id for group in run.groups(timeout=1.0)]  # long before anything is taken over
    assert found == NAMES
    assert totals(run) == (0, 5)


def test_a_training_step_may_take_longer_than_the_takeover_time(url: str, fabric: Fabric) -> None:
    complete(url, *NAMES)
    run = fabric.run("r")
    with connect(url) as other_fabric, run.groups(count=5, timeout=PATIENCE_S, takeover=TAKEOVER_S) as groups:
        held = list(groups)
        other = other_fabric.run("r")
        until_s = time.monotonic() + 3 * TAKEOVER_S
        while time.monotonic() < until_s:  # nothing of `run` is called meanwhile
            assert list(other.groups(consumer="other", timeout=0.2)) == []
    assert [group.group_id for group in held] == NAMES
    assert totals(run) == (0, 5)


def test_a_consumer_that_wakes_up_after_its_groups_were_taken_over_is_told(url: str, fabric: Fabric) -> None:
    complete(url, *NAMES)
    run = fabric.run("r")
    with consumer(url, "frozen") as frozen:
        frozen.process.send_signal(signal.SIGSTOP)
        with run.groups(consumer="other", count=5, timeout=PATIENCE_S) as groups:
            taken = {group.group_id: group.redelivered for group in groups}
            frozen.process.send_signal(signal.SIGCONT)
            errors = frozen.go_on()  # it acknowledges what others hold …
        assert taken == dict.fromkeys(NAMES, True)
    # … which does not count, and is said once
    assert errors.count("were taken over by another consumer") == 1, errors
    assert "groups(takeover=" in errors
    assert totals(run) == (0, 5)


def test_a_consumer_that_acknowledges_what_others_have_acknowledged_is_told(url: str, fabric: Fabric) -> None:
    complete(url, *NAMES)
    run = fabric.run("r")
    with consumer(url, "frozen") as frozen:
        frozen.process.send_signal(signal.SIGSTOP)
        assert take(run, "other") == dict.fromkeys(NAMES, True)
        frozen.process.send_signal(signal.SIGCONT)
        assert frozen.go_on().count("were taken over by another consumer") == 1
    assert totals(run) == (0, 5)


def test_two_live_processes_under_one_name_are_both_warned_once(
    url: str, fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    complete(url, *NAMES)
    run = fabric.run("r")
    with consumer(url, "trainer") as first, caplog.at_level(logging.WARNING):
        until_s = time.monotonic() + PATIENCE_S
        while "consumes as" not in caplog.text and time.monotonic() < until_s:
            list(run.groups(timeout=0.2, takeover=TAKEOVER_S))
        list(run.groups(timeout=1.0, takeover=TAKEOVER_S))
        time.sleep(TAKEOVER_S)
        errors = first.go_on()
    for text in (caplog.text, errors):
        assert text.count('consumes as "trainer", too') == 1, text
        assert "groups(consumer=…)" in text
    assert str(first.process.pid) in caplog.text
    assert str(os.getpid()) in errors


def test_consumers_that_come_and_go_leave_nothing_behind(url: str, fabric: Fabric, redis: Redis) -> None:
    complete(url, *NAMES)
    for index in range(10):
        with connect(url) as passing:
            list(passing.run("r").groups(consumer=f"c{index}", timeout=0.01, count=1, takeover=0.1))
    run, keys = fabric.run("r"), ShardKeys("r", 0)
    time.sleep(0.3)
    list(run.groups(timeout=0.05))
    assert len(redis.xinfo_consumers(keys.completed, "trainer")) == 1
    assert redis.zcard(keys.consumers) == 1


@pytest.mark.parametrize("is_block", [False, True], ids=["plain", "with"])
def test_a_group_that_arrives_with_an_interrupt_comes_again(url: str, fabric: Fabric, is_block: bool) -> None:
    # The interrupt is noticed when the wait ends, which is when the group has arrived and its caller does not have it
    complete(url, *NAMES[:1])
    run, found = fabric.run("r"), []

    def interrupt_and_complete() -> None:
        time.sleep(0.3)
        interrupt_main()
        complete(url, *NAMES)

    groups = run.groups(count=len(NAMES), timeout=PATIENCE_S)
    with groups if is_block else nullcontext():
        found += [next(groups).group_id]
        other = Thread(target=interrupt_and_complete)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            found += [next(groups).group_id]
        other.join()
        found += [group.group_id for group in groups]

    assert sorted(found) == NAMES
    assert totals(run) == (0, len(NAMES))


def test_a_call_that_ends_with_an_interrupt_says_nothing_of_its_own_error(
    url: str, fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    complete(url, *NAMES[:1])
    groups = fabric.run("r").groups(timeout=1.0)
    next(groups)
    Timer(0.2, interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        next(groups)  # its time is over when the interrupt is noticed
    assert groups.ended_why
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_program_that_ends_without_closing_says_nothing(url: str, redis: Redis) -> None:
    complete(url, *NAMES)
    script = "import sys, rollfab; print(next(iter(rollfab.connect(sys.argv[1]).run('r').groups())).group_id)"
    words = [sys.executable, "-c", script, url]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert (done.stdout, done.stderr) == ("g0\n", "")


def test_groups_that_are_written_to_a_file_are_consumed_once_it_is_whole(
    url: str, fabric: Fabric, tmp_path: Path
) -> None:
    complete(url, *NAMES)
    run, file = fabric.run("r"), tmp_path / "groups.parquet"

    def consume(*words: str) -> subprocess.CompletedProcess[str]:
        return command("consume", "--run", "r", "--timeout", "0.5", *words, url=url)

    # Given a file that cannot be written; then nothing is consumed
    file.touch()
    refused = consume("--output", str(file))
    assert refused.returncode == 1 and "groups.parquet is there already" in refused.stderr
    assert totals(run) == (5, 0)

    # When it can, then what it holds is consumed, and what is printed after that is the rest
    file.unlink()
    assert "4 groups written to" in consume("--output", str(file), "--count", "4").stdout
    assert [each.group_id for each in read_groups(file)] == NAMES[:4]
    assert totals(run) == (1, 4)
    assert group_from(load_json(consume().stdout)).group_id == NAMES[4]

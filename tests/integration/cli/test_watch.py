"""`rollfab status` in a terminal of 80 by 24: it fits, it scrolls, and the terminal is as before afterwards."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any

import pytest
from rich.cells import cell_len

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.records import RunConfig, WorkerInfo
from rollfab.fabric.opened import RedisFabric
from tests.support.terminal import COLUMNS, CONTROL, LINES, Terminal
from tests.support.until import wait_until

pytestmark = pytest.mark.redis

OPENED, CLOSED, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


class Screen(Terminal):
    """One on which whole pictures are drawn, one after the other."""

    @property
    def pictures(self) -> list[str]:
        """Without what colours them."""
        return [CONTROL.sub("", each) for each in self.text.split("\x1b[H")[1:]]

    @property
    def shown(self) -> str:
        """The last one that is whole."""
        return next((each for each in reversed(self.pictures) if each.count("\n") >= LINES - 1), "")


async def fill(url: str, run_count: int, worker_count: int) -> None:
    async with await RedisFabric.open(url, client_name="tests") as ports:
        for number in range(run_count):
            run_id = f"frozenlake-grpo-with-a-name-that-is-long-{number:02}"
            await ports.board.create_run(RunConfig(run_id=run_id, model="tiny", environment="frozenlake"))
        for number in range(worker_count):
            info: dict[str, Any] = {"worker_id": f"dedicated-gpu-node-{number:02}-of-the-cluster-{number:02}", "pid": 1}
            info |= {"state": "ready \x1b[2J 漢字"} if number % 7 == 0 else {}
            await ports.board.heartbeat(WorkerInfo(role="dedicated", host="h", slot_count=64, active_version=3, **info))


@pytest.fixture(scope="module")
def few(request: pytest.FixtureRequest) -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        asyncio.run(fill(broker.url, 1, 3))
        yield broker.url


@pytest.fixture(scope="module")
def many() -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        asyncio.run(fill(broker.url, 30, 60))
        yield broker.url


def fits(picture: str) -> bool:
    """No line is longer than the screen is wide, and no picture has more lines than it."""
    lines = picture.split("\n")
    return len(lines) <= LINES and all(cell_len(line) <= COLUMNS for line in lines)


def is_as_before(found: Screen) -> bool:
    """Its own screen is left, the cursor is there again, and typing echoes."""
    is_left = found.text.rindex(CLOSED) > found.text.rindex(OPENED)
    has_cursor = found.text.rindex(CURSOR) > found.text.rindex("\x1b[?25l")
    return is_left and has_cursor and termios.tcgetattr(found.inside) == found.before


@pytest.mark.timeout(60)
def test_many_runs_and_workers_are_scrolled_through_by_keys(many: str) -> None:
    with Screen("status", "--watch", url=many) as found:
        found.until("30 runs")
        assert "lines 1 to 23 of" in found.shown and "60 workers" in found.shown
        found.type(" ")
        found.until("lines 24 to 46 of")
        found.type("j\x1b[B")
        found.until("lines 26 to 48 of")
        found.type("k\x1b[A\x1b[5~")
        found.until("lines 1 to 23 of")
        found.type("G")
        found.until("-cluster-59")
        found.type("\x1b[6~\x1b[6~g")
        found.until("lines 1 to 23 of")
        found.read(2.5)
        assert all(map(fits, found.pictures)), "nothing runs over"
        found.type("q")
        assert found.end() == 0 and is_as_before(found)
        assert "\x1b[2J 漢" not in found.text, "what a worker says moves no cursor"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ending", ["ctrl-c", "sigterm", "sighup"])
def test_the_terminal_is_as_before_whatever_ends_it(few: str, ending: str) -> None:
    with Screen("status", "--watch", url=few) as found:
        found.until("q ends")
        assert "of the" not in found.shown.splitlines()[-1], "all is there, so there is nothing to scroll"
        if ending == "ctrl-c":
            found.type("\x1a\x03")  # Ctrl-Z before it does nothing
        else:
            found.process.send_signal(signal.SIGTERM if ending == "sigterm" else signal.SIGHUP)
        assert found.end() == (130 if ending == "ctrl-c" else 0)
        assert is_as_before(found) and "Traceback" not in found.text


@pytest.mark.timeout(60)
def test_a_screen_that_changes_its_size_is_drawn_anew_at_once(many: str) -> None:
    with Screen("status", "--watch", url=many) as found:
        found.until("lines 1 to 23 of")
        fcntl.ioctl(found.door, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))

        def is_drawn() -> bool:
            found.read()
            return "lines 1 to 11 of" in found.text

        wait_until(is_drawn, lambda: found.text, 4)
        found.type("q")
        assert found.end() == 0


@pytest.mark.timeout(60)
def test_a_broker_that_goes_away_is_said_below_the_last_picture_and_one_that_never_was_is_an_error() -> None:
    with EmbeddedBroker.start() as broker:
        asyncio.run(fill(broker.url, 1, 1))
        with Screen("status", "--watch", url=broker.url) as found:
            found.until("q ends")
            broker.stop()
            found.until("is not reachable")
            assert "1 run" in found.shown
            found.type("q")
            assert found.end() == 0 and is_as_before(found)
        with Screen("status", "--watch", url=broker.url) as found:
            assert found.end() == 1
            assert OPENED not in found.text


@pytest.mark.timeout(60)
def test_what_is_printed_once_fits_too(many: str) -> None:
    with Screen("status", url=many) as found:
        assert found.end() == 0
        lines = CONTROL.sub("", found.text).split("\n")
        assert all(cell_len(line) <= COLUMNS for line in lines)
        assert sum(bool(re.match(r"frozenlake\S+…\S+-\d\d +\S+ +-1 ", line)) for line in lines) == 30, "one line each"


@pytest.mark.timeout(60)
def test_into_a_pipe_each_look_is_a_line_of_json_or_a_whole_picture(few: str) -> None:
    for words, wanted in ((["--json"], b'{"runs":'), ([], b"1 run, ")):
        with subprocess.Popen(
            [sys.executable, "-m", "rollfab", "status", "--watch", *words],
            stdout=subprocess.PIPE,
            env={**os.environ, "ROLLFAB_URL": few},
        ) as process:
            assert process.stdout is not None
            seen = 0
            while seen < 2:
                line = process.stdout.readline()
                assert line, "it ended"
                seen += line.startswith(wanted)
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        assert process.returncode == 130

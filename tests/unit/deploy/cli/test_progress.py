"""Bars: on a terminal's stderr, after a while; what goes into a pipe has nothing of them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

SCRIPT = """
import time
from rollfab.deploy.cli.printing import show
from rollfab.deploy.cli import progress as bars
bars.AFTER_S = {after_s}
with bars.progress("pushing", unit="count", total=4) as tell:
    for number in range(1, 5):
        time.sleep({pause_s})
        tell(number, 4, f"part {{number}}")
        show(f"line {{number}}")
"""


def run(pause_s: float, after_s: float) -> tuple[str, str]:
    """What is written to a pipe, and to the terminal that stderr is."""
    door, inside = pty.openpty()
    words = [sys.executable, "-c", SCRIPT.format(pause_s=pause_s, after_s=after_s)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=inside, text=True) as process:
        os.close(inside)
        said = ""
        try:
            while data := os.read(door, 1 << 16):
                said += data.decode()
        except OSError:  # nobody has the terminal any more
            pass
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(door)
    assert process.returncode == 0
    return out, said


@pytest.mark.timeout(60)
def test_what_takes_long_shows_a_bar_and_takes_it_away_and_a_pipe_gets_whole_lines() -> None:
    out, said = run(0.2, after_s=0.3)
    assert out == "line 1\nline 2\nline 3\nline 4\n"
    assert "part 3" in said and "4/4" in said
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l") and said.endswith("\x1b[2K"), "it is gone at the end"


@pytest.mark.timeout(60)
def test_what_is_done_soon_shows_none() -> None:
    out, said = run(0.01, after_s=5.0)
    assert out.count("\n") == 4 and "part" not in said


@pytest.mark.timeout(60)
def test_where_stderr_is_no_terminal_there_is_none() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(pause_s=0.1, after_s=0.1)], capture_output=True, text=True, timeout=50
    )
    assert (done.stderr, done.stdout.count("\n")) == ("", 4)

"""What the witness of `rollfab bench resume` writes down while another process reads it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.witness import SharedCount, read_count, token_count

WRITE = """
import sys
from pathlib import Path
from tests.bench.witness import SharedCount

with SharedCount(Path(sys.argv[1])) as count:
    value = 1 << 40
    count.set(value)
    print("writing", flush=True)
    while True:
        value += 1
        count.set(value)
"""


@pytest.mark.slow
def test_a_count_is_never_read_half_written(tmp_path: Path) -> None:
    # Given a process that counts as fast as it can
    path = tmp_path / "1.tokens"
    writer = subprocess.Popen([sys.executable, "-c", WRITE, str(path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"

        # When another one reads, thousands of times
        last, until_s, read_times = 1 << 40, time.monotonic() + 1.0, 0
        while time.monotonic() < until_s:
            value = read_count(path)

            # Then what it finds never goes back
            assert value >= last, (value, last, read_times)
            last, read_times = value, read_times + 1
    finally:
        writer.kill()
        writer.communicate()
    assert read_times > 1000
    assert last > (1 << 40) + 1000


def test_counts_of_all_engines_are_added_up(tmp_path: Path) -> None:
    with SharedCount(tmp_path / "1.tokens") as one, SharedCount(tmp_path / "2.tokens") as other:
        one.set(40)
        other.set(2)
        assert token_count(tmp_path) == 42
    (tmp_path / "3.tokens").touch()  # an engine that starts just now
    assert token_count(tmp_path) == 42

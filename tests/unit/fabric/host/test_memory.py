"""The memory that a process and those below it hold, as /proc tells it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator

import pytest

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.host.memory import HeldMemory, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")
MIB = 1 << 20
HOLD = "import sys; held = bytearray(b'x') * (%d << 20); print('holds', flush=True); sys.stdin.read()"
BELOW = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_what_a_process_holds_grows_with_what_it_takes() -> None:
    before = resident_bytes()
    assert before is not None and before > MIB
    held = bytearray(b"x") * (64 * MIB)
    after = resident_bytes()
    assert after is not None and after - before > 60 * MIB
    assert len(held) == 64 * MIB
    assert resident_bytes(2**30) is None, "there is no such process"


@pytest.fixture
def grandchild() -> Iterator[subprocess.Popen[str]]:
    """A process whose child holds 64 MiB."""
    words = [sys.executable, "-c", BELOW, HOLD % 64]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.stdin.close()


def test_a_look_counts_all_processes_below_and_asks_for_the_device_memory_of_the_same(
    grandchild: subprocess.Popen[str],
) -> None:
    asked: list[int] = []

    def ask(pids: Collection[int]) -> int:
        asked.extend(pids)
        return 7

    held = HeldMemory(SystemClock(), ask)
    assert (held.resident_bytes, held.device_bytes) == (None, None), "nobody looked yet"
    held.look()
    own = resident_bytes()
    assert own is not None and held.resident_bytes is not None
    assert held.resident_bytes > own + 60 * MIB
    assert held.device_bytes == 7
    assert grandchild.pid in asked and len(asked) >= 3

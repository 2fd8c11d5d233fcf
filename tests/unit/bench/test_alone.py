"""Is a second measurement refused while one runs, and allowed however that one ended?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import ConfigError
from tests.bench.alone import alone

HOLDER = """
import sys, time
from pathlib import Path
from tests.bench.alone import alone
with alone("play", Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.timeout(60)
def test_a_second_measurement_is_refused_and_names_the_first_until_that_one_is_gone(tmp_path: Path) -> None:
    with alone("play", tmp_path):
        pass
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=f"play is being measured on this machine by process {holder.pid}:"),
            alone("play", tmp_path),
        ):
            pass
        with alone("another", tmp_path):  # of another kind: not concerned
            pass
    finally:
        holder.kill()
        holder.communicate()
    with alone("play", tmp_path):
        pass


def test_a_lock_that_cannot_be_opened_says_which(tmp_path: Path) -> None:
    (tmp_path / "rollfab-bench-play.lock").symlink_to(tmp_path / "elsewhere")
    refused = pytest.raises(ConfigError, match=r"bench play: its lock cannot be opened.*rollfab-bench-play\.lock")
    with refused, alone("play", tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()

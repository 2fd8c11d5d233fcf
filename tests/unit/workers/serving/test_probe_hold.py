"""One worker beside one serving engine: real processes, one of which is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import ConfigError
from rollfab.workers.serving.wiring import ProbeHold, lock_path_of

OURS = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4] / "src")}

# holds a probe, forks a child as an engine would be, which says its process id
HOLDER = """
import os, sys, time
from rollfab.workers.serving.wiring import ProbeHold
hold = ProbeHold(sys.argv[1])
if not os.fork():
    print(os.getpid(), flush=True)
time.sleep(60)
"""


@contextmanager
def holder(probe: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds it, and its child."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, probe], stdout=subprocess.PIPE, text=True, env=OURS)
    assert process.stdout is not None
    child = 0
    try:
        child = int(process.stdout.readline())
        yield process, child
    finally:
        process.kill()
        if child:
            os.kill(child, 9)
        process.stdout.close()
        process.wait()


@pytest.mark.timeout(60)
def test_a_second_worker_is_refused_until_the_first_is_killed_even_if_its_engine_is_left_over(tmp_path: Path) -> None:
    page = str(tmp_path / "page")
    with holder(page) as (first, _):
        with pytest.raises(ConfigError, match="Two would each use up its slack") as refused:
            ProbeHold(page)
        assert page in str(refused.value) and f"process {first.pid} is the worker" in str(refused.value)
        first.kill()
        first.wait()
        second = ProbeHold(page)
        with pytest.raises(ConfigError, match=f"process {os.getpid()} is"):
            ProbeHold(page)
        second.close()
        ProbeHold(page).close()


def test_one_engine_has_one_lock_by_whatever_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert lock_path_of(str(tmp_path / "link" / "page")) == lock_path_of(f"{tmp_path}/./page") == tmp_path / "page.lock"
    urls = ("http://h:1", "http://h:1/", "http://h:1/metrics", "http://h:1/v1/")
    assert len({lock_path_of(url) for url in urls}) == 1
    assert lock_path_of("http://h:2") != lock_path_of("http://h:1")


def test_a_place_where_no_lock_can_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/page.lock cannot be opened \(No such file"):
        ProbeHold(str(tmp_path / "missing" / "page"))

"""What holds for every test: devices, and how hypothesis searches.

- A test is skipped only for a missing GPU. A missing broker is a failure: it is bundled.
- Fixtures live beside the tests that use them.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.until import PATIENCE

# Before torch is imported: threads of its own that spin beside other processes' are a quarter of what its tests take.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("house", deadline=None, print_blob=True)  # deadlines measure the machine, not the code
settings.register_profile("few", settings.get_profile("house"), max_examples=10)  # make test-fast: a look, no search
settings.load_profile("house")


def pytest_configure() -> None:
    """Hear interrupts also where a script runs the tests in the background: children would inherit that none is."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off what is imported: to go through torch again and again is a tenth of all work."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its patience, and skip GPU tests where there is no NVIDIA device."""
    for item in items:
        if limit := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PATIENCE * limit.args[0]), append=False)
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command line that a test runs in its own process sets its level of logs, here for the tests after it too."""
    logger = logging.getLogger("rollfab")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody works on a run that this test deletes."""
    monkeypatch.setattr("rollfab.fabric.queue.board.NOTICED_S", 0.02)


@pytest.fixture(scope="module", autouse=True)
def no_client_is_left_open() -> Iterator[None]:
    """See that a module closes its clients: one whose broker is gone tries again for ever."""
    before = _clients()
    yield
    until_s = time.monotonic() + 5.0
    while (left := _clients() - before) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not left, f"{len(left)} clients of rollfab were not closed"


def _clients() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "rollfab-client"}

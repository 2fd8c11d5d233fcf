"""Notices that the event loop stands still, and names the cause: an environment that blocks freezes all others.

- A thread looks from outside, since the loop itself cannot; it reads stacks and touches nothing.
- Time in which the loop had no processor accuses nobody: the thread counts its looks, of which there are less while the
  process is stopped, and takes off how long the loop's thread waited for its turn, where the kernel tells (Linux).

The watchdog cannot end a block. An environment that blocks belongs in a thread (a plain synchronous class without
`inline`) or in a process of its own (`isolation = "process"`), where a time limit ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

LOOKS = 4  # in vain, before a warning; it comes 1 to 1.25 times `blocked_s` after the block began
FRAME_COUNT_MAX = 12
LINE_LENGTH_MAX = 300
PYTHON = sysconfig.get_path("stdlib")  # asyncio too
OURS = str(Path(__file__).parents[2])
REMEDY = (
    'its async methods must not block: make it a plain synchronous class, or let it say isolation = "process"; '
    "an inline one must return at once"
)


@contextlib.contextmanager
def watching(blocked_s: float = 1.0) -> Iterator[None]:
    """Watch the running loop, in the thread that runs it, while the block lasts.

    Args:
        blocked_s: how long the loop may stand still before a warning, at most one for each standstill.
    """
    watchdog = _Watchdog(asyncio.get_running_loop(), blocked_s)
    thread = threading.Thread(target=watchdog.watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watchdog.is_over.set()
        thread.join()


def user_stack(frame: FrameType) -> str:
    """Say where user code stands: the frames called by ours, without Python's library; bounded, the innermost last."""
    frames = list(traceback.extract_stack(frame))
    called_at = max((index for index, each in enumerate(frames) if each.filename.startswith(OURS)), default=-1)
    own = [each for each in frames[called_at + 1 :] if not _is_of_python(each.filename)]
    shown = (own or frames)[-FRAME_COUNT_MAX:]
    lines = [f"{each.filename}:{each.lineno} in {each.name}: {each.line}"[:LINE_LENGTH_MAX] for each in shown]
    return "\n".join(lines)


def _is_of_python(name: str) -> bool:
    is_installed = "site-packages" in name or "dist-packages" in name  # a user's environment may be installed there
    return name.startswith("<frozen") or (name.startswith(PYTHON) and not is_installed)


class _Watchdog:
    def __init__(self, loop: asyncio.AbstractEventLoop, blocked_s: float) -> None:
        self.is_over = threading.Event()
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._look_s = blocked_s / LOOKS
        self._has_turned = threading.Event()

    def watch(self) -> None:
        """Look every `_look_s` whether the loop has turned since the last look; runs in a thread of its own."""
        missed_count, is_told = 0, False
        starved_s = self._ask()
        while not self.is_over.wait(self._look_s):
            if self._has_turned.is_set():
                if is_told:
                    log.warning("agent.turns_again", extra={"stood_s": round(missed_count * self._look_s, 3)})
                missed_count, is_told = 0, False
                starved_s = self._ask()
                continue
            missed_count += 1
            own_s = missed_count * self._look_s - (self._starved_s() - starved_s)
            if not is_told and own_s >= LOOKS * self._look_s:
                is_told = True
                self._tell(own_s)

    def _ask(self) -> float:
        """Have the loop turn; returns how long its thread has been starved until now."""
        self._has_turned.clear()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._has_turned.set)
        return self._starved_s()

    def _starved_s(self) -> float:
        """Return how long the loop's thread has waited for a processor, ready to run; 0 where nobody tells."""
        try:
            return int(self._schedstat.read_bytes().split()[1]) / 1e9  # ran, waited (ns), turns
        except (OSError, IndexError, ValueError):
            return 0.0

    def _tell(self, own_s: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        stack = user_stack(frame) if frame is not None else ""
        task = asyncio.current_task(self._loop)
        name = task.get_name() if task is not None else ""
        facts = {"who": name, "stood_s": round(own_s, 3), "stack": stack}
        if name.startswith("environment"):
            log.warning("environment.blocks_the_agent", extra={**facts, "remedy": REMEDY})
        else:
            log.warning("agent.is_blocked", extra=facts)

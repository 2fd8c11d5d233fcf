"""A role that was started by a supervisor ends when the supervisor is gone, even if that was killed.

The child polls its parent's pid: portable, and unlike a parent-death signal not tied to the thread that forked.
"""

from __future__ import annotations

import os
import signal
import threading

CHECK_S = 0.5


def follow_parent(parent_pid: int) -> None:
    """Send ourselves SIGTERM once `parent_pid` is no longer our parent, and SIGKILL if that does not end us."""
    never = threading.Event()

    def watch() -> None:
        while os.getppid() == parent_pid:
            never.wait(CHECK_S)
        os.kill(os.getpid(), signal.SIGTERM)
        never.wait(5.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()

"""Starting an environment process, and guarding it: whatever becomes of the agent, it is not left behind.

- It leads a process group. Beside it, in that group, waits its warden: a shell at the far end of a pipe that only the
  agent holds open, which kills the group when that closes. The process itself may be stuck by then, holding the
  interpreter's lock, and what it has started would not hear of its end.
- Its environment variables are ours without our secrets and our Python's settings.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ...fabric.errors import ConfigError
from ...fabric.limits import SNAPSHOT_BYTES_MAX

MAIN = Path(__file__).with_name("process_main.py")
WARDEN = ("/bin/sh", "-c", "read _; kill -9 0")  # reads until the pipe closes, then ends its own process group
NICENESS = 5  # of users' code: it gives way to the agents and workers of everybody
THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ANSWER_BYTES_MAX = SNAPSHOT_BYTES_MAX  # of any answer, before it is looked at


@dataclass(frozen=True, slots=True)
class Program:
    """What a process of a user's code runs: "module:attr", by an interpreter; None is our own."""

    target: str
    python: str | None = None
    decoder: str | None = None
    """What makes a reward function's rollout of its bytes, as "module:attr"; None: the target is an environment."""
    memory_bytes_max: int | None = None
    """Memory that it may write to (RLIMIT_DATA); None: as much as there is."""
    niceness: int = 0
    """By how much it gives way to others for the processors, [0, 19]."""
    owner: str = ""
    """Whose it is: processes serve programs of one owner alone."""

    def path(self) -> list[str]:
        """Where modules are found besides the interpreter's own places.

        Beside the user; for our own interpreter where we look, in our order: a name means the same there as here.
        """
        return [each for each in sys.path if each] if self.python is None else [os.getcwd()]

    def variables(self) -> dict[str, str]:
        """The process's environment variables: ours without our secrets and our Python's settings.

        Strings hash alike in every process: an environment that walks through a set replays elsewhere as it went here.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ROLLFAB_", "PYTHON")) and name != "VIRTUAL_ENV"
        }
        threads = {} if self.decoder is None else dict.fromkeys(THREAD_COUNTS, "1")  # many processes share the cores
        return {**threads, **kept, "PYTHONHASHSEED": "0"}


def give_way(pid: int, niceness: int) -> None:
    """Let a process, if it is there, and what it starts have less of the processors than others."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)


Spawned = tuple["subprocess.Popen[bytes]", "subprocess.Popen[bytes] | None"]  # the process, and its warden


def spawn(program: Program, channel: int, say: int, liveness: int) -> Spawned:
    """Start a process and its warden.

    Args:
        program: what the process will be asked to load.
        channel: its descriptor 0.
        say: where it prints to.
        liveness: read end of a pipe whose other end is open as long as this agent lives.

    Raises:
        ConfigError: the interpreter, or the warden's shell, cannot be started.
    """
    limit = str(program.memory_bytes_max or 0)
    words = [program.python or sys.executable, "-s", str(MAIN), str(ANSWER_BYTES_MAX), limit]
    try:
        process = subprocess.Popen(
            words, stdin=channel, stdout=say, stderr=say, env=program.variables(), process_group=0
        )
    except OSError as error:
        raise ConfigError(f"its process cannot be started: {error}") from error
    if program.niceness:
        give_way(process.pid, program.niceness)
    quiet = subprocess.DEVNULL
    try:
        return process, subprocess.Popen(
            WARDEN, stdin=liveness, stdout=quiet, stderr=quiet, env={}, process_group=process.pid
        )
    except (ProcessLookupError, PermissionError):  # it has died, and its group with it: the first call will say so
        return process, None
    except OSError as error:
        process.kill()
        process.wait()
        raise ConfigError(f"its process cannot be guarded: {error}") from error
